//! Guest memory as layers: written page by page, restored by mapping.
//!
//! A layer of memory has the guest's regions one behind the other, lowest address first. Memory that was
//! restored is a private mapping: where a layer has data the file is mapped, elsewhere the memory is
//! anonymous. What the guest changed since is then exactly what is anonymous now (`/proc/self/pagemap`), so an
//! incremental layer needs no dirty log.
#![allow(unsafe_code, reason = "mapping files over guest memory and reading it whole have no safe form")]

mod scan;
mod write;

use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::Arc;

use vm_memory::{GuestMemoryBackend as _, GuestMemoryRegion as _};

pub use write::{Written, write};

use super::extents::Piece;
use super::{Layer, LayerError, Merged, PAGE_BYTES, io_error};
use crate::memory::GuestMemory;

/// So many pieces are mapped; the smallest ones beyond that are read (a process has 65,530 mappings).
const PIECES_MAPPED_MAX: usize = 16_000;
/// Holes between two pieces of a layer up to this are mapped with them.
const MAPPED_GAP_BYTES_MAX: u64 = 256 << 10;

/// The layers that guest memory was restored from.
#[derive(Debug, Clone, Default)]
pub struct Base {
    layers: Vec<Layer>,
    merged: Merged,
}

impl Base {
    /// Opens a chain, bottom first, for `bytes` of memory.
    pub fn open(paths: &[&Path], bytes: u64) -> Result<Self, LayerError> {
        let open = |path: &&Path| Layer::open(path, bytes, true);
        Ok(Self::of_layers(paths.iter().map(open).collect::<Result<_, _>>()?))
    }

    #[must_use]
    pub fn layers(&self) -> &[Layer] {
        &self.layers
    }

    /// Gives the layers names in `dir`: as long as a file has a name, snapshots share it instead of copying it. Best
    /// effort.
    pub fn keep(&self, dir: &Path) {
        for (number, layer) in self.layers.iter().enumerate() {
            super::file::link(&layer.file, &dir.join(format!("kept.memory.{number}")));
        }
    }

    /// Neighbours of one layer with little between them are one: its file has a hole there, which reads as zeros, as the
    /// memory would. A mapping less is worth more than the huge pages that such a gap is too small for.
    fn pieces_to_map(&self) -> Vec<Piece> {
        let mut pieces: Vec<Piece> = Vec::new();
        for piece in self.merged.iter() {
            match pieces.last_mut() {
                Some(last) if last.layer == piece.layer && piece.start - last.end <= MAPPED_GAP_BYTES_MAX => {
                    last.end = piece.end;
                }
                _ => pieces.push(*piece),
            }
        }
        pieces
    }

    /// Maps the chain over fresh, anonymous memory of its size.
    pub fn map(&self, memory: &GuestMemory) -> Result<(), LayerError> {
        let mut pieces = self.pieces_to_map();
        if pieces.len() > PIECES_MAPPED_MAX {
            pieces.sort_unstable_by_key(|piece| std::cmp::Reverse(piece.end - piece.start));
        }
        for (number, piece) in pieces.iter().enumerate() {
            let Some(layer) = self.layers.get(piece.layer) else { continue };
            for part in parts(memory, piece.start..piece.end)? {
                if number < PIECES_MAPPED_MAX {
                    part.map(layer)?;
                } else {
                    part.read(layer)?;
                }
            }
        }
        Ok(())
    }

    /// A chain of files that are open already.
    pub fn of_files(files: &[Arc<File>], bytes: u64) -> Result<Self, LayerError> {
        let open = |file: &Arc<File>| Layer::of_file(file, "of the last snapshot", bytes);
        Ok(Self::of_layers(files.iter().map(open).collect::<Result<_, _>>()?))
    }

    fn of_layers(layers: Vec<Layer>) -> Self {
        let mut merged = Merged::default();
        for (number, layer) in layers.iter().enumerate() {
            merged.overlay(&layer.extents, number);
        }
        Self { layers, merged }
    }

    /// Which layer answers at `offset`, and up to where that answer holds (at most `limit`); `None`: zeros.
    #[must_use]
    pub fn find(&self, offset: u64, limit: u64) -> (Option<&Layer>, u64) {
        let (layer, until) = self.merged.find(offset, limit);
        (layer.and_then(|number| self.layers.get(number)), until)
    }

    /// The files, for who goes on with this chain as that of its last snapshot.
    #[must_use]
    pub fn files(&self) -> Vec<Arc<File>> {
        self.layers.iter().map(|layer| Arc::clone(&layer.file)).collect()
    }

