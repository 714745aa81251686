//! Opening the store: what a crash left is swept, what cannot be read is kept aside, both are told.

use std::io;
use std::path::{Path, PathBuf};

use dormouse_snapshot::{HeaderError, ManifestError};
use dormouse_types::SnapshotId;

use crate::error::{LoadError, OpenError};
use crate::{MANIFEST, fs, load};

/// What `Store::open` found amiss.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Swept {
    /// A folder without a manifest: begun and never published, or removed half-way. Deleted.
    Unfinished { id: SnapshotId, bytes: u64 },
    /// The manifest is damaged. The folder was moved to `kept_at`; nothing of it was deleted.
    Damaged { id: SnapshotId, kept_at: PathBuf, why: String },
    /// The manifest could not be read here and now (I/O error, newer format). Left where it is.
    Unreadable { id: SnapshotId, why: String },
}

pub fn open(dir: &Path) -> Result<Vec<Swept>, OpenError> {
    let failed = |action, path: &Path, source| OpenError { action, path: path.to_owned(), source };
    make_private_dir(dir).map_err(|source| failed("make the folder", dir, source))?;
    let mut swept = Vec::new();
    for entry in std::fs::read_dir(dir).map_err(|source| failed("list", dir, source))? {
        let entry = entry.map_err(|source| failed("list", dir, source))?;
        let Some(id) = entry.file_name().to_str().and_then(|name| name.parse::<SnapshotId>().ok()) else {
            continue;
        };
        // A folder kept aside has a dot in its name, which no id has.
        if !entry.file_type().is_ok_and(|kind| kind.is_dir()) {
            continue;
        }
        swept.extend(examine(dir, &id)?);
    }
    Ok(swept)
}

fn examine(store: &Path, id: &SnapshotId) -> Result<Option<Swept>, OpenError> {
    let dir = store.join(id.as_str());
    let failed = |action, source| OpenError { action, path: dir.clone(), source };
    match load(&dir, id) {
        Ok(_) => Ok(None),
        Err(LoadError::NotFound { .. }) => {
            // Asked once more by another call, so that no odd error of one call deletes a snapshot.
            match std::fs::symlink_metadata(dir.join(MANIFEST)) {
                Err(error) if error.kind() == io::ErrorKind::NotFound => {}
                _ => return Ok(Some(Swept::Unreadable { id: id.clone(), why: "it comes and goes".into() })),
            }
            let bytes = fs::disk_bytes(&dir);
            std::fs::remove_dir_all(&dir)
                .map_err(|source| failed("delete the unfinished snapshot", source))?;
            Ok(Some(Swept::Unfinished { id: id.clone(), bytes }))
        }
        Err(LoadError::Damaged { source: ManifestError::Header(HeaderError::Version(version)), .. }) => {
            let why = format!("format version {version} is not known to this release");
            Ok(Some(Swept::Unreadable { id: id.clone(), why }))
        }
        Err(LoadError::Damaged { source, .. }) => {
            let kept_at = free_name(store, id);
            std::fs::rename(&dir, &kept_at)
                .map_err(|source| failed("keep aside the damaged snapshot", source))?;
            Ok(Some(Swept::Damaged { id: id.clone(), kept_at, why: source.to_string() }))
        }
        Err(LoadError::Read { source, .. }) => {
            Ok(Some(Swept::Unreadable { id: id.clone(), why: source.to_string() }))
        }
    }
}

fn free_name(store: &Path, id: &SnapshotId) -> PathBuf {
    let name = |count: u32| store.join(format!("{id}.damaged.{count}"));
    (1..u32::MAX).map(name).find(|path| !path.exists()).unwrap_or_else(|| name(0))
}

fn make_private_dir(dir: &Path) -> io::Result<()> {
    use std::os::unix::fs::DirBuilderExt;
    std::fs::DirBuilder::new().recursive(true).mode(0o700).create(dir)
}
