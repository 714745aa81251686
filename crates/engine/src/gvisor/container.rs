//! One runsc container on the host: its folder, processes and group, and how it ends.
//!
//! Everything here is found again from the folder alone, so that a new daemon can go on or clean up.
//! All calls block.

use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

use dormouse_sys::cgroup::{Group, Hierarchies, Limits};
use dormouse_sys::process::{self, Identity, PidFd};
use dormouse_types::{RuntimeId, Shape};
use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::layout::Layout;
use super::seal::Seal;
use crate::common::{identity, io_failure};
use crate::error::Failure;
use crate::model::Usage;

/// What the sandbox's own processes (sentry, gofer, stubs) need beside what it was promised.
const MEMORY_OVERHEAD_BYTES: u64 = 96 << 20;
/// Host processes and threads per process inside, and those that are always there. Only a guard for
/// the host: the agent keeps the promised limit inside, where reaching it is an error and not the end.
const PIDS_PER_PROCESS: u32 = 4;
const PIDS_OVERHEAD: u32 = 256;
const KILL_WAIT: Duration = Duration::from_secs(20);
/// A checkpoint that was under way when the daemon died is waited for.
const COMMAND_WAIT: Duration = Duration::from_secs(120);
const KILL_ROUNDS_MAX: usize = 20;
/// runsc's descriptors of the sandbox's memory and file changes are among its first.
const DESCRIPTORS_SEEN_MAX: usize = 64;
/// As runsc names them.
const FILE_STORE: &str = "runsc-filestore";
const MEMORY: &str = "runsc-memory";

/// What is written down about a container.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(super) struct Meta {
    pub shape: Shape,
    pub rootfs: PathBuf,
    pub agent_digest: String,
    /// Inodes of the pipes of its standard input and output.
    pub pipes: [u64; 2],
    /// `None`: it was not created to the end.
    pub processes: Option<Processes>,
    /// A boot or a restore came to its end.
    pub started: bool,
}

#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
pub(super) struct Processes {
    #[serde(with = "identity")]
    pub sandbox: Identity,
    #[serde(with = "identity")]
    pub gofer: Identity,
}

/// A container's folder and group; whether it lives is asked of the kernel each time.
#[derive(Debug, Clone)]
pub(super) struct Container {
    pub id: RuntimeId,
    pub dir: PathBuf,
    pub group_path: PathBuf,
    group: Option<Group>,
}

impl Container {
    pub fn new(layout: &Layout, hierarchies: &Hierarchies, id: &RuntimeId) -> Self {
        let group_path = layout.group(id);
        Self { id: id.clone(), dir: layout.container(id), group: hierarchies.group(&group_path), group_path }
    }

    pub fn has_group(&self) -> bool {
        self.group.is_some()
    }

    pub fn write_meta(&self, meta: &Meta) -> Result<(), Failure> {
        let (path, temporary) = (self.dir.join("meta.json"), self.dir.join("meta.tmp"));
        let bytes = serde_json::to_vec(meta).map_err(|error| io_failure("write", &path)(error.into()))?;
        std::fs::write(&temporary, bytes).map_err(io_failure("write", &temporary))?;
        std::fs::rename(&temporary, &path).map_err(io_failure("write", &path))
    }

    pub fn change_meta(&self, change: impl FnOnce(&mut Meta)) -> Result<(), Failure> {
        let path = self.dir.join("meta.json");
        let missing = || io_failure("read", &path)(io::Error::from(io::ErrorKind::NotFound));
        let mut meta = self.meta().ok_or_else(missing)?;
        change(&mut meta);
        self.write_meta(&meta)
    }

    pub fn meta(&self) -> Option<Meta> {
        serde_json::from_slice(&std::fs::read(self.dir.join("meta.json")).ok()?).ok()
    }

    /// From runsc's own state file, after `create`.
    pub fn find_processes(&self) -> Result<Processes, Failure> {
        let path = self.state_file();
        let bytes = std::fs::read(&path).map_err(io_failure("read runsc's state", &path))?;
        let state: Value = serde_json::from_slice(&bytes)
            .map_err(|error| io_failure("read runsc's state", &path)(error.into()))?;
        let identity = |value: &Value| {
            let pid = value.as_u64().and_then(|pid| u32::try_from(pid).ok())?;
            Identity::of(pid)
        };
        let found = identity(&state["sandbox"]["pid"]).zip(identity(&state["goferPid"]));
        let (sandbox, gofer) = found.ok_or_else(|| Failure::Exited {
            why: format!("its processes ended right after the start; {}", self.last_words()),
        })?;
        Ok(Processes { sandbox, gofer })
    }

    fn state_file(&self) -> PathBuf {
        let id = self.id.as_str();
        self.dir.join("root").join(format!("{id}_sandbox:{id}.state"))
    }

    /// A handle of the sandbox process; `None`: it has ended or never was.
    pub fn sandbox(&self) -> Option<PidFd> {
        self.meta()?.processes?.sandbox.open()
    }

