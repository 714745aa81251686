//! A disk made of layers: reads look down, writes stay in the upper one.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::Arc;

use super::file::{create, flatten};
use super::pages::PageSet;
use super::{CHAIN_MAX, Layer, LayerError, Merged, PAGE, PAGE_BYTES, io_error, link_or_copy};

/// The layers of one disk; only the upper one is written.
#[derive(Debug)]
pub struct DiskStack {
    bytes: u64,
    /// Bottom first: `images`, then what this sandbox and its ancestors wrote.
    layers: Vec<Layer>,
    images: usize,
    merged: Merged,
    upper: Option<Upper>,
    /// Frozen since the last flush.
    unsynced: Vec<Arc<File>>,
}

#[derive(Debug)]
struct Upper {
    file: Arc<File>,
    name: Arc<str>,
    written: PageSet,
}

/// What a snapshot keeps of a disk: frozen layers, and how to write them down.
#[derive(Debug, Clone)]
pub struct Frozen {
    pub bytes: u64,
    /// Above the images, bottom first.
    pub layers: Vec<Layer>,
}

/// One layer as it was published.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Published {
    pub name: String,
    pub shared: bool,
}

impl DiskStack {
    /// `images`: at least one, bottom first; the lowest one's length is the disk's. `frozen`: a snapshot's
    /// layers. `upper`: a file to be made for what is written; `None`: the disk is read-only.
    pub fn open(images: &[&Path], frozen: &[&Path], upper: Option<&Path>) -> Result<Self, LayerError> {
        let lowest = images.first().ok_or(LayerError::Empty)?;
        let name = lowest.display().to_string();
        let file = File::open(lowest).map_err(io_error("open", &name))?;
        let bytes = super::file::length(&file, &name)?;
        let layers = images
            .iter()
            .chain(frozen)
            .enumerate()
            .map(|(number, path)| Layer::open(path, bytes, number > 0))
            .collect::<Result<Vec<_>, _>>()?;
        let upper = upper.map(|path| Upper::create(path, bytes)).transpose()?;
        let (merged, unsynced) = (Merged::default(), Vec::new());
        let mut stack = Self { bytes, layers, images: images.len(), merged, upper, unsynced };
        stack.merge();
        Ok(stack)
    }

    fn merge(&mut self) {
        let mut merged = Merged::default();
        for (number, layer) in self.layers.iter().enumerate() {
            merged.overlay(&layer.extents, number);
        }
        self.merged = merged;
    }

    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    #[must_use]
    pub fn read_only(&self) -> bool {
        self.upper.is_none()
    }

    /// Where `offset` is answered, and up to where (at most `limit`).
    fn find(&self, offset: u64, limit: u64) -> (Option<&File>, u64) {
        let mut limit = limit;
        if let Some(upper) = &self.upper {
            let page = offset / PAGE_BYTES;
            let end = upper.written.run_end(page, limit.div_ceil(PAGE_BYTES)) * PAGE_BYTES;
            limit = limit.min(end);
            if upper.written.contains(page) {
                return (Some(&upper.file), limit);
            }
        }
        let (layer, end) = self.merged.find(offset, limit);
        (layer.and_then(|number| self.layers.get(number)).map(|layer| &*layer.file), end)
    }

    fn check(&self, offset: u64, len: usize) -> std::io::Result<u64> {
        let end = offset.checked_add(len as u64).filter(|end| *end <= self.bytes);
        end.ok_or_else(|| std::io::ErrorKind::InvalidInput.into())
    }

    pub fn read_at(&self, buffer: &mut [u8], offset: u64) -> std::io::Result<()> {
        let end = self.check(offset, buffer.len())?;
        let mut rest = buffer;
        let mut at = offset;
        while at < end {
            let (file, until) = self.find(at, end);
            let (part, others) = rest.split_at_mut(usize::try_from(until - at).unwrap_or(0).min(rest.len()));
            match file {
                Some(file) => file.read_exact_at(part, at)?,
                None => part.fill(0),
            }
            rest = others;
            at = until;
        }
        Ok(())
    }

    /// Writes; pages that are not covered wholly are completed with what lies below.
    pub fn write_at(&mut self, buffer: &[u8], offset: u64) -> std::io::Result<()> {
        let end = self.check(offset, buffer.len())?;
        if self.upper.is_none() {
            return Err(std::io::ErrorKind::PermissionDenied.into());
        }
        if buffer.is_empty() {
            return Ok(());
        }
        let first = offset / PAGE_BYTES;
        let last = (end - 1) / PAGE_BYTES;
        // Only the outer pages can be covered in part.
        self.copy_up(first, offset, end)?;
        if last != first {
            self.copy_up(last, offset, end)?;
        }
        let Some(upper) = &mut self.upper else { return Ok(()) };
        upper.file.write_all_at(buffer, offset)?;
        (first..=last).for_each(|page| upper.written.insert(page));
        Ok(())
    }

