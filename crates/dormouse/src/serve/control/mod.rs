//! The control plane: who asks, what is asked, and the table of handlers.
//!
//! A handler runs in a task of its own: a client that goes away in the middle of a pause does not
//! leave it half-done, and a panic ends that task only.

mod extract;
mod lifecycle;
mod listing;
mod node;
mod observe;
mod ours;
mod sandboxes;
mod templates;
mod templates_ours;

use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::body::Body;
use axum::routing::{delete, get, post, put};
use bytes::Bytes;
use dormouse_api::endpoints::NOT_IMPLEMENTED;
use dormouse_api::error::ApiError;
use http::header::AUTHORIZATION;
use http::request::Parts;
use http::{Method, Request, StatusCode, Uri};
use http_body::Body as _;
use http_body_util::{BodyExt, LengthLimitError, Limited};
use hyper::body::Incoming;
use tower::ServiceExt;

use super::app::{App, Caller, Requests};
use super::reply::{self, Failure, Outcome, Reply};

/// A control request's body; a template build's context has a bound of its own.
pub const BODY_BYTES_MAX: usize = 1 << 20;
/// A body that stops arriving.
const BODY_TIMEOUT: Duration = Duration::from_secs(30);
/// What is read of a refused request, so that its connection can stay open.
const DRAIN_BYTES_MAX: usize = 256 << 10;
const DRAIN_TIMEOUT: Duration = Duration::from_secs(2);

/// The one request whose body is not JSON and not small.
const BUILD_PATH: &str = "/dormouse/v1/templates";

pub use templates_ours::UPLOADS_DIR;

pub async fn handle(app: &App, router: &Router, request: Request<Incoming>) -> Reply {
    if request.uri().path() == "/health" {
        return health(request).await;
    }
    let caller = match authenticate(app, &request).await {
        Ok(caller) => caller,
        Err(error) => return refuse(request, &error).await,
    };
    let (mut parts, body) = request.into_parts();
    parts.extensions.insert(caller);
    let body = if parts.method == Method::POST && parts.uri.path() == BUILD_PATH {
        Body::new(body)
    } else {
        match whole(&parts, body).await {
            Ok(body) => Body::from(body),
            // The rest of the body is read by nobody.
            Err(error) => return reply::closing(reply::failure(&error)),
        }
    };
    let answering = router.clone().oneshot(Request::from_parts(parts, body));
    match tokio::spawn(answering).await {
        Ok(Ok(reply)) => reply,
        Ok(Err(never)) => match never {},
        Err(error) => {
            Requests::count(&app.requests.panicked);
            tracing::error!(%error, "a request to the control plane panicked");
            reply::failure(&ApiError::internal("this request hit a defect of the server; see its log"))
        }
    }
}

async fn health(request: Request<Incoming>) -> Reply {
    if matches!(*request.method(), Method::GET | Method::HEAD) {
        return reply::empty(StatusCode::NO_CONTENT);
    }
    refuse(request, &ApiError::new(405, "method_not_allowed", "use GET on /health")).await
}

/// Answers without having read the body, and leaves the connection in order.
pub async fn refuse(request: Request<Incoming>, error: &ApiError) -> Reply {
    let drained = drain(request.into_body()).await;
    let reply = reply::failure(error);
    if drained { reply } else { reply::closing(reply) }
}

/// Reads a little more of a body; false: there is still some.
pub async fn drain(body: Incoming) -> bool {
    if body.is_end_stream() {
        return true;
    }
    let rest = Limited::new(body, DRAIN_BYTES_MAX).collect();
    matches!(tokio::time::timeout(DRAIN_TIMEOUT, rest).await, Ok(Ok(_)))
}

async fn whole(parts: &Parts, body: Incoming) -> Result<Bytes, ApiError> {
    let too_large = || {
        let message = format!(
            "the request body of {} {} is larger than {BODY_BYTES_MAX} bytes",
            parts.method,
            parts.uri.path()
        );
        ApiError::new(413, "body_too_large", message)
    };
    if let Some(encoding) = parts.headers.get("content-encoding").filter(|given| *given != "identity") {
        let why = format!("{encoding:?} is not understood; send the body as it is");
        return Err(ApiError::new(415, "unsupported_encoding", format!("Content-Encoding: {why}")));
    }
    if body.size_hint().lower() > BODY_BYTES_MAX as u64 {
        return Err(too_large());
    }
    let read = Limited::new(body, BODY_BYTES_MAX).collect();
    match tokio::time::timeout(BODY_TIMEOUT, read).await {
        Ok(Ok(collected)) => Ok(collected.to_bytes()),
        Ok(Err(error)) if error.is::<LengthLimitError>() => Err(too_large()),
        Ok(Err(error)) => {
            Err(ApiError::new(400, "invalid_request", format!("the request body broke off: {error}")))
        }
        Err(_) => Err(ApiError::new(
            408,
            "timeout",
            format!("the request body did not arrive within {} s", BODY_TIMEOUT.as_secs()),
        )),
    }
}

