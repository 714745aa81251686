//! What the monitor sees of the host: one folder, its processes' own part of procfs, no network.
//!
//! It is left what the host's processes see for namespaces of its own (namespaces(7)): mounts, network, System V IPC,
//! names. No namespace of process ids: that ends with its first process, and a fork's child outlives its source; the
//! procfs here shows nobody whom the reader could not trace, and a user of its own can signal nobody else.

use std::ffi::CString;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::path::{Component, Path, PathBuf};

use rustix::fs::{CWD, Mode};
use rustix::io::Errno;
use rustix::mount::{MountFlags, MountPropagationFlags, MoveMountFlags, OpenTreeFlags, UnmountFlags};
use rustix::thread::UnshareFlags;

/// Before Linux 5.8 procfs has no such options.
const PROC_OPTIONS: &std::ffi::CStr = c"hidepid=ptraceable,subset=pid";
const NOTHING_SPECIAL: MountFlags = MountFlags::NOSUID.union(MountFlags::NODEV).union(MountFlags::NOEXEC);

/// For the calling thread, the only one of its process: from now on there is `within` at its path, `/proc`, and nothing
/// else, neither of them with devices or programs.
pub fn leave(within: &Path) -> io::Result<()> {
    let spaces = UnshareFlags::NEWNS | UnshareFlags::NEWNET | UnshareFlags::NEWIPC | UnshareFlags::NEWUTS;
    // SAFETY: no descriptor table is unshared.
    unsafe { rustix::thread::unshare_unsafe(spaces)? };
    let apart = MountPropagationFlags::PRIVATE | MountPropagationFlags::REC;
    rustix::mount::mount_change("/", apart)?;
    let flags =
        OpenTreeFlags::OPEN_TREE_CLONE | OpenTreeFlags::OPEN_TREE_CLOEXEC | OpenTreeFlags::AT_RECURSIVE;
    let tree = rustix::mount::open_tree(CWD, within, flags)?;
    plain(&tree)?;
    // Some folder that is there; what it has is in `tree`.
    rustix::mount::mount("none", within, "tmpfs", NOTHING_SPECIAL, Some(c"mode=755,size=64k"))?;
    rustix::process::chdir(within)?;
    let place = folders(within)?;
    rustix::mount::move_mount(&tree, "", CWD, &place, MoveMountFlags::MOVE_MOUNT_F_EMPTY_PATH)?;
    std::fs::create_dir("proc")?;
    match rustix::mount::mount("proc", "proc", "proc", NOTHING_SPECIAL, Some(PROC_OPTIONS)) {
        Err(Errno::INVAL) => {
            rustix::mount::mount("proc", "proc", "proc", NOTHING_SPECIAL, None::<&std::ffi::CStr>)?;
        }
        other => other?,
    }
    rustix::process::pivot_root(".", ".")?;
    // The old root lies over the new one.
    rustix::mount::unmount(".", UnmountFlags::DETACH)?;
    rustix::process::chdir("/")?;
    let fixed = MountFlags::BIND | MountFlags::RDONLY | NOTHING_SPECIAL;
    rustix::mount::mount_remount("/", fixed, c"")?;
    Ok(())
}

/// Makes the path's folders below the working folder. Returns where its last one is.
fn folders(path: &Path) -> io::Result<PathBuf> {
    let mut place = PathBuf::from(".");
    for component in path.components() {
        match component {
            Component::RootDir | Component::CurDir => {}
            Component::Normal(name) => {
                place.push(name);
                rustix::fs::mkdir(&place, Mode::from_raw_mode(0o755))?;
            }
            Component::ParentDir | Component::Prefix(_) => return Err(io::ErrorKind::InvalidInput.into()),
        }
    }
    Ok(place)
}

/// Neither devices nor programs in a tree of mounts, whatever lies in it (mount_setattr(2), Linux 5.12).
fn plain(tree: &OwnedFd) -> io::Result<()> {
    let wanted = libc::mount_attr {
        attr_set: libc::MOUNT_ATTR_NOSUID | libc::MOUNT_ATTR_NODEV | libc::MOUNT_ATTR_NOEXEC,
        attr_clr: 0,
        propagation: 0,
        userns_fd: 0,
    };
    let nothing = CString::default();
    // SAFETY: the path is empty and ends with a null, the structure is whole, and its size is told.
    let done = unsafe {
        libc::syscall(
            libc::SYS_mount_setattr,
            tree.as_raw_fd(),
            nothing.as_ptr(),
            libc::AT_EMPTY_PATH | libc::AT_RECURSIVE,
            &raw const wanted,
            size_of::<libc::mount_attr>(),
        )
    };
    match done {
        0 => Ok(()),
        _ => match io::Error::last_os_error() {
            // What is in the folder is not executed all the same: the filter has no execve.
            error if error.raw_os_error() == Some(libc::ENOSYS) => Ok(()),
            error => Err(error),
        },
    }
}
