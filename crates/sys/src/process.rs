//! Processes by id, told apart over reuse: identity, death, signals, descendants.

use std::collections::BTreeMap;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::io::Errno;
use rustix::process::{Pid, PidfdFlags, Signal};

/// How long a process may take to stop: one in an uninterruptible wait takes as long as that.
const STOP_MAX: Duration = Duration::from_secs(10);
const STOP_STEP: Duration = Duration::from_millis(1);

/// A process and when it started: a reused process id is not the same process.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Identity {
    pub pid: u32,
    /// Clock ticks since boot (field 22 of proc_pid_stat(5)).
    pub start_ticks: u64,
}

impl Identity {
    /// `None`: there is no such process.
    #[must_use]
    pub fn of(pid: u32) -> Option<Self> {
        Some(Self { pid, start_ticks: stat(pid)?.start_ticks })
    }

    /// A handle of this very process; `None` when it has ended.
    #[must_use]
    pub fn open(&self) -> Option<PidFd> {
        let handle = PidFd::open(self.pid).ok()?;
        // Read after the handle was opened: from here on the id cannot change its meaning unseen.
        (Self::of(self.pid) == Some(*self) && !handle.has_ended()).then_some(handle)
    }

    #[must_use]
    pub fn is_alive(&self) -> bool {
        self.open().is_some()
    }
}

/// pidfd_open(2): readable once the process has ended, reaped or not.
#[derive(Debug)]
pub struct PidFd(OwnedFd);

impl PidFd {
    pub fn open(pid: u32) -> io::Result<Self> {
        let pid = to_pid(pid).ok_or_else(|| io::Error::from(io::ErrorKind::InvalidInput))?;
        Ok(Self(rustix::process::pidfd_open(pid, PidfdFlags::empty())?))
    }

    /// SIGKILL; a process that has ended is no error.
    pub fn kill(&self) -> io::Result<()> {
        match rustix::process::pidfd_send_signal(&self.0, Signal::KILL) {
            Ok(()) | Err(Errno::SRCH) => Ok(()),
            Err(error) => Err(error.into()),
        }
    }

    #[must_use]
    pub fn has_ended(&self) -> bool {
        matches!(self.wait(Duration::ZERO), Ok(true))
    }

    /// Waits for the end; false when it did not come in time.
    pub fn wait(&self, timeout: Duration) -> io::Result<bool> {
        let until = Instant::now() + timeout;
        loop {
            let left = until.saturating_duration_since(Instant::now());
            let left = Timespec {
                tv_sec: i64::try_from(left.as_secs()).unwrap_or(i64::MAX),
                tv_nsec: left.subsec_nanos().into(),
            };
            let mut polled = [PollFd::new(&self.0, PollFlags::IN)];
            match rustix::event::poll(&mut polled, Some(&left)) {
                Err(Errno::INTR) => {}
                other => return Ok(other? > 0),
            }
        }
    }
}

