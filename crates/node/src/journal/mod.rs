//! What the node remembers: SQLite (WAL, every commit synced), written by one thread.
//!
//! Invariants: an intended multi-step action is in `operations` before its first step; a sandbox's row
//! is written before its state is told; nothing here grows without a bound. A file that SQLite cannot
//! read is kept aside under a new name, never overwritten.
//!
//! Callers send closures over a bounded channel; the thread runs what has gathered in one transaction
//! (each in its own savepoint) and answers after the commit.

mod keys;
mod log;
mod migrations;
mod sandboxes;
mod snapshots;
mod templates;

use std::path::{Path, PathBuf};
use std::sync::{Arc, mpsc};
use std::thread::JoinHandle;

use rusqlite::Connection;
use tokio::sync::oneshot;

pub use keys::hash_secret;
pub use log::PAGE_MAX;
pub use sandboxes::{Idempotent, PendingOp, SandboxRow, put as put_sandbox};
pub use snapshots::SnapshotRow;
pub use templates::TemplateRow;

use crate::error::{ErrorCode, NodeError, OpenError};

const FILE: &str = "node.db";
/// Closures that wait for the writer.
const WAITING_MAX: usize = 1024;
/// Closures that share one transaction.
const BATCH_MAX: usize = 64;

#[derive(Debug, thiserror::Error)]
pub enum JournalError {
    #[error("the journal cannot be written: {0}")]
    Sql(String),
    #[error("the journal cannot be written: the disk is full")]
    NoSpace,
    #[error("the journal is closed")]
    Closed,
}

impl From<rusqlite::Error> for JournalError {
    fn from(error: rusqlite::Error) -> Self {
        match error.sqlite_error_code() {
            Some(rusqlite::ErrorCode::DiskFull) => Self::NoSpace,
            _ => Self::Sql(error.to_string()),
        }
    }
}

impl From<JournalError> for NodeError {
    fn from(error: JournalError) -> Self {
        let code = match error {
            JournalError::NoSpace => ErrorCode::NoSpace,
            JournalError::Closed => ErrorCode::Unavailable,
            JournalError::Sql(_) => ErrorCode::Internal,
        };
        Self::new(code, error.to_string())
    }
}

type Finish = Box<dyn FnOnce(Result<(), JournalError>) + Send>;
type Job = Box<dyn FnOnce(&Connection) -> Finish + Send>;

#[derive(Clone)]
pub struct Journal(Arc<Writer>);

/// The last clone's end is the thread's: what was handed over is written, the file is closed.
struct Writer {
    jobs: Option<mpsc::SyncSender<Job>>,
    thread: Option<JoinHandle<()>>,
}

impl Drop for Writer {
    fn drop(&mut self) {
        self.jobs = None;
        if self.thread.take().is_some_and(|thread| thread.join().is_err()) {
            tracing::error!("the journal's writer ended abnormally");
        }
    }
}

/// What opening found.
pub struct Opened {
    pub journal: Journal,
    /// The damaged file's new name.
    pub kept_aside: Option<PathBuf>,
}

impl Journal {
    pub fn open(data_dir: &Path) -> Result<Opened, OpenError> {
        let path = data_dir.join(FILE);
        let failed =
            |error: rusqlite::Error| OpenError::Journal { path: path.clone(), why: error.to_string() };
        let (connection, kept_aside) = match connect(&path) {
            Ok(connection) => (connection, None),
            Err(error) if is_damage(&error) => {
                let kept = keep_aside(&path)?;
                (connect(&path).map_err(failed)?, Some(kept))
            }
            Err(error) => return Err(failed(error)),
        };
        migrations::run(&connection, &path)?;
        let (jobs, receiver) = mpsc::sync_channel(WAITING_MAX);
        let thread = std::thread::Builder::new()
            .name("journal".to_owned())
            .spawn(move || write_all(&connection, &receiver))
            .map_err(|source| OpenError::Io { action: "start the writer of", path: path.clone(), source })?;
        let journal = Self(Arc::new(Writer { jobs: Some(jobs), thread: Some(thread) }));
        Ok(Opened { journal, kept_aside })
    }

    /// Runs `work` in the writer's thread; resolves after its commit. What the closure did is undone
    /// when it returns an error.
    pub async fn call<T, F>(&self, work: F) -> Result<T, JournalError>
    where
        T: Send + 'static,
        F: FnOnce(&Connection) -> rusqlite::Result<T> + Send + 'static,
    {
        let (tell, told) = oneshot::channel();
        let mut job: Job = Box::new(move |connection| {
            let result = in_savepoint(connection, work);
            Box::new(move |committed| {
                let result = committed.and_then(|()| result.map_err(JournalError::from));
                drop(tell.send(result));
            })
        });
        // The channel is the blocking kind so that the thread needs no runtime; it is rarely full.
        loop {
            match self.send(job) {
                Ok(()) => break,
                Err(mpsc::TrySendError::Full(back)) => {
                    job = back;
                    tokio::time::sleep(std::time::Duration::from_millis(5)).await;
                }
                Err(mpsc::TrySendError::Disconnected(_)) => return Err(JournalError::Closed),
            }
        }
        told.await.unwrap_or(Err(JournalError::Closed))
    }

