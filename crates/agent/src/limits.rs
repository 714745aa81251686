//! How many processes the sandbox's users may have: a control group of the guest's own kernel.
//!
//! The host's limit is a guard only (reached, it takes the whole sandbox down); this one lets a fork
//! inside fail with EAGAIN, as any Linux does.

use std::ffi::CString;
use std::io;
use std::path::Path;
use std::sync::OnceLock;

/// Version 1 of control groups, which gVisor offers.
const GROUP_V1: &str = "/sys/fs/cgroup/pids/user";
/// Version 2, which a microVM's kernel has.
const GROUP_V2: &str = "/sys/fs/cgroup/user";
const CONTROLLERS_V2: &str = "/sys/fs/cgroup/cgroup.controllers";
const SUBTREE_V2: &str = "/sys/fs/cgroup/cgroup.subtree_control";

static PROCS: OnceLock<CString> = OnceLock::new();

/// Makes the group, or gives the one there is another limit.
pub fn set_processes_max(max: u32) -> io::Result<()> {
    let is_v2 = Path::new(CONTROLLERS_V2).exists();
    let group = Path::new(if is_v2 { GROUP_V2 } else { GROUP_V1 });
    if is_v2 {
        std::fs::write(SUBTREE_V2, "+pids")?;
    }
    match std::fs::create_dir(group) {
        Err(error) if error.kind() != io::ErrorKind::AlreadyExists => return Err(error),
        _ => {}
    }
    std::fs::write(group.join("pids.max"), max.to_string())?;
    let procs = CString::new(format!("{}/cgroup.procs", group.display())).map_err(io::Error::other)?;
    // Set by an earlier wake: the path is the same.
    let _ = PROCS.set(procs);
    Ok(())
}

/// The list that a child writes itself into; `None`: there is no limit.
#[must_use]
pub fn procs() -> Option<CString> {
    PROCS.get().cloned()
}
