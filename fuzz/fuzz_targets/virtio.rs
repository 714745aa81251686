#![no_main]
//! Every virtio device behind its registers and queues: whatever a guest writes, nothing panics, the state can
//! be saved and restored, and a driver that starts anew finds the device working.

use std::fs::File;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixDatagram;

use dormouse_fuzz::Input;
use dormouse_snapshot::devices::virtio::{DeviceState, VirtioState};
use dormouse_vmm::virtio::testing::{Driver, RAM_BYTES, memory};
use dormouse_vmm::virtio::{
    Balloon, Block, Discard, Endpoint, FileDisk, Net, Rng, VirtioDevice, Vsock, VsockHost,
};
use libfuzzer_sys::fuzz_target;
use vm_memory::{Bytes, GuestAddress};

const DISK_BYTES: u64 = 1 << 20;
const RINGS_BASE: u64 = 0x10_0000;
const BUFFERS_BASE: u64 = 0x100_0000;
const OPERATIONS_MAX: usize = 200;
const ROUNDS_MAX: usize = 20;

/// The host's side of whichever device it is.
struct Host {
    disk: File,
    wire: UnixDatagram,
}

impl Host {
    fn new() -> (Self, OwnedFd) {
        let (wire, tap) = UnixDatagram::pair().unwrap();
        wire.set_nonblocking(true).unwrap();
        let disk = tempfile::tempfile_in("/dev/shm").unwrap();
        disk.set_len(DISK_BYTES).unwrap();
        (Self { disk, wire }, tap.into())
    }

    fn disk(&self) -> Box<FileDisk> {
        Box::new(FileDisk::new(self.disk.try_clone().unwrap(), DISK_BYTES))
    }
}

fn discard() -> Discard {
    Box::new(|_, address, bytes| {
        assert!(address.0 + bytes <= RAM_BYTES as u64 && bytes > 0);
        Ok(())
    })
}

fn device(kind: u8, host: &Host, tap: OwnedFd) -> Box<dyn VirtioDevice> {
    match kind % 5 {
        0 => Box::new(Block::new(host.disk(), kind & 0x80 != 0, "disk").unwrap()),
        1 => Box::new(Vsock::new(VsockHost::default()).unwrap()),
        2 => Box::new(Net::new(tap, [2, 0, 0, 0, 0, 1]).unwrap()),
        3 => Box::new(Balloon::new(discard())),
        _ => Box::new(Rng),
    }
}

fn restored(state: &DeviceState, host: &mut Host) -> Box<dyn VirtioDevice> {
    match state {
        DeviceState::Block(state) => Box::new(Block::restore(state, host.disk()).unwrap()),
        DeviceState::Vsock(state) => Box::new(Vsock::restore(state, VsockHost::default()).unwrap()),
        DeviceState::Net(state) => {
            let (wire, tap) = UnixDatagram::pair().unwrap();
            wire.set_nonblocking(true).unwrap();
            host.wire = wire;
            Box::new(Net::restore(state, tap.into()).unwrap())
        }
        DeviceState::Balloon(state) => Box::new(Balloon::restore(state, discard())),
        DeviceState::Rng => Box::new(Rng),
    }
}

/// An address near something of interest, or anywhere.
fn address(input: &mut Input<'_>) -> u64 {
    match input.u8() % 5 {
        0 => RINGS_BASE + u64::from(input.u16()) % 0x3_0000,
        1 => (RAM_BYTES as u64).wrapping_sub(u64::from(input.u16() % 64)),
        2 => input.u64(),
        _ => BUFFERS_BASE + u64::from(input.u32()) % 0x400_0000,
    }
}

fn step(driver: &mut Driver, host: &Host, input: &mut Input<'_>) {
    let queues = driver.queues().max(1);
    let queue = input.below(queues);
    match input.u8() % 9 {
        0 => driver.set(u32::from(input.u8()) & !3, input.u32()),
        1 => {
            let offset = u64::from(input.u16() % 0x180);
            let len = usize::from(input.u8() % 9);
            driver.write_bus(offset, &input.u64().to_le_bytes()[..len]);
        }
        2 => driver.read_bus(input.u64() % 0x180, &mut [0; 8][..usize::from(input.u8() % 9)]),
        3 if driver.queues() > 0 => {
            let index = input.u16() % 256;
            let len = if input.u8() % 8 == 0 { input.u32() } else { u32::from(input.u16()) };
            let descriptor = (address(input), len, input.u16() % 8, input.u16() % 260);
            driver.write_descriptor(queue, index, descriptor);
        }
        4 if driver.queues() > 0 => driver.make_available(queue, input.u16() % 260),
        5 if driver.queues() > 0 => driver.set_avail_index(queue, input.u16()),
        6 => {
            let at = GuestAddress(address(input));
            let len = usize::from(input.u8());
            let _ = driver.memory.write(input.bytes(len), at);
        }
        7 => {
            let len = input.below(2000);
            let _ = host.wire.send(input.bytes(len));
        }
        _ => driver.set(0x50, u32::try_from(queue).unwrap()),
    }
}

fn moved(driver: Driver, host: &mut Host) -> Driver {
    let state = driver.endpoint.save();
    let decoded = VirtioState::decode(&state.encode().unwrap()).expect("what was saved can be read");
    assert_eq!(decoded, state);
    let device = restored(&state.device, host);
    let endpoint = Endpoint::restore(&state, device, driver.memory.clone()).expect("and restored");
    endpoint.resume();
    driver.moved_to(endpoint)
}

fuzz_target!(|bytes: &[u8]| {
    let mut input = Input::new(bytes);
    let (mut host, tap) = Host::new();
    let memory = memory();
    let endpoint = Endpoint::new(device(input.u8(), &host, tap), memory.clone()).unwrap();
    let mut driver = Driver::attach(endpoint, memory);
    match input.u8() % 4 {
        0 => {}
        1 => driver.initialise(1 << 32),
        _ => driver.initialise(u64::MAX),
    }
    for _ in 0..OPERATIONS_MAX {
        if input.is_empty() {
            break;
        }
        if input.u8() == 0xff {
            driver = moved(driver, &mut host);
        } else {
            step(&mut driver, &host, &mut input);
        }
        driver.run_rounds(ROUNDS_MAX);
    }
    let driver_ok = driver.endpoint.failure().is_none();
    assert_eq!(driver.get(0x70) & 0x40 == 0, driver_ok, "the guest sees that its device gave up");
    let mut driver = moved(driver, &mut host);
    driver.initialise(u64::MAX);
    assert_eq!(driver.endpoint.failure(), None);
    assert_eq!(host.disk.metadata().unwrap().len(), DISK_BYTES);
});
