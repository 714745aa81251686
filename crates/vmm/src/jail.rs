//! What a monitor gives up before it has a guest, so that a guest that took it over has little.
//!
//! - it becomes a user of its own, sees one folder of the host and no network ([`root`]), if its starter is root and
//!   says which user;
//! - no capability is left, and none can be had again (`no_new_privs`). One exception: a user of its own who
//!   is to link files of other snapshots into new ones keeps `CAP_FOWNER` where the kernel asks for it
//!   (`fs.protected_hardlinks`); the filter has none of the other calls that it is good for;
//! - system calls are filtered, thread by thread: nothing can be executed, traced, mounted or loaded, no socket
//!   but Unix ones be made, no namespace be entered, no owner, mode or attribute of a file be changed. A vCPU's thread
//!   can run its vCPU and little else;
//! - nothing can be written outside of one folder, and a user of its own can read nothing, where the kernel can enforce
//!   that (Landlock);
//! - no core dump, which would hold the guest's secrets, no locked memory, no message queue, few descriptors, no
//!   file larger than the guest's largest ([`limit_files`]).
//!
//! Forked children and scribes inherit all of it. A child stays its source's user: what could change users could
//! become anybody. So families of forks have a user each, and in a family a domain of its own keeps a child from looking
//! into its source and its siblings ([`part`]). A call that is not allowed ends the process, and says which one
//! it was on standard error. What stays open is in `THREAT-MODEL.md`.
#![allow(unsafe_code, reason = "signal handlers, namespaces and Landlock have no safe form")]

mod calls;
mod files;
mod root;

use std::collections::BTreeMap;
use std::io;
use std::path::Path;
use std::sync::OnceLock;

use rustix::process::{DumpableBehavior, Gid, Resource, Rlimit, Uid};
use rustix::thread::CapabilitySet;
use seccompiler::{BpfProgram, SeccompAction, SeccompFilter, SeccompRule, TargetArch};
use vmm_sys_util::signal::register_signal_handler;

/// Exit code after a system call that is not allowed.
const EXIT_CODE: i32 = 159;
/// Exit code after a page of guest memory was lost.
const EXIT_LOST_PAGE: i32 = 158;
/// A fork into as many children as there may be needs some hundreds, a busy vsock a thousand.
const DESCRIPTORS_MAX: u64 = 4096;
/// Beside the guest's disks and memory: its logs, the state of its devices.
const FILE_BYTES_BESIDE: u64 = 64 << 20;

/// Whom a monitor becomes. The numbers are nobody else's.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct User {
    pub uid: u32,
    pub gid: u32,
}