    pub fn set_limits(&self, shape: Shape) -> Result<(), Failure> {
        let Some(group) = &self.group else { return Ok(()) };
        let limits = Limits {
            memory_bytes: Some(super::bundle::memory_bytes(shape) + MEMORY_OVERHEAD_BYTES),
            cpus: Some(shape.cpus),
            pids: Some(shape.processes_max.saturating_mul(PIDS_PER_PROCESS).saturating_add(PIDS_OVERHEAD)),
        };
        group.set_limits(&limits).map_err(io_failure("set the limits of the group", &self.group_path))
    }

    /// While a checkpoint is written its page cache counts as the sandbox's: that must not kill it.
    pub fn lift_memory_limit(&self) -> Result<(), Failure> {
        let Some(group) = &self.group else { return Ok(()) };
        group.set_memory(None).map_err(io_failure("lift the memory limit of the group", &self.group_path))
    }

    /// All host processes that belong to it.
    fn processes(&self) -> Vec<u32> {
        if let Some(procs) = self.group.as_ref().and_then(|group| group.procs().ok()) {
            return procs;
        }
        process::tree(&self.roots())
    }

    /// The sandbox process and the gofer.
    fn roots(&self) -> Vec<u32> {
        match self.meta().and_then(|meta| meta.processes) {
            Some(known) => [known.sandbox, known.gofer]
                .iter()
                .filter(|process| process.is_alive())
                .map(|process| process.pid)
                .collect(),
            None => self.processes_by_argument(),
        }
    }

    /// Whoever was started with this container's folder, recorded or not.
    fn processes_by_argument(&self) -> Vec<u32> {
        let wanted = format!("--root={}", self.dir.join("root").display());
        let has = |pid: &u32| process::arguments(*pid).contains(&wanted);
        process::pids().into_iter().filter(has).collect()
    }

    pub fn freeze(&self) -> Result<(), Failure> {
        match &self.group {
            Some(group) => group.freeze(),
            // The sandbox process first: once it is stopped, what the tree shows is all there is.
            None => process::stop(&self.roots()).and_then(|()| process::stop(&self.processes())),
        }
        .map_err(io_failure("freeze the processes of", &self.dir))
    }

    pub fn thaw(&self) -> Result<(), Failure> {
        match &self.group {
            Some(group) => group.thaw(),
            None => process::resume(&self.processes().into_iter().rev().collect::<Vec<_>>()),
        }
        .map_err(io_failure("thaw the processes of", &self.dir))
    }

    pub fn is_frozen(&self) -> bool {
        match &self.group {
            Some(group) => group.is_frozen().unwrap_or(false),
            None => self
                .meta()
                .and_then(|meta| meta.processes)
                .is_some_and(|known| process::is_stopped(known.sandbox.pid)),
        }
    }

    pub fn usage(&self) -> Usage {
        let processes = self.processes();
        let (cpu_us, memory_bytes) = match &self.group {
            Some(group) => (group.cpu_us().unwrap_or(0), group.memory_bytes().unwrap_or(0)),
            None => (process::cpu_us(&processes), process::resident_bytes(&processes)),
        };
        Usage {
            cpu_us,
            memory_bytes,
            disk_bytes: self.backing_bytes(FILE_STORE),
            processes: u32::try_from(processes.len()).unwrap_or(u32::MAX),
        }
    }

    /// An upper bound, nearly always close, of what a checkpoint will write.
    pub fn image_bytes(&self) -> u64 {
        self.backing_bytes(MEMORY) + self.backing_bytes(FILE_STORE)
    }

    fn backing_bytes(&self, name: &str) -> u64 {
        self.backing_files(name).iter().filter_map(|file| dormouse_sys::files::disk_bytes(file).ok()).sum()
    }

    /// Files without a name that the sandbox process holds, by their descriptor.
    fn backing_files(&self, name: &str) -> Vec<PathBuf> {
        let Some(known) = self.meta().and_then(|meta| meta.processes) else { return Vec::new() };
        let dir = PathBuf::from(format!("/proc/{}/fd", known.sandbox.pid));
        let is_one = |path: &PathBuf| {
            std::fs::read_link(path).is_ok_and(|target| target.to_string_lossy().contains(name))
        };
        (0..DESCRIPTORS_SEEN_MAX).map(|number| dir.join(number.to_string())).filter(is_one).collect()
    }

    /// What it may write and where that is seen; cheap to look at again and again.
    pub fn disk_watch(&self) -> Option<DiskWatch> {
        let limit_mib = self.meta()?.shape.disk_mib;
        Some(DiskWatch { files: self.backing_files(FILE_STORE), limit_mib })
    }

    /// Its carrier's pipes, for a checkpoint; `None`: it was not created to the end.
    pub fn seal(&self) -> Option<Seal> {
        let meta = self.meta()?;
        Some(Seal { pid: meta.processes?.sandbox.pid, pipes: meta.pipes, dir: self.dir.clone() })
    }

