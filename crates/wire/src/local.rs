//! Unix sockets in a folder whose path may be longer than a socket address, and control frames with
//! descriptors beside them. The keeper and its clients use the same functions.
//!
//! Invariant: a frame's length is checked before room is made for it; descriptors beyond
//! [`FDS_MAX`] are closed and the frame refused.

use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsRawFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};

use rustix::fs::{Mode, OFlags};
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage,
    SendFlags,
};
use serde::Serialize;
use serde::de::DeserializeOwned;
use tokio::io::Interest;
use tokio::net::UnixStream;

use crate::keeper::FRAME_BYTES_MAX;

pub const FDS_MAX: usize = 8;
const HEAD_BYTES: usize = 4;

/// The folder by descriptor: `/proc/self/fd/<n>/name` fits an address whatever the folder's path is.
fn short(dir: &Path, name: &str) -> io::Result<(OwnedFd, PathBuf)> {
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let dir = rustix::fs::open(dir, flags, Mode::empty())?;
    let path = PathBuf::from(format!("/proc/self/fd/{}/{name}", dir.as_raw_fd()));
    Ok((dir, path))
}

/// Listens on `dir/name`, replacing what a dead process left there.
pub fn bind(dir: &Path, name: &str) -> io::Result<std::os::unix::net::UnixListener> {
    let (_dir, path) = short(dir, name)?;
    match std::fs::remove_file(&path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    let listener = std::os::unix::net::UnixListener::bind(&path)?;
    listener.set_nonblocking(true)?;
    Ok(listener)
}

/// Connects to `dir/name`; within a tokio runtime.
pub async fn connect(dir: &Path, name: &str) -> io::Result<UnixStream> {
    let (_dir, path) = short(dir, name)?;
    UnixStream::connect(&path).await
}

/// Sends one frame with descriptors beside its first byte.
pub async fn send_frame(
    socket: &UnixStream,
    message: &impl Serialize,
    fds: &[BorrowedFd<'_>],
) -> io::Result<()> {
    let body = serde_json::to_vec(message)?;
    let len = u32::try_from(body.len()).ok().filter(|len| *len as usize <= FRAME_BYTES_MAX);
    let Some(len) = len.filter(|_| fds.len() <= FDS_MAX) else {
        let what = format!("a frame of {} bytes and {} descriptors is too large", body.len(), fds.len());
        return Err(io::Error::new(io::ErrorKind::InvalidInput, what));
    };
    let mut bytes = len.to_le_bytes().to_vec();
    bytes.extend_from_slice(&body);
    let mut sent = 0;
    while sent < bytes.len() {
        socket.writable().await?;
        let rights = if sent == 0 { fds } else { &[] };
        match socket.try_io(Interest::WRITABLE, || send_some(socket, &bytes[sent..], rights)) {
            Ok(n) => sent += n,
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

fn send_some(socket: &UnixStream, bytes: &[u8], fds: &[BorrowedFd<'_>]) -> io::Result<usize> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(FDS_MAX))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if !fds.is_empty() && !control.push(SendAncillaryMessage::ScmRights(fds)) {
        return Err(io::ErrorKind::InvalidInput.into());
    }
    Ok(rustix::net::sendmsg(socket, &[IoSlice::new(bytes)], &mut control, SendFlags::NOSIGNAL)?)
}

/// The next frame and its descriptors; `None` at the end of the stream.
pub async fn recv_frame<T: DeserializeOwned>(socket: &UnixStream) -> io::Result<Option<(T, Vec<OwnedFd>)>> {
    let mut fds = Vec::new();
    let mut head = [0_u8; HEAD_BYTES];
    if !recv_exact(socket, &mut head, &mut fds).await? {
        return Ok(None);
    }
    let len = usize::try_from(u32::from_le_bytes(head)).unwrap_or(usize::MAX);
    if len > FRAME_BYTES_MAX {
        let what = format!("a frame of {len} bytes is longer than {FRAME_BYTES_MAX}");
        return Err(io::Error::new(io::ErrorKind::InvalidData, what));
    }
    let mut body = vec![0_u8; len];
    if !recv_exact(socket, &mut body, &mut fds).await? {
        return Err(io::ErrorKind::UnexpectedEof.into());
    }
    Ok(Some((serde_json::from_slice(&body)?, fds)))
}

/// False: the stream ended before the first byte.
async fn recv_exact(socket: &UnixStream, buffer: &mut [u8], fds: &mut Vec<OwnedFd>) -> io::Result<bool> {
    let mut filled = 0;
    while filled < buffer.len() {
        socket.readable().await?;
        match socket.try_io(Interest::READABLE, || recv_some(socket, &mut buffer[filled..], fds)) {
            Ok(0) if filled == 0 => return Ok(false),
            Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
            Ok(n) => filled += n,
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
            Err(error) => return Err(error),
        }
    }
    Ok(true)
}

fn recv_some(socket: &UnixStream, buffer: &mut [u8], fds: &mut Vec<OwnedFd>) -> io::Result<usize> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(FDS_MAX))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let mut parts = [IoSliceMut::new(buffer)];
    let received = rustix::net::recvmsg(socket, &mut parts, &mut control, RecvFlags::CMSG_CLOEXEC)?;
    for message in control.drain() {
        if let RecvAncillaryMessage::ScmRights(rights) = message {
            fds.extend(rights);
        }
    }
    if fds.len() > FDS_MAX {
        let what = format!("more than {FDS_MAX} descriptors came with one frame");
        return Err(io::Error::new(io::ErrorKind::InvalidData, what));
    }
    Ok(received.bytes)
}
