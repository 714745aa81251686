//! Digests for what was published without them.
//!
//! The new manifest takes the old one's place by an exchange of names, which fails where there is no
//! old one: a snapshot that was removed meanwhile does not come back.

use std::fs::File;
use std::io;

use dormouse_snapshot::Manifest;
use dormouse_types::SnapshotId;
use rustix::fs::{CWD, RenameFlags, renameat_with};
use rustix::io::Errno;

use crate::error::{CompleteError, LoadError};
use crate::verify::Cancel;
use crate::{MANIFEST, MANIFEST_TMP, Store, draft, extents, fs};

pub fn complete(store: &Store, id: &SnapshotId, cancel: &Cancel) -> Result<Option<Manifest>, CompleteError> {
    let mut manifest = match store.load(id) {
        Err(LoadError::NotFound { .. }) => return Ok(None),
        Err(source) => return Err(CompleteError::Load { id: id.clone(), source: Box::new(source) }),
        Ok(manifest) => manifest,
    };
    let dir = store.dir(id);
    let failed = |action, source: io::Error| CompleteError::Io { id: id.clone(), action, source };
    let gone = |error: &io::Error| error.kind() == io::ErrorKind::NotFound && !dir.join(MANIFEST).exists();
    let mut found = false;
    let engine = manifest.engine;
    for entry in manifest.files.iter_mut().filter(|entry| entry.digest.is_none()) {
        let role = entry.role;
        let hashed = File::open(dir.join(&entry.name))
            .and_then(|file| extents::digest_by_role(&file, engine, role, cancel.flag()));
        let (digest, bytes) = match hashed {
            Err(error) if gone(&error) => return Ok(None),
            other => other.map_err(|source| failed("hash", source))?,
        };
        if bytes != entry.bytes {
            let why = format!("{} has {bytes} bytes, the manifest says {}", entry.name, entry.bytes);
            return Err(failed("hash", io::Error::new(io::ErrorKind::InvalidData, why)));
        }
        entry.digest = Some(digest);
        found = true;
    }
    if !found {
        return Ok(Some(manifest));
    }
    let bytes = manifest.encode().map_err(|source| CompleteError::Manifest { id: id.clone(), source })?;
    let (tmp, target) = (dir.join(MANIFEST_TMP), dir.join(MANIFEST));
    match draft::write_synced(&tmp, &bytes) {
        Err(error) if gone(&error) => return Ok(None),
        other => other.map_err(|source| failed("write the manifest of", source))?,
    }
    match renameat_with(CWD, &tmp, CWD, &target, RenameFlags::EXCHANGE) {
        Err(Errno::NOENT) => return Ok(None),
        other => other.map_err(|error| failed("exchange the manifest of", error.into()))?,
    }
    fs::sync_dir(&dir).map_err(|source| failed("sync the folder of", source))?;
    // The one without digests. Whatever becomes of it, it is not looked at.
    let _ = std::fs::remove_file(&tmp);
    Ok(Some(manifest))
}
