//! virtio-net on a tap device: one pair of queues.
//!
//! A tap opened with `IFF_NO_PI` alone passes bare frames. One opened with `IFF_VNET_HDR` too leaves checksums and
//! segmentation to whoever needs them: frames of up to 64 KiB pass with the guest's header, which the host's kernel
//! checks. A frame is lost, as on a wire, when it cannot be delivered; the one that waits for buffers of the
//! guest is lost in a restore.

mod tap;
#[cfg(test)]
mod tests;

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use dormouse_snapshot::devices::virtio::{DeviceKind, DeviceState, NetState};
use rustix::io::Errno;
use virtio_bindings::virtio_net::{
    VIRTIO_NET_F_CSUM, VIRTIO_NET_F_GUEST_CSUM, VIRTIO_NET_F_GUEST_TSO4, VIRTIO_NET_F_GUEST_TSO6,
    VIRTIO_NET_F_HOST_TSO4, VIRTIO_NET_F_HOST_TSO6, VIRTIO_NET_F_MAC, VIRTIO_NET_F_MRG_RXBUF,
};

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

const CSUM: u64 = 1 << VIRTIO_NET_F_CSUM;
const GUEST_CSUM: u64 = 1 << VIRTIO_NET_F_GUEST_CSUM;
const GUEST_TSO4: u64 = 1 << VIRTIO_NET_F_GUEST_TSO4;
const GUEST_TSO6: u64 = 1 << VIRTIO_NET_F_GUEST_TSO6;
const HOST_TSO: u64 = 1 << VIRTIO_NET_F_HOST_TSO4 | 1 << VIRTIO_NET_F_HOST_TSO6;
const MERGEABLE: u64 = 1 << VIRTIO_NET_F_MRG_RXBUF;
const OFFLOADS: u64 = CSUM | GUEST_CSUM | GUEST_TSO4 | GUEST_TSO6 | HOST_TSO;

