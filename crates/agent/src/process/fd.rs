//! A pipe's or a terminal's end that tasks read and write.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use dormouse_wire::ready;
use rustix::fs::{OFlags, fcntl_getfl, fcntl_setfl};
use rustix::io::Errno;

#[derive(Debug)]
pub struct Fd(OwnedFd);

impl Fd {
    /// Makes the descriptor non-blocking; it must not share its open file with the child.
    pub fn new(fd: OwnedFd) -> io::Result<Self> {
        fcntl_setfl(&fd, fcntl_getfl(&fd)? | OFlags::NONBLOCK)?;
        Ok(Self(fd))
    }

    /// What is there now; `WouldBlock` when that is nothing. 0 at the end.
    pub fn read_now(&self, buffer: &mut [u8]) -> io::Result<usize> {
        loop {
            match rustix::io::read(&self.0, &mut *buffer) {
                Err(Errno::INTR) => {}
                // A terminal whose other side is closed.
                Err(Errno::IO) => return Ok(0),
                other => return Ok(other?),
            }
        }
    }

    /// Waits until there may be something to read: to be called after a read was refused. Cancel-safe.
    pub async fn readable(&self) -> io::Result<()> {
        ready::readable(&self.0).await
    }

    pub async fn write_all(&self, mut bytes: &[u8]) -> io::Result<()> {
        while !bytes.is_empty() {
            match rustix::io::write(&self.0, bytes) {
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN) => ready::writable(&self.0).await?,
                count => bytes = bytes.get(count?..).unwrap_or_default(),
            }
        }
        Ok(())
    }
}

impl AsFd for Fd {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}