    fn send(&self, job: Job) -> Result<(), mpsc::TrySendError<Job>> {
        match &self.0.jobs {
            Some(jobs) => jobs.try_send(job),
            None => Err(mpsc::TrySendError::Disconnected(job)),
        }
    }

    /// Hands it over and does not wait: for what may be lost with the daemon (events, readings).
    pub fn post<F>(&self, work: F)
    where
        F: FnOnce(&Connection) -> rusqlite::Result<()> + Send + 'static,
    {
        let job: Job = Box::new(move |connection| {
            let result = in_savepoint(connection, work);
            Box::new(move |committed| {
                if let Err(error) = committed.and_then(|()| result.map_err(JournalError::from)) {
                    tracing::warn!(%error, "an event was not written down");
                }
            })
        });
        if self.send(job).is_err() {
            tracing::warn!("the journal is behind; an event was not written down");
        }
    }
}

fn connect(path: &Path) -> rusqlite::Result<Connection> {
    let connection = Connection::open(path)?;
    connection.busy_timeout(std::time::Duration::from_secs(10))?;
    connection.pragma_update_and_check(None, "journal_mode", "WAL", |_| Ok(()))?;
    connection.pragma_update(None, "synchronous", "FULL")?;
    connection.pragma_update(None, "foreign_keys", "ON")?;
    connection.pragma_update(None, "journal_size_limit", 16 << 20)?;
    let verdict: String = connection.query_row("PRAGMA quick_check(1)", [], |row| row.get(0))?;
    if verdict == "ok" {
        return Ok(connection);
    }
    Err(rusqlite::Error::SqliteFailure(
        rusqlite::ffi::Error::new(rusqlite::ffi::SQLITE_CORRUPT),
        Some(verdict),
    ))
}

fn is_damage(error: &rusqlite::Error) -> bool {
    matches!(
        error.sqlite_error_code(),
        Some(rusqlite::ErrorCode::DatabaseCorrupt | rusqlite::ErrorCode::NotADatabase)
    )
}

fn keep_aside(path: &Path) -> Result<PathBuf, OpenError> {
    let name = |count: u32, suffix: &str| path.with_file_name(format!("{FILE}.damaged.{count}{suffix}"));
    let count = (1..10_000).find(|count| !name(*count, "").exists()).unwrap_or(0);
    for suffix in ["", "-wal", "-shm"] {
        let from = path.with_file_name(format!("{FILE}{suffix}"));
        match std::fs::rename(&from, name(count, suffix)) {
            Err(source) if source.kind() != std::io::ErrorKind::NotFound => {
                return Err(OpenError::Io { action: "keep aside the damaged journal", path: from, source });
            }
            _ => {}
        }
    }
    Ok(name(count, ""))
}

fn in_savepoint<T>(
    connection: &Connection,
    work: impl FnOnce(&Connection) -> rusqlite::Result<T>,
) -> rusqlite::Result<T> {
    connection.execute_batch("SAVEPOINT job")?;
    let result = work(connection);
    let end = if result.is_ok() { "RELEASE job" } else { "ROLLBACK TO job; RELEASE job" };
    connection.execute_batch(end)?;
    result
}

fn write_all(connection: &Connection, jobs: &mpsc::Receiver<Job>) {
    while let Ok(first) = jobs.recv() {
        let mut finishes = Vec::new();
        let begun = connection.execute_batch("BEGIN IMMEDIATE");
        finishes.push(first(connection));
        while finishes.len() < BATCH_MAX {
            let Ok(next) = jobs.try_recv() else { break };
            finishes.push(next(connection));
        }
        let committed = begun.and_then(|()| connection.execute_batch("COMMIT"));
        if committed.is_err() && !connection.is_autocommit() {
            drop(connection.execute_batch("ROLLBACK"));
        }
        for finish in finishes {
            let outcome = match &committed {
                Ok(()) => Ok(()),
                Err(error) => Err(describe(error)),
            };
            finish(outcome);
        }
    }
}

fn describe(error: &rusqlite::Error) -> JournalError {
    match error.sqlite_error_code() {
        Some(rusqlite::ErrorCode::DiskFull) => JournalError::NoSpace,
        _ => JournalError::Sql(error.to_string()),
    }
}

/// JSON in a column, as SQLite's own error when it cannot be read.
fn json<T: serde::de::DeserializeOwned>(text: &str) -> rusqlite::Result<T> {
    serde_json::from_str(text).map_err(|error| {
        rusqlite::Error::FromSqlConversionFailure(0, rusqlite::types::Type::Text, Box::new(error))
    })
}

fn to_json<T: serde::Serialize>(value: &T) -> rusqlite::Result<String> {
    serde_json::to_string(value).map_err(|error| rusqlite::Error::ToSqlConversionFailure(Box::new(error)))
}

#[cfg(test)]
mod tests;