/// Tells a tap what the guest takes, as in `TUNSETOFFLOAD`.
type SetOffloads = fn(BorrowedFd<'_>, u32) -> io::Result<()>;

/// A virtio-net device.
pub struct Net {
    tap: OwnedFd,
    /// The tap puts headers before its frames.
    set_offloads: Option<SetOffloads>,
    poller: Poller,
    mac: [u8; 6],
    /// What the guest accepted.
    features: u64,
    told_offloads: bool,
    /// The tap may have a frame: unknown until tried.
    readable: bool,
    /// Header and frame, `held` bytes of them if a frame waits for buffers of the guest.
    bounce: Vec<u8>,
    held: usize,
    /// What the guest sends; not `bounce`, where a frame may wait.
    scratch: Vec<u8>,
    dropped_frames: u64,
}

/// What became of a frame.
enum Delivery {
    Given,
    Lost,
    /// Until the guest gives more buffers.
    Waits,
}

impl Net {
    /// Takes any descriptor that reads and writes one frame at a time.
    pub fn new(tap: OwnedFd, mac: [u8; 6]) -> io::Result<Self> {
        let has_headers = tap::has_headers(&tap)?;
        Self::with(tap, has_headers.then_some(|fd, offloads| tap::set_offloads(fd, offloads)), mac)
    }

    fn with(tap: OwnedFd, set_offloads: Option<SetOffloads>, mac: [u8; 6]) -> io::Result<Self> {
        set_nonblocking(&tap)?;
        let poller = Poller::new()?;
        poller.add(tap.as_fd(), 0)?;
        Ok(Self {
            tap,
            set_offloads,
            poller,
            mac,
            features: 0,
            told_offloads: false,
            readable: true,
            bounce: vec![0; HEADER_BYTES + FRAME_BYTES_MAX],
            held: 0,
            scratch: Vec::new(),
            dropped_frames: 0,
        })
    }

    /// The guest keeps its address; the tap is another one, with headers if the former had them.
    pub fn restore(state: &NetState, tap: OwnedFd) -> io::Result<Self> {
        Self::new(tap, state.mac)
    }

    /// Another tap of the same kind: the former one's network is gone, and what waits of it with it.
    pub fn set_tap(&mut self, tap: OwnedFd) -> io::Result<()> {
        if tap::has_headers(&tap)? != self.set_offloads.is_some() {
            return Err(io::Error::new(io::ErrorKind::InvalidInput, "a tap of another kind"));
        }
        set_nonblocking(&tap)?;
        self.poller.remove(&self.tap);
        self.poller.add(&tap, 0)?;
        self.tap = tap;
        (self.told_offloads, self.readable, self.held) = (false, true, 0);
        Ok(())
    }

    /// Frames that were lost because one side could not take them.
    #[must_use]
    pub fn dropped_frames(&self) -> u64 {
        self.dropped_frames
    }

    /// Tells the tap what the guest takes: on the device thread, because vCPU threads may make fewer system calls.
    fn tell_offloads(&mut self) {
        let Some(set_offloads) = self.set_offloads.filter(|_| !self.told_offloads) else { return };
        self.told_offloads = true;
        let mut offloads = 0;
        for (feature, offload) in [
            (GUEST_CSUM, tap::OFFLOAD_CSUM),
            (GUEST_TSO4, tap::OFFLOAD_TSO4),
            (GUEST_TSO6, tap::OFFLOAD_TSO6),
        ] {
            // Segmentation goes with checksums: the tap refuses it alone.
            let taken = self.features & GUEST_CSUM != 0 && self.features & feature != 0;
            offloads |= if taken { offload } else { 0 };
        }
        if let Err(error) = set_offloads(self.tap.as_fd(), offloads) {
            tracing::warn!(%error, "a tap refused to leave work to its guest; frames may be lost");
        }
    }

    /// Where what the tap knows of a packet begins: at its header or behind that.
    fn frame_at(&self) -> usize {
        if self.set_offloads.is_some() { 0 } else { HEADER_BYTES }
    }

    /// Frames of the tap to the guest, as long as it has buffers.
    fn receive(&mut self, rings: &mut Rings) -> Result<Progress, DeviceError> {
        let budget = rings.queues.get(RECEIVE).map_or(0, VirtQueue::size);
        let mut given = false;
        let mut progress = Progress::More;
        for _ in 0..budget {
            if self.held == 0 && !self.read_frame() {
                if !self.readable {
                    progress = Progress::Done;
                    break;
                }
                continue;
            }
            match self.deliver(rings)? {
                Delivery::Given => given = true,
                Delivery::Lost => self.dropped_frames += 1,
                Delivery::Waits => {
                    progress = Progress::Done;
                    break;
                }
            }
            self.held = 0;
        }
        if given {
            rings.signal(RECEIVE)?;
        }
        Ok(progress)
    }

    /// Takes a frame from the tap; false: there was none that is one.
    fn read_frame(&mut self) -> bool {
        let at = self.frame_at();
        if !self.readable {
            return false;
        }
        match rustix::io::read(&self.tap, &mut self.bounce[at..]) {
            Err(Errno::INTR) => false,
            // The tap's end, or its interface is down: an event will tell when that changes.
            Err(_) | Ok(0) => {
                self.readable = false;
                false
            }
            Ok(bytes) if at + bytes < HEADER_BYTES + FRAME_BYTES_MIN => {
                self.dropped_frames += 1;
                false
            }
            Ok(bytes) => {
                self.bounce[..at].fill(0);
                self.held = at + bytes;
                true
            }
        }
    }

    fn deliver(&mut self, rings: &mut Rings) -> Result<Delivery, DeviceError> {
        let mut chains: Vec<(Chain, u32)> = Vec::new();
        let mut placed = 0;
        let chains_max = if rings.features & MERGEABLE != 0 { rings.queues[RECEIVE].size() } else { 1 };
        while placed < self.held && chains.len() < usize::from(chains_max) {
            let Some(chain) = rings.pop(RECEIVE)? else {
                chains.iter().for_each(|_| rings.undo_pop(RECEIVE));
                return Ok(Delivery::Waits);
            };
            let bytes = (chain.writable_bytes as usize).min(self.held - placed);
            placed += bytes;
            chains.push((chain, u32::try_from(bytes).unwrap_or(0)));
        }
        if placed < self.held {
            chains.iter().for_each(|_| rings.undo_pop(RECEIVE));
            return Ok(Delivery::Lost);
        }
        let count = u16::try_from(chains.len()).unwrap_or(u16::MAX);
        self.bounce[NUM_BUFFERS_OFFSET..HEADER_BYTES].copy_from_slice(&count.to_le_bytes());
        let broken = |source| DeviceError::Queue { index: RECEIVE, source };
        let mut rest = &self.bounce[..self.held];
        for (chain, bytes) in &chains {
            let (part, later) = rest.split_at(*bytes as usize);
            chain.write(&rings.memory, 0, part).map_err(broken)?;
            rest = later;
        }
        rings.queues[RECEIVE].push_used_all(&rings.memory, &chains).map_err(broken)?;
        Ok(Delivery::Given)
    }

    fn transmit(&mut self, memory: &GuestMemory, chain: &Chain) -> Result<u32, DeviceError> {
        let bytes = chain.readable_bytes as usize;
        if bytes < HEADER_BYTES {
            return Err(DeviceError::Request("a packet has no room for a header"));
        }
        if !(HEADER_BYTES + FRAME_BYTES_MIN..=HEADER_BYTES + FRAME_BYTES_MAX).contains(&bytes) {
            self.dropped_frames += 1;
            return Ok(0);
        }
        let from = self.frame_at();
        if self.scratch.len() < bytes {
            self.scratch.resize(bytes, 0);
        }
        let packet = &mut self.scratch[..bytes];
        let broken = |source| DeviceError::Queue { index: TRANSMIT, source };
        chain.read(memory, 0, packet).map_err(broken)?;
        if self.features & CSUM == 0 {
            packet[..HEADER_BYTES].fill(0);
        }
        let packet = &packet[from..];
        if rustix::io::write(&self.tap, packet) != Ok(packet.len()) {
            self.dropped_frames += 1;
        }
        Ok(0)
    }
}

fn set_nonblocking(tap: &OwnedFd) -> io::Result<()> {
    use rustix::fs::{OFlags, fcntl_getfl, fcntl_setfl};
    let flags = fcntl_getfl(tap)?;
    Ok(fcntl_setfl(tap, flags | OFlags::NONBLOCK)?)
}

impl VirtioDevice for Net {
    fn kind(&self) -> DeviceKind {
        DeviceKind::Net
    }

    fn features(&self) -> u64 {
        let offloads = if self.set_offloads.is_some() { OFFLOADS } else { 0 };
        1 << VIRTIO_NET_F_MAC | MERGEABLE | offloads
    }

    fn queue_sizes(&self) -> &'static [u16] {
        QUEUE_SIZES
    }

    /// `struct virtio_net_config`: only the address belongs to what is offered.
    fn config(&self) -> Vec<u8> {
        [&self.mac[..], &[0; 6]].concat()
    }

    fn activate(&mut self, rings: &mut Rings) {
        self.features = rings.features;
        self.told_offloads = false;
    }

    fn reset(&mut self) {
        (self.features, self.held) = (0, 0);
    }

    fn queue_event(&mut self, rings: &mut Rings, index: usize) -> Result<Progress, DeviceError> {
        self.tell_offloads();
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
        let Some(rings) = rings else { return Ok(Progress::Done) };
        self.tell_offloads();
        self.receive(rings)
    }

    fn save(&self) -> DeviceState {
        DeviceState::Net(NetState { mac: self.mac })
    }
}
