//! What microVMs boot from: a kernel and an initramfs with the agent, in one folder, with a record of both.
//!
//! ```text
//! DATA/guest/ vmlinux (or bzImage)   initramfs.cpio   record.json
//! ```
//!
//! Invariant: the record is written last, so what has one is whole.

use std::fs::File;
use std::io::{self, BufWriter, Read};
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use crate::Progress;
use crate::error::GuestError;
use crate::initramfs::write_initramfs;
use crate::kernel::{KernelRecord, fetch_kernel};
use crate::modules::load_order;
use crate::vmlinux::extract_vmlinux;

const RECORD: &str = "record.json";
const RECORD_VERSION: u32 = 1;
const RECORD_BYTES_MAX: u64 = 64 << 10;
const INITRAMFS: &str = "initramfs.cpio";

/// What the files are and were made of. Digests are BLAKE3, hex.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct GuestRecord {
    pub version: u32,
    pub kernel: KernelRecord,
    /// Name of the kernel's file: an ELF `vmlinux` where it could be unpacked, else the `bzImage`.
    pub kernel_file: String,
    pub kernel_digest: String,
    pub initramfs_digest: String,
    /// Of the agent in the initramfs.
    pub agent_digest: String,
    /// In the order they are loaded.
    pub modules: Vec<String>,
}

/// Files that a microVM can boot.
#[derive(Debug, Clone)]
pub struct Guest {
    dir: PathBuf,
    pub record: GuestRecord,
}

impl Guest {
    /// Finds what [`build_guest`] left in `dir`; `None`: there is nothing, or not what this release makes.
    #[must_use]
    pub fn find(dir: &Path) -> Option<Self> {
        let mut text = String::new();
        File::open(dir.join(RECORD)).ok()?.take(RECORD_BYTES_MAX).read_to_string(&mut text).ok()?;
        let record: GuestRecord = serde_json::from_str(&text).ok()?;
        let found = Self { dir: dir.to_owned(), record };
        let whole = found.record.version == RECORD_VERSION
            && ["vmlinux", "bzImage"].contains(&found.record.kernel_file.as_str())
            && found.kernel().is_file()
            && found.initramfs().is_file();
        whole.then_some(found)
    }

    #[must_use]
    pub fn kernel(&self) -> PathBuf {
        self.dir.join(&self.record.kernel_file)
    }

    #[must_use]
    pub fn initramfs(&self) -> PathBuf {
        self.dir.join(INITRAMFS)
    }

    /// Whether the agent in it is this one.
    #[must_use]
    pub fn has_agent(&self, agent: &[u8]) -> bool {
        self.record.agent_digest == blake3::hash(agent).to_hex().as_str()
    }
}

/// Makes the files in `dir`, unless they are there with this very agent. The kernel's package is fetched once
/// and kept beside them, so that another agent needs no download.
pub fn build_guest(dir: &Path, agent: &[u8], progress: Progress<'_>) -> Result<Guest, GuestError> {
    if let Some(found) = Guest::find(dir).filter(|found| found.has_agent(agent)) {
        return Ok(found);
    }
    let failed = |action, path: &Path| {
        let path = path.to_owned();
        move |source: io::Error| GuestError::Io { action, path, source }
    };
    std::fs::create_dir_all(dir).map_err(failed("make", dir))?;
    let package = fetch_kernel(&dir.join("kernel"), progress).map_err(GuestError::Kernel)?;
    progress(&format!("making the guest's files from {}", package.record.package));
    let modules = load_order(&package)?;
    let bzimage = std::fs::read(package.bzimage()).map_err(failed("read", &package.bzimage()))?;
    let (kernel_file, kernel) = match extract_vmlinux(&bzimage) {
        Ok(kernel) => ("vmlinux", kernel),
        Err(error) => {
            progress(&format!("the kernel stays packed: {error}"));
            ("bzImage", bzimage)
        }
    };
    let kernel_path = dir.join(kernel_file);
    let kernel_digest = blake3::hash(&kernel).to_hex().to_string();
    publish(&kernel_path, |file| io::Write::write_all(file, &kernel))
        .map_err(failed("write", &kernel_path))?;
    let initramfs = dir.join(INITRAMFS);
    publish(&initramfs, |file| write_initramfs(file, agent, &modules))
        .map_err(failed("write", &initramfs))?;
    let record = GuestRecord {
        version: RECORD_VERSION,
        kernel: package.record.clone(),
        kernel_file: kernel_file.to_owned(),
        kernel_digest,
        initramfs_digest: crate::kernel::digest(&initramfs).map_err(failed("read", &initramfs))?,
        agent_digest: blake3::hash(agent).to_hex().to_string(),
        modules: modules.into_iter().map(|module| module.name).collect(),
    };
    let path = dir.join(RECORD);
    publish(&path, |file| Ok(serde_json::to_writer_pretty(file, &record)?))
        .map_err(failed("write", &path))?;
    Ok(Guest { dir: dir.to_owned(), record })
}

