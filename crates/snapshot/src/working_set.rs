//! The working set: which pages of a guest's memory a restore touched first, in that order. A hint: it says what to
//! bring ahead, never what is in a page. Layout: `docs/formats/working-set.md`.
//!
//! ```text
//! 0  magic "DMWRKSET"   8  version u16   10 zero (6 bytes)   16 bytes of memory u64   24 ranges u32   28 zero (4 bytes)
//! 32 BLAKE3 of bytes 0..32 and all ranges   64 ranges: first page u32, pages u32
//! ```

const MAGIC: [u8; 8] = *b"DMWRKSET";
const VERSION: u16 = 1;
const HEADER_BYTES: usize = 64;
const RANGE_BYTES: usize = 8;
const PAGE_BYTES: u64 = 4096;
/// More are not kept: 64 GiB of memory have as many parts of 64 KiB.
const RANGES_MAX: usize = 1 << 20;
/// No file is longer.
pub const WORKING_SET_BYTES_MAX: usize = HEADER_BYTES + RANGES_MAX * RANGE_BYTES;

/// Pages of 4 KiB, counted as a layer of memory has them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PageRange {
    pub first: u32,
    pub count: u32,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct WorkingSet {
    memory_bytes: u64,
    ranges: Vec<PageRange>,
}

#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum WorkingSetError {
    #[error("it is no working set")]
    Magic,
    #[error("version {0} is not known to this release (it reads version {VERSION})")]
    Version(u16),
    #[error("it has {given} bytes, its header says {expected}")]
    Length { given: usize, expected: usize },
    #[error("the content does not match its digest: the file is damaged")]
    Digest,
    #[error("a range of it is empty or ends beyond the memory")]
    Range,
    #[error("reserved bytes are not zero")]
    Reserved,
}

impl WorkingSet {
    /// Of a guest with so much memory. Neighbours become one; what is beyond the limit is left out.
    #[must_use]
    pub fn new(memory_bytes: u64, ranges: impl IntoIterator<Item = PageRange>) -> Self {
        let mut kept: Vec<PageRange> = Vec::new();
        for range in ranges {
            let room = kept.len() < RANGES_MAX;
            match kept.last_mut() {
                Some(last) if last.first.checked_add(last.count) == Some(range.first) => {
                    last.count = last.count.saturating_add(range.count);
                }
                _ if room => kept.push(range),
                _ => break,
            }
        }
        Self { memory_bytes, ranges: kept }
    }

    #[must_use]
    pub fn memory_bytes(&self) -> u64 {
        self.memory_bytes
    }

    /// First touched first.
    #[must_use]
    pub fn ranges(&self) -> &[PageRange] {
        &self.ranges
    }

    pub fn encode(&self) -> Result<Vec<u8>, WorkingSetError> {
        self.validate()?;
        let count = u32::try_from(self.ranges.len()).map_err(|_| WorkingSetError::Range)?;
        let mut bytes = vec![0; HEADER_BYTES];
        bytes[..8].copy_from_slice(&MAGIC);
        bytes[8..10].copy_from_slice(&VERSION.to_le_bytes());
        bytes[16..24].copy_from_slice(&self.memory_bytes.to_le_bytes());
        bytes[24..28].copy_from_slice(&count.to_le_bytes());
        for range in &self.ranges {
            bytes.extend_from_slice(&range.first.to_le_bytes());
            bytes.extend_from_slice(&range.count.to_le_bytes());
        }
        let digest = digest(&bytes);
        bytes[32..64].copy_from_slice(&digest);
        Ok(bytes)
    }

    /// Reads and validates.
    pub fn decode(bytes: &[u8]) -> Result<Self, WorkingSetError> {
        let (header, body) = bytes.split_at_checked(HEADER_BYTES).ok_or(WorkingSetError::Magic)?;
        if header[..8] != MAGIC {
            return Err(WorkingSetError::Magic);
        }
        let version = u16::from_le_bytes([header[8], header[9]]);
        if version != VERSION {
            return Err(WorkingSetError::Version(version));
        }
        if header[10..16].iter().chain(&header[28..32]).any(|byte| *byte != 0) {
            return Err(WorkingSetError::Reserved);
        }
        let count = usize::try_from(word(&header[24..])).unwrap_or(usize::MAX);
        let expected = count.saturating_mul(RANGE_BYTES).saturating_add(HEADER_BYTES);
        if count > RANGES_MAX || bytes.len() != expected {
            return Err(WorkingSetError::Length { given: bytes.len(), expected });
        }
        if header[32..64] != digest(bytes) {
            return Err(WorkingSetError::Digest);
        }
        let ranges = body.as_chunks::<RANGE_BYTES>().0.iter();
        let ranges = ranges.map(|range| PageRange { first: word(range), count: word(&range[4..]) }).collect();
        let memory_bytes = u64::from(word(&header[16..])) | u64::from(word(&header[20..])) << 32;
        let set = Self { memory_bytes, ranges };
        set.validate()?;
        Ok(set)
    }

    fn validate(&self) -> Result<(), WorkingSetError> {
        let pages = self.memory_bytes / PAGE_BYTES;
        let fits =
            |range: &PageRange| range.count > 0 && u64::from(range.first) + u64::from(range.count) <= pages;
        if self.ranges.len() <= RANGES_MAX && self.ranges.iter().all(fits) {
            Ok(())
        } else {
            Err(WorkingSetError::Range)
        }
    }
}

fn word(bytes: &[u8]) -> u32 {
    bytes.first_chunk::<4>().map_or(0, |word| u32::from_le_bytes(*word))
}

fn digest(bytes: &[u8]) -> [u8; 32] {
    let mut hasher = blake3::Hasher::new();
    hasher.update(&bytes[..32]).update(&bytes[HEADER_BYTES..]);
    *hasher.finalize().as_bytes()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn sample() -> WorkingSet {
        let range = |first, count| PageRange { first, count };
        WorkingSet::new(1 << 20, [range(16, 16), range(32, 16), range(0, 16), range(240, 16)])
    }

    #[test]
    fn neighbours_are_one_and_the_order_is_kept() {
        let range = |first, count| PageRange { first, count };
        assert_eq!(sample().ranges(), [range(16, 32), range(0, 16), range(240, 16)]);
        let bytes = sample().encode().unwrap();
        assert_eq!(bytes.len(), 64 + 3 * 8);
        assert_eq!(WorkingSet::decode(&bytes).unwrap(), sample());
    }

    #[test]
    fn every_changed_missing_or_added_byte_is_noticed() {
        let good = sample().encode().unwrap();
        for at in 0..good.len() {
            let mut bad = good.clone();
            bad[at] ^= 1;
            assert!(WorkingSet::decode(&bad).is_err(), "byte {at}");
            assert!(WorkingSet::decode(&good[..at]).is_err(), "cut off at {at}");
        }
        assert!(WorkingSet::decode(&[&good[..], &[0]].concat()).is_err());
        let beyond = WorkingSet::new(1 << 20, [PageRange { first: 250, count: 16 }]);
        assert_eq!(beyond.encode(), Err(WorkingSetError::Range));
    }

    proptest! {
        #[test]
        fn any_bytes_are_read_or_refused(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
            prop_assert!(WorkingSet::decode(&[&MAGIC[..], &bytes].concat()).is_err());
        }
    }
}