    /// Reads what the chain holds.
    fn read(&self, buffer: &mut [u8], offset: u64) -> Result<(), LayerError> {
        let end = offset + buffer.len() as u64;
        let (mut rest, mut at) = (buffer, offset);
        while at < end {
            let (layer, until) = self.merged.find(at, end);
            let (part, others) = rest.split_at_mut(usize::try_from(until - at).unwrap_or(0).min(rest.len()));
            match layer.and_then(|number| self.layers.get(number)) {
                Some(layer) => layer.file.read_exact_at(part, at).map_err(io_error("read", &layer.name))?,
                None => part.fill(0),
            }
            (rest, at) = (others, until);
        }
        Ok(())
    }
}

/// Bytes of guest memory, and so of its layers.
#[must_use]
pub fn size(memory: &GuestMemory) -> u64 {
    memory.iter().map(vm_memory::GuestMemoryRegion::len).sum()
}

/// Keeps guest memory in pages of 4 KiB. Best effort: only speed depends on it.
pub fn keep_small(memory: &GuestMemory) {
    for region in memory.iter() {
        let len = usize::try_from(region.len()).unwrap_or(0);
        // SAFETY: the region is mapped; advice changes no content.
        let _ = unsafe { libc::madvise(region.as_ptr().cast(), len, libc::MADV_NOHUGEPAGE) };
    }
}

/// One region of guest memory, and where it begins in a layer.
struct Region {
    start: usize,
    offset: u64,
    bytes: u64,
}

impl Region {
    fn page(&self, at: u64) -> &[u8] {
        self.slice(at..at + PAGE_BYTES)
    }

    /// The memory at a range of the layer; what lies outside of the region is cut off.
    fn slice(&self, range: Range<u64>) -> &[u8] {
        let end = range.end.min(self.offset + self.bytes);
        let start = range.start.clamp(self.offset, end);
        let len = usize::try_from(end - start).unwrap_or(0);
        let begin = self.start + usize::try_from(start - self.offset).unwrap_or(0);
        // SAFETY: the range was cut to the region, which is mapped readable as long as the guest memory
        // lives; nobody writes to it meanwhile (`Base::write` asks that of its caller).
        unsafe { std::slice::from_raw_parts(begin as *const u8, len) }
    }
}

/// A piece of a layer within one region.
struct Part {
    address: usize,
    len: usize,
    offset: u64,
}

/// Splits a range of a layer by regions. A range beyond the memory is an error.
fn parts(memory: &GuestMemory, range: Range<u64>) -> Result<Vec<Part>, LayerError> {
    let mut parts = Vec::with_capacity(1);
    let (mut offset, mut at) = (0, range.start);
    for region in memory.iter() {
        let end = offset + region.len();
        if at < end && at < range.end {
            let len = range.end.min(end) - at;
            let within = usize::try_from(at - offset).unwrap_or(usize::MAX);
            let len_bytes = usize::try_from(len).unwrap_or(0);
            parts.push(Part { address: region.as_ptr() as usize + within, len: len_bytes, offset: at });
            at += len;
        }
        offset = end;
    }
    if at == range.end {
        return Ok(parts);
    }
    Err(LayerError::Size { name: "of memory".into(), bytes: range.end, expected: offset })
}

impl Part {
    fn map(&self, layer: &Layer) -> Result<(), LayerError> {
        let protection = libc::PROT_READ | libc::PROT_WRITE;
        let flags = libc::MAP_PRIVATE | libc::MAP_FIXED | libc::MAP_NORESERVE;
        let offset = libc::off_t::try_from(self.offset).unwrap_or(libc::off_t::MAX);
        let address = self.address as *mut libc::c_void;
        // SAFETY: `parts` made address and length lie within one mapped region of guest memory, which only
        // vm-memory's volatile accesses use: replacing what backs it breaks no reference.
        let mapped =
            unsafe { libc::mmap(address, self.len, protection, flags, layer.file.as_raw_fd(), offset) };
        if mapped == address {
            return Ok(());
        }
        Err(io_error("map", &layer.name)(io::Error::last_os_error()))
    }

    fn read(&self, layer: &Layer) -> Result<(), LayerError> {
        // SAFETY: within one mapped region, as above; the guest does not run yet.
        let into = unsafe { std::slice::from_raw_parts_mut(self.address as *mut u8, self.len) };
        layer.file.read_exact_at(into, self.offset).map_err(io_error("read", &layer.name))
    }
}

#[cfg(test)]
mod tests;
