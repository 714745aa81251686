//! Control groups, version 1 and 2: limits, freezing, killing, counting (cgroups(7),
//! Documentation/admin-guide/cgroup-v1 and cgroup-v2.rst of the kernel).
//!
//! A [`Group`] is one relative path in every mounted hierarchy. Version 1 is used where its memory,
//! cpu, cpuacct, pids and freezer hierarchies are mounted, else version 2 where it has the
//! controllers; else there is none and the caller falls back to signals.

mod mounts;

use std::io;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use crate::process;

pub use mounts::{Hierarchies, Version};

const PERIOD_US: u64 = 100_000;
/// How long the kernel may take to bring a group to the asked state.
const SETTLE_MAX: Duration = Duration::from_secs(10);
const SETTLE_STEP: Duration = Duration::from_millis(1);
const PROCS_MAX: usize = 1 << 17;

/// What a group may use. `None`: not limited.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Limits {
    pub memory_bytes: Option<u64>,
    pub cpus: Option<u32>,
    pub pids: Option<u32>,
}

/// One group. Making the value makes nothing on the host.
#[derive(Debug, Clone)]
pub struct Group {
    version: Version,
    relative: PathBuf,
    hierarchies: Hierarchies,
}

impl Group {
    pub(crate) fn new(hierarchies: &Hierarchies, version: Version, relative: &Path) -> Self {
        Self { version, relative: relative.to_owned(), hierarchies: hierarchies.clone() }
    }

    fn dir(&self, controller: &str) -> io::Result<PathBuf> {
        let mount = match self.version {
            Version::V1 => self.hierarchies.v1(controller),
            Version::V2 => self.hierarchies.v2(),
        };
        let mount = mount.ok_or_else(|| {
            io::Error::new(io::ErrorKind::NotFound, format!("no {controller} hierarchy is mounted"))
        })?;
        Ok(mount.join(&self.relative))
    }

    fn read(&self, controller: &str, file: &str) -> io::Result<String> {
        std::fs::read_to_string(self.dir(controller)?.join(file))
    }

    fn write(&self, controller: &str, file: &str, value: &str) -> io::Result<()> {
        let path = self.dir(controller)?.join(file);
        // Not `fs::write`: a control file must never be created as a plain one.
        let mut file = std::fs::OpenOptions::new().write(true).open(path)?;
        io::Write::write_all(&mut file, value.as_bytes())
    }

    /// Makes the group in every hierarchy that is used. One that exists is no error.
    pub fn create(&self) -> io::Result<()> {
        match self.version {
            Version::V1 => ["memory", "cpu", "cpuacct", "pids", "freezer"]
                .into_iter()
                .try_for_each(|controller| std::fs::create_dir_all(self.dir(controller)?)),
            Version::V2 => std::fs::create_dir_all(self.dir("")?),
        }
    }

    #[must_use]
    pub fn exists(&self) -> bool {
        self.dir("freezer").is_ok_and(|dir| dir.is_dir())
    }

    pub fn add(&self, pid: u32) -> io::Result<()> {
        let pid = pid.to_string();
        match self.version {
            Version::V1 => ["memory", "cpu", "cpuacct", "pids", "freezer"]
                .into_iter()
                .try_for_each(|controller| self.write(controller, "cgroup.procs", &pid)),
            Version::V2 => self.write("", "cgroup.procs", &pid),
        }
    }

    pub fn set_limits(&self, limits: &Limits) -> io::Result<()> {
        let none = match self.version {
            Version::V1 => "-1",
            Version::V2 => "max",
        };
        let text = |value: Option<u64>| value.map_or_else(|| none.to_owned(), |value| value.to_string());
        let quota = text(limits.cpus.map(|cpus| u64::from(cpus) * PERIOD_US));
        let pids = limits.pids.map_or_else(|| "max".to_owned(), |pids| pids.to_string());
        self.set_memory(limits.memory_bytes)?;
        match self.version {
            Version::V1 => {
                self.write("cpu", "cpu.cfs_period_us", &PERIOD_US.to_string())?;
                self.write("cpu", "cpu.cfs_quota_us", &quota)?;
                self.write("pids", "pids.max", &pids)
            }
            Version::V2 => {
                self.write("", "cpu.max", &format!("{quota} {PERIOD_US}"))?;
                self.write("", "pids.max", &pids)
            }
        }
    }

