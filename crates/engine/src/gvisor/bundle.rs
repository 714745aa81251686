//! The OCI bundle of a sandbox: what runsc is told (runtime-spec 1.0, `config.json`).
//!
//! Invariant: a restore needs the same mounts as the checkpoint saw; [`LAYOUT`] counts their changes.

use std::fs::{DirBuilder, File};
use std::os::unix::fs::DirBuilderExt;
use std::path::Path;

use dormouse_types::Shape;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use crate::common::io_failure;
use crate::error::Failure;

/// Version of the set of mounts.
pub(super) const LAYOUT: u32 = 1;
/// Where the agent is found inside.
const AGENT: &str = "usr/lib/dormouse/agent";
/// runsc puts a RAM disk on a /tmp that is empty; this keeps it on disk.
const TMP_MARK: &str = "tmp/.dormouse";

/// All capabilities that gVisor knows: root inside is root over the sandbox, and nothing else.
const CAPABILITIES: &[&str] = &[
    "CAP_CHOWN",
    "CAP_DAC_OVERRIDE",
    "CAP_DAC_READ_SEARCH",
    "CAP_FOWNER",
    "CAP_FSETID",
    "CAP_KILL",
    "CAP_SETGID",
    "CAP_SETUID",
    "CAP_SETPCAP",
    "CAP_LINUX_IMMUTABLE",
    "CAP_NET_BIND_SERVICE",
    "CAP_NET_BROADCAST",
    "CAP_NET_ADMIN",
    "CAP_NET_RAW",
    "CAP_IPC_LOCK",
    "CAP_IPC_OWNER",
    "CAP_SYS_MODULE",
    "CAP_SYS_RAWIO",
    "CAP_SYS_CHROOT",
    "CAP_SYS_PTRACE",
    "CAP_SYS_PACCT",
    "CAP_SYS_ADMIN",
    "CAP_SYS_BOOT",
    "CAP_SYS_NICE",
    "CAP_SYS_RESOURCE",
    "CAP_SYS_TIME",
    "CAP_SYS_TTY_CONFIG",
    "CAP_MKNOD",
    "CAP_LEASE",
    "CAP_AUDIT_WRITE",
    "CAP_AUDIT_CONTROL",
    "CAP_SETFCAP",
    "CAP_MAC_OVERRIDE",
    "CAP_MAC_ADMIN",
    "CAP_SYSLOG",
    "CAP_WAKE_ALARM",
    "CAP_BLOCK_SUSPEND",
];

/// What a bundle is made of.
#[derive(Debug, Clone)]
pub(super) struct Bundle<'a> {
    pub rootfs: &'a Path,
    pub agent: &'a Path,
    pub shape: Shape,
    pub hostname: &'a str,
    /// `None`: the host has no usable cgroups.
    pub group: Option<&'a Path>,
}

/// Kept with a snapshot, so that a later release knows what it is about to restore.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Described {
    pub layout: u32,
    pub agent_digest: String,
}

pub(super) const DESCRIPTION: &str = "bundle.json";

impl Bundle<'_> {
    pub fn write(&self, dir: &Path) -> Result<(), Failure> {
        let path = dir.join("config.json");
        let file = File::create(&path).map_err(io_failure("write the bundle", &path))?;
        serde_json::to_writer_pretty(file, &self.config())
            .map_err(|error| io_failure("write the bundle", &path)(error.into()))
    }

    fn config(&self) -> Value {
        let namespaces = ["pid", "ipc", "uts", "mount", "network"].map(|kind| json!({ "type": kind }));
        let mut config = json!({
            "ociVersion": "1.0.2",
            "process": {
                "terminal": false,
                "user": { "uid": 0, "gid": 0 },
                "args": [format!("/{AGENT}"), "init"],
                "env": [
                    "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
                    "HOME=/root",
                    "LANG=C.UTF-8",
                ],
                "cwd": "/",
                "capabilities": {
                    "bounding": CAPABILITIES, "effective": CAPABILITIES,
                    "inheritable": CAPABILITIES, "permitted": CAPABILITIES,
                },
                "noNewPrivileges": false,
            },
            "root": { "path": self.rootfs, "readonly": false },
            "hostname": self.hostname,
            "mounts": mounts(self.agent),
            "linux": {
                "namespaces": namespaces,
                "resources": {
                    "memory": { "limit": memory_bytes(self.shape) },
                    "cpu": { "quota": u64::from(self.shape.cpus) * 100_000, "period": 100_000 },
                },
            },
        });
        if let Some(group) = self.group {
            config["linux"]["cgroupsPath"] = json!(Path::new("/").join(group));
        }
        config
    }
}

