use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use proptest::prelude::*;

use super::*;

/// A size whose last page is not whole.
const DISK_BYTES: u64 = 37 * PAGE_BYTES + 1536;

#[derive(Debug, Clone)]
enum Op {
    Write {
        offset: u64,
        len: usize,
        byte: u8,
    },
    Zero {
        offset: u64,
        len: u64,
    },
    Freeze,
    /// Publishes, and opens the disk from what was published.
    Reopen,
    Flatten,
}

fn range() -> impl Strategy<Value = (u64, u64)> {
    (0..DISK_BYTES, 1..6 * PAGE_BYTES, any::<bool>()).prop_map(|(offset, len, whole)| {
        let offset = if whole { offset / PAGE_BYTES * PAGE_BYTES } else { offset };
        let len = if whole { len.next_multiple_of(PAGE_BYTES) } else { len };
        (offset, len.min(DISK_BYTES - offset))
    })
}

fn op() -> impl Strategy<Value = Op> {
    prop_oneof![
        6 => (range(), 1..=255_u8).prop_map(|((offset, len), byte)| {
            Op::Write { offset, len: usize::try_from(len).unwrap(), byte }
        }),
        3 => range().prop_map(|(offset, len)| Op::Zero { offset, len }),
        2 => Just(Op::Freeze),
        1 => Just(Op::Reopen),
        1 => Just(Op::Flatten),
    ]
}

struct Rig {
    dir: tempfile::TempDir,
    files: usize,
}

impl Rig {
    fn new() -> Self {
        Self { dir: tempfile::tempdir().unwrap(), files: 0 }
    }

    fn path(&mut self) -> PathBuf {
        self.files += 1;
        self.dir.path().join(format!("f{}", self.files))
    }

    /// An image with data in every third page.
    fn image(&mut self) -> (PathBuf, Vec<u8>) {
        let path = self.path();
        let mut model = vec![0; usize::try_from(DISK_BYTES).unwrap()];
        let file = super::file::create(&path, DISK_BYTES).unwrap();
        for page in (0..37).step_by(3) {
            let at = page * 4096;
            model[at..at + 4096].fill(0xee);
            file.write_all_at(&model[at..at + 4096], at as u64).unwrap();
        }
        (path, model)
    }
}

fn content(disk: &DiskStack) -> Vec<u8> {
    let mut all = vec![0; usize::try_from(disk.bytes()).unwrap()];
    disk.read_at(&mut all, 0).unwrap();
    all
}

fn publish(rig: &mut Rig, disk: &mut DiskStack) -> (PathBuf, Vec<PathBuf>) {
    let upper = rig.path();
    disk.freeze(&upper).unwrap();
    let dir = rig.path();
    std::fs::create_dir(&dir).unwrap();
    let published = disk.frozen().publish(&dir, "disk0.").unwrap();
    let paths = published.iter().map(|layer| dir.join(&layer.name)).collect();
    (dir, paths)
}