#[derive(Debug, thiserror::Error)]
pub enum JailError {
    #[error("the monitor cannot give up its privileges")]
    Privileges(#[source] io::Error),
    #[error("the monitor cannot leave the host's root folder")]
    Root(#[source] io::Error),
    #[error("the monitor cannot become user {uid}, group {gid}", uid = user.uid, gid = user.gid)]
    User { user: User, source: io::Error },
    #[error("the monitor's files cannot be kept to its folder")]
    Files(#[source] io::Error),
    #[error("the monitor's system calls cannot be filtered")]
    Filter(#[source] seccompiler::Error),
    #[error("the monitor's filters cannot be compiled")]
    Compile(#[source] seccompiler::BackendError),
}

/// The filter of vCPU threads; compiled before there are any.
static VCPU: OnceLock<Vec<BpfProgram>> = OnceLock::new();
/// That of a disk's thread.
static WORKER: OnceLock<Vec<BpfProgram>> = OnceLock::new();

/// For the whole process, from its only thread. `within`: all that will be read or written lies there. `user`: whom to
/// become; `None`: it stays who it is, where it is. What else it needs, `/dev/kvm` above all, it has open already.
pub fn enter(within: &Path, user: Option<User>) -> Result<(), JailError> {
    let keep = match user {
        Some(_) if links_are_protected() => CapabilitySet::FOWNER,
        _ => CapabilitySet::empty(),
    };
    if user.is_some() {
        root::leave(within).map_err(JailError::Root)?;
    }
    set_limits().map_err(|error| JailError::Privileges(error.into()))?;
    give_up_bounding_set(keep).map_err(|error| JailError::Privileges(error.into()))?;
    if let Some(user) = user {
        become_user(user).map_err(|error| JailError::User { user, source: error.into() })?;
    }
    give_up_privileges(keep).map_err(|error| JailError::Privileges(error.into()))?;
    if !files::restrict(within, user.is_some()).map_err(JailError::Files)? {
        tracing::warn!("this kernel's Landlock is too old or off: a monitor may use whatever its user may");
    }
    register_signal_handler(libc::SIGSYS, on_forbidden)
        .map_err(|error| JailError::Privileges(io::Error::from_raw_os_error(error.errno())))?;
    register_signal_handler(libc::SIGBUS, on_lost_page)
        .map_err(|error| JailError::Privileges(io::Error::from_raw_os_error(error.errno())))?;
    // Compiled now: threads that are forked off later have the same ones.
    let vcpu = vec![compile(calls::vcpu().map_err(JailError::Compile)?)?];
    // Whoever comes second finds the same there.
    let _ = VCPU.set(vcpu);
    let _ = WORKER.set(vec![compile(calls::worker().map_err(JailError::Compile)?)?]);
    let without_clone3 = SeccompFilter::new(
        BTreeMap::from([(libc::SYS_clone3, Vec::new())]),
        SeccompAction::Allow,
        // Its flags lie in memory, where no filter sees them: the C library takes clone(2) instead.
        SeccompAction::Errno(libc::ENOSYS.unsigned_abs()),
        arch(),
    );
    apply(&without_clone3.and_then(TryInto::try_into).map_err(JailError::Compile)?)?;
    apply(&compile(calls::devices().map_err(JailError::Compile)?)?)
}

/// For the calling thread, which serves a disk. Does nothing in a process that is in no jail.
pub fn enter_worker() -> Result<(), JailError> {
    WORKER.get().into_iter().flatten().try_for_each(apply)
}

/// For the calling thread, which runs a vCPU. Does nothing in a process that is in no jail.
pub fn enter_vcpu() -> Result<(), JailError> {
    VCPU.get().into_iter().flatten().try_for_each(apply)
}

/// Whether this kernel can keep a process to its folder.
#[must_use]
pub fn confines_files() -> bool {
    files::can_restrict()
}

/// For a forked child, which has its source's domain: one below it, so that it cannot look into its source's memory or
/// that of its siblings. Best effort: domains can be nested sixteen deep, and what they allow stays the same.
pub fn part(within: &Path) {
    let _ = files::restrict(within, false);
}

/// From now on no file grows beyond `bytes` and some more, the guest's largest one.
pub fn limit_files(bytes: u64) -> io::Result<()> {
    let most = bytes.saturating_add(FILE_BYTES_BESIDE);
    // The write fails instead.
    register_signal_handler(libc::SIGXFSZ, on_too_large)
        .map_err(|error| io::Error::from_raw_os_error(error.errno()))?;
    Ok(rustix::process::setrlimit(Resource::Fsize, Rlimit { current: Some(most), maximum: Some(most) })?)
}

/// Whether it takes the file's owner to link it (proc_sys_fs(5)).
fn links_are_protected() -> bool {
    std::fs::read_to_string("/proc/sys/fs/protected_hardlinks").is_ok_and(|text| text.trim() != "0")
}

fn set_limits() -> rustix::io::Result<()> {
    let set = |resource, most| {
        rustix::process::setrlimit(resource, Rlimit { current: Some(most), maximum: Some(most) })
    };
    set(Resource::Core, 0)?;
    set(Resource::Memlock, 0)?;
    set(Resource::Msgqueue, 0)?;
    let may = rustix::process::getrlimit(Resource::Nofile).maximum.unwrap_or(u64::MAX);
    set(Resource::Nofile, DESCRIPTORS_MAX.min(may))
}

fn give_up_bounding_set(keep: CapabilitySet) -> rustix::io::Result<()> {
    // An unprivileged process has none to give up, and may not touch the bounding set.
    if !rustix::thread::capabilities(None)?.effective.contains(CapabilitySet::SETPCAP) {
        return Ok(());
    }
    for capability in CapabilitySet::all().difference(keep).iter() {
        match rustix::thread::remove_capability_from_bounding_set(capability) {
            // A kernel that does not know it cannot give it either.
            Ok(()) | Err(rustix::io::Errno::INVAL) => {}
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

/// Its capabilities stay, for [`give_up_privileges`] to choose from.
fn become_user(user: User) -> rustix::io::Result<()> {
    rustix::thread::set_keep_capabilities(true)?;
    let (uid, gid) = (Uid::from_raw(user.uid), Gid::from_raw(user.gid));
    rustix::thread::set_thread_groups(&[])?;
    rustix::thread::set_thread_res_gid(gid, gid, gid)?;
    rustix::thread::set_thread_res_uid(uid, uid, uid)?;
    rustix::thread::set_keep_capabilities(false)?;
    // Otherwise its own files in procfs would be root's; there is no other process of this user.
    rustix::process::set_dumpable_behavior(DumpableBehavior::Dumpable)
}

fn give_up_privileges(keep: CapabilitySet) -> rustix::io::Result<()> {
    rustix::thread::set_no_new_privs(true)?;
    rustix::thread::clear_ambient_capability_set()?;
    let none = CapabilitySet::empty();
    let sets = rustix::thread::CapabilitySets { effective: keep, permitted: keep, inheritable: none };
    rustix::thread::set_capabilities(None, sets)
}

fn arch() -> TargetArch {
    TargetArch::x86_64
}

fn compile(rules: BTreeMap<i64, Vec<SeccompRule>>) -> Result<BpfProgram, JailError> {
    SeccompFilter::new(rules, SeccompAction::Trap, SeccompAction::Allow, arch())
        .and_then(TryInto::try_into)
        .map_err(JailError::Compile)
}

fn apply(program: &BpfProgram) -> Result<(), JailError> {
    seccompiler::apply_filter(program).map_err(JailError::Filter)
}

/// That it is handled is enough.
extern "C" fn on_too_large(_: libc::c_int, _: *mut libc::siginfo_t, _: *mut libc::c_void) {}

/// A page of guest memory is not there: the file that it is mapped from was cut off, or its disk failed.
extern "C" fn on_lost_page(_: libc::c_int, _: *mut libc::siginfo_t, _: *mut libc::c_void) {
    let message = b"a page of guest memory cannot be read: a layer's file was cut off, or its disk failed\n";
    let _ = rustix::io::write(rustix::stdio::stderr(), message);
    // SAFETY: ends the process.
    unsafe { libc::_exit(EXIT_LOST_PAGE) }
}

/// Says which call it was, and ends the process.
extern "C" fn on_forbidden(_: libc::c_int, info: *mut libc::siginfo_t, _: *mut libc::c_void) {
    /// Of `si_syscall` in `siginfo_t` on x86-64.
    const CALL_OFFSET: usize = 24;
    let call = info.cast::<u8>().wrapping_add(CALL_OFFSET).cast::<i32>();
    // SAFETY: the kernel passes a whole structure, which is longer than this.
    let call = unsafe { call.read_unaligned() };
    let mut digits = [b' '; 6];
    let mut rest = call.unsigned_abs();
    for digit in digits.iter_mut().rev() {
        *digit = b"0123456789"[(rest % 10) as usize];
        rest /= 10;
    }
    // In a signal handler: no lock, no allocation. If nobody reads it, nobody misses it.
    let stderr = rustix::stdio::stderr();
    let _ = rustix::io::write(stderr, b"the monitor made a system call that it may not make: number ");
    let _ = rustix::io::write(stderr, &digits);
    let _ = rustix::io::write(stderr, b"\n");
    // SAFETY: ends the process.
    unsafe { libc::_exit(EXIT_CODE) }
}
