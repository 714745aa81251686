#![no_main]
//! vsock packets of a guest that lies, beside clients that come and go: nothing panics, what the device holds
//! stays bounded, and a carrier can be had afterwards.

use std::io::{Read, Write};
use std::os::fd::OwnedFd;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixListener, UnixStream};
use std::sync::atomic::{AtomicU64, Ordering};

use dormouse_fuzz::Input;
use dormouse_snapshot::devices::virtio::{DeviceState, VirtioState};
use dormouse_vmm::virtio::testing::{Buffer, Driver, memory};
use dormouse_vmm::virtio::{Endpoint, Vsock, VsockHost};
use libfuzzer_sys::fuzz_target;

const RECEIVE: usize = 0;
const TRANSMIT: usize = 1;
const HEADER_BYTES: usize = 44;
const OPERATIONS_MAX: usize = 200;
const CLIENTS_MAX: usize = 8;

struct Host {
    address: SocketAddr,
    listener: UnixListener,
    /// Sockets stand for the carrier's pipes.
    carrier: (UnixStream, UnixStream),
    clients: Vec<UnixStream>,
}

impl Host {
    fn new() -> Self {
        static COUNTER: AtomicU64 = AtomicU64::new(0);
        let name =
            format!("dormouse-fuzz-{}-{}", std::process::id(), COUNTER.fetch_add(1, Ordering::Relaxed));
        let address = SocketAddr::from_abstract_name(name).unwrap();
        let listener = UnixListener::bind_addr(&address).unwrap();
        let carrier = UnixStream::pair().unwrap();
        carrier.0.set_nonblocking(true).unwrap();
        Self { address, listener, carrier, clients: Vec::new() }
    }

    fn side(&self) -> VsockHost {
        let carrier = || Some(OwnedFd::from(self.carrier.1.try_clone().unwrap()));
        let listener = Some(self.listener.try_clone().unwrap());
        VsockHost { carrier_in: carrier(), carrier_out: carrier(), listener }
    }

    fn step(&mut self, input: &mut Input<'_>) {
        match input.u8() % 5 {
            0 if self.clients.len() < CLIENTS_MAX => {
                let client = UnixStream::connect_addr(&self.address).unwrap();
                client.set_nonblocking(true).unwrap();
                self.clients.push(client);
            }
            1 if !self.clients.is_empty() => drop(self.clients.remove(input.below(self.clients.len()))),
            2 if !self.clients.is_empty() => {
                let at = input.below(self.clients.len());
                let bytes = input.below(64);
                let _ = self.clients[at].write(input.bytes(bytes));
            }
            3 if !self.clients.is_empty() => {
                let at = input.below(self.clients.len());
                let _ = self.clients[at].write_all(b"CONNECT 80\n");
                let _ = self.clients[at].read(&mut [0; 4096]);
            }
            _ => {
                let _ = self.carrier.0.write(&vec![1; input.below(20_000)]);
                let _ = self.carrier.0.read(&mut [0; 20_000]);
            }
        }
    }
}

/// A header whose fields are often those that matter.
fn header(input: &mut Input<'_>) -> Vec<u8> {
    let mut pick = |usual: &[u32]| match usize::from(input.u8()) % (usual.len() + 1) {
        at if at < usual.len() => usual[at],
        _ => input.u32(),
    };
    let (source, target) = (pick(&[3, 3, 3, 3]), pick(&[2, 2, 2, 2]));
    let (guest, host) = (pick(&[9, 80, 10]), pick(&[1024, 1 << 30, (1 << 30) + 1]));
    let len = pick(&[0, 1, 100, 4096]);
    let kind = pick(&[1, 1, 1, 1]) & 0xffff | pick(&[1, 2, 3, 4, 5, 6, 7]) << 16;
    let (flags, buf_alloc, fwd_cnt) = (pick(&[0, 1, 2, 3]), pick(&[0, 4096, 262_144]), pick(&[0]));
    let mut bytes = Vec::new();
    for field in [source, 0, target, 0, guest, host, len, kind, flags, buf_alloc, fwd_cnt] {
        bytes.extend(field.to_le_bytes());
    }
    assert_eq!(bytes.len(), HEADER_BYTES);
    bytes
}

fn send(driver: &mut Driver, header: Vec<u8>, data: usize) {
    driver.submit(TRANSMIT, &[Buffer::Out(header), Buffer::Out(vec![7; data])]);
    driver.kick(TRANSMIT);
    while driver.used(TRANSMIT).is_some() {}
}

fn moved(driver: Driver, host: &Host) -> Driver {
    let state = driver.endpoint.save();
    assert_eq!(VirtioState::decode(&state.encode().unwrap()).as_ref(), Ok(&state));
    let DeviceState::Vsock(of_vsock) = &state.device else { unreachable!("it is one") };
    let vsock = Vsock::restore(of_vsock, host.side()).unwrap();
    let endpoint = Endpoint::restore(&state, Box::new(vsock), driver.memory.clone()).unwrap();
    endpoint.resume();
    driver.moved_to(endpoint)
}

fuzz_target!(|bytes: &[u8]| {
    let mut input = Input::new(bytes);
    let mut host = Host::new();
    let memory = memory();
    let vsock = Vsock::new(host.side()).unwrap();
    let endpoint = Endpoint::new(Box::new(vsock), memory.clone()).unwrap();
    let mut driver = Driver::boot(endpoint, memory, u64::MAX);
    for _ in 0..OPERATIONS_MAX {
        if input.is_empty() {
            break;
        }
        match input.u8() % 8 {
            0 => driver = moved(driver, &host),
            1 | 2 => host.step(&mut input),
            3 => {
                while driver.room(RECEIVE) > 128 {
                    driver.submit(RECEIVE, &[Buffer::In(HEADER_BYTES), Buffer::In(input.below(5000))]);
                }
                driver.kick(RECEIVE);
            }
            // Stalled on resets, a packet stays in the ring: then there may be no room.
            _ if driver.room(TRANSMIT) >= 2 => {
                let data = input.below(5000);
                let header = header(&mut input);
                send(&mut driver, header, data);
            }
            _ => {}
        }
        driver.run();
        while driver.used(RECEIVE).is_some() {}
    }
    let mut driver = moved(driver, &host);
    assert_eq!(driver.endpoint.failure(), None);
    driver.initialise(u64::MAX);
    let carried = |driver: &Driver| driver.endpoint.with_device(|vsock: &mut Vsock, _| vsock.has_carrier());
    assert_eq!(carried(&driver), Some(false));
    let fields = [3_u32, 0, 2, 0, 9, 1024, 0, 1 << 16 | 1, 0, 4096, 0];
    send(&mut driver, fields.iter().flat_map(|field| field.to_le_bytes()).collect(), 0);
    assert_eq!(carried(&driver), Some(true));
});
