//! Where the driver keeps what on disk.
//!
//! ```text
//! <data>/gvisor/run/<container>/   config.json (the bundle), meta.json, root/ (runsc's state), logs
//! <data>/gvisor/runtimes/<runtime> link to its container: a pool member has none yet
//! <data>/gvisor/files/             backing of root file system changes: unlinked files of runsc
//! <data>/agent/<digest>/agent      agents, by content
//! <data>/run/<sandbox>/            the keeper's folder
//! ```
//! In every cgroup hierarchy: `dormouse-<hash of the data folder>/<container>`.

use std::fs::Permissions;
use std::io;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use dormouse_types::{RuntimeId, SandboxId};

use crate::error::Failure;

#[derive(Debug, Clone)]
pub(super) struct Layout {
    data_dir: PathBuf,
}

impl Layout {
    /// Makes the folders.
    pub fn open(data_dir: &Path) -> Result<Self, Failure> {
        let data_dir =
            std::fs::canonicalize(data_dir).map_err(io_failure("open the data folder", data_dir))?;
        let layout = Self { data_dir };
        for dir in [layout.containers(), layout.runtimes(), layout.files(), layout.keepers()] {
            std::fs::create_dir_all(&dir).map_err(io_failure("make the folder", &dir))?;
        }
        // Below them lie sockets that command a sandbox, and bytes on their way to and from it.
        for dir in [layout.data_dir.join("gvisor"), layout.keepers()] {
            std::fs::set_permissions(&dir, Permissions::from_mode(0o700))
                .map_err(io_failure("close to others the folder", &dir))?;
        }
        Ok(layout)
    }

    pub fn containers(&self) -> PathBuf {
        self.data_dir.join("gvisor/run")
    }

    pub fn container(&self, id: &RuntimeId) -> PathBuf {
        self.containers().join(id.as_str())
    }

    pub fn runtimes(&self) -> PathBuf {
        self.data_dir.join("gvisor/runtimes")
    }

    pub fn files(&self) -> PathBuf {
        self.data_dir.join("gvisor/files")
    }

    pub fn agent(&self, digest: &str) -> PathBuf {
        self.data_dir.join("agent").join(digest).join("agent")
    }

    pub fn keepers(&self) -> PathBuf {
        self.data_dir.join("run")
    }

    pub fn keeper(&self, sandbox: &SandboxId) -> PathBuf {
        self.keepers().join(sandbox.as_str())
    }

    /// Parent of all groups of this data folder: daemons of other folders have others.
    pub fn group_parent(&self) -> PathBuf {
        let name = self.data_dir.as_os_str().as_encoded_bytes();
        PathBuf::from(format!("dormouse-{:016x}", fnv1a(name)))
    }

    pub fn group(&self, container: &RuntimeId) -> PathBuf {
        self.group_parent().join(container.as_str())
    }

    /// Gives a container to a runtime; atomic, so that a crash leaves a pool member or a runtime.
    pub fn link(&self, runtime: &RuntimeId, container: &RuntimeId) -> Result<(), Failure> {
        let path = self.runtimes().join(runtime.as_str());
        std::os::unix::fs::symlink(Path::new("../run").join(container.as_str()), &path)
            .map_err(io_failure("record the runtime at", &path))
    }

    pub fn unlink(&self, runtime: &RuntimeId) -> Result<(), Failure> {
        let path = self.runtimes().join(runtime.as_str());
        match std::fs::remove_file(&path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
            other => other.map_err(io_failure("remove the record of the runtime at", &path)),
        }
    }

    /// Which container a runtime has.
    pub fn linked(&self, runtime: &RuntimeId) -> Option<RuntimeId> {
        let target = std::fs::read_link(self.runtimes().join(runtime.as_str())).ok()?;
        target.file_name()?.to_str()?.parse().ok()
    }

    /// Every runtime on record.
    pub fn links(&self) -> Vec<RuntimeId> {
        names(&self.runtimes())
    }
}

/// The names in a folder that are valid ids; a folder that is not there has none.
pub(super) fn names<T: std::str::FromStr>(dir: &Path) -> Vec<T> {
    let Ok(entries) = std::fs::read_dir(dir) else { return Vec::new() };
    entries.flatten().filter_map(|entry| entry.file_name().to_str()?.parse().ok()).collect()
}

/// For `map_err`: what was tried on which path.
pub(super) fn io_failure(action: &'static str, path: &Path) -> impl FnOnce(io::Error) -> Failure + use<> {
    let path = path.to_owned();
    move |source| match source.kind() {
        io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => Failure::NoSpace { path },
        _ => Failure::Io { action, path, source },
    }
}

/// FNV-1a, 64 bits: stable over releases, which the standard library's hasher is not.
fn fnv1a(bytes: &[u8]) -> u64 {
    bytes
        .iter()
        .fold(0xcbf2_9ce4_8422_2325, |hash, byte| (hash ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_hash_is_the_published_one() {
        assert_eq!(fnv1a(b""), 0xcbf2_9ce4_8422_2325);
        assert_eq!(fnv1a(b"foobar"), 0x8594_4171_f739_67e8);
    }
}
