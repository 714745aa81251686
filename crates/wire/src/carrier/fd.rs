//! Non-blocking ends of pipes under tokio.

use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::{Mutex, PoisonError};
use std::task::{Context, Poll};

use rustix::fs::{OFlags, fcntl_getfl, fcntl_setfl};
use rustix::io::Errno;
use tokio::io::Interest;

use crate::ready::Wait;

/// Refusals of an end that is said to be ready, in one turn.
const ATTEMPTS_MAX: usize = 8;

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
pub struct PipeEnd<T: AsFd> {
    fd: T,
    /// Who was refused and waits.
    wait: Mutex<Option<Wait>>,
}

impl<T: AsFd> PipeEnd<T> {
    /// The fd must be non-blocking ([`prepare`]).
    pub fn new(fd: T) -> Self {
        Self { fd, wait: Mutex::new(None) }
    }

    pub fn get_ref(&self) -> &T {
        &self.fd
    }

    /// Gives the descriptor back.
    pub fn into_inner(self) -> T {
        self.fd
    }

    /// 0 bytes: every writer is gone.
    pub fn poll_read(&self, cx: &mut Context<'_>, buf: &mut [u8]) -> Poll<io::Result<usize>> {
        self.poll(cx, Interest::READABLE, |fd| rustix::io::read(fd, &mut *buf))
    }

    /// As [`PipeEnd::poll_read`]; every reader's end is [`io::ErrorKind::BrokenPipe`].
    pub fn poll_write(&self, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        self.poll(cx, Interest::WRITABLE, |fd| rustix::io::write(fd, bytes))
    }

    fn poll(
        &self,
        cx: &mut Context<'_>,
        interest: Interest,
        mut attempt: impl FnMut(BorrowedFd<'_>) -> Result<usize, Errno>,
    ) -> Poll<io::Result<usize>> {
        let mut wait = self.wait.lock().unwrap_or_else(PoisonError::into_inner);
        for _ in 0..ATTEMPTS_MAX {
            match attempt(self.fd.as_fd()) {
                Err(Errno::INTR) => continue,
                Err(Errno::AGAIN) => {}
                other => {
                    *wait = None;
                    return Poll::Ready(Ok(other?));
                }
            }
            let registered = match wait.take() {
                Some(registered) => registered,
                None => Wait::new(&self.fd, interest)?,
            };
            let told = if interest.is_readable() {
                registered.poll_readable(cx)
            } else {
                registered.poll_writable(cx)
            };
            match told {
                Poll::Ready(told) => told?,
                Poll::Pending => {
                    *wait = Some(registered);
                    return Poll::Pending;
                }
            }
        }
        // Told that it is ready and refused again and again: others get their turn first.
        cx.waker().wake_by_ref();
        Poll::Pending
    }
}

#[cfg(test)]
mod tests {
    use std::fs::OpenOptions;
    use std::future::poll_fn;
    use std::os::fd::{AsRawFd, OwnedFd};

    use super::*;

    fn reopen(fd: &OwnedFd, options: &OpenOptions) -> OwnedFd {
        options.open(format!("/proc/self/fd/{}", fd.as_raw_fd())).unwrap().into()
    }

    #[tokio::test]
    async fn an_end_that_was_closed_and_is_open_again_waits_for_what_comes() {
        let (reader, writer) = std::io::pipe().unwrap();
        let reader = OwnedFd::from(reader);
        prepare(&reader).unwrap();
        drop(writer);
        let end = PipeEnd::new(reader);
        let mut buf = [0; 8];
        assert_eq!(poll_fn(|cx| end.poll_read(cx, &mut buf)).await.unwrap(), 0);
        let writer = reopen(end.get_ref(), OpenOptions::new().write(true));
        let waits = poll_fn(|cx| Poll::Ready(end.poll_read(cx, &mut buf).is_pending())).await;
        assert!(waits, "it does not wait though there is nothing to read");
        rustix::io::write(&writer, b"here").unwrap();
        assert_eq!(poll_fn(|cx| end.poll_read(cx, &mut buf)).await.unwrap(), 4);
    }

    #[tokio::test]
    async fn a_full_end_waits_until_there_is_room() {
        let (reader, writer) = std::io::pipe().unwrap();
        let (reader, writer) = (OwnedFd::from(reader), OwnedFd::from(writer));
        prepare(&writer).unwrap();
        let end = PipeEnd::new(writer);
        let bytes = vec![7; PIPE_BYTES];
        loop {
            let told = poll_fn(|cx| Poll::Ready(end.poll_write(cx, &bytes))).await;
            if told.is_pending() {
                break;
            }
        }
        let mut taken = vec![0; PIPE_BYTES];
        assert!(rustix::io::read(&reader, &mut taken[..]).unwrap() > 0);
        assert!(poll_fn(|cx| end.poll_write(cx, b"more")).await.unwrap() > 0);
    }
}
