//! The operations of `filesystem.Filesystem` that are one call each. Blocking.
//!
//! As with E2B, they run with the agent's rights (root); the user decides where relative paths start and
//! who owns what is made.

use std::fs::File;
use std::io;
use std::path::Path;

use dormouse_wire::envd::connect::{Code, Error};
use dormouse_wire::envd::filesystem::{EntryInfo, ListDirRequest, MoveRequest, PathRequest};
use rustix::io::Errno;

use super::entry::{Names, describe};
use super::path::PathError;
use super::{Caller, owned, transfer, watch};

/// Entries in one answer; a caller that wants more lists deeper directories one by one.
const ENTRIES_MAX: usize = 100_000;

impl From<PathError> for Error {
    fn from(error: PathError) -> Self {
        Self::invalid_argument(error.to_string())
    }
}

/// The protocol's error of a failed operation on `path`.
pub fn failed(attempt: &str, path: &Path, why: &io::Error) -> Error {
    let path = path.display();
    let code = match why.kind() {
        io::ErrorKind::NotFound => {
            return Error::not_found(format!("{attempt} failed: path '{path}' does not exist"));
        }
        io::ErrorKind::AlreadyExists | io::ErrorKind::DirectoryNotEmpty => Code::AlreadyExists,
        io::ErrorKind::NotADirectory
        | io::ErrorKind::IsADirectory
        | io::ErrorKind::InvalidInput
        | io::ErrorKind::InvalidFilename
        | io::ErrorKind::Unsupported => Code::InvalidArgument,
        io::ErrorKind::ReadOnlyFilesystem | io::ErrorKind::ResourceBusy => Code::FailedPrecondition,
        io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => Code::ResourceExhausted,
        io::ErrorKind::PermissionDenied => Code::PermissionDenied,
        _ if why.raw_os_error() == Some(Errno::LOOP.raw_os_error()) => Code::FailedPrecondition,
        _ => Code::Internal,
    };
    Error::new(code, format!("{attempt} '{path}' failed: {why}"))
}

pub fn stat(caller: &Caller, request: &PathRequest) -> Result<EntryInfo, Error> {
    let path = caller.resolve(&request.path)?;
    describe(&path, &mut Names::default()).map_err(|why| failed("stat", &path, &why))
}

pub fn make_dir(caller: &Caller, request: &PathRequest) -> Result<EntryInfo, Error> {
    let path = caller.resolve(&request.path)?;
    match std::fs::metadata(&path) {
        Ok(meta) if meta.is_dir() => {
            return Err(Error::already_exists(format!("directory '{}' already exists", path.display())));
        }
        Ok(_) => {
            let message = format!("path '{}' already exists, but is not a directory", path.display());
            return Err(Error::invalid_argument(message));
        }
        Err(_) => {}
    }
    owned::make_dirs(&path, &caller.user).map_err(|why| failed("making directory", &path, &why))?;
    describe(&path, &mut Names::default()).map_err(|why| failed("stat", &path, &why))
}

pub fn move_entry(caller: &Caller, request: &MoveRequest) -> Result<EntryInfo, Error> {
    let source = caller.resolve(&request.source)?;
    let destination = caller.resolve(&request.destination)?;
    std::fs::symlink_metadata(&source).map_err(|why| failed("moving", &source, &why))?;
    owned::make_parent(&destination, &caller.user)
        .map_err(|why| failed("making the parent of", &destination, &why))?;
    transfer::move_path(&source, &destination).map_err(|why| {
        let error = failed("moving", &source, &why);
        Error::new(error.code, format!("{} (to '{}')", error.message, destination.display()))
    })?;
    watch::settle();
    describe(&destination, &mut Names::default()).map_err(|why| failed("stat", &destination, &why))
}

pub fn remove(caller: &Caller, request: &PathRequest) -> Result<(), Error> {
    let path = caller.resolve(&request.path)?;
    if path == Path::new("/") {
        return Err(Error::invalid_argument("path '/' is the root directory, which cannot be removed"));
    }
    transfer::remove(&path).map_err(|why| failed("removing", &path, &why))
}

/// Lists a directory in the order of its names, each directory before its content. Links are not
/// followed below the start, and paths begin with the one that was asked for.
pub fn list_dir(caller: &Caller, request: &ListDirRequest) -> Result<Vec<EntryInfo>, Error> {
    let path = caller.resolve(&request.path)?;
    let meta = std::fs::metadata(&path).map_err(|why| failed("listing", &path, &why))?;
    if !meta.is_dir() {
        return Err(Error::invalid_argument(format!("path '{}' is not a directory", path.display())));
    }
    let depth = request.depth.max(1);
    let mut names = Names::default();
    let mut entries = Vec::new();
    let mut levels = vec![sorted(&path).map_err(|why| failed("listing", &path, &why))?];
    while let Some(level) = levels.last_mut() {
        let Some((child, is_dir)) = level.pop() else {
            levels.pop();
            continue;
        };
        match describe(&child, &mut names) {
            Ok(entry) => entries.push(entry),
            // Removed since it was listed.
            Err(why) if transfer::is_absence(&why) => continue,
            Err(why) => return Err(failed("stat", &child, &why)),
        }
        if entries.len() > ENTRIES_MAX {
            let message = format!(
                "'{}' has more than {ENTRIES_MAX} entries within depth {depth}: list with a smaller depth",
                path.display()
            );
            return Err(Error::resource_exhausted(message));
        }
        if is_dir && levels.len() < depth as usize {
            match sorted(&child) {
                Ok(level) => levels.push(level),
                Err(why) if transfer::is_absence(&why) => {}
                Err(why) => return Err(failed("listing", &child, &why)),
            }
        }
    }
    Ok(entries)
}

type Level = Vec<(std::path::PathBuf, bool)>;

/// The entries of a directory, last name first (they are taken from the end), and which are directories.
fn sorted(dir: &Path) -> io::Result<Level> {
    let mut level = Level::new();
    for entry in std::fs::read_dir(dir)? {
        let entry = entry?;
        level.push((dir.join(entry.file_name()), entry.file_type()?.is_dir()));
        if level.len() > ENTRIES_MAX {
            break;
        }
    }
    level.sort_unstable_by(|a, b| b.0.cmp(&a.0));
    Ok(level)
}

/// Opens a directory to be watched, or says why it cannot be.
pub fn directory(path: &Path) -> Result<File, Error> {
    let meta = std::fs::metadata(path).map_err(|why| failed("watching", path, &why))?;
    if !meta.is_dir() {
        return Err(Error::invalid_argument(format!("path '{}' is not a directory", path.display())));
    }
    File::open(path).map_err(|why| failed("watching", path, &why))
}
