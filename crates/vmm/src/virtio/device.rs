//! What a device is to the transport.

use std::any::Any;
use std::io;
use std::os::fd::BorrowedFd;
use std::time::{Duration, Instant};

use dormouse_snapshot::devices::virtio::{DeviceKind, DeviceState};

use super::interrupt::Interrupt;
use super::queue::{Chain, QueueError, VirtQueue};
use crate::memory::GuestMemory;

/// A queue's turn: after it, the others of the device thread have theirs.
const TURN_MAX: Duration = Duration::from_millis(2);

/// Why a device gave up until the guest resets it.
#[derive(Debug, thiserror::Error)]
pub enum DeviceError {
    #[error("the guest broke queue {index}: {source}")]
    Queue { index: usize, source: QueueError },
    #[error("the guest sent what the device does not understand: {0}")]
    Request(&'static str),
    #[error("the host's side failed while {doing}: {source}")]
    Host { doing: &'static str, source: io::Error },
}

/// Whether a call did all there was to do.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[must_use]
pub enum Progress {
    Done,
    /// There is more: call again, after others had their turn.
    More,
}

impl Progress {
    pub fn and(self, other: Self) -> Self {
        if other == Self::More { other } else { self }
    }
}

/// What an activated device works on.
pub struct Rings {
    pub memory: GuestMemory,
    pub queues: Vec<VirtQueue>,
    pub interrupt: Interrupt,
    /// What the guest accepted.
    pub features: u64,
}

impl Rings {
    pub fn pop(&mut self, index: usize) -> Result<Option<Chain>, DeviceError> {
        let Some(queue) = self.queues.get_mut(index) else { return Ok(None) };
        queue.pop(&self.memory).map_err(|source| DeviceError::Queue { index, source })
    }

    /// See [`VirtQueue::undo_pop`].
    pub fn undo_pop(&mut self, index: usize) {
        if let Some(queue) = self.queues.get_mut(index) {
            queue.undo_pop();
        }
    }

    pub fn push_used(&mut self, index: usize, chain: &Chain, bytes: u32) -> Result<(), DeviceError> {
        let Some(queue) = self.queues.get_mut(index) else { return Ok(()) };
        queue.push_used(&self.memory, chain, bytes).map_err(|source| DeviceError::Queue { index, source })
    }

    pub fn signal(&mut self, index: usize) -> Result<(), DeviceError> {
        let Some(queue) = self.queues.get_mut(index) else { return Ok(()) };
        queue.signal(&self.memory, &self.interrupt).map_err(|source| DeviceError::Queue { index, source })
    }

    /// Handles waiting requests of a queue for one turn: at most one queue's size of them, and no more once
    /// `TURN_MAX` is over. `handle` returns the bytes written.
    pub fn serve(
        &mut self,
        index: usize,
        mut handle: impl FnMut(&GuestMemory, &Chain) -> Result<u32, DeviceError>,
    ) -> Result<Progress, DeviceError> {
        let budget = self.queues.get(index).map_or(0, VirtQueue::size);
        let started = Instant::now();
        let mut served = 0;
        while served < budget && (served == 0 || started.elapsed() < TURN_MAX) {
            let Some(chain) = self.pop(index)? else {
                if served > 0 {
                    self.signal(index)?;
                }
                return Ok(Progress::Done);
            };
            let bytes = handle(&self.memory, &chain)?;
            self.push_used(index, &chain, bytes)?;
            served += 1;
        }
        self.signal(index)?;
        Ok(Progress::More)
    }
}

/// One device. Called on the device thread, and by the transport on a vCPU thread; never by two at once.
pub trait VirtioDevice: Any + Send {
    fn kind(&self) -> DeviceKind;
    /// The device's own feature bits; those of the rings are the transport's.
    fn features(&self) -> u64;
    /// Largest size of each queue, powers of two.
    fn queue_sizes(&self) -> &'static [u16];
    /// The configuration space.
    fn config(&self) -> Vec<u8>;
    /// The guest wrote to the configuration space; anything may be in it.
    fn write_config(&mut self, _offset: usize, _data: &[u8]) {}
    /// The guest's driver is ready, or a saved device goes on.
    fn activate(&mut self, _rings: &mut Rings) {}
    /// Back to how the device was before its first activation.
    fn reset(&mut self) {}
    /// The guest notified the queue. Of queue 0 also: what a backend event left undone.
    fn queue_event(&mut self, rings: &mut Rings, index: usize) -> Result<Progress, DeviceError>;
    /// Readable when the host's side has something; the same for the whole life of the device.
    fn backend_fd(&self) -> Option<BorrowedFd<'_>> {
        None
    }
    /// `rings`: absent before activation.
    fn backend_event(&mut self, _rings: Option<&mut Rings>) -> Result<Progress, DeviceError> {
        Ok(Progress::Done)
    }
    /// What is in flight comes to rest; called before `save`.
    fn quiesce(&mut self, _rings: Option<&mut Rings>) -> Result<(), DeviceError> {
        Ok(())
    }
    fn save(&self) -> DeviceState;
}
