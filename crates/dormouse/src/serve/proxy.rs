//! The data plane: one request, carried to a port of a sandbox and its answer back, as streams.
//!
//! Invariants: nothing is buffered beyond one piece in each direction; the answer's head is the
//! service's, without hop-by-hop fields; an answer that breaks off breaks the client's connection, so
//! that it cannot be taken for whole; a request is sent a second time only when the service cannot
//! have acted on the first.

use std::pin::Pin;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll};

use axum::body::Body;
use bytes::Bytes;
use dormouse_api::error::ApiError;
use dormouse_node::StreamError;
use dormouse_node::model::{ListQuery, Purpose, State, StateFilter};
use dormouse_types::SandboxId;
use dormouse_wire::stream::{CONTROL_PORT, ENVD_PORT};
use http::header::{CONNECTION, EXPECT, HOST, UPGRADE};
use http::request::Parts;
use http::{HeaderMap, HeaderName, HeaderValue, Method, Request, Response, StatusCode, Uri, Version};
use http_body::{Body as _, Frame, SizeHint};
use hyper::body::Incoming;
use hyper::client::conn::http1;
use hyper::upgrade::OnUpgrade;
use hyper_util::rt::TokioIo;
use serde_json::json;

use super::app::App;
use super::control;
use super::pool::{Key, Sender};
use super::reply::{self, Reply};
use super::signed::Signed;

/// A kept connection may have gone stale, and a transition may break one more.
const ATTEMPTS_MAX: usize = 3;
const HEADERS_MAX: usize = 256;

/// Fields that are about one connection only (RFC 9110 §7.6.1), and the control plane's key, which a
/// service in a sandbox must never see.
const NOT_FORWARDED: [HeaderName; 10] = [
    HeaderName::from_static("keep-alive"),
    HeaderName::from_static("proxy-connection"),
    HeaderName::from_static("proxy-authenticate"),
    HeaderName::from_static("proxy-authorization"),
    HeaderName::from_static("te"),
    HeaderName::from_static("transfer-encoding"),
    HeaderName::from_static("x-api-key"),
    CONNECTION,
    UPGRADE,
    EXPECT,
];

pub async fn handle(app: &Arc<App>, id: &SandboxId, port: u16, request: Request<Incoming>) -> Reply {
    let (mut parts, body) = request.into_parts();
    let upgrade = wants_upgrade(&parts.headers).then(|| parts.extensions.remove::<OnUpgrade>()).flatten();
    let kept = Kept::new(body);
    if port == CONTROL_PORT {
        return kept.refused(port_closed(id, port)).await;
    }
    if parts.method == Method::CONNECT {
        let error =
            ApiError::new(405, "method_not_allowed", "CONNECT is not spoken here; use plain requests");
        return kept.refused(reply::failure(&error)).await;
    }
    match exchange(app, id, port, &parts, &kept, upgrade.is_some()).await {
        Ok((answer, sender, key)) => forward(app, answer, sender, key, &kept, upgrade),
        Err(refusal) => kept.refused(refusal).await,
    }
}

/// A file URL that names no sandbox: the one whose token signed it is meant.
pub async fn handle_signed(app: &Arc<App>, request: Request<Incoming>) -> Reply {
    let invalid = ApiError::unauthorized("invalid signature");
    let Some(signed) = Signed::parse(request.method(), request.uri().query()) else {
        return control::refuse(request, &invalid).await;
    };
    match signer(app, &signed).await {
        Ok(Some(id)) => handle(app, &id, ENVD_PORT, request).await,
        Ok(None) => control::refuse(request, &invalid).await,
        Err(error) => control::refuse(request, &error).await,
    }
}

async fn signer(app: &App, signed: &Signed) -> Result<Option<SandboxId>, ApiError> {
    let states = vec![StateFilter::Running, StateFilter::Paused];
    let mut query = ListQuery { states, ..ListQuery::default() };
    loop {
        let (sandboxes, next) =
            app.node.list(query.clone()).await.map_err(|error| reply::from_node(&error))?;
        if let Some(found) = sandboxes.into_iter().find(|sandbox| signed.made_with(&sandbox.access_token)) {
            return Ok(Some(found.id));
        }
        match next {
            Some(next) => query.cursor = Some(next),
            None => return Ok(None),
        }
    }
}

/// Sends the request and waits for the answer's head.
async fn exchange(
    app: &Arc<App>,
    id: &SandboxId,
    port: u16,
    parts: &Parts,
    kept: &Kept,
    upgrade: bool,
) -> Result<(Response<Incoming>, Sender, Option<Key>), Reply> {
    let mut why = String::new();
    for attempt in 0..ATTEMPTS_MAX {
        let key = pool_key(app, id, port).await;
        let pooled = key.as_ref().filter(|_| attempt == 0).and_then(|key| app.pool.take(key));
        let mut sender = match pooled {
            Some(sender) => sender,
            None => connect(app, id, port).await?,
        };
        let request = outgoing(parts, kept.body(), upgrade)
            .map_err(|why| reply::failure(&ApiError::new(400, "invalid_request", why)))?;
        match sender.try_send_request(request).await {
            Ok(answer) => return Ok((answer, sender, key)),
            Err(mut error) => {
                let unsent = error.take_message().is_some();
                why = error.error().to_string();
                tracing::debug!(sandbox = %id, port, unsent, %why, "a request into a sandbox broke off");
                if !unsent && !kept.can_be_repeated(&parts.method) {
                    break;
                }
            }
        }
    }
    Err(broken_off(app, id, &why).await)
}

