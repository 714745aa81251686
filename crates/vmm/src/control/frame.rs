//! Frames on the control socket, and the monitor's end of a connection.

use std::collections::VecDeque;
use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;

use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage,
    SendFlags,
};
use serde::Serialize;

use super::{Answer, FDS_MAX, FDS_PER_MESSAGE, FRAME_BYTES_MAX, Request};

const HEAD_BYTES: usize = 4;

/// What became readable on a [`Peer`].
#[derive(Debug)]
pub enum Event {
    /// Nothing whole yet.
    More,
    Request(Request, Vec<OwnedFd>),
    /// Not a request: to be answered with this and closed.
    Refused(String),
    /// The client is gone.
    End,
}

/// The monitor's end of one connection: never blocks.
#[derive(Debug)]
pub struct Peer {
    stream: UnixStream,
    inbox: Inbox,
}

impl Peer {
    pub fn new(stream: UnixStream) -> io::Result<Self> {
        stream.set_nonblocking(true)?;
        Ok(Self { stream, inbox: Inbox::default() })
    }

    /// Reads what is there, up to one request. `per_machine`: descriptors of a machine of this monitor.
    pub fn read(&mut self, per_machine: usize) -> Event {
        loop {
            match self.inbox.read(&self.stream) {
                Ok(Progress::More) => {}
                Ok(Progress::End) => return Event::End,
                Ok(Progress::Frame(body)) => {
                    return self.parse(&body, per_machine).unwrap_or_else(Event::Refused);
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Event::More,
                Err(error) if error.kind() == io::ErrorKind::InvalidData => {
                    return Event::Refused(error.to_string());
                }
                Err(_) => return Event::End,
            }
        }
    }

    fn parse(&mut self, body: &[u8], per_machine: usize) -> Result<Event, String> {
        let fds: Vec<OwnedFd> = self.inbox.fds.drain(..).collect();
        let request: Request = serde_json::from_slice(body).map_err(|error| error.to_string())?;
        request.validate()?;
        let expected = request.fds(per_machine);
        if fds.len() != expected {
            return Err(format!("{} descriptors came with it, {expected} are needed", fds.len()));
        }
        Ok(Event::Request(request, fds))
    }

    /// Sends an answer. An error means that the client does not take it: the connection is to be closed.
    pub fn answer(&self, answer: &Answer) -> io::Result<()> {
        send(&self.stream, &encode(answer)?, &[])
    }
}

impl AsFd for Peer {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.stream.as_fd()
    }
}

pub(super) fn encode(message: &impl Serialize) -> io::Result<Vec<u8>> {
    let body = serde_json::to_vec(message)?;
    let len = u32::try_from(body.len()).ok().filter(|len| *len as usize <= FRAME_BYTES_MAX);
    let Some(len) = len else {
        return Err(invalid(format!("a frame of {} bytes is too large", body.len())));
    };
    let mut bytes = len.to_le_bytes().to_vec();
    bytes.extend_from_slice(&body);
    Ok(bytes)
}

fn invalid(message: String) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, message)
}

/// Sends a whole frame with its descriptors: one byte each for as many as a message holds, and the last ones beside all
/// the other bytes.
pub(super) fn send(stream: &UnixStream, bytes: &[u8], fds: &[BorrowedFd<'_>]) -> io::Result<()> {
    if fds.len() > FDS_MAX {
        return Err(invalid(format!("{} descriptors are more than {FDS_MAX}", fds.len())));
    }
    let (mut sent, mut rest) = (0, fds);
    while sent < bytes.len() {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(FDS_PER_MESSAGE))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        let (now, later) = rest.split_at(rest.len().min(FDS_PER_MESSAGE));
        if !now.is_empty() && !control.push(SendAncillaryMessage::ScmRights(now)) {
            return Err(invalid("the descriptors do not fit one message".into()));
        }
        let end = if later.is_empty() { bytes.len() } else { sent + 1 };
        let part = [IoSlice::new(&bytes[sent..end])];
        match rustix::net::sendmsg(stream, &part, &mut control, SendFlags::NOSIGNAL) {
            Ok(n) => (sent, rest) = (sent + n, later),
            Err(rustix::io::Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
    }
    Ok(())
}

pub(super) enum Progress {
    More,
    Frame(Vec<u8>),
    End,
}

/// Bytes and descriptors of a frame that is not whole yet.
#[derive(Debug, Default)]
pub(super) struct Inbox {
    bytes: Vec<u8>,
    fds: VecDeque<OwnedFd>,
}

impl Inbox {
    /// One read. Never asks for more than the frame that has begun, so that the next one's descriptors
    /// stay with it.
    pub(super) fn read(&mut self, stream: &UnixStream) -> io::Result<Progress> {
        let have = self.bytes.len();
        let whole = match self.bytes.first_chunk::<HEAD_BYTES>() {
            Some(head) => HEAD_BYTES + frame_bytes(*head)?,
            None => HEAD_BYTES,
        };
        self.bytes.resize(whole, 0);
        let got = recv(stream, &mut self.bytes[have..], &mut self.fds);
        self.bytes.truncate(have + *got.as_ref().unwrap_or(&0));
        match got? {
            0 if whole > have && have == 0 => return Ok(Progress::End),
            0 if whole > have => return Err(io::ErrorKind::UnexpectedEof.into()),
            _ => {}
        }
        if whole > HEAD_BYTES && self.bytes.len() == whole {
            let body = self.bytes.split_off(HEAD_BYTES);
            self.bytes.clear();
            return Ok(Progress::Frame(body));
        }
        Ok(Progress::More)
    }
}

/// An empty frame is none: no JSON is that short.
fn frame_bytes(head: [u8; HEAD_BYTES]) -> io::Result<usize> {
    let len = usize::try_from(u32::from_le_bytes(head)).unwrap_or(usize::MAX);
    if len == 0 || len > FRAME_BYTES_MAX {
        return Err(invalid(format!("a frame of {len} bytes is not between 1 and {FRAME_BYTES_MAX}")));
    }
    Ok(len)
}

fn recv(stream: &UnixStream, buffer: &mut [u8], fds: &mut VecDeque<OwnedFd>) -> io::Result<usize> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(FDS_PER_MESSAGE))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let mut parts = [IoSliceMut::new(buffer)];
    let received = loop {
        match rustix::net::recvmsg(stream, &mut parts, &mut control, RecvFlags::CMSG_CLOEXEC) {
            Err(rustix::io::Errno::INTR) => {}
            other => break other?,
        }
    };
    for message in control.drain() {
        if let RecvAncillaryMessage::ScmRights(rights) = message {
            fds.extend(rights);
        }
    }
    if fds.len() > FDS_MAX {
        return Err(invalid(format!("more than {FDS_MAX} descriptors came with one frame")));
    }
    Ok(received.bytes)
}
