//! An ext4 disk image from a root file system: the root disk of a microVM.
//!
//! The same files and size give the same UUID and hash seed; the file is sparse and published by a rename.

use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::error::DiskError;
use crate::kernel;

/// The journal stays small: each of its blocks is written over and over, and a snapshot keeps them all.
const JOURNAL_MIB: u32 = 16;
/// Smaller ones have no room for the journal.
const SIZE_BYTES_MIN: u64 = 64 << 20;

/// What the disk is to be.
#[derive(Debug, Clone, Copy)]
pub struct DiskSpec<'a> {
    pub rootfs: &'a Path,
    pub size_bytes: u64,
    /// Names the content: UUID and hash seed follow from it.
    pub seed: &'a str,
}

/// Makes the disk image at `path`, replacing what is there.
pub fn build_disk(spec: &DiskSpec<'_>, path: &Path) -> Result<(), DiskError> {
    if spec.size_bytes < SIZE_BYTES_MIN {
        return Err(DiskError::TooSmall { given_bytes: spec.size_bytes, least_bytes: SIZE_BYTES_MIN });
    }
    let failed = |action, path: &Path| {
        let path = path.to_owned();
        move |source| DiskError::Io { action, path, source }
    };
    let draft = Draft(path.with_extension(format!("tmp{}", std::process::id())));
    let file = File::create(&draft.0).map_err(failed("make", &draft.0))?;
    file.set_len(spec.size_bytes).map_err(failed("size", &draft.0))?;
    let (uuid, hash_seed) = (uuid_of(spec.seed, "uuid"), uuid_of(spec.seed, "hash seed"));
    let made = kernel::run(
        Command::new("mkfs.ext4")
            .args(["-q", "-F", "-m", "0", "-L", "dormouse", "-U", &uuid, "-b", "4096"])
            .arg("-E")
            // The guest shall not initialise inode tables: that would be in each snapshot. And the holes of a
            // new file are zeros already, which is all that a journal needs to be.
            .arg(format!(
                "root_owner=0:0,hash_seed={hash_seed},lazy_itable_init=0,lazy_journal_init=1,discard"
            ))
            .arg("-J")
            .arg(format!("size={JOURNAL_MIB}"))
            .arg("-d")
            .arg(spec.rootfs)
            .arg(&draft.0)
            .env("E2FSPROGS_FAKE_TIME", "1"),
    );
    made.map_err(|source| DiskError::Make { path: path.to_owned(), source })?;
    file.sync_all().map_err(failed("sync", &draft.0))?;
    std::fs::rename(&draft.0, path).map_err(failed("publish", path))?;
    if let Some(parent) = path.parent().filter(|parent| !parent.as_os_str().is_empty()) {
        File::open(parent).and_then(|dir| dir.sync_all()).map_err(failed("sync", parent))?;
    }
    Ok(())
}

/// Goes with the value; after the rename there is nothing to remove.
struct Draft(PathBuf);

impl Drop for Draft {
    fn drop(&mut self) {
        if let Err(error) = std::fs::remove_file(&self.0)
            && error.kind() != io::ErrorKind::NotFound
        {
            tracing::warn!(%error, path = %self.0.display(), "an unfinished disk image stays");
        }
    }
}

/// A UUID of version 8 (RFC 9562: made as its maker likes).
fn uuid_of(seed: &str, purpose: &str) -> String {
    let mut hasher = blake3::Hasher::new_derive_key("dormouse disk image");
    hasher.update(purpose.as_bytes()).update(b"\n").update(seed.as_bytes());
    let hex = hasher.finalize().to_hex();
    format!("{}-{}-8{}-8{}-{}", &hex[..8], &hex[8..12], &hex[12..15], &hex[15..18], &hex[18..30])
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::MetadataExt;

    #[test]
    fn the_same_files_give_the_same_disk() {
        let dir = tempfile::tempdir().unwrap();
        let rootfs = dir.path().join("rootfs");
        std::fs::create_dir_all(rootfs.join("etc")).unwrap();
        std::fs::write(rootfs.join("etc/hostname"), "one\n").unwrap();
        let spec = DiskSpec { rootfs: &rootfs, size_bytes: 256 << 20, seed: "s" };
        let (a, b) = (dir.path().join("a.img"), dir.path().join("b.img"));
        build_disk(&spec, &a).unwrap();
        build_disk(&spec, &b).unwrap();
        assert_eq!(kernel::digest(&a).unwrap(), kernel::digest(&b).unwrap());
        let metadata = std::fs::metadata(&a).unwrap();
        assert_eq!(metadata.len(), 256 << 20);
        assert!(metadata.blocks() * 512 < 8 << 20, "{} blocks", metadata.blocks());
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 3, "something was left");
        let small = DiskSpec { size_bytes: 1 << 20, ..spec };
        assert!(matches!(build_disk(&small, &a), Err(DiskError::TooSmall { .. })));
    }

    #[test]
    fn uuids_are_well_formed_and_differ() {
        let one = uuid_of("s", "uuid");
        assert_eq!(one.len(), 36);
        assert_ne!(one, uuid_of("s", "hash seed"));
        assert_ne!(one, uuid_of("t", "uuid"));
    }
}
