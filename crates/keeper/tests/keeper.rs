//! A real keeper process; the sandbox is this process's end of the pipes.

#![allow(
    clippy::unwrap_used,
    clippy::cast_possible_truncation,
    reason = "a test fails by panicking; its patterns are cut on purpose"
)]

use std::future::Future;
use std::io::ErrorKind;
use std::net::{Ipv4Addr, SocketAddr};
use std::os::fd::{AsFd, OwnedFd};
use std::path::PathBuf;
use std::process::{Child, Command, ExitStatus, Stdio};

use dormouse_types::{Generation, SandboxId};
use dormouse_wire::carrier::{Guest, Stream, read_line, write_line};
use dormouse_wire::dns::{Query, Rcode};
use dormouse_wire::keeper::{Answer, Carrier, EgressRules, KEEPER_VERSION, Request, Session, Status};
use dormouse_wire::keeper_client::{ConnectError, KeeperClient, connect_agent};
use dormouse_wire::stream::{Open, Refusal, Reply};
use rustix::pipe::{PipeFlags, pipe_with};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, UnixStream};
use tokio::task::JoinHandle;

const ECHO: u16 = 7;
/// Says how many bytes it got, after the end.
const COUNT: u16 = 8;
/// Never reads.
const STALL: u16 = 9;
/// Writes for ever.
const FLOOD: u16 = 10;

struct Sandbox {
    _root: tempfile::TempDir,
    dir: PathBuf,
    keeper: Child,
    client: KeeperClient,
    guest: Guest,
    inside: Option<JoinHandle<()>>,
    generation: u64,
}

impl Drop for Sandbox {
    fn drop(&mut self) {
        // A test that failed must not leave its process behind.
        let _ = self.keeper.kill();
        let _ = self.keeper.wait();
    }
}

fn spawn_keeper(dir: &std::path::Path) -> Child {
    Command::new(env!("CARGO_BIN_EXE_dormouse-keeper"))
        .arg(dir)
        .arg(SandboxId::generate().as_str())
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap()
}

async fn connect(dir: &std::path::Path, keeper: &mut Child) -> KeeperClient {
    loop {
        match KeeperClient::connect(dir).await {
            Ok(client) => return client,
            Err(error) => assert!(keeper.try_wait().unwrap().is_none(), "the keeper ended: {error}"),
        }
        tokio::task::yield_now().await;
    }
}

impl Sandbox {
    async fn start() -> Self {
        let root = tempfile::tempdir().unwrap();
        // Longer than a socket's address may be.
        let dir = root.path().join("d".repeat(90)).join("e".repeat(90));
        std::fs::create_dir_all(&dir).unwrap();
        let mut keeper = spawn_keeper(&dir);
        let client = connect(&dir, &mut keeper).await;
        let guest = Guest::new();
        serve_inside(&guest);
        Self { _root: root, dir, keeper, client, guest, inside: None, generation: 0 }
    }

    async fn freeze(&mut self) {
        if let Some(inside) = self.inside.take() {
            inside.abort();
            let _ = inside.await;
        }
    }

    async fn attach(&mut self, session: Session) {
        let (stdin, to_sandbox) = pipe_with(PipeFlags::CLOEXEC).unwrap();
        let (from_sandbox, stdout) = pipe_with(PipeFlags::CLOEXEC).unwrap();
        self.generation += 1;
        let request = Request::Attach { generation: Generation(self.generation), session };
        let fds = [to_sandbox.as_fd(), from_sandbox.as_fd(), stdin.as_fd(), stdout.as_fd()];
        let answer = self.client.request(&request, &fds).await.unwrap();
        assert_eq!(answer, Answer::Done);
        self.run(stdin, stdout);
    }

    fn run(&mut self, stdin: OwnedFd, stdout: OwnedFd) {
        let guest = self.guest.clone();
        self.inside = Some(tokio::spawn(async move { guest.run(stdin, stdout).await.unwrap() }));
    }

    async fn ask(&mut self, request: Request) {
        assert_eq!(self.client.request(&request, &[]).await.unwrap(), Answer::Done, "{request:?}");
    }

    async fn status(&mut self) -> Status {
        match self.client.request(&Request::Status, &[]).await.unwrap() {
            Answer::Status(status) => status,
            other => panic!("{other:?}"),
        }
    }

    async fn allow(&mut self, allow: &[&str]) {
        let allow = allow.iter().map(|rule| (*rule).to_owned()).collect();
        let rules = EgressRules { internet: false, allow, deny: Vec::new() };
        self.ask(Request::SetEgress { rules }).await;
    }

    async fn dial(&self, open: &Open) -> (Stream, Reply) {
        let mut stream = self.guest.open().unwrap();
        write_line(&mut stream, open).await.unwrap();
        let line = read_line(&mut stream).await.unwrap();
        (stream, Reply::parse(&line).unwrap())
    }

