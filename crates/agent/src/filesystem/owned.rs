//! Directories made on a user's behalf: the agent is root, so what it makes is given to the user.

use std::fs::DirBuilder;
use std::io;
use std::os::unix::fs::{DirBuilderExt as _, chown};
use std::path::Path;

use super::watch;
use crate::users::User;

const DIR_MODE: u32 = 0o755;

/// Makes `dir` and what is missing above it, each owned by `user`. True when `dir` itself was made.
///
/// A missing name under something that is no directory is `NotADirectory`.
pub fn make_dirs(dir: &Path, user: &User) -> io::Result<bool> {
    let mut missing = Vec::new();
    for ancestor in dir.ancestors() {
        match std::fs::metadata(ancestor) {
            Ok(meta) if meta.is_dir() => break,
            Ok(_) => return Err(io::ErrorKind::NotADirectory.into()),
            Err(why) if why.kind() == io::ErrorKind::NotFound => missing.push(ancestor),
            Err(why) => return Err(why),
        }
    }
    let mut made = false;
    for dir in missing.iter().rev() {
        made = match DirBuilder::new().mode(DIR_MODE).create(dir) {
            Ok(()) => {
                chown(dir, Some(user.uid), Some(user.gid))?;
                true
            }
            // Somebody else was faster, or a link that leads nowhere is in the way.
            Err(why) if why.kind() == io::ErrorKind::AlreadyExists && dir.is_dir() => false,
            Err(why) => return Err(why),
        };
        // So that what is put into the new directory next is seen by recursive watchers in full.
        watch::settle();
    }
    Ok(made)
}

/// Makes the directory that `path` will be in.
pub fn make_parent(path: &Path, user: &User) -> io::Result<()> {
    match path.parent() {
        Some(parent) => make_dirs(parent, user).map(drop),
        None => Ok(()),
    }
}
