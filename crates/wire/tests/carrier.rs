//! The carrier over real pipes: whatever is cut, no byte is lost, repeated, or leaked into another
//! session.

#![allow(
    clippy::unwrap_used,
    clippy::cast_possible_truncation,
    reason = "a test fails by panicking; its patterns are cut on purpose"
)]

use std::future::Future;
use std::os::fd::OwnedFd;

use dormouse_types::Generation;
use dormouse_wire::carrier::{Guest, Host, HostPipes, OpenError, Stream};
use dormouse_wire::keeper::{Carrier, Session};
use proptest::prelude::*;
use rustix::pipe::{PipeFlags, fcntl_setpipe_size, pipe_with};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::task::JoinHandle;

/// The sandbox's own ends.
struct Inside {
    stdin: OwnedFd,
    stdout: OwnedFd,
}

fn pipes() -> (HostPipes, Inside) {
    let (stdin, to_sandbox) = pipe_with(PipeFlags::CLOEXEC).unwrap();
    let (from_sandbox, stdout) = pipe_with(PipeFlags::CLOEXEC).unwrap();
    let host = HostPipes {
        to_sandbox,
        from_sandbox,
        sandbox_stdin: stdin.try_clone().unwrap(),
        sandbox_stdout: stdout.try_clone().unwrap(),
    };
    (host, Inside { stdin, stdout })
}

/// Byte `at` of the stream `tag`: no two tags and no two places look alike for long.
fn pattern(tag: u64, at: usize) -> u8 {
    let mixed = (tag ^ (at as u64 / 8)).wrapping_mul(0x9E37_79B9_7F4A_7C15).rotate_left(29);
    (mixed.wrapping_mul(0xBF58_476D_1CE4_E5B9) >> (8 * (at as u64 % 8))) as u8
}

fn expected(tag: u64, len: usize) -> Vec<u8> {
    (0..len).map(|at| pattern(tag, at)).collect()
}

/// The agent of these tests: echoes every stream and says where it ends.
fn echo(guest: &Guest) -> JoinHandle<()> {
    let guest = guest.clone();
    tokio::spawn(async move {
        loop {
            let mut stream = guest.accept().await;
            tokio::spawn(async move {
                let mut buffer = vec![0; 10_000];
                loop {
                    match stream.read(&mut buffer).await {
                        Ok(0) => return stream.shutdown().await,
                        Ok(n) => stream.write_all(&buffer[..n]).await?,
                        Err(error) => return Err(error),
                    }
                }
            });
        }
    })
}

struct Bench {
    host: Host,
    guest: Guest,
    inside: Option<JoinHandle<()>>,
    pipe_bytes: usize,
    generation: u64,
    /// The one that the last `HELLO` named.
    greeted: u64,
}

impl Bench {
    fn new(pipe_bytes: usize) -> Self {
        let (host, guest) = (Host::new(), Guest::new());
        let moving = host.clone();
        tokio::spawn(async move { moving.run().await });
        echo(&guest);
        Self { host, guest, inside: None, pipe_bytes, generation: 0, greeted: 0 }
    }

    /// What a checkpoint does: the sandbox stops where it is.
    async fn freeze(&mut self) {
        if let Some(inside) = self.inside.take() {
            inside.abort();
            let _ = inside.await;
        }
    }

    fn attach(&mut self, session: Session) {
        let (pipes, inside) = pipes();
        let sizes = [inside.stdin.try_clone().unwrap(), inside.stdout.try_clone().unwrap()];
        self.generation += 1;
        if session == Session::New {
            self.greeted = self.generation;
        }
        self.host.attach(pipes, session, Generation(self.generation)).unwrap();
        let (guest, pipe_bytes) = (self.guest.clone(), self.pipe_bytes);
        self.inside = Some(tokio::spawn(async move {
            // `run` enlarges the pipes at its first poll; small ones are wanted, so that packets are cut.
            let running = guest.run(inside.stdin, inside.stdout);
            tokio::pin!(running);
            let mut first = true;
            std::future::poll_fn(|cx| {
                let polled = running.as_mut().poll(cx);
                if std::mem::take(&mut first) {
                    for fd in &sizes {
                        // Refused while more than that is in the pipe: then it stays large.
                        let _ = fcntl_setpipe_size(fd, pipe_bytes);
                    }
                }
                polled
            })
            .await
            .unwrap();
        }));
    }
}