impl AsFd for PidFd {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

impl AsRawFd for PidFd {
    fn as_raw_fd(&self) -> RawFd {
        self.0.as_raw_fd()
    }
}

struct Stat {
    parent: u32,
    flags: u32,
    start_ticks: u64,
}

fn stat(pid: u32) -> Option<Stat> {
    parse_stat(&std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?)
}

/// Field 2, the name, is in parentheses and may itself hold spaces and parentheses.
fn parse_stat(text: &str) -> Option<Stat> {
    let mut fields = text.rsplit_once(')')?.1.split_ascii_whitespace();
    let parent = fields.nth(1)?.parse().ok()?;
    let flags = fields.nth(4)?.parse().ok()?;
    let start_ticks = fields.nth(12)?.parse().ok()?;
    Some(Stat { parent, flags, start_ticks })
}

fn to_pid(pid: u32) -> Option<Pid> {
    Pid::from_raw(i32::try_from(pid).ok()?)
}

/// Whether it is the kernel's own: it takes no signal. KVM makes one for each VM and puts it into the groups of the
/// process that asked.
#[must_use]
pub fn is_kernel_thread(pid: u32) -> bool {
    const PF_KTHREAD: u32 = 0x0020_0000;
    stat(pid).is_some_and(|stat| stat.flags & PF_KTHREAD != 0)
}

/// `roots` and all their descendants, parents before children. One pass over `/proc`.
#[must_use]
pub fn tree(roots: &[u32]) -> Vec<u32> {
    let mut children: BTreeMap<u32, Vec<u32>> = BTreeMap::new();
    for pid in pids() {
        if let Some(stat) = stat(pid) {
            children.entry(stat.parent).or_default().push(pid);
        }
    }
    let mut found: Vec<u32> = Vec::new();
    let mut next: Vec<u32> = roots.to_vec();
    while let Some(pid) = next.pop() {
        if found.contains(&pid) {
            continue;
        }
        found.push(pid);
        next.extend(children.get(&pid).into_iter().flatten());
    }
    found
}

/// All process ids there are now.
#[must_use]
pub fn pids() -> Vec<u32> {
    let Ok(entries) = std::fs::read_dir("/proc") else { return Vec::new() };
    entries.flatten().filter_map(|entry| entry.file_name().to_str()?.parse().ok()).collect()
}

/// The arguments that a process was started with; empty when it has ended.
#[must_use]
pub fn arguments(pid: u32) -> Vec<String> {
    let bytes = std::fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
    bytes
        .split(|byte| *byte == 0)
        .filter(|part| !part.is_empty())
        .map(|part| String::from_utf8_lossy(part).into_owned())
        .collect()
}

/// True when no thread of the process runs until a signal says so (states `T`, `t`), or it has ended.
#[must_use]
pub fn is_stopped(pid: u32) -> bool {
    let Ok(tasks) = std::fs::read_dir(format!("/proc/{pid}/task")) else { return true };
    tasks.flatten().all(|task| {
        let text = std::fs::read_to_string(task.path().join("stat")).unwrap_or_default();
        text.rsplit_once(") ").is_none_or(|(_, rest)| rest.starts_with(['T', 't', 'Z', 'X']))
    })
}

/// CPU time of the processes so far, microseconds (user and system, at the kernel's tick of 10 ms).
#[must_use]
pub fn cpu_us(pids: &[u32]) -> u64 {
    let ticks = |pid: &u32| -> Option<u64> {
        let text = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
        let mut fields = text.rsplit_once(')')?.1.split_ascii_whitespace();
        let user: u64 = fields.nth(11)?.parse().ok()?;
        let system: u64 = fields.next()?.parse().ok()?;
        Some(user + system)
    };
    let us_per_tick = 1_000_000 / rustix::param::clock_ticks_per_second().max(1);
    pids.iter().filter_map(ticks).sum::<u64>() * us_per_tick
}

/// Resident memory of the processes, bytes; shared pages count for each.
#[must_use]
pub fn resident_bytes(pids: &[u32]) -> u64 {
    let pages = |pid: &u32| -> Option<u64> {
        let text = std::fs::read_to_string(format!("/proc/{pid}/statm")).ok()?;
        text.split_ascii_whitespace().nth(1)?.parse().ok()
    };
    let page = u64::try_from(rustix::param::page_size()).unwrap_or(4096);
    pids.iter().filter_map(pages).sum::<u64>() * page
}

/// Sends a stop, continue or other signal; processes that have ended are no error.
fn signal(pids: &[u32], signal: Signal) -> io::Result<()> {
    for pid in pids.iter().copied().filter_map(to_pid) {
        match rustix::process::kill_process(pid, signal) {
            Ok(()) | Err(Errno::SRCH) => {}
            Err(error) => return Err(error.into()),
        }
    }
    Ok(())
}

/// SIGSTOP to each, in order; returns when none of them runs any more.
pub fn stop(pids: &[u32]) -> io::Result<()> {
    signal(pids, Signal::STOP)?;
    let until = Instant::now() + STOP_MAX;
    while !pids.iter().all(|pid| is_stopped(*pid)) {
        if Instant::now() > until {
            let why = format!("a process did not stop within {} s", STOP_MAX.as_secs());
            return Err(io::Error::new(io::ErrorKind::TimedOut, why));
        }
        std::thread::sleep(STOP_STEP);
    }
    Ok(())
}

/// SIGCONT to each, in order.
pub fn resume(pids: &[u32]) -> io::Result<()> {
    signal(pids, Signal::CONT)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::process::{Command, Stdio};

    #[test]
    fn a_process_is_found_stopped_killed_and_seen_to_end() {
        let mut child = Command::new("cat").stdin(Stdio::piped()).spawn().unwrap();
        let identity = Identity::of(child.id()).unwrap();
        assert!(identity.is_alive());
        assert!(tree(&[std::process::id()]).contains(&child.id()));
        stop(&[child.id()]).unwrap();
        assert!(is_stopped(child.id()));
        resume(&[child.id()]).unwrap();
        let handle = identity.open().unwrap();
        assert!(!handle.has_ended());
        handle.kill().unwrap();
        assert!(handle.wait(Duration::from_secs(30)).unwrap());
        // Ended but not reaped: its id still exists, it does not count as alive.
        assert!(!identity.is_alive());
        child.wait().unwrap();
    }

    #[test]
    fn another_start_time_is_another_process() {
        let me = Identity::of(std::process::id()).unwrap();
        assert!(me.is_alive());
        assert!(!Identity { start_ticks: me.start_ticks + 1, ..me }.is_alive());
    }

    #[test]
    fn a_kernel_thread_is_told_from_a_process() {
        assert!(!is_kernel_thread(std::process::id()));
        // `kthreadd`, unless this is a process namespace of its own.
        if std::fs::read_to_string("/proc/2/comm").is_ok_and(|name| name.trim() == "kthreadd") {
            assert!(is_kernel_thread(2));
        }
    }

    #[test]
    fn names_with_parentheses_do_not_confuse() {
        let text = "7 (a) (b c) S 3 7 7 0 -1 0 0 0 0 0 0 0 0 0 20 0 1 0 4711 0";
        let stat = parse_stat(text).unwrap();
        assert_eq!((stat.parent, stat.start_ticks), (3, 4711));
        assert!(parse_stat("garbage").is_none());
    }
}
