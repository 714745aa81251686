//! The digest of a sparse file: of where it has data, and of that data. Holes cost nothing.
//!
//! ```text
//! chunk   the data of one aligned 4 MiB of the file: for each run of it  offset u64, length u64, its bytes
//! root    length of the file u64, then for each chunk that has data      its number u64, its digest
//! ```
//! Runs are as long as they can be within their chunk, so it does not matter in how many pieces a file system keeps
//! them. A hole and a run of zeros are told apart: in a layer they are different things. Format: `docs/formats/layer.md`.

use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};

use blake3::Hasher;
use dormouse_snapshot::{Digest, FileDigest, FileRole};
use dormouse_sys::files::next_data;
use dormouse_types::EngineKind;

use crate::digest::{digest_file, threads};

/// Aligned to their length; a constant of the format.
pub const CHUNK_BYTES: u64 = 4 << 20;
/// Keys of the two hashes (BLAKE3's key derivation): neither is ever mistaken for the other, or for that of a file.
const CHUNK_CONTEXT: &str = "dormouse 2026-11-30 sparse file, chunk, version 1";
const ROOT_CONTEXT: &str = "dormouse 2026-11-30 sparse file, root, version 1";
const READ_BYTES: usize = 1 << 20;

/// Digest and length of the file. `cancel` ends it early with `ErrorKind::Interrupted`.
pub fn digest_sparse(file: &File, cancel: &AtomicBool) -> io::Result<(Digest, u64)> {
    let bytes = file.metadata()?.len();
    let shared = Shared { file, bytes, next: AtomicU64::new(0), cancel, done: Mutex::new(Vec::new()) };
    std::thread::scope(|scope| {
        let count = threads(usize::try_from(bytes.div_ceil(CHUNK_BYTES)).unwrap_or(usize::MAX));
        let workers: Vec<_> = (1..count).map(|_| scope.spawn(|| shared.work())).collect();
        let first = shared.work();
        workers.into_iter().fold(first, |outcome, worker| {
            outcome.and(worker.join().unwrap_or_else(|_| Err(io::Error::other("a hashing thread panicked"))))
        })
    })?;
    let mut chunks = shared.done.into_inner().unwrap_or_else(PoisonError::into_inner);
    chunks.sort_unstable();
    let mut root = Hasher::new_derive_key(ROOT_CONTEXT);
    root.update(&bytes.to_le_bytes());
    for (number, digest) in chunks {
        root.update(&number.to_le_bytes()).update(&digest);
    }
    Ok((*root.finalize().as_bytes(), bytes))
}

/// The digest that a file of a snapshot gets, by what it is, and its length: layers are sparse, and where they have data
/// is part of what they say.
pub fn digest_by_role(
    file: &File,
    engine: EngineKind,
    role: FileRole,
    cancel: &AtomicBool,
) -> io::Result<(FileDigest, u64)> {
    if engine == EngineKind::Microvm && matches!(role, FileRole::Memory | FileRole::Disk) {
        return digest_sparse(file, cancel).map(|(digest, bytes)| (FileDigest::Sparse(digest), bytes));
    }
    digest_file(file, cancel).map(|(digest, bytes)| (FileDigest::Whole(digest), bytes))
}

struct Shared<'a> {
    file: &'a File,
    bytes: u64,
    /// The chunk that is looked at next.
    next: AtomicU64,
    cancel: &'a AtomicBool,
    done: Mutex<Vec<(u64, Digest)>>,
}

