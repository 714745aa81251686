//! What a client attached to a process is sent: start, data, keepalive, end.

use std::io;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use dormouse_wire::envd::connect::{Error, end, message};
use dormouse_wire::envd::process::{DataEvent, EndEvent, KeepAlive, ProcessEvent, StartEvent, StartResponse};
use futures_util::Stream;
use tokio_util::sync::CancellationToken;

use super::output::{Item, Kind, Subscription};
use super::registry::Process;
use crate::clock::sleep_awake_or_never;

/// Whose stream it is.
#[derive(Debug, Clone, Copy)]
pub enum Caller {
    /// Started it: the deadline is the process's, and the stream tells when it passed.
    Start,
    /// Connected to it: the limit is the stream's own.
    Connect { limit: Option<Duration> },
}

/// The frames of a stream.
pub fn events(
    process: Arc<Process>,
    subscription: Subscription,
    caller: Caller,
    keepalive: Duration,
    closing: CancellationToken,
) -> impl Stream<Item = io::Result<Bytes>> + Send + 'static {
    let limit = match caller {
        Caller::Start => None,
        Caller::Connect { limit } => limit,
    };
    let state = Events {
        process,
        subscription,
        caller,
        keepalive,
        closing,
        limit: Box::pin(sleep_awake_or_never(limit)),
        next: Next::Start,
    };
    futures_util::stream::unfold(state, async |mut state| {
        let frames = state.step().await?;
        Some((frames, state))
    })
}

enum Next {
    Start,
    Data,
    Nothing,
}

struct Events<L> {
    process: Arc<Process>,
    subscription: Subscription,
    caller: Caller,
    keepalive: Duration,
    closing: CancellationToken,
    limit: L,
    next: Next,
}

impl<L: Future<Output = ()> + Unpin> Events<L> {
    /// The next frames; `None`: the stream has ended. An error cuts the connection.
    async fn step(&mut self) -> Option<io::Result<Bytes>> {
        match self.next {
            Next::Start => {
                self.next = Next::Data;
                let start = StartEvent { pid: self.process.pid };
                Some(Ok(frame(ProcessEvent { start: Some(start), ..ProcessEvent::default() })))
            }
            Next::Data => Some(self.data().await),
            Next::Nothing => None,
        }
    }

    async fn data(&mut self) -> io::Result<Bytes> {
        tokio::select! {
            biased;
            () = self.closing.cancelled() => {
                self.next = Next::Nothing;
                Err(io::Error::new(io::ErrorKind::ConnectionAborted, "the sandbox is shutting down"))
            }
            () = &mut self.limit => {
                self.next = Next::Nothing;
                Ok(end(Some(Error::deadline_exceeded("the time limit of this stream has passed; the process runs on"))))
            }
            item = self.subscription.next() => Ok(match item {
                Item::Data(kind, bytes) => frame(data(kind, bytes)),
                Item::End(event) => self.last(event),
            }),
            () = tokio::time::sleep(self.keepalive) => {
                Ok(frame(ProcessEvent { keepalive: Some(KeepAlive {}), ..ProcessEvent::default() }))
            }
        }
    }

    fn last(&mut self, event: EndEvent) -> Bytes {
        self.next = Next::Nothing;
        if matches!(self.caller, Caller::Start) && self.process.overdue.load(Ordering::Relaxed) {
            let message = "the process was killed as its deadline (Connect-Timeout-Ms) has passed";
            return end(Some(Error::deadline_exceeded(message)));
        }
        let mut both = BytesMut::from(frame(ProcessEvent { end: Some(event), ..ProcessEvent::default() }));
        both.extend_from_slice(&end(None));
        both.freeze()
    }
}

fn frame(event: ProcessEvent) -> Bytes {
    message(&StartResponse { event: Some(event) })
}

fn data(kind: Kind, bytes: Bytes) -> ProcessEvent {
    let data = match kind {
        Kind::Stdout => DataEvent { stdout: Some(bytes), ..DataEvent::default() },
        Kind::Stderr => DataEvent { stderr: Some(bytes), ..DataEvent::default() },
        Kind::Pty => DataEvent { pty: Some(bytes), ..DataEvent::default() },
    };
    ProcessEvent { data: Some(data), ..ProcessEvent::default() }
}
