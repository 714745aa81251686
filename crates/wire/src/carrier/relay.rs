//! Joins a carrier stream and a socket, both directions, each with its own end.
//!
//! One scratch buffer per thread serves all relays: a quiet stream holds no memory. Only what one side
//! does not take at once is kept, at most one buffer per direction.

use std::cell::RefCell;
use std::future::poll_fn;
use std::io;
use std::pin::Pin;
use std::task::{Context, Poll, ready};

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

use super::stream::Stream;

const SCRATCH_BYTES: usize = 64 << 10;
/// Chunks per turn: then other tasks of the thread go first.
const TURN_CHUNKS_MAX: usize = 8;

thread_local! {
    static SCRATCH: RefCell<Vec<u8>> = const { RefCell::new(Vec::new()) };
}

/// Where bytes went.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Direction {
    ToCarrier,
    FromCarrier,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Phase {
    Copying,
    /// The last bytes are written; the other side's writing end is to be closed.
    Closing,
    Done,
}

#[derive(Debug)]
struct Half {
    kept: Vec<u8>,
    kept_from: usize,
    phase: Phase,
    seen_end: bool,
}

/// The two operations that a half needs of its sides.
trait Side {
    fn poll_take(&mut self, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>>;
    fn poll_give(&mut self, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>>;
    fn poll_close(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<()>>;
}

struct Socket<'a, S>(&'a mut S);

impl<S: AsyncRead + AsyncWrite + Unpin> Side for Socket<'_, S> {
    fn poll_take(&mut self, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut *self.0).poll_read(cx, buf)
    }

    fn poll_give(&mut self, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        Pin::new(&mut *self.0).poll_write(cx, bytes)
    }

    fn poll_close(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut *self.0).poll_shutdown(cx)
    }
}

struct Carried<'a>(&'a Stream);

impl Side for Carried<'_> {
    fn poll_take(&mut self, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        self.0.poll_read_to(cx, buf)
    }

    fn poll_give(&mut self, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        self.0.poll_write_from(cx, bytes)
    }

    fn poll_close(&mut self, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.0.close_writing();
        Poll::Ready(Ok(()))
    }
}

impl Half {
    const fn new() -> Self {
        Self { kept: Vec::new(), kept_from: 0, phase: Phase::Copying, seen_end: false }
    }

    /// Ready when this direction is finished; an error ends the whole relay.
    fn poll(
        &mut self,
        cx: &mut Context<'_>,
        from: &mut impl Side,
        to: &mut impl Side,
        moved: &mut impl FnMut(usize),
    ) -> Poll<io::Result<()>> {
        let mut chunks = 0;
        while self.phase == Phase::Copying {
            while self.kept_from < self.kept.len() {
                let n = ready!(to.poll_give(cx, &self.kept[self.kept_from..]))?;
                if n == 0 {
                    return Poll::Ready(Err(io::ErrorKind::WriteZero.into()));
                }
                moved(n);
                self.kept_from += n;
            }
            (self.kept, self.kept_from) = (Vec::new(), 0);
            if self.seen_end {
                self.phase = Phase::Closing;
                break;
            }
            if chunks == TURN_CHUNKS_MAX {
                cx.waker().wake_by_ref();
                return Poll::Pending;
            }
            chunks += 1;
            ready!(self.poll_chunk(cx, from, to, moved))?;
        }
        if self.phase == Phase::Closing {
            ready!(to.poll_close(cx))?;
            self.phase = Phase::Done;
        }
        Poll::Ready(Ok(()))
    }

    fn poll_chunk(
        &mut self,
        cx: &mut Context<'_>,
        from: &mut impl Side,
        to: &mut impl Side,
        moved: &mut impl FnMut(usize),
    ) -> Poll<io::Result<()>> {
        SCRATCH.with_borrow_mut(|scratch| {
            if scratch.is_empty() {
                *scratch = vec![0; SCRATCH_BYTES];
            }
            let mut buf = ReadBuf::new(scratch);
            ready!(from.poll_take(cx, &mut buf))?;
            let bytes = buf.filled();
            if bytes.is_empty() {
                self.seen_end = true;
                return Poll::Ready(Ok(()));
            }
            let taken = match to.poll_give(cx, bytes) {
                Poll::Ready(given) => given?,
                Poll::Pending => 0,
            };
            moved(taken);
            self.kept.extend_from_slice(&bytes[taken..]);
            Poll::Ready(Ok(()))
        })
    }
}

/// Copies both ways until both directions have ended or one fails. `moved` hears of every byte that
/// one side took; `socket_gone` is asked at the end of the socket's bytes whether the socket is wholly
/// closed (then nobody waits for the rest of the answer).
///
/// On an error the caller drops the stream, which resets it; on success nothing is left to do.
pub async fn relay<S: AsyncRead + AsyncWrite + Unpin>(
    stream: &Stream,
    socket: &mut S,
    mut moved: impl FnMut(Direction, usize),
    socket_gone: impl Fn(&S) -> bool,
) -> io::Result<()> {
    let (mut up, mut down) = (Half::new(), Half::new());
    poll_fn(|cx| {
        if up.phase != Phase::Done {
            let mut moved = |n| moved(Direction::ToCarrier, n);
            match up.poll(cx, &mut Socket(&mut *socket), &mut Carried(stream), &mut moved) {
                Poll::Ready(Ok(())) if socket_gone(socket) => return Poll::Ready(Ok(())),
                Poll::Ready(Ok(())) | Poll::Pending => {}
                // Nobody reads any more; what came from there before may still be delivered.
                Poll::Ready(Err(error)) if error.kind() == io::ErrorKind::BrokenPipe => {
                    up.phase = Phase::Done
                }
                Poll::Ready(Err(error)) => return Poll::Ready(Err(error)),
            }
        }
        let mut moved = |n| moved(Direction::FromCarrier, n);
        ready!(down.poll(cx, &mut Carried(stream), &mut Socket(&mut *socket), &mut moved))?;
        if up.phase == Phase::Done {
            return Poll::Ready(Ok(()));
        }
        // The other side said all it had to and has gone: a quiet socket would never find out.
        ready!(stream.poll_void(cx));
        Poll::Ready(Err(io::ErrorKind::ConnectionReset.into()))
    })
    .await
}
