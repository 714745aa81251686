//! Processes that a monitor forks off: scribes, and the monitors of children.
#![allow(unsafe_code, reason = "fork(2), waitpid(2) and leaving without destructors have no safe form")]

use std::fs::File;
use std::io::{self, Read};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};

use dormouse_sys::fds::Pipe;
use rustix::process::{Pid, PidfdFlags, WaitIdOptions};
use vmm_sys_util::eventfd::EventFd;

/// A report that is longer is cut off, and then is none.
const REPORT_BYTES_MAX: u64 = 64 << 10;

/// What the forking thread becomes.
pub enum Side {
    Parent(Forked),
    /// With the end that the report goes to.
    Child(OwnedFd),
}

/// A process that was forked off, from its parent's side.
#[derive(Debug)]
pub struct Forked {
    pub pid: Pid,
    handle: OwnedFd,
    report: OwnedFd,
}

/// Forks, with a pipe for the child's report.
pub fn fork() -> io::Result<Side> {
    let pipe = Pipe::new()?;
    match split()? {
        None => Ok(Side::Child(pipe.write)),
        Some(pid) => Ok(Side::Parent(Forked::open(pid, pipe.read)?)),
    }
}

/// fork(2); `None`: this is the child. All other threads of this process must be parked and hold no lock: the child has
/// only this one.
pub fn split() -> io::Result<Option<Pid>> {
    // SAFETY: what the child touches afterwards is whole: other threads are parked outside of any lock (the
    // caller's promise), and the C library takes its own locks around the fork.
    match unsafe { libc::fork() } {
        -1 => Err(io::Error::last_os_error()),
        pid => Ok(Pid::from_raw(pid)),
    }
}

impl Forked {
    pub fn open(pid: Pid, report: OwnedFd) -> io::Result<Self> {
        let handle = rustix::process::pidfd_open(pid, PidfdFlags::empty())?;
        Ok(Self { pid, handle, report })
    }

    /// Readable when the report is there, or will never be.
    pub fn report_fd(&self) -> BorrowedFd<'_> {
        self.report.as_fd()
    }

    /// Readable when the process has ended.
    pub fn handle(&self) -> BorrowedFd<'_> {
        self.handle.as_fd()
    }

    /// What it reported: see [`read_report`].
    pub fn report(&self) -> io::Result<Vec<u8>> {
        read_report(self.report.as_fd())
    }

    /// Takes its exit status, so that no zombie stays. True: it had ended.
    pub fn reap(&self) -> bool {
        let id = rustix::process::WaitId::PidFd(self.handle.as_fd());
        let options = WaitIdOptions::EXITED | WaitIdOptions::NOHANG;
        !matches!(rustix::process::waitid(id, options), Ok(None))
    }

    /// Ends it.
    pub fn kill(&self) {
        // It may have ended by itself.
        let _ = rustix::process::pidfd_send_signal(&self.handle, rustix::process::Signal::KILL);
    }
}

/// Everything that a process wrote before it closed its end. Waits for that.
pub fn read_report(report: BorrowedFd<'_>) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    File::from(report.try_clone_to_owned()?).take(REPORT_BYTES_MAX).read_to_end(&mut bytes)?;
    Ok(bytes)
}

/// Lets orphans of this process's descendants become its children: it takes their exit status.
pub fn adopt_orphans() {
    // A kernel that refuses leaves them to process 1.
    let _ = rustix::process::set_child_subreaper(Some(rustix::process::getpid()));
}

/// The event's descriptor as the standard library has it.
pub fn borrowed(event: &EventFd) -> BorrowedFd<'_> {
    // SAFETY: the descriptor is open as long as `event` lives, and so is what is returned.
    unsafe { BorrowedFd::borrow_raw(event.as_raw_fd()) }
}

/// Ends a forked process at once: nothing of what it has in common with its parent is torn down.
pub fn leave(code: i32) -> ! {
    // SAFETY: ends the process; nothing runs afterwards.
    unsafe { libc::_exit(code) }
}

/// Closes everything but `keep` and the standard three. For a process that ends by [`leave`]: the owners of what
/// is closed here must never be dropped.
pub fn close_all_but(keep: &[BorrowedFd<'_>]) {
    let mut keep: Vec<u32> = keep.iter().filter_map(|fd| u32::try_from(fd.as_raw_fd()).ok()).collect();
    keep.extend([0, 1, 2]);
    keep.sort_unstable();
    keep.dedup();
    let mut first = 0;
    for fd in keep {
        close_range(first, fd.checked_sub(1));
        first = fd + 1;
    }
    close_range(first, Some(u32::MAX));
}

fn close_range(first: u32, last: Option<u32>) {
    let Some(last) = last.filter(|last| *last >= first) else { return };
    // SAFETY: closes descriptors by number; the caller promises that nobody uses or closes them again.
    let _ = unsafe { libc::syscall(libc::SYS_close_range, first, last, 0) };
}