    async fn shutdown(mut self) -> ExitStatus {
        self.ask(Request::Shutdown).await;
        self.keeper.wait().unwrap()
    }
}

/// What answers inside.
fn serve_inside(guest: &Guest) {
    let guest = guest.clone();
    tokio::spawn(async move {
        loop {
            let stream = guest.accept().await;
            tokio::spawn(serve_stream(stream));
        }
    });
}

async fn serve_stream(mut stream: Stream) -> std::io::Result<()> {
    let line = read_line(&mut stream).await?;
    let Ok(Open::Connect { port }) = Open::parse(&line) else { panic!("{line}") };
    if !(ECHO..=FLOOD).contains(&port) {
        let refused = Reply::Refused { why: Refusal::Closed, message: "nothing listens".into() };
        write_line(&mut stream, &refused).await?;
        return stream.shutdown().await;
    }
    write_line(&mut stream, &Reply::Ok).await?;
    let mut buffer = vec![0; 64 << 10];
    let mut count = 0;
    loop {
        match port {
            STALL => return std::future::pending().await,
            FLOOD => stream.write_all(&buffer).await?,
            _ => match stream.read(&mut buffer).await? {
                0 => break,
                n if port == ECHO => stream.write_all(&buffer[..n]).await?,
                n => count += n,
            },
        }
    }
    if port == COUNT {
        stream.write_all(count.to_string().as_bytes()).await?;
    }
    stream.shutdown().await
}

fn bytes(seed: u64, len: usize) -> Vec<u8> {
    let mut state = seed.wrapping_mul(2).wrapping_add(1);
    let mut next = || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        (state >> 56) as u8
    };
    (0..len).map(|_| next()).collect()
}

/// Sends and receives at once, compares, and expects a clean end.
async fn echo(stream: UnixStream, seed: u64, len: usize) {
    let sent = bytes(seed, len);
    let (mut reading, mut writing) = stream.into_split();
    let expected = sent.clone();
    let write = async move {
        writing.write_all(&sent).await.unwrap();
        writing.shutdown().await.unwrap();
    };
    let mut received = Vec::new();
    let (read, ()) = tokio::join!(reading.read_to_end(&mut received), write);
    read.unwrap();
    assert!(received == expected, "{} of {len} bytes came back, or others", received.len());
}

fn in_runtime(test: impl Future<Output = ()>) {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    // Not about speed: what is lost shows as a wait without end.
    let guarded = async { tokio::time::timeout(std::time::Duration::from_secs(120), test).await };
    runtime.block_on(guarded).expect("the keeper waits for something that never comes");
}

#[test]
fn streams_pass_in_both_directions_and_one_that_stalls_holds_back_nobody() {
    in_runtime(async {
        let mut sandbox = Sandbox::start().await;
        let hello = sandbox.client.request(&Request::Hello, &[]).await.unwrap();
        let pid = sandbox.keeper.id();
        assert!(matches!(hello, Answer::Hello { version: KEEPER_VERSION, pid: said, .. } if said == pid));
        assert_eq!(sandbox.status().await.carrier, Carrier::Detached);
        // Comes before anything is attached, and waits.
        let dir = sandbox.dir.clone();
        let early = tokio::spawn(async move { connect_agent(&dir, ECHO).await.unwrap() });
        sandbox.attach(Session::New).await;
        echo(early.await.unwrap(), 1, 100_000).await;

        let stalled = connect_agent(&sandbox.dir, STALL).await.unwrap();
        let mut flooded = connect_agent(&sandbox.dir, FLOOD).await.unwrap();
        let mut taken = 0;
        let chunk = vec![0; 64 << 10];
        while let Ok(n) = stalled.try_write(&chunk) {
            taken += n;
            echo(connect_agent(&sandbox.dir, ECHO).await.unwrap(), 2, 300_000).await;
        }
        assert!(taken < 8 << 20, "{taken} bytes were taken for a reader that does not read");
        let mut one = [0; 1];
        flooded.read_exact(&mut one).await.unwrap();

        let mut counted = connect_agent(&sandbox.dir, COUNT).await.unwrap();
        counted.write_all(&bytes(3, 1_000_000)).await.unwrap();
        counted.shutdown().await.unwrap();
        let mut count = String::new();
        counted.read_to_string(&mut count).await.unwrap();
        assert_eq!(count, "1000000", "half-close keeps the answer's direction open");

        let refused = connect_agent(&sandbox.dir, 99).await.unwrap_err();
        assert!(matches!(refused, ConnectError::Refused { why: Refusal::Closed, .. }), "{refused}");
        let status = sandbox.status().await;
        assert_eq!((status.carrier, status.ingress_open), (Carrier::Up, 2));
        assert!(status.last_activity_ms > 0 && status.bytes_in > 1_000_000);
        drop((stalled, flooded));
        // What the stalled one was sent is still to be delivered; nobody waits for the flood.
        while sandbox.status().await.ingress_open > 1 {}
        assert!(sandbox.shutdown().await.success());
    });
}

