//! Facts about files and file systems: what is cached, what is free.

use std::fs::File;
use std::io::{self, IoSliceMut};
use std::ops::Range;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::Path;

use rustix::fs::SeekFrom;
use rustix::io::{Errno, ReadWriteFlags};

const SAMPLES: u64 = 16;

/// Whether (nearly) all of the file is in the page cache: a read of it would not wait for the disk.
/// Asks at a few places by `RWF_NOWAIT` (preadv2(2)); where the file system cannot tell: false.
pub fn is_cached(file: &File) -> io::Result<bool> {
    let bytes = file.metadata()?.len();
    let mut buffer = [0_u8; 1];
    for sample in 0..SAMPLES {
        let offset = bytes.saturating_sub(1) / SAMPLES * sample;
        let mut parts = [IoSliceMut::new(&mut buffer)];
        match rustix::io::preadv2(file, &mut parts, offset, ReadWriteFlags::NOWAIT) {
            Ok(_) => {}
            Err(Errno::AGAIN | Errno::OPNOTSUPP | Errno::INVAL | Errno::NOSYS) => return Ok(false),
            Err(error) => return Err(error.into()),
        }
    }
    Ok(true)
}

/// Whether the file can be read and written past the page cache (`O_DIRECT`, open(2)): not every file
/// system can.
#[must_use]
pub fn takes_direct(path: &Path) -> bool {
    let flags = i32::try_from(rustix::fs::OFlags::DIRECT.bits()).unwrap_or_default();
    File::options().read(true).custom_flags(flags).open(path).is_ok()
}

/// The first run of data at `at` or behind it, as the file system keeps it; `None`: only a hole follows (`SEEK_DATA`,
/// lseek(2)). The file's own offset moves.
pub fn next_data(file: &File, at: u64) -> io::Result<Option<Range<u64>>> {
    match rustix::fs::seek(file, SeekFrom::Data(at)) {
        Ok(start) => Ok(Some(start..rustix::fs::seek(file, SeekFrom::Hole(start))?)),
        Err(Errno::NXIO) => Ok(None),
        Err(error) => Err(error.into()),
    }
}

/// Bytes that may still be written to the file system that holds `path`.
pub fn free_bytes(path: &Path) -> io::Result<u64> {
    let stat = rustix::fs::statvfs(path)?;
    Ok(stat.f_bavail.saturating_mul(stat.f_frsize))
}

/// With this many times the bytes free, nobody needs to ask for them.
const PLENTY: u64 = 8;

/// Whether the file system has `bytes` for a file at `path`. Where it may not, it is asked for them and
/// gets them back. `path` must not exist; it does not exist afterwards.
pub fn has_room(path: &Path, bytes: u64) -> io::Result<bool> {
    let free = free_bytes(path.parent().unwrap_or(path))?;
    if free < bytes || free / PLENTY >= bytes {
        return Ok(free >= bytes);
    }
    let file = File::options().write(true).create_new(true).open(path)?;
    let asked = rustix::fs::fallocate(&file, rustix::fs::FallocateFlags::empty(), 0, bytes.max(1));
    std::fs::remove_file(path)?;
    match asked {
        // A file system without fallocate(2): what statvfs said has to do.
        Ok(()) | Err(Errno::OPNOTSUPP) => Ok(true),
        Err(Errno::NOSPC | Errno::DQUOT | Errno::FBIG) => Ok(false),
        Err(error) => Err(error.into()),
    }
}

/// Blocks that the file occupies, in bytes.
pub fn disk_bytes(path: &Path) -> io::Result<u64> {
    Ok(std::fs::metadata(path)?.blocks().saturating_mul(512))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_just_written_is_cached() {
        let path = std::env::temp_dir().join(format!("dormouse-cached-{}", std::process::id()));
        std::fs::write(&path, vec![7_u8; 1 << 20]).unwrap();
        let file = File::open(&path).unwrap();
        assert!(is_cached(&file).unwrap());
        assert!(!takes_direct(&path.with_extension("none")));
        assert!(disk_bytes(&path).is_ok());
        std::fs::remove_file(&path).unwrap();
    }

    #[test]
    fn room_is_asked_for_and_given_back() {
        let path = std::env::temp_dir().join(format!("dormouse-room-{}", std::process::id()));
        assert!(has_room(&path, 1 << 20).unwrap());
        assert!(!has_room(&path, u64::MAX / 2).unwrap());
        assert!(!path.exists());
    }
}