/// Connections are kept for running sandboxes only: one that sleeps is woken by a new stream.
async fn pool_key(app: &App, id: &SandboxId, port: u16) -> Option<Key> {
    let info = app.node.get(id).await.ok()?;
    matches!(info.state, State::Running).then(|| Key {
        sandbox: id.clone(),
        port,
        generation: info.generation,
    })
}

async fn connect(app: &App, id: &SandboxId, port: u16) -> Result<Sender, Reply> {
    let stream = app.node.stream(id, port, Purpose::NoWake).await.map_err(|error| match error {
        StreamError::NotFound(_) | StreamError::Paused(_) => not_found(id),
        StreamError::PortClosed(_) => port_closed(id, port),
        StreamError::Failed(why) => unreachable(id, &why),
    })?;
    let (sender, connection) = http1::Builder::new()
        .max_headers(HEADERS_MAX)
        .handshake(TokioIo::new(stream))
        .await
        .map_err(|error| unreachable(id, &error.to_string()))?;
    tokio::spawn(async move {
        if let Err(error) = connection.with_upgrades().await {
            tracing::debug!(%error, "a connection into a sandbox ended early");
        }
    });
    Ok(sender)
}

fn wants_upgrade(headers: &HeaderMap) -> bool {
    headers.contains_key(UPGRADE)
        && connection_tokens(headers).any(|token| token.eq_ignore_ascii_case("upgrade"))
}

fn connection_tokens(headers: &HeaderMap) -> impl Iterator<Item = &str> {
    let values = headers.get_all(CONNECTION).into_iter().filter_map(|value| value.to_str().ok());
    values.flat_map(|value| value.split(',')).map(str::trim)
}

/// Takes out what concerns one connection only.
fn end_to_end(headers: &HeaderMap) -> HeaderMap {
    let named: Vec<HeaderName> = connection_tokens(headers).filter_map(|token| token.parse().ok()).collect();
    let mut kept = headers.clone();
    for name in NOT_FORWARDED.iter().chain(&named) {
        kept.remove(name);
    }
    kept
}

fn outgoing(parts: &Parts, body: RequestBody, upgrade: bool) -> Result<Request<RequestBody>, String> {
    let mut headers = end_to_end(&parts.headers);
    if upgrade && let Some(protocol) = parts.headers.get(UPGRADE) {
        headers.insert(CONNECTION, HeaderValue::from_static("upgrade"));
        headers.insert(UPGRADE, protocol.clone());
    }
    if let Some(host) = parts.uri.authority().and_then(|host| HeaderValue::from_str(host.as_str()).ok()) {
        headers.insert(HOST, host);
    } else if !headers.contains_key(HOST) {
        headers.insert(HOST, HeaderValue::from_static("localhost"));
    }
    let path = parts.uri.path_and_query().map_or("/", |path| path.as_str());
    let mut request = Request::new(body);
    *request.method_mut() = parts.method.clone();
    *request.uri_mut() = path.parse::<Uri>().map_err(|error| format!("the path {path:?}: {error}"))?;
    *request.version_mut() = Version::HTTP_11;
    *request.headers_mut() = headers;
    Ok(request)
}

/// Hands the answer on, and the connection back once the answer is whole.
fn forward(
    app: &Arc<App>,
    mut answer: Response<Incoming>,
    sender: Sender,
    key: Option<Key>,
    kept: &Kept,
    upgrade: Option<OnUpgrade>,
) -> Reply {
    if answer.status() == StatusCode::SWITCHING_PROTOCOLS {
        return switch(app, &mut answer, upgrade);
    }
    let (mut parts, body) = answer.into_parts();
    parts.headers = end_to_end(&parts.headers);
    parts.version = Version::HTTP_11;
    let unread = !kept.ended() && parts.status.as_u16() >= 400;
    let mut body = AnswerBody { body, lender: key.map(|key| (Arc::clone(app), key, sender)) };
    body.give_back_at_end();
    let reply = Response::from_parts(parts, Body::new(body));
    // The service answered without reading on; what the client still sends is read by nobody.
    if unread { reply::closing(reply) } else { reply }
}

