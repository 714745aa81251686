//! BLAKE3 of a file, by several threads, without mapping it: a mapped file that shrinks kills the
//! process, a read one is an error.
//!
//! The file is cut into blocks of a power-of-two length; each is a subtree of BLAKE3's tree and is
//! hashed by whichever thread comes first (BLAKE3 paper, section 2.1). The result equals a plain hash.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::sync::Mutex;
use std::sync::PoisonError;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use blake3::Hasher;
use blake3::hazmat::{ChainingValue, HasherExt, Mode, merge_subtrees_non_root, merge_subtrees_root};
use dormouse_snapshot::Digest;

/// More threads than this read no faster and would take the machine from the sandboxes.
pub const DIGEST_THREADS_MAX: usize = 8;

/// Large enough that two threads in turn still read ahead on the disk.
const BLOCK_BYTES: usize = 4 << 20;

/// Digest and length of the file. `cancel` ends it early with `ErrorKind::Interrupted`.
pub fn digest_file(file: &File, cancel: &AtomicBool) -> io::Result<(Digest, u64)> {
    let bytes = file.metadata()?.len();
    let blocks = usize::try_from(bytes.div_ceil(BLOCK_BYTES as u64))
        .map_err(|_| io::Error::new(io::ErrorKind::FileTooLarge, "the file is too long to be hashed"))?;
    if blocks <= 1 {
        let mut buffer = vec![0; usize::try_from(bytes).unwrap_or(BLOCK_BYTES)];
        file.read_exact_at(&mut buffer, 0)?;
        return Ok((*blake3::hash(&buffer).as_bytes(), bytes));
    }
    let threads = threads(blocks);
    let shared = Shared {
        file,
        bytes,
        next: AtomicUsize::new(0),
        cancel,
        failed: AtomicBool::new(false),
        done: Mutex::new(vec![[0; 32]; blocks]),
    };
    let outcomes: Vec<io::Result<()>> = std::thread::scope(|scope| {
        let workers: Vec<_> = (1..threads).map(|_| scope.spawn(|| shared.work())).collect();
        let mut outcomes = vec![shared.work()];
        for worker in workers {
            outcomes
                .push(worker.join().unwrap_or_else(|_| Err(io::Error::other("a hashing thread panicked"))));
        }
        outcomes
    });
    outcomes.into_iter().collect::<io::Result<()>>()?;
    let values = shared.done.into_inner().unwrap_or_else(PoisonError::into_inner);
    let left = left_blocks(values.len());
    let root = merge_subtrees_root(&subtree(&values[..left]), &subtree(&values[left..]), Mode::Hash);
    Ok((*root.as_bytes(), bytes))
}

/// How many are to hash so many parts of a file.
pub fn threads(parts: usize) -> usize {
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    // The other half is for whoever restores the same snapshot meanwhile.
    cores.div_ceil(2).min(DIGEST_THREADS_MAX).min(parts)
}

struct Shared<'a> {
    file: &'a File,
    bytes: u64,
    next: AtomicUsize,
    cancel: &'a AtomicBool,
    failed: AtomicBool,
    done: Mutex<Vec<ChainingValue>>,
}

impl Shared<'_> {
    fn work(&self) -> io::Result<()> {
        let outcome = self.blocks();
        if outcome.is_err() {
            self.failed.store(true, Ordering::Relaxed);
        }
        outcome
    }

    fn blocks(&self) -> io::Result<()> {
        let mut buffer = vec![0; BLOCK_BYTES];
        loop {
            if self.cancel.load(Ordering::Relaxed) {
                return Err(io::ErrorKind::Interrupted.into());
            }
            let block = self.next.fetch_add(1, Ordering::Relaxed);
            let offset = block as u64 * BLOCK_BYTES as u64;
            if offset >= self.bytes || self.failed.load(Ordering::Relaxed) {
                return Ok(());
            }
            let len = usize::try_from(self.bytes - offset).map_or(BLOCK_BYTES, |rest| rest.min(BLOCK_BYTES));
            self.file.read_exact_at(&mut buffer[..len], offset)?;
            let value = Hasher::new().set_input_offset(offset).update(&buffer[..len]).finalize_non_root();
            self.done.lock().unwrap_or_else(PoisonError::into_inner)[block] = value;
        }
    }
}

/// How many of `blocks` blocks are the left child: the largest power of two below it.
fn left_blocks(blocks: usize) -> usize {
    blocks.div_ceil(2).next_power_of_two()
}

fn subtree(values: &[ChainingValue]) -> ChainingValue {
    if let [one] = values {
        return *one;
    }
    let (left, right) = values.split_at(left_blocks(values.len()));
    merge_subtrees_non_root(&subtree(left), &subtree(right), Mode::Hash)
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use super::*;

    #[test]
    fn equals_a_plain_hash_at_every_tree_shape() {
        let block = BLOCK_BYTES;
        for bytes in
            [0, 1, 1024, block - 1, block, block + 1, 2 * block, 2 * block + 7, 3 * block, 5 * block + 1025]
        {
            let content: Vec<u8> = (0..bytes).map(|i| u8::try_from(i * 31 % 251).unwrap()).collect();
            let mut file = tempfile::tempfile().unwrap();
            file.write_all(&content).unwrap();
            let (digest, len) = digest_file(&file, &AtomicBool::new(false)).unwrap();
            assert_eq!((digest, len), (*blake3::hash(&content).as_bytes(), bytes as u64), "{bytes} bytes");
        }
    }

    #[test]
    fn cancelled_is_an_error() {
        let file = tempfile::tempfile().unwrap();
        file.set_len(16 << 20).unwrap();
        let error = digest_file(&file, &AtomicBool::new(true)).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::Interrupted);
    }
}
