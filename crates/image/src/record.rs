//! What is known of an image: `image.json` beside its root file system.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{self, Read, Write};
use std::path::Path;

use serde::{Deserialize, Serialize};

use crate::error::LoadError;

const RECORD_BYTES_MAX: u64 = 4 << 20;
const RECORD_VERSION: u32 = 1;

/// Where an image came from.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "lowercase")]
pub enum Source {
    Debian {
        suite: String,
        packages: Vec<String>,
    },
    Oci {
        reference: String,
        manifest_digest: String,
    },
    /// The flattened file system of a sandbox that built a template.
    Sandbox {
        base: String,
        name: String,
    },
}

/// How the image wants to be run.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct ImageConfig {
    pub env: BTreeMap<String, String>,
    /// Empty: the default user.
    pub user: String,
    /// Empty: the user's home.
    pub workdir: String,
    pub entrypoint: Vec<String>,
    pub cmd: Vec<String>,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Image {
    pub version: u32,
    pub id: String,
    pub source: Source,
    /// Of the inputs: the same digest means the same image. Hex.
    pub digest: String,
    /// Disk blocks of the root file system.
    pub bytes: u64,
    pub files: u64,
    /// Unix time, milliseconds.
    pub created_at_ms: i64,
    #[serde(default)]
    pub config: ImageConfig,
    /// What the input had and the image has not: devices, attributes that a container may not set.
    #[serde(default)]
    pub notes: Vec<String>,
}

impl Image {
    pub(crate) fn new(id: String, source: Source, digest: String, config: ImageConfig) -> Self {
        let created_at_ms = dormouse_types::Timestamp::now().as_millisecond();
        let notes = Vec::new();
        Self { version: RECORD_VERSION, id, source, digest, bytes: 0, files: 0, created_at_ms, config, notes }
    }

    pub(crate) fn read(path: &Path, id: &str) -> Result<Self, LoadError> {
        let failed = |source| LoadError::Io { id: id.to_owned(), source };
        let file = match File::open(path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                return Err(LoadError::NotFound { id: id.to_owned() });
            }
            other => other.map_err(failed)?,
        };
        let mut text = String::new();
        file.take(RECORD_BYTES_MAX).read_to_string(&mut text).map_err(failed)?;
        let damaged = |why: String| LoadError::Damaged { id: id.to_owned(), path: path.to_owned(), why };
        let image: Self = serde_json::from_str(&text).map_err(|error| damaged(error.to_string()))?;
        if image.version != RECORD_VERSION {
            return Err(damaged(format!("version {} is not known to this release", image.version)));
        }
        if image.id != id {
            return Err(damaged(format!("it is the record of {:?}", image.id)));
        }
        Ok(image)
    }

    pub(crate) fn write(&self, path: &Path) -> io::Result<()> {
        let mut file = File::create_new(path)?;
        serde_json::to_writer_pretty(&mut file, self)?;
        file.write_all(b"\n")?;
        file.sync_all()
    }
}
