//! The few file-system steps that publication and sweeping are made of.

use std::fs::File;
use std::io::{self, Read};
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use dormouse_snapshot::{BODY_BYTES_MAX, HEADER_BYTES};

/// No valid manifest is longer.
pub const MANIFEST_BYTES_MAX: usize = HEADER_BYTES + BODY_BYTES_MAX;

pub fn sync_dir(dir: &Path) -> io::Result<()> {
    File::open(dir)?.sync_all()
}

/// Reads a file to its end, or refuses it when it is longer than `bytes_max`.
pub fn read_bounded(file: &File, bytes_max: usize) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    file.take(bytes_max as u64 + 1).read_to_end(&mut bytes)?;
    if bytes.len() > bytes_max {
        let why = format!("more than {bytes_max} bytes: too long for a manifest");
        return Err(io::Error::new(io::ErrorKind::InvalidData, why));
    }
    Ok(bytes)
}

/// Blocks of all files below `dir`; what cannot be read counts as nothing.
pub fn disk_bytes(dir: &Path) -> u64 {
    let Ok(entries) = std::fs::read_dir(dir) else { return 0 };
    entries
        .flatten()
        .map(|entry| match entry.metadata() {
            Ok(meta) if meta.is_dir() => disk_bytes(&entry.path()),
            Ok(meta) if meta.nlink() == 1 => meta.blocks() * 512,
            _ => 0,
        })
        .sum()
}

/// Blocks of the files in `dir`, those too that others share.
pub fn occupied_bytes(dir: &Path) -> u64 {
    let Ok(entries) = std::fs::read_dir(dir) else { return 0 };
    entries.flatten().filter_map(|entry| entry.metadata().ok()).map(|meta| meta.blocks() * 512).sum()
}

/// True for the errors that mean "no room": a full disk and a used-up quota.
pub fn is_no_space(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded)
}
