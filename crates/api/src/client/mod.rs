//! The HTTP client of a Dormouse daemon: control plane, `/dormouse/v1`, and envd through the data plane.
//!
//! Owns connections and the shape of errors; the JSON shapes are its callers' and [`crate`]'s. Plain http only:
//! the daemon listens on loopback, and whoever puts TLS before it has a proxy.
//!
//! Invariants: an answer that is not streamed is read up to [`ANSWER_BYTES_MAX`]; a request is sent once and never
//! repeated here, so a mutating call happens at most once per call of a method.

mod envd;
mod error;
mod files;
mod lines;
mod process;

use std::time::Duration;

use bytes::Bytes;
use http::{HeaderName, HeaderValue, Method, Request, Response, Uri};
use http_body_util::combinators::UnsyncBoxBody;
use http_body_util::{BodyExt, Full, Limited};
use hyper::body::Incoming;
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::rt::TokioExecutor;
use serde::Serialize;
use serde::de::DeserializeOwned;

pub use crate::query::percent_encode as encode;
pub use envd::{Envd, Target};
pub use error::ClientError;
pub use files::Download;
pub use lines::Lines;
pub use process::{ProcessEvents, ProcessOutput, ProcessSummary, StartSpec};

/// The daemon's port when none is named.
pub const DEFAULT_URL: &str = "http://127.0.0.1:3000";
/// An answer larger than this is refused.
pub const ANSWER_BYTES_MAX: usize = 64 << 20;
const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);

pub(crate) type Body = UnsyncBoxBody<Bytes, std::io::Error>;
type Http = hyper_util::client::legacy::Client<HttpConnector, Body>;

/// One daemon, and the key that is shown to it. Cheap to clone.
#[derive(Clone)]
pub struct Client {
    http: Http,
    authority: String,
    key: Option<HeaderValue>,
}

impl Client {
    /// `url` is `http://host[:port]`; `key` is sent as `X-API-KEY`.
    pub fn new(url: &str, key: Option<&str>) -> Result<Self, ClientError> {
        let refuse = |why: &str| ClientError::Address { given: url.to_owned(), why: why.to_owned() };
        let uri: Uri = url.parse().map_err(|_| refuse("it is not a URL"))?;
        match uri.scheme_str() {
            Some("http") => {}
            Some(_) => return Err(refuse("only http:// is spoken here")),
            None => return Err(refuse("it has no http:// before it")),
        }
        if !matches!(uri.path(), "" | "/") || uri.query().is_some() {
            return Err(refuse("it must not have a path"));
        }
        let authority = uri.authority().ok_or_else(|| refuse("it names no host"))?.as_str().to_owned();
        let key = key
            .map(|key| {
                let mut value = HeaderValue::from_str(key)
                    .map_err(|_| refuse("the API key that goes with it holds characters no key has"))?;
                value.set_sensitive(true);
                Ok(value)
            })
            .transpose()?;
        let mut connector = HttpConnector::new();
        connector.set_nodelay(true);
        connector.set_connect_timeout(Some(CONNECT_TIMEOUT));
        let http = hyper_util::client::legacy::Client::builder(TokioExecutor::new())
            .pool_idle_timeout(Duration::from_secs(20))
            .build(connector);
        Ok(Self { http, authority, key })
    }

    /// `http://host:port`, without a slash at the end.
    #[must_use]
    pub fn url(&self) -> String {
        format!("http://{}", self.authority)
    }

    pub async fn get<T: DeserializeOwned>(&self, what: &str, path: &str) -> Result<T, ClientError> {
        self.call(what, Method::GET, path, None::<&()>).await
    }

    pub async fn post<T: DeserializeOwned>(
        &self,
        what: &str,
        path: &str,
        body: &impl Serialize,
    ) -> Result<T, ClientError> {
        self.call(what, Method::POST, path, Some(body)).await
    }

    pub async fn put<T: DeserializeOwned>(
        &self,
        what: &str,
        path: &str,
        body: &impl Serialize,
    ) -> Result<T, ClientError> {
        self.call(what, Method::PUT, path, Some(body)).await
    }

    pub async fn delete<T: DeserializeOwned>(&self, what: &str, path: &str) -> Result<T, ClientError> {
        self.call(what, Method::DELETE, path, None::<&()>).await
    }

    /// One page of a list and the token of the next one.
    pub async fn get_page<T: DeserializeOwned>(
        &self,
        what: &str,
        path: &str,
    ) -> Result<(T, Option<String>), ClientError> {
        let request = self.request(what, Method::GET, path, None::<&()>)?;
        let response = self.send(what, request).await?;
        let next = response.headers().get("x-next-token").and_then(|value| value.to_str().ok());
        let next = next.filter(|token| !token.is_empty()).map(str::to_owned);
        let bytes = self.collect(what, response).await?;
        let page = serde_json::from_slice(&bytes)
            .map_err(|error| ClientError::Answer { what: what.to_owned(), why: error.to_string() })?;
        Ok((page, next))
    }

