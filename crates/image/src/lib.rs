//! Root file systems that sandboxes start from, and the files that describe templates.
//!
//! ```text
//! Debian (mmdebstrap) ─┐
//! OCI layout, archive ─┼─> tmp.<n>/{rootfs/, image.json} ── rename ──> <id>/   read-only from then on
//! tar of a sandbox ────┘         swept at open
//! template file (TOML, Dockerfile) ──> BuildPlan: the node runs its steps in a sandbox, then imports it
//! ```
//!
//! Invariants: a published root file system never changes; an image exists if and only if its folder
//! has a plain name, and then it is whole; whatever an archive holds, nothing outside the new root
//! file system is read or written, and all sizes are bounded. All calls block.

mod debian;
mod disk;
mod error;
mod extract;
mod guest;
mod import;
mod initramfs;
mod kernel;
mod modules;
mod oci;
mod prepare;
mod record;
mod root;
mod tarstream;
pub mod template;
mod vmlinux;

use std::fs::DirBuilder;
use std::io;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

pub use debian::{DebianSpec, base_packages};
pub use disk::{DiskSpec, build_disk};
pub use error::{
    DebianError, DiskError, ExtractError, GuestError, ImportError, InvalidName, KernelError, ListError,
    LoadError, OciError, OpenError, PublishError, RemoveError, VmlinuxError,
};
pub use extract::{Applied, Limits, apply_layer};
pub use guest::{Guest, GuestRecord, build_guest};
pub use import::{ExportPlan, export_plan};
pub use kernel::{KernelPackage, KernelRecord, fetch_kernel};
pub use oci::OciSource;
pub use prepare::{AGENT_DIR, AWAKE_PATH, HOME, USER, USER_ID, WAKE_HOOKS_DIR};
pub use record::{Image, ImageConfig, Source};
use root::Root;
pub use vmlinux::extract_vmlinux;

const ROOTFS: &str = "rootfs";
const RECORD: &str = "image.json";
const TMP_PREFIX: &str = "tmp.";
/// Step cache and downloads; never an image.
pub const CACHE_DIR: &str = "cache";

/// Called with a line for a person whenever something was done.
pub type Progress<'a> = &'a mut dyn FnMut(&str);

/// A folder of images. Cheap to clone.
#[derive(Debug, Clone)]
pub struct Images {
    dir: Arc<PathBuf>,
    next: Arc<AtomicU32>,
}

/// What a removal gave back.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Freed {
    pub bytes: u64,
}

impl Images {
    /// Opens (and where needed makes) the folder; tells the names of unfinished images it removed.
    /// Only one process may have a folder open at a time.
    pub fn open(dir: &Path) -> Result<(Self, Vec<String>), OpenError> {
        let failed = |action, path: &Path, source| OpenError { action, path: path.to_owned(), source };
        DirBuilder::new()
            .recursive(true)
            .mode(0o711)
            .create(dir)
            .map_err(|source| failed("make the folder", dir, source))?;
        let mut swept = Vec::new();
        for entry in std::fs::read_dir(dir).map_err(|source| failed("list", dir, source))? {
            let entry = entry.map_err(|source| failed("list", dir, source))?;
            let name = entry.file_name().to_string_lossy().into_owned();
            if name.starts_with(TMP_PREFIX) {
                let path = entry.path();
                std::fs::remove_dir_all(&path)
                    .map_err(|source| failed("delete the unfinished image", &path, source))?;
                swept.push(name);
            }
        }
        Ok((Self { dir: Arc::new(dir.to_owned()), next: Arc::new(AtomicU32::new(0)) }, swept))
    }

    /// The read-only root file system of an image.
    #[must_use]
    pub fn rootfs(&self, id: &str) -> PathBuf {
        self.dir.join(id).join(ROOTFS)
    }

    /// A folder for the step cache and for downloads, made when asked for.
    pub fn cache_dir(&self) -> io::Result<PathBuf> {
        let dir = self.dir.join(CACHE_DIR);
        DirBuilder::new().recursive(true).mode(0o700).create(&dir)?;
        Ok(dir)
    }

    #[must_use]
    pub fn exists(&self, id: &str) -> bool {
        check_name(id).is_ok() && self.dir.join(id).join(RECORD).is_file()
    }

    pub fn load(&self, id: &str) -> Result<Image, LoadError> {
        let invalid = |_| LoadError::NotFound { id: id.chars().take(80).collect() };
        check_name(id).map_err(invalid)?;
        Image::read(&self.dir.join(id).join(RECORD), id)
    }

