use std::path::PathBuf;

use proptest::prelude::*;
use vm_memory::{Bytes as _, GuestAddress};

use super::*;
use crate::layers::file::create;
use crate::layers::{CHAIN_MAX, PAGE};

const LOW_PAGES: u64 = 40;
const PAGES: u64 = 64;
const HIGH: u64 = 1 << 32;

fn memory() -> GuestMemory {
    let low = usize::try_from(LOW_PAGES * PAGE_BYTES).unwrap();
    let high = usize::try_from((PAGES - LOW_PAGES) * PAGE_BYTES).unwrap();
    GuestMemory::from_ranges(&[(GuestAddress(0), low), (GuestAddress(HIGH), high)]).unwrap()
}

fn address(page: u64) -> GuestAddress {
    let high = page >= LOW_PAGES;
    GuestAddress(if high { HIGH + (page - LOW_PAGES) * PAGE_BYTES } else { page * PAGE_BYTES })
}

fn fill(memory: &GuestMemory, page: u64, byte: u8) {
    memory.write_slice(&[byte; PAGE], address(page)).unwrap();
}

fn check(memory: &GuestMemory, model: &[u8]) {
    for (page, byte) in model.iter().enumerate() {
        let mut got = [0xff; PAGE];
        memory.read_slice(&mut got, address(page as u64)).unwrap();
        assert!(got == [*byte; PAGE], "page {page}");
    }
}

#[derive(Debug, Clone)]
enum Op {
    Fill {
        page: u64,
        byte: u8,
    },
    Read {
        page: u64,
    },
    /// Writes a layer, and restores from the chain.
    Cycle,
}

