//! The listener and the control plane, asked over TCP, above a real node that has no sandboxes.

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use async_trait::async_trait;
use bytes::Bytes;
use dormouse_api::endpoints::{DORMOUSE, E2B, NOT_IMPLEMENTED};
use dormouse_engine::{
    Adopted, After, BootSpec, Capabilities, Captured, Engine, EngineError, Exit, Failure, ForkChild, Forked,
    Operation, RestoreSpec, Restored, RuntimeState, Swept, Usage, WarmSpec,
};
use dormouse_node::{Node, NodeConfig};
use dormouse_snapshot::{Compat, Manifest};
use dormouse_types::{EngineKind, RuntimeId, SandboxId};
use dormouse_wire::keeper::{EgressRules, Status};
use http::{HeaderMap, Method, Request, StatusCode};
use http_body_util::{BodyExt, Full};
use hyper::client::conn::http1;
use hyper_util::rt::TokioIo;
use serde_json::Value;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio_util::sync::CancellationToken;

use super::route::Domain;
use super::{ServeConfig, ServeError, listener, start};

/// An engine on a host that can start nothing.
struct Unfit(PathBuf);

fn unfit<T>(operation: Operation) -> Result<T, EngineError> {
    let (what, mend) = ("the host".to_owned(), "use another".to_owned());
    Err(EngineError { operation, sandbox: None, failure: Failure::Missing { what, mend } })
}

#[async_trait]
impl Engine for Unfit {
    fn kind(&self) -> EngineKind {
        EngineKind::Gvisor
    }
    fn capabilities(&self) -> Capabilities {
        Capabilities {
            memory: true,
            external_tcp: false,
            incremental: false,
            live_fork: false,
            live_checkpoint: true,
        }
    }
    fn compat(&self) -> Compat {
        Compat {
            engine_version: String::new(),
            platform: String::new(),
            cpu_features: Vec::new(),
            agent_version: String::new(),
            agent_digest: String::new(),
        }
    }
    fn can_restore(&self, _: &Manifest) -> Result<(), EngineError> {
        unfit(Operation::Restore)
    }
    fn keeper_dir(&self, sandbox: &SandboxId) -> PathBuf {
        self.0.join(sandbox.as_str())
    }
    async fn boot(&self, _: BootSpec) -> Result<(), EngineError> {
        unfit(Operation::Boot)
    }
    async fn checkpoint(
        &self,
        _: &SandboxId,
        _: &RuntimeId,
        _: &Path,
        _: After,
    ) -> Result<Captured, EngineError> {
        unfit(Operation::Checkpoint)
    }
    async fn restore(&self, _: RestoreSpec) -> Result<Restored, EngineError> {
        unfit(Operation::Restore)
    }
    async fn fork(&self, _: &SandboxId, _: &RuntimeId, _: Vec<ForkChild>) -> Result<Forked, EngineError> {
        unfit(Operation::Fork)
    }
    async fn freeze(&self, _: &SandboxId, _: &RuntimeId) -> Result<(), EngineError> {
        unfit(Operation::Freeze)
    }
    async fn thaw(&self, _: &SandboxId, _: &RuntimeId) -> Result<(), EngineError> {
        unfit(Operation::Thaw)
    }
    async fn stop(&self, _: &SandboxId, _: &RuntimeId) -> Result<(), EngineError> {
        Ok(())
    }
    async fn destroy(&self, _: &SandboxId, _: Option<&RuntimeId>) -> Result<(), EngineError> {
        Ok(())
    }
    async fn set_egress(&self, _: &SandboxId, _: &EgressRules) -> Result<(), EngineError> {
        unfit(Operation::SetEgress)
    }
    async fn keeper_status(&self, _: &SandboxId) -> Result<Status, EngineError> {
        unfit(Operation::Status)
    }
    async fn usage(&self, _: &SandboxId, _: &RuntimeId) -> Result<Usage, EngineError> {
        unfit(Operation::Status)
    }
    async fn exited(&self, _: &SandboxId, _: &RuntimeId) -> Exit {
        std::future::pending().await
    }
    async fn adopt(&self, _: &SandboxId, _: Option<&RuntimeId>) -> Result<Adopted, EngineError> {
        Ok(Adopted { runtime: RuntimeState::Gone, keeper: false })
    }
    async fn sweep(&self, _: &[(SandboxId, Option<RuntimeId>)]) -> Result<Swept, EngineError> {
        Ok(Swept::default())
    }
    async fn prewarm(&self, _: WarmSpec, _: usize) {}
    async fn shutdown(&self) {}
}

