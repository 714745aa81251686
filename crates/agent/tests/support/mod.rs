//! An agent on loopback, and a client of its Connect calls.

#![allow(dead_code, reason = "each test file uses a part of it")]
#![allow(
    clippy::unwrap_used,
    reason = "a test that cannot go on panics; clippy knows only #[test] functions as tests"
)]

use std::io::{BufRead as _, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use bytes::Bytes;
use dormouse_wire::envd::connect::{Code, Decoder, EndStream, Error, message};
use dormouse_wire::envd::process::{EndEvent, ProcessConfig, ProcessEvent, StartRequest, StartResponse};
use http::{HeaderMap, Method, Request, Response};
use http_body_util::combinators::BoxBody;
use http_body_util::{BodyExt as _, Full, StreamBody};
use hyper::body::{Frame, Incoming};
use hyper::client::conn::http1::SendRequest;
use hyper_util::rt::TokioIo;
use serde::Serialize;
use serde::de::DeserializeOwned;
use tokio::sync::mpsc;

pub type Body = BoxBody<Bytes, std::convert::Infallible>;

/// A test that waits longer than this hangs.
const HANG: Duration = Duration::from_secs(60);

/// Fails instead of hanging.
pub async fn in_time<T>(what: &str, future: impl Future<Output = T>) -> T {
    tokio::time::timeout(HANG, future).await.unwrap_or_else(|_| panic!("{what} does not come"))
}

pub struct Agent {
    child: Child,
    pub root: tempfile::TempDir,
    pub envd: String,
    pub control: String,
}

impl Agent {
    pub fn start() -> Self {
        Self::start_by(Command::new(Self::executable()))
    }

    pub fn executable() -> &'static str {
        env!("CARGO_BIN_EXE_dormouse-agent")
    }

    pub fn start_by(mut command: Command) -> Self {
        let root = tempfile::tempdir().unwrap();
        command.arg("serve").arg("--root").arg(root.path());
        let mut child = command.stdin(Stdio::null()).stdout(Stdio::piped()).spawn().unwrap();
        let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
        let mut address = |name: &str| {
            let line = lines.next().expect("the agent prints its addresses").unwrap();
            line.strip_prefix(name)
                .unwrap_or_else(|| panic!("{line:?} is not the address of {name}"))
                .trim()
                .to_owned()
        };
        let (envd, control) = (address("envd"), address("control"));
        Self { child, root, envd, control }
    }

    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    pub fn path(&self, below: &str) -> PathBuf {
        self.root.path().join(below)
    }

    /// The most memory that the agent ever had resident, in KiB.
    pub fn memory_kib_max(&self) -> u64 {
        let status = std::fs::read_to_string(format!("/proc/{}/status", self.pid())).unwrap();
        let line = status.lines().find(|line| line.starts_with("VmHWM:")).unwrap();
        line.split_whitespace().nth(1).unwrap().parse().unwrap()
    }

    pub async fn exit(mut self) -> std::process::ExitStatus {
        tokio::task::spawn_blocking(move || self.child.wait().unwrap()).await.unwrap()
    }

    pub async fn client(&self) -> Client {
        Client::connect(&self.envd).await
    }

    pub async fn control(&self) -> Client {
        Client::connect(&self.control).await
    }

    /// A call on a connection of its own.
    pub async fn call<T: DeserializeOwned>(&self, path: &str, request: &impl Serialize) -> Result<T, Error> {
        self.client().await.call(path, request).await
    }

    pub async fn run(&self, script: &str) -> Outcome {
        let mut stream = self.client().await.start(&bash(script), &[]).await;
        in_time("the end", stream.rest()).await
    }
}

impl Drop for Agent {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

pub fn bash(script: &str) -> StartRequest {
    let process = ProcessConfig {
        cmd: "/bin/bash".into(),
        args: vec!["-c".into(), script.into()],
        ..ProcessConfig::default()
    };
    StartRequest { process: Some(process), stdin: Some(true), ..StartRequest::default() }
}

pub fn full(bytes: impl Into<Bytes>) -> Body {
    Full::new(bytes.into()).boxed()
}

/// A body that is sent piece by piece, until the sender is dropped.
pub fn channel() -> (mpsc::Sender<Bytes>, Body) {
    let (sender, receiver) = mpsc::channel::<Bytes>(16);
    let frames = futures_util::stream::unfold(receiver, async |mut receiver| {
        let bytes = receiver.recv().await?;
        Some((Ok(Frame::data(bytes)), receiver))
    });
    (sender, StreamBody::new(frames).boxed())
}

/// One HTTP/1.1 connection.
pub struct Client(SendRequest<Body>);

impl Client {
    pub async fn connect(address: &str) -> Self {
        let socket = tokio::net::TcpStream::connect(address).await.unwrap();
        let (sender, connection) = hyper::client::conn::http1::handshake(TokioIo::new(socket)).await.unwrap();
        tokio::spawn(connection);
        Self(sender)
    }

    pub async fn send(
        &mut self,
        method: Method,
        path: &str,
        headers: &[(&str, &str)],
        body: Body,
    ) -> Response<Incoming> {
        let mut request = Request::builder().method(method).uri(path).header("host", "sandbox");
        for (name, value) in headers {
            request = request.header(*name, *value);
        }
        self.0.ready().await.unwrap();
        self.0.send_request(request.body(body).unwrap()).await.unwrap()
    }

    /// Status and JSON body.
    pub async fn json(
        &mut self,
        method: Method,
        path: &str,
        body: &impl Serialize,
    ) -> (u16, serde_json::Value) {
        let headers = [("content-type", "application/json")];
        let answer = self.send(method, path, &headers, full(serde_json::to_vec(body).unwrap())).await;
        let status = answer.status().as_u16();
        let body = answer.into_body().collect().await.unwrap().to_bytes();
        (status, serde_json::from_slice(&body).unwrap_or(serde_json::Value::Null))
    }

