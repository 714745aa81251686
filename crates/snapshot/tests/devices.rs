//! The format of the file `devices`: what is written is read back, what was damaged is refused, and what the
//! first release wrote is still read (`golden/`; made anew with `DORMOUSE_BLESS=1`).

#![allow(clippy::unwrap_used, reason = "a test may panic")]

use std::path::Path;

use dormouse_snapshot::devices::{
    DiskRecord, Envelope, EnvelopeError, Inventory, InventoryError, SectionKind,
};
use proptest::prelude::*;

fn inventory() -> Inventory {
    Inventory {
        vcpus: 2,
        memory_mib: 256,
        memory_layers: 1,
        disks: vec![DiskRecord { bytes: 1 << 30, layers: 3, read_only: false }],
        net: false,
        cpu_template: "host".into(),
    }
}

fn sample() -> Envelope {
    let mut envelope = Envelope::new();
    envelope.put(SectionKind::Virtio, 1, b"second".to_vec());
    envelope.put(SectionKind::Virtio, 0, Vec::new());
    envelope.put(SectionKind::Inventory, 0, inventory().encode().unwrap());
    envelope.put(SectionKind::Platform, 0, vec![7; 300]);
    envelope
}

#[test]
fn the_golden_file_of_version_1_is_read() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/devices.v1");
    if std::env::var_os("DORMOUSE_BLESS").is_some() {
        std::fs::write(&path, sample().encode().unwrap()).unwrap();
    }
    let bytes = std::fs::read(path).unwrap();
    let envelope = Envelope::decode(&bytes).unwrap();
    assert_eq!(envelope, sample());
    assert_eq!(sample().encode().unwrap(), bytes);
    let section = envelope.get(SectionKind::Inventory, 0).unwrap();
    assert_eq!(Inventory::decode(section).unwrap(), inventory());
}

#[test]
fn a_section_is_found_or_named() {
    let envelope = sample();
    assert_eq!(envelope.get(SectionKind::Virtio, 1).unwrap(), b"second");
    assert_eq!(envelope.count(SectionKind::Virtio), 2);
    let missing = EnvelopeError::Missing { kind: SectionKind::Platform, index: 1 };
    assert_eq!(envelope.get(SectionKind::Platform, 1), Err(missing));
}

#[test]
fn every_damaged_byte_and_every_cut_is_noticed() {
    let good = sample().encode().unwrap();
    for at in 0..good.len() {
        let mut bad = good.clone();
        bad[at] ^= 0x10;
        assert!(Envelope::decode(&bad).is_err(), "byte {at}");
        assert!(Envelope::decode(&good[..at]).is_err(), "cut at {at}");
    }
    let mut long = good;
    long.push(0);
    assert!(Envelope::decode(&long).is_err());
}

/// Digests keep accidents out, not lies: these files have the right one.
fn forged(count: u16, body: &[u8]) -> Result<Envelope, EnvelopeError> {
    let mut bytes = vec![0; 64];
    bytes[..8].copy_from_slice(b"DMDEVICE");
    bytes[8] = 1;
    bytes[10] = 1;
    bytes[12..16].copy_from_slice(&u32::try_from(body.len()).unwrap().to_le_bytes());
    bytes[16..18].copy_from_slice(&count.to_le_bytes());
    let digest = *blake3::Hasher::new().update(&bytes[..32]).update(body).finalize().as_bytes();
    bytes[32..].copy_from_slice(&digest);
    bytes.extend_from_slice(body);
    Envelope::decode(&bytes)
}

#[test]
fn lies_are_refused() {
    let section = |kind: u8, index: u8, len: u32, bytes: &[u8]| {
        [&[kind, 0, index, 0][..], &len.to_le_bytes(), bytes].concat()
    };
    assert!(forged(1, &section(1, 0, 2, b"ab")).is_ok());
    assert_eq!(forged(1, &section(99, 0, 0, b"")), Err(EnvelopeError::Kind(99)));
    assert_eq!(forged(1, &section(1, 0, u32::MAX, b"ab")), Err(EnvelopeError::Sections));
    assert_eq!(forged(2, &section(1, 0, 2, b"ab")), Err(EnvelopeError::Sections));
    assert_eq!(forged(0, &section(1, 0, 2, b"ab")), Err(EnvelopeError::Sections));
    assert_eq!(forged(1, b"abc"), Err(EnvelopeError::Sections));
    let twice = [section(3, 1, 0, b""), section(3, 1, 0, b"")].concat();
    assert_eq!(forged(2, &twice), Err(EnvelopeError::Sections));
    assert_eq!(forged(u16::MAX, b""), Err(EnvelopeError::Count(usize::from(u16::MAX))));
}

#[test]
fn impossible_machines_are_refused() {
    let refused = |change: &dyn Fn(&mut Inventory)| {
        let mut state = inventory();
        change(&mut state);
        matches!(Inventory::decode(&state.encode().unwrap()), Err(InventoryError::Field { .. }))
    };
    assert!(!refused(&|_| {}));
    assert!(refused(&|state| state.vcpus = 0));
    assert!(refused(&|state| state.memory_mib = u32::MAX));
    assert!(refused(&|state| state.memory_layers = 0));
    assert!(refused(&|state| state.disks = vec![state.disks[0]; 5]));
    assert!(refused(&|state| state.disks[0].layers = 65));
    assert!(refused(&|state| state.disks[0].read_only = true));
    assert!(refused(&|state| state.cpu_template = "x".repeat(65)));
}

proptest! {
    #[test]
    fn any_bytes_are_survived(bytes in proptest::collection::vec(any::<u8>(), 0..300)) {
        let _ = Envelope::decode(&bytes);
        let _ = Inventory::decode(&bytes);
        let _ = forged(u16::from(bytes.first().copied().unwrap_or(0)), &bytes);
    }
}
