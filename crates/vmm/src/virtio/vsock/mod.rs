//! virtio-vsock in user space: streams between ports of the guest and of the host.
//!
//! ```text
//!   guest port ──> host port 1024: the carrier (two pipes); it survives save, restore and fork
//!   guest port <── client of a Unix socket: `CONNECT <guest port>\n`, answered `OK <host port>\n`
//! ```
//!
//! Invariants: towards the guest nothing is buffered, the host's end is read only when the guest has given both
//! credit and a buffer; towards the host at most the credit we gave is buffered, and a guest that sends more loses
//! the stream; streams, handshakes and owed resets are bounded in number. A stream that cannot go on is
//! answered with a reset; one restored in another place is too, except for the carrier. The guest is never told
//! that the transport was reset: that would end the carrier.

mod credit;
mod host;
mod packet;
mod pump;
mod stream;
#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, VecDeque};
use std::io;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::os::unix::net::UnixListener;

use dormouse_snapshot::devices::virtio::{
    DeviceKind, DeviceState, PortPair, VSOCK_UNSENT_BYTES_MAX, VsockState,
};

use self::host::{Greeting, Handshake, Host, set_nonblocking};
use self::packet::TYPE_STREAM;
use self::stream::{Phase, Stream};
use super::device::{DeviceError, Progress, Rings, VirtioDevice};
use super::poller::{EVENTS_MAX, Poller, Ready};

/// Every guest has this address; the host has `HOST_CID`.
pub const GUEST_CID: u64 = 3;
pub const HOST_CID: u64 = 2;
/// The guest's connection to this port is the carrier.
pub const CARRIER_PORT: u32 = 1024;

const RECEIVE: usize = 0;
const TRANSMIT: usize = 1;
const QUEUE_SIZES: &[u16] = &[256, 256, 16];
const STREAMS_MAX: usize = 256;
const HANDSHAKES_MAX: usize = 64;
/// With this many resets waiting for a buffer of the guest, nothing more is taken from it.
const RESETS_MAX: usize = 256;
/// What a stream may hold for its host's end, in bytes.
const CLIENT_BUF_ALLOC: u32 = 64 << 10;
#[allow(clippy::cast_possible_truncation, reason = "256 KiB; a const has no try_from")]
const CARRIER_BUF_ALLOC: u32 = VSOCK_UNSENT_BYTES_MAX as u32;
/// Host ports of clients begin here.
const CLIENT_PORTS: u32 = 1 << 30;

/// Tokens of the poller: a stream's has its ports, host port below; others have a host port no stream can have.
const LISTENER: u64 = 0;
const CARRIER_INPUT: u64 = 1;
const CARRIER_OUTPUT: u64 = 2;
const HANDSHAKE: u64 = 3;

/// The host's side of the device.
#[derive(Default)]
pub struct VsockHost {
    /// The guest gets what is read here.
    pub carrier_in: Option<OwnedFd>,
    /// What the guest sends goes here.
    pub carrier_out: Option<OwnedFd>,
    /// Clients come here.
    pub listener: Option<UnixListener>,
}

/// A virtio-vsock device.
pub struct Vsock {
    poller: Poller,
    listener: Option<UnixListener>,
    /// The pipes, while no stream has them.
    parked: Option<Host>,
    handshakes: VecDeque<Handshake>,
    next_handshake: u32,
    streams: BTreeMap<PortPair, Stream>,
    next_host_port: u32,
    /// Whose turn it is to send to the guest.
    turn: PortPair,
    resets: VecDeque<Reset>,
    bounce: Vec<u8>,
}

/// The guest is told that there is no such stream.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Reset {
    ports: PortPair,
    /// As in the packet that it answers.
    kind: u16,
}

impl Vsock {
    pub fn new(host: VsockHost) -> io::Result<Self> {
        let fresh = VsockState { carrier: None, resets: Vec::new(), next_host_port: CLIENT_PORTS };
        Self::restore(&fresh, host)
    }

