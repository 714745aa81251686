//! A second copy of what must not be forgotten, beside the journal: where that is damaged or gone, a new
//! one begins from it.
//!
//! Invariants: the copy is replaced whole, by a rename, and only ever by what a sound journal held; it
//! lags behind by about a second, which the search for runtimes and snapshots at the start makes up for;
//! its thread reads, and never makes the writer wait.

use std::path::{Path, PathBuf};
use std::sync::mpsc;
use std::time::{Duration, Instant};

use rusqlite::{Connection, OpenFlags};

use super::{FILE, migrations};

/// Changes within this are copied together.
const GATHER: Duration = Duration::from_secs(1);
/// In the order that references allow. Histories (events, readings) are left out.
const TABLES: [&str; 9] = [
    "sandboxes",
    "operations",
    "templates",
    "aliases",
    "build_cache",
    "snapshots",
    "snapshot_names",
    "keys",
    "receipts",
];

pub fn path(data_dir: &Path) -> PathBuf {
    data_dir.join(format!("{FILE}.copy"))
}

/// Copies until the other end of `changes` is gone, and once more then.
pub fn keep(journal: &Path, changes: &mpsc::Receiver<()>) {
    let Some(dir) = journal.parent() else { return };
    let (mut seen, mut told) = (None, false);
    let mut open = true;
    while open {
        open = changes.recv().is_ok();
        let end = Instant::now() + GATHER;
        while open {
            match changes.recv_timeout(end.saturating_duration_since(Instant::now())) {
                Ok(()) => {}
                Err(mpsc::RecvTimeoutError::Timeout) => break,
                Err(mpsc::RecvTimeoutError::Disconnected) => open = false,
            }
        }
        match renew(journal, &path(dir), &mut seen) {
            Ok(()) => told = false,
            Err(error) if !told => {
                tracing::warn!(%error, "the copy of the journal could not be renewed; it is tried again");
                told = true;
            }
            Err(_) => {}
        }
    }
}

#[derive(Debug, thiserror::Error)]
enum CopyError {
    #[error(transparent)]
    Sql(#[from] rusqlite::Error),
    #[error(transparent)]
    Io(#[from] std::io::Error),
    #[error("{0}")]
    Schema(String),
}

/// `seen` spares the work where nothing was committed since the last time.
fn renew(journal: &Path, copy: &Path, seen: &mut Option<Seen>) -> Result<(), CopyError> {
    let state = match seen.take() {
        Some(state) => state,
        None => Seen { connection: Connection::open_with_flags(journal, read_flags())?, version: None },
    };
    let version: i64 = state.connection.query_row("PRAGMA data_version", [], |row| row.get(0))?;
    if state.version != Some(version) {
        write(&state.connection, copy)?;
    }
    *seen = Some(Seen { version: Some(version), ..state });
    Ok(())
}

struct Seen {
    connection: Connection,
    version: Option<i64>,
}

fn read_flags() -> OpenFlags {
    OpenFlags::SQLITE_OPEN_READ_WRITE | OpenFlags::SQLITE_OPEN_NO_MUTEX
}

fn write(journal: &Connection, copy: &Path) -> Result<(), CopyError> {
    // Two processes may open one folder's keys.
    let new = copy.with_extension(format!("copy.{}", std::process::id()));
    let written = write_new(journal, &new);
    if written.is_err() {
        drop(std::fs::remove_file(&new));
    }
    written?;
    std::fs::rename(&new, copy)?;
    Ok(())
}

fn write_new(journal: &Connection, new: &Path) -> Result<(), CopyError> {
    match std::fs::remove_file(new) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => return Err(error.into()),
        _ => {}
    }
    super::make_private(new)?;
    let made = Connection::open(new)?;
    // A crash leaves an unfinished file that is never looked at.
    made.pragma_update_and_check(None, "journal_mode", "OFF", |_| Ok(()))?;
    made.pragma_update(None, "synchronous", "OFF")?;
    migrations::run(&made, new).map_err(|error| CopyError::Schema(error.to_string()))?;
    made.close().map_err(|(_, error)| error)?;
    journal.execute("ATTACH DATABASE ?1 AS copy", [new.to_string_lossy()])?;
    let filled = fill(journal);
    let let_go = journal.execute_batch("DETACH DATABASE copy");
    filled?;
    let_go?;
    std::fs::File::open(new)?.sync_all()?;
    Ok(())
}

fn fill(journal: &Connection) -> rusqlite::Result<()> {
    journal.execute_batch("PRAGMA copy.journal_mode = OFF; PRAGMA copy.synchronous = OFF")?;
    let inserts: String =
        TABLES.iter().map(|table| format!("INSERT INTO copy.{table} SELECT * FROM main.{table};")).collect();
    // One transaction: all tables as of one instant.
    let filled = journal.execute_batch(&format!("BEGIN;{inserts}COMMIT"));
    if filled.is_err() && !journal.is_autocommit() {
        drop(journal.execute_batch("ROLLBACK"));
    }
    filled
}

/// Puts the copy in the journal's place, which is empty. False: there is none that could serve.
pub fn bring_back(journal: &Path) -> std::io::Result<bool> {
    let Some(copy) = journal.parent().map(path) else { return Ok(false) };
    let sound = Connection::open_with_flags(&copy, OpenFlags::SQLITE_OPEN_READ_ONLY)
        .and_then(|it| it.query_row("PRAGMA quick_check(1)", [], |row| row.get::<_, String>(0)));
    if !matches!(sound.as_deref(), Ok("ok")) {
        return Ok(false);
    }
    let new = journal.with_extension("db.new");
    std::fs::copy(&copy, &new)?;
    std::fs::File::open(&new)?.sync_all()?;
    std::fs::rename(&new, journal)?;
    Ok(true)
}
