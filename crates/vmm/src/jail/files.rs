//! What the monitor may read and write: one folder with all below it, and read procfs (landlock(7)).

use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

/// Rights of linux/landlock.h.
const EXECUTE: u64 = 1 << 0;
const WRITE_FILE: u64 = 1 << 1;
const READ_FILE: u64 = 1 << 2;
const READ_DIR: u64 = 1 << 3;
const REMOVE_DIR: u64 = 1 << 4;
const REMOVE_FILE: u64 = 1 << 5;
const MAKE_CHAR: u64 = 1 << 6;
const MAKE_DIR: u64 = 1 << 7;
const MAKE_REG: u64 = 1 << 8;
const MAKE_SOCK: u64 = 1 << 9;
const MAKE_FIFO: u64 = 1 << 10;
const MAKE_BLOCK: u64 = 1 << 11;
const MAKE_SYM: u64 = 1 << 12;
/// To link and rename from one folder into another: since version 2, Linux 5.19. Without it that is always denied.
const REFER: u64 = 1 << 13;
/// Since version 3, Linux 6.2.
const TRUNCATE: u64 = 1 << 14;

const FORBIDDEN: u64 = EXECUTE | MAKE_CHAR | MAKE_BLOCK | MAKE_FIFO | MAKE_SYM | MAKE_DIR | REMOVE_DIR;
const READ: u64 = READ_FILE | READ_DIR;
const WITHIN: u64 = WRITE_FILE | REMOVE_FILE | MAKE_REG | MAKE_SOCK;

const VERSION_FLAG: u32 = 1;
const RULE_PATH_BENEATH: u32 = 1;

/// `struct landlock_path_beneath_attr`.
#[repr(C, packed)]
struct PathBeneath {
    allowed: u64,
    parent: RawFd,
}

/// Linux 5.19; before, links from folder to folder are denied.
const VERSION_MIN: i64 = 2;

pub fn can_restrict() -> bool {
    version() >= VERSION_MIN
}

fn version() -> i64 {
    // SAFETY: with this flag the call takes no structure, and only tells a version.
    unsafe { libc::syscall(libc::SYS_landlock_create_ruleset, 0_usize, 0_usize, VERSION_FLAG) }
}

/// For the calling thread and all that come from it. False: this kernel cannot, or links from folder to folder would be
/// denied with it.
/// `reading`: that is restricted, too.
pub fn restrict(within: &Path, reading: bool) -> io::Result<bool> {
    let version = version();
    if version < VERSION_MIN {
        return Ok(false);
    }
    let optional = REFER | if version >= 3 { TRUNCATE } else { 0 };
    let within_allowed = WITHIN | optional | if reading { READ } else { 0 };
    let handled = FORBIDDEN | within_allowed;
    // SAFETY: the structure of the first version, one number, with its size told.
    let rules = unsafe {
        libc::syscall(libc::SYS_landlock_create_ruleset, &raw const handled, size_of::<u64>(), 0_u32)
    };
    let rules = RawFd::try_from(rules).ok().filter(|fd| *fd >= 0).ok_or_else(io::Error::last_os_error)?;
    // SAFETY: the kernel made it just now, and nobody else has it.
    let rules = unsafe { OwnedFd::from_raw_fd(rules) };
    allow(&rules, within, within_allowed)?;
    if reading {
        allow(&rules, Path::new("/proc"), READ)?;
    }
    // SAFETY: takes numbers only.
    let done = unsafe { libc::syscall(libc::SYS_landlock_restrict_self, rules.as_raw_fd(), 0_u32) };
    if done == 0 { Ok(true) } else { Err(io::Error::last_os_error()) }
}

fn allow(rules: &OwnedFd, path: &Path, allowed: u64) -> io::Result<()> {
    let parent = File::options().read(true).custom_flags(libc::O_PATH | libc::O_CLOEXEC).open(path)?;
    let rule = PathBeneath { allowed, parent: parent.as_raw_fd() };
    // SAFETY: the kernel's structure for this kind of rule, alive over the call.
    let done = unsafe {
        libc::syscall(
            libc::SYS_landlock_add_rule,
            rules.as_raw_fd(),
            RULE_PATH_BENEATH,
            &raw const rule,
            0_u32,
        )
    };
    if done == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}
