//! One function per thing that is looked at.

use std::path::Path;

use dormouse_api::dormouse::{Check, CheckOutcome};
use dormouse_engine::Failure;
use dormouse_engine::microvm::{Kvm, Microvm, Unusable, probe_network};
use dormouse_sys::cgroup::{Hierarchies, Version};

use super::host;
use super::runsc::{RUNSC_PACKAGE, Runsc, RunscError};

/// The default template and a few sandboxes on disk.
pub const SPACE_WANTED_BYTES: u64 = 4 << 30;
const GIB: u64 = 1 << 30;

fn check(name: &str, outcome: CheckOutcome, detail: impl Into<String>, mend: Option<&str>) -> Check {
    Check { name: name.to_owned(), outcome, detail: detail.into(), mend: mend.map(str::to_owned) }
}

use CheckOutcome::{Fail, Ok as Good, Warn};

pub fn root() -> Check {
    if rustix::process::geteuid().is_root() {
        return check("root", Good, "this is root", None);
    }
    check("root", Fail, "this is not root: runsc restores sandboxes only as root", Some("run it with sudo"))
}

pub fn platform() -> Check {
    let kernel = std::fs::read_to_string("/proc/sys/kernel/osrelease").unwrap_or_default();
    let release = std::fs::read_to_string("/etc/os-release").unwrap_or_default();
    let name =
        release.lines().find_map(|line| line.strip_prefix("PRETTY_NAME=")).unwrap_or("an unnamed system");
    let detail = format!("{}, Linux {}, {}", name.trim_matches('"'), kernel.trim(), std::env::consts::ARCH);
    if std::env::consts::ARCH == "x86_64" {
        return check("system", Good, detail, None);
    }
    check("system", Warn, format!("{detail}: only x86-64 has been tried"), None)
}

pub fn virtualisation() -> Check {
    match host::virtualisation_flag() {
        Some(flag) => check("hardware virtualisation", Good, format!("the processor has {flag}"), None),
        None => check(
            "hardware virtualisation",
            Warn,
            "the processor's flags have neither vmx nor svm; only a microvm would need it",
            None,
        ),
    }
}

/// The device alone proves nothing: some hosts offer it without hardware virtualisation, and guests hang there.
pub fn kvm() -> Check {
    let name = "kvm";
    match Kvm::probe() {
        Ok(Kvm { flag }) => {
            check(name, Good, format!("/dev/kvm can be opened, the processor has {flag}"), None)
        }
        Err(why) => {
            let mend = (!matches!(why, Unusable::NoHardware)).then(|| why.mend());
            check(name, Warn, format!("{why}; only a microvm would need it"), mend)
        }
    }
}

/// Makes a network as every microVM has one, and drops it.
pub fn network() -> Check {
    let name = "microvm network";
    match probe_network() {
        Ok(()) => check(name, Good, "a namespace with a tap and steered connections can be made", None),
        Err((why, mend)) => {
            let detail = format!(
                "{why}; a microvm gets no network card then, and only programs that use the proxy variables reach out"
            );
            check(name, Warn, detail, Some(mend))
        }
    }
}

/// What a microVM's guest starts from.
pub fn guest(data_dir: &Path) -> Check {
    let name = "guest kernel";
    match Microvm::guest_files(data_dir) {
        Ok((kernel, initramfs)) => {
            check(name, Good, format!("{} and {}", kernel.display(), initramfs.display()), None)
        }
        Err(Failure::Missing { what, mend }) => {
            let detail = format!("{what} is missing; only a microvm would need it");
            check(name, Warn, detail, Some(mend.trim_start_matches("run ").trim_matches('`')))
        }
        Err(other) => check(name, Warn, other.to_string(), None),
    }
}

pub fn mkfs() -> Check {
    let name = "mkfs.ext4";
    match host::find_program(name) {
        Some(path) => check(name, Good, path.display().to_string(), None),
        None => check(
            name,
            Warn,
            "it is not installed: only a microvm would need it, for its root disk",
            Some("apt-get install e2fsprogs"),
        ),
    }
}

