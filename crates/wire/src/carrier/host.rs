//! The keeper's end of the carrier: pipes come and go, streams stay.
//!
//! ```text
//! idle ─attach(New)─> greeting ─WELCOME─> up ─violation, LOST─> broken
//!          ^                └──────┬───────┘                      │
//!          └──────────── attach(New), a new session ──────────────┘
//! ```
//!
//! Beside this state the pipes are active or not: `detach` stops the bytes at once, in any state;
//! `reattach` goes on with the same pipes; `attach(Continue)` goes on with others, after what was left
//! in the former ones was carried over in order. All of it happens under one lock, so no byte moves
//! once `detach` has returned.

use std::future::poll_fn;
use std::io;
use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Waker};

use dormouse_types::{Generation, random_hex};

use super::fd::{PipeEnd, prepare};
use super::link::{Inbound, Outbound, WRITE_BYTES};
use super::mux::{Mux, OpenError, Role};
use super::packet::{
    CARRIER_VERSION, Decoded, Greeting, HEADER_BYTES, Kind, MAGIC, PACKET_BYTES_MAX, decode_packet,
};
use super::stream::{Shared, Stream};
use crate::keeper::{Carrier, Session};

/// Reads and writes per turn: then other tasks of the thread go first.
const TURN_MAX: usize = 8;
/// A pipe never holds more; a former pipe that yields more is being written to.
const DRAIN_BYTES_MAX: usize = 64 << 20;

/// The four descriptors of an `Attach`, in the request's order.
#[derive(Debug)]
pub struct HostPipes {
    pub to_sandbox: OwnedFd,
    pub from_sandbox: OwnedFd,
    /// Duplicate of the sandbox's stdin: keeps unread bytes alive and lets them be taken back.
    pub sandbox_stdin: OwnedFd,
    /// Duplicate of the sandbox's stdout: the pipe has no end while nothing runs.
    pub sandbox_stdout: OwnedFd,
}

