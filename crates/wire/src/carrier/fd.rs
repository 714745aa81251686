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

    /// 0 bytes: every writer is gone.
    pub fn poll_read(&self, cx: &mut Context<'_>, buf: &mut [u8]) -> Poll<io::Result<usize>> {
        loop {
            let mut guard = ready!(self.0.poll_read_ready(cx))?;
            match guard.try_io(|fd| Ok(rustix::io::read(fd.get_ref(), &mut *buf)?)) {
                Ok(result) => return Poll::Ready(result),
                Err(_would_block) => {}
            }
        }
    }

    pub fn poll_write(&self, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        loop {
            let mut guard = ready!(self.0.poll_write_ready(cx))?;
            match guard.try_io(|fd| Ok(rustix::io::write(fd.get_ref(), bytes)?)) {
                Ok(result) => return Poll::Ready(result),
                Err(_would_block) => {}
            }
        }
    }
}
