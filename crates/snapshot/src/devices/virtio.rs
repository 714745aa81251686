//! What a virtio device keeps beside guest memory: the transport's registers, its queues, the device's own.
//!
//! All fields are plain data until `VirtioState::decode` has checked them; `vmm` checks them once more against
//! the device and the memory that they are restored to.

use minicbor::{Decode, Encode};

/// Queues of one device; the real ones have up to 3.
pub const QUEUES_MAX: usize = 8;
/// Entries of one queue.
pub const QUEUE_SIZE_MAX: u16 = 1024;
/// What the host may hold of one vsock stream for its own side, in bytes.
pub const VSOCK_UNSENT_BYTES_MAX: usize = 256 << 10;
/// Streams that a restored device must reset.
pub const VSOCK_RESETS_MAX: usize = 1024;
/// The encoded form of one device is smaller than this, in bytes.
pub const VIRTIO_BYTES_MAX: usize = VSOCK_UNSENT_BYTES_MAX + (64 << 10);

const STATUS_KNOWN: u8 = 0x8f;

/// The kinds of devices there are; numbers as in the specification, chapter 5.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum DeviceKind {
    Net,
    Block,
    Rng,
    Balloon,
    Vsock,
}

impl DeviceKind {
    #[must_use]
    pub fn number(self) -> u32 {
        match self {
            Self::Net => 1,
            Self::Block => 2,
            Self::Rng => 4,
            Self::Balloon => 5,
            Self::Vsock => 19,
        }
    }

    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Net => "net",
            Self::Block => "block",
            Self::Rng => "rng",
            Self::Balloon => "balloon",
            Self::Vsock => "vsock",
        }
    }
}

/// One device with its transport.
#[derive(Debug, Clone, PartialEq, Eq, Encode, Decode)]
#[cbor(map)]
pub struct VirtioState {
    #[n(0)]
    pub device_features_select: u32,
    #[n(1)]
    pub driver_features_select: u32,
    #[n(2)]
    pub queue_select: u32,
    /// What the guest accepted, or has written so far.
    #[n(3)]
    pub driver_features: u64,
    /// Without NEEDS_RESET, which is `needs_reset`.
    #[n(4)]
    pub status: u8,
    #[n(5)]
    pub needs_reset: bool,
    #[n(6)]
    pub interrupt_status: u32,
    #[n(7)]
    pub config_generation: u32,
    #[n(8)]
    pub queues: Vec<QueueState>,
    #[n(9)]
    pub device: DeviceState,
}

/// One split virtqueue.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Encode, Decode)]
#[cbor(map)]
pub struct QueueState {
    #[n(0)]
    pub size_max: u16,
    #[n(1)]
    pub size: u16,
    #[n(2)]
    pub ready: bool,
    #[n(3)]
    pub desc_table: u64,
    #[n(4)]
    pub avail_ring: u64,
    #[n(5)]
    pub used_ring: u64,
    #[n(6)]
    pub next_avail: u16,
    #[n(7)]
    pub next_used: u16,
    #[n(8)]
    pub event_idx: bool,
}

