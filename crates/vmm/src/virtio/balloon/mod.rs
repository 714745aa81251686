//! virtio-balloon: RAM that the guest does not need goes back to the host, and leaves the snapshots.
//!
//! Two ways: the host asks for so many pages (inflate, deflate), or the guest tells of free ranges by itself (free
//! page reporting). What a page holds afterwards is undefined, by the specification: zeros, or for a restored
//! guest what the snapshot had there. Only RAM is given away: anything else stops the device.

mod discard;
#[cfg(test)]
mod tests;

use std::io;

use dormouse_snapshot::devices::virtio::{BalloonState, DeviceKind, DeviceState};
use vm_memory::{GuestAddress, GuestMemory as _, Permissions};

pub use self::discard::discard_pages;
use super::device::{DeviceError, Progress, Rings, VirtioDevice};
use super::queue::{Chain, QueueError};
use crate::memory::GuestMemory;

const INFLATE: usize = 0;
/// Linux numbers only the queues that are there: without statistics and hints, this is the third.
const REPORTING: usize = 2;
const QUEUE_SIZES: &[u16] = &[128, 128, 32];

/// `virtio-bindings` has none of these (VIRTIO 1.2, 5.5.3).
const F_DEFLATE_ON_OOM: u32 = 2;
const F_REPORTING: u32 = 5;

const PAGE_BYTES: u64 = 4096;
/// Pages in one request; Linux sends 256 at most.
const REQUEST_PAGES_MAX: usize = 1024;
/// Where the guest writes how many pages it gave.
const ACTUAL_OFFSET: usize = 4;

/// Gives a page-aligned range of RAM back to the host.
pub type Discard = Box<dyn FnMut(&GuestMemory, GuestAddress, u64) -> io::Result<()> + Send>;

/// A virtio-balloon device.
pub struct Balloon {
    state: BalloonState,
    discard: Discard,
    discarded_bytes: u64,
}

impl Balloon {
    /// `discard` is [`discard_pages`], or what the owner of the memory knows better.
    #[must_use]
    pub fn new(discard: Discard) -> Self {
        Self::restore(&BalloonState { target_pages: 0, actual_pages: 0 }, discard)
    }

    #[must_use]
    pub fn restore(state: &BalloonState, discard: Discard) -> Self {
        Self { state: *state, discard, discarded_bytes: 0 }
    }

    /// Asks the guest to give so many pages of 4 KiB, or to take back what is over that.
    pub fn set_target_pages(&mut self, pages: u32, rings: Option<&mut Rings>) {
        self.state.target_pages = pages;
        if let Some(rings) = rings {
            rings.interrupt.config_changed();
        }
    }

    /// What the guest says it gave, pages of 4 KiB. It may lie.
    #[must_use]
    pub fn actual_pages(&self) -> u32 {
        self.state.actual_pages
    }

    /// What went back to the host since the device was made, in bytes.
    #[must_use]
    pub fn discarded_bytes(&self) -> u64 {
        self.discarded_bytes
    }

    fn inflate(&mut self, memory: &GuestMemory, chain: &Chain) -> Result<(), DeviceError> {
        let mut pages = page_numbers(memory, chain)?;
        pages.sort_unstable();
        pages.dedup();
        for run in pages.chunk_by(|page, next| page + 1 == *next) {
            self.give(memory, GuestAddress(run[0] * PAGE_BYTES), run.len() as u64 * PAGE_BYTES)?;
        }
        Ok(())
    }

    /// Each buffer is a free range.
    fn report(&mut self, memory: &GuestMemory, chain: &Chain) -> Result<(), DeviceError> {
        for range in &chain.writable {
            let start = range.address.0.next_multiple_of(PAGE_BYTES);
            let end = (range.address.0 + u64::from(range.bytes)) / PAGE_BYTES * PAGE_BYTES;
            if start < end {
                self.give(memory, GuestAddress(start), end - start)?;
            }
        }
        Ok(())
    }

    fn give(&mut self, memory: &GuestMemory, address: GuestAddress, bytes: u64) -> Result<(), DeviceError> {
        let in_ram = usize::try_from(bytes)
            .is_ok_and(|bytes| memory.check_range(address, bytes, Permissions::ReadWrite));
        if !in_ram {
            return Err(DeviceError::Request("a page for the balloon is not in RAM"));
        }
        (self.discard)(memory, address, bytes)
            .map_err(|source| DeviceError::Host { doing: "giving RAM back", source })?;
        self.discarded_bytes = self.discarded_bytes.saturating_add(bytes);
        Ok(())
    }
}

fn page_numbers(memory: &GuestMemory, chain: &Chain) -> Result<Vec<u64>, DeviceError> {
    let bytes = chain.readable_bytes as usize;
    if bytes > REQUEST_PAGES_MAX * 4 {
        return Err(DeviceError::Request("a balloon request has too many pages"));
    }
    let mut numbers = vec![0; bytes / 4 * 4];
    let broken = |source: QueueError| DeviceError::Queue { index: INFLATE, source };
    chain.read(memory, 0, &mut numbers).map_err(broken)?;
    let (numbers, _) = numbers.as_chunks();
    Ok(numbers.iter().map(|number| u64::from(u32::from_le_bytes(*number))).collect())
}

impl VirtioDevice for Balloon {
    fn kind(&self) -> DeviceKind {
        DeviceKind::Balloon
    }

    fn features(&self) -> u64 {
        1 << F_DEFLATE_ON_OOM | 1 << F_REPORTING
    }

    fn queue_sizes(&self) -> &'static [u16] {
        QUEUE_SIZES
    }

    /// `struct virtio_balloon_config`, without hints and poison.
    fn config(&self) -> Vec<u8> {
        [self.state.target_pages.to_le_bytes(), self.state.actual_pages.to_le_bytes(), [0; 4], [0; 4]]
            .concat()
    }

    fn write_config(&mut self, offset: usize, data: &[u8]) {
        if let (ACTUAL_OFFSET, Ok(actual)) = (offset, data.try_into()) {
            self.state.actual_pages = u32::from_le_bytes(actual);
        }
    }

    /// The next driver begins with all of its RAM.
    fn reset(&mut self) {
        self.state.actual_pages = 0;
    }

    fn queue_event(&mut self, rings: &mut Rings, index: usize) -> Result<Progress, DeviceError> {
        rings.serve(index, |memory, chain| {
            match index {
                INFLATE => self.inflate(memory, chain)?,
                REPORTING => self.report(memory, chain)?,
                // Deflated pages come back by being touched.
                _ => {}
            }
            Ok(0)
        })
    }

    fn save(&self) -> DeviceState {
        DeviceState::Balloon(self.state)
    }
}
