//! A snapshot that is being written. It is a folder without a manifest until it is published.
//!
//! Order of publication: files are synced, small ones hashed → `manifest.tmp` is written and synced → the
//! folder is synced → rename → the folder is synced. A crash before the rename leaves nothing that
//! counts, one after it leaves the whole snapshot.

use std::fs::{DirBuilder, File, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::AtomicBool;

use dormouse_snapshot::{FileEntry, FileRole, Manifest};
use dormouse_types::{EngineKind, SnapshotId};
use rustix::fs::{FallocateFlags, OFlags};

use crate::error::{BeginError, PublishError};
use crate::{MANIFEST, MANIFEST_TMP, SMALL_BYTES_MAX, extents, fs};

/// Taken at the start and given to the manifest at the end: a disk that runs full in between fails the
/// writer of the state, while the sandbox still runs, and not the publication.
const RESERVED_BYTES: u64 = 64 << 10;

/// Steps of the publication, in order: where a test makes it fail.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Stage {
    FilesSynced,
    ManifestWritten,
    Renamed,
}

/// An unpublished snapshot. Dropped unpublished, it is removed.
#[derive(Debug)]
pub struct Draft {
    id: SnapshotId,
    dir: PathBuf,
    published: bool,
}

impl Draft {
    pub(crate) fn begin(store: &Path, id: &SnapshotId) -> Result<Self, BeginError> {
        let dir = store.join(id.as_str());
        let failed = |source: io::Error| match source.kind() {
            io::ErrorKind::AlreadyExists => BeginError::Exists { id: id.clone() },
            _ if fs::is_no_space(&source) => BeginError::NoSpace { path: dir.clone() },
            _ => BeginError::Io { path: dir.clone(), source },
        };
        DirBuilder::new().mode(0o700).create(&dir).map_err(failed)?;
        let draft = Self { id: id.clone(), dir: dir.clone(), published: false };
        draft.reserve().and_then(|()| fs::sync_dir(store)).map_err(failed)?;
        Ok(draft)
    }

    fn reserve(&self) -> io::Result<()> {
        let file = private_file(&self.dir.join(MANIFEST_TMP))?;
        match rustix::fs::fallocate(&file, FallocateFlags::KEEP_SIZE, 0, RESERVED_BYTES) {
            // A file system that cannot reserve is used as it is.
            Err(rustix::io::Errno::OPNOTSUPP) => Ok(()),
            other => Ok(other?),
        }
    }

    #[must_use]
    pub fn id(&self) -> &SnapshotId {
        &self.id
    }

