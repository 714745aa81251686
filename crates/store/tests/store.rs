//! The store as the node uses it: whole or not there, damage named, nothing shared, nothing left.

#![allow(clippy::unwrap_used, reason = "a test may panic")]

use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::os::unix::fs::{FileExt, PermissionsExt, symlink};
use std::path::Path;

use dormouse_snapshot::{Compat, FileDigest, FileRole, Manifest, Reason};
use dormouse_store::{
    BeginError, Cancel, LoadError, PublishError, RemoveError, Stage, Store, Swept, VerifyError, is_expired,
};
use dormouse_types::{
    EngineKind, Generation, RuntimeId, SandboxId, Shape, SnapshotId, TemplateId, Timestamp,
};
use proptest::prelude::*;

fn manifest(id: &SnapshotId) -> Manifest {
    Manifest {
        id: id.clone(),
        parent: None,
        sandbox: SandboxId::generate(),
        runtime: RuntimeId::generate(),
        template: TemplateId::generate(),
        engine: EngineKind::Gvisor,
        generation: Generation(1),
        reason: Reason::Pause,
        created_at_ms: 1000,
        expires_at_ms: None,
        shape: Shape::default(),
        rootfs: "base".to_owned(),
        memory: true,
        names: Vec::new(),
        labels: BTreeMap::new(),
        compat: Compat::default(),
        files: Vec::new(),
    }
}

fn open(dir: &Path) -> Store {
    let (store, swept) = Store::open(dir).unwrap();
    assert_eq!(swept, []);
    store
}

const FILES: [(&str, FileRole); 2] = [("pages.img", FileRole::Memory), ("state.img", FileRole::Devices)];

fn publish(store: &Store, manifest: Manifest, pages: &[u8]) -> Manifest {
    let mut draft = store.begin(&manifest.id).unwrap();
    fs::write(draft.path().join("pages.img"), pages).unwrap();
    fs::write(draft.path().join("state.img"), b"state").unwrap();
    draft.publish(manifest, &FILES).unwrap()
}

fn fresh(store: &Store, pages: &[u8]) -> Manifest {
    publish(store, manifest(&SnapshotId::generate()), pages)
}

#[test]
fn published_loaded_listed_verified_removed() {
    let dir = tempfile::tempdir().unwrap();
    let store = open(dir.path());
    let id = SnapshotId::generate();
    let published = publish(&store, manifest(&id), &[7; 100_000]);
    assert_eq!(published.bytes(), 100_005);
    assert_eq!(published.files[0].digest, Some(FileDigest::Whole(*blake3::hash(&[7; 100_000]).as_bytes())));
    assert_eq!(store.load(&id).unwrap(), published);
    assert_eq!(store.list().unwrap(), std::slice::from_ref(&published));
    assert_eq!(store.verify(&id).unwrap(), published);
    assert_eq!(fs::metadata(store.dir(&id)).unwrap().permissions().mode() & 0o777, 0o700);
    let held = store.occupied_bytes(&id);
    assert!(held >= 100_000);
    assert_eq!(store.remove(&id).unwrap().bytes, held);
    assert!(matches!(store.load(&id), Err(LoadError::NotFound { .. })));
    assert!(matches!(store.remove(&id), Err(RemoveError::NotFound { .. })));
    assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 0);
    assert!(store.space().unwrap().available_bytes <= store.space().unwrap().total_bytes);
}

#[test]
fn what_was_reserved_is_given_back() {
    let dir = tempfile::tempdir().unwrap();
    let store = open(dir.path());
    let id = fresh(&store, b"x").id;
    assert!(
        store.occupied_bytes(&id) <= 4 * 4096,
        "{} bytes for three tiny files",
        store.occupied_bytes(&id)
    );
}

