//! Which hierarchies are mounted where (proc_pid_mountinfo(5)).

use std::collections::BTreeMap;
use std::io;
use std::path::{Path, PathBuf};

use super::{Group, Limits};

const NEEDED_V1: [&str; 5] = ["memory", "cpu", "cpuacct", "pids", "freezer"];
const NEEDED_V2: [&str; 3] = ["memory", "cpu", "pids"];

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Version {
    V1,
    V2,
}

#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Hierarchies {
    /// Controller → mount point.
    v1: BTreeMap<String, PathBuf>,
    v2: Option<PathBuf>,
    all: Vec<PathBuf>,
    v2_controllers: Vec<String>,
}

impl Hierarchies {
    pub fn detect() -> io::Result<Self> {
        let mut found = Self::parse(&std::fs::read_to_string("/proc/self/mountinfo")?);
        if let Some(root) = &found.v2 {
            let text = std::fs::read_to_string(root.join("cgroup.controllers")).unwrap_or_default();
            found.v2_controllers = text.split_ascii_whitespace().map(str::to_owned).collect();
        }
        Ok(found)
    }

    fn parse(mountinfo: &str) -> Self {
        let mut found = Self::default();
        for line in mountinfo.lines() {
            let Some((mount, file_system)) = line.split_once(" - ") else { continue };
            let Some(point) = mount.split(' ').nth(4).map(PathBuf::from) else { continue };
            let mut fields = file_system.split(' ');
            let (kind, options) = (fields.next().unwrap_or(""), fields.nth(1).unwrap_or(""));
            if !matches!(kind, "cgroup" | "cgroup2") || found.all.contains(&point) {
                continue;
            }
            found.all.push(point.clone());
            if kind == "cgroup2" {
                found.v2.get_or_insert(point);
            } else {
                for option in options.split(',') {
                    found.v1.entry(option.to_owned()).or_insert_with(|| point.clone());
                }
            }
        }
        found
    }

    /// Which version can hold limits and freeze on this host.
    #[must_use]
    pub fn version(&self) -> Option<Version> {
        if NEEDED_V1.iter().all(|name| self.v1.contains_key(*name)) {
            return Some(Version::V1);
        }
        let has = |name: &&str| self.v2_controllers.iter().any(|controller| controller == *name);
        (self.v2.is_some() && NEEDED_V2.iter().all(has)).then_some(Version::V2)
    }

    #[must_use]
    pub fn v1(&self, controller: &str) -> Option<&Path> {
        self.v1.get(controller).map(PathBuf::as_path)
    }

    #[must_use]
    pub fn v2(&self) -> Option<&Path> {
        self.v2.as_deref()
    }

    /// Every mount point, of either version.
    #[must_use]
    pub fn all(&self) -> &[PathBuf] {
        &self.all
    }

    /// The group at a path below the mount points; `None` where this host has no usable hierarchy.
    #[must_use]
    pub fn group(&self, relative: &Path) -> Option<Group> {
        Some(Group::new(self, self.version()?, relative))
    }

    /// Makes the parent group and hands the controllers down to what will be below it, then proves
    /// that a group with limits can be made there.
    pub fn prepare(&self, parent: &Path) -> io::Result<()> {
        let Some(version) = self.version() else {
            return Err(io::Error::new(io::ErrorKind::Unsupported, "no usable cgroup hierarchy is mounted"));
        };
        Group::new(self, version, parent).create()?;
        if let (Version::V2, Some(root)) = (version, &self.v2) {
            for dir in [root.clone(), root.join(parent)] {
                let enable: Vec<String> = NEEDED_V2.iter().map(|name| format!("+{name}")).collect();
                let control = dir.join("cgroup.subtree_control");
                let mut file = std::fs::OpenOptions::new().write(true).open(control)?;
                io::Write::write_all(&mut file, enable.join(" ").as_bytes())?;
            }
        }
        let probe = Group::new(self, version, &parent.join("probe"));
        probe.create()?;
        let limits = Limits { memory_bytes: Some(64 << 20), cpus: Some(1), pids: Some(64) };
        let limited = probe.set_limits(&limits);
        probe.remove()?;
        limited
    }

    /// Names of the groups directly below `parent`, in any hierarchy.
    #[must_use]
    pub fn children(&self, parent: &Path) -> Vec<String> {
        let mut names: Vec<String> = Vec::new();
        for entry in self.all.iter().filter_map(|mount| std::fs::read_dir(mount.join(parent)).ok()).flatten()
        {
            let Ok(entry) = entry else { continue };
            let is_dir = entry.file_type().is_ok_and(|kind| kind.is_dir());
            if let (true, Some(name)) = (is_dir, entry.file_name().to_str()) {
                names.push(name.to_owned());
            }
        }
        names.sort();
        names.dedup();
        names
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const V1: &str = "\
30 20 0:20 / /sys/fs/cgroup rw - tmpfs tmpfs rw,mode=755
31 30 0:21 / /sys/fs/cgroup/cpu,cpuacct rw,relatime shared:1 - cgroup cgroup rw,cpu,cpuacct
32 30 0:22 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory
33 30 0:23 / /sys/fs/cgroup/pids rw - cgroup cgroup rw,pids
34 30 0:24 / /sys/fs/cgroup/freezer rw - cgroup cgroup rw,freezer
35 30 0:25 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw
";

    #[test]
    fn a_version_1_host_is_known() {
        let found = Hierarchies::parse(V1);
        assert_eq!(found.version(), Some(Version::V1));
        assert_eq!(found.v1("cpuacct"), Some(Path::new("/sys/fs/cgroup/cpu,cpuacct")));
        assert_eq!(found.v2(), Some(Path::new("/sys/fs/cgroup/unified")));
        assert_eq!(found.all().len(), 5);
    }

    #[test]
    fn a_version_2_host_is_known_by_its_controllers() {
        let mut found =
            Hierarchies::parse("30 20 0:26 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw,nsdelegate\n");
        assert_eq!(found.version(), None);
        found.v2_controllers = ["cpuset", "cpu", "io", "memory", "pids"].map(str::to_owned).to_vec();
        assert_eq!(found.version(), Some(Version::V2));
    }

    #[test]
    fn a_host_without_any_has_none() {
        assert_eq!(Hierarchies::parse("garbage\n").version(), None);
    }
}
