//! Where a layer has data, and which layer of a chain answers where.

use std::fs::File;
use std::ops::Range;

use dormouse_sys::files::next_data;

use super::{LayerError, PAGE_BYTES, io_error};

/// A layer with more pieces of data is refused: 64 GiB in alternating pages have twice as many.
pub const EXTENTS_MAX: usize = 4 << 20;

/// Sorted, disjoint, not touching ranges of bytes.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Extents(Vec<Range<u64>>);

impl Extents {
    /// What the file system says is data. `aligned`: data that is not made of whole pages is an error.
    pub fn scan(file: &File, name: &str, bytes: u64, aligned: bool) -> Result<Self, LayerError> {
        let mut extents = Self::default();
        let mut at = 0;
        while at < bytes {
            let data = next_data(file, at).map_err(io_error("find the data of", name))?;
            let Some(Range { start, end }) = data else { break };
            let end = end.min(bytes);
            if start >= end {
                break;
            }
            if aligned && (start % PAGE_BYTES != 0 || (end % PAGE_BYTES != 0 && end != bytes)) {
                return Err(LayerError::Unaligned { name: name.to_owned(), offset: start });
            }
            extents.push(start..end);
            if extents.0.len() > EXTENTS_MAX {
                return Err(LayerError::Pieces { name: name.to_owned() });
            }
            at = end;
        }
        Ok(extents)
    }

    /// Appends a range that starts where the last one ends, or behind it.
    pub fn push(&mut self, range: Range<u64>) {
        match self.0.last_mut() {
            Some(last) if last.end >= range.start => last.end = last.end.max(range.end),
            _ => self.0.push(range),
        }
    }

    pub fn iter(&self) -> impl Iterator<Item = &Range<u64>> {
        self.0.iter()
    }

    #[must_use]
    pub fn len(&self) -> usize {
        self.0.len()
    }

    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Bytes of data.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.0.iter().map(|range| range.end - range.start).sum()
    }
}

/// One range that one layer answers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Piece {
    pub start: u64,
    pub end: u64,
    /// Its number in the chain, 0 is the lowest.
    pub layer: usize,
}

/// A chain seen from above: sorted, disjoint pieces; between them no layer has data.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Merged(Vec<Piece>);

impl Merged {
    /// Puts a layer's data above all others.
    pub fn overlay(&mut self, extents: &Extents, layer: usize) {
        let below = std::mem::take(&mut self.0);
        let mut out = Sink(Vec::with_capacity(below.len() + extents.len()));
        let mut tops = extents.iter().peekable();
        for piece in below {
            let mut start = piece.start;
            while let Some(top) = tops.peek() {
                if top.start >= piece.end {
                    break;
                }
                if start < top.start {
                    out.add(Piece { start, end: top.start, layer: piece.layer });
                }
                start = start.max(top.end);
                if top.end > piece.end {
                    // It covers more: it is added when its end has been reached.
                    break;
                }
                out.add(Piece { start: top.start, end: top.end, layer });
                tops.next();
            }
            if start < piece.end {
                out.add(Piece { start, end: piece.end, layer: piece.layer });
            }
        }
        for top in tops {
            out.add(Piece { start: top.start, end: top.end, layer });
        }
        self.0 = out.0;
    }

    /// Which layer answers at `offset`, and up to where that answer holds (at most `limit`, which is behind it).
    #[must_use]
    pub fn find(&self, offset: u64, limit: u64) -> (Option<usize>, u64) {
        let at = self.0.partition_point(|piece| piece.end <= offset);
        match self.0.get(at) {
            Some(piece) if piece.start <= offset => (Some(piece.layer), piece.end.min(limit)),
            Some(piece) => (None, piece.start.min(limit)),
            None => (None, limit),
        }
    }

    pub fn iter(&self) -> impl Iterator<Item = &Piece> {
        self.0.iter()
    }

    #[must_use]
    pub fn len(&self) -> usize {
        self.0.len()
    }

    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}

/// Collects pieces, joining neighbours of one layer.
struct Sink(Vec<Piece>);

impl Sink {
    fn add(&mut self, piece: Piece) {
        match self.0.last_mut() {
            Some(last) if last.end == piece.start && last.layer == piece.layer => last.end = piece.end,
            _ => self.0.push(piece),
        }
    }
}
