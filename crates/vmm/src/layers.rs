//! Layers: sparse files of one logical size, where data answers and a hole means "look below".
//!
//! ```text
//!   upper     . W . . W .     written by this sandbox; one per disk, only its monitor has it
//!   frozen    . . F F . .     frozen by a checkpoint or fork; shared, never written again
//!   image     I I I . I .     the lowest: a hole in it reads as zeros
//! ```
//!
//! Disks ([`DiskStack`]) and guest memory ([`memory`]) use the same format; `docs/formats/layer.md`.
//!
//! Invariants: a frozen layer's file never changes again; what is written into a layer covers whole 4 KiB
//! pages (only a disk's end may be shorter); a page that became zero is data, not a hole, wherever a layer
//! below has data; the file system's own word on what is data (SEEK_DATA, lseek(2)) is compared with what was
//! written before anything relies on it.

mod disk;
mod extents;
mod file;
pub mod memory;
mod pages;

pub use disk::{DiskStack, Frozen, Published};
pub use extents::{EXTENTS_MAX, Extents, Merged};
pub use file::{Layer, link, link_or_copy};

use std::io;

/// Granularity of layers, in bytes.
pub const PAGE_BYTES: u64 = 4096;
/// The same as a length of slices.
const PAGE: usize = 4096;
/// More frozen layers than this are made one when a snapshot is written.
pub const CHAIN_MAX: usize = 8;

#[derive(Debug, thiserror::Error)]
pub enum LayerError {
    #[error("cannot {doing} layer {name}")]
    Io { doing: &'static str, name: String, source: io::Error },
    #[error("layer {name} has {bytes} bytes, {expected} are needed")]
    Size { name: String, bytes: u64, expected: u64 },
    #[error("layer {name} has data that is not made of whole pages at {offset:#x}")]
    Unaligned { name: String, offset: u64 },
    #[error("layer {name} has more than {EXTENTS_MAX} pieces")]
    Pieces { name: String },
    #[error("the file system does not keep holes as they were written in layer {name}")]
    Holes { name: String },
    #[error("the disk has no layer at all")]
    Empty,
}

/// Adds what was done on which file to an I/O error.
fn io_error(doing: &'static str, name: &str) -> impl FnOnce(io::Error) -> LayerError {
    let name = name.to_owned();
    move |source| LayerError::Io { doing, name, source }
}

#[cfg(test)]
mod tests;
