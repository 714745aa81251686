//! What goes wrong, in the one shape that callers see: a stable code and a message a person can act on.

use std::path::PathBuf;

use dormouse_engine::{EngineError, Failure};
use dormouse_types::SandboxId;

/// The stable part of an error.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum ErrorCode {
    NotFound,
    /// The state does not allow it: already paused, already running, in use.
    Conflict,
    /// A field of the request is not valid.
    Invalid {
        field: String,
    },
    Unauthorized,
    Forbidden,
    /// A limit is reached; the message names it.
    QuotaExceeded,
    NoSpace,
    /// The snapshot's time is over.
    Expired,
    /// This host cannot restore it; nothing was touched.
    Incompatible,
    /// May work when tried again.
    Unavailable,
    /// The sandbox failed; its message says why and what is left of it.
    Failed,
    Internal,
}

impl ErrorCode {
    #[must_use]
    pub fn http_status(&self) -> u16 {
        match self {
            Self::NotFound => 404,
            Self::Conflict => 409,
            Self::Invalid { .. } => 400,
            Self::Unauthorized => 401,
            Self::Forbidden => 403,
            Self::QuotaExceeded => 429,
            Self::NoSpace => 507,
            Self::Expired => 410,
            Self::Incompatible => 422,
            Self::Unavailable => 503,
            Self::Failed | Self::Internal => 500,
        }
    }

    #[must_use]
    pub fn as_str(&self) -> &'static str {
        match self {
            Self::NotFound => "not_found",
            Self::Conflict => "conflict",
            Self::Invalid { .. } => "invalid",
            Self::Unauthorized => "unauthorized",
            Self::Forbidden => "forbidden",
            Self::QuotaExceeded => "quota_exceeded",
            Self::NoSpace => "no_space",
            Self::Expired => "expired",
            Self::Incompatible => "incompatible",
            Self::Unavailable => "unavailable",
            Self::Failed => "failed",
            Self::Internal => "internal",
        }
    }
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, thiserror::Error)]
#[error("{message}")]
pub struct NodeError {
    pub code: ErrorCode,
    pub message: String,
}

impl NodeError {
    pub fn new(code: ErrorCode, message: impl Into<String>) -> Self {
        Self { code, message: message.into() }
    }

    pub fn not_found(message: impl Into<String>) -> Self {
        Self::new(ErrorCode::NotFound, message)
    }

    pub fn conflict(message: impl Into<String>) -> Self {
        Self::new(ErrorCode::Conflict, message)
    }

    pub fn invalid(field: &str, message: impl Into<String>) -> Self {
        Self::new(ErrorCode::Invalid { field: field.to_owned() }, message)
    }

    pub fn unavailable(message: impl Into<String>) -> Self {
        Self::new(ErrorCode::Unavailable, message)
    }

    pub fn failed(message: impl Into<String>) -> Self {
        Self::new(ErrorCode::Failed, message)
    }

    pub fn internal(message: impl Into<String>) -> Self {
        Self::new(ErrorCode::Internal, message)
    }

    #[must_use]
    pub fn http_status(&self) -> u16 {
        self.code.http_status()
    }

    pub(crate) fn no_sandbox(id: &SandboxId) -> Self {
        Self::not_found(format!("sandbox {id} was not found: it was killed, or never existed on this node"))
    }
}

impl From<&EngineError> for NodeError {
    fn from(error: &EngineError) -> Self {
        let code = match &error.failure {
            Failure::NoSpace { .. } => ErrorCode::NoSpace,
            Failure::Incompatible { .. } => ErrorCode::Incompatible,
            Failure::Unsupported { .. } => ErrorCode::Invalid { field: "engine".to_owned() },
            Failure::Exited { .. } | Failure::Damaged { .. } => ErrorCode::Failed,
            Failure::Missing { .. } | Failure::Unfit { .. } | Failure::Keeper { .. } => {
                ErrorCode::Unavailable
            }
            Failure::Io { source, .. } if source.kind() == std::io::ErrorKind::StorageFull => {
                ErrorCode::NoSpace
            }
            Failure::Command { output, .. } if output.contains("no space left") => ErrorCode::NoSpace,
            Failure::Command { .. } | Failure::Io { .. } | Failure::Monitor { .. } => ErrorCode::Internal,
        };
        Self::new(code, error.to_string())
    }
}

impl From<EngineError> for NodeError {
    fn from(error: EngineError) -> Self {
        Self::from(&error)
    }
}

/// The node could not be opened.
#[derive(Debug, thiserror::Error)]
pub enum OpenError {
    #[error(
        "the data folder {} is in use by another daemon (process {pid}): stop that one, or give this one \
         its own folder with --data-dir", folder.display()
    )]
    Locked { folder: PathBuf, pid: String },
    #[error("cannot {action} {}: {source}", path.display())]
    Io {
        action: &'static str,
        path: PathBuf,
        #[source]
        source: std::io::Error,
    },
    #[error("the journal {} cannot be used: {why}", path.display())]
    Journal { path: PathBuf, why: String },
    #[error("the journal {} was written by a newer release (schema {found}, this one knows {known})", path.display())]
    Newer { path: PathBuf, found: i64, known: i64 },
    #[error("the snapshots in {} cannot be opened: {why}", path.display())]
    Store { path: PathBuf, why: String },
    #[error("the images in {} cannot be opened: {why}", path.display())]
    Images { path: PathBuf, why: String },
    #[error("no engine can be used on this host; `dormouse doctor` says what is missing")]
    NoEngine,
    #[error("the engine's leftovers could not be reconciled: {why}")]
    Sweep { why: String },
}

/// A stream into a sandbox could not be opened. The data plane answers each differently.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum StreamError {
    #[error("sandbox {0} was not found")]
    NotFound(String),
    #[error("sandbox {0} is paused and not to be woken by a connection")]
    Paused(String),
    #[error("nothing listens on port {0} of the sandbox")]
    PortClosed(u16),
    #[error("{0}")]
    Failed(String),
}
