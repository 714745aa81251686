//! One stream of the carrier, as tokio knows streams.

use std::io;
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll};

use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt, ReadBuf};

use super::mux::{Mux, Read, Write};
use crate::stream::LINE_BYTES_MAX;

/// The streams of one session, shared by their handles and the link that moves their packets.
#[derive(Debug)]
pub(super) struct Shared(Mutex<Mux>);

impl Shared {
    pub(super) fn new(mux: Mux) -> Arc<Self> {
        Arc::new(Self(Mutex::new(mux)))
    }

    pub(super) fn mux(&self) -> MutexGuard<'_, Mux> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A byte stream between keeper and agent.
///
/// `shutdown` closes this direction and lets the other go on. A drop without it resets the stream: the
/// other side reads an error, never a clean end. Reads fail with `ConnectionReset` when the stream
/// was reset or its session replaced before its end was received.
#[derive(Debug)]
pub struct Stream {
    id: u32,
    shared: Arc<Shared>,
}

impl Stream {
    pub(super) fn new(id: u32, shared: Arc<Shared>) -> Self {
        Self { id, shared }
    }

    /// Ready once the stream is void in both directions (reset, or its session is over).
    pub fn poll_void(&self, cx: &mut Context<'_>) -> Poll<()> {
        if self.shared.mux().is_void(self.id, cx.waker()) { Poll::Ready(()) } else { Poll::Pending }
    }

    pub(super) fn poll_read_to(&self, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let max = buf.remaining();
        if max == 0 {
            return Poll::Ready(Ok(()));
        }
        match self.shared.mux().read(self.id, max, cx.waker(), |bytes| buf.put_slice(bytes)) {
            Read::Bytes(_) | Read::End => Poll::Ready(Ok(())),
            Read::Reset => Poll::Ready(Err(io::Error::new(
                io::ErrorKind::ConnectionReset,
                "the carrier's stream was reset before its end",
            ))),
            Read::Wait => Poll::Pending,
        }
    }

    pub(super) fn poll_write_from(&self, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        match self.shared.mux().write(self.id, bytes, cx.waker()) {
            Write::Bytes(n) => Poll::Ready(Ok(n)),
            Write::Void => Poll::Ready(Err(io::Error::new(
                io::ErrorKind::BrokenPipe,
                "the carrier's stream takes no more bytes",
            ))),
            Write::Wait => Poll::Pending,
        }
    }

    pub(super) fn close_writing(&self) {
        self.shared.mux().shutdown(self.id);
    }
}

impl AsyncRead for Stream {
    fn poll_read(self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        self.poll_read_to(cx, buf)
    }
}

impl AsyncWrite for Stream {
    fn poll_write(self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        self.poll_write_from(cx, bytes)
    }

    /// Written bytes are on their way by themselves.
    fn poll_flush(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn poll_shutdown(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.close_writing();
        Poll::Ready(Ok(()))
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        self.shared.mux().release(self.id);
    }
}

/// Reads the line that opens or answers a stream, byte by byte so that nothing behind it is taken.
pub async fn read_line<R: AsyncRead + Unpin>(stream: &mut R) -> io::Result<String> {
    let mut line = Vec::with_capacity(64);
    loop {
        let byte = stream.read_u8().await?;
        if byte == b'\n' {
            let text = String::from_utf8(line);
            return text.map_err(|_| io::Error::new(io::ErrorKind::InvalidData, "the line is not UTF-8"));
        }
        if line.len() >= LINE_BYTES_MAX {
            let message = format!("the line is longer than {LINE_BYTES_MAX} bytes");
            return Err(io::Error::new(io::ErrorKind::InvalidData, message));
        }
        line.push(byte);
    }
}

/// Writes a line and its newline in one piece.
pub async fn write_line<W: AsyncWrite + Unpin>(
    stream: &mut W,
    line: &impl std::fmt::Display,
) -> io::Result<()> {
    stream.write_all(format!("{line}\n").as_bytes()).await?;
    stream.flush().await
}
