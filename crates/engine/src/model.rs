//! What an engine is given and what it tells.

use std::path::PathBuf;
use std::time::Duration;

use dormouse_snapshot::{FileRole, Manifest};
use dormouse_types::{Generation, RuntimeId, SandboxId, Shape};
use dormouse_wire::keeper::{EgressRules, Session};

use crate::error::EngineError;

/// What this engine can keep: told in receipts, used by the node to choose.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Capabilities {
    pub memory: bool,
    /// Open external TCP connections of the sandbox go on after a resume on the same host.
    pub external_tcp: bool,
    pub incremental: bool,
    /// `Engine::fork` works: copies without a snapshot in between.
    pub live_fork: bool,
    /// A checkpoint can leave the sandbox running.
    pub live_checkpoint: bool,
}

/// The agent of new sandboxes: `agent/<digest>/agent` below the data folder, never changed.
#[derive(Debug, Clone)]
pub struct AgentFile {
    pub version: String,
    /// BLAKE3, hex.
    pub digest: String,
}

#[derive(Debug, Clone)]
pub struct BootSpec {
    pub sandbox: SandboxId,
    pub runtime: RuntimeId,
    pub generation: Generation,
    /// Shared by many sandboxes, never written to.
    pub rootfs: PathBuf,
    pub shape: Shape,
    pub hostname: String,
    pub egress: EgressRules,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum After {
    KeepRunning,
    /// It is frozen and its carrier is silent, exactly as the image has it. `stop` ends it once the
    /// snapshot is published, `thaw` lets it go on: whatever fails or dies in between, nothing is lost.
    Hold,
    Stop,
}

#[derive(Debug, Clone)]
pub struct CapturedFile {
    /// Plain name inside the folder that was given.
    pub name: String,
    pub role: FileRole,
}

#[derive(Debug, Clone)]
pub struct Captured {
    pub files: Vec<CapturedFile>,
    /// How long the sandbox did not run (whole checkpoint time where it was stopped).
    pub stopped: Duration,
    /// What will not survive a restore, in words.
    pub notes: Vec<String>,
}

#[derive(Debug, Clone)]
pub struct RestoreSpec {
    pub sandbox: SandboxId,
    pub runtime: RuntimeId,
    pub generation: Generation,
    pub rootfs: PathBuf,
    pub snapshot_dir: PathBuf,
    pub manifest: Manifest,
    pub shape: Shape,
    pub hostname: String,
    pub egress: EgressRules,
    /// `Continue` for a resume by the keeper that saw the pause; a keeper that is gone makes it `New`.
    pub session: Session,
}

#[derive(Debug, Clone)]
pub struct Restored {
    /// Which session the carrier really has: `New` where the keeper had to be replaced.
    pub session: Session,
    /// True when a prepared runtime was used.
    pub from_pool: bool,
}

#[derive(Debug, Clone)]
pub struct ForkChild {
    pub sandbox: SandboxId,
    pub runtime: RuntimeId,
    pub generation: Generation,
    pub hostname: String,
    pub egress: EgressRules,
}

/// What a live fork gave.
#[derive(Debug)]
pub struct Forked {
    /// How long the source did not run.
    pub stopped: Duration,
    /// Each child's outcome, in the order asked for. Of one that failed nothing is left.
    pub children: Vec<Result<(), EngineError>>,
}

/// For which kind of sandbox runtimes are to be kept ready.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct WarmSpec {
    pub rootfs: PathBuf,
    pub shape: Shape,
    /// A published snapshot's folder: runtimes that were restored from it already and wait, never
    /// woken, for a start of that very snapshot in a new session. `None`: for any start.
    pub snapshot: Option<PathBuf>,
}

#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Usage {
    /// CPU time of all its host processes, microseconds.
    pub cpu_us: u64,
    pub memory_bytes: u64,
    /// Bytes on the host's disk that only this runtime holds.
    pub disk_bytes: u64,
    pub processes: u32,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Exit {
    /// The sandbox ended: killed, out of memory, the agent died, the engine crashed.
    Runtime { why: String },
    /// The keeper ended; the sandbox runs on but cannot be reached.
    Keeper { why: String },
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Adopted {
    pub runtime: RuntimeState,
    pub keeper: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RuntimeState {
    Running,
    Frozen,
    Gone,
}

/// What `sweep` removed.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Swept {
    pub runtimes: Vec<String>,
    pub keepers: Vec<String>,
    /// Mounts, cgroups, folders and files, by name.
    pub leftovers: Vec<String>,
}
