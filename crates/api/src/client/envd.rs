//! envd of one sandbox: unary calls and streams of the Connect protocol through the daemon's data plane.

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use dormouse_wire::envd::connect::{self, Decoder, EndStream, Frame};
use dormouse_wire::envd::filesystem::{
    self, EntryInfo, EntryResponse, ListDirRequest, ListDirResponse, PathRequest,
};
use dormouse_wire::envd::process::{REPLAY_FROM_HEADER, REPLAY_OFFSET_HEADER};
use dormouse_wire::stream::ENVD_PORT;
use http::header::{AUTHORIZATION, CONTENT_TYPE};
use http::{HeaderValue, Method, Request};
use http_body_util::BodyExt;
use hyper::body::Incoming;
use serde::Serialize;
use serde::de::DeserializeOwned;

use super::{Body, Client, ClientError, full, header};

/// Seconds of silence after which the agent says that it is still there.
const KEEPALIVE_SECONDS: &str = "50";

/// Whom a request is for.
#[derive(Debug, Clone)]
pub struct Target {
    pub sandbox: String,
    pub access_token: Option<String>,
    /// The user inside; `None`: the sandbox's default.
    pub user: Option<String>,
}

#[derive(Clone)]
pub struct Envd {
    pub(super) client: Client,
    target: Target,
}

/// A server's stream of frames.
pub(super) struct Frames {
    what: String,
    body: Incoming,
    decoder: Decoder,
    /// Which number the first byte of output has.
    pub(super) replay_offset: Option<u64>,
}

impl Envd {
    pub(super) fn new(client: Client, target: Target) -> Self {
        Self { client, target }
    }

    #[must_use]
    pub fn sandbox(&self) -> &str {
        &self.target.sandbox
    }

    pub(super) fn user(&self) -> Option<&str> {
        self.target.user.as_deref()
    }

    /// The same sandbox as another user.
    #[must_use]
    pub fn as_user(&self, user: Option<String>) -> Self {
        Self { client: self.client.clone(), target: Target { user, ..self.target.clone() } }
    }

    pub async fn stat(&self, path: &str) -> Result<EntryInfo, ClientError> {
        let what = format!("look at {path} in sandbox {}", self.target.sandbox);
        let answer: EntryResponse =
            self.unary(&what, filesystem::STAT, &PathRequest { path: path.to_owned() }).await?;
        answer.entry.ok_or_else(|| ClientError::Answer { what, why: "it holds no entry".to_owned() })
    }

    pub async fn list_dir(&self, path: &str, depth: u32) -> Result<Vec<EntryInfo>, ClientError> {
        let what = format!("list {path} in sandbox {}", self.target.sandbox);
        let request = ListDirRequest { path: path.to_owned(), depth };
        let answer: ListDirResponse = self.unary(&what, filesystem::LIST_DIR, &request).await?;
        Ok(answer.entries)
    }

    pub async fn make_dir(&self, path: &str) -> Result<(), ClientError> {
        let what = format!("make the folder {path} in sandbox {}", self.target.sandbox);
        let request = PathRequest { path: path.to_owned() };
        let _: serde_json::Value = self.unary(&what, filesystem::MAKE_DIR, &request).await?;
        Ok(())
    }

    pub async fn remove(&self, path: &str) -> Result<(), ClientError> {
        let what = format!("remove {path} in sandbox {}", self.target.sandbox);
        let request = PathRequest { path: path.to_owned() };
        let _: serde_json::Value = self.unary(&what, filesystem::REMOVE, &request).await?;
        Ok(())
    }

