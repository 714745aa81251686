//! What a stopped guest is, beside its memory and its disks.

use dormouse_snapshot::devices::virtio::{VirtioState, VirtioStateError};
use dormouse_snapshot::devices::x86::{MachineState, X86StateError};
use dormouse_snapshot::devices::{Envelope, EnvelopeError, Inventory, InventoryError, SectionKind};

/// The state of everything that is not memory or disk.
#[derive(Debug, Clone, PartialEq)]
pub struct Saved {
    pub platform: MachineState,
    /// By slot.
    pub virtio: Vec<VirtioState>,
}

#[derive(Debug, thiserror::Error)]
pub enum SavedError {
    #[error("the file of devices is not valid: {0}")]
    Envelope(EnvelopeError),
    #[error("the inventory of the snapshot is not valid: {0}")]
    Inventory(InventoryError),
    #[error("the state of the platform is not valid: {0}")]
    Platform(X86StateError),
    #[error("the state of device {slot} is not valid: {source}")]
    Virtio { slot: usize, source: VirtioStateError },
}

impl Saved {
    pub fn encode(&self, inventory: &Inventory) -> Result<Vec<u8>, SavedError> {
        let mut envelope = Envelope::new();
        let bytes = inventory.encode().map_err(SavedError::Inventory)?;
        envelope.put(SectionKind::Inventory, 0, bytes);
        let bytes = self.platform.encode().map_err(SavedError::Platform)?;
        envelope.put(SectionKind::Platform, 0, bytes);
        for (slot, device) in self.virtio.iter().enumerate() {
            let bytes = device.encode().map_err(|source| SavedError::Virtio { slot, source })?;
            envelope.put(SectionKind::Virtio, u16::try_from(slot).unwrap_or(u16::MAX), bytes);
        }
        envelope.encode().map_err(SavedError::Envelope)
    }

    pub fn decode(bytes: &[u8]) -> Result<(Inventory, Self), SavedError> {
        let envelope = Envelope::decode(bytes).map_err(SavedError::Envelope)?;
        let section = |kind, index| envelope.get(kind, index).map_err(SavedError::Envelope);
        let inventory =
            Inventory::decode(section(SectionKind::Inventory, 0)?).map_err(SavedError::Inventory)?;
        let platform =
            MachineState::decode(section(SectionKind::Platform, 0)?).map_err(SavedError::Platform)?;
        let virtio = (0..envelope.count(SectionKind::Virtio))
            .map(|slot| {
                let bytes = section(SectionKind::Virtio, u16::try_from(slot).unwrap_or(u16::MAX))?;
                VirtioState::decode(bytes).map_err(|source| SavedError::Virtio { slot, source })
            })
            .collect::<Result<_, _>>()?;
        Ok((inventory, Self { platform, virtio }))
    }
}
