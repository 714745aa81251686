//! The keeper's log: one file, renamed aside once when full, so that no sandbox fills the disk with
//! refusals.

use std::fs::{File, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::Mutex;

use tracing::Level;

const LOG_BYTES_MAX: u64 = 1 << 20;

struct BoundedLog {
    path: PathBuf,
    file: File,
    written: u64,
}

fn open(path: &Path) -> io::Result<File> {
    OpenOptions::new().create(true).append(true).mode(0o600).open(path)
}

impl Write for BoundedLog {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        if self.written >= LOG_BYTES_MAX {
            std::fs::rename(&self.path, self.path.with_extension("log.1"))?;
            self.file = open(&self.path)?;
            self.written = 0;
        }
        let n = self.file.write(bytes)?;
        self.written += u64::try_from(n).unwrap_or(0);
        Ok(n)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.file.flush()
    }
}

/// Logs to `path` from now on, unless the process logs elsewhere already.
pub(crate) fn start(path: &Path) -> io::Result<()> {
    let file = open(path)?;
    let written = file.metadata()?.len();
    let log = BoundedLog { path: path.to_owned(), file, written };
    let subscriber =
        tracing_subscriber::fmt().with_max_level(Level::INFO).with_ansi(false).with_writer(Mutex::new(log));
    // Fails when there is a subscriber already (a test, a debugging run): then that one is used.
    let _ = subscriber.try_init();
    Ok(())
}
