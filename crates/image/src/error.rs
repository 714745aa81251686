//! One error per operation: what was tried, on what, why it failed and what to do.

use std::io;
use std::path::PathBuf;

#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{given:?} is not an image's name: letters, digits, '-', '_' and '.', at most 128")]
pub struct InvalidName {
    pub given: String,
}

#[derive(Debug, thiserror::Error)]
#[error("cannot {action} {}", path.display())]
pub struct OpenError {
    pub action: &'static str,
    pub path: PathBuf,
    #[source]
    pub source: io::Error,
}

#[derive(Debug, thiserror::Error)]
pub enum LoadError {
    #[error("there is no image {id}")]
    NotFound { id: String },
    #[error("cannot read the record of image {id}")]
    Io {
        id: String,
        #[source]
        source: io::Error,
    },
    #[error("the record of image {id} ({}) is damaged: {why}", path.display())]
    Damaged { id: String, path: PathBuf, why: String },
}

#[derive(Debug, thiserror::Error)]
pub enum ListError {
    #[error("cannot list {}", path.display())]
    Io {
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    #[error("cannot list image {id}: {source}")]
    Record { id: String, source: Box<LoadError> },
}

#[derive(Debug, thiserror::Error)]
pub enum RemoveError {
    #[error("there is no image {id}")]
    NotFound { id: String },
    #[error("image {id} is needed by {}", references.join(", "))]
    InUse { id: String, references: Vec<String> },
    #[error("cannot remove image {id}: cannot {action}")]
    Io {
        id: String,
        action: &'static str,
        #[source]
        source: io::Error,
    },
}

#[derive(Debug, thiserror::Error)]
#[error("cannot publish image {id}: cannot {action}")]
pub struct PublishError {
    pub id: String,
    pub action: &'static str,
    #[source]
    pub source: io::Error,
}

/// An archive was refused or could not be unpacked. `entry` is the name in the archive.
#[derive(Debug, thiserror::Error)]
pub enum ExtractError {
    #[error("{archive}: the entry {entry:?} is refused: {why}")]
    Refused { archive: String, entry: String, why: String },
    #[error("{archive}: it is not a valid tar archive at byte {offset}: {why}")]
    Format { archive: String, offset: u64, why: String },
    #[error("{archive}: more than {limit} {what}; raise the limit if this is meant")]
    Limit { archive: String, what: &'static str, limit: u64 },
    #[error("{archive}: cannot read")]
    Read {
        archive: String,
        #[source]
        source: io::Error,
    },
    #[error("{archive}: cannot {action} the entry {entry:?}")]
    Write {
        archive: String,
        action: &'static str,
        entry: String,
        #[source]
        source: io::Error,
    },
}

impl ExtractError {
    #[must_use]
    pub fn is_no_space(&self) -> bool {
        matches!(self, Self::Write { source, .. }
            if matches!(source.kind(), io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded))
    }
}

#[derive(Debug, thiserror::Error)]
pub enum ImportError {
    #[error(transparent)]
    Name(InvalidName),
    #[error("there is an image {id} already")]
    Exists { id: String },
    #[error("cannot prepare a folder for the image")]
    Draft {
        #[source]
        source: io::Error,
    },
    #[error(transparent)]
    Extract(ExtractError),
    #[error("cannot make the root file system fit for a sandbox: cannot {action} {path}")]
    Prepare {
        action: &'static str,
        path: String,
        #[source]
        source: io::Error,
    },
    #[error(transparent)]
    Publish(PublishError),
}

#[derive(Debug, thiserror::Error)]
pub enum DebianError {
    #[error("{what} is missing; {mend}")]
    Missing { what: String, mend: String },
    #[error("{given:?} is not {what}")]
    Invalid { what: &'static str, given: String },
    #[error("mmdebstrap needs root; run the daemon as root")]
    NotRoot,
    #[error("mmdebstrap ended with {status}; its last lines:\n{output}")]
    Failed { status: String, output: String },
    #[error("cannot run mmdebstrap")]
    Spawn {
        #[source]
        source: io::Error,
    },
    #[error(transparent)]
    Import(ImportError),
}

#[derive(Debug, thiserror::Error)]
pub enum OciError {
    #[error("{} is neither an OCI layout folder nor an archive of one: {why}", path.display())]
    NotOci { path: PathBuf, why: String },
    #[error("cannot read {}", path.display())]
    Read {
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    #[error("{document} is not valid: {why}")]
    Document { document: String, why: String },
    #[error("there is no image for linux/amd64 in {}: it has {has}", path.display())]
    Platform { path: PathBuf, has: String },
    #[error("{} holds several images: append :NAME, one of {names}", path.display())]
    Ambiguous { path: PathBuf, names: String },
    #[error("{} holds no image named {name:?}: it has {names}", path.display())]
    NoSuchName { path: PathBuf, name: String, names: String },
    #[error("the blob {digest} does not have that digest: its content has {found}")]
    Digest { digest: String, found: String },
    #[error(transparent)]
    Import(ImportError),
}

#[derive(Debug, thiserror::Error)]
pub enum KernelError {
    #[error("{program} is missing; install the package that has it, or run `dormouse setup`")]
    Missing { program: String },
    #[error("cannot run {program}")]
    Spawn {
        program: String,
        #[source]
        source: io::Error,
    },
    #[error("`{command}` ended with {status}; its last lines:\n{output}")]
    Failed { command: String, status: String, output: String },
    #[error("{what} is not fit for a guest: {why}")]
    Unfit { what: String, why: String },
    #[error("cannot {action} {}", path.display())]
    Io {
        action: &'static str,
        path: PathBuf,
        #[source]
        source: io::Error,
    },
}

#[derive(Debug, thiserror::Error)]
pub enum DiskError {
    #[error("a disk of {given_bytes} bytes is too small: {least_bytes} are needed at least")]
    TooSmall { given_bytes: u64, least_bytes: u64 },
    #[error("cannot make the disk image {}", path.display())]
    Make {
        path: PathBuf,
        #[source]
        source: KernelError,
    },
    #[error("cannot {action} {}", path.display())]
    Io {
        action: &'static str,
        path: PathBuf,
        #[source]
        source: io::Error,
    },
}

#[derive(Debug, thiserror::Error)]
pub enum VmlinuxError {
    #[error("it is not a bzImage of boot protocol 2.08 or later")]
    NotBzImage,
    #[error("it ends before its kernel does")]
    Truncated,
    #[error("its kernel has {bytes} bytes, more than {max}")]
    TooLarge { bytes: usize, max: usize },
    #[error("its kernel is packed in a way that is not known here (it begins with {magic})")]
    Compression { magic: String },
    #[error("its kernel cannot be unpacked: {why}")]
    Damaged { why: String },
    #[error("what it holds is not an ELF file")]
    NotElf,
}

#[derive(Debug, thiserror::Error)]
pub enum GuestError {
    #[error(transparent)]
    Kernel(KernelError),
    #[error("the module {} cannot be used: {why}", path.display())]
    Module { path: PathBuf, why: String },
    #[error("the kernel {release} has no module {name}")]
    NoModule { name: String, release: String },
    #[error("cannot {action} {}", path.display())]
    Io {
        action: &'static str,
        path: PathBuf,
        #[source]
        source: io::Error,
    },
}