#[test]
fn a_transfer_goes_on_over_pauses_and_ends_with_the_session() {
    in_runtime(async {
        let mut sandbox = Sandbox::start().await;
        sandbox.attach(Session::New).await;
        let transfer = connect_agent(&sandbox.dir, ECHO).await.unwrap();
        let transfer = tokio::spawn(echo(transfer, 4, 30_000_000));
        for _ in 0..6 {
            let before = sandbox.status().await.bytes_in;
            // In the middle of it: some more has moved since the last pause.
            while sandbox.status().await.bytes_in < before + 500_000 && !transfer.is_finished() {}
            sandbox.ask(Request::Detach).await;
            sandbox.freeze().await;
            assert_eq!(sandbox.status().await.carrier, Carrier::Detached);
            sandbox.attach(Session::Continue).await;
        }
        // A checkpoint that keeps running.
        sandbox.ask(Request::Detach).await;
        let dir = sandbox.dir.clone();
        let arrived = tokio::spawn(async move { connect_agent(&dir, ECHO).await.unwrap() });
        sandbox.ask(Request::Reattach).await;
        echo(arrived.await.unwrap(), 5, 100_000).await;
        transfer.await.unwrap();

        // A rollback: what was open ends, what comes is served.
        let mut flooded = connect_agent(&sandbox.dir, FLOOD).await.unwrap();
        sandbox.freeze().await;
        sandbox.attach(Session::New).await;
        let mut buffer = vec![0; 64 << 10];
        while flooded.read(&mut buffer).await.unwrap_or(0) > 0 {}
        echo(connect_agent(&sandbox.dir, ECHO).await.unwrap(), 6, 100_000).await;
        assert_eq!(sandbox.status().await.generation, Generation(8));
        assert!(sandbox.shutdown().await.success());
    });
}

#[test]
fn the_sandbox_reaches_what_the_rules_allow_and_nothing_else() {
    in_runtime(async {
        let mut sandbox = Sandbox::start().await;
        sandbox.attach(Session::New).await;
        echo(connect_agent(&sandbox.dir, ECHO).await.unwrap(), 1, 10).await;
        let server = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.unwrap();
        let port = server.local_addr().unwrap().port();
        tokio::spawn(async move {
            while let Ok((mut socket, _)) = server.accept().await {
                tokio::spawn(async move {
                    let (mut reading, mut writing) = socket.split();
                    tokio::io::copy(&mut reading, &mut writing).await
                });
            }
        });
        let to = |host: &str| Open::Tcp { host: host.to_owned(), port };
        let rules = EgressRules { internet: true, allow: vec!["0.0.0.0/0".into()], deny: Vec::new() };
        sandbox.ask(Request::SetEgress { rules }).await;
        for host in
            ["127.0.0.1", "localhost", "::1", "::ffff:127.0.0.1", "0.0.0.0", "169.254.169.254", "10.0.0.1"]
        {
            let (_, reply) = sandbox.dial(&to(host)).await;
            assert!(matches!(reply, Reply::Refused { why: Refusal::Denied, .. }), "{host}: {reply:?}");
        }
        assert_eq!(sandbox.status().await.egress_denied, 7);

        sandbox.allow(&["127.0.0.0/8"]).await;
        let (mut stream, reply) = sandbox.dial(&to("127.0.0.1")).await;
        assert_eq!(reply, Reply::Ok);
        stream.write_all(b"hello").await.unwrap();
        let mut back = [0; 5];
        stream.read_exact(&mut back).await.unwrap();
        assert_eq!((&back, sandbox.status().await.egress_open), (b"hello", 1));
        // It lives on over a pause.
        sandbox.ask(Request::Detach).await;
        sandbox.freeze().await;
        sandbox.attach(Session::Continue).await;
        stream.write_all(b"again").await.unwrap();
        stream.read_exact(&mut back).await.unwrap();
        assert_eq!(&back, b"again");
        // The rules change: it ends, with an error.
        sandbox.allow(&[]).await;
        assert_eq!(stream.read_u8().await.unwrap_err().kind(), ErrorKind::ConnectionReset);

        sandbox.allow(&["127.0.0.1"]).await;
        let (mut stream, reply) = sandbox.dial(&to("localhost")).await;
        assert_eq!(reply, Reply::Ok, "the name's address is allowed, however it is written");
        stream.write_all(b"x").await.unwrap();
        stream.shutdown().await.unwrap();
        let mut rest = String::new();
        stream.read_to_string(&mut rest).await.unwrap();
        assert_eq!(rest, "x");
        let unused = unused_port().await;
        let (_, reply) = sandbox.dial(&Open::Tcp { host: "127.0.0.1".into(), port: unused }).await;
        assert!(matches!(reply, Reply::Refused { why: Refusal::Closed, .. }), "{reply:?}");
        assert!(sandbox.shutdown().await.success());
    });
}

