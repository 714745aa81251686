//! What the node remembers: SQLite (WAL, every commit synced), written by one thread.
//!
//! Invariants: an intended multi-step action is in `operations` before its first step; a sandbox's row
//! is written before its state is told; nothing here grows without a bound. A file that SQLite cannot
//! read is kept aside under a new name, never overwritten.
//!
//! Callers send closures over a bounded channel; the thread runs what has gathered in one transaction
//! (each in its own savepoint) and answers after the commit.

mod copy;
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
    copier: Option<JoinHandle<()>>,
}

impl Drop for Writer {
    fn drop(&mut self) {
        self.jobs = None;
        if self.thread.take().is_some_and(|thread| thread.join().is_err()) {
            tracing::error!("the journal's writer ended abnormally");
        }
        // The writer's end was its end's signal.
        if self.copier.take().is_some_and(|thread| thread.join().is_err()) {
            tracing::error!("the thread that copies the journal ended abnormally");
        }
    }
}

/// What opening found.
pub struct Opened {
    pub journal: Journal,
    pub lost: Option<Lost>,
}

/// The journal was damaged or gone.
#[derive(Debug)]
pub struct Lost {
    /// The damaged file's new name; `None`: there was no file.
    pub kept_aside: Option<PathBuf>,
    /// The new one began from the copy.
    pub brought_back: bool,
}

/// Exists from a loss until a person has all leftovers removed: what is not known may be only forgotten.
const FORGETFUL: &str = "node.db.forgetful";

/// Whether something may live here that the journal has forgotten.
#[must_use]
pub fn is_forgetful(data_dir: &Path) -> bool {
    data_dir.join(FORGETFUL).exists()
}

/// A person said that all that is not known may go.
pub fn trust_again(data_dir: &Path) -> std::io::Result<()> {
    match std::fs::remove_file(data_dir.join(FORGETFUL)) {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(()),
        other => other,
    }
}

impl Journal {
    /// For the one daemon that holds the folder's lock.
    pub fn open(data_dir: &Path) -> Result<Opened, OpenError> {
        let path = data_dir.join(FILE);
        let failed =
            |error: rusqlite::Error| OpenError::Journal { path: path.clone(), why: error.to_string() };
        let io = |action, source| OpenError::Io { action, path: path.clone(), source };
        let connected = if is_missing(data_dir) { None } else { Some(connect(&path)) };
        let (connection, lost) = match connected {
            Some(Ok(connection)) => (connection, None),
            Some(Err(error)) if !is_damage(&error) => return Err(failed(error)),
            damaged_or_gone => {
                let why = damaged_or_gone.map_or_else(|| "it was gone".to_owned(), |it| describe_damage(&it));
                std::fs::write(data_dir.join(FORGETFUL), why)
                    .map_err(|source| io("write down the loss of", source))?;
                let kept_aside = keep_aside(&path)?;
                let brought_back =
                    copy::bring_back(&path).map_err(|source| io("bring back the copy of", source))?;
                (connect(&path).map_err(failed)?, Some(Lost { kept_aside, brought_back }))
            }
        };
        migrations::run(&connection, &path)?;
        Ok(Opened { journal: Self::start(connection, &path)?, lost })
    }

    /// For whoever may come beside the daemon: repairs nothing.
    pub fn open_beside(data_dir: &Path) -> Result<Self, OpenError> {
        let path = data_dir.join(FILE);
        let failed = |why: String| OpenError::Journal { path: path.clone(), why };
        if is_missing(data_dir) {
            return Err(failed("it is gone; `dormouse serve` begins a new one from its copy".to_owned()));
        }
        let connection = connect(&path).map_err(|error| {
            let mend = if is_damage(&error) { "; `dormouse serve` keeps it aside and goes on" } else { "" };
            failed(format!("{error}{mend}"))
        })?;
        migrations::run(&connection, &path)?;
        Self::start(connection, &path)
    }

    fn start(connection: Connection, path: &Path) -> Result<Self, OpenError> {
        let failed = |source| OpenError::Io { action: "start the writer of", path: path.to_owned(), source };
        let named = |name: &str| std::thread::Builder::new().name(name.to_owned());
        let (jobs, receiver) = mpsc::sync_channel(WAITING_MAX);
        let (changed, changes) = mpsc::sync_channel(1);
        let thread =
            named("journal").spawn(move || write_all(&connection, &receiver, &changed)).map_err(failed)?;
        let copied = path.to_owned();
        let copier = named("journal-copy").spawn(move || copy::keep(&copied, &changes)).map_err(failed)?;
        Ok(Self(Arc::new(Writer { jobs: Some(jobs), thread: Some(thread), copier: Some(copier) })))
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
    make_private(path).map_err(|error| {
        let code = rusqlite::ffi::Error::new(rusqlite::ffi::SQLITE_CANTOPEN);
        rusqlite::Error::SqliteFailure(code, Some(error.to_string()))
    })?;
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

/// It holds access tokens. SQLite gives the files beside it the same mode.
fn make_private(path: &Path) -> std::io::Result<()> {
    use std::os::unix::fs::{OpenOptionsExt, PermissionsExt};
    let mode = 0o600;
    let file = std::fs::File::options().write(true).create(true).truncate(false).mode(mode).open(path)?;
    file.set_permissions(std::fs::Permissions::from_mode(mode))?;
    for suffix in ["-wal", "-shm"] {
        let beside = path.with_file_name(format!("{FILE}{suffix}"));
        match std::fs::set_permissions(beside, std::fs::Permissions::from_mode(mode)) {
            Err(error) if error.kind() != std::io::ErrorKind::NotFound => return Err(error),
            _ => {}
        }
    }
    Ok(())
}

fn is_damage(error: &rusqlite::Error) -> bool {
    matches!(
        error.sqlite_error_code(),
        Some(rusqlite::ErrorCode::DatabaseCorrupt | rusqlite::ErrorCode::NotADatabase)
    )
}

fn describe_damage(connected: &rusqlite::Result<Connection>) -> String {
    connected.as_ref().err().map_or_else(String::new, ToString::to_string)
}

/// No journal where there must have been one: SQLite would begin an empty one without a word.
fn is_missing(data_dir: &Path) -> bool {
    let empty = std::fs::metadata(data_dir.join(FILE)).map_or(true, |about| about.len() == 0);
    let filled =
        |name: &str| std::fs::read_dir(data_dir.join(name)).is_ok_and(|mut entries| entries.next().is_some());
    empty && (copy::path(data_dir).exists() || ["snapshots", "run"].into_iter().any(filled))
}

/// The new name of the file, if there was one.
fn keep_aside(path: &Path) -> Result<Option<PathBuf>, OpenError> {
    let name = |count: u32, suffix: &str| path.with_file_name(format!("{FILE}.damaged.{count}{suffix}"));
    let free = |count: &u32| ["", "-wal", "-shm"].iter().all(|suffix| !name(*count, suffix).exists());
    let count = (1..10_000).find(free).unwrap_or(0);
    let there = path.exists();
    for suffix in ["", "-wal", "-shm"] {
        let from = path.with_file_name(format!("{FILE}{suffix}"));
        match std::fs::rename(&from, name(count, suffix)) {
            Err(source) if source.kind() != std::io::ErrorKind::NotFound => {
                return Err(OpenError::Io { action: "keep aside the damaged journal", path: from, source });
            }
            _ => {}
        }
    }
    Ok(there.then(|| name(count, "")))
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

fn write_all(connection: &Connection, jobs: &mpsc::Receiver<Job>, changed: &mpsc::SyncSender<()>) {
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
        // Full: the copier is told already.
        let _ = changed.try_send(());
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
