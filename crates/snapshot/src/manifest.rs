//! The manifest: what one snapshot is, what it needs, and which files hold it.

use std::collections::BTreeMap;

use dormouse_types::{EngineKind, Generation, RuntimeId, SandboxId, Shape, SnapshotId, TemplateId};
use minicbor::{Decode, Encode};

use crate::header::{ARCH_X86_64, FORMAT_VERSION, HEADER_BYTES, Header, HeaderError};

/// A body over this is refused unread: real ones have a few KiB.
pub const BODY_BYTES_MAX: usize = 4 << 20;
const FILES_MAX: usize = 4096;
const LABELS_MAX: usize = 256;

/// BLAKE3, 32 bytes.
pub type Digest = [u8; 32];

/// What a file is checked by.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FileDigest {
    /// BLAKE3 of all its bytes.
    Whole(Digest),
    /// Of a sparse file's data and where it lies: `docs/formats/layer.md`.
    Sparse(Digest),
}

/// Why a snapshot was taken.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Reason {
    Pause,
    Checkpoint,
    Fork,
    Template,
    /// By a policy: idleness, a deadline, a schedule.
    Policy,
    /// By the node itself: to replace a keeper, before a rollback.
    Internal,
}

/// What a file of a snapshot holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FileRole {
    Memory,
    Devices,
    Disk,
    /// The engine's own description (for gVisor: the bundle's configuration).
    Config,
}

/// One file of the snapshot's folder.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FileEntry {
    /// A plain file name, no path.
    pub name: String,
    pub role: FileRole,
    pub bytes: u64,
    /// `None`: not known yet. A large file is hashed after its snapshot was published, so that nobody
    /// waits for it; until then only its length can be checked.
    pub digest: Option<FileDigest>,
}

/// What a host must offer to restore the snapshot.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Compat {
    /// For example `runsc release-20240729.0`.
    pub engine_version: String,
    /// The platform or mode that the image is bound to, for example `systrap`.
    pub platform: String,
    /// CPU features that the sandbox saw.
    pub cpu_features: Vec<String>,
    /// Version of the agent that runs inside.
    pub agent_version: String,
    /// BLAKE3 of the agent's executable, hex: the file that the restore must find.
    pub agent_digest: String,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Manifest {
    pub id: SnapshotId,
    pub parent: Option<SnapshotId>,
    /// The sandbox it was taken of.
    pub sandbox: SandboxId,
    pub runtime: RuntimeId,
    pub template: TemplateId,
    pub engine: EngineKind,
    pub generation: Generation,
    pub reason: Reason,
    /// Unix time, milliseconds.
    pub created_at_ms: i64,
    /// Unix time, milliseconds; `None`: never.
    pub expires_at_ms: Option<i64>,
    pub shape: Shape,
    /// Names the read-only root file system below it (a digest or id in the image store).
    pub rootfs: String,
    /// False: only the file system was kept, a restore boots anew.
    pub memory: bool,
    pub names: Vec<String>,
    pub labels: BTreeMap<String, String>,
    pub compat: Compat,
    pub files: Vec<FileEntry>,
}

#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ManifestError {
    #[error("the header is not valid: {0}")]
    Header(HeaderError),
    #[error("the body has {given} bytes, the header says {expected}")]
    Length { given: usize, expected: usize },
    #[error("the content does not match its digest: the file is damaged")]
    Digest,
    #[error("the body cannot be decoded: {0}")]
    Body(String),
    #[error("the field {field} is not valid: {why}")]
    Field { field: &'static str, why: String },
}

impl Manifest {
    /// Header and body, ready to be written.
    pub fn encode(&self) -> Result<Vec<u8>, ManifestError> {
        let body = minicbor::to_vec(RawManifest::from(self))
            .map_err(|error| ManifestError::Body(error.to_string()))?;
        let body_bytes = u32::try_from(body.len())
            .ok()
            .filter(|bytes| *bytes as usize <= BODY_BYTES_MAX)
            .ok_or_else(|| ManifestError::Body(format!("{} bytes are too many", body.len())))?;
        let mut header = Header {
            version: FORMAT_VERSION,
            engine: self.engine,
            arch: ARCH_X86_64,
            body_bytes,
            digest: [0; 32],
        };
        header.digest = header.digest_with(&body);
        let mut bytes = header.encode().to_vec();
        bytes.extend_from_slice(&body);
        Ok(bytes)
    }

