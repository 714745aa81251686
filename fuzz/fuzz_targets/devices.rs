#![no_main]
//! The file of devices, with a right digest: what decodes encodes to the same, its sections too.

use dormouse_snapshot::devices::x86::MachineState;
use dormouse_snapshot::devices::{Envelope, Inventory, SectionKind};
use libfuzzer_sys::fuzz_target;

const HEADER_BYTES: usize = 64;

fuzz_target!(|bytes: &[u8]| {
    let mut bytes = bytes.to_vec();
    let _ = Envelope::decode(&bytes);
    if bytes.len() < HEADER_BYTES {
        return;
    }
    bytes[..8].copy_from_slice(b"DMDEVICE");
    let (head, body) = bytes.split_at_mut(HEADER_BYTES);
    head[12..16].copy_from_slice(&u32::try_from(body.len()).unwrap().to_le_bytes());
    let digest = *blake3::Hasher::new().update(&head[..32]).update(body).finalize().as_bytes();
    head[32..].copy_from_slice(&digest);
    let Ok(envelope) = Envelope::decode(&bytes) else { return };
    assert_eq!(envelope.encode().as_deref(), Ok(&bytes[..]));
    if let Ok(inventory) = envelope.get(SectionKind::Inventory, 0).map(Inventory::decode)
        && let Ok(inventory) = inventory
    {
        assert_eq!(Inventory::decode(&inventory.encode().unwrap()), Ok(inventory));
    }
    if let Ok(Ok(platform)) = envelope.get(SectionKind::Platform, 0).map(MachineState::decode) {
        assert_eq!(MachineState::decode(&platform.encode().unwrap()), Ok(platform));
    }
});
