//! The agent's end of the carrier: stdin and stdout, which never change, though what is behind them
//! does at every restore.
//!
//! `HELLO` starts a session and ends the former one with all its streams. When nobody holds the other
//! ends (the keeper died) the agent looks again at growing intervals: that is the only time when it
//! does something by the clock.

use std::future::poll_fn;
use std::io;
use std::os::fd::AsFd;
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use dormouse_types::Generation;
use tokio::time::{Instant, Sleep, sleep_until};

use super::fd::{PipeEnd, prepare};
use super::link::{Inbound, Outbound, WRITE_BYTES};
use super::mux::{Mux, OpenError, Role};
use super::packet::{CARRIER_VERSION, Greeting, Kind, encode_packet};
use super::stream::{Shared, Stream};

const TURN_MAX: usize = 8;
const LOOK_AGAIN: Duration = Duration::from_millis(100);
const LOOK_AGAIN_MAX: Duration = Duration::from_secs(2);

#[derive(Debug)]
struct Inner {
    session: Option<Arc<Shared>>,
    generation: Generation,
    inbound: Inbound,
    outbound: Outbound,
    waiters: Vec<Waker>,
}

/// The agent's end; clones are the same carrier. [`Guest::run`] moves the bytes.
#[derive(Debug, Clone)]
pub struct Guest(Arc<Mutex<Inner>>);

impl Default for Guest {
    fn default() -> Self {
        Self::new()
    }
}

impl Guest {
    #[must_use]
    pub fn new() -> Self {
        Self(Arc::new(Mutex::new(Inner {
            session: None,
            generation: Generation(0),
            inbound: Inbound::default(),
            outbound: Outbound::default(),
            waiters: Vec::new(),
        })))
    }

    fn inner(&self) -> MutexGuard<'_, Inner> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Generation that the session's `HELLO` named; 0 before the first.
    #[must_use]
    pub fn generation(&self) -> Generation {
        self.inner().generation
    }

    /// Opens a stream towards the keeper.
    pub fn open(&self) -> Result<Stream, OpenError> {
        let session = self.inner().session.clone().ok_or(OpenError::Ended)?;
        let id = session.mux().open()?;
        Ok(Stream::new(id, session))
    }

    /// The next stream that the keeper opened.
    pub async fn accept(&self) -> Stream {
        poll_fn(|cx| {
            let mut inner = self.inner();
            if let Some(session) = inner.session.clone() {
                let accepted = session.mux().accept();
                if let Some(id) = accepted {
                    return Poll::Ready(Stream::new(id, session));
                }
                session.mux().on_accept(cx.waker());
            }
            if !inner.waiters.iter().any(|known| known.will_wake(cx.waker())) {
                inner.waiters.push(cx.waker().clone());
            }
            Poll::Pending
        })
        .await
    }

    /// Moves the bytes; ends only with an error of the descriptors themselves. `reader` and `writer`
    /// become non-blocking; they are closed at the end only if `R` and `W` own them (a `BorrowedFd`
    /// does not).
    pub async fn run<R, W>(&self, reader: R, writer: W) -> io::Result<()>
    where
        R: AsFd,
        W: AsFd,
    {
        prepare(&reader)?;
        prepare(&writer)?;
        let mut ends =
            Ends { reader: End::new(PipeEnd::new(reader)), writer: End::new(PipeEnd::new(writer)) };
        poll_fn(|cx| self.poll_drive(&mut ends, cx)).await
    }

    fn poll_drive<R, W>(&self, ends: &mut Ends<R, W>, cx: &mut Context<'_>) -> Poll<io::Result<()>>
    where
        R: AsFd,
        W: AsFd,
    {
        for _ in 0..TURN_MAX {
            let mut inner = self.inner();
            let wrote = inner.poll_write_some(&mut ends.writer, cx)?;
            let read = inner.poll_read_some(&mut ends.reader, cx)?;
            if !wrote && !read {
                inner.trim();
                return Poll::Pending;
            }
        }
        cx.waker().wake_by_ref();
        Poll::Pending
    }
}

struct Ends<R: AsFd, W: AsFd> {
    reader: End<R>,
    writer: End<W>,
}

/// A pipe's end that may have lost its other end for a while.
struct End<T: AsFd> {
    pipe: PipeEnd<T>,
    look_again: Option<Pin<Box<Sleep>>>,
    interval: Duration,
}

impl<T: AsFd> End<T> {
    fn new(pipe: PipeEnd<T>) -> Self {
        Self { pipe, look_again: None, interval: LOOK_AGAIN }
    }