/// A large file's digest comes later: the snapshot is there before it, and whole after it.
#[test]
fn large_files_are_hashed_after_the_publication() {
    let dir = tempfile::tempdir().unwrap();
    let store = open(dir.path());
    let id = SnapshotId::generate();
    let pages = vec![6; 3 << 20];
    let published = publish(&store, manifest(&id), &pages);
    assert_eq!(published.files[0].digest, None);
    assert!(published.files[1].digest.is_some(), "a small file's is there at once");
    assert_eq!(store.verify(&id).unwrap(), published);
    let complete = store.complete(&id, &Cancel::default()).unwrap().unwrap();
    assert_eq!(complete.files[0].digest, Some(FileDigest::Whole(*blake3::hash(&pages).as_bytes())));
    assert_eq!(store.load(&id).unwrap(), complete);
    assert_eq!(store.complete(&id, &Cancel::default()).unwrap(), Some(complete));
    let names: Vec<_> =
        fs::read_dir(store.dir(&id)).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    assert_eq!(names.len(), 1 + published.files.len(), "nothing else is left: {names:?}");
}

/// The layers of a microVM: of a large disk with little on it, the little is hashed, and every change of it is noticed.
#[test]
fn layers_are_hashed_by_their_data() {
    let dir = tempfile::tempdir().unwrap();
    let store = open(dir.path());
    let id = SnapshotId::generate();
    let mut draft = store.begin(&id).unwrap();
    let (path, bytes) = (draft.path().join("disk0.0"), 1 << 42);
    let disk = fs::File::create(&path).unwrap();
    disk.set_len(bytes).unwrap();
    disk.write_all_at(&[5; 8192], 1 << 30).unwrap();
    let published = draft
        .publish(Manifest { engine: EngineKind::Microvm, ..manifest(&id) }, &[("disk0.0", FileRole::Disk)])
        .unwrap();
    assert_eq!(published.files[0].bytes, bytes);
    let complete = store.complete(&id, &Cancel::default()).unwrap().unwrap();
    assert!(matches!(complete.files[0].digest, Some(FileDigest::Sparse(_))), "{complete:?}");
    assert_eq!(store.load(&id).unwrap(), complete);
    assert_eq!(store.verify(&id).unwrap(), complete);
    let damaged = |offset: u64, content: &[u8]| {
        let path = store.dir(&id).join("disk0.0");
        let disk = fs::File::options().read(true).write(true).open(path).unwrap();
        let mut before = vec![0; content.len()];
        disk.read_exact_at(&mut before, offset).unwrap();
        disk.write_all_at(content, offset).unwrap();
        assert!(matches!(store.verify(&id), Err(VerifyError::Damaged { .. })), "at {offset:#x}");
        disk.write_all_at(&before, offset).unwrap();
    };
    damaged((1 << 30) + 4097, &[4]);
    store.verify(&id).unwrap();
    // Zeros where there was a hole: they would hide what lies below.
    damaged(1 << 31, &[0; 4096]);
}

#[test]
fn a_removed_snapshot_is_not_brought_back_by_its_digests() {
    let dir = tempfile::tempdir().unwrap();
    let store = open(dir.path());
    let id = SnapshotId::generate();
    publish(&store, manifest(&id), &vec![6; 3 << 20]);
    // A removal that got no further than this looks to everybody like one that did.
    fs::rename(store.dir(&id).join("manifest"), store.dir(&id).join("manifest.gone")).unwrap();
    assert_eq!(store.complete(&id, &Cancel::default()).unwrap(), None);
    assert!(matches!(store.load(&id), Err(LoadError::NotFound { .. })));
    // And while it is hashed.
    let id = SnapshotId::generate();
    publish(&store, manifest(&id), &vec![7; 64 << 20]);
    std::thread::scope(|scope| {
        let completing = scope.spawn(|| store.complete(&id, &Cancel::default()));
        store.remove(&id).unwrap();
        completing.join().unwrap().unwrap();
    });
    assert!(matches!(store.load(&id), Err(LoadError::NotFound { .. })));
}

