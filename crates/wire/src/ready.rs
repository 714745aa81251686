//! Waiting for a descriptor, with a registration of its own for each wait.
//!
//! Nothing of a wait is left behind in the kernel, so a wait never hears of an earlier one, and it is
//! right on every selector of the runtime: poll(2), which the agent uses in its sandbox, forgets a
//! descriptor once it has told of it. Who waits has tried before and was refused: waits are rare.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::task::{Context, Poll, ready};

use tokio::io::Interest;
use tokio::io::unix::AsyncFd;

/// A registration under way.
#[derive(Debug)]
pub struct Wait(AsyncFd<OwnedFd>);

impl Wait {
    /// For a duplicate of `fd`: several may wait for one descriptor.
    #[expect(
        deprecated,
        reason = "its successor is unsafe for the sake of types that do not hold a descriptor; `OwnedFd` does"
    )]
    pub fn new(fd: impl AsFd, interest: Interest) -> io::Result<Self> {
        Ok(Self(AsyncFd::with_interest(fd.as_fd().try_clone_to_owned()?, interest)?))
    }

    pub fn poll_readable(&self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        ready!(self.0.poll_read_ready(cx))?.retain_ready();
        Poll::Ready(Ok(()))
    }

    pub fn poll_writable(&self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        ready!(self.0.poll_write_ready(cx))?.retain_ready();
        Poll::Ready(Ok(()))
    }
}

/// Waits until there may be something to read. Cancel-safe.
pub async fn readable(fd: impl AsFd) -> io::Result<()> {
    Wait::new(fd, Interest::READABLE)?.0.readable().await?.retain_ready();
    Ok(())
}

/// Waits until there may be room to write. Cancel-safe.
pub async fn writable(fd: impl AsFd) -> io::Result<()> {
    Wait::new(fd, Interest::WRITABLE)?.0.writable().await?.retain_ready();
    Ok(())
}