    /// The carrier goes on over new pipes; the guest's other streams get their reset.
    pub fn restore(state: &VsockState, host: VsockHost) -> io::Result<Self> {
        let resets = state.resets.iter().map(|ports| Reset { ports: *ports, kind: TYPE_STREAM });
        let mut vsock = Self {
            poller: Poller::new()?,
            listener: None,
            parked: None,
            handshakes: VecDeque::new(),
            next_handshake: 0,
            streams: BTreeMap::new(),
            next_host_port: state.next_host_port.max(CLIENT_PORTS),
            turn: PortPair { guest: 0, host: 0 },
            resets: resets.collect(),
            bounce: vec![0; 64 << 10],
        };
        if let Some(listener) = host.listener {
            listener.set_nonblocking(true)?;
            vsock.poller.add(&listener, LISTENER)?;
            vsock.listener = Some(listener);
        }
        if let Some(carrier) = &state.carrier {
            let stream = Stream::restored(carrier, Host::carrier(None, None), CARRIER_BUF_ALLOC);
            let ports = PortPair { host: CARRIER_PORT, ..carrier.ports };
            vsock.streams.insert(ports, stream);
        }
        vsock.set_carrier(host.carrier_in, host.carrier_out)?;
        Ok(vsock)
    }

    /// Other pipes for the carrier, for example after its keeper was replaced. What the guest sent and the former
    /// pipe did not take goes to the new one.
    pub fn set_carrier(&mut self, input: Option<OwnedFd>, output: Option<OwnedFd>) -> io::Result<()> {
        let (at_input, at_output) = (input.as_ref(), output.as_ref());
        at_input.into_iter().chain(at_output).try_for_each(set_nonblocking)?;
        if let Some(former) = self.carrier_host() {
            let former: Vec<_> =
                former.input().into_iter().chain(former.output()).map(|fd| fd.try_clone_to_owned()).collect();
            for fd in former.into_iter().flatten() {
                self.poller.remove(fd);
            }
        }
        at_input.map_or(Ok(()), |fd| self.poller.add(fd, CARRIER_INPUT))?;
        at_output.map_or(Ok(()), |fd| self.poller.add(fd, CARRIER_OUTPUT))?;
        let host = Host::carrier(input, output);
        match self.streams.values_mut().find(|stream| stream.host.is_carrier()) {
            Some(stream) => stream.host = host,
            None => self.parked = Some(host),
        }
        Ok(())
    }

    /// Whether the guest has connected to the carrier's port.
    #[must_use]
    pub fn has_carrier(&self) -> bool {
        self.streams.values().any(|stream| stream.host.is_carrier())
    }

    fn carrier_host(&mut self) -> Option<&mut Host> {
        let of_stream =
            self.streams.values_mut().map(|stream| &mut stream.host).find(|host| host.is_carrier());
        of_stream.or(self.parked.as_mut())
    }

    /// Takes notice of what the host's side has; whether there may be more.
    fn poll(&mut self) -> Progress {
        let events = self.poller.take();
        for event in &events {
            self.ready(*event);
        }
        if events.len() == EVENTS_MAX { Progress::More } else { Progress::Done }
    }

    fn ready(&mut self, event: Ready) {
        match (event.token & 0xffff_ffff, u32::try_from(event.token >> 32).unwrap_or(0)) {
            (LISTENER, _) => self.accept(),
            (CARRIER_INPUT, _) => {
                if let Some(host) = self.carrier_host() {
                    host.readable = true;
                }
            }
            (CARRIER_OUTPUT, _) => {
                if let Some(host) = self.carrier_host() {
                    host.writable = true;
                }
            }
            (HANDSHAKE, serial) => self.greet(serial),
            (host, guest) => {
                let ports = PortPair { guest, host: u32::try_from(host).unwrap_or(0) };
                if let Some(stream) = self.streams.get_mut(&ports) {
                    stream.host.readable |= event.readable;
                    stream.host.writable |= event.writable;
                    stream.host.gone |= event.gone;
                }
            }
        }
    }

