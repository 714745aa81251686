//! A guest and its host over the vsock device: helpers; the cases are in the files beside.

mod carrier;
mod clients;
mod hostile;

use std::fs::File;
use std::io::{Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};

use dormouse_snapshot::devices::virtio::VirtioState;

use super::packet::{HEADER_BYTES, Header, Op};
use super::*;
use crate::virtio::Endpoint;
use crate::virtio::testing::{Buffer, Driver, memory};

/// As Linux gives buffers.
const BUFFER_BYTES: usize = 4096;

/// The host's ends of the carrier's pipes, and copies of the device's ends for the next device.
struct Pipes {
    to_guest: File,
    from_guest: File,
    device_in: OwnedFd,
    device_out: OwnedFd,
}

fn pipes() -> Pipes {
    use rustix::pipe::{PipeFlags, pipe_with};
    let (device_in, to_guest) = pipe_with(PipeFlags::CLOEXEC).unwrap();
    let (from_guest, device_out) = pipe_with(PipeFlags::CLOEXEC).unwrap();
    host::set_nonblocking(&to_guest).unwrap();
    host::set_nonblocking(&from_guest).unwrap();
    Pipes { to_guest: to_guest.into(), from_guest: from_guest.into(), device_in, device_out }
}

impl Pipes {
    fn side(&self, listener: Option<&UnixListener>) -> VsockHost {
        VsockHost {
            carrier_in: Some(self.device_in.try_clone().unwrap()),
            carrier_out: Some(self.device_out.try_clone().unwrap()),
            listener: listener.map(|listener| listener.try_clone().unwrap()),
        }
    }

    /// Writes as much as fits now.
    fn write(&mut self, data: &[u8]) -> usize {
        self.to_guest.write(data).unwrap_or(0)
    }

    /// Reads what is there, up to `bytes`.
    fn read(&mut self, bytes: usize) -> Vec<u8> {
        let mut data = vec![0; bytes];
        let got = self.from_guest.read(&mut data).unwrap_or(0);
        data.truncate(got);
        data
    }
}

struct Bench {
    driver: Driver,
    pipes: Pipes,
    dir: tempfile::TempDir,
    listener: UnixListener,
}

fn bench() -> Bench {
    bench_with(u64::MAX)
}

fn bench_with(features: u64) -> Bench {
    let dir = tempfile::tempdir().unwrap();
    let listener = UnixListener::bind(dir.path().join("vsock.sock")).unwrap();
    let pipes = pipes();
    let vsock = Vsock::new(pipes.side(Some(&listener))).unwrap();
    let memory = memory();
    let endpoint = Endpoint::new(Box::new(vsock), memory.clone()).unwrap();
    Bench { driver: Driver::boot(endpoint, memory, features), pipes, dir, listener }
}

fn restored(state: &VirtioState, host: VsockHost, memory: crate::memory::GuestMemory) -> Endpoint {
    let state = VirtioState::decode(&state.encode().unwrap()).unwrap();
    let DeviceState::Vsock(of_vsock) = &state.device else { panic!("a vsock's state") };
    let vsock = Vsock::restore(of_vsock, host).unwrap();
    let endpoint = Endpoint::restore(&state, Box::new(vsock), memory).unwrap();
    assert_eq!(endpoint.save().device.kind(), DeviceKind::Vsock);
    endpoint.resume();
    endpoint
}

impl Bench {
    /// Gives the device buffers to send in.
    fn refill(&mut self, buffers: usize) {
        for _ in 0..buffers {
            if self.driver.room(RECEIVE) >= 2 {
                self.driver.submit(RECEIVE, &[Buffer::In(HEADER_BYTES), Buffer::In(BUFFER_BYTES)]);
            }
        }
        self.driver.kick(RECEIVE);
    }

    /// The next packet from the device.
    fn receive(&mut self) -> Option<(Header, Vec<u8>)> {
        let (_, written, content) = self.driver.used(RECEIVE)?;
        let header = Header::decode(&content[..HEADER_BYTES].try_into().unwrap());
        assert_eq!(written as usize, HEADER_BYTES + header.len as usize);
        assert_eq!((header.src_cid, header.dst_cid), (2, 3));
        Some((header, content[HEADER_BYTES..][..header.len as usize].to_vec()))
    }

    fn expect(&mut self, op: Op) -> (Header, Vec<u8>) {
        let (header, data) = self.receive().unwrap_or_else(|| panic!("no packet, {op:?} expected"));
        assert_eq!(Op::from_code(header.op), Some(op));
        (header, data)
    }

    fn nothing(&mut self) {
        assert_eq!(self.receive(), None);
    }

    /// Sends a packet; the counters say that nothing was received yet.
    fn send(&mut self, op: Op, ports: PortPair, flags: u32, data: &[u8]) {
        let len = u32::try_from(data.len()).unwrap();
        let header = Header { op: op as u16, flags, len, buf_alloc: 256 << 10, ..from_guest(ports) };
        self.send_raw(&header, data);
    }

    fn send_raw(&mut self, header: &Header, data: &[u8]) {
        self.driver.submit(TRANSMIT, &[Buffer::Out(header.encode().to_vec()), Buffer::Out(data.to_vec())]);
        self.driver.kick(TRANSMIT);
        while self.driver.used(TRANSMIT).is_some() {}
    }

    /// The guest connects to the carrier.
    fn carry(&mut self, guest: u32) -> PortPair {
        let ports = PortPair { guest, host: CARRIER_PORT };
        self.refill(20);
        self.send(Op::Request, ports, 0, &[]);
        let (header, _) = self.expect(Op::Response);
        assert_eq!((header.src_port, header.dst_port, header.buf_alloc), (1024, guest, 256 << 10));
        ports
    }

    fn client(&self) -> UnixStream {
        let client = UnixStream::connect(self.dir.path().join("vsock.sock")).unwrap();
        client.set_nonblocking(true).unwrap();
        client
    }

    /// A client that is connected to the guest's port.
    fn connected(&mut self, guest: u32) -> (UnixStream, PortPair) {
        let mut client = self.client();
        self.refill(20);
        writeln!(client, "CONNECT {guest}").unwrap();
        self.driver.run();
        let (header, _) = self.expect(Op::Request);
        assert_eq!(header.dst_port, guest);
        let ports = PortPair { guest, host: header.src_port };
        self.send(Op::Response, ports, 0, &[]);
        assert_eq!(read(&mut client), format!("OK {}\n", ports.host).into_bytes());
        (client, ports)
    }

    /// The device is replaced by one from its saved state.
    fn moved(mut self) -> Self {
        let state = self.driver.endpoint.save();
        let host = self.pipes.side(Some(&self.listener));
        let endpoint = restored(&state, host, self.driver.memory.clone());
        self.driver = self.driver.moved_to(endpoint);
        self.driver.run();
        self
    }
}

fn from_guest(ports: PortPair) -> Header {
    Header {
        src_cid: GUEST_CID,
        dst_cid: HOST_CID,
        src_port: ports.guest,
        dst_port: ports.host,
        kind: TYPE_STREAM,
        ..Header::default()
    }
}

/// What is there.
fn read(client: &mut UnixStream) -> Vec<u8> {
    let mut data = vec![0; 1 << 20];
    let mut got = 0;
    while let Ok(bytes) = client.read(&mut data[got..]) {
        if bytes == 0 {
            break;
        }
        got += bytes;
    }
    data.truncate(got);
    data
}

/// Whether the other end is closed.
fn at_end(client: &mut UnixStream) -> bool {
    matches!(client.read(&mut [0]), Ok(0))
}