/// S33, S08: whatever step of the publication fails, there is no snapshot, and another try makes one.
#[test]
fn s33_a_publication_that_fails_at_any_stage_leaves_the_draft() {
    for failing in [Stage::FilesSynced, Stage::ManifestWritten, Stage::Renamed] {
        let dir = tempfile::tempdir().unwrap();
        let store = open(dir.path());
        let id = SnapshotId::generate();
        let mut draft = store.begin(&id).unwrap();
        fs::write(draft.path().join("pages.img"), b"pages").unwrap();
        let full = || io::Error::from(io::ErrorKind::StorageFull);
        let error = draft
            .publish_with(manifest(&id), &FILES[..1], &mut |stage| {
                if stage == failing { Err(full()) } else { Ok(()) }
            })
            .unwrap_err();
        assert!(error.is_no_space(), "{error}");
        assert!(matches!(store.load(&id), Err(LoadError::NotFound { .. })), "{failing:?}");
        assert_eq!(store.list().unwrap(), []);
        // The state itself is untouched: it can be restored from, or published again.
        assert_eq!(fs::read(draft.path().join("pages.img")).unwrap(), b"pages");
        draft.publish(manifest(&id), &FILES[..1]).unwrap();
        drop(draft);
        store.verify(&id).unwrap();
    }
}

/// S08: a crash before the rename leaves nothing, one after it the whole.
#[test]
fn s08_a_crash_at_any_stage_leaves_the_old_or_the_new() {
    for (crash_after, survives) in
        [(Stage::FilesSynced, false), (Stage::ManifestWritten, false), (Stage::Renamed, true)]
    {
        let dir = tempfile::tempdir().unwrap();
        let store = open(dir.path());
        let parent = fresh(&store, b"parent").id;
        let id = SnapshotId::generate();
        let copy = tempfile::tempdir().unwrap();
        let mut draft = store.begin(&id).unwrap();
        fs::write(draft.path().join("pages.img"), b"pages").unwrap();
        draft
            .publish_with(manifest(&id), &FILES[..1], &mut |stage| {
                // What a machine that stops here finds when it comes back.
                if stage == crash_after { copy_tree(dir.path(), copy.path()) } else { Ok(()) }
            })
            .unwrap();
        let (after, swept) = Store::open(copy.path()).unwrap();
        after.verify(&parent).unwrap();
        assert_eq!(after.verify(&id).is_ok(), survives, "{crash_after:?}");
        let unfinished =
            swept.iter().filter(|it| matches!(it, Swept::Unfinished { id: it, .. } if *it == id));
        assert_eq!(unfinished.count(), usize::from(!survives));
        assert_eq!(after.dir(&id).exists(), survives);
    }
}

fn copy_tree(from: &Path, to: &Path) -> io::Result<()> {
    for entry in fs::read_dir(from)? {
        let entry = entry?;
        let target = to.join(entry.file_name());
        if entry.file_type()?.is_dir() {
            fs::create_dir(&target)?;
            copy_tree(&entry.path(), &target)?;
        } else {
            fs::copy(entry.path(), target)?;
        }
    }
    Ok(())
}

#[test]
fn a_dropped_draft_and_a_half_removed_snapshot_are_gone() {
    let dir = tempfile::tempdir().unwrap();
    let store = open(dir.path());
    let id = SnapshotId::generate();
    let draft = store.begin(&id).unwrap();
    assert!(matches!(store.begin(&id), Err(BeginError::Exists { .. })));
    assert!(matches!(store.load(&id), Err(LoadError::NotFound { .. })));
    assert_eq!(store.list().unwrap(), []);
    drop(draft);
    assert!(!store.dir(&id).exists());
    // A crash in the middle of a removal: the manifest has its other name.
    let half = fresh(&store, b"x").id;
    fs::rename(store.dir(&half).join("manifest"), store.dir(&half).join("manifest.gone")).unwrap();
    let (_, swept) = Store::open(dir.path()).unwrap();
    assert!(
        matches!(&swept[..], [Swept::Unfinished { id, bytes }] if *id == half && *bytes > 0),
        "{swept:?}"
    );
    assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 0);
}