    /// Brings a page up that `from..to` covers in part, unless it is there.
    fn copy_up(&mut self, page: u64, from: u64, to: u64) -> std::io::Result<()> {
        let start = page * PAGE_BYTES;
        let end = (start + PAGE_BYTES).min(self.bytes);
        if from <= start && end <= to {
            return Ok(());
        }
        let mut buffer = [0; PAGE];
        let part = &mut buffer[..usize::try_from(end - start).unwrap_or(0)];
        self.read_at(part, start)?;
        let Some(upper) = &mut self.upper else { return Ok(()) };
        if !upper.written.contains(page) {
            upper.file.write_all_at(part, start)?;
            upper.written.insert(page);
        }
        Ok(())
    }

    /// Makes a range read as zeros. Where no layer below has data, the space is given back.
    pub fn zero_at(&mut self, offset: u64, len: u64) -> std::io::Result<()> {
        let end = offset.checked_add(len).filter(|end| *end <= self.bytes);
        let end = end.ok_or(std::io::ErrorKind::InvalidInput)?;
        let mut at = offset;
        while at < end {
            let page = at / PAGE_BYTES;
            let page_end = ((page + 1) * PAGE_BYTES).min(self.bytes);
            if !at.is_multiple_of(PAGE_BYTES) || page_end > end {
                let until = page_end.min(end);
                let zeros = [0; PAGE];
                self.write_at(&zeros[..usize::try_from(until - at).unwrap_or(0)], at)?;
                at = until;
                continue;
            }
            at = self.zero_pages(at, end)?;
        }
        Ok(())
    }

    /// Zeroes whole pages from `at` on, as many as are alike below. Returns where it came to.
    fn zero_pages(&mut self, at: u64, end: u64) -> std::io::Result<u64> {
        let whole = if end == self.bytes { end } else { end / PAGE_BYTES * PAGE_BYTES };
        let (below, until) = self.merged.find(at, whole);
        let limit = if below.is_some() { at + ZEROS.len() as u64 } else { at + PUNCH_BYTES };
        // An image's last piece may end within a page; the next turn takes the rest of that page along.
        let until = until.min(limit).next_multiple_of(PAGE_BYTES).min(whole);
        if below.is_some() || self.merged.find(at, until).1 < until {
            let until = until.min(at + ZEROS.len() as u64);
            self.write_at(&ZEROS[..usize::try_from(until - at).unwrap_or(0)], at)?;
            return Ok(until);
        }
        self.give_back(at, until)?;
        Ok(until)
    }

    /// Makes holes in the upper layer of the pages from `at` to `until`, below which there is nothing.
    fn give_back(&mut self, at: u64, until: u64) -> std::io::Result<()> {
        let Some(upper) = &mut self.upper else { return Err(std::io::ErrorKind::PermissionDenied.into()) };
        let mut page = at / PAGE_BYTES;
        let last = until.div_ceil(PAGE_BYTES);
        while page < last {
            let run = upper.written.run_end(page, last);
            if upper.written.contains(page) {
                // To the page's end even where the disk ends before: the file system keeps parts of blocks.
                punch(&upper.file, page * PAGE_BYTES, (run - page) * PAGE_BYTES)?;
                (page..run).for_each(|page| upper.written.remove(page));
            }
            page = run;
        }
        Ok(())
    }

    /// What was written is on stable storage when this returns.
    pub fn flush(&mut self) -> std::io::Result<()> {
        while let Some(frozen) = self.unsynced.last() {
            frozen.sync_data()?;
            self.unsynced.pop();
        }
        self.upper.as_ref().map_or(Ok(()), |upper| upper.file.sync_data())
    }

    /// The guest will not miss what is in the range: whole pages that only the upper layer has are given back.
    pub fn discard(&mut self, offset: u64, len: u64) -> std::io::Result<()> {
        let end = offset.checked_add(len).filter(|end| *end <= self.bytes);
        let end = end.ok_or(std::io::ErrorKind::InvalidInput)?;
        let end = if end == self.bytes { end } else { end / PAGE_BYTES * PAGE_BYTES };
        let mut at = offset.next_multiple_of(PAGE_BYTES);
        while at < end {
            let (below, until) = self.merged.find(at, end);
            let until = until.next_multiple_of(PAGE_BYTES).min(end);
            if below.is_none() && self.merged.find(at, until).1 == until {
                self.give_back(at, until)?;
            }
            at = until;
        }
        Ok(())
    }