    /// The pipe, unless it is not time to look at it again.
    fn poll_pipe(&mut self, cx: &mut Context<'_>) -> Poll<&PipeEnd<T>> {
        if let Some(sleep) = &mut self.look_again {
            if sleep.as_mut().poll(cx).is_pending() {
                return Poll::Pending;
            }
            self.look_again = None;
        }
        Poll::Ready(&self.pipe)
    }

    /// The other end is gone.
    fn lost(&mut self) {
        self.look_again = Some(Box::pin(sleep_until(Instant::now() + self.interval)));
        self.interval = (self.interval * 2).min(LOOK_AGAIN_MAX);
    }
}

impl Inner {
    fn poll_read_some<R: AsFd>(&mut self, end: &mut End<R>, cx: &mut Context<'_>) -> io::Result<bool> {
        let Poll::Ready(pipe) = end.poll_pipe(cx) else { return Ok(false) };
        match pipe.poll_read(cx, self.inbound.room()) {
            Poll::Pending => Ok(false),
            Poll::Ready(Ok(0)) => {
                end.lost();
                Ok(true)
            }
            Poll::Ready(Ok(n)) => {
                end.interval = LOOK_AGAIN;
                self.inbound.filled(n);
                self.take_packets();
                Ok(true)
            }
            Poll::Ready(Err(error)) => Err(error),
        }
    }

    fn poll_write_some<W: AsFd>(&mut self, end: &mut End<W>, cx: &mut Context<'_>) -> io::Result<bool> {
        if self.outbound.is_empty() {
            let Some(session) = &self.session else { return Ok(false) };
            let mut mux = session.mux();
            mux.on_work(cx.waker());
            mux.produce(&mut self.outbound.bytes, WRITE_BYTES);
            if self.outbound.is_empty() {
                return Ok(false);
            }
        }
        let Poll::Ready(pipe) = end.poll_pipe(cx) else { return Ok(false) };
        match pipe.poll_write(cx, self.outbound.unsent()) {
            Poll::Pending => Ok(false),
            Poll::Ready(Ok(n)) => {
                end.interval = LOOK_AGAIN;
                self.outbound.sent(n);
                Ok(true)
            }
            Poll::Ready(Err(error)) if error.kind() == io::ErrorKind::BrokenPipe => {
                end.lost();
                Ok(true)
            }
            Poll::Ready(Err(error)) => Err(error),
        }
    }

    fn trim(&mut self) {
        if self.session.as_ref().is_none_or(|session| session.mux().is_empty()) {
            self.inbound.trim();
            self.outbound.trim();
        }
    }

    fn end_session(&mut self) -> Option<u64> {
        let session = self.session.take()?;
        let mut mux = session.mux();
        mux.end();
        // What was produced and not yet written is of the old session: the keeper drops it anyway.
        self.outbound.clear();
        Some(mux.session())
    }

    fn start_session(&mut self, number: u64, generation: Generation) {
        self.end_session();
        self.outbound.clear();
        self.generation = generation;
        self.session = Some(Shared::new(Mux::new(Role::Guest, number)));
        let greeting = Greeting { version: CARRIER_VERSION, generation };
        greeting.encode(&mut self.outbound.bytes, Kind::Welcome, number);
        for waker in self.waiters.drain(..) {
            waker.wake();
        }
    }

    fn take_packets(&mut self) {
        loop {
            let mut damaged = false;
            let mut hello = None;
            match self.inbound.next_packet(&mut damaged) {
                Some((packet, payload)) if packet.kind == Kind::Hello => {
                    hello = Greeting::parse(payload).map(|greeting| (packet.session, greeting.generation));
                }
                Some((packet, payload)) => {
                    // Packets of another session come only between a cut and the next HELLO.
                    let session = self.session.as_ref().map(|session| session.mux());
                    if let Some(mut mux) = session.filter(|mux| mux.session() == packet.session) {
                        damaged = mux.receive(packet, payload).is_err();
                    }
                }
                None if !damaged => return,
                None => {}
            }
            if let Some((number, generation)) = hello {
                self.start_session(number, generation);
            }
            if damaged && let Some(number) = self.end_session() {
                encode_packet(&mut self.outbound.bytes, Kind::Lost, number, 0, &[]);
            }
        }
    }
}