/// A running microVM may have the former file open: it is replaced, never changed.
fn publish(path: &Path, write: impl FnOnce(&mut BufWriter<File>) -> io::Result<()>) -> io::Result<()> {
    let draft = path.with_extension(format!("tmp{}", std::process::id()));
    let written = || {
        let mut file = BufWriter::new(File::create(&draft)?);
        write(&mut file)?;
        file.into_inner().map_err(io::IntoInnerError::into_error)?.sync_all()?;
        std::fs::rename(&draft, path)?;
        path.parent().map_or(Ok(()), |parent| File::open(parent)?.sync_all())
    };
    written().inspect_err(|_| {
        // Best effort: the first error is the one to tell.
        let _ = std::fs::remove_file(&draft);
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::modules::{WANTED, tests::module};

    /// A kernel package as [`fetch_kernel`] leaves it.
    fn package(dir: &Path) {
        let record = KernelRecord {
            version: 1,
            package: "linux-image-6.1.0-test".to_owned(),
            package_version: "6.1-1".to_owned(),
            release: "6.1.0-test".to_owned(),
            digest: String::new(),
        };
        let modules = dir.join("kernel/lib/modules/6.1.0-test");
        std::fs::create_dir_all(modules.join("kernel/drivers/virtio")).unwrap();
        std::fs::create_dir_all(dir.join("kernel/boot")).unwrap();
        std::fs::write(dir.join("kernel/kernel.json"), serde_json::to_vec(&record).unwrap()).unwrap();
        std::fs::write(dir.join("kernel/boot/vmlinuz-6.1.0-test"), "no kernel").unwrap();
        std::fs::write(modules.join("modules.builtin"), "kernel/drivers/net/virtio_net.ko\n").unwrap();
        for (name, depends) in WANTED
            .iter()
            .filter(|name| **name != "virtio_net")
            .map(|name| (*name, "virtio,virtio_ring"))
            .chain([("virtio", "virtio_ring"), ("virtio_ring", "")])
        {
            let file = modules.join(format!("kernel/drivers/virtio/{}.ko", name.replace('_', "-")));
            std::fs::write(file, module(depends)).unwrap();
        }
    }

    #[test]
    fn files_are_made_once_and_anew_for_another_agent() {
        let dir = tempfile::tempdir().unwrap();
        package(dir.path());
        let mut said = Vec::new();
        let guest = build_guest(dir.path(), b"agent", &mut |line| said.push(line.to_owned())).unwrap();
        assert_eq!(guest.record.kernel_file, "bzImage");
        assert!(said.iter().any(|line| line.contains("stays packed")), "{said:?}");
        assert_eq!(guest.record.modules[..3], ["virtio_ring", "virtio", "virtio_mmio"]);
        assert!(!guest.record.modules.contains(&"virtio_net".to_owned()), "it is built in");
        let written = std::fs::metadata(guest.initramfs()).unwrap().modified().unwrap();
        let again = build_guest(dir.path(), b"agent", &mut |_| panic!("nothing is to be done")).unwrap();
        assert_eq!(again.record, guest.record);
        assert_eq!(std::fs::metadata(again.initramfs()).unwrap().modified().unwrap(), written);
        let other = build_guest(dir.path(), b"another", &mut |_| {}).unwrap();
        assert!(other.has_agent(b"another") && !other.has_agent(b"agent"));
        assert_ne!(other.record.initramfs_digest, guest.record.initramfs_digest);
        let names = std::fs::read_dir(dir.path()).unwrap().count();
        assert_eq!(names, 4, "kernel, bzImage, initramfs and record are all there is");
    }

    #[test]
    fn a_missing_module_is_named() {
        let dir = tempfile::tempdir().unwrap();
        package(dir.path());
        let file = "kernel/lib/modules/6.1.0-test/kernel/drivers/virtio/virtio-ring.ko";
        std::fs::remove_file(dir.path().join(file)).unwrap();
        let error = build_guest(dir.path(), b"agent", &mut |_| {}).unwrap_err();
        assert_eq!(error.to_string(), "the kernel 6.1.0-test has no module virtio_ring");
        assert!(Guest::find(dir.path()).is_none());
    }
}
