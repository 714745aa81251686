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
    /// Up to where the guest was, or did not want to be, interrupted. Not saved: nothing is pushed without `signal`.
    signalled: u16,
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
        Ok(Self { signalled: inner.next_used(), inner })
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
        self.write_used(memory, 0, chain, bytes)?;
        self.publish_used(memory, 1)
    }

    /// Hands several back at once: the guest sees all of them or none.
    pub fn push_used_all(&mut self, memory: &GuestMemory, used: &[(Chain, u32)]) -> Result<(), QueueError> {
        let mut count = 0;
        for (chain, bytes) in used {
            self.write_used(memory, count, chain, *bytes)?;
            count += 1;
        }
        self.publish_used(memory, count)
    }

    /// `virtio-queue` can only publish one at a time, so the used ring is written here (VIRTIO 1.2, 2.7.8).
    fn write_used(
        &self,
        memory: &GuestMemory,
        ahead: u16,
        chain: &Chain,
        bytes: u32,
    ) -> Result<(), QueueError> {
        let index = self.inner.next_used().wrapping_add(ahead) % self.inner.size();
        let mut element = [0; 8];
        element[..4].copy_from_slice(&u32::from(chain.head).to_le_bytes());
        element[4..].copy_from_slice(&bytes.to_le_bytes());
        let address = self.used_address(4 + u64::from(index) * 8)?;
        memory.write_slice(&element, address).map_err(|_| QueueError::RingsOutsideMemory)
    }

    fn publish_used(&mut self, memory: &GuestMemory, count: u16) -> Result<(), QueueError> {
        let next = self.inner.next_used().wrapping_add(count);
        self.inner.set_next_used(next);
        let address = self.used_address(2)?;
        memory.store(next.to_le(), address, Ordering::Release).map_err(|_| QueueError::RingsOutsideMemory)
    }

    fn used_address(&self, offset: u64) -> Result<GuestAddress, QueueError> {
        let base = GuestAddress(self.inner.used_ring());
        base.checked_add(offset).ok_or(QueueError::RingsOutsideMemory)
    }

    /// Interrupts the guest if it wants to know of what was pushed since the last call.
    pub fn signal(&mut self, memory: &GuestMemory, interrupt: &Interrupt) -> Result<(), QueueError> {
        let (old, new) = (self.signalled, self.inner.next_used());
        self.signalled = new;
        // What was pushed must be visible before the guest's wish is read: it may just be turning it on.
        std::sync::atomic::fence(Ordering::SeqCst);
        let wanted = if self.inner.event_idx_enabled() {
            // Whether the entry that the guest waits for is among the new ones.
            let event = self.load_avail(memory, 4 + u64::from(self.inner.size()) * 2)?;
            new.wrapping_sub(event).wrapping_sub(1) < new.wrapping_sub(old)
        } else {
            u32::from(self.load_avail(memory, 0)?) & VRING_AVAIL_F_NO_INTERRUPT == 0
        };
        if wanted {
            interrupt.queues_used();
        }
        Ok(())
    }

    fn load_avail(&self, memory: &GuestMemory, offset: u64) -> Result<u16, QueueError> {
        let address = GuestAddress(self.inner.avail_ring()).checked_add(offset);
        let address = address.ok_or(QueueError::RingsOutsideMemory)?;
        let value = memory.load::<u16>(address, Ordering::Relaxed);
        value.map(u16::from_le).map_err(|_| QueueError::RingsOutsideMemory)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const RAM_BYTES: usize = 1 << 20;

    proptest! {
        #[test]
        fn segments_are_one_buffer(
            sizes in prop::collection::vec(0..300_u32, 1..20), offset in 0..4000_usize, len in 0..4000_usize,
        ) {
            let memory = GuestMemory::from_ranges(&[(GuestAddress(0), RAM_BYTES)]).unwrap();
            let mut chain = Chain::default();
            for (at, bytes) in (0..).zip(&sizes) {
                // Backwards and with gaps: nothing but the segments makes them one buffer.
                let address = GuestAddress((20 - at) * 1000);
                chain.add(&memory, false, address, *bytes).unwrap();
            }
            for (at, bytes) in (0..).zip(&sizes) {
                chain.add(&memory, true, GuestAddress((20 - at) * 1000), *bytes).unwrap();
            }
            let total: usize = sizes.iter().map(|bytes| *bytes as usize).sum();
            prop_assert_eq!((chain.readable_bytes as usize, chain.writable_bytes as usize), (total, total));
            let data: Vec<u8> = (0..len).map(|at| u8::try_from(at % 251 + 1).unwrap()).collect();
            let fits = len == 0 || offset + len <= total;
            prop_assert_eq!(chain.write(&memory, offset, &data).is_ok(), fits);
            let mut read = vec![0; len];
            prop_assert_eq!(chain.read(&memory, offset, &mut read).is_ok(), fits);
            if fits {
                prop_assert_eq!(read, data);
                let mut all = vec![0; total];
                chain.read(&memory, 0, &mut all).unwrap();
                let written = all.iter().filter(|byte| **byte != 0).count();
                prop_assert_eq!(written, len, "nothing outside the range was touched");
            }
        }

        #[test]
        fn only_buffers_in_ram_are_taken(address in any::<u64>(), near in 0..4096_u64, bytes in any::<u32>()) {
            let memory = GuestMemory::from_ranges(&[
                (GuestAddress(0), RAM_BYTES),
                (GuestAddress(4 << 30), RAM_BYTES),
            ]).unwrap();
            let edge = (RAM_BYTES as u64).wrapping_sub(near);
            for (address, bytes) in [(address, bytes), (edge, bytes % 8192), ((4 << 30) + edge, bytes % 8192)] {
                let within = |start: u64| {
                    address >= start && u128::from(address) + u128::from(bytes) <= u128::from(start) + RAM_BYTES as u128
                };
                let taken = Chain::default().add(&memory, false, GuestAddress(address), bytes).is_ok();
                prop_assert_eq!(taken, bytes == 0 || within(0) || within(4 << 30));
            }
        }
    }
}
