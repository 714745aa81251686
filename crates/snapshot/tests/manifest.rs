//! The manifest's format: what is written is read back, what was damaged is refused, and what the first
//! release wrote is still read (`golden/`; made anew with `DORMOUSE_BLESS=1`).

#![allow(clippy::unwrap_used, reason = "a test may panic")]

use std::collections::BTreeMap;
use std::path::Path;

use dormouse_snapshot::{
    Compat, FileDigest, FileEntry, FileRole, HEADER_BYTES, Header, Manifest, ManifestError, Reason,
};
use dormouse_types::{EngineKind, Generation, RuntimeId, SandboxId, Shape, SnapshotId, TemplateId};
use proptest::prelude::*;

fn sample() -> Manifest {
    Manifest {
        id: "snapa1".parse().unwrap(),
        parent: Some("snapa0".parse().unwrap()),
        sandbox: "sbx1".parse().unwrap(),
        runtime: "r1".parse().unwrap(),
        template: "base".parse().unwrap(),
        engine: EngineKind::Gvisor,
        generation: Generation(7),
        reason: Reason::Checkpoint,
        created_at_ms: 1_796_000_000_123,
        expires_at_ms: Some(1_798_592_000_123),
        shape: Shape { cpus: 2, memory_mib: 1024, disk_mib: 10_240, processes_max: 2048 },
        rootfs: "debian-bookworm-0123456789abcdef".to_owned(),
        memory: true,
        names: vec!["before-migration".to_owned()],
        labels: BTreeMap::from([("turn".to_owned(), "12".to_owned())]),
        compat: Compat {
            engine_version: "runsc release-20240729.0".to_owned(),
            platform: "systrap".to_owned(),
            cpu_features: vec!["avx2".to_owned(), "sse4_2".to_owned()],
            agent_version: "0.1.0".to_owned(),
            agent_digest: "ab".repeat(32),
        },
        files: vec![
            FileEntry {
                name: "pages.img".to_owned(),
                role: FileRole::Memory,
                bytes: 1 << 33,
                digest: Some(FileDigest::Whole([0xA5; 32])),
            },
            FileEntry {
                name: "checkpoint.img".to_owned(),
                role: FileRole::Devices,
                bytes: 0,
                digest: Some(FileDigest::Whole([0; 32])),
            },
        ],
    }
}

#[test]
fn the_golden_file_of_version_1_is_read() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/manifest.v1");
    if std::env::var_os("DORMOUSE_BLESS").is_some() {
        std::fs::write(&path, sample().encode().unwrap()).unwrap();
    }
    let bytes = std::fs::read(&path).unwrap();
    assert_eq!(Manifest::decode(&bytes).unwrap(), sample());
    assert_eq!(sample().encode().unwrap(), bytes, "version 1 is written as it always was");
    let header = Header::decode(&bytes[..HEADER_BYTES]).unwrap();
    assert_eq!((header.version, header.engine), (1, EngineKind::Gvisor));
}

#[test]
fn every_changed_byte_is_noticed() {
    let good = sample().encode().unwrap();
    for at in 0..good.len() {
        for flip in 1..=255_u8 {
            let mut bad = good.clone();
            bad[at] ^= flip;
            assert!(Manifest::decode(&bad).is_err(), "byte {at} with {flip:#x}");
        }
    }
}

#[test]
fn every_truncation_and_any_tail_is_noticed() {
    let good = sample().encode().unwrap();
    for length in 0..good.len() {
        assert!(Manifest::decode(&good[..length]).is_err(), "{length} bytes were enough");
    }
    let mut longer = good;
    longer.push(0);
    assert!(matches!(Manifest::decode(&longer), Err(ManifestError::Length { .. })));
}

#[test]
fn what_a_valid_digest_covers_is_still_validated() {
    let encoded = |change: fn(&mut Manifest)| {
        let mut manifest = sample();
        change(&mut manifest);
        Manifest::decode(&manifest.encode().unwrap()).unwrap_err()
    };
    let field = |error: ManifestError| match error {
        ManifestError::Field { field, .. } => field,
        other => panic!("{other}"),
    };
    assert_eq!(field(encoded(|it| it.files[0].name = "../pages.img".to_owned())), "files.name");
    assert_eq!(field(encoded(|it| it.files[0].name = "..".to_owned())), "files.name");
    assert_eq!(field(encoded(|it| it.files[0].name = String::new())), "files.name");
    assert_eq!(field(encoded(|it| it.rootfs = "a/b".to_owned())), "rootfs");
    assert_eq!(field(encoded(|it| it.shape.cpus = 0)), "shape");
    assert_eq!(field(encoded(|it| it.files = vec![it.files[0].clone(); 5000])), "files");
}

#[test]
fn a_later_version_is_refused_by_name() {
    let mut bytes = sample().encode().unwrap();
    bytes[8] = 2;
    let error = Manifest::decode(&bytes).unwrap_err().to_string();
    assert!(error.contains("format version 2 is not known"), "{error}");
}

fn text() -> impl Strategy<Value = String> {
    proptest::collection::vec(any::<char>(), 0..20).prop_map(|chars| chars.into_iter().collect())
}

fn any_manifest() -> impl Strategy<Value = Manifest> {
    let files = proptest::collection::vec(
        ("[a-zA-Z0-9_-][a-zA-Z0-9._-]{0,20}", 0..4_usize, any::<u64>(), any::<[u8; 32]>()),
        0..5,
    );
    let labels = proptest::collection::btree_map(text(), text(), 0..4);
    let words = proptest::collection::vec(text(), 0..4);
    (files, labels, words, any::<(u64, i64, Option<i64>, bool, bool)>(), (1..=64_u32, 64..=65_536_u32))
        .prop_map(
            |(files, labels, words, (generation, created, expires, memory, parent), (cpus, memory_mib))| {
                let roles = [FileRole::Memory, FileRole::Devices, FileRole::Disk, FileRole::Config];
                Manifest {
                    id: SnapshotId::generate(),
                    parent: parent.then(SnapshotId::generate),
                    sandbox: SandboxId::generate(),
                    runtime: RuntimeId::generate(),
                    template: TemplateId::generate(),
                    engine: if memory { EngineKind::Gvisor } else { EngineKind::Microvm },
                    generation: Generation(generation),
                    created_at_ms: created,
                    expires_at_ms: expires,
                    memory,
                    shape: Shape { cpus, memory_mib, ..Shape::default() },
                    compat: Compat { cpu_features: words.clone(), ..Compat::default() },
                    names: words,
                    labels,
                    files: files
                        .into_iter()
                        .map(|(name, role, bytes, digest)| FileEntry {
                            name,
                            role: roles[role],
                            bytes,
                            digest: match bytes % 3 {
                                0 => None,
                                1 => Some(FileDigest::Whole(digest)),
                                _ => Some(FileDigest::Sparse(digest)),
                            },
                        })
                        .collect(),
                    ..sample()
                }
            },
        )
}

proptest! {
    #[test]
    fn what_is_written_is_read_back(manifest in any_manifest()) {
        let bytes = manifest.encode().unwrap();
        prop_assert_eq!(Manifest::decode(&bytes).unwrap(), manifest);
    }

    #[test]
    fn any_bytes_are_read_or_refused(tail in proptest::collection::vec(any::<u8>(), 0..300), keep in 0..64_usize) {
        let mut bytes = sample().encode().unwrap()[..keep].to_vec();
        bytes.extend(tail);
        prop_assert!(Manifest::decode(&bytes).is_err());
    }
}
