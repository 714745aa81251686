//! virtio-net on a tap device: whole Ethernet frames, no offloads, one pair of queues.
//!
//! The tap must be opened without `IFF_VNET_HDR` and with `IFF_NO_PI`: what passes through is the bare frame.
//! A frame is lost, as on a wire, when it cannot be delivered at once; none is kept by the device.

#[cfg(test)]
mod tests;

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use dormouse_snapshot::devices::virtio::{DeviceKind, DeviceState, NetState};
use rustix::io::Errno;
use virtio_bindings::virtio_net::VIRTIO_NET_F_MAC;

use super::device::{DeviceError, Progress, Rings, VirtioDevice};
use super::poller::Poller;
use super::queue::{Chain, VirtQueue};
use crate::memory::GuestMemory;

const RECEIVE: usize = 0;
const TRANSMIT: usize = 1;
const QUEUE_SIZES: &[u16] = &[256, 256];
/// `struct virtio_net_hdr_v1` before each frame.
const HEADER_BYTES: usize = 12;
/// The last field of a header says how many buffers a frame took.
const NUM_BUFFERS_OFFSET: usize = 10;
const FRAME_BYTES_MIN: usize = 14;
const FRAME_BYTES_MAX: usize = 65_535 + 18;

/// A virtio-net device.
pub struct Net {
    tap: OwnedFd,
    poller: Poller,
    mac: [u8; 6],
    /// The tap may have a frame: unknown until tried.
    readable: bool,
    bounce: Vec<u8>,
    dropped_frames: u64,
}

impl Net {
    /// Takes any descriptor that reads and writes one frame at a time.
    pub fn new(tap: OwnedFd, mac: [u8; 6]) -> io::Result<Self> {
        use rustix::fs::{OFlags, fcntl_getfl, fcntl_setfl};
        let flags = fcntl_getfl(&tap)?;
        fcntl_setfl(&tap, flags | OFlags::NONBLOCK)?;
        let poller = Poller::new()?;
        poller.add(tap.as_fd(), 0)?;
        let bounce = vec![0; HEADER_BYTES + FRAME_BYTES_MAX];
        Ok(Self { tap, poller, mac, readable: true, bounce, dropped_frames: 0 })
    }

    /// The guest keeps its address; the tap is another one.
    pub fn restore(state: &NetState, tap: OwnedFd) -> io::Result<Self> {
        Self::new(tap, state.mac)
    }

    /// Frames that were lost because one side could not take them.
    #[must_use]
    pub fn dropped_frames(&self) -> u64 {
        self.dropped_frames
    }

    /// Frames of the tap to the guest, as long as it has buffers.
    fn receive(&mut self, rings: &mut Rings) -> Result<Progress, DeviceError> {
        let budget = rings.queues.get(RECEIVE).map_or(0, VirtQueue::size);
        let mut received = 0;
        let mut progress = Progress::More;
        for _ in 0..budget {
            if !self.readable {
                progress = Progress::Done;
                break;
            }
            let Some(chain) = rings.pop(RECEIVE)? else {
                progress = Progress::Done;
                break;
            };
            match self.receive_frame(&rings.memory, &chain)? {
                Some(bytes) => {
                    rings.push_used(RECEIVE, &chain, bytes)?;
                    received += 1;
                }
                None => rings.undo_pop(RECEIVE),
            }
        }
        if received > 0 {
            rings.signal(RECEIVE)?;
        }
        Ok(progress)
    }

    /// How many bytes of the guest's buffers one frame took; `None`: there was none, or it was lost.
    fn receive_frame(&mut self, memory: &GuestMemory, chain: &Chain) -> Result<Option<u32>, DeviceError> {
        let frame = match rustix::io::read(&self.tap, &mut self.bounce[HEADER_BYTES..]) {
            Ok(bytes) if bytes >= FRAME_BYTES_MIN => bytes,
            Err(Errno::INTR) => return Ok(None),
            // The tap's end, or its interface is down: an event will tell when that changes.
            Err(_) | Ok(0) => {
                self.readable = false;
                return Ok(None);
            }
            Ok(_) => 0,
        };
        let bytes = HEADER_BYTES + frame;
        if frame == 0 || bytes > chain.writable_bytes as usize {
            self.dropped_frames += 1;
            return Ok(None);
        }
        self.bounce[..HEADER_BYTES].fill(0);
        self.bounce[NUM_BUFFERS_OFFSET..HEADER_BYTES].copy_from_slice(&1_u16.to_le_bytes());
        let broken = |source| DeviceError::Queue { index: RECEIVE, source };
        chain.write(memory, 0, &self.bounce[..bytes]).map_err(broken)?;
        Ok(Some(u32::try_from(bytes).unwrap_or(0)))
    }

    fn transmit(&mut self, memory: &GuestMemory, chain: &Chain) -> Result<u32, DeviceError> {
        let bytes = chain.readable_bytes as usize;
        let Some(frame) = bytes.checked_sub(HEADER_BYTES) else {
            return Err(DeviceError::Request("a packet has no room for a header"));
        };
        if !(FRAME_BYTES_MIN..=FRAME_BYTES_MAX).contains(&frame) {
            self.dropped_frames += 1;
            return Ok(0);
        }
        let broken = |source| DeviceError::Queue { index: TRANSMIT, source };
        chain.read(memory, HEADER_BYTES, &mut self.bounce[..frame]).map_err(broken)?;
        if rustix::io::write(&self.tap, &self.bounce[..frame]) != Ok(frame) {
            self.dropped_frames += 1;
        }
        Ok(0)
    }
}

impl VirtioDevice for Net {
    fn kind(&self) -> DeviceKind {
        DeviceKind::Net
    }

    fn features(&self) -> u64 {
        1 << VIRTIO_NET_F_MAC
    }

    fn queue_sizes(&self) -> &'static [u16] {
        QUEUE_SIZES
    }

    /// `struct virtio_net_config`: only the address belongs to what is offered.
    fn config(&self) -> Vec<u8> {
        [&self.mac[..], &[0; 6]].concat()
    }

    fn queue_event(&mut self, rings: &mut Rings, index: usize) -> Result<Progress, DeviceError> {
        if index == RECEIVE {
            return self.receive(rings);
        }
        rings.serve(TRANSMIT, |memory, chain| self.transmit(memory, chain))
    }

    fn backend_fd(&self) -> Option<BorrowedFd<'_>> {
        Some(self.poller.fd())
    }

    fn backend_event(&mut self, rings: Option<&mut Rings>) -> Result<Progress, DeviceError> {
        self.readable |= self.poller.take().iter().any(|event| event.readable);
        rings.map_or(Ok(Progress::Done), |rings| self.receive(rings))
    }

    fn save(&self) -> DeviceState {
        DeviceState::Net(NetState { mac: self.mac })
    }
}
