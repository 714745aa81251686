//! Moving across file systems, where rename(2) cannot: copy beside the destination, rename, remove.

use std::fs::{File, Metadata, OpenOptions};
use std::io::{self, Read as _, Write as _};
use std::os::unix::fs::{MetadataExt as _, OpenOptionsExt as _, PermissionsExt as _, lchown, symlink};
use std::path::{Path, PathBuf};

use rustix::io::Errno;

use super::metadata;

/// Names of files that are not yet what they will be. Watchers do not see them.
pub const UNFINISHED_PREFIX: &str = ".dormouse-unfinished-";
const COPY_BYTES: usize = 1 << 20;

/// An unused name beside `path`, hidden from watchers.
#[must_use]
pub fn unfinished_beside(path: &Path) -> PathBuf {
    let name = format!("{UNFINISHED_PREFIX}{}", dormouse_types::random_hex(10));
    path.parent().unwrap_or(Path::new("/")).join(name)
}

/// Moves what is at `source` to `destination`, which is replaced where rename(2) would replace it.
pub fn move_path(source: &Path, destination: &Path) -> io::Result<()> {
    match std::fs::rename(source, destination) {
        Err(why) if why.kind() == io::ErrorKind::CrossesDevices => {}
        done => return done,
    }
    let copy = unfinished_beside(destination);
    let moved = copy_tree(source, &copy).and_then(|()| std::fs::rename(&copy, destination));
    if let Err(why) = moved {
        // Best effort: the failure that counts is the first one.
        let _ = remove(&copy);
        return Err(why);
    }
    remove(source)
}

/// Removes whatever is at `path`; nothing there is fine.
pub fn remove(path: &Path) -> io::Result<()> {
    let meta = match std::fs::symlink_metadata(path) {
        Ok(meta) => meta,
        Err(why) if is_absence(&why) => return Ok(()),
        Err(why) => return Err(why),
    };
    let removed = if meta.is_dir() {
        std::fs::remove_dir_all(path)
    } else {
        metadata::forget(&meta);
        std::fs::remove_file(path)
    };
    match removed {
        Err(why) if is_absence(&why) => Ok(()),
        other => other,
    }
}

/// Nothing can be at a path whose parent is missing or no directory.
pub fn is_absence(why: &io::Error) -> bool {
    matches!(why.kind(), io::ErrorKind::NotFound | io::ErrorKind::NotADirectory)
}

fn copy_tree(source: &Path, target: &Path) -> io::Result<()> {
    let mut pending = vec![(source.to_owned(), target.to_owned())];
    let mut dirs = Vec::new();
    while let Some((from, to)) = pending.pop() {
        let meta = std::fs::symlink_metadata(&from)?;
        if meta.is_symlink() {
            symlink(std::fs::read_link(&from)?, &to)?;
            lchown(&to, Some(meta.uid()), Some(meta.gid()))?;
        } else if meta.is_dir() {
            std::fs::create_dir(&to)?;
            for entry in std::fs::read_dir(&from)? {
                let name = entry?.file_name();
                pending.push((from.join(&name), to.join(&name)));
            }
            dirs.push((to, meta));
        } else if meta.is_file() {
            copy_file(&from, &to, &meta)?;
        } else {
            return Err(io::Error::new(
                io::ErrorKind::Unsupported,
                format!(
                    "{} is neither file, directory nor link, and cannot change file systems",
                    from.display()
                ),
            ));
        }
    }
    // Last, innermost first: filling a directory changes its times.
    dirs.iter().rev().try_for_each(|(dir, meta)| take_over(&File::open(dir)?, meta))
}

fn copy_file(from: &Path, to: &Path, meta: &Metadata) -> io::Result<()> {
    let source = File::open(from)?;
    let target = OpenOptions::new().write(true).create_new(true).mode(0o600).open(to)?;
    append(&source, &target)?;
    metadata::replace(&target, &metadata::read(from, meta))?;
    take_over(&target, meta)
}

