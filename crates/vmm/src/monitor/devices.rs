//! Which virtio devices a guest has, in which slots.
//!
//! Slots: the disks, then vsock, rng, balloon, and net if there is one. The order is part of every snapshot.

use std::io;
use std::os::fd::OwnedFd;

use dormouse_snapshot::devices::virtio::{DeviceState, VirtioState};
use dormouse_sys::net::GUEST_MAC;

use super::disks::{Disks, SharedDisk};
use super::guest::HostSide;
use crate::control::Machine;
use crate::memory::GuestMemory;
use crate::virtio::{
    Balloon, Block, BlockError, Endpoint, Net, RestoreError, Rng, VirtioDevice, Vsock, VsockHost,
    discard_pages,
};

/// Where clients of the guest's vsock ports connect, in the monitor's folder.
const VSOCK_SOCKET: &str = "vsock.sock";

#[derive(Debug, thiserror::Error)]
pub enum DevicesError {
    #[error("disk {number} is not usable")]
    Disk { number: usize, source: BlockError },
    #[error("the vsock device cannot be made")]
    Vsock(#[source] io::Error),
    #[error("slot {slot} cannot be made")]
    Slot { slot: usize, source: io::Error },
    #[error("slot {slot} cannot be restored")]
    Restore { slot: usize, source: RestoreError },
    #[error("the snapshot has {saved} devices, the machine {given}")]
    Count { saved: usize, given: usize },
    #[error("the snapshot has another kind of device in slot {0}")]
    Kind(usize),
    #[error("the network card cannot be made")]
    Net(#[source] io::Error),
}

/// Devices as a guest finds them at boot.
pub fn make(
    machine: &Machine,
    disks: &Disks,
    host: HostSide,
    memory: &GuestMemory,
) -> Result<Vec<Endpoint>, DevicesError> {
    all(machine, disks, host, &[])?
        .into_iter()
        .enumerate()
        .map(|(slot, device)| {
            Endpoint::new(device, memory.clone()).map_err(|source| DevicesError::Slot { slot, source })
        })
        .collect()
}

/// Devices that go on where they were saved.
pub fn restore(
    machine: &Machine,
    disks: &Disks,
    host: HostSide,
    memory: &GuestMemory,
    saved: &[VirtioState],
) -> Result<Vec<Endpoint>, DevicesError> {
    let devices = all(machine, disks, host, saved)?;
    if devices.len() != saved.len() {
        return Err(DevicesError::Count { saved: saved.len(), given: devices.len() });
    }
    let endpoint = |(slot, (device, saved)): (usize, (_, &VirtioState))| {
        Endpoint::restore(saved, device, memory.clone())
            .map_err(|source| DevicesError::Restore { slot, source })
    };
    devices.into_iter().zip(saved).enumerate().map(endpoint).collect()
}

/// `saved`: empty at boot.
fn all(
    machine: &Machine,
    disks: &Disks,
    mut host: HostSide,
    saved: &[VirtioState],
) -> Result<Vec<Box<dyn VirtioDevice>>, DevicesError> {
    let mut devices: Vec<Box<dyn VirtioDevice>> = Vec::new();
    for (number, disk) in disks.disks().iter().enumerate() {
        let read_only = machine.disks.get(number).is_some_and(|disk| disk.read_only);
        let device = block(number, disk.clone(), read_only, saved)?;
        devices.push(Box::new(device));
    }
    let tap = host.tap.take();
    devices.push(Box::new(vsock(devices.len(), host, saved)?));
    devices.push(Box::new(Rng));
    devices.push(Box::new(balloon(devices.len(), saved)?));
    if let Some(tap) = tap {
        devices.push(Box::new(net(devices.len(), tap, saved)?));
    }
    Ok(devices)
}

fn block(
    number: usize,
    disk: SharedDisk,
    read_only: bool,
    saved: &[VirtioState],
) -> Result<Block, DevicesError> {
    let backend = Box::new(disk);
    let failed = |source| DevicesError::Disk { number, source };
    match saved.get(number).map(|saved| &saved.device) {
        None => Block::new(backend, read_only, &format!("disk{number}")).map_err(failed),
        Some(DeviceState::Block(state)) => Block::restore(state, backend).map_err(failed),
        Some(_) => Err(DevicesError::Kind(number)),
    }
}

fn vsock(slot: usize, host: HostSide, saved: &[VirtioState]) -> Result<Vsock, DevicesError> {
    let listener = dormouse_sys::unix::bind(&host.dir, VSOCK_SOCKET).map_err(DevicesError::Vsock)?;
    let host = VsockHost {
        carrier_in: Some(host.carrier_in),
        carrier_out: Some(host.carrier_out),
        listener: Some(listener),
    };
    match saved.get(slot).map(|saved| &saved.device) {
        None => Vsock::new(host).map_err(DevicesError::Vsock),
        Some(DeviceState::Vsock(state)) => Vsock::restore(state, host).map_err(DevicesError::Vsock),
        Some(_) => Err(DevicesError::Kind(slot)),
    }
}

fn balloon(slot: usize, saved: &[VirtioState]) -> Result<Balloon, DevicesError> {
    // In restored memory a page that is given back has the snapshot's content again, which is as good as any.
    let discard = Box::new(discard_pages);
    match saved.get(slot).map(|saved| &saved.device) {
        None => Ok(Balloon::new(discard)),
        Some(DeviceState::Balloon(state)) => Ok(Balloon::restore(state, discard)),
        Some(_) => Err(DevicesError::Kind(slot)),
    }
}

fn net(slot: usize, tap: OwnedFd, saved: &[VirtioState]) -> Result<Net, DevicesError> {
    match saved.get(slot).map(|saved| &saved.device) {
        None => Net::new(tap, GUEST_MAC).map_err(DevicesError::Net),
        Some(DeviceState::Net(state)) => Net::restore(state, tap).map_err(DevicesError::Net),
        Some(_) => Err(DevicesError::Kind(slot)),
    }
}
