//! A guest's driver for tests and fuzzing: builds queues in guest memory and drives the registers.
#![allow(clippy::unwrap_used, reason = "a test helper: an unexpected result is a failed test")]

use std::collections::BTreeMap;

use virtio_bindings::virtio_mmio as mmio;
use vm_memory::{Bytes, GuestAddress};

use super::Endpoint;
use crate::bus::SharedDevice;
use crate::memory::GuestMemory;

pub const RAM_BYTES: usize = 96 << 20;
const RINGS_BASE: u64 = 0x10_0000;
const RINGS_STRIDE: u64 = 0x1_0000;
const BUFFERS_BASE: u64 = 0x100_0000;
/// The largest buffer of one descriptor.
pub const BUFFER_BYTES_MAX: usize = 0x1_0000;
const NEXT: u16 = 1;
const WRITE: u16 = 2;

/// One buffer of a request.
#[derive(Debug, Clone)]
pub enum Buffer {
    /// The device reads it.
    Out(Vec<u8>),
    /// The device may write so many bytes.
    In(usize),
}

#[derive(Clone)]
struct Ring {
    size: u16,
    base: u64,
    free: Vec<u16>,
    avail: u16,
    used: u16,
    /// Descriptors of each request in flight, by its head, and the sizes of what may be written.
    in_flight: BTreeMap<u16, Vec<(u16, usize)>>,
}

impl Ring {
    fn new(index: usize, size: u16) -> Self {
        let base = RINGS_BASE + index as u64 * RINGS_STRIDE;
        Self { size, base, free: (0..size).rev().collect(), avail: 0, used: 0, in_flight: BTreeMap::new() }
    }

    fn desc(&self, index: u16) -> GuestAddress {
        GuestAddress(self.base + u64::from(index) * 16)
    }

    fn avail_base(&self) -> u64 {
        self.base + 0x8000
    }

    fn used_base(&self) -> u64 {
        self.base + 0xa000
    }

    fn buffer(queue: usize, index: u16) -> GuestAddress {
        let slot = queue as u64 * 256 + u64::from(index);
        GuestAddress(BUFFERS_BASE + slot * BUFFER_BYTES_MAX as u64)
    }
}

/// The guest's side of one device.
pub struct Driver {
    pub endpoint: Endpoint,
    pub memory: GuestMemory,
    bus: SharedDevice,
    rings: Vec<Ring>,
}

#[must_use]
pub fn memory() -> GuestMemory {
    GuestMemory::from_ranges(&[(GuestAddress(0), RAM_BYTES)]).unwrap()
}

impl Driver {
    /// Only connected: the device is not initialised.
    #[must_use]
    pub fn attach(endpoint: Endpoint, memory: GuestMemory) -> Self {
        let bus = endpoint.bus_device();
        Self { endpoint, memory, bus, rings: Vec::new() }
    }

    /// Initialises the device; `features` of what it offers are accepted.
    #[must_use]
    pub fn boot(endpoint: Endpoint, memory: GuestMemory, features: u64) -> Self {
        let mut driver = Self::attach(endpoint, memory);
        driver.initialise(features);
        driver
    }

    pub fn initialise(&mut self, features: u64) {
        self.rings.clear();
        self.set(mmio::VIRTIO_MMIO_STATUS, 0);
        self.set(mmio::VIRTIO_MMIO_STATUS, 1);
        self.set(mmio::VIRTIO_MMIO_STATUS, 3);
        let accepted = self.offered() & features;
        for (select, half) in [(0, accepted & 0xffff_ffff), (1, accepted >> 32)] {
            self.set(mmio::VIRTIO_MMIO_DRIVER_FEATURES_SEL, select);
            self.set(mmio::VIRTIO_MMIO_DRIVER_FEATURES, u32::try_from(half).unwrap());
        }
        self.set(mmio::VIRTIO_MMIO_STATUS, 11);
        assert_eq!(self.get(mmio::VIRTIO_MMIO_STATUS), 11, "the features were accepted");
        for index in 0..8 {
            self.set(mmio::VIRTIO_MMIO_QUEUE_SEL, index);
            let size = self.get(mmio::VIRTIO_MMIO_QUEUE_NUM_MAX);
            if size == 0 {
                break;
            }
            self.add_ring(u16::try_from(size).unwrap().min(256));
        }
        self.set(mmio::VIRTIO_MMIO_STATUS, 15);
    }

