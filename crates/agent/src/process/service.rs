//! The calls of `process.Process`.

use std::sync::Arc;

use axum::Router;
use axum::body::Body;
use axum::extract::State;
use axum::response::{IntoResponse as _, Response};
use axum::routing::post;
use dormouse_wire::envd::connect::{Code, Decoder, Error, STREAM_TYPE, end, message};
use dormouse_wire::envd::process::{
    CLOSE_STDIN, CONNECT, Empty, LIST, ListRequest, ListResponse, PtySize, REPLAY_FROM_HEADER,
    REPLAY_OFFSET_HEADER, SEND_INPUT, SEND_SIGNAL, START, STREAM_INPUT, SelectRequest, SendInputRequest,
    SendSignalRequest, Signal, StartRequest, StreamInputRequest, UPDATE, UpdateRequest,
};
use http::header::{CONNECTION, CONTENT_TYPE};
use http::{HeaderMap, HeaderValue};
use http_body_util::BodyExt as _;

use super::events::{Caller, events};
use super::output::Subscription;
use super::registry::Process;
use super::spawn::Plan;
use crate::context::Ctx;
use crate::{rpc, users};

const PTY_SIZE_DEFAULT: PtySize = PtySize { cols: 80, rows: 24 };

pub fn router(ctx: Ctx) -> Router {
    Router::new()
        .route(LIST, post(list))
        .route(START, post(start))
        .route(CONNECT, post(connect))
        .route(UPDATE, post(update))
        .route(SEND_INPUT, post(send_input))
        .route(STREAM_INPUT, post(stream_input))
        .route(CLOSE_STDIN, post(close_stdin))
        .route(SEND_SIGNAL, post(send_signal))
        .with_state(ctx)
}

async fn list(State(ctx): State<Ctx>, headers: HeaderMap, body: Body) -> Response {
    let request = rpc::read_unary::<ListRequest>(&headers, body).await;
    rpc::unary(request.map(|_| ListResponse { processes: ctx.processes().list() }))
}

async fn start(State(ctx): State<Ctx>, headers: HeaderMap, body: Body) -> Response {
    match try_start(&ctx, &headers, body).await {
        Ok((process, subscription)) => attached(&ctx, &headers, process, subscription, Caller::Start),
        Err(error) => rpc::stream_failed(error),
    }
}

async fn try_start(
    ctx: &Ctx,
    headers: &HeaderMap,
    body: Body,
) -> Result<(Arc<Process>, Subscription), Error> {
    let request: StartRequest = rpc::read_stream_request(headers, body).await?;
    let settings = ctx.settings();
    let plan = Plan {
        user: users::of_request(headers, &settings)?,
        config: request.process.ok_or_else(|| Error::invalid_argument("the request has no process"))?,
        pty: request.pty.map(|pty| pty.size.unwrap_or(PTY_SIZE_DEFAULT)),
        stdin: request.stdin.unwrap_or(true),
    };
    ctx.processes().start(&settings, plan, request.tag, rpc::timeout(headers))
}

async fn connect(State(ctx): State<Ctx>, headers: HeaderMap, body: Body) -> Response {
    let found = async {
        let request: SelectRequest = rpc::read_stream_request(&headers, body).await?;
        ctx.processes().find(request.process.as_ref())
    };
    match found.await {
        Ok(process) => {
            let from =
                headers.get(REPLAY_FROM_HEADER).and_then(|from| from.to_str().ok()?.trim().parse().ok());
            let subscription = process.output.subscribe(from);
            attached(&ctx, &headers, process, subscription, Caller::Connect { limit: rpc::timeout(&headers) })
        }
        Err(error) => rpc::stream_failed(error),
    }
}

fn attached(
    ctx: &Ctx,
    headers: &HeaderMap,
    process: Arc<Process>,
    subscription: Subscription,
    caller: Caller,
) -> Response {
    let offset = HeaderValue::from(subscription.start());
    let closing = ctx.processes().closing().clone();
    let frames = events(process, subscription, caller, rpc::keepalive(headers), closing);
    let mut response = rpc::stream(frames);
    response.headers_mut().insert(REPLAY_OFFSET_HEADER, offset);
    response
}

