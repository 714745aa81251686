//! Where the driver keeps what on disk.
//!
//! ```text
//! <data>/microvm/runtimes/<runtime>/  meta.json, monitor.sock, exit.json, logs, what the monitor writes
//!                                     from/: the snapshot it started from, as links
//! <data>/microvm/zygotes/<runtime>/   the same, of a monitor that only makes others
//! <data>/microvm/disks/               ext4 images of root file systems, made when first needed
//! <data>/microvm/run/<sandbox>/       the keeper's folder
//! <data>/guest/                       kernel and initramfs, made by `dormouse setup`
//! ```
//! In every cgroup hierarchy: `dormouse-<hash of the data folder>-microvm/<runtime>`.

use std::fs::Permissions;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use dormouse_types::{RuntimeId, SandboxId};

use crate::common::{group_parent, io_failure};
use crate::error::Failure;

/// Below the data folder.
pub(super) const GUEST: &str = "guest";

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
        for dir in [layout.runtimes(), layout.zygotes(), layout.disks(), layout.keepers()] {
            std::fs::create_dir_all(&dir).map_err(io_failure("make the folder", &dir))?;
        }
        // Below it lie sockets that command a sandbox, and its memory.
        let own = layout.own();
        std::fs::set_permissions(&own, Permissions::from_mode(0o700))
            .map_err(io_failure("close to others the folder", &own))?;
        Ok(layout)
    }

    fn own(&self) -> PathBuf {
        self.data_dir.join("microvm")
    }

    pub fn runtimes(&self) -> PathBuf {
        self.own().join("runtimes")
    }

    pub fn runtime(&self, id: &RuntimeId) -> PathBuf {
        self.runtimes().join(id.as_str())
    }

    pub fn zygotes(&self) -> PathBuf {
        self.own().join("zygotes")
    }

    pub fn zygote(&self, id: &RuntimeId) -> PathBuf {
        self.zygotes().join(id.as_str())
    }

    pub fn disks(&self) -> PathBuf {
        self.own().join("disks")
    }

    pub fn keepers(&self) -> PathBuf {
        self.own().join("run")
    }

    pub fn keeper(&self, sandbox: &SandboxId) -> PathBuf {
        self.keepers().join(sandbox.as_str())
    }

    pub fn guest(&self) -> PathBuf {
        self.data_dir.join(GUEST)
    }

    /// Where published root file systems lie, by id.
    pub fn images(&self) -> PathBuf {
        self.data_dir.join("images")
    }

    /// Parent of all groups of this engine and data folder.
    pub fn group_parent(&self) -> PathBuf {
        let mut name = group_parent(&self.data_dir).into_os_string();
        name.push("-microvm");
        name.into()
    }

    pub fn group(&self, runtime: &RuntimeId) -> PathBuf {
        self.group_parent().join(runtime.as_str())
    }
}
