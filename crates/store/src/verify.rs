//! Reading a snapshot's files back and comparing them with its manifest.

use std::fs::File;
use std::io;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use dormouse_snapshot::{FileDigest, FileEntry, Manifest};

use crate::digest::digest_file;
use crate::error::VerifyError;
use crate::extents::digest_sparse;

/// Ends a verification from another thread; clones are one switch.
#[derive(Debug, Clone, Default)]
pub struct Cancel(Arc<AtomicBool>);

impl Cancel {
    pub fn cancel(&self) {
        self.0.store(true, Ordering::Relaxed);
    }

    pub(crate) fn flag(&self) -> &AtomicBool {
        &self.0
    }

    #[must_use]
    pub fn is_cancelled(&self) -> bool {
        self.0.load(Ordering::Relaxed)
    }
}

pub fn files(dir: &Path, manifest: &Manifest, cancel: &Cancel) -> Result<(), VerifyError> {
    manifest.files.iter().try_for_each(|entry| one(dir, manifest, entry, cancel))
}

fn one(dir: &Path, manifest: &Manifest, entry: &FileEntry, cancel: &Cancel) -> Result<(), VerifyError> {
    let id = &manifest.id;
    let damaged = |why: String| VerifyError::Damaged { id: id.clone(), file: entry.name.clone(), why };
    let read = |source: io::Error| match source.kind() {
        io::ErrorKind::NotFound => damaged("it is missing".to_owned()),
        io::ErrorKind::UnexpectedEof => damaged("it shrank while it was read".to_owned()),
        io::ErrorKind::Interrupted if cancel.is_cancelled() => VerifyError::Cancelled { id: id.clone() },
        _ => VerifyError::Read { id: id.clone(), file: entry.name.clone(), source },
    };
    let file = File::open(dir.join(&entry.name)).map_err(read)?;
    let bytes = file.metadata().map_err(read)?.len();
    if bytes != entry.bytes {
        return Err(damaged(format!("it has {bytes} bytes, the manifest says {}", entry.bytes)));
    }
    let (found, expected) = match entry.digest {
        None => return Ok(()),
        Some(FileDigest::Whole(expected)) => (digest_file(&file, &cancel.0), expected),
        Some(FileDigest::Sparse(expected)) => (digest_sparse(&file, &cancel.0), expected),
    };
    if found.map_err(read)?.0 != expected {
        return Err(damaged("its content does not match the digest in the manifest".to_owned()));
    }
    Ok(())
}
