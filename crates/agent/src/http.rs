//! envd's routes, put together, and HTTP served on any byte stream.

use std::pin::Pin;
use std::task::{Context, Poll};

use axum::Router;
use axum::body::{Body, Bytes};
use axum::extract::{Request, State};
use axum::middleware::{self, Next};
use axum::response::Response;
use axum::routing::get;
use http::StatusCode;
use http_body::{Body as HttpBody, Frame, SizeHint};
use hyper_util::rt::TokioIo;
use hyper_util::service::TowerToHyperService;
use tokio::io::{AsyncRead, AsyncWrite};

use crate::context::{Counted, Ctx};
use crate::{auth, files, filesystem, metrics, process};

/// The two services that the carrier offers by port.
#[derive(Clone)]
pub struct Services {
    /// `CONNECT 49983`.
    pub envd: Router,
    /// `CONNECT 1`: for the host alone.
    pub control: Router,
}

/// envd.
pub fn envd(ctx: &Ctx) -> Router {
    Router::new()
        .route("/health", get(async || StatusCode::NO_CONTENT))
        .merge(metrics::router(ctx.clone()))
        .merge(process::router(ctx.clone()))
        .merge(filesystem::router(ctx.clone()))
        .merge(files::router(ctx.clone()))
        .layer(middleware::from_fn_with_state(ctx.clone(), auth::require_token))
        .layer(middleware::from_fn_with_state(ctx.clone(), count))
}

/// Serves HTTP/1.1 on one stream until the peer closes it.
pub async fn serve_stream<S>(stream: S, router: Router)
where
    S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
{
    let served = hyper::server::conn::http1::Builder::new()
        .serve_connection(TokioIo::new(stream), TowerToHyperService::new(router))
        .with_upgrades()
        .await;
    if let Err(error) = served {
        tracing::debug!(%error, "a connection broke");
    }
}

/// Counts requests until their answer's last byte; `/health` is a poll and keeps nothing awake.
async fn count(State(ctx): State<Ctx>, request: Request, next: Next) -> Response {
    if matches!(request.uri().path(), "/health" | "/metrics") {
        return next.run(request).await;
    }
    let counted = ctx.begin_request();
    next.run(request).await.map(|inner| Body::new(CountedBody { inner, _counted: counted }))
}

struct CountedBody {
    inner: Body,
    _counted: Counted,
}

impl HttpBody for CountedBody {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, axum::Error>>> {
        Pin::new(&mut self.inner).poll_frame(cx)
    }

    fn is_end_stream(&self) -> bool {
        self.inner.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.inner.size_hint()
    }
}
