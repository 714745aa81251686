#![no_main]
//! Damaged device states: what decodes encodes to the same, and restoring it is refused or gives a device that
//! a driver can start anew.

use std::os::unix::net::UnixDatagram;

use dormouse_snapshot::devices::virtio::{DeviceState, VirtioState};
use dormouse_vmm::virtio::testing::{Driver, memory};
use dormouse_vmm::virtio::{Balloon, Block, Endpoint, FileDisk, Net, Rng, VirtioDevice, Vsock, VsockHost};
use libfuzzer_sys::fuzz_target;

const ROUNDS_MAX: usize = 20;

fn device(state: &DeviceState) -> Option<Box<dyn VirtioDevice>> {
    Some(match state {
        DeviceState::Block(state) => {
            let disk = tempfile::tempfile_in("/dev/shm").unwrap();
            Box::new(Block::restore(state, Box::new(FileDisk::new(disk, state.disk_bytes))).ok()?)
        }
        DeviceState::Vsock(state) => Box::new(Vsock::restore(state, VsockHost::default()).ok()?),
        DeviceState::Net(state) => {
            let (tap, _) = UnixDatagram::pair().unwrap();
            Box::new(Net::restore(state, tap.into()).ok()?)
        }
        DeviceState::Balloon(state) => Box::new(Balloon::restore(state, Box::new(|_, _, _| Ok(())))),
        DeviceState::Rng => Box::new(Rng),
    })
}

fuzz_target!(|bytes: &[u8]| {
    let Ok(state) = VirtioState::decode(bytes) else { return };
    let again = state.encode().expect("a decoded state can be encoded");
    assert_eq!(VirtioState::decode(&again).as_ref(), Ok(&state));
    let memory = memory();
    let Some(device) = device(&state.device) else { return };
    let Ok(endpoint) = Endpoint::restore(&state, device, memory.clone()) else { return };
    endpoint.resume();
    let mut driver = Driver::attach(endpoint, memory);
    driver.run_rounds(ROUNDS_MAX);
    let _ = driver.endpoint.save();
    driver.initialise(u64::MAX);
    assert_eq!(driver.endpoint.failure(), None);
});
