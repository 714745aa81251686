//! A pipe's or a terminal's end that tasks read and write.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::fs::{OFlags, fcntl_getfl, fcntl_setfl};
use rustix::io::Errno;
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;

#[derive(Debug)]
pub struct Fd(AsyncFd<OwnedFd>);

impl Fd {
    /// Makes the descriptor non-blocking; it must not share its open file with the child.
    #[allow(deprecated, reason = "an OwnedFd upholds what the newer, unsafe constructor asks its caller for")]
    pub fn new(fd: OwnedFd, interest: Interest) -> io::Result<Self> {
        fcntl_setfl(&fd, fcntl_getfl(&fd)? | OFlags::NONBLOCK)?;
        Ok(Self(AsyncFd::with_interest(fd, interest)?))
    }

    /// What is there now; `WouldBlock` when that is nothing. 0 at the end.
    pub fn read_now(&self, buffer: &mut [u8]) -> io::Result<usize> {
        loop {
            match rustix::io::read(self.0.get_ref(), &mut *buffer) {
                Err(Errno::INTR) => {}
                // A terminal whose other side is closed.
                Err(Errno::IO) => return Ok(0),
                other => return Ok(other?),
            }
        }
    }

    /// Waits until there may be something to read. Cancel-safe.
    pub async fn readable(&self) -> io::Result<()> {
        let mut guard = self.0.readable().await?;
        // Readiness is kept until a read says otherwise: reads happen outside of the guard, so it is
        // cleared here and the caller reads until `WouldBlock` before it waits again.
        guard.clear_ready();
        Ok(())
    }

    pub async fn write_all(&self, mut bytes: &[u8]) -> io::Result<()> {
        while !bytes.is_empty() {
            let mut guard = self.0.writable().await?;
            let written = guard.try_io(|fd| {
                loop {
                    match rustix::io::write(fd.get_ref(), bytes) {
                        Err(Errno::INTR) => {}
                        other => return Ok(other?),
                    }
                }
            });
            match written {
                Ok(count) => bytes = bytes.get(count?..).unwrap_or_default(),
                Err(_would_block) => {}
            }
        }
        Ok(())
    }
}

impl AsFd for Fd {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.get_ref().as_fd()
    }
}