async fn unused_port() -> u16 {
    let listener = TcpListener::bind(SocketAddr::from((Ipv4Addr::LOCALHOST, 0))).await.unwrap();
    listener.local_addr().unwrap().port()
}

fn question(name: &str, kind: u16) -> Vec<u8> {
    let mut bytes = vec![0x12, 0x34, 0x01, 0, 0, 1, 0, 0, 0, 0, 0, 0];
    for label in name.split('.') {
        bytes.push(u8::try_from(label.len()).unwrap());
        bytes.extend_from_slice(label.as_bytes());
    }
    bytes.push(0);
    bytes.extend_from_slice(&kind.to_be_bytes());
    bytes.extend_from_slice(&[0, 1]);
    assert!(Query::parse(&bytes).is_ok());
    bytes
}

#[test]
fn names_are_answered_by_the_rules() {
    in_runtime(async {
        let mut sandbox = Sandbox::start().await;
        sandbox.attach(Session::New).await;
        echo(connect_agent(&sandbox.dir, ECHO).await.unwrap(), 1, 10).await;
        for (allow, rcode, answers) in [
            (&[][..], Rcode::Refused, 0),
            (&["10.0.0.0/8"], Rcode::Refused, 0),
            (&["127.0.0.1"], Rcode::NoError, 1),
        ] {
            sandbox.allow(allow).await;
            let (mut stream, reply) = sandbox.dial(&Open::Dns).await;
            assert_eq!(reply, Reply::Ok);
            let question = question("localhost", 1);
            stream.write_u16(u16::try_from(question.len()).unwrap()).await.unwrap();
            stream.write_all(&question).await.unwrap();
            let mut answer = vec![0; usize::from(stream.read_u16().await.unwrap())];
            stream.read_exact(&mut answer).await.unwrap();
            assert_eq!((answer[3] & 0x0F, answer[7]), (rcode as u8, answers), "{allow:?}");
            stream.shutdown().await.unwrap();
            assert_eq!(stream.read(&mut answer).await.unwrap(), 0);
        }
        assert!(sandbox.shutdown().await.success());
    });
}

#[test]
fn one_keeper_per_folder_and_a_killed_one_is_replaced() {
    in_runtime(async {
        let mut sandbox = Sandbox::start().await;
        sandbox.attach(Session::New).await;
        let mut second = spawn_keeper(&sandbox.dir);
        assert!(!second.wait().unwrap().success(), "two keepers in one folder");
        let mut flooded = connect_agent(&sandbox.dir, FLOOD).await.unwrap();
        for signal in
            [rustix::process::Signal::TERM, rustix::process::Signal::HUP, rustix::process::Signal::INT]
        {
            let pid = rustix::process::Pid::from_raw(i32::try_from(sandbox.keeper.id()).unwrap()).unwrap();
            rustix::process::kill_process(pid, signal).unwrap();
        }
        echo(connect_agent(&sandbox.dir, ECHO).await.unwrap(), 1, 10).await;

        sandbox.keeper.kill().unwrap();
        sandbox.keeper.wait().unwrap();
        let mut buffer = vec![0; 64 << 10];
        while flooded.read(&mut buffer).await.unwrap_or(0) > 0 {}
        sandbox.freeze().await;
        sandbox.keeper = spawn_keeper(&sandbox.dir);
        sandbox.client = loop {
            // The dead keeper's socket is in the folder until the next one replaces it.
            if let Ok(mut client) = KeeperClient::connect(&sandbox.dir).await
                && client.request(&Request::Hello, &[]).await.is_ok()
            {
                break client;
            }
            assert!(sandbox.keeper.try_wait().unwrap().is_none());
            tokio::task::yield_now().await;
        };
        let nothing = Request::Attach { generation: Generation(9), session: Session::Continue };
        let refused = sandbox.client.request(&nothing, &[]).await.unwrap();
        assert!(matches!(refused, Answer::Failed { .. }), "{refused:?}");
        sandbox.attach(Session::New).await;
        echo(connect_agent(&sandbox.dir, ECHO).await.unwrap(), 2, 1_000_000).await;
        assert!(sandbox.shutdown().await.success());
    });
}