async fn update(State(ctx): State<Ctx>, headers: HeaderMap, body: Body) -> Response {
    let result = async {
        let request: UpdateRequest = rpc::read_unary(&headers, body).await?;
        let process = ctx.processes().find_running(request.process.as_ref())?;
        if let Some(size) = request.pty.and_then(|pty| pty.size) {
            process.resize(size)?;
        }
        Ok(Empty {})
    };
    rpc::unary(result.await)
}

async fn send_input(State(ctx): State<Ctx>, headers: HeaderMap, body: Body) -> Response {
    let result = async {
        let request: SendInputRequest = rpc::read_unary(&headers, body).await?;
        let process = ctx.processes().find_running(request.process.as_ref())?;
        process.write(&request.input.unwrap_or_default()).await?;
        Ok(Empty {})
    };
    rpc::unary(result.await)
}

async fn close_stdin(State(ctx): State<Ctx>, headers: HeaderMap, body: Body) -> Response {
    let result = async {
        let request: SelectRequest = rpc::read_unary(&headers, body).await?;
        ctx.processes().find_running(request.process.as_ref())?.close_stdin().await?;
        Ok(Empty {})
    };
    rpc::unary(result.await)
}

async fn send_signal(State(ctx): State<Ctx>, headers: HeaderMap, body: Body) -> Response {
    let result = async {
        let request: SendSignalRequest = rpc::read_unary(&headers, body).await?;
        let process = ctx.processes().find_running(request.process.as_ref())?;
        process.signal(match request.signal {
            Signal::Kill => rustix::process::Signal::KILL,
            Signal::Term => rustix::process::Signal::TERM,
            Signal::Unspecified => {
                return Err(Error::invalid_argument("the signal must be SIGNAL_SIGKILL or SIGNAL_SIGTERM"));
            }
        });
        Ok(Empty {})
    };
    rpc::unary(result.await)
}

async fn stream_input(State(ctx): State<Ctx>, headers: HeaderMap, body: Body) -> Response {
    let forwarding = forward_input(&ctx, &headers, body);
    let result = match rpc::timeout(&headers) {
        None => forwarding.await,
        Some(limit) => tokio::time::timeout(limit, forwarding)
            .await
            .unwrap_or_else(|_| Err(Error::deadline_exceeded("the time limit of this stream has passed"))),
    };
    match result {
        Ok(()) => {
            let frames = [message(&Empty {}), end(None)].concat();
            ([(CONTENT_TYPE, STREAM_TYPE)], frames).into_response()
        }
        Err(error) => {
            // The request's body was not read to its end: the connection cannot be used again.
            let mut response = rpc::stream_failed(error);
            response.headers_mut().insert(CONNECTION, HeaderValue::from_static("close"));
            response
        }
    }
}

async fn forward_input(ctx: &Ctx, headers: &HeaderMap, mut body: Body) -> Result<(), Error> {
    rpc::check_type(headers, STREAM_TYPE)?;
    let mut decoder = Decoder::default();
    let mut process: Option<Arc<Process>> = None;
    while let Some(part) = body.frame().await {
        let part = part.map_err(|why| Error::new(Code::Canceled, format!("the input broke off: {why}")))?;
        let Some(bytes) = part.data_ref() else { continue };
        decoder.push(bytes);
        while let Some(frame) = decoder.next_frame()? {
            if frame.is_end() {
                continue;
            }
            let event: StreamInputRequest = frame.parse()?;
            if let Some(start) = event.start {
                process = Some(ctx.processes().find_running(start.process.as_ref())?);
            } else if let Some(data) = event.data {
                let process = process
                    .as_ref()
                    .ok_or_else(|| Error::invalid_argument("the first message must be start"))?;
                process.write(&data.input.unwrap_or_default()).await?;
            }
        }
    }
    decoder.finish()?;
    Ok(())
}
