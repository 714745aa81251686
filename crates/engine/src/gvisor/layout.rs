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

use crate::common::{group_parent, io_failure, names};
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
        group_parent(&self.data_dir)
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
