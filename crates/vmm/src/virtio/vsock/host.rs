//! The host's end of a stream: a client's socket, or the carrier's two pipes.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

use rustix::io::Errno;

/// What a read or write came to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Moved {
    Bytes(usize),
    /// Not now.
    Blocked,
    /// Nothing more, ever.
    End,
}

/// Both directions; a client's are the same socket.
pub struct Host {
    input: Option<Arc<OwnedFd>>,
    output: Option<Arc<OwnedFd>>,
    /// It may be read, written: unknown until tried.
    pub readable: bool,
    pub writable: bool,
    /// Both directions are closed at the other side.
    pub gone: bool,
    is_carrier: bool,
}

impl Host {
    pub fn client(socket: OwnedFd) -> Self {
        let socket = Arc::new(socket);
        Self::with(Some(Arc::clone(&socket)), Some(socket), false)
    }

    pub fn carrier(input: Option<OwnedFd>, output: Option<OwnedFd>) -> Self {
        Self::with(input.map(Arc::new), output.map(Arc::new), true)
    }

    fn with(input: Option<Arc<OwnedFd>>, output: Option<Arc<OwnedFd>>, is_carrier: bool) -> Self {
        Self { input, output, readable: true, writable: true, gone: false, is_carrier }
    }

    pub fn is_carrier(&self) -> bool {
        self.is_carrier
    }

    pub fn input(&self) -> Option<BorrowedFd<'_>> {
        self.input.as_ref().map(|fd| fd.as_fd())
    }

    pub fn output(&self) -> Option<BorrowedFd<'_>> {
        self.output.as_ref().map(|fd| fd.as_fd())
    }

    /// At the end of a carrier's pipe the pipe is given up; another one may come.
    pub fn read(&mut self, buffer: &mut [u8]) -> Moved {
        let Some(fd) = self.input.as_ref().filter(|_| self.readable) else { return Moved::Blocked };
        match retry(|| rustix::io::read(fd, &mut *buffer)) {
            Ok(0) => {}
            Ok(bytes) => return Moved::Bytes(bytes),
            Err(Errno::AGAIN) => {
                self.readable = false;
                return Moved::Blocked;
            }
            Err(_) => {}
        }
        self.readable = false;
        if self.is_carrier {
            self.input = None;
            return Moved::Blocked;
        }
        Moved::End
    }

    /// See `read`.
    pub fn write(&mut self, data: &[u8]) -> Moved {
        let Some(fd) = self.output.as_ref().filter(|_| self.writable) else { return Moved::Blocked };
        match retry(|| rustix::io::write(fd, data)) {
            Ok(bytes) => return Moved::Bytes(bytes),
            Err(Errno::AGAIN) => {
                self.writable = false;
                return Moved::Blocked;
            }
            Err(_) => {}
        }
        self.writable = false;
        if self.is_carrier {
            self.output = None;
            return Moved::Blocked;
        }
        Moved::End
    }

    /// The guest's end closed one direction. Pipes stay: the next stream may use them.
    pub fn shutdown(&self, how: rustix::net::Shutdown) {
        if !self.is_carrier
            && let Some(socket) = &self.output
        {
            // Fails if the client has gone: then there is nothing to tell.
            let _ = rustix::net::shutdown(socket, how);
        }
    }
}

fn retry<T>(mut call: impl FnMut() -> rustix::io::Result<T>) -> rustix::io::Result<T> {
    loop {
        match call() {
            Err(Errno::INTR) => {}
            outcome => return outcome,
        }
    }
}

pub fn set_nonblocking(fd: impl AsFd) -> io::Result<()> {
    use rustix::fs::{OFlags, fcntl_getfl, fcntl_setfl};
    let flags = fcntl_getfl(&fd)?;
    Ok(fcntl_setfl(&fd, flags | OFlags::NONBLOCK)?)
}

/// The longest line that is a `CONNECT`: ten digits, with room to spare.
const LINE_BYTES_MAX: usize = 32;

/// A client that has not said yet where it wants to.
pub struct Handshake {
    pub socket: OwnedFd,
    pub serial: u32,
    line: Vec<u8>,
}

/// What a handshake came to.
pub enum Greeting {
    Waiting,
    Connect { guest_port: u32 },
    Refused,
}

impl Handshake {
    pub fn new(socket: OwnedFd, serial: u32) -> Self {
        Self { socket, serial, line: Vec::new() }
    }

    /// Reads the line and nothing behind it: that is the stream's.
    pub fn proceed(&mut self) -> Greeting {
        while self.line.len() < LINE_BYTES_MAX {
            let mut byte = [0];
            match retry(|| rustix::io::read(&self.socket, &mut byte[..])) {
                Ok(1) if byte[0] == b'\n' => return self.parse(),
                Ok(1) => self.line.push(byte[0]),
                Err(Errno::AGAIN) => return Greeting::Waiting,
                Ok(_) | Err(_) => return Greeting::Refused,
            }
        }
        Greeting::Refused
    }

    fn parse(&self) -> Greeting {
        let port = std::str::from_utf8(&self.line).ok().and_then(|line| line.strip_prefix("CONNECT "));
        match port.and_then(|port| port.trim_end_matches('\r').parse().ok()) {
            Some(guest_port) => Greeting::Connect { guest_port },
            None => Greeting::Refused,
        }
    }
}
