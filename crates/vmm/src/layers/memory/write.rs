//! Writing a layer of guest memory.

use std::fs::File;
use std::ops::Range;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::Path;
use std::sync::Arc;

use vm_memory::{GuestMemoryBackend as _, GuestMemoryRegion as _};

use super::{Base, Region, scan, size};
use crate::layers::file::create;
use crate::layers::{CHAIN_MAX, Extents, Layer, LayerError, Merged, PAGE, PAGE_BYTES, io_error};
use crate::memory::GuestMemory;

/// A full layer's holes that are smaller than this are written as zeros: it then has fewer pieces to map.
const GAP_BYTES_MAX: u64 = 4 * PAGE_BYTES;
/// What is read at once of a chain to compare with.
const WINDOW_BYTES: u64 = 256 << 10;
static ZERO_PAGE: [u8; PAGE] = [0; PAGE];

/// A layer that was written.
#[derive(Debug, Clone)]
pub struct Written {
    pub layer: Layer,
    /// So many layers, of the chain that was given, it lies on; 0: it stands for itself.
    pub on: usize,
}

/// Writes what `memory` holds as a layer at `to`. Not synced. `base` is what the memory was restored from.
///
/// The new layer lies on `last` if there is one, the chain of an earlier snapshot of this memory or of its ancestor:
/// it has what differs, found by comparing. Otherwise it lies on `base`, and has what is not the base's any more.
/// Where that chain is empty or too long, everything is written.
///
/// Nobody may change the memory meanwhile: it is a forked child's, or no vCPU and no device runs.
pub fn write(
    memory: &GuestMemory,
    base: &Base,
    last: Option<&Base>,
    to: &Path,
) -> Result<Written, LayerError> {
    let bytes = size(memory);
    let below = last.unwrap_or(base);
    let on = if below.layers.len() < CHAIN_MAX { below.layers.len() } else { 0 };
    let kind = match last {
        _ if on == 0 => Kind::Full,
        Some(last) => Kind::Compared { last, shared: shared(base, last) },
        None => Kind::Anonymous,
    };
    let file = create(to, bytes)?;
    let name: Arc<str> = to.display().to_string().into();
    let mut writer =
        Writer { file: &file, name: &name, extents: Extents::default(), window: Vec::new(), window_at: 0 };
    let mut offset = 0;
    for region in memory.iter() {
        let region = Region { start: region.as_ptr() as usize, offset, bytes: region.len() };
        let candidates = candidates(base, &kind, &region, writer.name)?;
        writer.write_region(base, &kind, &region, &candidates)?;
        offset += region.bytes;
    }
    let extents = Arc::new(writer.extents);
    Ok(Written { layer: Layer { file: Arc::new(file), extents, name }, on })
}

/// Which pages a layer has.
enum Kind<'a> {
    /// All that are not zero.
    Full,
    /// All that are anonymous: what the base had there is not what is there now.
    Anonymous,
    /// All that are not as in `last`, whose lowest `shared` layers are the base's.
    Compared { last: &'a Base, shared: usize },
}

/// How many of the lowest layers are the same files.
fn shared(base: &Base, last: &Base) -> usize {
    let id = |layer: &Layer| layer.file.metadata().ok().map(|meta| (meta.dev(), meta.ino()));
    let same = |(one, other): &(&Layer, &Layer)| id(one).is_some() && id(one) == id(other);
    let count = base.layers.iter().zip(&last.layers).take_while(same).count();
    // Only the whole base tells of memory that is still mapped from it.
    if count == base.layers.len() { count } else { 0 }
}

/// Pages of the region that may belong into the layer.
fn candidates(base: &Base, kind: &Kind<'_>, region: &Region, name: &str) -> Result<Extents, LayerError> {
    let anonymous =
        scan::anonymous(region.start, region.bytes).map_err(io_error("find the changed pages for", name))?;
    let mut own = Extents::default();
    for range in anonymous {
        own.push(range.start + region.offset..range.end + region.offset);
    }
    let mut merged = Merged::default();
    let mut add = |from: &Base, least: usize| {
        let mut part = Extents::default();
        for piece in from.merged.iter().filter(|piece| piece.layer >= least) {
            let (start, end) = (piece.start.max(region.offset), piece.end.min(region.offset + region.bytes));
            if start < end {
                part.push(start..end);
            }
        }
        merged.overlay(&part, 0);
    };
    match kind {
        Kind::Anonymous => return Ok(own),
        Kind::Full => add(base, 0),
        // What is mapped from layers that both have needs no look.
        Kind::Compared { last, shared } => {
            if *shared == 0 {
                add(base, 0);
            }
            add(last, *shared);
        }
    }
    merged.overlay(&own, 0);
    let mut all = Extents::default();
    merged.iter().for_each(|piece| all.push(piece.start..piece.end));
    Ok(all)
}

struct Writer<'a> {
    file: &'a File,
    name: &'a str,
    extents: Extents,
    /// What the chain to compare with holds from `window_at` on.
    window: Vec<u8>,
    window_at: u64,
}

impl Writer<'_> {
    fn write_region(
        &mut self,
        base: &Base,
        kind: &Kind<'_>,
        region: &Region,
        candidates: &Extents,
    ) -> Result<(), LayerError> {
        let gap = if matches!(kind, Kind::Full) { GAP_BYTES_MAX } else { 0 };
        let mut run: Option<Range<u64>> = None;
        for range in candidates.iter() {
            let mut at = range.start;
            while at < range.end {
                let end = at + PAGE_BYTES;
                if self.belongs(base, kind, region, at..range.end)? {
                    match &mut run {
                        Some(open) if at - open.end <= gap => open.end = end,
                        _ => {
                            if let Some(done) = run.replace(at..end) {
                                self.write(region, done)?;
                            }
                        }
                    }
                }
                at = end;
            }
        }
        run.map_or(Ok(()), |done| self.write(region, done))
    }

    /// Whether the first page of `rest` belongs into the layer.
    fn belongs(
        &mut self,
        base: &Base,
        kind: &Kind<'_>,
        region: &Region,
        rest: Range<u64>,
    ) -> Result<bool, LayerError> {
        let page = region.page(rest.start);
        match kind {
            Kind::Full => Ok(page != ZERO_PAGE),
            Kind::Anonymous => Ok(page != ZERO_PAGE || base.merged.find(rest.start, rest.end).0.is_some()),
            Kind::Compared { last, .. } => Ok(page != self.former(last, rest)?),
        }
    }

    /// The page at the start of `rest` as `last` has it.
    fn former(&mut self, last: &Base, rest: Range<u64>) -> Result<&[u8], LayerError> {
        let held = self.window_at..self.window_at + self.window.len() as u64;
        if rest.start < held.start || rest.start + PAGE_BYTES > held.end {
            let len = (rest.end - rest.start).min(WINDOW_BYTES);
            self.window.resize(usize::try_from(len).unwrap_or(PAGE), 0);
            self.window_at = rest.start;
            last.read(&mut self.window, rest.start)?;
        }
        let from = usize::try_from(rest.start - self.window_at).unwrap_or(0);
        Ok(&self.window[from..from + PAGE])
    }

    fn write(&mut self, region: &Region, range: Range<u64>) -> Result<(), LayerError> {
        let bytes = region.slice(range.clone());
        self.file.write_all_at(bytes, range.start).map_err(io_error("write", self.name))?;
        self.extents.push(range);
        Ok(())
    }
}