/// Sends the pattern and reads it back. `Ok`: whole. `Err`: cut after so many bytes, all of them right.
async fn round(stream: Stream, tag: u64, len: usize) -> Result<(), usize> {
    let sent = expected(tag, len);
    let (mut reading, mut writing) = tokio::io::split(stream);
    let write = async {
        writing.write_all(&sent).await?;
        writing.shutdown().await
    };
    let read = async {
        let (mut received, mut buffer) = (Vec::new(), vec![0; 7_000]);
        loop {
            match reading.read(&mut buffer).await {
                Ok(0) => return (received, true),
                Ok(n) => received.extend_from_slice(&buffer[..n]),
                Err(_) => return (received, false),
            }
        }
    };
    let (wrote, (received, is_whole)) = tokio::join!(write, read);
    assert_eq!(received, sent[..received.len()], "bytes of stream {tag} differ");
    if is_whole {
        wrote.unwrap();
        assert_eq!(received.len(), len, "a clean end before the last byte of stream {tag}");
        return Ok(());
    }
    Err(received.len())
}

/// What happens to the sandbox while streams run.
#[derive(Debug, Clone)]
enum Event {
    /// Pause and resume onto new pipes.
    Continue,
    /// A checkpoint that keeps running.
    Reattach,
    /// Rollback: the same pipes are gone, the agent's state may be anywhere in a packet.
    New,
}

fn events() -> impl Strategy<Value = Vec<(Event, u16)>> {
    let event = prop_oneof![Just(Event::Continue), Just(Event::Reattach), Just(Event::New)];
    proptest::collection::vec((event, 0_u16..400), 0..8)
}

async fn live(lens: Vec<usize>, pipe_bytes: usize, events: Vec<(Event, u16)>) {
    let mut bench = Bench::new(pipe_bytes);
    bench.attach(Session::New);
    let mut running = Vec::new();
    let mut session = 0_u64;
    let start = |host: &Host, session: u64| {
        let rounds = lens.iter().enumerate().map(|(at, len)| {
            let (host, tag, len) = (host.clone(), session * 1000 + at as u64, *len);
            tokio::spawn(async move {
                // Waits for the session's greeting.
                let stream = host.open().await.unwrap();
                round(stream, tag, len).await
            })
        });
        rounds.collect::<Vec<_>>()
    };
    running.push((session, start(&bench.host, session)));
    for (event, turns) in events {
        for _ in 0..turns {
            tokio::task::yield_now().await;
        }
        match event {
            Event::Continue => {
                bench.host.detach();
                bench.freeze().await;
                bench.attach(Session::Continue);
            }
            Event::Reattach => {
                bench.host.detach();
                tokio::task::yield_now().await;
                bench.host.reattach().unwrap();
            }
            Event::New => {
                bench.freeze().await;
                bench.attach(Session::New);
                session += 1;
                running.push((session, start(&bench.host, session)));
            }
        }
    }
    for (of, rounds) in running {
        for round in rounds {
            let ended = round.await.unwrap();
            assert!(ended.is_ok() || of < session, "a stream of the last session was cut: {ended:?}");
        }
    }
    assert_eq!(bench.host.state(), Carrier::Up);
    assert_eq!(bench.guest.generation(), Generation(bench.greeted));
    assert_eq!(bench.host.generation(), Generation(bench.generation));
}

fn in_runtime(test: impl Future<Output = ()>) {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    // Not about speed: a byte that is lost shows as a wait without end.
    let guarded = async { tokio::time::timeout(std::time::Duration::from_secs(120), test).await };
    runtime.block_on(guarded).expect("the carrier waits for bytes that never come");
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 96, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn no_byte_is_lost_repeated_or_leaked(
        lens in proptest::collection::vec(0_usize..300_000, 1..5),
        pipe_pages in 1_usize..20,
        events in events(),
    ) {
        in_runtime(live(lens, pipe_pages * 4096, events));
    }
}

#[test]
fn a_stalled_reader_holds_back_nobody_and_costs_bounded_memory() {
    in_runtime(async {
        let mut bench = Bench::new(1 << 20);
        bench.attach(Session::New);
        let mut stalled = bench.host.open().await.unwrap();
        // Written until the other side's echo, which nobody reads, has filled every buffer on its way.
        let mut written = 0_usize;
        let chunk = vec![7_u8; 64 << 10];
        loop {
            let full = std::future::poll_fn(|cx| {
                use tokio::io::AsyncWrite;
                match std::pin::Pin::new(&mut stalled).poll_write(cx, &chunk) {
                    std::task::Poll::Ready(n) => std::task::Poll::Ready(Some(n.unwrap())),
                    std::task::Poll::Pending => std::task::Poll::Ready(None),
                }
            })
            .await;
            match full {
                Some(n) => written += n,
                // Other streams go on; if this one is still full after them, it is at its limit.
                None => {
                    let before = written;
                    for tag in 0..3 {
                        let stream = bench.host.open().await.unwrap();
                        round(stream, tag, 500_000).await.unwrap();
                    }
                    let more = std::future::poll_fn(|cx| {
                        use tokio::io::AsyncWrite;
                        std::task::Poll::Ready(
                            std::pin::Pin::new(&mut stalled).poll_write(cx, &chunk).is_ready(),
                        )
                    });
                    if !more.await && before == written {
                        break;
                    }
                    written += chunk.len();
                }
            }
            assert!(written < 8 << 20, "{written} bytes were taken for a reader that does not read");
        }
        drop(stalled);
        let stream = bench.host.open().await.unwrap();
        round(stream, 9, 100_000).await.unwrap();
    });
}