/// What the sandbox is told that it has.
pub(super) fn memory_bytes(shape: Shape) -> u64 {
    u64::from(shape.memory_mib) << 20
}

fn mounts(agent: &Path) -> Value {
    json!([
        { "destination": "/proc", "type": "proc", "source": "proc" },
        { "destination": "/sys", "type": "sysfs", "source": "sysfs", "options": ["nosuid", "noexec", "nodev", "ro"] },
        { "destination": "/sys/fs/cgroup", "type": "cgroup", "source": "cgroup", "options": ["rw"] },
        { "destination": "/dev", "type": "tmpfs", "source": "tmpfs" },
        { "destination": "/dev/shm", "type": "tmpfs", "source": "shm", "options": ["nosuid", "nodev", "mode=1777"] },
        { "destination": "/dev/pts", "type": "devpts", "source": "devpts" },
        { "destination": format!("/{AGENT}"), "type": "bind", "source": agent, "options": ["ro"] },
    ])
}

/// Makes the mount points that are missing. runsc would make them itself, in the shared root file
/// system and without a word; here it is done once, before its first use, and nothing else is changed.
pub(super) fn prepare_rootfs(rootfs: &Path) -> Result<(), Failure> {
    if !rootfs.is_dir() {
        let source = std::io::Error::from(std::io::ErrorKind::NotFound);
        return Err(io_failure("find the root file system", rootfs)(source));
    }
    for (name, mode) in
        [("proc", 0o555), ("sys", 0o555), ("dev", 0o755), ("tmp", 0o1777), ("usr/lib/dormouse", 0o755)]
    {
        let dir = rootfs.join(name);
        if !inside(rootfs, &dir) {
            return Err(unfit(rootfs, format!("{name} leads outside of it")));
        }
        if !dir.is_dir() {
            let mut builder = DirBuilder::new();
            builder.recursive(true).mode(mode);
            builder.create(&dir).map_err(io_failure("make the mount point", &dir))?;
        }
    }
    for name in [AGENT, TMP_MARK] {
        let file = rootfs.join(name);
        match File::options().write(true).create_new(true).open(&file) {
            Err(error) if error.kind() != std::io::ErrorKind::AlreadyExists => {
                return Err(io_failure("make the mount point", &file)(error));
            }
            _ => {}
        }
    }
    Ok(())
}

/// An image may hold links: nothing is made where one of them leads out.
fn inside(rootfs: &Path, path: &Path) -> bool {
    let existing = path.ancestors().find(|part| part.symlink_metadata().is_ok());
    let real = |path: &Path| std::fs::canonicalize(path).ok();
    match (existing.and_then(real), real(rootfs)) {
        (Some(path), Some(rootfs)) => path.starts_with(rootfs),
        _ => false,
    }
}

fn unfit(rootfs: &Path, why: String) -> Failure {
    Failure::Unfit {
        what: format!("the root file system {}", rootfs.display()),
        why,
        mend: "build the template anew".to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn scratch(name: &str) -> std::path::PathBuf {
        let dir = std::env::temp_dir().join(format!("dormouse-bundle-{name}-{}", std::process::id()));
        std::fs::create_dir_all(&dir).unwrap();
        dir
    }

    #[test]
    fn mount_points_are_made_once_and_only_inside() {
        let dir = scratch("points");
        let rootfs = dir.join("rootfs");
        std::fs::create_dir_all(&rootfs).unwrap();
        prepare_rootfs(&rootfs).unwrap();
        prepare_rootfs(&rootfs).unwrap();
        assert!(rootfs.join(AGENT).is_file());

        let hostile = dir.join("hostile");
        std::fs::create_dir_all(&hostile).unwrap();
        std::os::unix::fs::symlink("/etc", hostile.join("usr")).unwrap();
        assert!(matches!(prepare_rootfs(&hostile), Err(Failure::Unfit { .. })));
        std::fs::remove_dir_all(dir).unwrap();
    }

    #[test]
    fn the_group_is_named_only_where_there_is_one() {
        let shape = Shape { cpus: 2, memory_mib: 256, disk_mib: 1024, processes_max: 64 };
        let mut bundle =
            Bundle { rootfs: Path::new("/r"), agent: Path::new("/a"), shape, hostname: "h", group: None };
        assert!(bundle.config()["linux"].get("cgroupsPath").is_none());
        bundle.group = Some(Path::new("dormouse-1/c"));
        let config = bundle.config();
        assert_eq!(config["linux"]["cgroupsPath"], "/dormouse-1/c");
        assert_eq!(config["linux"]["resources"]["memory"]["limit"], 256 << 20);
    }
}
