//! The data plane: one request, carried to a port of a sandbox and its answer back, as streams.
//!
//! Invariants: nothing is buffered beyond one piece in each direction; the answer's head is the
//! service's, without hop-by-hop fields; an answer that breaks off breaks the client's connection, so
//! that it cannot be taken for whole; a request is sent a second time only when the service cannot
//! have acted on the first.

use std::sync::Arc;

use axum::body::Body;
use dormouse_api::error::ApiError;
use dormouse_node::model::{IdlePolicy, Ingress, Purpose, State};
use dormouse_node::{Node, StreamError};
use dormouse_types::{Generation, SandboxId};
use dormouse_wire::stream::{CONTROL_PORT, ENVD_PORT};
use http::header::{CONNECTION, EXPECT, HOST, UPGRADE};
use http::request::Parts;
use http::uri::Authority;
use http::{HeaderMap, HeaderName, HeaderValue, Method, Request, Response, StatusCode, Uri, Version};
use hyper::body::Incoming;
use hyper::client::conn::http1;
use hyper::upgrade::OnUpgrade;
use hyper_util::rt::TokioIo;
use serde_json::json;
use sha2::{Digest, Sha256};
use tokio::net::UnixStream;
use tokio_util::sync::CancellationToken;

use super::body::{AnswerBody, Kept, Lender, RequestBody};
use super::pool::{Key, Pool, Sender};
use super::reply::{self, Reply};

/// A kept connection may have gone stale, and a transition may break one more.
const ATTEMPTS_MAX: usize = 3;
const HEADERS_MAX: usize = 256;

/// Carries the token of a sandbox whose ports are not for everybody.
const TRAFFIC_TOKEN_HEADER: &str = "e2b-traffic-access-token";
/// As long as a host name may be.
const HOST_BYTES_MAX: usize = 253;

/// Fields that are about one connection only (RFC 9110 §7.6.1), and the keys to get here, which a
/// service in a sandbox must never see.
const NOT_FORWARDED: [HeaderName; 11] = [
    HeaderName::from_static("keep-alive"),
    HeaderName::from_static("proxy-connection"),
    HeaderName::from_static("proxy-authenticate"),
    HeaderName::from_static("proxy-authorization"),
    HeaderName::from_static("te"),
    HeaderName::from_static("transfer-encoding"),
    HeaderName::from_static("x-api-key"),
    HeaderName::from_static(TRAFFIC_TOKEN_HEADER),
    CONNECTION,
    UPGRADE,
    EXPECT,
];

/// What the data plane needs of a node, and nothing more.
pub trait Inside: Send + Sync + 'static {
    /// A byte stream to a port inside; waits while the sandbox is in transition.
    fn stream(
        &self,
        id: &SandboxId,
        port: u16,
    ) -> impl Future<Output = Result<UnixStream, StreamError>> + Send;

    fn runs(&self, id: &SandboxId) -> impl Future<Output = bool> + Send;

    /// What the ports of a sandbox ask for; nothing when it is gone.
    fn ingress(&self, id: &SandboxId) -> impl Future<Output = Ingress> + Send;

    /// The generation of a sandbox whose connections may be kept; `None`: it does not run, is gone,
    /// or is to fall asleep when nothing is open.
    fn keepable(&self, id: &SandboxId) -> impl Future<Output = Option<Generation>> + Send;
}

impl Inside for Arc<Node> {
    async fn stream(&self, id: &SandboxId, port: u16) -> Result<UnixStream, StreamError> {
        Node::stream(self, id, port, Purpose::NoWake).await
    }

    async fn runs(&self, id: &SandboxId) -> bool {
        self.get(id).await.is_ok_and(|info| info.state == State::Running)
    }

    async fn ingress(&self, id: &SandboxId) -> Ingress {
        self.get(id).await.map(|info| info.ingress).unwrap_or_default()
    }

    async fn keepable(&self, id: &SandboxId) -> Option<Generation> {
        let info = self.get(id).await.ok()?;
        // An open connection would keep a sandbox awake that has an idle policy.
        let kept = info.state == State::Running && info.idle == IdlePolicy::default();
        kept.then_some(info.generation)
    }
}

/// The way into sandboxes.
pub struct Gate<I> {
    pub inside: I,
    pub pool: Arc<Pool>,
    /// Cancelled when the daemon goes: connections that switched protocols have no other end.
    pub going: CancellationToken,
}

pub async fn handle<I: Inside>(
    gate: &Gate<I>,
    id: &SandboxId,
    port: u16,
    request: Request<Incoming>,
) -> Reply {
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
    if port != ENVD_PORT {
        let ingress = gate.inside.ingress(id).await;
        if ingress.token.as_ref().is_some_and(|token| !carries(&parts.headers, token)) {
            return kept.refused(token_missing(id, port)).await;
        }
        if let Some(host) = ingress.host.as_deref().and_then(|mask| masked_host(mask, port)) {
            tell_host(&mut parts, host);
        }
    }
    match exchange(gate, id, port, &parts, &kept, upgrade.is_some()).await {
        Ok((answer, sender, key)) => forward(gate, answer, sender, key, &kept, upgrade),
        Err(refusal) => kept.refused(refusal).await,
    }
}

