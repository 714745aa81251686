//! Descriptors that travel beside bytes (SCM_RIGHTS, unix(7)), and pipes.

use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage,
    SendFlags,
};

/// More descriptors beside one message are refused.
pub const FDS_MAX: usize = 8;

/// Sends `bytes` (not empty) with `fds` beside the first of them. Returns how many bytes went out;
/// the descriptors went with any number but 0.
pub fn send_with_fds(socket: impl AsFd, bytes: &[u8], fds: &[BorrowedFd<'_>]) -> io::Result<usize> {
    if bytes.is_empty() || fds.len() > FDS_MAX {
        return Err(io::Error::from(io::ErrorKind::InvalidInput));
    }
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(FDS_MAX))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if !fds.is_empty() && !control.push(SendAncillaryMessage::ScmRights(fds)) {
        return Err(io::Error::from(io::ErrorKind::InvalidInput));
    }
    let sent = rustix::io::retry_on_intr(|| {
        rustix::net::sendmsg(&socket, &[IoSlice::new(bytes)], &mut control, SendFlags::NOSIGNAL)
    })?;
    Ok(sent)
}

/// Reads into `buffer` and takes what descriptors came with it (close-on-exec). 0 bytes: the end.
pub fn recv_with_fds(socket: impl AsFd, buffer: &mut [u8]) -> io::Result<(usize, Vec<OwnedFd>)> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(FDS_MAX))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let received = loop {
        let mut parts = [IoSliceMut::new(buffer)];
        match rustix::net::recvmsg(&socket, &mut parts, &mut control, RecvFlags::CMSG_CLOEXEC) {
            Err(rustix::io::Errno::INTR) => {}
            other => break other?,
        }
    };
    let mut fds = Vec::new();
    for message in control.drain() {
        if let RecvAncillaryMessage::ScmRights(rights) = message {
            fds.extend(rights);
        }
    }
    Ok((received.bytes, fds))
}

/// The two ends of a pipe, close-on-exec.
#[derive(Debug)]
pub struct Pipe {
    pub read: OwnedFd,
    pub write: OwnedFd,
}

impl Pipe {
    pub fn new() -> io::Result<Self> {
        let (read, write) = rustix::pipe::pipe_with(rustix::pipe::PipeFlags::CLOEXEC)?;
        Ok(Self { read, write })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::net::UnixStream;

    #[test]
    fn a_pipe_travels_and_works() {
        let (a, b) = UnixStream::pair().unwrap();
        let pipe = Pipe::new().unwrap();
        assert_eq!(send_with_fds(&a, b"x", &[pipe.read.as_fd(), pipe.write.as_fd()]).unwrap(), 1);
        drop(pipe);
        let mut buffer = [0; 8];
        let (bytes, fds) = recv_with_fds(&b, &mut buffer).unwrap();
        assert_eq!((bytes, fds.len()), (1, 2));
        rustix::io::write(&fds[1], b"through").unwrap();
        let mut got = [0; 16];
        assert_eq!(rustix::io::read(&fds[0], &mut got).unwrap(), 7);
    }

    #[test]
    fn too_many_descriptors_are_refused() {
        let (a, _b) = UnixStream::pair().unwrap();
        let many = vec![a.as_fd(); FDS_MAX + 1];
        assert!(send_with_fds(&a, b"x", &many).is_err());
    }
}