fn apply(rig: &mut Rig, image: &Path, disk: &mut DiskStack, model: &mut [u8], op: &Op) {
    let span =
        |offset: u64, len: u64| usize::try_from(offset).unwrap()..usize::try_from(offset + len).unwrap();
    match *op {
        Op::Write { offset, len, byte } => {
            disk.write_at(&vec![byte; len], offset).unwrap();
            model[span(offset, len as u64)].fill(byte);
        }
        Op::Zero { offset, len } => {
            disk.zero_at(offset, len).unwrap();
            model[span(offset, len)].fill(0);
        }
        Op::Freeze => disk.freeze(&rig.path()).unwrap(),
        Op::Reopen => {
            let (_, paths) = publish(rig, disk);
            assert!(paths.len() <= CHAIN_MAX);
            let frozen: Vec<&Path> = paths.iter().map(PathBuf::as_path).collect();
            *disk = DiskStack::open(&[image], &frozen, Some(&rig.path())).unwrap();
        }
        Op::Flatten => {
            let frozen = disk.frozen();
            let layer = super::file::flatten(&frozen.layers, frozen.bytes, &rig.path()).unwrap();
            disk.replace(frozen.layers.len(), layer);
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    /// A stack behaves as one flat disk does, whatever becomes of its layers.
    #[test]
    fn a_stack_is_a_disk(ops in proptest::collection::vec(op(), 1..40)) {
        let mut rig = Rig::new();
        let (image, mut model) = rig.image();
        let upper = rig.path();
        let mut disk = DiskStack::open(&[&image], &[], Some(&upper)).unwrap();
        for op in &ops {
            apply(&mut rig, &image, &mut disk, &mut model, op);
            prop_assert!(content(&disk) == model, "after {:?}", op);
        }
    }

    /// The merged view of random layers answers as looking down page by page does.
    #[test]
    fn merged_is_looking_down(layers in proptest::collection::vec(
        proptest::collection::vec(any::<bool>(), 24), 0..6)
    ) {
        let mut merged = Merged::default();
        for (number, pages) in layers.iter().enumerate() {
            let mut extents = Extents::default();
            for (page, set) in pages.iter().enumerate() {
                if *set {
                    extents.push(page as u64 * 10..(page as u64 + 1) * 10);
                }
            }
            merged.overlay(&extents, number);
        }
        for page in 0..24 {
            let expected = layers.iter().rposition(|pages| pages[page]);
            let (found, end) = merged.find(page as u64 * 10 + 3, 240);
            prop_assert_eq!(found, expected);
            prop_assert!(end > page as u64 * 10 + 3);
        }
        let pieces: Vec<_> = merged.iter().collect();
        for pair in pieces.windows(2) {
            let joined = pair[0].end == pair[1].start && pair[0].layer == pair[1].layer;
            prop_assert!(pair[0].end <= pair[1].start && !joined);
        }
    }
}

#[test]
fn both_sides_of_a_fork_write_for_themselves() {
    let mut rig = Rig::new();
    let (image, _) = rig.image();
    let mut source = DiskStack::open(&[&image], &[], Some(&rig.path())).unwrap();
    source.write_at(b"shared", 5000).unwrap();
    source.freeze(&rig.path()).unwrap();
    let (_, paths) = publish(&mut rig, &mut source);
    let frozen: Vec<&Path> = paths.iter().map(PathBuf::as_path).collect();
    let mut child = DiskStack::open(&[&image], &frozen, Some(&rig.path())).unwrap();
    child.write_at(b"CHILD!", 5000).unwrap();
    source.write_at(b"source", 5006).unwrap();
    let mut got = [0; 12];
    source.read_at(&mut got, 5000).unwrap();
    assert_eq!(&got, b"sharedsource");
    child.read_at(&mut got, 5000).unwrap();
    assert_eq!(&got[..6], b"CHILD!");
}

#[test]
fn what_nobody_below_has_is_given_back() {
    let mut rig = Rig::new();
    let image = rig.path();
    let bytes = 1 << 20;
    super::file::create(&image, bytes).unwrap();
    let upper = rig.path();
    let mut disk = DiskStack::open(&[&image], &[], Some(&upper)).unwrap();
    disk.write_at(&[7; 64 << 10], 0).unwrap();
    disk.zero_at(0, 64 << 10).unwrap();
    let file = std::fs::File::open(&upper).unwrap();
    assert!(Extents::scan(&file, "upper", bytes, true).unwrap().is_empty());
}

#[test]
fn accesses_beyond_the_end_and_to_read_only_disks_are_refused() {
    let mut rig = Rig::new();
    let (image, _) = rig.image();
    let mut disk = DiskStack::open(&[&image], &[], None).unwrap();
    assert!(disk.read_at(&mut [0; 2], DISK_BYTES - 1).is_err());
    assert!(disk.read_at(&mut [0; 2], u64::MAX).is_err());
    assert!(disk.write_at(&[0; 2], 0).is_err());
    assert!(disk.zero_at(0, PAGE_BYTES).is_err());
    assert!(disk.zero_at(1, u64::MAX).is_err());
}

#[test]
fn a_layer_of_another_size_is_refused() {
    let mut rig = Rig::new();
    let (image, _) = rig.image();
    let other = rig.path();
    super::file::create(&other, DISK_BYTES + 1).unwrap();
    let error = DiskStack::open(&[&image], &[&other], None).unwrap_err();
    assert!(matches!(error, LayerError::Size { .. }), "{error}");
    assert!(matches!(DiskStack::open(&[], &[], None), Err(LayerError::Empty)));
}