    /// All images, by id. A record that cannot be read is an error that names it.
    pub fn list(&self) -> Result<Vec<Image>, ListError> {
        let failed = |source| ListError::Io { path: self.dir.to_path_buf(), source };
        let mut found = Vec::new();
        for entry in std::fs::read_dir(self.dir.as_path()).map_err(failed)? {
            let name = entry.map_err(failed)?.file_name();
            let Some(id) = name.to_str().filter(|name| check_name(name).is_ok()) else { continue };
            match self.load(id) {
                Ok(image) => found.push(image),
                Err(LoadError::NotFound { .. }) => {}
                Err(source) => return Err(ListError::Record { id: id.to_owned(), source: Box::new(source) }),
            }
        }
        found.sort_by(|a, b| a.id.cmp(&b.id));
        Ok(found)
    }

    /// Removes an image that nothing refers to: `references` are names of what still needs it.
    pub fn remove(&self, id: &str, references: &[String]) -> Result<Freed, RemoveError> {
        let not_found = || RemoveError::NotFound { id: id.chars().take(80).collect() };
        check_name(id).map_err(|_| not_found())?;
        if !references.is_empty() {
            return Err(RemoveError::InUse { id: id.to_owned(), references: references.to_vec() });
        }
        let image = self.load(id).ok();
        let failed = |action, source| RemoveError::Io { id: id.to_owned(), action, source };
        let tmp = self.tmp_path();
        match std::fs::rename(self.dir.join(id), &tmp) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Err(not_found()),
            other => other.map_err(|source| failed("withdraw it", source))?,
        }
        std::fs::remove_dir_all(&tmp).map_err(|source| failed("delete it", source))?;
        Ok(Freed { bytes: image.map_or(0, |image| image.bytes) })
    }

    fn tmp_path(&self) -> PathBuf {
        let count = self.next.fetch_add(1, Ordering::Relaxed);
        self.dir.join(format!("{TMP_PREFIX}{}.{count}", std::process::id()))
    }

    /// Starts an image: its folder goes with the value unless it is published.
    fn draft(&self) -> io::Result<Draft> {
        let dir = self.tmp_path();
        DirBuilder::new().mode(0o711).create(&dir)?;
        let draft = Draft { dir };
        // Users inside must be able to walk into their own root.
        DirBuilder::new().mode(0o755).create(draft.rootfs())?;
        Ok(draft)
    }

    /// Makes the image exist under its id: the record is written, all is synced, the folder is renamed.
    fn publish(&self, draft: Draft, mut image: Image) -> Result<Image, PublishError> {
        let failed = |action, source| PublishError { id: image.id.clone(), action, source };
        let size = root::tree_size(&draft.rootfs()).map_err(|source| failed("measure it", source))?;
        image.bytes = size.bytes;
        image.files = size.files;
        image.write(&draft.dir.join(RECORD)).map_err(|source| failed("write its record", source))?;
        let dir = std::fs::File::open(&draft.dir).map_err(|source| failed("sync it", source))?;
        // Tens of thousands of files: one flush of the file system is quicker than one each.
        rustix::fs::syncfs(&dir).map_err(|source| failed("sync it", source.into()))?;
        std::fs::rename(&draft.dir, self.dir.join(&image.id))
            .map_err(|source| failed("rename it", source))?;
        std::mem::forget(draft);
        std::fs::File::open(self.dir.as_path())
            .and_then(|dir| dir.sync_all())
            .map_err(|source| failed("sync its folder", source))?;
        Ok(image)
    }
}

struct Draft {
    dir: PathBuf,
}

impl Draft {
    fn rootfs(&self) -> PathBuf {
        self.dir.join(ROOTFS)
    }

    fn root(&self) -> io::Result<Root> {
        Root::open(&self.rootfs())
    }
}

impl Drop for Draft {
    fn drop(&mut self) {
        if let Err(error) = std::fs::remove_dir_all(&self.dir) {
            let path = self.dir.display();
            tracing::warn!(%error, %path, "an unfinished image stays until the next start");
        }
    }
}

/// An image's id is a plain name: letters, digits, `-`, `_`, `.`; not hidden; at most 128 characters.
pub fn check_name(id: &str) -> Result<(), InvalidName> {
    let plain = |byte: u8| byte.is_ascii_alphanumeric() || b"._-".contains(&byte);
    let fits = (1..=128).contains(&id.len())
        && id.bytes().all(plain)
        && !id.starts_with(['.', '-'])
        && !id.starts_with(TMP_PREFIX)
        && id != CACHE_DIR;
    if fits { Ok(()) } else { Err(InvalidName { given: id.chars().take(80).collect() }) }
}
