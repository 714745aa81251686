//! The virtio-mmio transport, version 2: registers on the bus, and the device thread's handle on the device.

mod endpoint;
mod registers;
mod status;
#[cfg(test)]
mod tests;

use std::any::TypeId;
use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

use dormouse_snapshot::devices::virtio::{DeviceKind, VirtioStateError};
use virtio_bindings::virtio_config::VIRTIO_F_VERSION_1;
use virtio_bindings::virtio_mmio::VIRTIO_MMIO_QUEUE_NOTIFY;
use virtio_bindings::virtio_ring::{VIRTIO_RING_F_EVENT_IDX, VIRTIO_RING_F_INDIRECT_DESC};
use vmm_sys_util::eventfd::EventFd;

pub use self::endpoint::Endpoint;
use self::registers::Registers;
use super::device::{DeviceError, Rings, VirtioDevice};
use super::interrupt::Interrupt;
use super::queue::{QueueError, VirtQueue};
use crate::bus::BusDevice;
use crate::ending::{EndReason, Ending};
use crate::memory::GuestMemory;

/// Where an ioeventfd of a queue is to listen, from the device's base; it matches on the queue's index, 32 bits.
pub const QUEUE_NOTIFY_OFFSET: u64 = VIRTIO_MMIO_QUEUE_NOTIFY as u64;

const VERSION_1: u64 = 1 << VIRTIO_F_VERSION_1;
const EVENT_IDX: u64 = 1 << VIRTIO_RING_F_EVENT_IDX;
const RING_FEATURES: u64 = VERSION_1 | EVENT_IDX | 1 << VIRTIO_RING_F_INDIRECT_DESC;

#[derive(Debug, thiserror::Error)]
pub enum RestoreError {
    #[error("the state is not valid: {0}")]
    State(VirtioStateError),
    #[error("the state is of a {saved} device, the device is {given}")]
    Kind { saved: &'static str, given: &'static str },
    #[error("the saved device offered or had what the given one has not: {0}")]
    Device(&'static str),
    #[error("the saved queue {index} is not usable: {source}")]
    Queue { index: usize, source: QueueError },
    #[error("no eventfd could be made: {0}")]
    EventFd(std::io::Error),
}

/// What vCPU threads and the device thread share. Locks are taken in the order of the fields.
struct Shared {
    kind: DeviceKind,
    /// Of the device itself.
    device_type: TypeId,
    registers: Mutex<Registers>,
    cell: Mutex<Cell>,
    interrupt: Interrupt,
    /// Written by the guest's notifications, one for each queue.
    queue_fds: Vec<EventFd>,
    /// The device's own, once more: it can be watched without a lock.
    backend_fd: Option<OwnedFd>,
    memory: GuestMemory,
    /// Where it is told that the device gave up. Not there: nobody wants to know.
    ending: OnceLock<Arc<Ending>>,
}

/// The device, and what it works on while the driver is ready.
struct Cell {
    device: Box<dyn VirtioDevice>,
    rings: Option<Rings>,
    /// Why the device gave up; it is left alone until the guest resets it.
    failure: Option<String>,
    failed_before: bool,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Shared {
    fn offered(device: &dyn VirtioDevice) -> u64 {
        device.features() | RING_FEATURES
    }

    /// DRIVER_OK: the queues as the guest set them up come to life.
    fn activate(&self, registers: &Registers) {
        let cell = &mut *lock(&self.cell);
        match self.rings(registers) {
            Ok(rings) => cell.device.activate(cell.rings.insert(rings)),
            Err((index, source)) => self.fail(cell, &DeviceError::Queue { index, source }),
        }
    }

    fn rings(&self, registers: &Registers) -> Result<Rings, (usize, QueueError)> {
        let event_idx = registers.driver_features & EVENT_IDX != 0;
        let make = |(index, state): (usize, &_)| {
            let mut state = *state;
            state = dormouse_snapshot::devices::virtio::QueueState { event_idx, ..state };
            let queue = VirtQueue::from_state(&state).map_err(|source| (index, source))?;
            if state.ready {
                queue.check(&self.memory).map_err(|source| (index, source))?;
            }
            Ok(queue)
        };
        Ok(Rings {
            memory: self.memory.clone(),
            queues: registers.queues.iter().enumerate().map(make).collect::<Result<_, _>>()?,
            interrupt: self.interrupt.clone(),
            features: registers.driver_features,
        })
    }

    fn fail(&self, cell: &mut Cell, error: &DeviceError) {
        let kind = cell.device.kind().as_str();
        // Told once: a guest that resets and breaks it again and again must not fill the log.
        if !std::mem::replace(&mut cell.failed_before, true) {
            tracing::warn!(device = kind, %error, "a device gave up until its guest resets it");
        }
        cell.failure = Some(format!("{kind}: {error}"));
        self.tell(cell);
        self.interrupt.fail();
    }

    /// Ends the VM if the device gave up.
    fn tell(&self, cell: &Cell) {
        if let (Some(ending), Some(why)) = (self.ending.get(), &cell.failure) {
            ending.set(EndReason::Device { why: why.clone() });
        }
    }

    fn reset(&self, registers: &mut Registers) {
        let cell = &mut *lock(&self.cell);
        cell.rings = None;
        cell.failure = None;
        cell.device.reset();
        registers.reset();
        self.interrupt.reset();
    }

    fn notify(&self, index: usize) {
        if let Some(fd) = self.queue_fds.get(index) {
            // Only fails when the counter is full: then the notification is pending anyway.
            let _ = fd.write(1);
        }
    }
}

/// The registers of one device as the bus sees them.
pub struct MmioTransport {
    shared: Arc<Shared>,
}

impl BusDevice for MmioTransport {
    fn read(&mut self, offset: u64, data: &mut [u8]) {
        self.shared.read(offset, data);
    }

    fn write(&mut self, offset: u64, data: &[u8]) {
        self.shared.write(offset, data);
    }
}