    /// Ends the upper layer, which nobody writes any more, and goes on with a new one at `upper`. A read-only
    /// disk and one whose upper layer is empty stay as they are.
    pub fn freeze(&mut self, upper: &Path) -> Result<(), LayerError> {
        let Some(old) = &self.upper else { return Ok(()) };
        let extents = old.written.extents(self.bytes);
        if extents.is_empty() {
            return Ok(());
        }
        let new = Upper::create(upper, self.bytes)?;
        let layer = Layer { file: old.file.clone(), extents: Arc::new(extents), name: old.name.clone() };
        self.merged.overlay(&layer.extents, self.layers.len());
        self.unsynced.push(layer.file.clone());
        self.layers.push(layer);
        self.upper = Some(new);
        Ok(())
    }

    /// The same disk for somebody else, in a forked child: shares the frozen layers, has an upper one of its own.
    pub fn renew_upper(&mut self, upper: &Path) -> Result<(), LayerError> {
        if self.upper.is_some() {
            self.upper = Some(Upper::create(upper, self.bytes)?);
        }
        Ok(())
    }

    /// What is frozen above the images.
    #[must_use]
    pub fn frozen(&self) -> Frozen {
        Frozen { bytes: self.bytes, layers: self.layers[self.images..].to_vec() }
    }

    /// Gives the frozen layers names in `dir` beginning with `prefix`, where they have none there: as long as a file
    /// has a name, snapshots share it instead of copying it. Best effort.
    pub fn keep(&self, dir: &Path, prefix: &str) {
        for (number, layer) in self.layers[self.images..].iter().enumerate() {
            super::file::link(&layer.file, &dir.join(format!("{prefix}{number}")));
        }
    }

    /// Removes files of `dir` whose names begin with one of `prefixes` and that are no layer of this disk any more. Best
    /// effort.
    pub fn sweep(&self, dir: &Path, prefixes: &[&str]) {
        use std::os::unix::fs::MetadataExt;
        let files =
            self.layers.iter().map(|layer| &layer.file).chain(self.upper.iter().map(|upper| &upper.file));
        let used: Vec<_> =
            files.filter_map(|file| file.metadata().ok()).map(|meta| (meta.dev(), meta.ino())).collect();
        for entry in std::fs::read_dir(dir).into_iter().flatten().flatten() {
            let named =
                entry.file_name().to_str().is_some_and(|name| prefixes.iter().any(|p| name.starts_with(p)));
            let gone = entry.metadata().is_ok_and(|meta| !used.contains(&(meta.dev(), meta.ino())));
            if named && gone {
                let _ = std::fs::remove_file(entry.path());
            }
        }
    }

    /// Puts one layer in the place of the `count` lowest frozen ones, whose content it has.
    pub fn replace(&mut self, count: usize, layer: Layer) {
        let end = (self.images + count).min(self.layers.len());
        self.layers.splice(self.images..end, [layer]);
        self.merge();
    }
}

/// What is written at once where zeros must be data.
static ZEROS: [u8; 64 << 10] = [0; 64 << 10];
/// What is punched at once.
const PUNCH_BYTES: u64 = 64 << 20;

fn punch(file: &File, offset: u64, len: u64) -> std::io::Result<()> {
    use rustix::fs::FallocateFlags;
    let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
    Ok(rustix::fs::fallocate(file, flags, offset, len)?)
}

impl Upper {
    fn create(path: &Path, bytes: u64) -> Result<Self, LayerError> {
        let file = Arc::new(create(path, bytes)?);
        Ok(Self { file, name: path.display().to_string().into(), written: PageSet::new(bytes) })
    }
}

impl Frozen {
    /// Writes the layers into `dir` as `<prefix>0`, `<prefix>1`…, synced: links where that can be, one new
    /// layer where there are more than [`CHAIN_MAX`]. The folder itself is the caller's to sync.
    pub fn publish(&self, dir: &Path, prefix: &str) -> Result<Vec<Published>, LayerError> {
        let named = |number: usize| format!("{prefix}{number}");
        if self.layers.len() > CHAIN_MAX {
            flatten(&self.layers, self.bytes, &dir.join(named(0)))?;
            return Ok(vec![Published { name: named(0), shared: false }]);
        }
        let mut published = Vec::new();
        for (number, layer) in self.layers.iter().enumerate() {
            layer.sync(self.bytes)?;
            let shared = link_or_copy(layer, self.bytes, &dir.join(named(number)))?;
            published.push(Published { name: named(number), shared });
        }
        Ok(published)
    }
}