/// Compares digests: how far a guess is right cannot be timed.
fn carries(headers: &HeaderMap, token: &str) -> bool {
    let given = headers.get(TRAFFIC_TOKEN_HEADER).map_or(&[][..], HeaderValue::as_bytes);
    Sha256::digest(given) == Sha256::digest(token.as_bytes())
}

/// The host of a mask for this port; `None`: it is none.
pub fn masked_host(mask: &str, port: u16) -> Option<HeaderValue> {
    let host = mask.replace("${PORT}", &port.to_string());
    let is_host = host.len() <= HOST_BYTES_MAX && !host.contains('@') && host.parse::<Authority>().is_ok();
    HeaderValue::from_str(&host).ok().filter(|_| is_host)
}

fn tell_host(parts: &mut Parts, host: HeaderValue) {
    // A host in the request's target would win.
    if parts.uri.authority().is_some()
        && let Some(path) = parts.uri.path_and_query()
    {
        parts.uri = Uri::from(path.clone());
    }
    parts.headers.insert(HOST, host);
}

/// Sends the request and waits for the answer's head.
async fn exchange<I: Inside>(
    gate: &Gate<I>,
    id: &SandboxId,
    port: u16,
    parts: &Parts,
    kept: &Kept,
    upgrade: bool,
) -> Result<(Response<Incoming>, Sender, Option<Key>), Reply> {
    let mut why = String::new();
    for attempt in 0..ATTEMPTS_MAX {
        let key = pool_key(gate, id, port).await;
        let pooled = key.as_ref().filter(|_| attempt == 0).and_then(|key| gate.pool.take(key));
        let mut sender = match pooled {
            Some(sender) => sender,
            None => connect(gate, id, port).await?,
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
    Err(broken_off(gate, id, &why).await)
}

/// Connections are kept for running sandboxes only: one that sleeps is woken by a new stream.
async fn pool_key<I: Inside>(gate: &Gate<I>, id: &SandboxId, port: u16) -> Option<Key> {
    let generation = gate.inside.keepable(id).await?;
    Some(Key { sandbox: id.clone(), port, generation })
}

async fn connect<I: Inside>(gate: &Gate<I>, id: &SandboxId, port: u16) -> Result<Sender, Reply> {
    let stream = gate.inside.stream(id, port).await.map_err(|error| match error {
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
fn forward<I>(
    gate: &Gate<I>,
    mut answer: Response<Incoming>,
    sender: Sender,
    key: Option<Key>,
    kept: &Kept,
    upgrade: Option<OnUpgrade>,
) -> Reply {
    if answer.status() == StatusCode::SWITCHING_PROTOCOLS {
        return switch(gate, &mut answer, upgrade);
    }
    let (mut parts, body) = answer.into_parts();
    parts.headers = end_to_end(&parts.headers);
    parts.version = Version::HTTP_11;
    let unread = !kept.ended() && parts.status.as_u16() >= 400;
    let lender = key.map(|key| Lender { pool: Arc::clone(&gate.pool), key, sender });
    let body = AnswerBody::new(body, lender);
    let reply = Response::from_parts(parts, Body::new(body));
    // The service answered without reading on; what the client still sends is read by nobody.
    if unread { reply::closing(reply) } else { reply }
}

/// Joins the two connections once both have switched.
fn switch<I>(gate: &Gate<I>, answer: &mut Response<Incoming>, upgrade: Option<OnUpgrade>) -> Reply {
    let Some(client) = upgrade else {
        let error =
            ApiError::new(502, "bad_gateway", "the service switched protocols without being asked to");
        return reply::failure(&error);
    };
    let service = hyper::upgrade::on(&mut *answer);
    let going = gate.going.clone();
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

fn token_missing(id: &SandboxId, port: u16) -> Reply {
    let message = "The ports of this sandbox are not public: send its traffic access token in the header \
                   e2b-traffic-access-token";
    reply::json(403, &json!({"sandboxId": id, "message": message, "port": port, "code": 403}))
}

fn unreachable(id: &SandboxId, why: &str) -> Reply {
    let message = format!("The sandbox could not be reached: {why}");
    reply::json(502, &json!({"sandboxId": id, "message": message, "code": 502}))
}

async fn broken_off<I: Inside>(gate: &Gate<I>, id: &SandboxId, why: &str) -> Reply {
    if gate.inside.runs(id).await {
        unreachable(id, &format!("the service ended the connection without an answer ({why})"))
    } else {
        not_found(id)
    }
}

#[cfg(test)]
#[path = "proxy_tests.rs"]
mod tests;