#[test]
fn a_damaged_manifest_is_kept_aside_and_told() {
    let dir = tempfile::tempdir().unwrap();
    let store = open(dir.path());
    let (damaged, newer, other, good) =
        (fresh(&store, b"1").id, fresh(&store, b"2").id, fresh(&store, b"3").id, fresh(&store, b"4").id);
    let change = |id: &SnapshotId, at: u64, byte: u8| {
        let path = store.dir(id).join("manifest");
        fs::File::options().write(true).open(path).unwrap().write_all_at(&[byte], at).unwrap();
    };
    change(&damaged, 100, 0xFF);
    change(&newer, 8, 9);
    fs::copy(store.dir(&good).join("manifest"), store.dir(&other).join("manifest")).unwrap();
    assert!(matches!(store.load(&other), Err(LoadError::Damaged { .. })));
    let (store, mut swept) = Store::open(dir.path()).unwrap();
    swept.sort_by_key(|it| format!("{it:?}"));
    let kept: Vec<_> = swept
        .iter()
        .map(|it| match it {
            Swept::Damaged { id, kept_at, .. } => {
                assert!(kept_at.join("pages.img").exists() && kept_at.join("manifest").exists());
                (id.clone(), "kept")
            }
            Swept::Unreadable { id, why } => {
                assert!(why.contains("format version 9"), "{why}");
                (id.clone(), "left")
            }
            Swept::Unfinished { .. } => panic!("{it:?}"),
        })
        .collect();
    let expected = BTreeMap::from([(damaged, "kept"), (other, "kept"), (newer.clone(), "left")]);
    assert_eq!(BTreeMap::from_iter(kept), expected);
    assert!(store.dir(&newer).exists());
    let listed: Vec<_> = store.list().unwrap().into_iter().map(|it| it.id).collect();
    assert_eq!(listed, [good]);
    // Told once: what was put aside is no snapshot any more.
    assert_eq!(Store::open(dir.path()).unwrap().1.len(), 1);
}

/// S10: damage is noticed on read, named, and never served.
#[test]
fn s10_a_damaged_file_is_named() {
    let dir = tempfile::tempdir().unwrap();
    let store = open(dir.path());
    let named = |damage: &dyn Fn(&Path)| {
        let id = fresh(&store, &vec![3; 9 << 20]).id;
        store.complete(&id, &Cancel::default()).unwrap();
        damage(&store.dir(&id).join("pages.img"));
        match store.verify(&id).unwrap_err() {
            VerifyError::Damaged { file, why, .. } => (file, why),
            other => panic!("{other}"),
        }
    };
    for at in [0, 4 << 20, (9 << 20) - 1] {
        let (file, why) = named(&|path| {
            fs::File::options().write(true).open(path).unwrap().write_all_at(&[4], at).unwrap();
        });
        assert!(file == "pages.img" && why.contains("digest"), "{file}: {why}");
    }
    let (_, why) = named(&|path| fs::File::options().write(true).open(path).unwrap().set_len(5).unwrap());
    assert!(why.contains("5 bytes"), "{why}");
    let (_, why) = named(&|path| fs::remove_file(path).unwrap());
    assert!(why.contains("missing"), "{why}");
}

#[test]
fn a_cancelled_verification_is_no_success() {
    let dir = tempfile::tempdir().unwrap();
    let store = open(dir.path());
    let id = fresh(&store, &vec![1; 9 << 20]).id;
    let cancel = Cancel::default();
    cancel.clone().cancel();
    store.complete(&id, &cancel).unwrap_err();
    let manifest = store.complete(&id, &Cancel::default()).unwrap().unwrap();
    assert!(matches!(store.verify_files(&manifest, &cancel), Err(VerifyError::Cancelled { .. })));
}

