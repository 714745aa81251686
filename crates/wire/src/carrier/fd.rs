//! Non-blocking ends of pipes under tokio.

use std::io;
use std::os::fd::{AsFd, AsRawFd};
use std::task::{Context, Poll, ready};

use rustix::fs::{OFlags, fcntl_getfl, fcntl_setfl};
use tokio::io::unix::AsyncFd;

/// What a pipe shall hold: fewer system calls and wake-ups per byte.
const PIPE_BYTES: usize = 1 << 20;

/// Makes the open file behind `fd` non-blocking and the pipe large (the latter as far as allowed).
pub fn prepare(fd: impl AsFd) -> io::Result<()> {
    let fd = fd.as_fd();
    let flags = fcntl_getfl(fd)?;
    fcntl_setfl(fd, flags | OFlags::NONBLOCK)?;
    // Best effort: unprivileged users and sandboxes may be refused; the carrier works with any size.
    let _ = rustix::pipe::fcntl_setpipe_size(fd, PIPE_BYTES);
    Ok(())
}

/// One end of a pipe. Dropping it closes what `T` owns and nothing else.
#[derive(Debug)]
pub struct PipeEnd<T: AsRawFd>(AsyncFd<T>);

impl<T: AsRawFd + AsFd> PipeEnd<T> {
    /// The fd must be non-blocking ([`prepare`]).
    #[expect(
        deprecated,
        reason = "its successor is unsafe for the sake of types that do not hold a descriptor; `AsFd` does"
    )]
    pub fn new(fd: T) -> io::Result<Self> {
        AsyncFd::new(fd).map(Self)
    }

    /// Gives the descriptor back, unregistered.
    pub fn into_inner(self) -> T {
        self.0.into_inner()
    }

    pub fn get_ref(&self) -> &T {
        self.0.get_ref()
    }

    /// 0 bytes: every writer is gone. [`io::ErrorKind::WouldBlock`]: it was closed and is open again; the
    /// end must be registered anew ([`PipeEnd::into_inner`], [`PipeEnd::new`]).
    pub fn poll_read(&self, cx: &mut Context<'_>, buf: &mut [u8]) -> Poll<io::Result<usize>> {
        loop {
            let mut guard = ready!(self.0.poll_read_ready(cx))?;
            let closed = guard.ready().is_read_closed();
            match guard.try_io(|fd| Ok(rustix::io::read(fd.get_ref(), &mut *buf)?)) {
                Ok(result) => return Poll::Ready(result),
                // The runtime never clears "closed": this loop would not end.
                Err(_would_block) if closed => return reopened(),
                Err(_would_block) => {}
            }
        }
    }

    /// As [`PipeEnd::poll_read`]; every reader's end is [`io::ErrorKind::BrokenPipe`].
    pub fn poll_write(&self, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        loop {
            let mut guard = ready!(self.0.poll_write_ready(cx))?;
            let closed = guard.ready().is_write_closed();
            match guard.try_io(|fd| Ok(rustix::io::write(fd.get_ref(), bytes)?)) {
                Ok(result) => return Poll::Ready(result),
                Err(_would_block) if closed => return reopened(),
                Err(_would_block) => {}
            }
        }
    }
}

fn reopened() -> Poll<io::Result<usize>> {
    Poll::Ready(Err(io::ErrorKind::WouldBlock.into()))
}

#[cfg(test)]
mod tests {
    use std::fs::OpenOptions;
    use std::future::poll_fn;
    use std::os::fd::OwnedFd;

    use super::*;

    fn reopen(fd: &OwnedFd, options: &OpenOptions) -> OwnedFd {
        options.open(format!("/proc/self/fd/{}", fd.as_raw_fd())).unwrap().into()
    }

    #[tokio::test]
    async fn an_end_that_was_closed_and_is_open_again_says_so_and_does_not_spin() {
        let (reader, writer) = std::io::pipe().unwrap();
        let reader = OwnedFd::from(reader);
        prepare(&reader).unwrap();
        drop(writer);
        let end = PipeEnd::new(reader).unwrap();
        let mut buf = [0; 8];
        assert_eq!(poll_fn(|cx| end.poll_read(cx, &mut buf)).await.unwrap(), 0);
        let writer = reopen(end.get_ref(), OpenOptions::new().write(true));
        let error = poll_fn(|cx| end.poll_read(cx, &mut buf)).await.unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::WouldBlock);
        let end = PipeEnd::new(end.into_inner()).unwrap();
        rustix::io::write(&writer, b"here").unwrap();
        assert_eq!(poll_fn(|cx| end.poll_read(cx, &mut buf)).await.unwrap(), 4);
    }

    #[tokio::test]
    async fn a_writing_end_that_is_open_again_and_full_does_not_spin() {
        let (reader, writer) = std::io::pipe().unwrap();
        let writer = OwnedFd::from(writer);
        prepare(&writer).unwrap();
        drop(reader);
        let end = PipeEnd::new(writer).unwrap();
        let error = poll_fn(|cx| end.poll_write(cx, b"lost")).await.unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::BrokenPipe);
        let _reader = reopen(end.get_ref(), OpenOptions::new().read(true));
        let bytes = vec![0; PIPE_BYTES];
        let error = loop {
            match poll_fn(|cx| end.poll_write(cx, &bytes)).await {
                Ok(_) => {}
                Err(error) => break error,
            }
        };
        assert_eq!(error.kind(), io::ErrorKind::WouldBlock);
    }
}
