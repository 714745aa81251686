//! Snapshots on disk: one folder each, published by one atomic rename of its manifest.
//!
//! ```text
//! begin ──> draft: files are written ──> publish: fsync, rename `manifest.tmp` ──> snapshot ──> complete
//!             │ dropped, or crash: swept                                               │
//!             └───────> gone <── the rest is removed <── rename to `manifest.gone` <───┘ remove
//! ```
//!
//! Large files are hashed by `complete`, after the publication: it takes as long as writing them, and
//! what waits for a pause should not wait for it.
//!
//! Invariants: a snapshot exists if and only if its folder holds `manifest`, and then everything the
//! manifest names is on disk; no published file is ever changed, and the manifest only to add digests
//! that it lacks; what cannot be read is kept aside by name, never deleted. All calls block: run them on blocking threads.

mod complete;
mod digest;
mod draft;
mod error;
mod extents;
mod fs;
mod open;
mod verify;

use std::fs::File;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use dormouse_snapshot::{Manifest, ManifestError};
use dormouse_types::{SnapshotId, Timestamp};

pub use digest::{DIGEST_THREADS_MAX, digest_file};
pub use draft::{Draft, Stage};
pub use error::{
    BeginError, CompleteError, ListError, LoadError, OpenError, PublishError, RemoveError, SpaceError,
    VerifyError,
};
pub use extents::digest_sparse;
pub use open::Swept;
pub use verify::Cancel;

/// The published manifest: the snapshot exists while this does.
const MANIFEST: &str = "manifest";
const MANIFEST_TMP: &str = "manifest.tmp";
/// What a removal renames the manifest to: the folder is then unfinished and goes at the next open.
const MANIFEST_GONE: &str = "manifest.gone";

/// Files up to this length are hashed when they are published.
const SMALL_BYTES_MAX: u64 = 1 << 20;

/// A folder of snapshots. Cheap to clone; clones share nothing but the path.
#[derive(Debug, Clone)]
pub struct Store {
    dir: Arc<PathBuf>,
}

/// What a removal gave back.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Freed {
    /// Bytes on the disk (blocks, not lengths).
    pub bytes: u64,
}

/// Room on the file system that holds the store.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Space {
    pub total_bytes: u64,
    /// What this process may still use.
    pub available_bytes: u64,
}

impl Store {
    /// Opens (and where needed makes) the folder, and sweeps what a crash left: see [`Swept`].
    pub fn open(dir: &Path) -> Result<(Self, Vec<Swept>), OpenError> {
        let swept = open::open(dir)?;
        Ok((Self { dir: Arc::new(dir.to_owned()) }, swept))
    }

    /// Starts a snapshot: an empty folder that only its publication makes visible.
    pub fn begin(&self, id: &SnapshotId) -> Result<Draft, BeginError> {
        Draft::begin(&self.dir, id)
    }

    /// Where the files of a snapshot are.
    #[must_use]
    pub fn dir(&self, id: &SnapshotId) -> PathBuf {
        self.dir.join(id.as_str())
    }

    pub fn load(&self, id: &SnapshotId) -> Result<Manifest, LoadError> {
        load(&self.dir(id), id)
    }

    /// Reads every manifest, one at a time: the caller keeps what it needs.
    pub fn each(&self) -> Result<impl Iterator<Item = (SnapshotId, Result<Manifest, LoadError>)>, ListError> {
        let store = self.clone();
        let ids = self.ids()?;
        Ok(ids.into_iter().filter_map(move |id| match store.load(&id) {
            // Removed between the listing and now.
            Err(LoadError::NotFound { .. }) => None,
            loaded => Some((id, loaded)),
        }))
    }

    /// The manifests that can be read, oldest first.
    pub fn list(&self) -> Result<Vec<Manifest>, ListError> {
        let mut found: Vec<Manifest> =
            self.each()?.filter_map(|(id, loaded)| loaded.map_err(|error| warn(&id, &error)).ok()).collect();
        found.sort_by(|a, b| (a.created_at_ms, &a.id).cmp(&(b.created_at_ms, &b.id)));
        Ok(found)
    }

    /// Snapshots whose parent is `id`.
    pub fn children(&self, id: &SnapshotId) -> Result<Vec<SnapshotId>, ListError> {
        Ok(self
            .each()?
            .filter_map(|(child, loaded)| (loaded.ok()?.parent.as_ref() == Some(id)).then_some(child))
            .collect())
    }

    /// Snapshots whose time is over.
    pub fn expired(&self, now: Timestamp) -> Result<Vec<SnapshotId>, ListError> {
        Ok(self.each()?.filter_map(|(id, loaded)| is_expired(&loaded.ok()?, now).then_some(id)).collect())
    }