#[test]
fn an_abort_is_an_error_and_a_shutdown_is_an_end() {
    in_runtime(async {
        let mut bench = Bench::new(1 << 20);
        bench.attach(Session::New);
        let host = bench.host.clone();
        let accepting = tokio::spawn(async move {
            let aborted = host.accept().await.unwrap();
            let ended = host.accept().await.unwrap();
            (aborted, ended)
        });
        // A session is there once a stream of the host was answered.
        round(bench.host.open().await.unwrap(), 1, 10).await.unwrap();
        let mut aborted = bench.guest.open().unwrap();
        aborted.write_all(b"half").await.unwrap();
        let mut ended = bench.guest.open().unwrap();
        ended.write_all(b"whole").await.unwrap();
        ended.shutdown().await.unwrap();
        drop(ended);
        let (mut seen_aborted, mut seen_ended) = accepting.await.unwrap();
        let mut text = String::new();
        seen_ended.read_to_string(&mut text).await.unwrap();
        assert_eq!(text, "whole");
        let mut start = [0; 4];
        seen_aborted.read_exact(&mut start).await.unwrap();
        drop(aborted);
        let error = seen_aborted.read_u8().await.unwrap_err();
        assert_eq!(error.kind(), std::io::ErrorKind::ConnectionReset);
        // Dropped after shutdown: the other side learns that nobody reads its answer.
        std::future::poll_fn(|cx| seen_ended.poll_void(cx)).await;
    });
}

#[test]
fn a_guest_that_breaks_the_rules_breaks_its_own_carrier_only() {
    in_runtime(async {
        let host = Host::new();
        let moving = host.clone();
        tokio::spawn(async move { moving.run().await });
        let (pipes, inside) = pipes();
        host.attach(pipes, Session::New, Generation(1)).unwrap();
        let guest = Guest::new();
        echo(&guest);
        let mut inside_stdout =
            tokio::net::unix::pipe::Sender::from_owned_fd(inside.stdout.try_clone().unwrap()).unwrap();
        let running = guest.clone();
        let inside = tokio::spawn(async move { running.run(inside.stdin, inside.stdout).await });
        let stream = host.open().await.unwrap();
        round(stream, 1, 1000).await.unwrap();
        let mut waiting = host.open().await.unwrap();
        inside_stdout.write_all(&[0xD1; 5000]).await.unwrap();
        let error = waiting.read_u8().await.unwrap_err();
        assert_eq!(error.kind(), std::io::ErrorKind::ConnectionReset);
        assert_eq!(host.state(), Carrier::Broken);
        assert_eq!(host.open().await.unwrap_err(), OpenError::Ended);
        inside.abort();
    });
}

#[test]
fn an_agent_without_a_keeper_waits_and_takes_the_next_one() {
    in_runtime(async {
        let guest = Guest::new();
        echo(&guest);
        let host = Host::new();
        let moving = host.clone();
        tokio::spawn(async move { moving.run().await });
        // A keeper that died: nobody holds the writing end of stdin or the reading end of stdout.
        let (dead, inside) = pipes();
        let (sandbox_stdin, sandbox_stdout) = (dead.sandbox_stdin, dead.sandbox_stdout);
        drop((dead.to_sandbox, dead.from_sandbox));
        let running = guest.clone();
        let task = tokio::spawn(async move { running.run(inside.stdin, inside.stdout).await });
        for _ in 0..10 {
            tokio::task::yield_now().await;
        }
        let to_sandbox = reopen(&sandbox_stdin, false);
        let from_sandbox = reopen(&sandbox_stdout, true);
        let next = HostPipes { to_sandbox, from_sandbox, sandbox_stdin, sandbox_stdout };
        host.attach(next, Session::New, Generation(1)).unwrap();
        round(host.open().await.unwrap(), 3, 100_000).await.unwrap();
        assert!(!task.is_finished());
        task.abort();
    });
}

/// The same pipe by another open file, as a new keeper would be given it.
fn reopen(fd: &OwnedFd, to_read: bool) -> OwnedFd {
    use std::os::fd::AsRawFd;
    let path = format!("/proc/self/fd/{}", fd.as_raw_fd());
    std::fs::OpenOptions::new().read(to_read).write(!to_read).open(path).unwrap().into()
}