#[derive(Debug, thiserror::Error)]
pub enum AttachError {
    #[error("the {which} pipe cannot be used")]
    Pipe { which: &'static str, source: io::Error },
    #[error("what was left in the former pipes cannot be carried over; a new session is needed")]
    CarryOver { source: io::Error },
    #[error("there is no session that could go on: {why}")]
    NoSession { why: &'static str },
    #[error("no pipes were attached before")]
    NeverAttached,
}

#[derive(Debug)]
struct Pipes {
    writer: PipeEnd<OwnedFd>,
    reader: PipeEnd<OwnedFd>,
    sandbox_stdin: OwnedFd,
    /// Never read: while it is open, the pipe has a writer.
    _sandbox_stdout: OwnedFd,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    Idle,
    Greeting,
    Up,
    Broken,
}

#[derive(Debug)]
struct Inner {
    pipes: Option<Pipes>,
    is_active: bool,
    state: State,
    generation: Generation,
    session: Arc<Shared>,
    inbound: Inbound,
    outbound: Outbound,
    driver: Option<Waker>,
    waiters: Vec<Waker>,
    is_closed: bool,
}

/// The keeper's end; clones are the same carrier. [`Host::run`] moves the bytes.
#[derive(Debug, Clone)]
pub struct Host(Arc<Mutex<Inner>>);

impl Default for Host {
    fn default() -> Self {
        Self::new()
    }
}

impl Host {
    #[must_use]
    pub fn new() -> Self {
        Self(Arc::new(Mutex::new(Inner {
            pipes: None,
            is_active: false,
            state: State::Idle,
            generation: Generation(0),
            session: Shared::new(Mux::new(Role::Host, 0)),
            inbound: Inbound::default(),
            outbound: Outbound::default(),
            driver: None,
            waiters: Vec::new(),
            is_closed: false,
        })))
    }

    fn inner(&self) -> MutexGuard<'_, Inner> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Moves bytes whenever pipes are attached, until [`Host::close`]. One task runs it.
    pub async fn run(&self) {
        poll_fn(|cx| self.inner().poll_drive(cx)).await;
    }

    /// Binds the carrier to pipes; within a tokio runtime.
    pub fn attach(
        &self,
        pipes: HostPipes,
        session: Session,
        generation: Generation,
    ) -> Result<(), AttachError> {
        let pipes = Pipes::open(pipes)?;
        self.inner().attach(pipes, session, generation)
    }

    /// Stops the bytes; streams stay and wait.
    pub fn detach(&self) {
        self.inner().is_active = false;
    }

    /// Goes on with the same pipes.
    pub fn reattach(&self) -> Result<(), AttachError> {
        let mut inner = self.inner();
        if inner.pipes.is_none() {
            return Err(AttachError::NeverAttached);
        }
        inner.activate();
        Ok(())
    }

    /// Ends every stream and [`Host::run`].
    pub fn close(&self) {
        let mut inner = self.inner();
        inner.is_closed = true;
        inner.pipes = None;
        inner.end_session(State::Broken);
        inner.wake_driver();
    }

    #[must_use]
    pub fn state(&self) -> Carrier {
        let inner = self.inner();
        match inner.state {
            State::Broken => Carrier::Broken,
            _ if !inner.is_active => Carrier::Detached,
            State::Idle => Carrier::Detached,
            State::Greeting => Carrier::Greeting,
            State::Up => Carrier::Up,
        }
    }

    #[must_use]
    pub fn generation(&self) -> Generation {
        self.inner().generation
    }

    /// Opens a stream; waits while there is no session (nothing attached yet, or not answered yet).
    /// While detached the stream opens and waits for its answer.
    pub async fn open(&self) -> Result<Stream, OpenError> {
        poll_fn(|cx| {
            let mut inner = self.inner();
            match inner.state {
                State::Up => Poll::Ready(inner.open()),
                State::Broken => Poll::Ready(Err(OpenError::Ended)),
                State::Idle | State::Greeting => {
                    inner.wait(cx.waker());
                    Poll::Pending
                }
            }
        })
        .await
    }

    /// The next stream that the agent opened, of whatever session. `None` after `close`.
    pub async fn accept(&self) -> Option<Stream> {
        poll_fn(|cx| {
            let mut inner = self.inner();
            if inner.is_closed {
                return Poll::Ready(None);
            }
            let accepted = inner.session.mux().accept();
            if let Some(id) = accepted {
                return Poll::Ready(Some(Stream::new(id, inner.session.clone())));
            }
            inner.session.mux().on_accept(cx.waker());
            inner.wait(cx.waker());
            Poll::Pending
        })
        .await
    }
}

impl Pipes {
    fn open(pipes: HostPipes) -> Result<Self, AttachError> {
        let end = |which: &'static str, fd: OwnedFd| {
            prepare(&fd).map(|()| PipeEnd::new(fd)).map_err(|source| AttachError::Pipe { which, source })
        };
        Ok(Self {
            writer: end("stdin", pipes.to_sandbox)?,
            reader: end("stdout", pipes.from_sandbox)?,
            sandbox_stdin: pipes.sandbox_stdin,
            _sandbox_stdout: pipes.sandbox_stdout,
        })
    }

    /// What the sandbox has not read. `FIONREAD` instead of `O_NONBLOCK`: the open file is the
    /// sandbox's own.
    fn take_back(&self) -> io::Result<Vec<u8>> {
        let mut taken = Vec::new();
        loop {
            let waiting =
                usize::try_from(rustix::io::ioctl_fionread(&self.sandbox_stdin)?).unwrap_or(usize::MAX);
            if waiting == 0 {
                return Ok(taken);
            }
            let at = taken.len();
            if at + waiting > DRAIN_BYTES_MAX {
                return Err(io::Error::other("the former stdin pipe does not run dry"));
            }
            taken.resize(at + waiting, 0);
            let n = rustix::io::read(&self.sandbox_stdin, &mut taken[at..])?;
            taken.truncate(at + n);
        }
    }
}

impl Inner {
    fn wait(&mut self, waker: &Waker) {
        if !self.waiters.iter().any(|known| known.will_wake(waker)) {
            self.waiters.push(waker.clone());
        }
    }

