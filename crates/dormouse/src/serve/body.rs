//! Bodies on their way through the data plane.

use std::pin::Pin;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll};

use bytes::Bytes;
use http::Method;
use http_body::{Body as _, Frame, SizeHint};
use hyper::body::Incoming;

use super::control;
use super::pool::{Key, Pool, Sender};
use super::reply::{self, Reply};

/// A request's body that can be given to a second connection as long as none has touched it.
#[derive(Clone)]
pub struct Kept(Arc<Slot>);

struct Slot {
    body: Mutex<Option<Incoming>>,
    hint: SizeHint,
    empty: bool,
    ended: AtomicBool,
}

impl Kept {
    pub fn new(body: Incoming) -> Self {
        let empty = body.is_end_stream();
        let slot = Slot {
            hint: body.size_hint(),
            empty,
            ended: AtomicBool::new(empty),
            body: Mutex::new(Some(body)),
        };
        Self(Arc::new(slot))
    }

    pub fn body(&self) -> RequestBody {
        RequestBody { slot: Arc::clone(&self.0), body: None }
    }

    fn take(&self) -> Option<Incoming> {
        self.0.body.lock().unwrap_or_else(PoisonError::into_inner).take()
    }

    pub fn ended(&self) -> bool {
        self.0.ended.load(Ordering::Acquire)
    }

    /// Whether a service that saw the head and nothing else can be asked again.
    pub fn can_be_repeated(&self, method: &Method) -> bool {
        let untouched = self.0.body.lock().unwrap_or_else(PoisonError::into_inner).is_some();
        untouched && (method.is_idempotent() || !self.0.empty)
    }

    /// An answer of our own: reads the rest of the body, or says that the connection ends.
    pub async fn refused(&self, reply: Reply) -> Reply {
        if self.ended() {
            return reply;
        }
        let drained = match self.take() {
            Some(body) => control::drain(body).await,
            None => false,
        };
        if drained { reply } else { reply::closing(reply) }
    }
}

/// What a connection into a sandbox is given as body.
pub struct RequestBody {
    slot: Arc<Slot>,
    body: Option<Incoming>,
}

impl http_body::Body for RequestBody {
    type Data = Bytes;
    type Error = hyper::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, hyper::Error>>> {
        if self.body.is_none() {
            let taken = self.slot.body.lock().unwrap_or_else(PoisonError::into_inner).take();
            self.body = taken;
        }
        let Some(body) = self.body.as_mut() else { return Poll::Ready(None) };
        let polled = Pin::new(&mut *body).poll_frame(context);
        let ended = matches!(polled, Poll::Ready(None)) || body.is_end_stream();
        if ended {
            self.slot.ended.store(true, Ordering::Release);
        }
        polled
    }

    fn is_end_stream(&self) -> bool {
        self.body.as_ref().map_or(self.slot.empty, Incoming::is_end_stream)
    }

    fn size_hint(&self) -> SizeHint {
        self.body.as_ref().map_or_else(|| self.slot.hint, Incoming::size_hint)
    }
}

/// An answer's body, which gives its connection back at its end.
pub struct AnswerBody {
    body: Incoming,
    lender: Option<Lender>,
}

/// Where the connection of an answer goes.
pub struct Lender {
    pub pool: Arc<Pool>,
    pub key: Key,
    pub sender: Sender,
}

impl AnswerBody {
    pub fn new(body: Incoming, lender: Option<Lender>) -> Self {
        let mut answer = Self { body, lender };
        answer.give_back_at_end();
        answer
    }

    fn give_back_at_end(&mut self) {
        if self.body.is_end_stream()
            && let Some(lender) = self.lender.take()
        {
            lender.pool.put(lender.key, lender.sender);
        }
    }
}

impl http_body::Body for AnswerBody {
    type Data = Bytes;
    type Error = hyper::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, hyper::Error>>> {
        let polled = Pin::new(&mut self.body).poll_frame(context);
        if matches!(polled, Poll::Ready(None | Some(Ok(_)))) {
            self.give_back_at_end();
        }
        polled
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}
