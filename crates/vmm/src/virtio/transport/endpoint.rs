//! The device thread's handle: events, quiesce, save and restore.

use std::any::{Any, TypeId};
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::{Arc, Mutex, OnceLock};

use dormouse_snapshot::devices::virtio::{DeviceKind, QueueState, VirtioState};
use vmm_sys_util::eventfd::{EFD_CLOEXEC, EFD_NONBLOCK, EventFd};

use super::registers::Registers;
use super::status::{DRIVER_OK, FEATURES_OK};
use super::{Cell, MmioTransport, RestoreError, Shared, VERSION_1, lock};
use crate::bus::SharedDevice;
use crate::ending::Ending;
use crate::memory::GuestMemory;
use crate::virtio::device::{DeviceError, Progress, Rings, VirtioDevice};
use crate::virtio::interrupt::Interrupt;
use crate::virtio::queue::VirtQueue;

/// One device behind its transport.
///
/// The owner registers `bus_device` on the MMIO bus, `irq_fd` as irqfd, and each of `queue_fds` as ioeventfd at
/// `QUEUE_NOTIFY_OFFSET`; it watches the queue eventfds and `backend_fd` for readability (level-triggered) and
/// calls `queue_event` and `backend_event`. Events of a guest that must not change, because it is being saved, wait:
/// handling them writes to its memory.
#[derive(Clone)]
pub struct Endpoint {
    shared: Arc<Shared>,
}

impl Endpoint {
    /// A device as a guest finds it at boot.
    pub fn new(device: Box<dyn VirtioDevice>, memory: GuestMemory) -> std::io::Result<Self> {
        let registers = Registers::new(device.queue_sizes());
        let interrupt = Interrupt::new(0, 0, false)?;
        Self::with(device, memory, registers, interrupt)
    }

    fn with(
        device: Box<dyn VirtioDevice>,
        memory: GuestMemory,
        registers: Registers,
        interrupt: Interrupt,
    ) -> std::io::Result<Self> {
        let queue_fds = (0..registers.queues.len())
            .map(|_| EventFd::new(EFD_NONBLOCK | EFD_CLOEXEC))
            .collect::<std::io::Result<_>>()?;
        let backend_fd = device.backend_fd().map(|fd| fd.try_clone_to_owned()).transpose()?;
        let (kind, device_type) = (device.kind(), (*device).type_id());
        let cell = Mutex::new(Cell { device, rings: None, failure: None, failed_before: false });
        let registers = Mutex::new(registers);
        let ending = OnceLock::new();
        let shared =
            Shared { kind, device_type, registers, cell, interrupt, queue_fds, backend_fd, memory, ending };
        Ok(Self { shared: Arc::new(shared) })
    }

    /// A device that goes on where `save` left it. `device` was made from `state.device` and its new host side.
    ///
    /// Call `resume` before the guest runs.
    pub fn restore(
        state: &VirtioState,
        device: Box<dyn VirtioDevice>,
        memory: GuestMemory,
    ) -> Result<Self, RestoreError> {
        state.validate().map_err(RestoreError::State)?;
        check(state, &*device)?;
        let registers = Registers {
            device_features_select: state.device_features_select,
            driver_features_select: state.driver_features_select,
            queue_select: state.queue_select,
            driver_features: state.driver_features,
            status: state.status,
            queues: state.queues.clone(),
        };
        let interrupt = Interrupt::new(state.interrupt_status, state.config_generation, state.needs_reset)
            .map_err(RestoreError::EventFd)?;
        let endpoint = Self::with(device, memory, registers, interrupt).map_err(RestoreError::EventFd)?;
        endpoint.restore_rings(state)?;
        Ok(endpoint)
    }

    fn restore_rings(&self, state: &VirtioState) -> Result<(), RestoreError> {
        let shared = &self.shared;
        let registers = lock(&shared.registers);
        let cell = &mut *lock(&shared.cell);
        if state.needs_reset {
            cell.failure = Some(format!("{}: it had given up before", cell.device.kind().as_str()));
        } else if state.status & DRIVER_OK != 0 {
            let rings =
                shared.rings(&registers).map_err(|(index, source)| RestoreError::Queue { index, source })?;
            cell.device.activate(cell.rings.insert(rings));
        }
        Ok(())
    }

    /// Notifications and interrupts that were under way may be lost: makes them again.
    pub fn resume(&self) {
        if lock(&self.shared.cell).rings.is_some() {
            (0..self.shared.queue_fds.len()).for_each(|index| self.shared.notify(index));
        }
        self.shared.interrupt.retrigger();
    }

    /// A device that gives up ends the VM from now on, at once if it has done so. Without this, it waits for its guest
    /// to reset it. Only the first call counts.
    pub fn end_with(&self, ending: &Arc<Ending>) {
        let cell = lock(&self.shared.cell);
        let _ = self.shared.ending.set(Arc::clone(ending));
        self.shared.tell(&cell);
    }