    /// Server-sent events whose data are JSON.
    pub async fn get_events(&self, what: &str, path: &str) -> Result<Lines, ClientError> {
        let request = self.request(what, Method::GET, path, None::<&()>)?;
        Ok(Lines::events(what, self.send(what, request).await?))
    }

    /// Sends a file as the body; the answer comes a line of JSON at a time.
    pub async fn post_file_lines(
        &self,
        what: &str,
        path: &str,
        content_type: &'static str,
        file: &std::path::Path,
    ) -> Result<Lines, ClientError> {
        let mut request = self.request(what, Method::POST, path, None::<&()>)?;
        let (body, length) = files::file_body(what, file, |_| ()).await?;
        *request.body_mut() = body;
        request.headers_mut().insert(http::header::CONTENT_TYPE, HeaderValue::from_static(content_type));
        if let Some(length) = length {
            request.headers_mut().insert(http::header::CONTENT_LENGTH, HeaderValue::from(length));
        }
        Ok(Lines::new(what, self.send(what, request).await?))
    }

    /// True once `GET /health` answers 2xx.
    pub async fn healthy(&self) -> bool {
        match self.request("ask for its health", Method::GET, "/health", None::<&()>) {
            Ok(request) => self.send("ask for its health", request).await.is_ok(),
            Err(_) => false,
        }
    }

    /// The envd of one sandbox, reached through the daemon's data plane.
    #[must_use]
    pub fn envd(&self, target: Target) -> Envd {
        Envd::new(self.clone(), target)
    }

    async fn call<T: DeserializeOwned>(
        &self,
        what: &str,
        method: Method,
        path: &str,
        body: Option<&impl Serialize>,
    ) -> Result<T, ClientError> {
        let request = self.request(what, method, path, body)?;
        let response = self.send(what, request).await?;
        let bytes = self.collect(what, response).await?;
        // An empty answer (204) is `null`: `()` and `Option` read it.
        let text: &[u8] = if bytes.is_empty() { b"null" } else { &bytes };
        serde_json::from_slice(text)
            .map_err(|error| ClientError::Answer { what: what.to_owned(), why: error.to_string() })
    }

    fn request(
        &self,
        what: &str,
        method: Method,
        path: &str,
        body: Option<&impl Serialize>,
    ) -> Result<Request<Body>, ClientError> {
        let mut builder = Request::builder().method(method).uri(format!("http://{}{path}", self.authority));
        if let Some(key) = &self.key {
            builder = builder.header("x-api-key", key.clone());
        }
        let invalid = |why: String| ClientError::Request { what: what.to_owned(), why };
        let body = match body {
            Some(value) => {
                builder = builder.header(http::header::CONTENT_TYPE, "application/json");
                serde_json::to_vec(value).map_err(|error| invalid(error.to_string()))?
            }
            None => Vec::new(),
        };
        builder.body(full(body)).map_err(|error| invalid(error.to_string()))
    }

    /// Sends, and turns every answer that is not 2xx into the daemon's own words.
    async fn send(&self, what: &str, request: Request<Body>) -> Result<Response<Incoming>, ClientError> {
        let response = self.http.request(request).await.map_err(|source| ClientError::Unreachable {
            what: what.to_owned(),
            url: self.url(),
            source: Box::new(source),
        })?;
        if response.status().is_success() {
            return Ok(response);
        }
        let status = response.status();
        let body = self.collect(what, response).await.unwrap_or_default();
        Err(ClientError::refused(what, status, &body))
    }

    async fn collect(&self, what: &str, response: Response<Incoming>) -> Result<Bytes, ClientError> {
        Limited::new(response.into_body(), ANSWER_BYTES_MAX)
            .collect()
            .await
            .map(|body| body.to_bytes())
            .map_err(|error| ClientError::Answer {
                what: what.to_owned(),
                why: format!("its body could not be read: {error}"),
            })
    }
}

fn full(body: Vec<u8>) -> Body {
    Full::new(Bytes::from(body)).map_err(|never| match never {}).boxed_unsync()
}

fn header(
    request: &mut Request<Body>,
    what: &str,
    name: &'static str,
    value: &str,
) -> Result<(), ClientError> {
    let value = HeaderValue::from_str(value).map_err(|_| ClientError::Request {
        what: what.to_owned(),
        why: format!("{name} holds a control character"),
    })?;
    request.headers_mut().insert(HeaderName::from_static(name), value);
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_that_cannot_work_are_refused() {
        for url in ["", "127.0.0.1:3000", "https://x", "http://x/path", "http://"] {
            assert!(Client::new(url, None).is_err(), "{url:?} was accepted");
        }
        assert!(Client::new("http://127.0.0.1:3000", Some("a\nb")).is_err(), "a key with a newline");
        assert_eq!(
            Client::new("http://[::1]:3000/", None).map(|c| c.url()).ok().as_deref(),
            Some("http://[::1]:3000")
        );
    }

    #[test]
    fn segments_are_encoded() {
        assert_eq!(encode("team/name:tag é"), "team%2Fname%3Atag%20%C3%A9");
    }
}
