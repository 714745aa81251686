//! Hashing a file while another process writes it, so that its digest is there when the writer ends.
//!
//! Sound only for writers that append: bytes below the end of the file never change again. That is the
//! caller's promise (measured for `runsc checkpoint`, release-20240729: one thread, plain `write` calls,
//! no seek, no truncation). What can be checked is checked, and then the result is not used: a hole
//! where bytes were read, a file that shrank or was replaced, a length that differs at the end.

use std::fs::File;
use std::io;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

use blake3::Hasher;
use dormouse_snapshot::Digest;
use rustix::fs::SeekFrom;

/// How often the growing file is looked at while there is nothing to do.
const LOOK_EVERY: Duration = Duration::from_millis(1);
/// Bytes hashed at once; while the writer is at work only whole steps are read.
const STEP_BYTES: usize = 1 << 20;

/// A thread that follows one file. Ends when it is finished or dropped.
#[derive(Debug)]
pub struct Tail {
    ended: Arc<AtomicBool>,
    dropped: Arc<AtomicBool>,
    thread: Option<JoinHandle<io::Result<Followed>>>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
struct Followed {
    inode: u64,
    bytes: u64,
    digest: Digest,
}

impl Tail {
    pub fn start(path: PathBuf) -> io::Result<Self> {
        let (ended, dropped) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicBool::new(false)));
        let flags = (Arc::clone(&ended), Arc::clone(&dropped));
        let thread = std::thread::Builder::new()
            .name("dormouse-digest".to_owned())
            .spawn(move || follow(&path, &flags.0, &flags.1))?;
        Ok(Self { ended, dropped, thread: Some(thread) })
    }

    /// To be called after the writer ended. `None`: hash the file anew.
    pub fn finish(mut self, file: &File) -> Option<(Digest, u64)> {
        self.ended.store(true, Ordering::Release);
        let thread = self.thread.take()?;
        thread.thread().unpark();
        let followed = thread.join().ok()?;
        let followed =
            followed.inspect_err(|error| tracing::debug!(%error, "a file was not followed")).ok()?;
        let meta = file.metadata().ok()?;
        let same = meta.ino() == followed.inode && meta.len() == followed.bytes;
        same.then_some((followed.digest, followed.bytes))
    }
}

impl Drop for Tail {
    fn drop(&mut self) {
        self.dropped.store(true, Ordering::Release);
        if let Some(thread) = self.thread.take() {
            thread.thread().unpark();
            // What it found is of no use any more; a panic of it neither.
            drop(thread.join());
        }
    }
}

fn follow(path: &Path, ended: &AtomicBool, dropped: &AtomicBool) -> io::Result<Followed> {
    let Some(file) = wait_for(path, ended, dropped)? else {
        return Err(io::ErrorKind::NotFound.into());
    };
    let inode = file.metadata()?.ino();
    let mut hasher = Hasher::new();
    let mut buffer = vec![0; STEP_BYTES];
    let mut read = 0_u64;
    loop {
        if dropped.load(Ordering::Acquire) {
            return Err(io::ErrorKind::Interrupted.into());
        }
        // Asked before the length: what was written before the end is then all seen.
        let last = ended.load(Ordering::Acquire);
        let length = file.metadata()?.len();
        let new = length.checked_sub(read).ok_or_else(|| changed("it shrank"))?;
        let step = usize::try_from(new).map_or(STEP_BYTES, |new| new.min(STEP_BYTES));
        if step == STEP_BYTES || (last && step > 0) {
            file.read_exact_at(&mut buffer[..step], read)?;
            // Asked after the read: a hole there now was one when it was read.
            no_hole(&file, read, step)?;
            hasher.update(&buffer[..step]);
            read += step as u64;
        } else if last {
            return Ok(Followed { inode, bytes: read, digest: *hasher.finalize().as_bytes() });
        } else {
            std::thread::park_timeout(LOOK_EVERY);
        }
    }
}

fn wait_for(path: &Path, ended: &AtomicBool, dropped: &AtomicBool) -> io::Result<Option<File>> {
    loop {
        let last = ended.load(Ordering::Acquire) || dropped.load(Ordering::Acquire);
        match File::open(path) {
            Ok(file) => return Ok(Some(file)),
            Err(error) if error.kind() == io::ErrorKind::NotFound && last => return Ok(None),
            Err(error) if error.kind() == io::ErrorKind::NotFound => std::thread::park_timeout(LOOK_EVERY),
            Err(error) => return Err(error),
        }
    }
}

/// A hole below the end means that the writer jumps: it may fill it later.
fn no_hole(file: &File, offset: u64, bytes: usize) -> io::Result<()> {
    let hole = rustix::fs::seek(file, SeekFrom::Hole(offset))?;
    if hole < offset + bytes as u64 { Err(changed("it has holes")) } else { Ok(()) }
}

fn changed(why: &'static str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, why)
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use super::*;

    fn follow_writes(write: impl FnOnce(&Path, &mut File)) -> (Option<(Digest, u64)>, Vec<u8>) {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("pages");
        let tail = Tail::start(path.clone()).unwrap();
        let mut file = File::create(&path).unwrap();
        write(&path, &mut file);
        let found = tail.finish(&File::open(&path).unwrap());
        (found, std::fs::read(&path).unwrap())
    }

    #[test]
    fn appended_bytes_give_the_plain_digest() {
        for steps in [0_u8, 1, 3, 40] {
            let (found, content) = follow_writes(|_, file| {
                for step in 0..steps {
                    file.write_all(&vec![step; 123_457]).unwrap();
                }
            });
            assert_eq!(found, Some((*blake3::hash(&content).as_bytes(), content.len() as u64)), "{steps}");
        }
    }

    #[test]
    fn a_file_with_a_hole_is_not_trusted() {
        let (found, _) = follow_writes(|_, file| {
            file.write_all(&[1; 4096]).unwrap();
            file.set_len(8 << 20).unwrap();
        });
        assert_eq!(found, None);
    }

    #[test]
    fn a_replaced_file_is_not_trusted() {
        let (found, _) = follow_writes(|path, file| {
            file.write_all(&vec![1; 2 << 20]).unwrap();
            // Followed until it is whole, then another takes its name.
            let other = path.with_extension("other");
            std::fs::write(&other, vec![2; 2 << 20]).unwrap();
            std::fs::hard_link(path, path.with_extension("old")).unwrap();
            std::fs::rename(&other, path).unwrap();
        });
        // Either the first file was opened (inode differs) or the second one was (then it is right).
        let right = (*blake3::hash(&vec![2; 2 << 20]).as_bytes(), 2 << 20);
        assert!(found.is_none() || found == Some(right), "{found:?}");
    }

    #[test]
    fn nothing_was_written_at_all() {
        let dir = tempfile::tempdir().unwrap();
        let tail = Tail::start(dir.path().join("never")).unwrap();
        assert_eq!(tail.finish(&tempfile::tempfile().unwrap()), None);
        drop(Tail::start(dir.path().join("dropped")).unwrap());
    }
}
