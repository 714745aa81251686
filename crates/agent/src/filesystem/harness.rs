//! For tests: the two routers served on loopback, and a client that speaks plain HTTP to them.

use std::net::SocketAddr;
use std::path::{Path, PathBuf};

use axum::body::{Body, Bytes};
use dormouse_wire::envd::filesystem::{
    CREATE_WATCHER, EventType, GET_WATCHER_EVENTS, GetWatcherEventsResponse,
};
use http::{HeaderMap, Method, Request, StatusCode};
use http_body_util::BodyExt as _;
use hyper::body::Incoming;
use hyper_util::rt::TokioIo;
use serde_json::{Value, json};
use tokio::net::{TcpListener, TcpStream};

use crate::context::{Ctx, Settings};
use crate::process::Processes;

pub struct Served {
    pub address: SocketAddr,
    dir: tempfile::TempDir,
}

pub struct Answer {
    pub status: StatusCode,
    pub headers: HeaderMap,
    pub body: Bytes,
}

impl Answer {
    pub fn json(&self) -> Value {
        serde_json::from_slice(&self.body).unwrap_or_else(|_| panic!("not JSON: {:?}", self.body))
    }

    pub fn header(&self, name: &str) -> &str {
        self.headers.get(name).map_or("", |value| value.to_str().unwrap())
    }

    /// Status and message of a refusal.
    pub fn refusal(&self) -> (u16, String) {
        let json = self.json();
        assert_eq!(json["code"], json!(self.status.as_u16()), "{json}");
        (self.status.as_u16(), json["message"].as_str().unwrap().to_owned())
    }
}

impl Served {
    pub async fn start() -> Self {
        Self::with(Settings { default_user: Some("root".into()), ..Settings::default() }).await
    }

    pub async fn with(settings: Settings) -> Self {
        let ctx = Ctx::new(settings, Processes::default());
        let router = crate::files::router(ctx.clone()).merge(super::router(ctx));
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        tokio::spawn(async move {
            while let Ok((stream, _)) = listener.accept().await {
                tokio::spawn(crate::http::serve_stream(stream, router.clone()));
            }
        });
        Self { address, dir: tempfile::tempdir().unwrap() }
    }

    pub fn dir(&self) -> &Path {
        self.dir.path()
    }

    pub fn at(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    /// `/files?path=<in the test's directory>` and more.
    pub fn files(&self, name: &str, more: &str) -> String {
        format!("/files?path={}{more}", self.at(name).to_str().unwrap())
    }

    pub async fn open(&self, request: Request<Body>) -> http::Response<Incoming> {
        let stream = TcpStream::connect(self.address).await.unwrap();
        let (mut sender, connection) =
            hyper::client::conn::http1::handshake(TokioIo::new(stream)).await.unwrap();
        tokio::spawn(connection);
        sender.send_request(request).await.unwrap()
    }

    pub async fn send(
        &self,
        method: Method,
        uri: &str,
        headers: &[(&str, &str)],
        body: impl Into<Body>,
    ) -> Answer {
        let mut request = Request::builder().method(method).uri(uri).header("host", "test");
        for (name, value) in headers {
            request = request.header(*name, *value);
        }
        let response = self.open(request.body(body.into()).unwrap()).await;
        let (parts, body) = response.into_parts();
        let body = body.collect().await.unwrap().to_bytes();
        Answer { status: parts.status, headers: parts.headers, body }
    }

    pub async fn get(&self, name: &str, headers: &[(&str, &str)]) -> Answer {
        self.send(Method::GET, &self.files(name, ""), headers, Body::empty()).await
    }

    /// Uploads one file as octets.
    pub async fn put(&self, name: &str, content: impl Into<Body>) -> Answer {
        let headers = [("content-type", "application/octet-stream")];
        self.send(Method::POST, &self.files(name, ""), &headers, content).await
    }

    /// A unary call: the message, or the error's code and message.
    pub async fn call(&self, method: &str, message: Value) -> Result<Value, (String, String)> {
        let headers = [("content-type", "application/json")];
        let answer = self.send(Method::POST, method, &headers, message.to_string()).await;
        let json = answer.json();
        if answer.status == StatusCode::OK {
            return Ok(json);
        }
        Err((json["code"].as_str().unwrap().to_owned(), json["message"].as_str().unwrap().to_owned()))
    }

    /// The error's code alone.
    pub async fn code(&self, method: &str, message: Value) -> String {
        self.call(method, message).await.unwrap_err().0
    }

    pub async fn watch(&self, name: &str, more: Value) -> Value {
        let mut request = json!({"path": self.at(name)});
        request.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        self.call(CREATE_WATCHER, request).await.unwrap()
    }

    /// What a polled watcher has seen since the last question.
    pub async fn events(&self, watcher: &Value) -> Vec<(String, EventType)> {
        let answer = self.call(GET_WATCHER_EVENTS, watcher.clone()).await.unwrap();
        let answer: GetWatcherEventsResponse = serde_json::from_value(answer).unwrap();
        answer.events.into_iter().map(|event| (event.name, event.event_type)).collect()
    }
}
