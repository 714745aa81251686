//! One HTTP request at a time over a fresh connection: what any client of the public API could send.

use std::time::Duration;

use anyhow::{Context, Result, bail};
use bytes::{Buf, Bytes, BytesMut};
use http_body_util::{BodyExt, Full};
use hyper::body::Incoming;
use hyper::client::conn::http1;
use hyper::{Method, Request, Response, StatusCode};
use hyper_util::rt::TokioIo;
use serde_json::{Value, json};
use tokio::net::TcpStream;

/// Longer than any honest answer takes; a hang is a failure, not a wait.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(120);

#[derive(Debug, Clone)]
pub struct Answer {
    pub status: StatusCode,
    pub headers: hyper::HeaderMap,
    pub body: Bytes,
}

impl Answer {
    pub fn json(&self) -> Result<Value> {
        serde_json::from_slice(&self.body).with_context(|| format!("{} is not JSON", self.text()))
    }

    #[must_use]
    pub fn text(&self) -> String {
        String::from_utf8_lossy(&self.body).into_owned()
    }

    /// The body, when the status is the expected one.
    pub fn expect(self, status: u16) -> Result<Self> {
        if self.status.as_u16() != status {
            bail!("expected status {status}, got {}: {}", self.status, self.text());
        }
        Ok(self)
    }
}

/// Sends to a daemon's address.
#[derive(Debug, Clone)]
pub struct Http {
    pub address: String,
    pub key: String,
}

/// What is sent; `headers` beside the ones that `Http` adds.
#[derive(Debug, Clone, Default)]
pub struct Call<'a> {
    pub method: Method,
    pub path: &'a str,
    pub headers: Vec<(&'a str, String)>,
    pub body: Bytes,
}

impl Http {
    /// Opens the answer of a call, its body unread.
    pub async fn open(&self, call: Call<'_>) -> Result<Response<Incoming>> {
        let stream = TcpStream::connect(&self.address)
            .await
            .with_context(|| format!("cannot connect to the daemon at {}", self.address))?;
        stream.set_nodelay(true)?;
        let (mut sender, connection) = http1::handshake(TokioIo::new(stream)).await?;
        tokio::spawn(connection);
        let mut request = Request::builder().method(call.method).uri(call.path).header("host", &self.address);
        for (name, value) in call.headers {
            request = request.header(name, value);
        }
        Ok(sender.send_request(request.body(Full::new(call.body))?).await?)
    }

    pub async fn send(&self, call: Call<'_>) -> Result<Answer> {
        let what = format!("{} {}", call.method, call.path);
        let whole = async {
            let response = self.open(call).await?;
            let (head, body) = response.into_parts();
            let body = body.collect().await?.to_bytes();
            Ok::<_, anyhow::Error>(Answer { status: head.status, headers: head.headers, body })
        };
        match tokio::time::timeout(ANSWER_TIMEOUT, whole).await {
            Ok(answer) => answer.with_context(|| format!("{what} failed")),
            Err(_) => bail!("{what} was not answered within {} s", ANSWER_TIMEOUT.as_secs()),
        }
    }

    /// A call of the control plane.
    pub async fn api(&self, method: Method, path: &str, body: Option<Value>) -> Result<Answer> {
        self.api_with(method, path, body, Vec::new()).await
    }

    pub async fn api_with(
        &self,
        method: Method,
        path: &str,
        body: Option<Value>,
        mut headers: Vec<(&str, String)>,
    ) -> Result<Answer> {
        headers.push(("x-api-key", self.key.clone()));
        headers.push(("content-type", "application/json".to_owned()));
        let body = body.map_or_else(Bytes::new, |value| Bytes::from(value.to_string()));
        self.send(Call { method, path, headers, body }).await
    }
}

/// One enveloped message of the Connect protocol's streams.
#[must_use]
pub fn envelope(message: &Value) -> Bytes {
    let text = message.to_string();
    let mut frame = BytesMut::with_capacity(5 + text.len());
    frame.extend_from_slice(&[0]);
    frame.extend_from_slice(&u32::try_from(text.len()).unwrap_or(u32::MAX).to_be_bytes());
    frame.extend_from_slice(text.as_bytes());
    frame.freeze()
}

/// Reads the frames of a Connect stream one by one.
pub struct Frames {
    body: Incoming,
    buffer: BytesMut,
}

impl Frames {
    #[must_use]
    pub fn new(body: Incoming) -> Self {
        Self { body, buffer: BytesMut::new() }
    }

    /// The next message; `None` after the end frame. An error inside the end frame is an error.
    pub async fn next(&mut self) -> Result<Option<Value>> {
        loop {
            if self.buffer.len() >= 5 {
                let size =
                    u32::from_be_bytes([self.buffer[1], self.buffer[2], self.buffer[3], self.buffer[4]]);
                let size = size as usize;
                if self.buffer.len() >= 5 + size {
                    let last = self.buffer[0] & 2 != 0;
                    self.buffer.advance(5);
                    let message: Value = serde_json::from_slice(&self.buffer.split_to(size))?;
                    if !last {
                        return Ok(Some(message));
                    }
                    if let Some(error) = message.get("error") {
                        bail!("the stream ended with {error}");
                    }
                    return Ok(None);
                }
            }
            let Some(frame) = self.body.frame().await else {
                bail!("the stream was cut before its end frame");
            };
            if let Ok(data) = frame?.into_data() {
                self.buffer.extend_from_slice(&data);
            }
        }
    }
}

/// The start request of a shell command.
#[must_use]
pub fn start_request(command: &str) -> Value {
    json!({"process": {"cmd": "/bin/bash", "args": ["-l", "-c", command], "envs": {}}, "stdin": false})
}
