//! Sending a file to the disk while another process is still writing it, so that the fsync at the end
//! has little left to do.
//!
//! Measured (200 MiB, two cores, virtio disk): page-cache writes, then fsync beside a two-threaded hash
//! of the cached pages, take 1.0–1.3 times what the same O_DIRECT writes take without any hash. Reading
//! a file back while it is written with O_DIRECT triples the writer's time, and hashing a growing file
//! is only sound for writers that never go back: so the hash comes after the writer, the flush beside it.

use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

use dormouse_sys::writeback;

/// How often the growing file is looked at.
const LOOK_EVERY: Duration = Duration::from_millis(1);
/// New bytes that are worth a request to the disk.
const STEP_BYTES: u64 = 8 << 20;

/// A thread that follows one file. It ends when the value is dropped, and changes nothing that is read.
#[derive(Debug)]
pub struct Flusher {
    ended: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Flusher {
    pub fn start(path: PathBuf) -> io::Result<Self> {
        let ended = Arc::new(AtomicBool::new(false));
        let flag = Arc::clone(&ended);
        let follow = move || {
            if let Err(error) = follow(&path, &flag) {
                tracing::debug!(%error, path = %path.display(), "a file is not flushed while it is written");
            }
        };
        let thread = std::thread::Builder::new().name("dormouse-flush".to_owned()).spawn(follow)?;
        Ok(Self { ended, thread: Some(thread) })
    }
}

impl Drop for Flusher {
    fn drop(&mut self) {
        self.ended.store(true, Ordering::Release);
        if let Some(thread) = self.thread.take() {
            thread.thread().unpark();
            if thread.join().is_err() {
                tracing::warn!("a flushing thread panicked");
            }
        }
    }
}

fn follow(path: &Path, ended: &AtomicBool) -> io::Result<()> {
    let mut open: Option<File> = None;
    let mut started = 0;
    while !ended.load(Ordering::Acquire) {
        match &open {
            None => match File::open(path) {
                Err(error) if error.kind() == io::ErrorKind::NotFound => {}
                other => open = Some(other?),
            },
            Some(file) => {
                let length = file.metadata()?.len();
                if length >= started + STEP_BYTES {
                    writeback::start(file, started, length - started)?;
                    started = length;
                    continue;
                }
            }
        }
        std::thread::park_timeout(LOOK_EVERY);
    }
    Ok(())
}