    fn wake_driver(&mut self) {
        for waker in self.driver.take().into_iter().chain(self.waiters.drain(..)) {
            waker.wake();
        }
    }

    fn activate(&mut self) {
        self.is_active = true;
        // After a restore a byte must arrive so that the agent looks at its pipe again: bytes that
        // were in flight travel inside the image and announce themselves to nobody.
        if self.outbound.is_empty() {
            self.outbound.push_filler(1);
        }
        self.wake_driver();
    }

    fn open(&mut self) -> Result<Stream, OpenError> {
        let id = self.session.mux().open()?;
        Ok(Stream::new(id, self.session.clone()))
    }

    fn end_session(&mut self, state: State) {
        self.session.mux().end();
        self.state = state;
        self.inbound = Inbound::default();
        self.outbound.clear();
        for waker in self.waiters.drain(..) {
            waker.wake();
        }
    }

    fn attach(&mut self, pipes: Pipes, session: Session, generation: Generation) -> Result<(), AttachError> {
        match session {
            Session::New => {
                self.end_session(State::Greeting);
                let number = u64::from_str_radix(&random_hex(8), 16).unwrap_or_default();
                self.session = Shared::new(Mux::new(Role::Host, number));
                self.outbound.push_filler(PACKET_BYTES_MAX);
                let greeting = Greeting { version: CARRIER_VERSION, generation };
                greeting.encode(&mut self.outbound.bytes, Kind::Hello, number);
            }
            Session::Continue => {
                self.carry_over()?;
            }
        }
        self.generation = generation;
        self.pipes = Some(pipes);
        self.activate();
        Ok(())
    }

    /// Takes what is left in the former pipes: first what the sandbox wrote, then what it did not read.
    fn carry_over(&mut self) -> Result<(), AttachError> {
        let why = match self.state {
            State::Idle => Some("none was started"),
            State::Broken => Some("it is broken"),
            State::Greeting | State::Up => None,
        };
        if let Some(why) = why {
            return Err(AttachError::NoSession { why });
        }
        self.is_active = false;
        let Some(former) = self.pipes.take() else {
            return Err(AttachError::NoSession { why: "no pipes were attached" });
        };
        let carried = self.read_rest(&former).and_then(|()| former.take_back());
        match carried {
            Ok(unread) => self.outbound.put_in_front(unread),
            Err(source) => {
                self.end_session(State::Broken);
                return Err(AttachError::CarryOver { source });
            }
        }
        if self.state == State::Broken {
            return Err(AttachError::NoSession { why: "its last bytes were damaged" });
        }
        Ok(())
    }

    fn read_rest(&mut self, former: &Pipes) -> io::Result<()> {
        let mut total = 0;
        while total < DRAIN_BYTES_MAX {
            let n = match rustix::io::read(former.reader.get_ref(), self.inbound.room()) {
                Ok(0) | Err(rustix::io::Errno::AGAIN) => return Ok(()),
                Err(rustix::io::Errno::INTR) => continue,
                Ok(n) => n,
                Err(error) => return Err(error.into()),
            };
            total += n;
            self.inbound.filled(n);
            self.take_packets();
        }
        Err(io::Error::other("the former stdout pipe does not run dry"))
    }

