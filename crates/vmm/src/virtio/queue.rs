//! Queues of a guest that may lie: every chain is checked as a whole before a device sees it.
//!
//! `virtio-queue` bounds its loops but ends a broken chain like a complete one; here a broken one is an error.

use std::sync::atomic::Ordering;

use dormouse_snapshot::devices::virtio::QueueState;
use virtio_bindings::virtio_ring::VRING_AVAIL_F_NO_INTERRUPT;
use virtio_queue::{DescriptorChain, Queue, QueueOwnedT, QueueT};
use vm_memory::{Address, Bytes, GuestAddress, GuestMemory as _, Permissions};

use super::interrupt::Interrupt;
use crate::memory::GuestMemory;

/// A chain with more descriptors is refused. Linux sends at most a queue's size of them.
pub const CHAIN_DESCRIPTORS_MAX: usize = 1024;

/// What a guest did wrong with a queue.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum QueueError {
    #[error("its rings are not in RAM")]
    RingsOutsideMemory,
    #[error("the available ring claims more chains than it has room for")]
    AvailableIndex,
    #[error("a descriptor chain is empty, loops, leaves its table or has over 4 GiB")]
    BrokenChain,
    #[error("a descriptor chain has over {CHAIN_DESCRIPTORS_MAX} descriptors")]
    ChainTooLong,
    #[error("a buffer is not in RAM")]
    BufferOutsideMemory,
    #[error("a descriptor chain has a buffer to read behind one to write")]
    Order,
    #[error("a buffer ends before what it must hold")]
    BufferTooShort,
    #[error("its state does not describe a queue")]
    State,
}

/// One buffer of a chain; checked to lie in RAM.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Segment {
    pub address: GuestAddress,
    pub bytes: u32,
}

/// A request of the guest: buffers the device reads, then buffers it writes.
#[derive(Debug, Default)]
pub struct Chain {
    head: u16,
    pub readable: Vec<Segment>,
    pub writable: Vec<Segment>,
    pub readable_bytes: u32,
    pub writable_bytes: u32,
}

impl Chain {
    fn collect(memory: &GuestMemory, chain: DescriptorChain<&GuestMemory>) -> Result<Self, QueueError> {
        let mut collected = Self { head: chain.head_index(), ..Self::default() };
        let mut complete = false;
        for (count, descriptor) in chain.enumerate() {
            if count == CHAIN_DESCRIPTORS_MAX {
                return Err(QueueError::ChainTooLong);
            }
            complete = !descriptor.has_next();
            collected.add(memory, descriptor.is_write_only(), descriptor.addr(), descriptor.len())?;
        }
        if complete { Ok(collected) } else { Err(QueueError::BrokenChain) }
    }

    fn add(
        &mut self,
        memory: &GuestMemory,
        writable: bool,
        address: GuestAddress,
        bytes: u32,
    ) -> Result<(), QueueError> {
        let (segments, sum) = if writable {
            (&mut self.writable, &mut self.writable_bytes)
        } else if self.writable.is_empty() {
            (&mut self.readable, &mut self.readable_bytes)
        } else {
            return Err(QueueError::Order);
        };
        *sum = sum.checked_add(bytes).ok_or(QueueError::BrokenChain)?;
        if bytes > 0 {
            if !memory.check_range(address, bytes as usize, Permissions::ReadWrite) {
                return Err(QueueError::BufferOutsideMemory);
            }
            segments.push(Segment { address, bytes });
        }
        Ok(())
    }

    /// Fills `buffer` from the readable part, `offset` bytes in.
    pub fn read(&self, memory: &GuestMemory, offset: usize, buffer: &mut [u8]) -> Result<(), QueueError> {
        let mut done = 0;
        for (address, bytes) in Pieces::new(&self.readable, offset, buffer.len()) {
            let piece = &mut buffer[done..done + bytes];
            memory.read_slice(piece, address).map_err(|_| QueueError::BufferOutsideMemory)?;
            done += bytes;
        }
        if done == buffer.len() { Ok(()) } else { Err(QueueError::BufferTooShort) }
    }

    /// Writes all of `data` to the writable part, `offset` bytes in.
    pub fn write(&self, memory: &GuestMemory, offset: usize, data: &[u8]) -> Result<(), QueueError> {
        let mut done = 0;
        for (address, bytes) in Pieces::new(&self.writable, offset, data.len()) {
            let piece = &data[done..done + bytes];
            memory.write_slice(piece, address).map_err(|_| QueueError::BufferOutsideMemory)?;
            done += bytes;
        }
        if done == data.len() { Ok(()) } else { Err(QueueError::BufferTooShort) }
    }
}

/// The parts of segments that `len` bytes from `offset` on are in.
struct Pieces<'a> {
    segments: std::slice::Iter<'a, Segment>,
    skip: usize,
    left: usize,
}

