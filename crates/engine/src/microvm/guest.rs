//! What a guest is started from: kernel, initramfs, root disk.

use std::fs::File;
use std::io;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

use dormouse_image::{DiskError, DiskSpec, build_disk};
use dormouse_types::Shape;
use dormouse_vmm::control::Kernel;
use serde::{Deserialize, Serialize};

use super::layout::Layout;
use crate::common::io_failure;
use crate::error::Failure;

/// Either kind of kernel, an ELF file first: it starts quicker.
const KERNELS: [&str; 2] = ["vmlinux", "bzImage"];
const INITRAMFS: &str = "initramfs.cpio";
/// Where it is there: more words for the kernel, on one line.
const CMDLINE: &str = "cmdline";
pub(super) const SETUP: &str = "run `dormouse setup --engine microvm`";
/// Beside what the root file system holds: inodes, journal, and what block sizes waste.
const DISK_OVERHEAD_BYTES: u64 = 96 << 20;
const MIB: u64 = 1 << 20;
/// Superblock and UUID of ext4 (kernel documentation, filesystems/ext4/super).
const EXT4_UUID_AT: u64 = 1024 + 0x68;

/// The files that a boot needs.
pub(super) fn kernel(layout: &Layout) -> Result<Kernel, Failure> {
    let (image, initramfs) = files(&layout.guest())?;
    let path = layout.guest().join(CMDLINE);
    let words = match std::fs::read_to_string(&path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => String::new(),
        other => other.map_err(io_failure("read", &path))?,
    };
    Ok(Kernel { image, initramfs: Some(initramfs), cmdline_extra: words.trim().to_owned() })
}

pub(super) fn files(dir: &Path) -> Result<(PathBuf, PathBuf), Failure> {
    let missing = |what: &str| Failure::Missing {
        what: format!("{what} in {}", dir.display()),
        mend: SETUP.to_owned(),
    };
    let image = KERNELS.iter().map(|name| dir.join(name)).find(|path| path.is_file());
    let image = image.ok_or_else(|| missing("the guest kernel (vmlinux or bzImage)"))?;
    let initramfs = dir.join(INITRAMFS);
    if !initramfs.is_file() {
        return Err(missing(&format!("the guest's {INITRAMFS}")));
    }
    Ok((image, initramfs))
}

/// A root disk, told apart from another one of the same name.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Disk {
    pub name: String,
    /// Of the file system, hex.
    pub uuid: String,
}

/// The root disks of this data folder. One is made at a time: two of the same would race for its name.
#[derive(Debug, Default)]
pub(super) struct Disks(Mutex<()>);

impl Disks {
    /// The root disk for a root file system, made now where there is none yet.
    pub fn obtain(&self, layout: &Layout, rootfs: &Path, shape: Shape) -> Result<Disk, Failure> {
        let id = image_id(rootfs)?;
        let name = format!("{id}-{}.ext4", shape.disk_mib);
        let path = layout.disks().join(&name);
        let _one = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if !path.is_file() {
            let held = tree_bytes(rootfs).map_err(io_failure("measure the root file system", rootfs))?;
            // What was there counts a quarter more: small files fill whole blocks.
            let bytes = u64::from(shape.disk_mib) * MIB + held / 4 * 5 + DISK_OVERHEAD_BYTES;
            let spec = DiskSpec { rootfs, size_bytes: bytes.next_multiple_of(MIB), seed: &id };
            build_disk(&spec, &path).map_err(|error| not_built(rootfs, &path, &error))?;
        }
        let uuid = uuid_of(&path).map_err(io_failure("read the root disk", &path))?;
        Ok(Disk { name, uuid })
    }

    /// Removes disks whose root file system is gone; returns their names.
    pub fn sweep(&self, layout: &Layout) -> Vec<String> {
        let _one = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let Ok(entries) = std::fs::read_dir(layout.disks()) else { return Vec::new() };
        let names = entries.flatten().filter_map(|entry| entry.file_name().into_string().ok());
        let is_left = |name: &String| {
            let id = name.strip_suffix(".ext4").and_then(|rest| rest.rsplit_once('-')).map(|(id, _)| id);
            // What has no such name is a disk that was never finished.
            id.is_none_or(|id| !layout.images().join(id).is_dir())
        };
        names.filter(is_left).filter(|name| std::fs::remove_file(layout.disks().join(name)).is_ok()).collect()
    }
}

/// The very disk that a snapshot was made on, or why there is none.
pub(super) fn find_disk(layout: &Layout, disk: &Disk) -> Result<PathBuf, Failure> {
    if disk.name.contains('/') || disk.name.starts_with('.') {
        return Err(Failure::Damaged {
            file: super::checkpoint::DESCRIPTION.to_owned(),
            why: "it names no disk".to_owned(),
        });
    }
    let path = layout.disks().join(&disk.name);
    match uuid_of(&path) {
        Ok(uuid) if uuid == disk.uuid => Ok(path),
        Ok(uuid) => Err(Failure::Incompatible {
            needs: format!("the root disk {} of UUID {}", disk.name, disk.uuid),
            has: format!("one of UUID {uuid}"),
        }),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Err(Failure::Missing {
            what: format!("the root disk {}", path.display()),
            mend: "build the template anew and start from it".to_owned(),
        }),
        Err(error) => Err(io_failure("read the root disk", &path)(error)),
    }
}

fn not_built(rootfs: &Path, path: &Path, error: &DiskError) -> Failure {
    let mut why = error.to_string();
    let mut source = std::error::Error::source(error);
    while let Some(cause) = source {
        why = format!("{why}: {cause}");
        source = cause.source();
    }
    if why.contains("No space left") {
        return Failure::NoSpace { path: path.to_owned() };
    }
    Failure::Unfit {
        what: format!("the root file system {}", rootfs.display()),
        why: format!("no disk can be made of it: {why}"),
        mend: "`dormouse doctor` says what is missing".to_owned(),
    }
}

/// `…/images/<id>/rootfs` is the root file system of image `<id>`.
fn image_id(rootfs: &Path) -> Result<String, Failure> {
    let id = rootfs.parent().and_then(Path::file_name).and_then(|name| name.to_str());
    let id = id.filter(|_| rootfs.is_dir());
    id.map(str::to_owned).ok_or_else(|| {
        io_failure("find the root file system", rootfs)(io::Error::from(io::ErrorKind::NotFound))
    })
}

/// What the files below it occupy; links are not followed.
fn tree_bytes(dir: &Path) -> io::Result<u64> {
    let mut bytes = 0;
    let mut dirs = vec![dir.to_owned()];
    while let Some(dir) = dirs.pop() {
        for entry in std::fs::read_dir(dir)? {
            let entry = entry?;
            let meta = entry.metadata()?;
            // A link to a file elsewhere in the tree is counted again: too much is no harm.
            bytes += meta.blocks() * 512;
            if meta.is_dir() {
                dirs.push(entry.path());
            }
        }
    }
    Ok(bytes)
}

fn uuid_of(disk: &Path) -> io::Result<String> {
    let mut uuid = [0_u8; 16];
    File::open(disk)?.read_exact_at(&mut uuid, EXT4_UUID_AT)?;
    Ok(uuid.iter().map(|byte| format!("{byte:02x}")).collect())
}