/// Gives a copy the owner, mode and times of the original.
fn take_over(copy: &File, meta: &Metadata) -> io::Result<()> {
    std::os::unix::fs::fchown(copy, Some(meta.uid()), Some(meta.gid()))?;
    copy.set_permissions(std::fs::Permissions::from_mode(meta.mode() & 0o7777))?;
    copy.set_times(std::fs::FileTimes::new().set_accessed(meta.accessed()?).set_modified(meta.modified()?))
}

/// Copies the rest of `source` to the position of `target`: in the kernel where it can, else through
/// one buffer. Returns the number of bytes.
pub fn append(mut source: &File, mut target: &File) -> io::Result<u64> {
    let mut copied = 0_u64;
    loop {
        match rustix::fs::copy_file_range(source, None, target, None, 64 * COPY_BYTES) {
            Ok(0) => break,
            Ok(bytes) => copied += bytes as u64,
            Err(Errno::INTR) => {}
            Err(Errno::NOSYS | Errno::XDEV | Errno::INVAL | Errno::OPNOTSUPP | Errno::BADF) => break,
            Err(why) => return Err(why.into()),
        }
    }
    // Also after a 0: special files answer 0 there although they have content.
    let mut buffer = vec![0; COPY_BYTES];
    loop {
        match source.read(&mut buffer) {
            Ok(0) => return Ok(copied),
            Ok(bytes) => {
                target.write_all(&buffer[..bytes])?;
                copied += bytes as u64;
            }
            Err(why) if why.kind() == io::ErrorKind::Interrupted => {}
            Err(why) => return Err(why),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_tree_is_copied_with_all_that_belongs_to_it() {
        let dir = tempfile::tempdir().unwrap();
        let (from, to) = (dir.path().join("from"), dir.path().join("to"));
        std::fs::create_dir_all(from.join("d/e")).unwrap();
        std::fs::write(from.join("d/e/f"), vec![7; 3 << 20]).unwrap();
        std::fs::set_permissions(from.join("d/e/f"), std::fs::Permissions::from_mode(0o751)).unwrap();
        std::os::unix::fs::chown(from.join("d/e/f"), Some(1234), Some(4321)).unwrap();
        symlink("d/e", from.join("link")).unwrap();
        copy_tree(&from, &to).unwrap();
        let (old, new) = (from.join("d/e/f").metadata().unwrap(), to.join("d/e/f").metadata().unwrap());
        assert_eq!((new.uid(), new.gid(), new.mode()), (1234, 4321, old.mode()));
        assert_eq!(new.modified().unwrap(), old.modified().unwrap());
        assert_eq!(std::fs::read(to.join("link/f")).unwrap(), vec![7; 3 << 20]);
        assert_eq!(std::fs::read_link(to.join("link")).unwrap(), Path::new("d/e"));
    }

    #[test]
    fn moving_between_file_systems_leaves_one_copy() {
        let here = tempfile::tempdir().unwrap();
        // /dev/shm is a file system of its own; where it is not, this is a plain rename.
        let there = tempfile::tempdir_in("/dev/shm").unwrap();
        let (from, to) = (here.path().join("from"), there.path().join("to"));
        std::fs::create_dir(&from).unwrap();
        std::fs::write(from.join("f"), "x").unwrap();
        move_path(&from, &to).unwrap();
        assert!(!from.exists());
        assert_eq!(std::fs::read_to_string(to.join("f")).unwrap(), "x");
        let left: Vec<_> =
            std::fs::read_dir(there.path()).unwrap().map(|entry| entry.unwrap().file_name()).collect();
        assert_eq!(left, ["to"]);
    }

    #[test]
    fn removing_what_is_not_there_is_fine() {
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join("f"), "x").unwrap();
        remove(&dir.path().join("missing")).unwrap();
        remove(&dir.path().join("f/below a file")).unwrap();
        assert!(dir.path().join("f").exists());
    }

    #[test]
    fn appending_reads_special_files_to_their_end() {
        let dir = tempfile::tempdir().unwrap();
        let target = File::create(dir.path().join("status")).unwrap();
        let bytes = append(&File::open("/proc/self/status").unwrap(), &target).unwrap();
        assert!(bytes > 100);
        assert_eq!(target.metadata().unwrap().len(), bytes);
    }
}