    /// The registers, for the MMIO bus.
    #[must_use]
    pub fn bus_device(&self) -> SharedDevice {
        Arc::new(Mutex::new(MmioTransport { shared: Arc::clone(&self.shared) }))
    }

    #[must_use]
    pub fn irq_fd(&self) -> &EventFd {
        self.shared.interrupt.fd()
    }

    /// One for each queue, by index.
    #[must_use]
    pub fn queue_fds(&self) -> &[EventFd] {
        &self.shared.queue_fds
    }

    /// The host side's descriptor; it stays the same for the whole life of the endpoint.
    #[must_use]
    pub fn backend_fd(&self) -> Option<BorrowedFd<'_>> {
        self.shared.backend_fd.as_ref().map(AsFd::as_fd)
    }

    #[must_use]
    pub fn kind(&self) -> DeviceKind {
        self.shared.kind
    }

    /// Why the device gave up, if it did.
    #[must_use]
    pub fn failure(&self) -> Option<String> {
        lock(&self.shared.cell).failure.clone()
    }

    /// The eventfd of queue `index` is readable.
    pub fn queue_event(&self, index: usize) {
        let Some(fd) = self.shared.queue_fds.get(index) else { return };
        // Fails when it was taken already: handling a queue once more is harmless.
        let _ = fd.read();
        self.run(index, |device, rings| match rings {
            Some(rings) => device.queue_event(rings, index),
            None => Ok(Progress::Done),
        });
    }

    /// `backend_fd` is readable.
    pub fn backend_event(&self) {
        self.run(0, |device, rings| device.backend_event(rings));
    }

    fn run(
        &self,
        again: usize,
        call: impl FnOnce(&mut dyn VirtioDevice, Option<&mut Rings>) -> Result<Progress, DeviceError>,
    ) {
        let cell = &mut *lock(&self.shared.cell);
        // One that gave up still takes notice of its host's side, or that would stay ready for ever.
        let rings = cell.rings.as_mut().filter(|_| cell.failure.is_none());
        match call(&mut *cell.device, rings) {
            Ok(Progress::Done) => {}
            Ok(Progress::More) => self.shared.notify(again),
            Err(error) => self.shared.fail(cell, &error),
        }
    }

    /// Works with the device itself, if it is a `D`: to change its host side or to ask something of the guest. Waits for
    /// a request that is being served on another thread, unless it is no `D`.
    pub fn with_device<D: VirtioDevice, R>(
        &self,
        work: impl FnOnce(&mut D, Option<&mut Rings>) -> R,
    ) -> Option<R> {
        if TypeId::of::<D>() != self.shared.device_type {
            return None;
        }
        let cell = &mut *lock(&self.shared.cell);
        let device: &mut dyn Any = &mut *cell.device;
        Some(work(device.downcast_mut()?, cell.rings.as_mut()))
    }

    /// All that a restore needs. The vCPUs must be stopped; the device goes on afterwards if it is not dropped.
    #[must_use]
    pub fn save(&self) -> VirtioState {
        let shared = &self.shared;
        let registers = lock(&shared.registers);
        let cell = &mut *lock(&shared.cell);
        if cell.failure.is_none()
            && let Err(error) = cell.device.quiesce(cell.rings.as_mut())
        {
            shared.fail(cell, &error);
        }
        let live = |rings: &Rings| rings.queues.iter().map(VirtQueue::state).collect();
        VirtioState {
            device_features_select: registers.device_features_select,
            driver_features_select: registers.driver_features_select,
            queue_select: registers.queue_select,
            driver_features: registers.driver_features,
            status: registers.status,
            needs_reset: shared.interrupt.needs_reset(),
            interrupt_status: shared.interrupt.status(),
            config_generation: shared.interrupt.generation(),
            queues: cell.rings.as_ref().map_or_else(|| registers.queues.clone(), live),
            device: cell.device.save(),
        }
    }
}

/// Whether the state can be of this device.
fn check(state: &VirtioState, device: &dyn VirtioDevice) -> Result<(), RestoreError> {
    let (saved, given) = (state.device.kind(), device.kind());
    if saved != given {
        return Err(RestoreError::Kind { saved: saved.as_str(), given: given.as_str() });
    }
    let sizes = state.queues.iter().map(|queue: &QueueState| queue.size_max);
    if !sizes.eq(device.queue_sizes().iter().copied()) {
        return Err(RestoreError::Device("queue sizes"));
    }
    let features = state.driver_features;
    let fit = features & !Shared::offered(device) == 0 && features & VERSION_1 != 0;
    if state.status & FEATURES_OK != 0 && !fit {
        return Err(RestoreError::Device("features"));
    }
    if state.status & DRIVER_OK != 0 && state.status & FEATURES_OK == 0 {
        return Err(RestoreError::Device("status"));
    }
    Ok(())
}
