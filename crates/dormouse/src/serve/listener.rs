//! The listener: connections, their bounds, and the end of all of them.

use std::convert::Infallible;
use std::net::SocketAddr;
use std::panic::AssertUnwindSafe;
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use dormouse_api::error::ApiError;
use futures_util::FutureExt;
use http::Request;
use hyper::body::Incoming;
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::Semaphore;
use tokio_util::task::TaskTracker;

use super::app::{App, Requests};
use super::reply::{self, Reply};
use super::route::{Route, route};
use super::{ServeError, control, proxy, signed};

/// Connections at once; more wait in the kernel's backlog.
const CONNECTIONS_MAX: usize = 8192;
const HEADERS_MAX: usize = 128;
/// Bounds the head of a request; bodies are read in pieces of at most this.
const BUFFER_BYTES_MAX: usize = 256 << 10;
/// Longer than clients keep idle connections (300 s), so that it is they who close them: a request
/// that meets a closing connection is not repeated by E2B's clients.
const HEAD_TIMEOUT: Duration = Duration::from_secs(330);
/// For answers in flight when the daemon is told to go.
const DRAIN_TIMEOUT: Duration = Duration::from_secs(5);
/// After a failed accept (out of descriptors): descriptors come back when connections end.
const ACCEPT_PAUSE: Duration = Duration::from_millis(50);

pub async fn bind(listen: SocketAddr) -> Result<TcpListener, ServeError> {
    TcpListener::bind(listen).await.map_err(|source| match source.kind() {
        std::io::ErrorKind::AddrInUse => ServeError::InUse { listen },
        _ => ServeError::Listen { listen, source },
    })
}

/// Serves until `app.going` is cancelled, then lets what is in flight end.
pub async fn run(listener: TcpListener, app: Arc<App>) {
    let connections = TaskTracker::new();
    let permits = Arc::new(Semaphore::new(CONNECTIONS_MAX));
    let router = control::router(&app);
    loop {
        let accepted = async {
            let permit = Arc::clone(&permits).acquire_owned().await;
            (listener.accept().await, permit)
        };
        let (accepted, permit) = tokio::select! {
            () = app.going.cancelled() => break,
            accepted = accepted => accepted,
        };
        match accepted {
            Ok((stream, _)) => {
                let (app, router) = (Arc::clone(&app), router.clone());
                connections.spawn(async move {
                    connection(stream, app, router).await;
                    drop(permit);
                });
            }
            Err(error) => {
                tracing::warn!(%error, "a connection could not be accepted");
                tokio::time::sleep(ACCEPT_PAUSE).await;
            }
        }
    }
    drop(listener);
    connections.close();
    if tokio::time::timeout(DRAIN_TIMEOUT, connections.wait()).await.is_err() {
        tracing::info!(open = connections.len(), "connections were cut at the end of the grace period");
    }
}

async fn connection(stream: TcpStream, app: Arc<App>, router: Router) {
    // Small frames of streams would wait for acknowledgements otherwise.
    if let Err(error) = stream.set_nodelay(true) {
        tracing::debug!(%error, "TCP_NODELAY was refused");
    }
    let going = app.going.clone();
    let service = service_fn(move |request| answer(Arc::clone(&app), router.clone(), request));
    let connection = http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(HEAD_TIMEOUT)
        .max_headers(HEADERS_MAX)
        .max_buf_size(BUFFER_BYTES_MAX)
        .serve_connection(TokioIo::new(stream), service)
        .with_upgrades();
    let mut connection = std::pin::pin!(connection);
    let ended = tokio::select! {
        ended = connection.as_mut() => ended,
        () = going.cancelled() => {
            connection.as_mut().graceful_shutdown();
            connection.await
        }
    };
    if let Err(error) = ended {
        tracing::debug!(%error, "a connection ended early");
    }
}

/// Answers one request, whatever happens in it.
async fn answer(app: Arc<App>, router: Router, request: Request<Incoming>) -> Result<Reply, Infallible> {
    let head = format!("{} {}", request.method(), request.uri().path());
    let reply =
        AssertUnwindSafe(dispatch(&app, &router, request)).catch_unwind().await.unwrap_or_else(|_| {
            Requests::count(&app.requests.panicked);
            tracing::error!(request = %head, "a request panicked");
            reply::closing(reply::failure(&ApiError::internal(
                "this request hit a defect of the server; see its log",
            )))
        });
    if reply.status().is_server_error() {
        Requests::count(&app.requests.failed);
    }
    tracing::debug!(request = %head, status = reply.status().as_u16(), "answered");
    Ok(reply)
}

async fn dispatch(app: &Arc<App>, router: &Router, request: Request<Incoming>) -> Reply {
    let (parts, body) = request.into_parts();
    let to = route(&parts, &app.domain);
    let request = Request::from_parts(parts, body);
    match to {
        Route::Control => {
            Requests::count(&app.requests.control);
            control::handle(app, router, request).await
        }
        Route::Sandbox { id, port } => {
            Requests::count(&app.requests.data);
            proxy::handle(&app.gate, &id, port, request).await
        }
        Route::Signed => {
            Requests::count(&app.requests.data);
            signed::handle(app, request).await
        }
        Route::Invalid { why } => control::refuse(request, &ApiError::new(400, "invalid_request", why)).await,
    }
}
