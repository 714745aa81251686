//! What a monitor gives up before it has a guest, so that a guest that took it over has little.
//!
//! - no capability is left, whatever user it runs as, and none can be had again (`no_new_privs`);
//! - system calls are filtered, thread by thread: nothing can be executed, traced, mounted or loaded, no socket
//!   but Unix ones be made, no namespace be entered. A vCPU's thread can run its vCPU and little else;
//! - nothing can be written outside of one folder, where the kernel can enforce that (Landlock);
//! - no core dump: it would hold the guest's secrets.
//!
//! Forked children and scribes inherit all of it. A call that is not allowed ends the process, and says which one it
//! was on standard error. What stays open is in `THREAT-MODEL.md`.
#![allow(unsafe_code, reason = "signal handlers and Landlock have no safe form")]

mod calls;
mod files;

use std::collections::BTreeMap;
use std::io;
use std::path::Path;
use std::sync::OnceLock;

use rustix::process::{Resource, Rlimit};
use rustix::thread::CapabilitySet;
use seccompiler::{BpfProgram, SeccompAction, SeccompFilter, SeccompRule, TargetArch};
use vmm_sys_util::signal::register_signal_handler;

/// Exit code after a system call that is not allowed.
const EXIT_CODE: i32 = 159;
/// Exit code after a page of guest memory was lost.
const EXIT_LOST_PAGE: i32 = 158;

#[derive(Debug, thiserror::Error)]
pub enum JailError {
    #[error("the monitor cannot give up its privileges")]
    Privileges(#[source] io::Error),
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

/// For the whole process, from its only thread. `within`: all that will be written lies there.
pub fn enter(within: &Path) -> Result<(), JailError> {
    give_up_privileges().map_err(|error| JailError::Privileges(error.into()))?;
    if !files::restrict(within).map_err(JailError::Files)? {
        tracing::warn!("this kernel's Landlock is too old or off: a monitor may write wherever its user may");
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

fn give_up_privileges() -> rustix::io::Result<()> {
    rustix::thread::set_no_new_privs(true)?;
    // An unprivileged process has none to give up, and may not touch the bounding set.
    if rustix::thread::capabilities(None)?.effective.contains(CapabilitySet::SETPCAP) {
        for capability in CapabilitySet::all().iter() {
            match rustix::thread::remove_capability_from_bounding_set(capability) {
                // A kernel that does not know it cannot give it either.
                Ok(()) | Err(rustix::io::Errno::INVAL) => {}
                Err(error) => return Err(error),
            }
        }
    }
    rustix::thread::clear_ambient_capability_set()?;
    let none = CapabilitySet::empty();
    let sets = rustix::thread::CapabilitySets { effective: none, permitted: none, inheritable: none };
    rustix::thread::set_capabilities(None, sets)?;
    rustix::process::setrlimit(Resource::Core, Rlimit { current: Some(0), maximum: Some(0) })
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
