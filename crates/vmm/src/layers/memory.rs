//! Guest memory as layers: written page by page, restored by mapping.
//!
//! A layer of memory has the guest's regions one behind the other, lowest address first. Memory that was
//! restored is a private mapping: where a layer has data the file is mapped, elsewhere the memory is
//! anonymous. What the guest changed since is then exactly what is anonymous now (`/proc/self/pagemap`), so an
//! incremental layer needs no dirty log.
#![allow(unsafe_code, reason = "mapping files over guest memory and reading it whole have no safe form")]

mod scan;

use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::Arc;

use vm_memory::{GuestMemoryBackend as _, GuestMemoryRegion as _};

use super::file::create;
use super::{CHAIN_MAX, Extents, Layer, LayerError, Merged, PAGE, PAGE_BYTES, io_error};
use crate::memory::GuestMemory;

/// So many pieces are mapped; the smallest ones beyond that are read (a process has 65,530 mappings).
const PIECES_MAPPED_MAX: usize = 16_000;
/// A full layer's holes that are smaller than this are written as zeros: it then has fewer pieces to map.
const GAP_BYTES_MAX: u64 = 4 * PAGE_BYTES;
static ZERO_PAGE: [u8; PAGE] = [0; PAGE];

/// The layers that guest memory was restored from.
#[derive(Debug, Clone, Default)]
pub struct Base {
    layers: Vec<Layer>,
    merged: Merged,
}

/// A layer that was written.
#[derive(Debug, Clone)]
pub struct Written {
    pub layer: Layer,
    /// False: it stands for itself, the base is not needed.
    pub incremental: bool,
}

impl Base {
    /// Opens a chain, bottom first, for `bytes` of memory.
    pub fn open(paths: &[&Path], bytes: u64) -> Result<Self, LayerError> {
        let open = |path: &&Path| Layer::open(path, bytes, true);
        let layers = paths.iter().map(open).collect::<Result<Vec<_>, _>>()?;
        let mut merged = Merged::default();
        for (number, layer) in layers.iter().enumerate() {
            merged.overlay(&layer.extents, number);
        }
        Ok(Self { layers, merged })
    }

    #[must_use]
    pub fn layers(&self) -> &[Layer] {
        &self.layers
    }

    /// Gives the layers names in `dir`: as long as a file has a name, snapshots share it instead of copying it. Best
    /// effort.
    pub fn keep(&self, dir: &Path) {
        for (number, layer) in self.layers.iter().enumerate() {
            super::file::link(layer, &dir.join(format!("kept.memory.{number}")));
        }
    }

    /// Maps the chain over fresh, anonymous memory of its size.
    pub fn map(&self, memory: &GuestMemory) -> Result<(), LayerError> {
        let mut pieces: Vec<_> = self.merged.iter().copied().collect();
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

    /// Whether a layer has data at `offset`, and up to where that holds.
    fn has(&self, offset: u64, limit: u64) -> (bool, u64) {
        let (layer, end) = self.merged.find(offset, limit);
        (layer.is_some(), end)
    }

    /// Writes what `memory`, restored from this base or never restored, holds now: only what differs from the
    /// base, or everything where there is no base or it is too long a chain. Not synced. Nobody may change the
    /// memory meanwhile: it is a forked child's, or no vCPU and no device runs.
    pub fn write(&self, memory: &GuestMemory, to: &Path) -> Result<Written, LayerError> {
        let bytes = size(memory);
        let incremental = !self.layers.is_empty() && self.layers.len() < CHAIN_MAX;
        let file = create(to, bytes)?;
        let name: Arc<str> = to.display().to_string().into();
        let mut writer = Writer { file: &file, name: &name, extents: Extents::default() };
        let mut offset = 0;
        for region in memory.iter() {
            let pages = Region { start: region.as_ptr() as usize, offset, bytes: region.len() };
            self.write_region(&pages, incremental, &mut writer)?;
            offset += region.len();
        }
        let extents = Arc::new(writer.extents);
        Ok(Written { layer: Layer { file: Arc::new(file), extents, name }, incremental })
    }

    fn write_region(
        &self,
        region: &Region,
        incremental: bool,
        writer: &mut Writer<'_>,
    ) -> Result<(), LayerError> {
        let anonymous = scan::anonymous(region.start, region.bytes)
            .map_err(io_error("find the changed pages for", writer.name))?;
        let mut candidates = Extents::default();
        for range in anonymous {
            candidates.push(range.start + region.offset..range.end + region.offset);
        }
        if !incremental {
            candidates = self.with_own(&candidates, region);
        }
        let mut run: Option<Range<u64>> = None;
        let gap = if incremental { 0 } else { GAP_BYTES_MAX };
        for range in candidates.iter() {
            let mut at = range.start;
            while at < range.end {
                let keep = region.page(at) != ZERO_PAGE || (incremental && self.has(at, range.end).0);
                let end = at + PAGE_BYTES;
                match &mut run {
                    _ if !keep => {}
                    Some(open) if at - open.end <= gap => open.end = end,
                    _ => {
                        if let Some(done) = run.replace(at..end) {
                            writer.write(region, done)?;
                        }
                    }
                }
                at = end;
            }
        }
        run.map_or(Ok(()), |done| writer.write(region, done))
    }

    /// Adds what the base's own layers have within the region.
    fn with_own(&self, candidates: &Extents, region: &Region) -> Extents {
        let mut merged = Merged::default();
        let mut own = Extents::default();
        let end = region.offset + region.bytes;
        for piece in self.merged.iter() {
            let (from, to) = (piece.start.max(region.offset), piece.end.min(end));
            if from < to {
                own.push(from..to);
            }
        }
        merged.overlay(&own, 0);
        merged.overlay(candidates, 0);
        let mut all = Extents::default();
        merged.iter().for_each(|piece| all.push(piece.start..piece.end));
        all
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

struct Writer<'a> {
    file: &'a File,
    name: &'a str,
    extents: Extents,
}

impl Writer<'_> {
    fn write(&mut self, region: &Region, range: Range<u64>) -> Result<(), LayerError> {
        let bytes = region.slice(range.clone());
        self.file.write_all_at(bytes, range.start).map_err(io_error("write", self.name))?;
        self.extents.push(range);
        Ok(())
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
