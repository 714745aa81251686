//! A frozen layer: an open file and where it has data.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::Path;
use std::sync::Arc;

use rustix::fs::{AtFlags, CWD};

use super::{Extents, LayerError, Merged, io_error};

/// How much is copied at once.
const COPY_BYTES: usize = 1 << 20;

/// A layer that is never written again. Clones share the file.
#[derive(Debug, Clone)]
pub struct Layer {
    pub file: Arc<File>,
    pub extents: Arc<Extents>,
    /// For messages.
    pub name: Arc<str>,
}

impl Layer {
    /// Opens a layer of `bytes` logical bytes. `aligned`: what is not made of whole pages is refused, as it
    /// must be wherever another layer lies below.
    pub fn open(path: &Path, bytes: u64, aligned: bool) -> Result<Self, LayerError> {
        let name = path.display().to_string();
        let file = File::open(path).map_err(io_error("open", &name))?;
        let given = length(&file, &name)?;
        if given != bytes {
            return Err(LayerError::Size { name, bytes: given, expected: bytes });
        }
        let extents = Extents::scan(&file, &name, bytes, aligned)?;
        Ok(Self { file: Arc::new(file), extents: Arc::new(extents), name: name.into() })
    }

    /// A layer whose file is open already; made of whole pages.
    pub fn of_file(file: &Arc<File>, name: &str, bytes: u64) -> Result<Self, LayerError> {
        let given = length(file, name)?;
        if given != bytes {
            return Err(LayerError::Size { name: name.to_owned(), bytes: given, expected: bytes });
        }
        let extents = Extents::scan(file, name, bytes, true)?;
        Ok(Self { file: Arc::clone(file), extents: Arc::new(extents), name: name.into() })
    }

    /// Checks that the file system agrees on what was written, and puts it on stable storage.
    pub fn sync(&self, bytes: u64) -> Result<(), LayerError> {
        self.file.sync_all().map_err(io_error("sync", &self.name))?;
        let seen = Extents::scan(&self.file, &self.name, bytes, true)?;
        if seen == *self.extents {
            return Ok(());
        }
        Err(LayerError::Holes { name: self.name.to_string() })
    }
}

pub fn length(file: &File, name: &str) -> Result<u64, LayerError> {
    Ok(file.metadata().map_err(io_error("look at", name))?.len())
}

/// Makes a new, empty layer that only its owner may read.
pub fn create(path: &Path, bytes: u64) -> Result<File, LayerError> {
    let name = path.display().to_string();
    let file = OpenOptions::new()
        .read(true)
        .write(true)
        .create_new(true)
        .mode(0o600)
        .open(path)
        .map_err(io_error("create", &name))?;
    file.set_len(bytes).map_err(io_error("size", &name))?;
    Ok(file)
}

/// Gives a frozen layer a further name; where that cannot be (another file system, no name left), copies it.
/// True: it is a link.
pub fn link_or_copy(layer: &Layer, bytes: u64, to: &Path) -> Result<bool, LayerError> {
    if link(&layer.file, to) {
        return Ok(true);
    }
    let file = create(to, bytes)?;
    for range in layer.extents.iter() {
        copy(&layer.file, &file, range.start, range.end).map_err(io_error("copy", &layer.name))?;
    }
    file.sync_all().map_err(io_error("sync the copy of", &layer.name))?;
    Ok(false)
}

/// Gives an open file a further name. False: that cannot be.
pub fn link(file: &File, to: &Path) -> bool {
    let from = format!("/proc/self/fd/{}", file.as_raw_fd());
    rustix::fs::linkat(CWD, from, CWD, to, AtFlags::SYMLINK_FOLLOW).is_ok()
}

/// Writes what a chain answers as one new layer at `to`, synced.
pub fn flatten(layers: &[Layer], bytes: u64, to: &Path) -> Result<Layer, LayerError> {
    let mut merged = Merged::default();
    for (number, layer) in layers.iter().enumerate() {
        merged.overlay(&layer.extents, number);
    }
    let name = to.display().to_string();
    let file = create(to, bytes)?;
    let mut extents = Extents::default();
    for piece in merged.iter() {
        let Some(layer) = layers.get(piece.layer) else { continue };
        copy(&layer.file, &file, piece.start, piece.end).map_err(io_error("copy", &layer.name))?;
        extents.push(piece.start..piece.end);
    }
    let layer = Layer { file: Arc::new(file), extents: Arc::new(extents), name: name.into() };
    layer.sync(bytes)?;
    Ok(layer)
}

/// Copies a range; the file system may share the blocks.
fn copy(from: &File, to: &File, start: u64, end: u64) -> io::Result<()> {
    let mut at = start;
    while at < end {
        let want = usize::try_from(end - at).unwrap_or(COPY_BYTES).min(COPY_BYTES);
        let (mut from_at, mut to_at) = (at, at);
        match rustix::fs::copy_file_range(from, Some(&mut from_at), to, Some(&mut to_at), want) {
            Ok(done) if done > 0 => at += done as u64,
            _ => return copy_by_hand(from, to, at, end),
        }
    }
    Ok(())
}

fn copy_by_hand(from: &File, to: &File, mut at: u64, end: u64) -> io::Result<()> {
    let mut buffer = vec![0; COPY_BYTES];
    while at < end {
        let want = usize::try_from(end - at).unwrap_or(COPY_BYTES).min(COPY_BYTES);
        from.read_exact_at(&mut buffer[..want], at)?;
        to.write_all_at(&buffer[..want], at)?;
        at += want as u64;
    }
    Ok(())
}