    /// A unary call.
    pub async fn call<T: DeserializeOwned>(
        &mut self,
        path: &str,
        request: &impl Serialize,
    ) -> Result<T, Error> {
        let (status, body) = self.json(Method::POST, path, request).await;
        if status == 200 {
            return Ok(serde_json::from_value(body).unwrap());
        }
        let error: Error = serde_json::from_value(body).unwrap();
        assert_eq!(status, error.code.http_status());
        Err(error)
    }

    /// A server stream.
    pub async fn stream(&mut self, path: &str, request: &impl Serialize, headers: &[(&str, &str)]) -> Stream {
        let mut all = vec![("content-type", "application/connect+json"), ("connect-protocol-version", "1")];
        all.extend_from_slice(headers);
        Stream::of(self.send(Method::POST, path, &all, full(message(request))).await)
    }

    pub async fn start(&mut self, request: &StartRequest, headers: &[(&str, &str)]) -> Stream {
        self.stream(dormouse_wire::envd::process::START, request, headers).await
    }
}

/// All of a process's stream.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Outcome {
    pub stdout: Vec<u8>,
    pub stderr: Vec<u8>,
    pub pty: Vec<u8>,
    pub end: Option<EndEvent>,
    pub error: Option<Error>,
    /// The stream broke off without its last frame.
    pub cut: bool,
}

impl Outcome {
    pub fn stdout(&self) -> &str {
        std::str::from_utf8(&self.stdout).unwrap()
    }

    pub fn stderr(&self) -> &str {
        std::str::from_utf8(&self.stderr).unwrap()
    }

    pub fn pty(&self) -> String {
        String::from_utf8_lossy(&self.pty).into_owned()
    }

    pub fn code(&self) -> Option<Code> {
        self.error.as_ref().map(|error| error.code)
    }

    fn add(&mut self, event: ProcessEvent) {
        if let Some(data) = event.data {
            self.stdout.extend(data.stdout.unwrap_or_default());
            self.stderr.extend(data.stderr.unwrap_or_default());
            self.pty.extend(data.pty.unwrap_or_default());
        }
        self.end = event.end.or(self.end.take());
    }
}

/// What a stream brings next.
#[derive(Debug)]
pub enum Next {
    Event(ProcessEvent),
    End(Option<Error>),
    Cut,
}

pub struct Stream {
    pub headers: HeaderMap,
    body: Incoming,
    decoder: Decoder,
}

impl Stream {
    pub fn of(answer: Response<Incoming>) -> Self {
        assert_eq!(answer.status(), 200, "a stream is always answered with 200");
        assert_eq!(answer.headers()["content-type"], "application/connect+json");
        let headers = answer.headers().clone();
        Self { headers, body: answer.into_body(), decoder: Decoder::default() }
    }

    pub async fn next(&mut self) -> Next {
        loop {
            if let Some(frame) = self.decoder.next_frame().unwrap() {
                if frame.is_end() {
                    return Next::End(frame.parse::<EndStream>().unwrap().error);
                }
                return Next::Event(frame.parse::<StartResponse>().unwrap().event.unwrap());
            }
            match self.body.frame().await {
                Some(Ok(part)) => self.decoder.push(part.data_ref().unwrap()),
                Some(Err(_)) | None => return Next::Cut,
            }
        }
    }

    /// The next frame's bytes.
    pub async fn next_raw(&mut self) -> Option<Bytes> {
        loop {
            if let Some(frame) = self.decoder.next_frame().unwrap() {
                return Some(frame.payload);
            }
            self.decoder.push(self.body.frame().await?.ok()?.data_ref()?);
        }
    }

    pub async fn event(&mut self) -> ProcessEvent {
        match in_time("an event", self.next()).await {
            Next::Event(event) => event,
            other => panic!("{other:?} instead of an event"),
        }
    }

    /// The first event.
    pub async fn pid(&mut self) -> u32 {
        self.event().await.start.expect("the first event is start").pid
    }

    /// Reads on until `wanted` was in the output (of whatever kind); what came until then.
    pub async fn until(&mut self, wanted: &str) -> Outcome {
        let mut outcome = Outcome::default();
        let contains = |bytes: &[u8]| bytes.windows(wanted.len()).any(|part| part == wanted.as_bytes());
        while !contains(&outcome.stdout) && !contains(&outcome.stderr) && !contains(&outcome.pty) {
            match in_time(wanted, self.next()).await {
                Next::Event(event) => outcome.add(event),
                other => panic!("{other:?} before {wanted:?}: {outcome:?}"),
            }
        }
        outcome
    }

    /// All that is left.
    pub async fn rest(&mut self) -> Outcome {
        let mut outcome = Outcome::default();
        loop {
            match self.next().await {
                Next::Event(event) => outcome.add(event),
                Next::End(error) => return Outcome { error, ..outcome },
                Next::Cut => return Outcome { cut: true, ..outcome },
            }
        }
    }
}

/// A fifo below `folder`, and a reader of it that ends when nobody holds its writing end any more:
/// proof that the processes that did are gone.
pub fn fifo(folder: &Path, name: &str) -> (String, tokio::sync::oneshot::Receiver<()>) {
    let path = folder.join(name);
    assert!(Command::new("mkfifo").arg(&path).status().unwrap().success());
    let shown = path.display().to_string();
    let (sender, gone) = tokio::sync::oneshot::channel();
    // A thread that nothing waits for: the test must fail, not hang, when no writer ever comes.
    std::thread::spawn(move || {
        std::fs::read(path).unwrap();
        let _ = sender.send(());
    });
    (shown, gone)
}