    /// Reads all files of the snapshot and compares them with the manifest. The error names the file.
    pub fn verify(&self, id: &SnapshotId) -> Result<Manifest, VerifyError> {
        let manifest =
            self.load(id).map_err(|source| VerifyError::Load { id: id.clone(), source: Box::new(source) })?;
        self.verify_files(&manifest, &Cancel::default())?;
        Ok(manifest)
    }

    /// The same for a manifest that was loaded before. `cancel` ends it early, with an error.
    pub fn verify_files(&self, manifest: &Manifest, cancel: &Cancel) -> Result<(), VerifyError> {
        verify::files(&self.dir(&manifest.id), manifest, cancel)
    }

    /// Hashes what the manifest has no digest of, and writes the digests into it. Idempotent; `None`: the
    /// snapshot is gone.
    pub fn complete(&self, id: &SnapshotId, cancel: &Cancel) -> Result<Option<Manifest>, CompleteError> {
        complete::complete(self, id, cancel)
    }

    /// Removes a snapshot: whole before a crash, gone after it, never in between. Children stay whole:
    /// a snapshot shares no bytes with its parent.
    pub fn remove(&self, id: &SnapshotId) -> Result<Freed, RemoveError> {
        let dir = self.dir(id);
        let failed = |action, source| RemoveError::Io { id: id.clone(), action, source };
        match std::fs::rename(dir.join(MANIFEST), dir.join(MANIFEST_GONE)) {
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
                return Err(RemoveError::NotFound { id: id.clone() });
            }
            other => other.map_err(|source| failed("withdraw the manifest", source))?,
        }
        fs::sync_dir(&dir).map_err(|source| failed("sync its folder", source))?;
        let bytes = fs::disk_bytes(&dir);
        std::fs::remove_dir_all(&dir).map_err(|source| failed("delete its folder", source))?;
        Ok(Freed { bytes })
    }

    /// Bytes on the disk that the snapshot's files take, whoever else has them too: holes take none.
    #[must_use]
    pub fn occupied_bytes(&self, id: &SnapshotId) -> u64 {
        fs::occupied_bytes(&self.dir(id))
    }

    pub fn space(&self) -> Result<Space, SpaceError> {
        let failed =
            |source: rustix::io::Errno| SpaceError { path: self.dir.to_path_buf(), source: source.into() };
        let stat = rustix::fs::statvfs(self.dir.as_path()).map_err(failed)?;
        Ok(Space {
            total_bytes: stat.f_blocks.saturating_mul(stat.f_frsize),
            available_bytes: stat.f_bavail.saturating_mul(stat.f_frsize),
        })
    }

    fn ids(&self) -> Result<Vec<SnapshotId>, ListError> {
        let failed = |source| ListError { path: self.dir.to_path_buf(), source };
        let mut ids = Vec::new();
        for entry in std::fs::read_dir(self.dir.as_path()).map_err(failed)? {
            let name = entry.map_err(failed)?.file_name();
            if let Some(id) = name.to_str().and_then(|name| name.parse::<SnapshotId>().ok()) {
                ids.push(id);
            }
        }
        ids.sort();
        Ok(ids)
    }
}

/// True when the snapshot may no longer be started from.
#[must_use]
pub fn is_expired(manifest: &Manifest, now: Timestamp) -> bool {
    manifest.expires_at_ms.is_some_and(|at_ms| at_ms <= now.as_millisecond())
}

fn load(dir: &Path, id: &SnapshotId) -> Result<Manifest, LoadError> {
    let path = dir.join(MANIFEST);
    let bytes = match File::open(&path) {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
            return Err(LoadError::NotFound { id: id.clone() });
        }
        opened => opened.and_then(|file| fs::read_bounded(&file, fs::MANIFEST_BYTES_MAX)),
    }
    .map_err(|source| LoadError::Read { path: path.clone(), source })?;
    let manifest = Manifest::decode(&bytes).map_err(|source| LoadError::Damaged {
        id: id.clone(),
        path: path.clone(),
        source,
    })?;
    if manifest.id != *id {
        let why = format!("the folder of {id} holds the manifest of {}", manifest.id);
        let source = ManifestError::Field { field: "id", why };
        return Err(LoadError::Damaged { id: id.clone(), path, source });
    }
    Ok(manifest)
}

fn warn(id: &SnapshotId, error: &LoadError) {
    tracing::warn!(snapshot = %id, %error, "a snapshot cannot be listed");
}
