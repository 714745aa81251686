//! One error per operation: what was tried, on which snapshot, and why it failed.

use std::io;
use std::path::PathBuf;

use dormouse_snapshot::ManifestError;
use dormouse_types::SnapshotId;

#[derive(Debug, thiserror::Error)]
#[error("cannot {action} {}", path.display())]
pub struct OpenError {
    pub action: &'static str,
    pub path: PathBuf,
    #[source]
    pub source: io::Error,
}

#[derive(Debug, thiserror::Error)]
pub enum BeginError {
    #[error("snapshot {id} exists already")]
    Exists { id: SnapshotId },
    #[error("the disk that holds {} is full", path.display())]
    NoSpace { path: PathBuf },
    #[error("cannot make the folder {}", path.display())]
    Io {
        path: PathBuf,
        #[source]
        source: io::Error,
    },
}

#[derive(Debug, thiserror::Error)]
pub enum PublishError {
    #[error("the disk that holds {} is full", path.display())]
    NoSpace { path: PathBuf },
    #[error("the manifest names {given}, the draft is of {draft}")]
    OtherId { given: SnapshotId, draft: SnapshotId },
    #[error("the draft was published before")]
    Twice,
    #[error("the file {name:?} is not a plain file of the draft: {why}")]
    File { name: String, why: String },
    #[error("cannot encode the manifest of {id}: {source}")]
    Manifest { id: SnapshotId, source: ManifestError },
    #[error("cannot {action} {}", path.display())]
    Io {
        action: &'static str,
        path: PathBuf,
        #[source]
        source: io::Error,
    },
}

impl PublishError {
    #[must_use]
    pub fn is_no_space(&self) -> bool {
        matches!(self, Self::NoSpace { .. })
    }
}

#[derive(Debug, thiserror::Error)]
pub enum LoadError {
    #[error("there is no snapshot {id}")]
    NotFound { id: SnapshotId },
    #[error("cannot read {}", path.display())]
    Read {
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    #[error("the manifest of {id} ({}) is damaged: {source}", path.display())]
    Damaged { id: SnapshotId, path: PathBuf, source: ManifestError },
}

#[derive(Debug, thiserror::Error)]
#[error("cannot list {}", path.display())]
pub struct ListError {
    pub path: PathBuf,
    #[source]
    pub source: io::Error,
}

#[derive(Debug, thiserror::Error)]
pub enum VerifyError {
    #[error("cannot verify {id}: {source}")]
    Load { id: SnapshotId, source: Box<LoadError> },
    #[error("the file {file} of {id} is damaged: {why}")]
    Damaged { id: SnapshotId, file: String, why: String },
    #[error("cannot read the file {file} of {id}")]
    Read {
        id: SnapshotId,
        file: String,
        #[source]
        source: io::Error,
    },
    #[error("the verification of {id} was cancelled")]
    Cancelled { id: SnapshotId },
}

#[derive(Debug, thiserror::Error)]
pub enum RemoveError {
    #[error("there is no snapshot {id}")]
    NotFound { id: SnapshotId },
    #[error("cannot remove {id}: cannot {action}")]
    Io {
        id: SnapshotId,
        action: &'static str,
        #[source]
        source: io::Error,
    },
}

#[derive(Debug, thiserror::Error)]
#[error("cannot ask how much room {} has", path.display())]
pub struct SpaceError {
    pub path: PathBuf,
    #[source]
    pub source: io::Error,
}

#[derive(Debug, thiserror::Error)]
pub enum CompleteError {
    #[error("cannot load snapshot {id}")]
    Load {
        id: SnapshotId,
        #[source]
        source: Box<LoadError>,
    },
    #[error("cannot encode the manifest of {id}: {source}")]
    Manifest { id: SnapshotId, source: ManifestError },
    #[error("cannot {action} snapshot {id}")]
    Io {
        id: SnapshotId,
        action: &'static str,
        #[source]
        source: io::Error,
    },
}