    /// The memory limit alone; `None` lifts it.
    pub fn set_memory(&self, bytes: Option<u64>) -> io::Result<()> {
        match (self.version, bytes) {
            (Version::V1, bytes) => {
                let text = bytes.map_or_else(|| "-1".to_owned(), |bytes| bytes.to_string());
                self.write("memory", "memory.limit_in_bytes", &text)
            }
            (Version::V2, bytes) => {
                let text = bytes.map_or_else(|| "max".to_owned(), |bytes| bytes.to_string());
                self.write("", "memory.max", &text)
            }
        }
    }

    /// Ids of all processes in the group, without the kernel's own threads.
    pub fn procs(&self) -> io::Result<Vec<u32>> {
        let text = self.read("freezer", "cgroup.procs")?;
        let pids = text.lines().take(PROCS_MAX).filter_map(|line| line.trim().parse().ok());
        Ok(pids.filter(|pid| !process::is_kernel_thread(*pid)).collect())
    }

    /// Returns when no process of the group runs any more.
    pub fn freeze(&self) -> io::Result<()> {
        self.settle(true)
    }

    pub fn thaw(&self) -> io::Result<()> {
        self.settle(false)
    }

    fn settle(&self, frozen: bool) -> io::Result<()> {
        let until = Instant::now() + SETTLE_MAX;
        loop {
            match (self.version, frozen) {
                // Written again in each round: v1 can stay in FREEZING until asked anew.
                (Version::V1, true) => self.write("freezer", "freezer.state", "FROZEN")?,
                (Version::V1, false) => self.write("freezer", "freezer.state", "THAWED")?,
                (Version::V2, true) => self.write("", "cgroup.freeze", "1")?,
                (Version::V2, false) => self.write("", "cgroup.freeze", "0")?,
            }
            if self.is_frozen()? == frozen {
                return Ok(());
            }
            if Instant::now() > until {
                let wanted = if frozen { "freeze" } else { "thaw" };
                return Err(io::Error::new(
                    io::ErrorKind::TimedOut,
                    format!("the kernel did not {wanted} it within {} s", SETTLE_MAX.as_secs()),
                ));
            }
            std::thread::sleep(SETTLE_STEP);
        }
    }

    pub fn is_frozen(&self) -> io::Result<bool> {
        Ok(match self.version {
            Version::V1 => self.read("freezer", "freezer.state")?.trim() == "FROZEN",
            Version::V2 => value_of(&self.read("", "cgroup.events")?, "frozen") == Some(1),
        })
    }

    /// CPU time used by the group so far, microseconds.
    pub fn cpu_us(&self) -> io::Result<u64> {
        let parse = |text: Option<u64>| text.ok_or_else(|| io::Error::from(io::ErrorKind::InvalidData));
        match self.version {
            Version::V1 => {
                let ns = self.read("cpuacct", "cpuacct.usage")?;
                parse(ns.trim().parse::<u64>().ok().map(|ns| ns / 1000))
            }
            Version::V2 => parse(value_of(&self.read("", "cpu.stat")?, "usage_usec")),
        }
    }

    /// In how many periods the group was held back for its limit of CPU time.
    pub fn throttled(&self) -> io::Result<u64> {
        Ok(value_of(&self.read("cpu", "cpu.stat")?, "nr_throttled").unwrap_or(0))
    }

    /// Memory that the group holds, without page cache that the kernel can drop.
    pub fn memory_bytes(&self) -> io::Result<u64> {
        let (controller, usage, cache) = match self.version {
            Version::V1 => ("memory", "memory.usage_in_bytes", "total_inactive_file"),
            Version::V2 => ("", "memory.current", "inactive_file"),
        };
        let usage: u64 = self.read(controller, usage)?.trim().parse().map_err(io::Error::other)?;
        let cache = value_of(&self.read(controller, "memory.stat")?, cache).unwrap_or(0);
        Ok(usage.saturating_sub(cache))
    }

