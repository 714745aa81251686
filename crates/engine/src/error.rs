//! One error for all operations of an engine: what was tried, on which sandbox, and why it failed.

use std::fmt;
use std::io;
use std::path::PathBuf;

use dormouse_types::SandboxId;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Operation {
    Boot,
    Checkpoint,
    Restore,
    Fork,
    Freeze,
    Thaw,
    Stop,
    Destroy,
    SetEgress,
    Status,
    Adopt,
    Sweep,
    Setup,
}

impl fmt::Display for Operation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Boot => "boot",
            Self::Checkpoint => "checkpoint",
            Self::Restore => "restore",
            Self::Fork => "fork",
            Self::Freeze => "freeze",
            Self::Thaw => "thaw",
            Self::Stop => "stop",
            Self::Destroy => "destroy",
            Self::SetEgress => "change of the egress policy",
            Self::Status => "status",
            Self::Adopt => "adoption",
            Self::Sweep => "sweep",
            Self::Setup => "set-up",
        })
    }
}

#[derive(Debug, thiserror::Error)]
#[error("{operation} of {} failed: {failure}", .sandbox.as_ref().map_or("the engine", |id| id.as_str()))]
pub struct EngineError {
    pub operation: Operation,
    /// `None`: not about one sandbox.
    pub sandbox: Option<SandboxId>,
    #[source]
    pub failure: Failure,
}

#[derive(Debug, thiserror::Error)]
pub enum Failure {
    #[error("{what} is missing; {mend}")]
    Missing { what: String, mend: String },
    #[error("{what} cannot be used: {why}; {mend}")]
    Unfit { what: String, why: String, mend: String },
    #[error("the disk that holds {} is full", path.display())]
    NoSpace { path: PathBuf },
    /// The snapshot cannot be restored here; nothing was touched.
    #[error("the snapshot needs {needs}, this host has {has}")]
    Incompatible { needs: String, has: String },
    #[error("the snapshot's file {file} is damaged: {why}")]
    Damaged { file: String, why: String },
    #[error("the sandbox ended: {why}")]
    Exited { why: String },
    #[error("`{command}` ended with {status}: {output}")]
    Command { command: String, status: String, output: String },
    #[error("cannot {action} {}", path.display())]
    Io {
        action: &'static str,
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    #[error("the keeper {why}")]
    Keeper { why: String },
    #[error("the monitor {why}")]
    Monitor { why: String },
    #[error("this engine does not offer it: {why}")]
    Unsupported { why: String },
}