    fn add_ring(&mut self, size: u16) {
        let ring = Ring::new(self.rings.len(), size);
        let zeros = vec![0; usize::try_from(RINGS_STRIDE).unwrap()];
        self.memory.write_slice(&zeros, GuestAddress(ring.base)).unwrap();
        self.set(mmio::VIRTIO_MMIO_QUEUE_NUM, u32::from(size));
        for (low, high, address) in [
            (mmio::VIRTIO_MMIO_QUEUE_DESC_LOW, mmio::VIRTIO_MMIO_QUEUE_DESC_HIGH, ring.base),
            (mmio::VIRTIO_MMIO_QUEUE_AVAIL_LOW, mmio::VIRTIO_MMIO_QUEUE_AVAIL_HIGH, ring.avail_base()),
            (mmio::VIRTIO_MMIO_QUEUE_USED_LOW, mmio::VIRTIO_MMIO_QUEUE_USED_HIGH, ring.used_base()),
        ] {
            self.set(low, u32::try_from(address & 0xffff_ffff).unwrap());
            self.set(high, u32::try_from(address >> 32).unwrap());
        }
        self.set(mmio::VIRTIO_MMIO_QUEUE_READY, 1);
        self.rings.push(ring);
    }

    #[must_use]
    pub fn offered(&self) -> u64 {
        let half = |select| {
            self.set(mmio::VIRTIO_MMIO_DEVICE_FEATURES_SEL, select);
            u64::from(self.get(mmio::VIRTIO_MMIO_DEVICE_FEATURES))
        };
        half(0) | half(1) << 32
    }

    #[must_use]
    pub fn get(&self, register: u32) -> u32 {
        let mut data = [0; 4];
        self.bus.lock().unwrap().read(u64::from(register), &mut data);
        u32::from_le_bytes(data)
    }

    pub fn set(&self, register: u32, value: u32) {
        self.write_bus(u64::from(register), &value.to_le_bytes());
    }

    pub fn read_bus(&self, offset: u64, data: &mut [u8]) {
        self.bus.lock().unwrap().read(offset, data);
    }

    pub fn write_bus(&self, offset: u64, data: &[u8]) {
        self.bus.lock().unwrap().write(offset, data);
    }

    /// The configuration space, `N` bytes from `offset` on.
    #[must_use]
    pub fn config<const N: usize>(&self, offset: u64) -> [u8; N] {
        let mut data = [0; N];
        self.read_bus(0x100 + offset, &mut data);
        data
    }

    /// Makes a request available; its head. Fails the test if the ring is full.
    pub fn submit(&mut self, queue: usize, buffers: &[Buffer]) -> u16 {
        let ring = &mut self.rings[queue];
        assert!(ring.free.len() >= buffers.len(), "the ring is full");
        let slots: Vec<u16> = buffers.iter().map(|_| ring.free.pop().unwrap()).collect();
        let mut written = Vec::new();
        for (at, buffer) in buffers.iter().enumerate() {
            let address = Ring::buffer(queue, slots[at]);
            let (len, mut flags) = match buffer {
                Buffer::Out(bytes) => {
                    self.memory.write_slice(bytes, address).unwrap();
                    written.push((slots[at], 0));
                    (bytes.len(), 0)
                }
                Buffer::In(len) => {
                    written.push((slots[at], *len));
                    (*len, WRITE)
                }
            };
            assert!(len <= BUFFER_BYTES_MAX);
            let next = slots.get(at + 1).copied();
            flags |= if next.is_some() { NEXT } else { 0 };
            let desc = (address.0, u32::try_from(len).unwrap(), flags, next.unwrap_or(0));
            self.write_descriptor(queue, slots[at], desc);
        }
        self.rings[queue].in_flight.insert(slots[0], written);
        self.make_available(queue, slots[0]);
        slots[0]
    }

    /// Writes a descriptor: address, length, flags, next. Nothing is checked.
    pub fn write_descriptor(&self, queue: usize, index: u16, desc: (u64, u32, u16, u16)) {
        let mut bytes = [0; 16];
        bytes[..8].copy_from_slice(&desc.0.to_le_bytes());
        bytes[8..12].copy_from_slice(&desc.1.to_le_bytes());
        bytes[12..14].copy_from_slice(&desc.2.to_le_bytes());
        bytes[14..].copy_from_slice(&desc.3.to_le_bytes());
        self.memory.write_slice(&bytes, self.rings[queue].desc(index)).unwrap();
    }

    /// Puts a head into the available ring, whatever it is.
    pub fn make_available(&mut self, queue: usize, head: u16) {
        let ring = &mut self.rings[queue];
        let at = ring.avail_base() + 4 + u64::from(ring.avail % ring.size) * 2;
        self.memory.write_obj(head.to_le(), GuestAddress(at)).unwrap();
        ring.avail = ring.avail.wrapping_add(1);
        self.set_avail_index(queue, self.rings[queue].avail);
    }

    pub fn set_avail_index(&self, queue: usize, index: u16) {
        let at = GuestAddress(self.rings[queue].avail_base() + 2);
        self.memory.write_obj(index.to_le(), at).unwrap();
    }

