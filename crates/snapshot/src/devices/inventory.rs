//! What there is in a snapshot: the machine's parts, and which layers lie in the snapshot's folder.

use minicbor::{Decode, Encode};

pub const DISKS_MAX: usize = 4;
/// Layers of memory, or of one disk, in one snapshot.
pub const LAYERS_MAX: u8 = 64;
const VCPUS_MAX: u8 = 64;
const MEMORY_MIB_MAX: u32 = 1 << 20;
const TEMPLATE_BYTES_MAX: usize = 64;

/// Memory layers are `memory.0` (the lowest), `memory.1`…; a disk's are `disk0.0`, `disk0.1`…
#[derive(Debug, Clone, PartialEq, Eq, Encode, Decode)]
#[cbor(map)]
pub struct Inventory {
    #[n(0)]
    pub vcpus: u8,
    #[n(1)]
    pub memory_mib: u32,
    #[n(2)]
    pub memory_layers: u8,
    #[n(3)]
    pub disks: Vec<DiskRecord>,
    #[n(4)]
    pub net: bool,
    /// The baseline that the guest's CPU features were masked to.
    #[n(5)]
    pub cpu_template: String,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Encode, Decode)]
#[cbor(map)]
pub struct DiskRecord {
    #[n(0)]
    pub bytes: u64,
    /// In the snapshot's folder; those of the image below are not counted.
    #[n(1)]
    pub layers: u8,
    #[n(2)]
    pub read_only: bool,
}

#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum InventoryError {
    #[error("the inventory cannot be read: {0}")]
    Body(String),
    #[error("the inventory has a wrong {field}")]
    Field { field: &'static str },
}

impl Inventory {
    pub fn encode(&self) -> Result<Vec<u8>, InventoryError> {
        minicbor::to_vec(self).map_err(|error| InventoryError::Body(error.to_string()))
    }

    pub fn decode(bytes: &[u8]) -> Result<Self, InventoryError> {
        let state: Self = minicbor::decode(bytes).map_err(|error| InventoryError::Body(error.to_string()))?;
        state.validate()?;
        Ok(state)
    }

    fn validate(&self) -> Result<(), InventoryError> {
        check((1..=VCPUS_MAX).contains(&self.vcpus), "number of vCPUs")?;
        check((1..=MEMORY_MIB_MAX).contains(&self.memory_mib), "memory size")?;
        check((1..=LAYERS_MAX).contains(&self.memory_layers), "number of memory layers")?;
        check(self.disks.len() <= DISKS_MAX, "number of disks")?;
        check(self.disks.iter().all(|disk| disk.layers <= LAYERS_MAX), "number of disk layers")?;
        check(self.disks.iter().all(|disk| !disk.read_only || disk.layers == 0), "read-only disk")?;
        check(self.cpu_template.len() <= TEMPLATE_BYTES_MAX, "CPU baseline")
    }
}

fn check(holds: bool, field: &'static str) -> Result<(), InventoryError> {
    if holds { Ok(()) } else { Err(InventoryError::Field { field }) }
}