    /// Reads and validates; any damage is an error, never another manifest.
    pub fn decode(bytes: &[u8]) -> Result<Self, ManifestError> {
        let header = Header::decode(bytes).map_err(ManifestError::Header)?;
        let body = &bytes[HEADER_BYTES..];
        let expected = header.body_bytes as usize;
        if body.len() != expected || expected > BODY_BYTES_MAX {
            return Err(ManifestError::Length { given: body.len(), expected });
        }
        if header.digest_with(body) != header.digest {
            return Err(ManifestError::Digest);
        }
        let raw: RawManifest =
            minicbor::decode(body).map_err(|error| ManifestError::Body(error.to_string()))?;
        raw.validate(header.engine)
    }

    /// Sum of the sizes of its files, in bytes.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.files.iter().map(|file| file.bytes).sum()
    }
}

#[derive(Encode, Decode)]
#[cbor(map)]
struct RawFile {
    #[n(0)]
    name: String,
    #[n(1)]
    role: u8,
    #[n(2)]
    bytes: u64,
    #[cbor(n(3), with = "minicbor::bytes")]
    digest: Option<[u8; 32]>,
    #[cbor(n(4), with = "minicbor::bytes")]
    sparse_digest: Option<[u8; 32]>,
}

#[derive(Encode, Decode)]
#[cbor(map)]
struct RawCompat {
    #[n(0)]
    engine_version: String,
    #[n(1)]
    platform: String,
    #[n(2)]
    cpu_features: Vec<String>,
    #[n(3)]
    agent_version: String,
    #[n(4)]
    agent_digest: String,
}

/// The body as it is on disk: plain data that nothing may be believed of before `validate`.
#[derive(Encode, Decode)]
#[cbor(map)]
struct RawManifest {
    #[n(0)]
    id: String,
    #[n(1)]
    parent: Option<String>,
    #[n(2)]
    sandbox: String,
    #[n(3)]
    runtime: String,
    #[n(4)]
    template: String,
    #[n(5)]
    generation: u64,
    #[n(6)]
    reason: u8,
    #[n(7)]
    created_at_ms: i64,
    #[n(8)]
    expires_at_ms: Option<i64>,
    #[n(9)]
    cpus: u32,
    #[n(10)]
    memory_mib: u32,
    #[n(11)]
    disk_mib: u32,
    #[n(12)]
    processes_max: u32,
    #[n(13)]
    rootfs: String,
    #[n(14)]
    memory: bool,
    #[n(15)]
    names: Vec<String>,
    #[n(16)]
    labels: BTreeMap<String, String>,
    #[n(17)]
    compat: RawCompat,
    #[n(18)]
    files: Vec<RawFile>,
}

impl From<&Manifest> for RawManifest {
    fn from(from: &Manifest) -> Self {
        let file = |file: &FileEntry| RawFile {
            name: file.name.clone(),
            role: file.role.code(),
            bytes: file.bytes,
            digest: match file.digest {
                Some(FileDigest::Whole(digest)) => Some(digest),
                _ => None,
            },
            sparse_digest: match file.digest {
                Some(FileDigest::Sparse(digest)) => Some(digest),
                _ => None,
            },
        };
        Self {
            id: from.id.to_string(),
            parent: from.parent.as_ref().map(ToString::to_string),
            sandbox: from.sandbox.to_string(),
            runtime: from.runtime.to_string(),
            template: from.template.to_string(),
            generation: from.generation.0,
            reason: from.reason.code(),
            created_at_ms: from.created_at_ms,
            expires_at_ms: from.expires_at_ms,
            cpus: from.shape.cpus,
            memory_mib: from.shape.memory_mib,
            disk_mib: from.shape.disk_mib,
            processes_max: from.shape.processes_max,
            rootfs: from.rootfs.clone(),
            memory: from.memory,
            names: from.names.clone(),
            labels: from.labels.clone(),
            compat: RawCompat {
                engine_version: from.compat.engine_version.clone(),
                platform: from.compat.platform.clone(),
                cpu_features: from.compat.cpu_features.clone(),
                agent_version: from.compat.agent_version.clone(),
                agent_digest: from.compat.agent_digest.clone(),
            },
            files: from.files.iter().map(file).collect(),
        }
    }
}