pub fn runsc(found: &Result<Runsc, RunscError>) -> Check {
    let name = "runsc";
    match found {
        Ok(runsc) => {
            let flags = runsc.checkpoint.join(", ");
            let detail = format!("{} {}; checkpoint has {flags}", runsc.path.display(), runsc.version);
            check(name, Good, detail, None)
        }
        Err(error) => {
            let mend = format!(
                "dormouse setup (Debian 12: apt-get install {RUNSC_PACKAGE} from bookworm-backports)"
            );
            check(name, Fail, error.to_string(), Some(&mend))
        }
    }
}

pub fn mmdebstrap() -> Check {
    let name = "mmdebstrap";
    let Some(path) = host::find_program("mmdebstrap") else {
        let detail = "it is not installed: needed to build Debian images, the default template among them";
        return check(name, Warn, detail, Some("dormouse setup (apt-get install mmdebstrap)"));
    };
    let version = host::output(&path, &["--version"]).unwrap_or_default();
    check(name, Good, format!("{} {}", path.display(), version.trim()), None)
}

pub fn cgroup() -> Check {
    let name = "cgroup";
    let without = "limits of CPU, memory and processes cannot be held, and freezing falls back to signals";
    let hierarchies = match Hierarchies::detect() {
        Ok(hierarchies) => hierarchies,
        Err(error) => return check(name, Warn, format!("cannot be read ({error}): {without}"), None),
    };
    match hierarchies.version() {
        Some(Version::V1) => check(name, Good, "version 1, with freezer, memory, cpu and pids", None),
        Some(Version::V2) => check(name, Good, "version 2, with memory, cpu and pids", None),
        None => check(name, Warn, format!("none that has all controllers: {without}"), None),
    }
}

pub fn reflink(data_dir: &Path) -> Check {
    let name = "reflink";
    let folder = host::existing(data_dir);
    match try_reflink(folder) {
        Ok(true) => check(name, Good, format!("{} can share file contents", folder.display()), None),
        Ok(false) => {
            let detail = format!(
                "the file system of {} cannot share file contents; files are copied",
                folder.display()
            );
            check(name, Warn, detail, Some("a data folder on XFS (reflink=1) or Btrfs"))
        }
        Err(error) => check(name, Warn, format!("cannot be tried in {}: {error}", folder.display()), None),
    }
}

fn try_reflink(folder: &Path) -> std::io::Result<bool> {
    let mut from = tempfile::tempfile_in(folder)?;
    std::io::Write::write_all(&mut from, &[7; 4096])?;
    let to = tempfile::tempfile_in(folder)?;
    Ok(rustix::fs::ioctl_ficlone(&to, &from).is_ok())
}

pub fn userfaultfd() -> Check {
    let there = Path::new("/proc/sys/vm/unprivileged_userfaultfd").exists();
    if there {
        check("userfaultfd", Good, "the kernel has it", None)
    } else {
        check(
            "userfaultfd",
            Warn,
            "the kernel does not have it; only lazy restores of a microvm would use it",
            None,
        )
    }
}

pub fn free_disk(data_dir: &Path) -> Check {
    let name = "free disk";
    let folder = host::existing(data_dir);
    match free_bytes(folder) {
        Ok(free) if free >= SPACE_WANTED_BYTES => {
            check(name, Good, format!("{} GiB below {}", free / GIB, folder.display()), None)
        }
        Ok(free) => {
            let wanted = SPACE_WANTED_BYTES / GIB;
            let detail = format!("{} MiB below {}; {wanted} GiB are wanted", free >> 20, folder.display());
            check(name, Warn, detail, Some("free some, or name another disk with --data-dir"))
        }
        Err(error) => check(name, Warn, format!("cannot be told for {}: {error}", folder.display()), None),
    }
}

/// Bytes that root may still write on the disk of this folder, or of the nearest one above that is there.
pub fn free_bytes(folder: &Path) -> std::io::Result<u64> {
    let stat = rustix::fs::statvfs(host::existing(folder))?;
    Ok(stat.f_bavail.saturating_mul(stat.f_frsize))
}

pub fn memory() -> Check {
    let (total, free) = (host::memory_bytes("MemTotal"), host::memory_bytes("MemAvailable"));
    let (Some(total), Some(free)) = (total, free) else {
        return check("memory", Warn, "/proc/meminfo does not say", None);
    };
    let detail = format!("{} MiB, {} MiB of it available", total >> 20, free >> 20);
    check("memory", if free >= GIB { Good } else { Warn }, detail, None)
}