#[derive(Debug, Clone, PartialEq, Eq, Encode, Decode)]
pub enum DeviceState {
    #[n(0)]
    Net(#[n(0)] NetState),
    #[n(1)]
    Block(#[n(0)] BlockState),
    #[n(2)]
    Rng,
    #[n(3)]
    Balloon(#[n(0)] BalloonState),
    #[n(4)]
    Vsock(#[n(0)] VsockState),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Encode, Decode)]
#[cbor(map)]
pub struct NetState {
    #[cbor(n(0), with = "minicbor::bytes")]
    pub mac: [u8; 6],
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Encode, Decode)]
#[cbor(map)]
pub struct BlockState {
    /// The disk that is given to the restored device must have this size.
    #[n(0)]
    pub disk_bytes: u64,
    #[n(1)]
    pub read_only: bool,
    #[n(2)]
    pub discards: bool,
    #[cbor(n(3), with = "minicbor::bytes")]
    pub serial: [u8; 20],
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Encode, Decode)]
#[cbor(map)]
pub struct BalloonState {
    /// What the host asked for, pages of 4 KiB.
    #[n(0)]
    pub target_pages: u32,
    /// What the guest says it gave, pages of 4 KiB.
    #[n(1)]
    pub actual_pages: u32,
}

#[derive(Debug, Clone, PartialEq, Eq, Encode, Decode)]
#[cbor(map)]
pub struct VsockState {
    /// The stream of the carrier: it goes on after a restore.
    #[n(0)]
    pub carrier: Option<StreamState>,
    /// Streams that the guest believes in and that a restored device answers with a reset.
    #[n(1)]
    pub resets: Vec<PortPair>,
    /// Host ports are given out from here on.
    #[n(2)]
    pub next_host_port: u32,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Encode, Decode)]
#[cbor(map)]
pub struct PortPair {
    #[n(0)]
    pub guest: u32,
    #[n(1)]
    pub host: u32,
}

/// One established stream. The counters wrap around at 2^32.
#[derive(Debug, Clone, PartialEq, Eq, Encode, Decode)]
#[cbor(map)]
pub struct StreamState {
    #[n(0)]
    pub ports: PortPair,
    /// Bytes of the guest that reached the host's side.
    #[n(1)]
    pub fwd_cnt: u32,
    /// The `fwd_cnt` that the guest was told last.
    #[n(2)]
    pub told_fwd_cnt: u32,
    /// Bytes sent to the guest.
    #[n(3)]
    pub tx_cnt: u32,
    #[n(4)]
    pub peer_buf_alloc: u32,
    #[n(5)]
    pub peer_fwd_cnt: u32,
    /// The request was not answered yet.
    #[n(6)]
    pub response_owed: bool,
    /// The guest asked for the credit, or must be told of more.
    #[n(7)]
    pub credit_update_owed: bool,
    /// The guest will send no more.
    #[n(8)]
    pub guest_sent_all: bool,
    /// The guest will read no more.
    #[n(9)]
    pub guest_reads_no_more: bool,
    /// What the guest sent and the host's side has not taken yet.
    #[cbor(n(10), with = "minicbor::bytes")]
    pub unsent: Vec<u8>,
}

#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum VirtioStateError {
    #[error("the state of a virtio device has {bytes} bytes, over {VIRTIO_BYTES_MAX}")]
    TooLong { bytes: usize },
    #[error("the state of a virtio device cannot be read: {0}")]
    Body(String),
    #[error("the state of a virtio device has a wrong {field}")]
    Field { field: &'static str },
}

impl DeviceState {
    #[must_use]
    pub fn kind(&self) -> DeviceKind {
        match self {
            Self::Net(_) => DeviceKind::Net,
            Self::Block(_) => DeviceKind::Block,
            Self::Rng => DeviceKind::Rng,
            Self::Balloon(_) => DeviceKind::Balloon,
            Self::Vsock(_) => DeviceKind::Vsock,
        }
    }
}

impl VirtioState {
    pub fn encode(&self) -> Result<Vec<u8>, VirtioStateError> {
        minicbor::to_vec(self).map_err(|error| VirtioStateError::Body(error.to_string()))
    }

    /// Reads and validates; what does not describe a device is an error.
    pub fn decode(bytes: &[u8]) -> Result<Self, VirtioStateError> {
        if bytes.len() > VIRTIO_BYTES_MAX {
            return Err(VirtioStateError::TooLong { bytes: bytes.len() });
        }
        let state: Self =
            minicbor::decode(bytes).map_err(|error| VirtioStateError::Body(error.to_string()))?;
        state.validate()?;
        Ok(state)
    }

    pub fn validate(&self) -> Result<(), VirtioStateError> {
        check(self.status & !STATUS_KNOWN == 0, "status")?;
        check(self.interrupt_status & !3 == 0, "interrupt status")?;
        check((1..=QUEUES_MAX).contains(&self.queues.len()), "number of queues")?;
        self.queues.iter().try_for_each(QueueState::validate)?;
        match &self.device {
            DeviceState::Block(block) => check(block.disk_bytes.is_multiple_of(512), "disk size"),
            DeviceState::Vsock(vsock) => vsock.validate(),
            DeviceState::Net(_) | DeviceState::Rng | DeviceState::Balloon(_) => Ok(()),
        }
    }
}

impl QueueState {
    /// A queue before the guest has set it up.
    #[must_use]
    pub fn fresh(size_max: u16) -> Self {
        Self {
            size_max,
            size: size_max,
            ready: false,
            desc_table: 0,
            avail_ring: 0,
            used_ring: 0,
            next_avail: 0,
            next_used: 0,
            event_idx: false,
        }
    }

    fn validate(&self) -> Result<(), VirtioStateError> {
        check(self.size_max.is_power_of_two() && self.size_max <= QUEUE_SIZE_MAX, "queue size limit")?;
        check(self.size.is_power_of_two() && self.size <= self.size_max, "queue size")?;
        let aligned = self.desc_table.is_multiple_of(16)
            && self.avail_ring.is_multiple_of(2)
            && self.used_ring.is_multiple_of(4);
        check(aligned, "queue address")
    }
}

impl VsockState {
    fn validate(&self) -> Result<(), VirtioStateError> {
        check(self.resets.len() <= VSOCK_RESETS_MAX, "number of streams")?;
        let Some(carrier) = &self.carrier else { return Ok(()) };
        check(carrier.unsent.len() <= VSOCK_UNSENT_BYTES_MAX, "number of bytes in flight")
    }
}

fn check(holds: bool, field: &'static str) -> Result<(), VirtioStateError> {
    if holds { Ok(()) } else { Err(VirtioStateError::Field { field }) }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn state(device: DeviceState) -> VirtioState {
        VirtioState {
            device_features_select: 1,
            driver_features_select: 1,
            queue_select: 2,
            driver_features: 1 << 32,
            status: 0xf,
            needs_reset: false,
            interrupt_status: 1,
            config_generation: 7,
            queues: vec![QueueState { ready: true, desc_table: 0x1000, ..QueueState::fresh(256) }],
            device,
        }
    }

    fn carrier(unsent: Vec<u8>) -> StreamState {
        StreamState {
            ports: PortPair { guest: 9, host: 1024 },
            fwd_cnt: u32::MAX,
            told_fwd_cnt: 1,
            tx_cnt: 2,
            peer_buf_alloc: 3,
            peer_fwd_cnt: 4,
            response_owed: true,
            credit_update_owed: false,
            guest_sent_all: false,
            guest_reads_no_more: true,
            unsent,
        }
    }

    fn all() -> Vec<VirtioState> {
        let vsock = |carrier| VsockState {
            carrier,
            resets: vec![PortPair { guest: 80, host: 1 << 30 }],
            next_host_port: 1 << 30,
        };
        [
            DeviceState::Net(NetState { mac: [2, 0, 0, 0, 0, 1] }),
            DeviceState::Block(BlockState {
                disk_bytes: 512,
                read_only: true,
                discards: false,
                serial: [7; 20],
            }),
            DeviceState::Rng,
            DeviceState::Balloon(BalloonState { target_pages: 5, actual_pages: 6 }),
            DeviceState::Vsock(vsock(None)),
            DeviceState::Vsock(vsock(Some(carrier(vec![1; VSOCK_UNSENT_BYTES_MAX])))),
        ]
        .map(state)
        .into()
    }

    #[test]
    fn what_is_encoded_is_decoded() {
        for state in all() {
            let bytes = state.encode().unwrap();
            assert!(bytes.len() <= VIRTIO_BYTES_MAX);
            assert_eq!(VirtioState::decode(&bytes), Ok(state));
        }
    }

    #[test]
    fn what_does_not_describe_a_device_is_refused() {
        let refused = |change: &dyn Fn(&mut VirtioState)| {
            let mut state = state(DeviceState::Rng);
            change(&mut state);
            matches!(VirtioState::decode(&state.encode().unwrap()), Err(VirtioStateError::Field { .. }))
        };
        assert!(!refused(&|_| {}));
        assert!(refused(&|state| state.status = 0x40));
        assert!(refused(&|state| state.interrupt_status = 4));
        assert!(refused(&|state| state.queues.clear()));
        assert!(refused(&|state| state.queues = vec![QueueState::fresh(8); QUEUES_MAX + 1]));
        assert!(refused(&|state| state.queues[0].size_max = 2048));
        assert!(refused(&|state| state.queues[0].size = 0));
        assert!(refused(&|state| state.queues[0].size = 512));
        assert!(refused(&|state| state.queues[0].used_ring = 2));
        assert!(refused(&|state| {
            let serial = [0; 20];
            state.device =
                DeviceState::Block(BlockState { disk_bytes: 1, read_only: false, discards: false, serial });
        }));
        assert!(refused(&|state| {
            let carrier = Some(carrier(vec![0; VSOCK_UNSENT_BYTES_MAX + 1]));
            state.device = DeviceState::Vsock(VsockState { carrier, resets: Vec::new(), next_host_port: 0 });
        }));
        assert!(refused(&|state| {
            let resets = vec![PortPair { guest: 1, host: 1 }; VSOCK_RESETS_MAX + 1];
            state.device = DeviceState::Vsock(VsockState { carrier: None, resets, next_host_port: 0 });
        }));
        let long = vec![0; VIRTIO_BYTES_MAX + 1];
        assert!(matches!(VirtioState::decode(&long), Err(VirtioStateError::TooLong { .. })));
    }

    proptest! {
        #[test]
        fn damage_is_an_error_or_another_valid_state(
            which in 0..5_usize, changes in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..5),
            cut in prop::option::of(any::<prop::sample::Index>()),
        ) {
            let mut bytes = all()[which].encode().unwrap();
            for (at, byte) in changes {
                let at = at.index(bytes.len());
                bytes[at] = byte;
            }
            if let Some(cut) = cut {
                bytes.truncate(cut.index(bytes.len()));
            }
            if let Ok(state) = VirtioState::decode(&bytes) {
                prop_assert_eq!(VirtioState::decode(&state.encode().unwrap()), Ok(state));
            }
        }
    }
}