    fn accept(&mut self) {
        // Bounded: every further one pushes out one that has not spoken.
        for _ in 0..HANDSHAKES_MAX {
            let Some(Ok((socket, _))) = self.listener.as_ref().map(UnixListener::accept) else { return };
            let serial = self.next_handshake;
            self.next_handshake = serial.wrapping_add(1);
            let token = u64::from(serial) << 32 | HANDSHAKE;
            if socket.set_nonblocking(true).is_err() || self.poller.add(&socket, token).is_err() {
                continue;
            }
            if self.handshakes.len() == HANDSHAKES_MAX {
                self.handshakes.pop_front();
            }
            self.handshakes.push_back(Handshake::new(socket.into(), serial));
        }
        // There may be more, and no further event would tell.
        if let Some(listener) = &self.listener {
            let _ = self.poller.rename(listener, LISTENER);
        }
    }

    fn greet(&mut self, serial: u32) {
        let Some(at) = self.handshakes.iter().position(|handshake| handshake.serial == serial) else {
            return;
        };
        let greeting = self.handshakes.get_mut(at).map(Handshake::proceed);
        if let Some(Greeting::Waiting) = greeting {
            return;
        }
        let Some(handshake) = self.handshakes.remove(at) else { return };
        if let Some(Greeting::Connect { guest_port }) = greeting {
            self.connect(handshake.socket, guest_port);
        }
    }

    /// A client is closed without an answer when there is no room for its stream.
    fn connect(&mut self, socket: OwnedFd, guest: u32) {
        let Some(ports) = self.free_ports(guest) else { return };
        let token = u64::from(ports.guest) << 32 | u64::from(ports.host);
        if self.poller.rename(&socket, token).is_ok() {
            self.streams.insert(ports, Stream::requested(Host::client(socket), CLIENT_BUF_ALLOC));
        }
    }

    fn free_ports(&mut self, guest: u32) -> Option<PortPair> {
        if self.streams.len() >= STREAMS_MAX {
            return None;
        }
        loop {
            let host = self.next_host_port;
            self.next_host_port = host.wrapping_add(1).max(CLIENT_PORTS);
            let ports = PortPair { guest, host };
            // Ends: there are far more ports than streams.
            if !self.streams.contains_key(&ports) {
                return Some(ports);
            }
        }
    }

    /// Takes a stream away. The carrier's pipes wait for the next one.
    fn remove(&mut self, ports: PortPair) {
        let Some(stream) = self.streams.remove(&ports) else { return };
        if stream.host.is_carrier() {
            self.parked = Some(stream.host);
        } else if let Some(socket) = stream.host.input() {
            self.poller.remove(socket);
        }
    }
}

impl VirtioDevice for Vsock {
    fn kind(&self) -> DeviceKind {
        DeviceKind::Vsock
    }

    fn features(&self) -> u64 {
        0
    }

    fn queue_sizes(&self) -> &'static [u16] {
        QUEUE_SIZES
    }

    fn config(&self) -> Vec<u8> {
        GUEST_CID.to_le_bytes().to_vec()
    }

    fn reset(&mut self) {
        // A client that the guest never heard of waits on: a driver begins with a reset.
        let known = self.streams.iter().filter(|(_, stream)| !stream.owed.request);
        let known: Vec<PortPair> = known.map(|(ports, _)| *ports).collect();
        known.into_iter().for_each(|ports| self.remove(ports));
        self.resets.clear();
    }

    fn queue_event(&mut self, rings: &mut Rings, _index: usize) -> Result<Progress, DeviceError> {
        self.pump(rings)
    }

    fn backend_fd(&self) -> Option<BorrowedFd<'_>> {
        Some(self.poller.fd())
    }

    fn backend_event(&mut self, rings: Option<&mut Rings>) -> Result<Progress, DeviceError> {
        let polled = self.poll();
        match rings {
            Some(rings) => Ok(polled.and(self.pump(rings)?)),
            None => Ok(Progress::Done),
        }
    }

    fn save(&self) -> DeviceState {
        let mut resets: Vec<PortPair> = self.resets.iter().map(|reset| reset.ports).collect();
        let mut carrier = None;
        for (ports, stream) in &self.streams {
            if stream.host.is_carrier() {
                carrier = Some(stream.save(*ports));
            } else if !(stream.phase == Phase::Requested && stream.owed.request) {
                resets.push(*ports);
            }
        }
        DeviceState::Vsock(VsockState { carrier, resets, next_host_port: self.next_host_port })
    }
}