    fn poll_drive(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        if self.is_closed {
            return Poll::Ready(());
        }
        self.driver = Some(cx.waker().clone());
        for _ in 0..TURN_MAX {
            if !self.is_active || self.state == State::Broken {
                return Poll::Pending;
            }
            let wrote = self.poll_write_some(cx);
            let read = self.poll_read_some(cx);
            match (wrote, read) {
                (Ok(false), Ok(false)) => {
                    if self.session.mux().is_empty() {
                        self.inbound.trim();
                        self.outbound.trim();
                    }
                    return Poll::Pending;
                }
                (Ok(_), Ok(_)) => {}
                (Err(error), _) | (_, Err(error)) => {
                    tracing::error!(%error, "the carrier's pipe failed: its streams end");
                    self.end_session(State::Broken);
                }
            }
        }
        cx.waker().wake_by_ref();
        Poll::Pending
    }

    fn poll_read_some(&mut self, cx: &mut Context<'_>) -> io::Result<bool> {
        let Some(pipes) = &self.pipes else { return Ok(false) };
        match pipes.reader.poll_read(cx, self.inbound.room()) {
            Poll::Pending => Ok(false),
            Poll::Ready(Ok(0)) => Err(io::ErrorKind::UnexpectedEof.into()),
            Poll::Ready(Ok(n)) => {
                self.inbound.filled(n);
                self.take_packets();
                Ok(true)
            }
            Poll::Ready(Err(error)) => Err(error),
        }
    }

    fn poll_write_some(&mut self, cx: &mut Context<'_>) -> io::Result<bool> {
        if self.outbound.is_empty() && self.state == State::Up {
            let mut mux = self.session.mux();
            mux.on_work(cx.waker());
            mux.produce(&mut self.outbound.bytes, WRITE_BYTES);
        }
        let Some(pipes) = &self.pipes else { return Ok(false) };
        if self.outbound.is_empty() {
            return Ok(false);
        }
        match pipes.writer.poll_write(cx, self.outbound.unsent()) {
            Poll::Pending => Ok(false),
            Poll::Ready(Ok(n)) => {
                self.outbound.sent(n);
                Ok(true)
            }
            Poll::Ready(Err(error)) => Err(error),
        }
    }

    fn take_packets(&mut self) {
        if self.state == State::Greeting {
            self.seek_welcome();
        }
        let mut damaged = false;
        let mut failure: Option<String> = None;
        while self.state == State::Up && failure.is_none() {
            let mut mux = self.session.mux();
            match self.inbound.next_packet(&mut damaged) {
                Some((packet, _)) if packet.session != mux.session() => {
                    failure = Some("a packet of another session".to_owned());
                }
                Some((packet, _)) if packet.kind == Kind::Lost => {
                    failure = Some("the agent lost the thread".to_owned());
                }
                Some((packet, payload)) => {
                    failure = mux.receive(packet, payload).err().map(|violation| violation.to_string());
                }
                None if damaged => failure = Some("bytes that are no packet".to_owned()),
                None => return,
            }
        }
        if let Some(why) = failure {
            tracing::error!(why, "the sandbox broke the carrier: its streams end");
            self.end_session(State::Broken);
        }
    }

    /// Drops all that is not this session's `WELCOME`. Never waits for the rest of anything else: what
    /// looks like the start of a long packet may be part of a stale payload.
    fn seek_welcome(&mut self) {
        const WELCOME_BYTES: usize = HEADER_BYTES + 12;
        loop {
            let bytes = self.inbound.unread();
            let Some(at) = bytes.iter().position(|byte| *byte == MAGIC) else {
                self.inbound.skip(usize::MAX / 2);
                return;
            };
            let candidate = &bytes[at..];
            let is_kind = candidate.get(1).is_none_or(|kind| *kind == Kind::Welcome as u8);
            if is_kind && candidate.len() < WELCOME_BYTES {
                self.inbound.skip(at);
                return;
            }
            let head = &candidate[..WELCOME_BYTES.min(candidate.len())];
            if let Decoded::Packet(packet) = decode_packet(head)
                && packet.kind == Kind::Welcome
                && packet.session == self.session.mux().session()
            {
                self.inbound.skip(at + packet.total());
                self.state = State::Up;
                self.wake_driver();
                return;
            }
            self.inbound.skip(at + 1);
        }
    }
}