    pub(super) async fn unary<T: DeserializeOwned>(
        &self,
        what: &str,
        path: &str,
        message: &impl Serialize,
    ) -> Result<T, ClientError> {
        let mut request = self.request(what, Method::POST, path, full(connect::to_json(message)))?;
        request.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static(connect::UNARY_TYPE));
        header(&mut request, what, "connect-protocol-version", "1")?;
        let response = self.client.send(what, request).await?;
        let bytes = self.client.collect(what, response).await?;
        connect::parse(&bytes)
            .map_err(|error| ClientError::Answer { what: what.to_owned(), why: error.to_string() })
    }

    /// `timeout_ms`: for `Start` the deadline of the process; `None`: no limit. `replay_from`: for `Connect` the byte
    /// of output to begin at.
    pub(super) async fn server_stream(
        &self,
        what: &str,
        path: &str,
        message: &impl Serialize,
        timeout_ms: Option<u64>,
        replay_from: Option<u64>,
    ) -> Result<Frames, ClientError> {
        let body = full(connect::message(message).to_vec());
        let mut request = self.request(what, Method::POST, path, body)?;
        request.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static(connect::STREAM_TYPE));
        header(&mut request, what, "connect-protocol-version", "1")?;
        header(&mut request, what, connect::KEEPALIVE_HEADER, KEEPALIVE_SECONDS)?;
        if let Some(ms) = timeout_ms {
            header(&mut request, what, connect::TIMEOUT_HEADER, &ms.to_string())?;
        }
        if let Some(from) = replay_from {
            header(&mut request, what, REPLAY_FROM_HEADER, &from.to_string())?;
        }
        let response = self.client.send(what, request).await?;
        let offset = response.headers().get(REPLAY_OFFSET_HEADER).and_then(|value| value.to_str().ok());
        let replay_offset = offset.and_then(|text| text.parse().ok());
        let (what, decoder) = (what.to_owned(), Decoder::default());
        Ok(Frames { what, body: response.into_body(), decoder, replay_offset })
    }

    pub(super) fn request(
        &self,
        what: &str,
        method: Method,
        path: &str,
        body: Body,
    ) -> Result<Request<Body>, ClientError> {
        let mut request = Request::builder()
            .method(method)
            .uri(format!("{}{path}", self.client.url()))
            .body(body)
            .map_err(|error| ClientError::Request { what: what.to_owned(), why: error.to_string() })?;
        header(&mut request, what, "e2b-sandbox-id", &self.target.sandbox)?;
        header(&mut request, what, "e2b-sandbox-port", &ENVD_PORT.to_string())?;
        if let Some(token) = &self.target.access_token {
            header(&mut request, what, "x-access-token", token)?;
        }
        if let Some(user) = &self.target.user {
            let basic = format!("Basic {}", STANDARD.encode(format!("{user}:")));
            let value = HeaderValue::from_str(&basic).map_err(|_| ClientError::Request {
                what: what.to_owned(),
                why: "the user's name cannot be sent".to_owned(),
            })?;
            request.headers_mut().insert(AUTHORIZATION, value);
        }
        Ok(request)
    }
}

impl Frames {
    /// The next message; `None`: the stream ended well.
    pub(super) async fn next<T: DeserializeOwned>(&mut self) -> Result<Option<T>, ClientError> {
        loop {
            let broken = |why: String| ClientError::Broken { what: self.what.clone(), why };
            if let Some(frame) = self.decoder.next_frame().map_err(|error| broken(error.to_string()))? {
                if frame.is_end() {
                    return self.end(&frame).map(|()| None);
                }
                return serde_json::from_slice(&frame.payload).map(Some).map_err(|error| {
                    ClientError::Answer { what: self.what.clone(), why: error.to_string() }
                });
            }
            match self.body.frame().await {
                Some(Ok(part)) => {
                    if let Some(data) = part.data_ref() {
                        self.decoder.push(data);
                    }
                }
                Some(Err(error)) => return Err(broken(error.to_string())),
                None => return Err(broken("the connection was closed before the end".to_owned())),
            }
        }
    }

    fn end(&self, frame: &Frame) -> Result<(), ClientError> {
        let end: EndStream = serde_json::from_slice(&frame.payload)
            .map_err(|error| ClientError::Answer { what: self.what.clone(), why: error.to_string() })?;
        match end.error {
            None => Ok(()),
            Some(error) => Err(ClientError::Refused {
                what: self.what.clone(),
                status: error.code.http_status(),
                error_code: Some(error.code.as_str().to_owned()),
                message: error.message,
            }),
        }
    }
}