impl Shared<'_> {
    fn work(&self) -> io::Result<()> {
        let mut buffer = vec![0; READ_BYTES];
        loop {
            if self.cancel.load(Ordering::Relaxed) {
                return Err(io::ErrorKind::Interrupted.into());
            }
            let number = self.next.fetch_add(1, Ordering::Relaxed);
            let Some(start) = number.checked_mul(CHUNK_BYTES).filter(|start| *start < self.bytes) else {
                return Ok(());
            };
            let end = start.saturating_add(CHUNK_BYTES).min(self.bytes);
            let hashed = self.chunk(start, end, &mut buffer);
            match hashed {
                Ok(Some(digest)) => {
                    self.done.lock().unwrap_or_else(PoisonError::into_inner).push((number, digest));
                }
                Ok(None) => {}
                Err(error) => {
                    // The others need not go on.
                    self.next.store(u64::MAX / 2, Ordering::Relaxed);
                    return Err(error);
                }
            }
        }
    }

    /// `None`: it has no data.
    fn chunk(&self, start: u64, end: u64, buffer: &mut [u8]) -> io::Result<Option<Digest>> {
        let mut hasher = None;
        let mut at = start;
        while let Some((from, to)) = self.run(at, end)? {
            let hasher = hasher.get_or_insert_with(|| Hasher::new_derive_key(CHUNK_CONTEXT));
            hasher.update(&from.to_le_bytes()).update(&(to - from).to_le_bytes());
            let mut done = from;
            while done < to {
                let want = usize::try_from(to - done).map_or(buffer.len(), |left| left.min(buffer.len()));
                self.file.read_exact_at(&mut buffer[..want], done)?;
                hasher.update(&buffer[..want]);
                done += want as u64;
            }
            at = to;
        }
        Ok(hasher.map(|hasher| *hasher.finalize().as_bytes()))
    }

    /// The first run of data that starts at `at` or behind it, and before `end`; cut off there. As long as can be.
    fn run(&self, at: u64, end: u64) -> io::Result<Option<(u64, u64)>> {
        if at >= end {
            return Ok(None);
        }
        let Some(Range { start: from, end: mut to }) =
            next_data(self.file, at)?.filter(|run| run.start < run.end)
        else {
            self.next.fetch_max(u64::MAX / 2, Ordering::Relaxed);
            return Ok(None);
        };
        if from >= end {
            // No chunk in between needs to be looked at.
            self.next.fetch_max(from / CHUNK_BYTES, Ordering::Relaxed);
            return Ok(None);
        }
        // Some file systems tell one run in pieces.
        while to < end
            && let Some(more) = next_data(self.file, to)?.filter(|more| more.start == to && more.end > to)
        {
            to = more.end;
        }
        Ok(Some((from, to.min(end))))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const BYTES: u64 = 3 * CHUNK_BYTES + 4096;

    fn file(data: &[(u64, &[u8])]) -> File {
        // Where the data is wanted: some memory file systems keep no holes that were punched.
        let file = tempfile::tempfile().unwrap();
        file.set_len(BYTES).unwrap();
        for (offset, bytes) in data {
            file.write_all_at(bytes, *offset).unwrap();
        }
        file.sync_all().unwrap();
        file
    }

    fn digest(file: &File) -> Digest {
        let (digest, bytes) = digest_sparse(file, &AtomicBool::new(false)).unwrap();
        assert_eq!(bytes, file.metadata().unwrap().len());
        digest
    }

    fn page(value: u8) -> Vec<u8> {
        vec![value; 4096]
    }

    #[test]
    fn is_what_the_format_says() {
        let run = vec![7; 8192];
        let at = CHUNK_BYTES - 4096;
        let found = digest(&file(&[(at, &run)]));
        let chunk = |offset: u64| {
            let mut hasher = Hasher::new_derive_key(CHUNK_CONTEXT);
            hasher.update(&offset.to_le_bytes()).update(&4096_u64.to_le_bytes()).update(&page(7));
            *hasher.finalize().as_bytes()
        };
        let mut root = Hasher::new_derive_key(ROOT_CONTEXT);
        root.update(&BYTES.to_le_bytes());
        root.update(&0_u64.to_le_bytes()).update(&chunk(at));
        root.update(&1_u64.to_le_bytes()).update(&chunk(CHUNK_BYTES));
        assert_eq!(found, *root.finalize().as_bytes());
    }

    #[test]
    fn the_order_of_writing_does_not_matter_and_everything_else_does() {
        let (a, b, zeros) = (page(1), page(2), page(0));
        let both = [a.clone(), b.clone()].concat();
        let one = digest(&file(&[(0, &a), (4096, &b), (2 * CHUNK_BYTES, &a)]));
        assert_eq!(one, digest(&file(&[(2 * CHUNK_BYTES, &a), (4096, &b), (0, &a)])));
        assert_eq!(one, digest(&file(&[(0, &both), (2 * CHUNK_BYTES, &a)])));
        let others = [
            digest(&file(&[(0, &a), (4096, &b)])),
            digest(&file(&[(0, &a), (8192, &b), (2 * CHUNK_BYTES, &a)])),
            digest(&file(&[(0, &b), (4096, &a), (2 * CHUNK_BYTES, &a)])),
            // Zeros are data: in a layer they hide what lies below.
            digest(&file(&[(0, &a), (4096, &b), (8192, &zeros), (2 * CHUNK_BYTES, &a)])),
            digest(&file(&[])),
        ];
        for (number, other) in others.iter().enumerate() {
            assert_ne!(one, *other, "{number}");
        }
        let longer = file(&[(0, &a), (4096, &b), (2 * CHUNK_BYTES, &a)]);
        longer.set_len(BYTES + 4096).unwrap();
        assert_ne!(one, digest(&longer), "its length counts");
    }

    #[test]
    fn a_terabyte_of_hole_costs_nothing_and_it_can_be_cancelled() {
        let file = file(&[(0, &page(1))]);
        file.set_len(1 << 40).unwrap();
        digest(&file);
        let error = digest_sparse(&file, &AtomicBool::new(true)).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::Interrupted);
    }
}
