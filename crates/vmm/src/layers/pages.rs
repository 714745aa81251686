//! A set of pages.

use super::{Extents, PAGE_BYTES};

const BITS: u64 = 64;

/// One bit per page. Parts that were never set cost no memory.
#[derive(Debug, Clone)]
pub struct PageSet {
    words: Vec<u64>,
    pages: u64,
}

impl PageSet {
    /// For `bytes` bytes, the last page may be shorter.
    pub fn new(bytes: u64) -> Self {
        let pages = bytes.div_ceil(PAGE_BYTES);
        let words = usize::try_from(pages.div_ceil(BITS)).unwrap_or(usize::MAX);
        Self { words: vec![0; words], pages }
    }

    fn at(page: u64) -> (usize, u64) {
        (usize::try_from(page / BITS).unwrap_or(usize::MAX), 1 << (page % BITS))
    }

    pub fn insert(&mut self, page: u64) {
        let (word, bit) = Self::at(page);
        if let Some(word) = self.words.get_mut(word) {
            *word |= bit;
        }
    }

    pub fn remove(&mut self, page: u64) {
        let (word, bit) = Self::at(page);
        if let Some(word) = self.words.get_mut(word) {
            *word &= !bit;
        }
    }

    pub fn contains(&self, page: u64) -> bool {
        let (word, bit) = Self::at(page);
        self.words.get(word).is_some_and(|word| word & bit != 0)
    }

    /// The end of the run of pages that are, as `page` is, in the set or not; at most `limit`.
    pub fn run_end(&self, page: u64, limit: u64) -> u64 {
        let inside = self.contains(page);
        let limit = limit.min(self.pages);
        let mut at = page;
        while at < limit {
            let (word, _) = Self::at(at);
            let word = self.words.get(word).copied().unwrap_or(0);
            let other = if inside { !word } else { word } >> (at % BITS);
            if other != 0 {
                return limit.min(at + u64::from(other.trailing_zeros()));
            }
            at += BITS - at % BITS;
        }
        limit
    }

    /// As ranges of bytes of something that has `bytes` bytes.
    pub fn extents(&self, bytes: u64) -> Extents {
        let mut extents = Extents::default();
        let mut page = 0;
        while page < self.pages {
            let end = self.run_end(page, self.pages);
            if self.contains(page) {
                extents.push(page * PAGE_BYTES..(end * PAGE_BYTES).min(bytes));
            }
            page = end;
        }
        extents
    }
}
