//! The persisted formats, and nothing else: what a snapshot's manifest is on disk.
//!
//! Invariants: does no file I/O; a header is readable without the body; everything decoded is
//! validated before it is returned; a format version that is not known is refused by name.
//! Layout: `docs/formats/manifest.md`.

pub mod devices;
mod header;
mod manifest;
mod working_set;

pub use header::{ARCH_X86_64, FORMAT_VERSION, HEADER_BYTES, Header, HeaderError, MAGIC};
pub use manifest::{
    BODY_BYTES_MAX, Compat, Digest, FileDigest, FileEntry, FileRole, Manifest, ManifestError, Reason,
};
pub use working_set::{PageRange, WORKING_SET_BYTES_MAX, WorkingSet, WorkingSetError};