    /// The folder to write into. Names that start with `manifest` are the store's.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.dir
    }

    /// Makes the snapshot exist, with `files` (their writers have ended) as its content. The manifest's
    /// own list of files is replaced. On an error the draft is as it was: it may be published again,
    /// restored from, or dropped.
    pub fn publish(
        &mut self,
        manifest: Manifest,
        files: &[(&str, FileRole)],
    ) -> Result<Manifest, PublishError> {
        self.publish_with(manifest, files, &mut |_| Ok(()))
    }

    /// The same, with a hook after each stage: an error of it is one of the stage.
    pub fn publish_with(
        &mut self,
        mut manifest: Manifest,
        files: &[(&str, FileRole)],
        hook: &mut dyn FnMut(Stage) -> io::Result<()>,
    ) -> Result<Manifest, PublishError> {
        if self.published {
            return Err(PublishError::Twice);
        }
        if manifest.id != self.id {
            return Err(PublishError::OtherId { given: manifest.id, draft: self.id.clone() });
        }
        manifest.files = self.seal(manifest.engine, files)?;
        let mut stage = |stage, action| hook(stage).map_err(|source| io_error(action, &self.dir, source));
        stage(Stage::FilesSynced, "sync the files of")?;
        let bytes =
            manifest.encode().map_err(|source| PublishError::Manifest { id: self.id.clone(), source })?;
        let tmp = self.dir.join(MANIFEST_TMP);
        write_synced(&tmp, &bytes).map_err(|source| io_error("write", &tmp, source))?;
        fs::sync_dir(&self.dir).map_err(|source| io_error("sync", &self.dir, source))?;
        stage(Stage::ManifestWritten, "write the manifest of")?;
        let target = self.dir.join(MANIFEST);
        std::fs::rename(&tmp, &target).map_err(|source| io_error("rename", &tmp, source))?;
        self.published = true;
        let synced = fs::sync_dir(&self.dir);
        stage(Stage::Renamed, "publish")
            .and_then(|()| synced.map_err(|source| io_error("sync", &self.dir, source)))
            // Visible but perhaps not durable: taken back, so that an error always means "not there".
            .inspect_err(|_| self.published = std::fs::rename(&target, &tmp).is_err())?;
        Ok(manifest)
    }

    /// Lengths of the files and digests of the small ones, and all of them on the disk.
    fn seal(&self, engine: EngineKind, files: &[(&str, FileRole)]) -> Result<Vec<FileEntry>, PublishError> {
        let opened = files
            .iter()
            .map(|(name, role)| Ok((*name, *role, open_plain(&self.dir, name)?)))
            .collect::<Result<Vec<_>, PublishError>>()?;
        opened.iter().map(|(name, role, file)| self.entry(name, engine, *role, file)).collect()
    }

    fn entry(
        &self,
        name: &str,
        engine: EngineKind,
        role: FileRole,
        file: &File,
    ) -> Result<FileEntry, PublishError> {
        let path = self.dir.join(name);
        file.sync_all().map_err(|source| io_error("sync", &path, source))?;
        let mut bytes = file.metadata().map_err(|source| io_error("examine", &path, source))?.len();
        let mut digest = None;
        if bytes <= SMALL_BYTES_MAX {
            let hashed = extents::digest_by_role(file, engine, role, &AtomicBool::new(false))
                .map_err(|source| io_error("hash", &path, source))?;
            (digest, bytes) = (Some(hashed.0), hashed.1);
        }
        Ok(FileEntry { name: name.to_owned(), role, bytes, digest })
    }
}

impl Drop for Draft {
    fn drop(&mut self) {
        if !self.published
            && let Err(error) = std::fs::remove_dir_all(&self.dir)
        {
            let path = self.dir.display();
            tracing::warn!(%error, %path, "an unfinished snapshot stays until the next start");
        }
    }
}

/// Opens a file of the draft: no link, no folder, no path, none of the store's own names.
fn open_plain(dir: &Path, name: &str) -> Result<File, PublishError> {
    let bad = |why: &str| PublishError::File { name: name.to_owned(), why: why.to_owned() };
    if name.is_empty() || name.contains('/') || name == "." || name == ".." || name.starts_with(MANIFEST) {
        return Err(bad("the name cannot be used"));
    }
    let path = dir.join(name);
    let flags = OFlags::NOFOLLOW.union(OFlags::NONBLOCK).bits();
    let file = OpenOptions::new()
        .read(true)
        .custom_flags(i32::try_from(flags).unwrap_or_default())
        .open(&path)
        .map_err(|source| match source.kind() {
            io::ErrorKind::NotFound => bad("it does not exist"),
            _ if source.raw_os_error() == Some(rustix::io::Errno::LOOP.raw_os_error()) => bad("it is a link"),
            _ => io_error("open", &path, source),
        })?;
    let meta = file.metadata().map_err(|source| io_error("examine", &path, source))?;
    if meta.is_file() { Ok(file) } else { Err(bad("it is no regular file")) }
}

/// Opened as it is: the reserved blocks stay.
fn private_file(path: &Path) -> io::Result<File> {
    OpenOptions::new().write(true).create(true).truncate(false).mode(0o600).open(path)
}

pub(crate) fn write_synced(path: &Path, bytes: &[u8]) -> io::Result<()> {
    let mut file = private_file(path)?;
    file.write_all(bytes)?;
    file.set_len(bytes.len() as u64)?;
    file.sync_all()
}

fn io_error(action: &'static str, path: &Path, source: io::Error) -> PublishError {
    if fs::is_no_space(&source) {
        return PublishError::NoSpace { path: path.to_owned() };
    }
    PublishError::Io { action, path: path.to_owned(), source }
}
