//! Where the driver keeps what on disk.
//!
//! ```text
//! <data>/microvm/meta/<runtime>.json  what the driver knows of it, out of its reach
//! <data>/microvm/runtimes/<runtime>/  the monitor's own: monitor.sock, exit.json, logs, layers
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

use super::users::{MonitorUsers, let_pass};
use crate::common::{group_parent, io_failure};
use crate::error::Failure;

/// Below the data folder.
pub(super) const GUEST: &str = "guest";

#[derive(Debug, Clone)]
pub(super) struct Layout {
    data_dir: PathBuf,
}

impl Layout {
    /// Makes the folders. Monitors that are users of their own may pass through some.
    pub fn open(data_dir: &Path, users: Option<MonitorUsers>) -> Result<Self, Failure> {
        let data_dir =
            std::fs::canonicalize(data_dir).map_err(io_failure("open the data folder", data_dir))?;
        let layout = Self { data_dir };
        let shared = [layout.runtimes(), layout.zygotes(), layout.disks()];
        for dir in shared.iter().chain(&[layout.keepers(), layout.metas()]) {
            std::fs::create_dir_all(dir).map_err(io_failure("make the folder", dir))?;
        }
        // Below them lie sockets that command a sandbox, and its memory.
        for dir in shared.iter().chain(&[layout.own(), layout.keepers(), layout.metas()]) {
            std::fs::set_permissions(dir, Permissions::from_mode(0o700))
                .map_err(io_failure("close to others the folder", dir))?;
        }
        if let Some(users) = users {
            let guest = Some(layout.guest()).filter(|dir| dir.is_dir());
            for dir in shared.iter().chain(&[layout.own(), layout.data_dir.clone()]).chain(&guest) {
                let_pass(dir, users.first)?;
            }
        }
        Ok(layout)
    }

    pub fn data(&self) -> &Path {
        &self.data_dir
    }

    pub fn metas(&self) -> PathBuf {
        self.own().join("meta")
    }

    pub fn meta(&self, id: &RuntimeId) -> PathBuf {
        self.metas().join(format!("{id}.json"))
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