struct Daemon {
    address: SocketAddr,
    key: String,
    going: CancellationToken,
    _data_dir: tempfile::TempDir,
}

impl Drop for Daemon {
    fn drop(&mut self) {
        self.going.cancel();
    }
}

async fn daemon() -> Daemon {
    let data_dir = tempfile::tempdir().expect("a folder");
    let mut config = NodeConfig::new(data_dir.path());
    config.engines = vec![Arc::new(Unfit(data_dir.path().join("run")))];
    let node = Node::open(config).await.expect("a node");
    let (_, key) = node.key_create("test").await.expect("a key");
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a listener");
    let address = listener.local_addr().expect("an address");
    let going = CancellationToken::new();
    let domain = Domain::parse("sbx.test").expect("a domain");
    let app =
        start::app(node, domain, data_dir.path().to_owned(), address.to_string(), Vec::new(), going.clone());
    tokio::spawn(listener::run(listener, app));
    Daemon { address, key, going, _data_dir: data_dir }
}

struct Answer {
    status: StatusCode,
    headers: HeaderMap,
    body: Bytes,
}

impl Answer {
    fn json(&self) -> Value {
        serde_json::from_slice(&self.body).unwrap_or_else(|_| panic!("no JSON: {:?}", self.body))
    }

    fn message(&self) -> String {
        let body = self.json();
        assert_eq!(body["code"], self.status.as_u16(), "{body}");
        body["message"].as_str().expect("a message").to_owned()
    }
}

impl Daemon {
    async fn connection(&self) -> http1::SendRequest<Full<Bytes>> {
        let stream = TcpStream::connect(self.address).await.expect("a connection");
        let (sender, connection) = http1::handshake(TokioIo::new(stream)).await.expect("a handshake");
        tokio::spawn(connection);
        sender
    }

    async fn send(&self, request: Request<Full<Bytes>>) -> Answer {
        let answer = self.connection().await.send_request(request).await.expect("an answer");
        let (parts, body) = answer.into_parts();
        let body = body.collect().await.expect("a whole body").to_bytes();
        Answer { status: parts.status, headers: parts.headers, body }
    }

    async fn ask(&self, method: &str, path: &str, body: &str) -> Answer {
        let request = Request::builder()
            .method(method)
            .uri(path)
            .header("host", self.address.to_string())
            .header("x-api-key", &self.key)
            .body(Full::from(body.to_owned()))
            .expect("a request");
        self.send(request).await
    }
}

#[tokio::test]
async fn health_needs_no_key_and_everything_else_does() {
    let daemon = daemon().await;
    let bare = |path: &str| {
        Request::builder().uri(path.to_owned()).header("host", "x").body(Full::default()).expect("a request")
    };
    assert_eq!(daemon.send(bare("/health")).await.status, 204);
    for path in ["/v2/sandboxes", "/teams", "/dormouse/v1/node", "/metrics", "/no/such/path"] {
        let answer = daemon.send(bare(path)).await;
        assert_eq!(answer.status, 401, "{path}");
        assert!(answer.message().contains("X-API-KEY"));
    }
    let mut wrong = bare("/v2/sandboxes");
    wrong.headers_mut().insert("x-api-key", "e2b_0123".parse().expect("a value"));
    assert_eq!(daemon.send(wrong).await.status, 401);
    let mut bearer = bare("/teams");
    bearer.headers_mut().insert("authorization", format!("Bearer {}", daemon.key).parse().expect("a value"));
    let answer = daemon.send(bearer).await;
    assert_eq!(answer.status, 200);
    assert_eq!(answer.json()[0]["apiKey"], daemon.key.as_str());
}

/// Each endpoint of the table is routed: what it answers is its own refusal, not "no such path".
#[tokio::test]
async fn every_endpoint_that_is_documented_is_there() {
    let daemon = daemon().await;
    let all = E2B.iter().chain(DORMOUSE).map(|endpoint| (endpoint.method, endpoint.path));
    for (method, path) in all.filter(|(_, path)| *path != "/dormouse/v1/events") {
        let path: String = path
            .split('/')
            .map(|segment| if segment.starts_with('{') { "s0000000000" } else { segment })
            .collect::<Vec<_>>()
            .join("/");
        let answer = daemon.ask(method, &path, "").await;
        let text = String::from_utf8_lossy(&answer.body);
        let routed = answer.status != 405 && answer.status != 501 && !text.contains("openapi.json lists");
        assert!(routed, "{method} {path}: {} {text}", answer.status);
        assert!(!answer.status.is_server_error(), "{method} {path}: {} {text}", answer.status);
    }
    for (method, path) in NOT_IMPLEMENTED {
        let path = path.replace(['{', '}'], "");
        let answer = daemon.ask(method, &path, "").await;
        assert_eq!(answer.status, 501, "{method} {path}");
        assert!(answer.message().contains("not implemented"));
    }
    assert_eq!(daemon.ask("GET", "/nothing", "").await.status, 404);
    assert_eq!(daemon.ask("PUT", "/v2/sandboxes", "").await.status, 405);
}