fn op() -> impl Strategy<Value = Op> {
    prop_oneof![
        8 => (0..PAGES, 0..4_u8).prop_map(|(page, byte)| Op::Fill { page, byte }),
        3 => (0..PAGES).prop_map(|page| Op::Read { page }),
        2 => Just(Op::Cycle),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    /// Memory survives any number of restores, and an incremental layer has what was written and no more.
    #[test]
    fn memory_survives(ops in proptest::collection::vec(op(), 1..80)) {
        let dir = tempfile::tempdir().unwrap();
        let mut model = vec![0; usize::try_from(PAGES).unwrap()];
        let mut written = std::collections::BTreeSet::new();
        let mut guest = memory();
        let mut base = Base::default();
        let mut paths: Vec<PathBuf> = Vec::new();
        let mut files = 0;
        for op in ops {
            match op {
                Op::Fill { page, byte } => {
                    fill(&guest, page, byte);
                    model[usize::try_from(page).unwrap()] = byte;
                    written.insert(page);
                }
                Op::Read { page } => drop(guest.read_obj::<u8>(address(page)).unwrap()),
                Op::Cycle => {
                    files += 1;
                    let path = dir.path().join(format!("m{files}"));
                    let done = write(&guest, &base, None, &path).unwrap();
                    done.layer.sync(size(&guest)).unwrap();
                    if done.on > 0 {
                        prop_assert!(done.layer.extents.bytes() <= written.len() as u64 * PAGE_BYTES);
                    } else {
                        paths.clear();
                    }
                    paths.push(path);
                    written.clear();
                    let all: Vec<&Path> = paths.iter().map(PathBuf::as_path).collect();
                    prop_assert!(all.len() <= CHAIN_MAX);
                    base = Base::open(&all, PAGES * PAGE_BYTES).unwrap();
                    guest = memory();
                    base.map(&guest).unwrap();
                }
            }
        }
        check(&guest, &model);
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    /// Snapshot after snapshot of memory that runs on, booted or restored: each has exactly what changed since the one
    /// before, and restores to what the memory was.
    #[test]
    fn later_snapshots_have_what_changed(
        restored in any::<bool>(),
        rounds in proptest::collection::vec(proptest::collection::vec((0..PAGES, 0..4_u8), 0..12), 1..12),
    ) {
        let dir = tempfile::tempdir().unwrap();
        let mut model = vec![0; usize::try_from(PAGES).unwrap()];
        let mut guest = memory();
        let mut base = Base::default();
        let mut chain: Vec<PathBuf> = Vec::new();
        if restored {
            for page in 10..50 {
                fill(&guest, page, 3);
                model[usize::try_from(page).unwrap()] = 3;
            }
            chain.push(dir.path().join("base"));
            write(&guest, &base, None, &chain[0]).unwrap();
            base = Base::open(&[&chain[0]], PAGES * PAGE_BYTES).unwrap();
            guest = memory();
            base.map(&guest).unwrap();
        }
        for (number, round) in rounds.into_iter().enumerate() {
            let before = model.clone();
            for (page, byte) in round {
                fill(&guest, page, byte);
                model[usize::try_from(page).unwrap()] = byte;
            }
            let all: Vec<&Path> = chain.iter().map(PathBuf::as_path).collect();
            let last = (number > 0).then(|| Base::open(&all, PAGES * PAGE_BYTES).unwrap());
            let path = dir.path().join(format!("m{number}"));
            let done = write(&guest, &base, last.as_ref(), &path).unwrap();
            done.layer.sync(size(&guest)).unwrap();
            chain.truncate(done.on);
            chain.push(path);
            if number > 0 && done.on > 0 {
                let changed = before.iter().zip(&model).filter(|(one, other)| one != other).count();
                prop_assert_eq!(done.layer.extents.bytes(), changed as u64 * PAGE_BYTES);
            }
            let all: Vec<&Path> = chain.iter().map(PathBuf::as_path).collect();
            let copy = memory();
            Base::open(&all, PAGES * PAGE_BYTES).unwrap().map(&copy).unwrap();
            check(&copy, &model);
        }
        check(&guest, &model);
    }
}

#[test]
fn a_page_that_became_zero_is_data() {
    let dir = tempfile::tempdir().unwrap();
    let (first, second) = (dir.path().join("1"), dir.path().join("2"));
    let guest = memory();
    fill(&guest, 3, 7);
    fill(&guest, 50, 8);
    write(&guest, &Base::default(), None, &first).unwrap();
    let base = Base::open(&[&first], PAGES * PAGE_BYTES).unwrap();
    let restored = memory();
    base.map(&restored).unwrap();
    fill(&restored, 3, 0);
    fill(&restored, 4, 0);
    let done = write(&restored, &base, None, &second).unwrap();
    assert_eq!(done.on, 1);
    let ranges: Vec<_> = done.layer.extents.iter().cloned().collect();
    assert!(matches!(&ranges[..], [range] if *range == (3 * PAGE_BYTES..4 * PAGE_BYTES)));
}

#[test]
fn both_ways_of_finding_changed_pages_agree() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("1");
    let guest = memory();
    (0..30).for_each(|page| fill(&guest, page, 1));
    write(&guest, &Base::default(), None, &path).unwrap();
    let base = Base::open(&[&path], PAGES * PAGE_BYTES).unwrap();
    let restored = memory();
    base.map(&restored).unwrap();
    for page in [0, 1, 7, 39, 33] {
        fill(&restored, page, 2);
    }
    let _: u8 = restored.read_obj(address(12)).unwrap();
    let start = restored.iter().next().unwrap().as_ptr() as u64;
    let pagemap = File::open("/proc/self/pagemap").unwrap();
    let entries = scan::by_entries(&pagemap, start, LOW_PAGES * PAGE_BYTES).unwrap();
    let pages: Vec<_> = entries.iter().map(|r| r.start / PAGE_BYTES..r.end / PAGE_BYTES).collect();
    assert_eq!(pages, [0..2, 7..8, 33..34, 39..40]);
    match scan::by_scan(&pagemap, start, LOW_PAGES * PAGE_BYTES) {
        Ok(scanned) => assert_eq!(scanned, entries),
        Err(error) => assert_eq!(error.raw_os_error(), Some(libc::ENOTTY)),
    }
}

#[test]
fn a_chain_of_another_size_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("1");
    create(&path, (PAGES + 1) * PAGE_BYTES).unwrap();
    assert!(matches!(Base::open(&[&path], PAGES * PAGE_BYTES), Err(LayerError::Size { .. })));
    let file = std::fs::OpenOptions::new().write(true).open(&path).unwrap();
    file.write_all_at(&[1; PAGE], PAGES * PAGE_BYTES).unwrap();
    let base = Base::open(&[&path], (PAGES + 1) * PAGE_BYTES).unwrap();
    assert!(matches!(base.map(&memory()), Err(LayerError::Size { .. })));
}