/// Joins the two connections once both have switched.
fn switch(app: &App, answer: &mut Response<Incoming>, upgrade: Option<OnUpgrade>) -> Reply {
    let Some(client) = upgrade else {
        let error =
            ApiError::new(502, "bad_gateway", "the service switched protocols without being asked to");
        return reply::failure(&error);
    };
    let service = hyper::upgrade::on(&mut *answer);
    let going = app.going.clone();
    tokio::spawn(async move {
        let joined = async {
            let (client, service) = tokio::try_join!(client, service)?;
            let (mut client, mut service) = (TokioIo::new(client), TokioIo::new(service));
            // Either end may break at any time; that is how such a connection ends.
            let ended = tokio::io::copy_bidirectional(&mut client, &mut service).await;
            tracing::debug!(?ended, "an upgraded connection ended");
            Ok::<(), hyper::Error>(())
        };
        tokio::select! {
            joined = joined => if let Err(error) = joined {
                tracing::debug!(%error, "an upgrade failed");
            },
            () = going.cancelled() => {}
        }
    });
    let mut reply = reply::empty(StatusCode::SWITCHING_PROTOCOLS);
    *reply.headers_mut() = end_to_end(answer.headers());
    reply.headers_mut().insert(CONNECTION, HeaderValue::from_static("upgrade"));
    if let Some(protocol) = answer.headers().get(UPGRADE) {
        reply.headers_mut().insert(UPGRADE, protocol.clone());
    }
    reply
}

// The words of these answers are matched by E2B's clients.

fn not_found(id: &SandboxId) -> Reply {
    reply::json(502, &json!({"sandboxId": id, "message": "The sandbox was not found", "code": 502}))
}

fn port_closed(id: &SandboxId, port: u16) -> Reply {
    let message = "The sandbox is running but port is not open";
    reply::json(502, &json!({"sandboxId": id, "message": message, "port": port, "code": 502}))
}

fn unreachable(id: &SandboxId, why: &str) -> Reply {
    let message = format!("The sandbox could not be reached: {why}");
    reply::json(502, &json!({"sandboxId": id, "message": message, "code": 502}))
}

async fn broken_off(app: &App, id: &SandboxId, why: &str) -> Reply {
    match app.node.get(id).await.map(|info| info.state) {
        Ok(State::Running) => {
            unreachable(id, &format!("the service ended the connection without an answer ({why})"))
        }
        _ => not_found(id),
    }
}

/// A request's body that can be given to a second connection as long as none has touched it.
#[derive(Clone)]
struct Kept(Arc<Slot>);

struct Slot {
    body: Mutex<Option<Incoming>>,
    hint: SizeHint,
    empty: bool,
    ended: AtomicBool,
}

impl Kept {
    fn new(body: Incoming) -> Self {
        let empty = body.is_end_stream();
        let slot = Slot {
            hint: body.size_hint(),
            empty,
            ended: AtomicBool::new(empty),
            body: Mutex::new(Some(body)),
        };
        Self(Arc::new(slot))
    }

    fn body(&self) -> RequestBody {
        RequestBody { slot: Arc::clone(&self.0), body: None }
    }

    fn take(&self) -> Option<Incoming> {
        self.0.body.lock().unwrap_or_else(PoisonError::into_inner).take()
    }

    fn ended(&self) -> bool {
        self.0.ended.load(Ordering::Acquire)
    }

    /// Whether a service that saw the head and nothing else can be asked again.
    fn can_be_repeated(&self, method: &Method) -> bool {
        let untouched = self.0.body.lock().unwrap_or_else(PoisonError::into_inner).is_some();
        untouched && (method.is_idempotent() || !self.0.empty)
    }

    /// An answer of our own: reads the rest of the body, or says that the connection ends.
    async fn refused(&self, reply: Reply) -> Reply {
        if self.ended() {
            return reply;
        }
        let drained = match self.take() {
            Some(body) => control::drain(body).await,
            None => false,
        };
        if drained { reply } else { reply::closing(reply) }
    }
}

/// What a connection into a sandbox is given as body.
pub struct RequestBody {
    slot: Arc<Slot>,
    body: Option<Incoming>,
}

impl http_body::Body for RequestBody {
    type Data = Bytes;
    type Error = hyper::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, hyper::Error>>> {
        if self.body.is_none() {
            let taken = self.slot.body.lock().unwrap_or_else(PoisonError::into_inner).take();
            self.body = taken;
        }
        let Some(body) = self.body.as_mut() else { return Poll::Ready(None) };
        let polled = Pin::new(&mut *body).poll_frame(context);
        let ended = matches!(polled, Poll::Ready(None)) || body.is_end_stream();
        if ended {
            self.slot.ended.store(true, Ordering::Release);
        }
        polled
    }

    fn is_end_stream(&self) -> bool {
        self.body.as_ref().map_or(self.slot.empty, Incoming::is_end_stream)
    }

    fn size_hint(&self) -> SizeHint {
        self.body.as_ref().map_or_else(|| self.slot.hint, Incoming::size_hint)
    }
}

/// An answer's body, which gives its connection back at its end.
struct AnswerBody {
    body: Incoming,
    lender: Option<(Arc<App>, Key, Sender)>,
}

impl AnswerBody {
    fn give_back_at_end(&mut self) {
        if self.body.is_end_stream()
            && let Some((app, key, sender)) = self.lender.take()
        {
            app.pool.put(key, sender);
        }
    }
}

impl http_body::Body for AnswerBody {
    type Data = Bytes;
    type Error = hyper::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, hyper::Error>>> {
        let polled = Pin::new(&mut self.body).poll_frame(context);
        if matches!(polled, Poll::Ready(None | Some(Ok(_)))) {
            self.give_back_at_end();
        }
        polled
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}