#[tokio::test]
async fn wrong_input_is_refused_with_the_fields_name() {
    let daemon = daemon().await;
    for (method, path, body, words) in [
        ("POST", "/v2/sandboxes", r"{", "request body"),
        ("POST", "/v2/sandboxes", r#"{"templateID": 7}"#, "templateID: "),
        ("POST", "/v2/sandboxes", r#"{"templateID": ""}"#, "templateID: "),
        ("POST", "/v2/sandboxes", r#"{"templateID": "base", "timeout": -1}"#, "timeout: "),
        ("POST", "/v2/sandboxes", r#"{"templateID": "base", "timeout": 1.5}"#, "timeout: "),
        ("POST", "/sandboxes", r#"{"templateID": "base", "metadata": []}"#, "metadata: "),
        ("POST", "/sandboxes", r#"{"templateID": "base", "envVars": {"a=b": "c"}}"#, "envVars: "),
        (
            "POST",
            "/sandboxes",
            r#"{"templateID": "base", "volumeMounts": [{"name":"a","path":"/a"}]}"#,
            "volumeMounts: ",
        ),
        (
            "POST",
            "/sandboxes",
            r#"{"templateID": "base", "network": {"allowPublicTraffic": "no"}}"#,
            "network.allowPublicTraffic: ",
        ),
        (
            "POST",
            "/sandboxes",
            r#"{"templateID": "base", "dormouse": {"engine": "qemu"}}"#,
            "dormouse.engine: ",
        ),
        (
            "POST",
            "/sandboxes",
            r#"{"templateID": "base", "dormouse": {"shape": {"cpus": 0}}}"#,
            "dormouse.shape: ",
        ),
        ("GET", "/sandboxes/NOT-AN-ID", "", "sandboxID: "),
        ("GET", "/sandboxes/..%2F..%2Fetc", "", "sandboxID: "),
        ("GET", "/v2/sandboxes?limit=1000", "", "limit: "),
        ("GET", "/v2/sandboxes?state=tired", "", "state: "),
        ("GET", "/sandboxes/s0/metrics?start=then", "", "start: "),
        ("POST", "/sandboxes/s0/timeout", "{}", "timeout"),
        ("POST", "/sandboxes/s0/fork", r#"{"count": 21}"#, "count: "),
        ("POST", "/dormouse/v1/keys", r#"{"name": ""}"#, "name: "),
        ("GET", "/dormouse/v1/events?since=x", "", "since: "),
    ] {
        let answer = daemon.ask(method, path, body).await;
        let message = answer.message();
        assert_eq!(answer.status, 400, "{method} {path} {body}: {message}");
        assert!(message.contains(words), "{method} {path} {body}: {message}");
    }
    let unknown = daemon.ask("POST", "/v2/sandboxes", r#"{"templateID": "nosuch", "shiny": true}"#).await;
    assert_eq!(unknown.status, 404, "{}", unknown.message());
    for path in ["/sandboxes/s0123", "/dormouse/v1/sandboxes/s0123", "/templates/team%2Fname%3Atag"] {
        assert_eq!(daemon.ask("GET", path, "").await.status, 404, "{path}");
    }
    assert_eq!(daemon.ask("DELETE", "/sandboxes/s0123", "").await.status, 404);
}

#[tokio::test]
async fn a_body_that_is_too_large_is_refused_and_the_end_announced() {
    let daemon = daemon().await;
    let large = format!(r#"{{"templateID": "{}"}}"#, "a".repeat(2 << 20));
    let answer = daemon.ask("POST", "/v2/sandboxes", &large).await;
    assert_eq!(answer.status, 413);
    assert_eq!(answer.headers["connection"], "close");
}

#[tokio::test]
async fn a_connection_goes_on_after_answers_of_every_kind() {
    let daemon = daemon().await;
    let mut stream = TcpStream::connect(daemon.address).await.expect("a connection");
    let key = &daemon.key;
    let chunked = "transfer-encoding: chunked\r\ncontent-type: application/json\r\n\r\n5\r\n{\"nam\r\na\r\ne\": \"two\"}\r\n0\r\n\r\n";
    for (request, status) in [
        ("GET /health HTTP/1.1\r\nhost: x\r\n\r\n".to_owned(), "204"),
        ("POST /v2/sandboxes HTTP/1.1\r\nhost: x\r\ncontent-length: 4\r\n\r\nbody".to_owned(), "401"),
        (format!("POST /dormouse/v1/keys HTTP/1.1\r\nhost: x\r\nx-api-key: {key}\r\n{chunked}"), "201"),
        ("POST /health HTTP/1.1\r\nhost: x\r\ncontent-length: 4\r\n\r\nbody".to_owned(), "405"),
        (format!("GET /dormouse/v1/keys HTTP/1.1\r\nhost: x\r\nx-api-key: {key}\r\n\r\n"), "200"),
    ] {
        stream.write_all(request.as_bytes()).await.expect("written");
        let mut head = Vec::new();
        while !head.ends_with(b"\r\n\r\n") {
            head.push(stream.read_u8().await.expect("the connection stays open"));
        }
        let head = String::from_utf8(head).expect("text").to_lowercase();
        assert!(head.starts_with(&format!("http/1.1 {status} ")), "{request}: {head}");
        let length = head.lines().find_map(|line| line.strip_prefix("content-length: "));
        let mut body = vec![0; length.map_or(0, |length| length.parse().expect("a length"))];
        stream.read_exact(&mut body).await.expect("a body");
    }
}

#[tokio::test]
async fn keys_are_made_listed_and_removed() {
    let daemon = daemon().await;
    let made = daemon.ask("POST", "/dormouse/v1/keys", r#"{"name": "second"}"#).await;
    assert_eq!(made.status, 201);
    let (id, secret) = (made.json()["keyID"].clone(), made.json()["key"].clone());
    let secret = secret.as_str().expect("a secret");
    assert!(secret.starts_with("e2b_") && secret.len() == 44, "{secret}");
    let listed = daemon.ask("GET", "/dormouse/v1/keys", "").await.json();
    assert_eq!(listed.as_array().map(Vec::len), Some(2));
    assert!(!listed.to_string().contains(secret));
    let path = format!("/dormouse/v1/keys/{}", id.as_str().expect("an id"));
    assert_eq!(daemon.ask("DELETE", &path, "").await.status, 204);
    assert_eq!(daemon.ask("DELETE", &path, "").await.status, 404);
}

#[tokio::test]
async fn empty_lists_have_no_next_page() {
    let daemon = daemon().await;
    for path in ["/sandboxes", "/v2/sandboxes", "/snapshots", "/templates", "/dormouse/v1/sandboxes"] {
        let answer = daemon.ask("GET", path, "").await;
        assert_eq!((answer.status.as_u16(), answer.json()), (200, Value::Array(Vec::new())), "{path}");
        assert!(!answer.headers.contains_key("x-next-token"), "{path}");
    }
}

#[tokio::test]
async fn sandboxes_that_are_not_there_are_refused_in_the_data_planes_words() {
    let daemon = daemon().await;
    let by_host = Request::builder()
        .uri("/")
        .header("host", "8000-s0123.sbx.test:3000")
        .body(Full::default())
        .expect("a request");
    let by_header = Request::builder()
        .method(Method::POST)
        .uri("/process.Process/Start")
        .header("host", "127.0.0.1")
        .header("e2b-sandbox-id", "s0123")
        .header("e2b-sandbox-port", "49983")
        .body(Full::from("{}"))
        .expect("a request");
    for request in [by_host, by_header] {
        let answer = daemon.send(request).await;
        assert_eq!(answer.status, 502);
        assert_eq!(answer.message(), "The sandbox was not found");
    }
    let signed = Request::builder()
        .uri("/files?path=a&signature=v1_x")
        .header("host", "127.0.0.1")
        .body(Full::default())
        .expect("a request");
    let answer = daemon.send(signed).await;
    assert_eq!((answer.status.as_u16(), answer.message().as_str()), (401, "invalid signature"));
}

#[tokio::test]
async fn an_address_in_use_is_named() {
    let taken = TcpListener::bind("127.0.0.1:0").await.expect("a listener");
    let address = taken.local_addr().expect("an address");
    let data_dir = tempfile::tempdir().expect("a folder");
    let error = start::serve(ServeConfig::new(data_dir.path(), address)).await.expect_err("it is in use");
    assert!(matches!(error, ServeError::InUse { listen } if listen == address), "{error}");
    assert!(error.to_string().contains("--listen"));
    assert_eq!(std::fs::read_dir(data_dir.path()).expect("a folder").count(), 0, "the folder was touched");
}
