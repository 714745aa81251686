//! HTTP/1.1 to the agent inside, over a stream of its keeper: the control service and envd.
//!
//! Invariants: every answer is bounded; nothing of the sandbox is believed beyond its JSON shape.

use std::path::Path;
use std::time::Duration;

use bytes::Bytes;
use dormouse_wire::control::{Quiesced, Stat, Wake, Woken};
use dormouse_wire::keeper_client::{ConnectError, connect_agent};
use dormouse_wire::stream::{CONTROL_PORT, ENVD_PORT};
use http::{Method, Request, Response, header};
use http_body_util::combinators::BoxBody;
use http_body_util::{BodyExt, Full, Limited};
use hyper::body::Incoming;
use hyper_util::rt::TokioIo;
use serde::de::DeserializeOwned;

/// Bodies that are read whole.
const BODY_BYTES_MAX: usize = 1 << 20;

#[derive(Debug, thiserror::Error)]
pub enum AgentError {
    #[error("the agent cannot be reached: {0}")]
    Connect(#[from] ConnectError),
    #[error("the agent did not answer {call} within {seconds} s")]
    Timeout { call: String, seconds: u64 },
    #[error("the call {call} to the agent broke: {why}")]
    Broken { call: String, why: String },
    #[error("the agent answered {call} with status {status}: {message}")]
    Status { call: String, status: u16, message: String },
}

pub struct Call<'a> {
    pub port: u16,
    pub method: Method,
    pub path: &'a str,
    pub token: Option<&'a str>,
    pub headers: &'a [(&'a str, String)],
    pub body: Body,
}

pub type Body = BoxBody<Bytes, std::io::Error>;

/// A body that is there whole.
pub fn whole(bytes: impl Into<Bytes>) -> Body {
    Full::new(bytes.into()).map_err(|never| match never {}).boxed()
}

/// Sends one request on a stream of its own; the answer's body is still to be read.
pub async fn send(dir: &Path, call: Call<'_>) -> Result<Response<Incoming>, AgentError> {
    let name = format!("{} {}", call.method, call.path.split('?').next().unwrap_or_default());
    let broken = |why: String| AgentError::Broken { call: name.clone(), why };
    let stream = connect_agent(dir, call.port).await?;
    let (mut sender, connection) = hyper::client::conn::http1::handshake(TokioIo::new(stream))
        .await
        .map_err(|error| broken(error.to_string()))?;
    tokio::spawn(async move {
        // Its error shows where the answer is awaited.
        drop(connection.await);
    });
    let mut request = Request::builder()
        .method(call.method)
        .uri(call.path)
        .header(header::HOST, "sandbox")
        .header(header::CONNECTION, "close");
    if let Some(token) = call.token {
        request = request.header("x-access-token", token);
    }
    for (key, value) in call.headers {
        request = request.header(*key, value);
    }
    let request = request.body(call.body).map_err(|error| broken(error.to_string()))?;
    let response = sender.send_request(request).await.map_err(|error| broken(error.to_string()))?;
    if response.status().is_success() {
        return Ok(response);
    }
    let status = response.status().as_u16();
    let body = read(response, &name).await.unwrap_or_default();
    let message = serde_json::from_slice::<serde_json::Value>(&body)
        .ok()
        .and_then(|value| value.get("message")?.as_str().map(str::to_owned))
        .unwrap_or_else(|| String::from_utf8_lossy(&body).chars().take(300).collect());
    Err(AgentError::Status { call: name, status, message })
}

/// The whole body, at most [`BODY_BYTES_MAX`].
pub async fn read(response: Response<Incoming>, call: &str) -> Result<Bytes, AgentError> {
    let body = Limited::new(response.into_body(), BODY_BYTES_MAX).collect().await;
    body.map(http_body_util::Collected::to_bytes)
        .map_err(|error| AgentError::Broken { call: call.to_owned(), why: error.to_string() })
}

async fn control<T: DeserializeOwned>(
    dir: &Path,
    method: Method,
    path: &str,
    body: Body,
    timeout: Duration,
) -> Result<T, AgentError> {
    let headers = [("content-type", "application/json".to_owned())];
    let call = Call { port: CONTROL_PORT, method, path, token: None, headers: &headers, body };
    let whole = async {
        let body = read(send(dir, call).await?, path).await?;
        serde_json::from_slice(&body)
            .map_err(|error| AgentError::Broken { call: path.to_owned(), why: error.to_string() })
    };
    match tokio::time::timeout(timeout, whole).await {
        Ok(result) => result,
        Err(_) => Err(AgentError::Timeout { call: path.to_owned(), seconds: timeout.as_secs() }),
    }
}

pub async fn quiesce(dir: &Path) -> Result<Quiesced, AgentError> {
    control(dir, Method::POST, "/quiesce", whole("{}"), Duration::from_secs(20)).await
}

pub async fn wake(dir: &Path, wake: &Wake, timeout: Duration) -> Result<Woken, AgentError> {
    let body = serde_json::to_vec(wake)
        .map_err(|error| AgentError::Broken { call: "/wake".to_owned(), why: error.to_string() })?;
    control(dir, Method::POST, "/wake", whole(body), timeout).await
}

pub async fn stat(dir: &Path) -> Result<Stat, AgentError> {
    control(dir, Method::GET, "/stat", whole(Bytes::new()), Duration::from_secs(5)).await
}

/// A GET on envd, whole body.
pub async fn get(dir: &Path, path: &str, token: &str, timeout: Duration) -> Result<Bytes, AgentError> {
    let call = Call {
        port: ENVD_PORT,
        method: Method::GET,
        path,
        token: Some(token),
        headers: &[],
        body: whole(Bytes::new()),
    };
    let whole = async { read(send(dir, call).await?, path).await };
    match tokio::time::timeout(timeout, whole).await {
        Ok(result) => result,
        Err(_) => Err(AgentError::Timeout { call: path.to_owned(), seconds: timeout.as_secs() }),
    }
}