    /// How often the kernel killed a process of the group for its memory limit.
    pub fn oom_kills(&self) -> io::Result<u64> {
        let text = match self.version {
            Version::V1 => self.read("memory", "memory.oom_control")?,
            Version::V2 => self.read("", "memory.events")?,
        };
        Ok(value_of(&text, "oom_kill").unwrap_or(0))
    }

    /// How often the kernel refused the group a process or thread.
    pub fn pids_refused(&self) -> io::Result<u64> {
        Ok(value_of(&self.read("pids", "pids.events")?, "max").unwrap_or(0))
    }

    /// Removes the group from every hierarchy. The caller ended its processes before; the kernel may
    /// take a moment to let go of them.
    pub fn remove(&self) -> io::Result<()> {
        let until = Instant::now() + SETTLE_MAX;
        for mount in self.hierarchies.all() {
            let dir = mount.join(&self.relative);
            // Of a VM whose monitor has a group of its own by now: nothing but its end ends them.
            let held = std::fs::read_to_string(dir.join("cgroup.procs")).unwrap_or_default();
            let held = held.lines().filter(|pid| pid.trim().parse().is_ok_and(process::is_kernel_thread));
            for pid in held {
                // Refused: then the group is said to be busy.
                let _ = std::fs::write(mount.join("cgroup.procs"), pid);
            }
            while let Err(error) = std::fs::remove_dir(&dir) {
                match error.raw_os_error().map(rustix::io::Errno::from_raw_os_error) {
                    Some(rustix::io::Errno::NOENT) => break,
                    Some(rustix::io::Errno::BUSY) if Instant::now() < until => {
                        std::thread::sleep(SETTLE_STEP)
                    }
                    _ => return Err(error),
                }
            }
        }
        Ok(())
    }
}

/// `name value` lines.
fn value_of(text: &str, name: &str) -> Option<u64> {
    text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' ')?.trim().parse().ok())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::process::{Child, Command, Stdio};

    fn sleeper() -> Child {
        Command::new("cat").stdin(Stdio::piped()).spawn().unwrap()
    }

    fn lifecycle(group: &Group) {
        group.create().unwrap();
        let mut child = sleeper();
        group.add(child.id()).unwrap();
        assert_eq!(group.procs().unwrap(), vec![child.id()]);
        group.freeze().unwrap();
        assert!(group.is_frozen().unwrap());
        group.freeze().unwrap();
        group.thaw().unwrap();
        assert!(!group.is_frozen().unwrap());
        child.kill().unwrap();
        child.wait().unwrap();
        group.remove().unwrap();
        assert!(!group.exists());
        group.remove().unwrap();
    }

    fn relative(name: &str) -> PathBuf {
        PathBuf::from(format!("dormouse-sys-{name}-{}", std::process::id()))
    }

    #[test]
    fn the_hosts_own_groups_work() {
        let hierarchies = Hierarchies::detect().unwrap();
        let Some(group) = hierarchies.group(&relative("own")) else {
            assert!(hierarchies.version().is_none());
            return;
        };
        lifecycle(&group);
        group.create().unwrap();
        let limits = Limits { memory_bytes: Some(64 << 20), cpus: Some(1), pids: Some(100) };
        group.set_limits(&limits).unwrap();
        assert!(group.cpu_us().is_ok());
        assert!(group.memory_bytes().is_ok());
        assert_eq!(group.oom_kills().unwrap(), 0);
        assert_eq!(group.pids_refused().unwrap(), 0);
        group.set_limits(&Limits::default()).unwrap();
        group.remove().unwrap();
    }

    /// Freezing needs no controller: version 2 can be tested on a host that mounts it beside version 1.
    #[test]
    fn the_unified_hierarchy_freezes() {
        let hierarchies = Hierarchies::detect().unwrap();
        if hierarchies.v2().is_some() {
            lifecycle(&Group::new(&hierarchies, Version::V2, &relative("v2")));
        } else {
            assert!(!std::path::Path::new("/sys/fs/cgroup/cgroup.controllers").exists());
        }
    }

    #[test]
    fn values_are_found_by_their_whole_name() {
        let text = "oom_kill_disable 0\nunder_oom 0\noom_kill 3\n";
        assert_eq!(value_of(text, "oom_kill"), Some(3));
        assert_eq!(value_of(text, "oom"), None);
    }
}