#[test]
fn only_plain_files_of_the_draft_are_published() {
    let dir = tempfile::tempdir().unwrap();
    let store = open(dir.path());
    let id = SnapshotId::generate();
    let mut draft = store.begin(&id).unwrap();
    symlink("/etc/passwd", draft.path().join("link")).unwrap();
    fs::create_dir(draft.path().join("folder")).unwrap();
    for name in ["link", "folder", "absent", "../x", "", ".", "..", "manifest", "manifest.tmp", "a/b"] {
        let error = draft.publish(manifest(&id), &[(name, FileRole::Memory)]).unwrap_err();
        assert!(matches!(error, PublishError::File { .. }), "{name}: {error}");
    }
    let error = draft.publish(manifest(&SnapshotId::generate()), &[]).unwrap_err();
    assert!(matches!(error, PublishError::OtherId { .. }));
    draft.publish(manifest(&id), &[]).unwrap();
    assert!(matches!(draft.publish(manifest(&id), &[]), Err(PublishError::Twice)));
}

/// S05: no byte of a child is its parent's. S28: an expired one is known as such.
#[test]
fn lineage_and_time_to_live() {
    let dir = tempfile::tempdir().unwrap();
    let store = open(dir.path());
    let parent = fresh(&store, b"parent").id;
    let at = |ms: i64| Timestamp::from_millisecond(ms).unwrap();
    let child = |expires_at_ms| {
        let manifest =
            Manifest { parent: Some(parent.clone()), expires_at_ms, ..manifest(&SnapshotId::generate()) };
        publish(&store, manifest, b"child")
    };
    let (short, long, never) = (child(Some(2000)), child(Some(3000)), child(None));
    let mut expected = [&short, &long, &never].map(|it| it.id.clone());
    expected.sort();
    assert_eq!(store.children(&parent).unwrap(), expected);
    assert_eq!(store.expired(at(1999)).unwrap(), []);
    assert_eq!(store.expired(at(2000)).unwrap(), std::slice::from_ref(&short.id));
    assert!(is_expired(&long, at(3000)) && !is_expired(&never, at(i64::MAX / 2_000_000)));
    store.remove(&parent).unwrap();
    for it in [short, long, never] {
        store.verify(&it.id).unwrap();
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]

    /// S09: snapshots with nearly the same content never exchange a byte, whatever is done beside them.
    #[test]
    fn s09_nearly_equal_snapshots_stay_themselves(
        base in proptest::collection::vec(any::<u8>(), 1..20_000),
        changes in proptest::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..12),
        removals in proptest::collection::vec(any::<prop::sample::Index>(), 0..6),
    ) {
        let dir = tempfile::tempdir().unwrap();
        let store = open(dir.path());
        let mut expected = BTreeMap::new();
        for (at, byte) in changes {
            let mut pages = base.clone();
            let at = at.index(pages.len());
            pages[at] = byte;
            expected.insert(fresh(&store, &pages).id, pages);
        }
        for removal in removals {
            let ids: Vec<_> = expected.keys().cloned().collect();
            if ids.len() > 1 {
                let id = &ids[removal.index(ids.len())];
                store.remove(id).unwrap();
                expected.remove(id);
            }
        }
        let (store, swept) = Store::open(dir.path()).unwrap();
        prop_assert_eq!(swept, []);
        for (id, pages) in &expected {
            let manifest = store.verify(id).unwrap();
            prop_assert_eq!(manifest.files[0].digest, Some(FileDigest::Whole(*blake3::hash(pages).as_bytes())));
            prop_assert_eq!(&fs::read(store.dir(id).join("pages.img")).unwrap(), pages);
        }
        prop_assert_eq!(store.list().unwrap().len(), expected.len());
    }
}
