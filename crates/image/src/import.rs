//! The flattened file system of a sandbox, as a tar stream, becomes an image.

use std::io::Read;

use crate::error::ImportError;
use crate::extract::{self, Applied, Limits, Tree};
use crate::oci::notes;
use crate::prepare;
use crate::record::{Image, ImageConfig, Source};
use crate::{Images, check_name};

/// What whoever archives a sandbox's file system must do, for [`Images::import_tar`] to take it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ExportPlan {
    /// Archived as empty folders: mount points, and what only lives while the sandbox runs.
    pub empty: &'static [&'static str],
    /// Left out, whatever they are.
    pub skip: &'static [&'static str],
    /// Formats that are understood: names, owners as numbers, `SCHILY.xattr.` for attributes.
    pub format: &'static str,
}

/// Absolute paths inside. The archive starts at `/`, its names are relative, and it stays on one file
/// system per mount that is not named here.
#[must_use]
pub fn export_plan() -> ExportPlan {
    ExportPlan {
        empty: &["/proc", "/sys", "/dev", "/run", "/tmp"],
        skip: &[prepare::AGENT_DIR, "/var/lib/apt/lists", "/var/cache/apt/archives"],
        format: "pax",
    }
}

impl Images {
    /// Unpacks `tar` (not compressed) into a new image named `id`.
    pub fn import_tar(
        &self,
        id: &str,
        tar: &mut dyn Read,
        source: Source,
        config: ImageConfig,
        limits: &Limits,
    ) -> Result<Image, ImportError> {
        check_name(id).map_err(ImportError::Name)?;
        if self.exists(id) {
            return Err(ImportError::Exists { id: id.to_owned() });
        }
        let draft = self.draft().map_err(|source| ImportError::Draft { source })?;
        let root = draft.root().map_err(|source| ImportError::Draft { source })?;
        let mut hashing = Hashing { inner: tar, hash: blake3::Hasher::new() };
        let mut applied = Applied::default();
        let name = format!("the file system for {id}");
        extract::unpack(&root, &mut hashing, &name, Tree::Flat, limits, &mut applied)
            .map_err(ImportError::Extract)?;
        prepare::prepare(&root)?;
        let digest = hashing.hash.finalize().to_hex().to_string();
        let mut image = Image::new(id.to_owned(), source, digest, config);
        image.notes = notes(&applied);
        self.publish(draft, image).map_err(ImportError::Publish)
    }
}

struct Hashing<'a> {
    inner: &'a mut dyn Read,
    hash: blake3::Hasher,
}

impl Read for Hashing<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> std::io::Result<usize> {
        let read = self.inner.read(buffer)?;
        self.hash.update(&buffer[..read]);
        Ok(read)
    }
}