    /// Notifies the device and lets the device thread's work happen.
    pub fn kick(&mut self, queue: usize) {
        self.notify(queue);
        self.run();
    }

    /// Notifies a queue that another thread serves.
    pub fn notify(&self, queue: usize) {
        self.set(mmio::VIRTIO_MMIO_QUEUE_NOTIFY, u32::try_from(queue).unwrap());
    }

    /// What the device thread would do: until nothing is left to do.
    pub fn run(&self) {
        // More rounds than any test's work takes: a device that never comes to rest fails here.
        assert!(self.run_rounds(10_000), "the device does not come to rest");
    }

    /// The same for so many rounds at most; whether the device came to rest.
    pub fn run_rounds(&self, rounds: usize) -> bool {
        for _ in 0..rounds {
            let fds = self.endpoint.queue_fds();
            let ready: Vec<usize> = (0..fds.len()).filter(|at| fds[*at].read().is_ok()).collect();
            for index in &ready {
                self.endpoint.queue_event(*index);
            }
            let backend = self.endpoint.backend_fd().is_some_and(readable);
            if backend {
                self.endpoint.backend_event();
            }
            if ready.is_empty() && !backend {
                return true;
            }
        }
        false
    }

    /// The next finished request: its head, the bytes written, and what is in its writable buffers.
    pub fn used(&mut self, queue: usize) -> Option<(u16, u32, Vec<u8>)> {
        let ring = &mut self.rings[queue];
        let base = ring.used_base();
        let index = u16::from_le(self.memory.read_obj(GuestAddress(base + 2)).unwrap());
        if index == ring.used {
            return None;
        }
        let at = base + 4 + u64::from(ring.used % ring.size) * 8;
        let head = u32::from_le(self.memory.read_obj(GuestAddress(at)).unwrap());
        let bytes = u32::from_le(self.memory.read_obj(GuestAddress(at + 4)).unwrap());
        ring.used = ring.used.wrapping_add(1);
        // The guest wants to hear of the next one as well.
        let event = ring.avail_base() + 4 + u64::from(ring.size) * 2;
        self.memory.write_obj(ring.used.to_le(), GuestAddress(event)).unwrap();
        let head = u16::try_from(head).unwrap();
        let mut content = Vec::new();
        for (slot, len) in ring.in_flight.remove(&head).expect("a head that was made available") {
            let mut part = vec![0; len];
            self.memory.read_slice(&mut part, Ring::buffer(queue, slot)).unwrap();
            content.extend_from_slice(&part);
            ring.free.push(slot);
        }
        Some((head, bytes, content))
    }

    /// Submits one request and returns its outcome: bytes written and the writable buffers' content.
    pub fn request(&mut self, queue: usize, buffers: &[Buffer]) -> (u32, Vec<u8>) {
        let head = self.submit(queue, buffers);
        self.kick(queue);
        let (used, bytes, content) = self.used(queue).expect("the request was answered");
        assert_eq!(used, head);
        (bytes, content)
    }

    /// Queues that were set up.
    #[must_use]
    pub fn queues(&self) -> usize {
        self.rings.len()
    }

    /// Free descriptors of a queue.
    #[must_use]
    pub fn room(&self, queue: usize) -> usize {
        self.rings[queue].free.len()
    }

    /// Whether the interrupt fired since the last call.
    #[must_use]
    pub fn interrupted(&self) -> bool {
        self.endpoint.irq_fd().read().is_ok()
    }

    /// The same guest going on with another device over the same memory: a fork, or a restore.
    #[must_use]
    pub fn moved_to(self, endpoint: Endpoint) -> Self {
        let bus = endpoint.bus_device();
        Self { endpoint, bus, ..self }
    }
}

impl Driver {
    /// The same guest a second time, with a copy of its memory: what a fork makes.
    #[must_use]
    pub fn forked(&self, attach: impl FnOnce(GuestMemory) -> Endpoint) -> Self {
        let copy = memory();
        let mut part = vec![0; 1 << 20];
        for at in (0..RAM_BYTES as u64).step_by(part.len()) {
            self.memory.read_slice(&mut part, GuestAddress(at)).unwrap();
            copy.write_slice(&part, GuestAddress(at)).unwrap();
        }
        let endpoint = attach(copy.clone());
        let bus = endpoint.bus_device();
        Self { endpoint, memory: copy, bus, rings: self.rings.clone() }
    }
}

fn readable(fd: std::os::fd::BorrowedFd<'_>) -> bool {
    use rustix::event::{PollFd, PollFlags, Timespec, poll};
    let mut fds = [PollFd::new(&fd, PollFlags::IN)];
    poll(&mut fds, Some(&Timespec { tv_sec: 0, tv_nsec: 0 })).is_ok_and(|ready| ready > 0)
}