fn parse<T: std::str::FromStr<Err: std::fmt::Display>>(
    field: &'static str,
    given: &str,
) -> Result<T, ManifestError> {
    given.parse().map_err(|error: T::Err| ManifestError::Field { field, why: error.to_string() })
}

impl RawManifest {
    fn validate(self, engine: EngineKind) -> Result<Manifest, ManifestError> {
        let field = |field, why: String| ManifestError::Field { field, why };
        if self.files.len() > FILES_MAX || self.labels.len() > LABELS_MAX {
            return Err(field("files", "too many files or labels".to_owned()));
        }
        if !plain_name(&self.rootfs) {
            return Err(field("rootfs", format!("{:?} is not a plain name", self.rootfs)));
        }
        let shape = Shape {
            cpus: self.cpus,
            memory_mib: self.memory_mib,
            disk_mib: self.disk_mib,
            processes_max: self.processes_max,
        };
        Ok(Manifest {
            id: parse("id", &self.id)?,
            parent: self.parent.as_deref().map(|id| parse("parent", id)).transpose()?,
            sandbox: parse("sandbox", &self.sandbox)?,
            runtime: parse("runtime", &self.runtime)?,
            template: parse("template", &self.template)?,
            engine,
            generation: Generation(self.generation),
            reason: Reason::from_code(self.reason)
                .ok_or_else(|| field("reason", format!("number {}", self.reason)))?,
            created_at_ms: self.created_at_ms,
            expires_at_ms: self.expires_at_ms,
            shape: shape.validate().map_err(|error| field("shape", error.to_string()))?,
            rootfs: self.rootfs,
            memory: self.memory,
            names: self.names,
            labels: self.labels,
            compat: Compat {
                engine_version: self.compat.engine_version,
                platform: self.compat.platform,
                cpu_features: self.compat.cpu_features,
                agent_version: self.compat.agent_version,
                agent_digest: self.compat.agent_digest,
            },
            files: self.files.into_iter().map(RawFile::validate).collect::<Result<_, _>>()?,
        })
    }
}

impl RawFile {
    fn validate(self) -> Result<FileEntry, ManifestError> {
        if !plain_name(&self.name) {
            let why = format!("{:?} is not a plain file name", self.name);
            return Err(ManifestError::Field { field: "files.name", why });
        }
        let role = FileRole::from_code(self.role).ok_or_else(|| ManifestError::Field {
            field: "files.role",
            why: format!("number {}", self.role),
        })?;
        let digest = match (self.digest, self.sparse_digest) {
            (Some(_), Some(_)) => {
                let why = format!("{} has two", self.name);
                return Err(ManifestError::Field { field: "files.digest", why });
            }
            (Some(digest), None) => Some(FileDigest::Whole(digest)),
            (None, sparse) => sparse.map(FileDigest::Sparse),
        };
        Ok(FileEntry { name: self.name, role, bytes: self.bytes, digest })
    }
}

/// A name that stays inside the folder it is looked up in.
fn plain_name(name: &str) -> bool {
    !name.is_empty()
        && name.len() <= 255
        && name != "."
        && name != ".."
        && name.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"._-".contains(&byte))
}

impl Reason {
    const ALL: [Self; 6] =
        [Self::Pause, Self::Checkpoint, Self::Fork, Self::Template, Self::Policy, Self::Internal];

    fn code(self) -> u8 {
        match self {
            Self::Pause => 1,
            Self::Checkpoint => 2,
            Self::Fork => 3,
            Self::Template => 4,
            Self::Policy => 5,
            Self::Internal => 6,
        }
    }

    fn from_code(code: u8) -> Option<Self> {
        Self::ALL.into_iter().find(|reason| reason.code() == code)
    }

    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Pause => "pause",
            Self::Checkpoint => "checkpoint",
            Self::Fork => "fork",
            Self::Template => "template",
            Self::Policy => "policy",
            Self::Internal => "internal",
        }
    }
}

impl FileRole {
    const ALL: [Self; 4] = [Self::Memory, Self::Devices, Self::Disk, Self::Config];

    fn code(self) -> u8 {
        match self {
            Self::Memory => 1,
            Self::Devices => 2,
            Self::Disk => 3,
            Self::Config => 4,
        }
    }

    fn from_code(code: u8) -> Option<Self> {
        Self::ALL.into_iter().find(|role| role.code() == code)
    }
}