impl<'a> Pieces<'a> {
    fn new(segments: &'a [Segment], offset: usize, len: usize) -> Self {
        Self { segments: segments.iter(), skip: offset, left: len }
    }
}

impl Iterator for Pieces<'_> {
    type Item = (GuestAddress, usize);

    fn next(&mut self) -> Option<Self::Item> {
        while self.left > 0 {
            let segment = self.segments.next()?;
            let bytes = segment.bytes as usize;
            if self.skip >= bytes {
                self.skip -= bytes;
                continue;
            }
            let address = segment.address.checked_add(self.skip as u64)?;
            let taken = (bytes - self.skip).min(self.left);
            self.skip = 0;
            self.left -= taken;
            return Some((address, taken));
        }
        None
    }
}

/// One split virtqueue.
pub struct VirtQueue {
    inner: Queue,
}

impl VirtQueue {
    /// `state` may come from a snapshot or from what the guest wrote to registers.
    pub fn from_state(state: &QueueState) -> Result<Self, QueueError> {
        let inner = Queue::try_from(virtio_queue::QueueState {
            max_size: state.size_max,
            next_avail: state.next_avail,
            next_used: state.next_used,
            event_idx_enabled: state.event_idx,
            size: state.size,
            ready: state.ready,
            desc_table: state.desc_table,
            avail_ring: state.avail_ring,
            used_ring: state.used_ring,
        })
        .map_err(|_| QueueError::State)?;
        Ok(Self { inner })
    }

    #[must_use]
    pub fn state(&self) -> QueueState {
        let state = self.inner.state();
        QueueState {
            size_max: state.max_size,
            size: state.size,
            ready: state.ready,
            desc_table: state.desc_table,
            avail_ring: state.avail_ring,
            used_ring: state.used_ring,
            next_avail: state.next_avail,
            next_used: state.next_used,
            event_idx: state.event_idx_enabled,
        }
    }

    #[must_use]
    pub fn is_ready(&self) -> bool {
        self.inner.ready()
    }

    /// Entries, as the guest chose.
    #[must_use]
    pub fn size(&self) -> u16 {
        self.inner.size()
    }

    pub fn check(&self, memory: &GuestMemory) -> Result<(), QueueError> {
        // An avail ring at 0 is legal by the specification but `virtio-queue` takes it for "not set up".
        if self.inner.is_valid(memory) && self.inner.avail_ring() != 0 {
            Ok(())
        } else {
            Err(QueueError::RingsOutsideMemory)
        }
    }

    /// The next request. `None`: there is none, and the guest will notify when there is.
    pub fn pop(&mut self, memory: &GuestMemory) -> Result<Option<Chain>, QueueError> {
        if !self.is_ready() {
            return Ok(None);
        }
        if let Some(chain) = self.pop_now(memory)? {
            return Ok(Some(chain));
        }
        let came_meanwhile =
            self.inner.enable_notification(memory).map_err(|_| QueueError::RingsOutsideMemory)?;
        if came_meanwhile { self.pop_now(memory) } else { Ok(None) }
    }

    fn pop_now(&mut self, memory: &GuestMemory) -> Result<Option<Chain>, QueueError> {
        let mut available = self.inner.iter(memory).map_err(|error| match error {
            virtio_queue::Error::InvalidAvailRingIndex => QueueError::AvailableIndex,
            _ => QueueError::RingsOutsideMemory,
        })?;
        available.next().map(|chain| Chain::collect(memory, chain)).transpose()
    }

    /// Gives the request that was popped last back: it will be popped again.
    pub fn undo_pop(&mut self) {
        self.inner.go_to_previous_position();
    }

    /// Hands a request back to the guest, `bytes` of it written.
    pub fn push_used(&mut self, memory: &GuestMemory, chain: &Chain, bytes: u32) -> Result<(), QueueError> {
        self.inner.add_used(memory, chain.head, bytes).map_err(|_| QueueError::RingsOutsideMemory)
    }

    /// Interrupts the guest if it wants to know of what was pushed.
    pub fn signal(&mut self, memory: &GuestMemory, interrupt: &Interrupt) -> Result<(), QueueError> {
        let outside = |_| QueueError::RingsOutsideMemory;
        let wanted = if self.inner.event_idx_enabled() {
            self.inner.needs_notification(memory).map_err(|_| QueueError::RingsOutsideMemory)?
        } else {
            // What was pushed must be visible before the guest's wish is read: it may just be turning it on.
            std::sync::atomic::fence(Ordering::SeqCst);
            let flags = GuestAddress(self.inner.avail_ring());
            let flags = memory.load::<u16>(flags, Ordering::Relaxed).map_err(outside)?;
            u32::from(u16::from_le(flags)) & VRING_AVAIL_F_NO_INTERRUPT == 0
        };
        if wanted {
            interrupt.queues_used();
        }
        Ok(())
    }
}
