//! A device's interrupt line, and what the guest reads to learn why it fired.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};

use virtio_bindings::virtio_mmio::{VIRTIO_MMIO_INT_CONFIG, VIRTIO_MMIO_INT_VRING};
use vmm_sys_util::eventfd::{EFD_CLOEXEC, EFD_NONBLOCK, EventFd};

/// Shared by the device thread, which raises it, and vCPU threads, which read and acknowledge it.
///
/// The line is an eventfd (KVM's irqfd): edge-triggered. A lost edge is made good by `retrigger`.
#[derive(Clone)]
pub struct Interrupt {
    inner: Arc<Inner>,
}

struct Inner {
    fd: EventFd,
    status: AtomicU32,
    /// Changes whenever the device's configuration space does.
    generation: AtomicU32,
    needs_reset: AtomicBool,
}

impl Interrupt {
    pub(super) fn new(status: u32, generation: u32, needs_reset: bool) -> io::Result<Self> {
        let inner = Inner {
            fd: EventFd::new(EFD_NONBLOCK | EFD_CLOEXEC)?,
            status: AtomicU32::new(status),
            generation: AtomicU32::new(generation),
            needs_reset: AtomicBool::new(needs_reset),
        };
        Ok(Self { inner: Arc::new(inner) })
    }

    /// To be registered as irqfd.
    #[must_use]
    pub fn fd(&self) -> &EventFd {
        &self.inner.fd
    }

    /// Tells the guest that a queue has used buffers.
    pub fn queues_used(&self) {
        self.raise(VIRTIO_MMIO_INT_VRING);
    }

    /// Tells the guest to read the configuration space again.
    pub fn config_changed(&self) {
        self.inner.generation.fetch_add(1, Ordering::AcqRel);
        self.raise(VIRTIO_MMIO_INT_CONFIG);
    }

    /// Fires again if the guest has not acknowledged everything: an edge may have been lost in a fork or restore.
    pub fn retrigger(&self) {
        if self.status() != 0 {
            self.fire();
        }
    }

    #[must_use]
    pub fn status(&self) -> u32 {
        self.inner.status.load(Ordering::Acquire)
    }

    #[must_use]
    pub fn generation(&self) -> u32 {
        self.inner.generation.load(Ordering::Acquire)
    }

    pub(super) fn acknowledge(&self, bits: u32) {
        self.inner.status.fetch_and(!bits, Ordering::AcqRel);
    }

    #[must_use]
    pub fn needs_reset(&self) -> bool {
        self.inner.needs_reset.load(Ordering::Acquire)
    }

    /// The device gave up: the guest sees NEEDS_RESET in the status.
    pub(super) fn fail(&self) {
        self.inner.needs_reset.store(true, Ordering::Release);
        self.config_changed();
    }

    pub(super) fn reset(&self) {
        self.inner.needs_reset.store(false, Ordering::Release);
        self.inner.status.store(0, Ordering::Release);
    }

    fn raise(&self, bit: u32) {
        self.inner.status.fetch_or(bit, Ordering::AcqRel);
        self.fire();
    }

    fn fire(&self) {
        // Only fails when the counter is full: then the edge is pending anyway.
        let _ = self.inner.fd.write(1);
    }
}