/// `X-API-KEY`, or the same key as a bearer token.
async fn authenticate(app: &App, request: &Request<Incoming>) -> Result<Caller, ApiError> {
    let headers = request.headers();
    let bearer = || {
        let value = headers.get(AUTHORIZATION)?.to_str().ok()?;
        value.strip_prefix("Bearer ").or_else(|| value.strip_prefix("bearer "))
    };
    let given = headers.get("x-api-key").and_then(|value| value.to_str().ok()).or_else(bearer);
    let Some(secret) = given.map(str::trim).filter(|secret| !secret.is_empty()) else {
        return Err(ApiError::unauthorized(
            "no API key: send it as X-API-KEY; `dormouse key create` makes one",
        ));
    };
    match app.node.key_verify(secret).await {
        Ok(Some(key)) => Ok(Caller { key: key.id, secret: secret.to_owned() }),
        Ok(None) => Err(ApiError::unauthorized(
            "this API key is not known here; `dormouse key ls` lists those that are",
        )),
        Err(error) => Err(reply::from_node(&error)),
    }
}

/// The table of handlers, made once.
pub fn router(app: &Arc<App>) -> Router {
    e2b()
        .merge(dormouse())
        .merge(not_implemented())
        .fallback(no_such_path)
        .method_not_allowed_fallback(no_such_method)
        .with_state(Arc::clone(app))
}

fn e2b() -> Router<Arc<App>> {
    Router::new()
        .route("/sandboxes", post(sandboxes::create_v1).get(listing::running))
        .route("/v2/sandboxes", post(sandboxes::create_v2).get(listing::page))
        .route("/sandboxes/metrics", get(observe::metrics_of_many))
        .route("/sandboxes/{id}", get(sandboxes::get).delete(sandboxes::kill))
        .route("/sandboxes/{id}/timeout", post(lifecycle::timeout))
        .route("/sandboxes/{id}/refreshes", post(lifecycle::refresh))
        .route("/sandboxes/{id}/pause", post(lifecycle::pause))
        .route("/sandboxes/{id}/resume", post(lifecycle::resume))
        .route("/sandboxes/{id}/connect", post(lifecycle::connect_v1))
        .route("/v2/sandboxes/{id}/connect", post(lifecycle::connect_v2))
        .route("/sandboxes/{id}/snapshots", post(lifecycle::snapshot))
        .route("/sandboxes/{id}/fork", post(lifecycle::fork))
        .route("/sandboxes/{id}/network", put(sandboxes::network))
        .route("/sandboxes/{id}/metrics", get(observe::metrics))
        .route("/sandboxes/{id}/logs", get(observe::logs))
        .route("/v2/sandboxes/{id}/logs", get(observe::logs_v2))
        .route("/snapshots", get(listing::snapshots))
        .route("/templates", get(templates::list))
        .route("/v2/templates", get(templates::list))
        .route("/templates/{id}", get(templates::get).delete(templates::remove))
        .route("/templates/aliases/{alias}", get(templates::alias))
        .route("/teams", get(observe::teams))
        .route("/metrics", get(observe::prometheus))
}

fn dormouse() -> Router<Arc<App>> {
    let ours = Router::new()
        .route("/node", get(node::info))
        .route("/doctor", get(node::doctor))
        .route("/gc", post(node::gc))
        .route("/events", get(node::events))
        .route("/keys", get(node::keys).post(node::key_create))
        .route("/keys/{id}", delete(node::key_rm))
        .route("/lineage", get(ours::lineage_of_all))
        .route("/sandboxes", get(ours::list))
        .route("/sandboxes/{id}", get(ours::get))
        .route("/sandboxes/{id}/pause", post(ours::pause))
        .route("/sandboxes/{id}/resume", post(ours::resume))
        .route("/sandboxes/{id}/checkpoint", post(ours::checkpoint))
        .route("/sandboxes/{id}/fork", post(ours::fork))
        .route("/sandboxes/{id}/rollback", post(ours::rollback))
        .route("/sandboxes/{id}/freeze", post(ours::freeze))
        .route("/sandboxes/{id}/thaw", post(ours::thaw))
        .route("/sandboxes/{id}/idle", post(ours::idle))
        .route("/sandboxes/{id}/receipts", get(ours::receipts))
        .route("/sandboxes/{id}/lineage", get(ours::lineage))
        .route("/snapshots", get(ours::snapshots))
        .route("/snapshots/{id}", get(ours::snapshot).delete(ours::snapshot_rm))
        .route("/templates", get(templates_ours::list).post(templates_ours::build))
        .route("/templates/{id}", get(templates_ours::get).delete(templates_ours::remove));
    Router::new().nest(dormouse_api::dormouse::PREFIX, ours)
}

/// E2B's that this release does not have: known, and said so.
fn not_implemented() -> Router<Arc<App>> {
    let mut router = Router::new();
    for (method, path) in NOT_IMPLEMENTED {
        let handler = match *method {
            "POST" => post(absent),
            "DELETE" => delete(absent),
            "PATCH" => axum::routing::patch(absent),
            _ => get(absent),
        };
        // Every name of a segment is the same here, as the other tables' are.
        let path = path.replace("{templateID}", "{id}");
        router = router.route(&path, handler);
    }
    router
}

async fn absent(method: Method, uri: Uri) -> Outcome {
    let path = uri.path();
    let instead = if path.contains("template") {
        "build templates with `dormouse template build`"
    } else {
        "this server has neither volumes nor secrets"
    };
    Err(Failure(ApiError::not_implemented(format!("{method} {path} is not implemented: {instead}"))))
}

async fn no_such_path(method: Method, uri: Uri) -> Outcome {
    let message = format!("there is no {method} {} here; openapi.json lists what there is", uri.path());
    Err(Failure(ApiError::not_found(message)))
}

async fn no_such_method(method: Method, uri: Uri) -> Outcome {
    let message = format!("{} does not take {method}; openapi.json lists what it takes", uri.path());
    Err(Failure(ApiError::new(405, "method_not_allowed", message)))
}