    /// Waits for what a former daemon had told runsc to do with it.
    pub fn await_commands(&self) -> Result<(), Failure> {
        let verbs = ["create", "start", "checkpoint", "restore"];
        let is_command =
            |pid: &u32| process::arguments(*pid).iter().any(|argument| verbs.contains(&argument.as_str()));
        for pid in self.processes_by_argument().into_iter().filter(is_command) {
            let Ok(handle) = PidFd::open(pid) else { continue };
            let ended = handle.wait(COMMAND_WAIT).map_err(io_failure("await runsc for", &self.dir))?;
            if !ended {
                handle.kill().map_err(io_failure("end runsc for", &self.dir))?;
            }
        }
        Ok(())
    }

    /// Why it ended, as far as the host can tell. Asked before [`Container::destroy`].
    pub fn why_ended(&self) -> String {
        if self.group.as_ref().is_some_and(|group| group.oom_kills().is_ok_and(|kills| kills > 0)) {
            let limit = self.meta().map_or(0, |meta| meta.shape.memory_mib);
            return format!("it used more memory than its limit of {limit} MiB and the kernel ended it");
        }
        if self.group.as_ref().is_some_and(|group| group.pids_refused().is_ok_and(|refused| refused > 0)) {
            let limit = self.meta().map_or(0, |meta| meta.shape.processes_max);
            return format!("it started far more processes than its limit of {limit}");
        }
        format!("its init process (the agent) or runsc ended; {}", self.last_words())
    }

    /// What runsc wrote when it crashed.
    fn last_words(&self) -> String {
        let text = std::fs::read_to_string(self.dir.join("panic.log")).unwrap_or_default();
        let first: String = text.trim().chars().take(600).collect();
        if first.is_empty() {
            "runsc reported no crash".to_owned()
        } else {
            format!("runsc reported: {first}")
        }
    }

    /// Ends all its processes and removes everything that it had on the host. Idempotent.
    pub fn destroy(&self) -> Result<(), Failure> {
        self.kill()?;
        if let Some(group) = &self.group {
            group.remove().map_err(io_failure("remove the group", &self.group_path))?;
        }
        self.remove_far_socket();
        match std::fs::remove_dir_all(&self.dir) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
            other => other.map_err(io_failure("remove the folder", &self.dir)),
        }
    }

    /// Ends all its processes; what else it had stays. Idempotent.
    pub fn kill(&self) -> Result<(), Failure> {
        for _ in 0..KILL_ROUNDS_MAX {
            let handles = self.handles();
            if handles.is_empty() {
                return Ok(());
            }
            for handle in &handles {
                handle.kill().map_err(io_failure("end the processes of", &self.dir))?;
            }
            // A frozen process dies once it is thawed.
            if self.group.as_ref().is_some_and(Group::exists) {
                self.thaw()?;
            }
            for handle in &handles {
                handle.wait(KILL_WAIT).map_err(io_failure("await the end of the processes of", &self.dir))?;
            }
        }
        let source = io::Error::new(io::ErrorKind::TimedOut, "new ones appear faster than they are ended");
        Err(io_failure("end the processes of", &self.dir)(source))
    }

    /// The processes that have not ended, the sandbox process first: without it no new one starts.
    fn handles(&self) -> Vec<PidFd> {
        let mut pids = self.processes();
        match self.meta().and_then(|meta| meta.processes) {
            Some(known) => {
                let alive = [known.sandbox, known.gofer].into_iter().filter(Identity::is_alive);
                pids.splice(0..0, alive.map(|process| process.pid));
            }
            None if self.dir.exists() => pids.extend(self.processes_by_argument()),
            None => {}
        }
        pids.dedup();
        pids.into_iter()
            .filter_map(|pid| PidFd::open(pid).ok())
            .filter(|handle| !handle.has_ended())
            .collect()
    }

    /// Where the path of its folder is too long, runsc puts its socket elsewhere.
    fn remove_far_socket(&self) {
        let Ok(bytes) = std::fs::read(self.state_file()) else { return };
        let Ok(state) = serde_json::from_slice::<Value>(&bytes) else { return };
        let Some(path) = state["sandbox"]["controlSocketPath"].as_str() else { return };
        let path = Path::new(path);
        let own = format!("runsc-{}.sock", self.id);
        if path.is_absolute() && path.file_name().is_some_and(|name| name == own.as_str()) {
            let _ = std::fs::remove_file(path);
        }
    }
}

/// The files that hold a sandbox's changes to its root file system.
#[derive(Debug)]
pub(super) struct DiskWatch {
    files: Vec<PathBuf>,
    pub limit_mib: u32,
}

impl DiskWatch {
    pub fn is_exceeded(&self) -> bool {
        let bytes =
            self.files.iter().filter_map(|file| dormouse_sys::files::disk_bytes(file).ok()).sum::<u64>();
        bytes > u64::from(self.limit_mib) << 20
    }
}
