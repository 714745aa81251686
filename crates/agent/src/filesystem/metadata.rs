//! What clients attach to a file: extended attributes `user.e2b.<key>`.
//!
//! Where the file system has no extended attributes, the agent keeps the metadata in its memory (which
//! travels with the sandbox's snapshots), by device and inode, bounded.

use std::collections::BTreeMap;
use std::fs::{File, Metadata};
use std::io;
use std::os::unix::fs::MetadataExt as _;
use std::path::Path;
use std::sync::{Mutex, PoisonError};
use std::time::SystemTime;

use rustix::fs::XattrFlags;
use rustix::io::Errno;

pub type Tags = BTreeMap<String, String>;

const PREFIX: &str = "user.e2b.";
/// The kernel's limit of a name is 255 bytes, the prefix counted.
pub const KEY_BYTES_MAX: usize = 246;
/// Keys and values of one file together.
pub const ALL_BYTES_MAX: usize = 4096;
/// XATTR_SIZE_MAX and XATTR_LIST_MAX.
const KERNEL_BYTES_MAX: usize = 64 << 10;
/// Files whose metadata is kept in memory; more are refused.
const MEMORY_FILES_MAX: usize = 4096;

/// Metadata of files on file systems without extended attributes. One table per process, as inodes are.
static MEMORY: Mutex<BTreeMap<Inode, Kept>> = Mutex::new(BTreeMap::new());

type Inode = (u64, u64);

struct Kept {
    /// Tells a file from a later one that was given the same inode, where the file system knows it.
    born: Option<SystemTime>,
    tags: Tags,
}

/// Reads what is attached to the file (not: to the link) at `path`.
#[must_use]
pub fn read(path: &Path, meta: &Metadata) -> Tags {
    if !(meta.is_file() || meta.is_dir()) {
        return Tags::new();
    }
    match names(|list| rustix::fs::listxattr(path, list)) {
        Ok(names) => names
            .into_iter()
            .filter_map(|name| {
                let mut value = Vec::with_capacity(ALL_BYTES_MAX);
                rustix::fs::getxattr(path, name.as_str(), rustix::buffer::spare_capacity(&mut value)).ok()?;
                let key = name.strip_prefix(PREFIX)?.to_owned();
                Some((key, String::from_utf8_lossy(&value).into_owned()))
            })
            .collect(),
        Err(Errno::NOTSUP) => from_memory(meta),
        Err(_) => Tags::new(),
    }
}

/// Makes `tags` the whole metadata of a file.
pub fn replace(file: &File, tags: &Tags) -> io::Result<()> {
    let old = match names(|list| rustix::fs::flistxattr(file, list)) {
        Ok(old) => old,
        Err(Errno::NOTSUP) => return to_memory(&file.metadata()?, tags),
        Err(why) => return Err(why.into()),
    };
    for name in old.iter().filter(|name| name.strip_prefix(PREFIX).is_some_and(|key| !tags.contains_key(key)))
    {
        match rustix::fs::fremovexattr(file, name.as_str()) {
            Ok(()) | Err(Errno::NODATA) => {}
            Err(why) => return Err(why.into()),
        }
    }
    for (key, value) in tags {
        let name = format!("{PREFIX}{key}");
        match rustix::fs::fsetxattr(file, name.as_str(), value.as_bytes(), XattrFlags::empty()) {
            Ok(()) => {}
            Err(Errno::NOTSUP) => return to_memory(&file.metadata()?, tags),
            Err(why) => return Err(why.into()),
        }
    }
    Ok(())
}

/// Our names among a file's attributes.
fn names(
    list: impl FnOnce(rustix::buffer::SpareCapacity<'_, u8>) -> Result<usize, Errno>,
) -> Result<Vec<String>, Errno> {
    let mut names = Vec::with_capacity(KERNEL_BYTES_MAX);
    list(rustix::buffer::spare_capacity(&mut names))?;
    Ok(names
        .split(|byte| *byte == 0)
        .filter_map(|name| std::str::from_utf8(name).ok())
        .filter(|name| name.starts_with(PREFIX))
        .map(str::to_owned)
        .collect())
}

fn inode(meta: &Metadata) -> Inode {
    (meta.dev(), meta.ino())
}

fn from_memory(meta: &Metadata) -> Tags {
    let memory = MEMORY.lock().unwrap_or_else(PoisonError::into_inner);
    let kept = memory.get(&inode(meta)).filter(|kept| kept.born == meta.created().ok());
    kept.map(|kept| kept.tags.clone()).unwrap_or_default()
}

fn to_memory(meta: &Metadata, tags: &Tags) -> io::Result<()> {
    let mut memory = MEMORY.lock().unwrap_or_else(PoisonError::into_inner);
    if tags.is_empty() {
        memory.remove(&inode(meta));
        return Ok(());
    }
    if memory.len() >= MEMORY_FILES_MAX && !memory.contains_key(&inode(meta)) {
        return Err(io::Error::other(format!(
            "this file system has no extended attributes, and the agent already keeps metadata of \
             {MEMORY_FILES_MAX} files in memory"
        )));
    }
    memory.insert(inode(meta), Kept { born: meta.created().ok(), tags: tags.clone() });
    Ok(())
}

/// Forgets what is kept in memory of a file that is about to be removed.
pub fn forget(meta: &Metadata) {
    MEMORY.lock().unwrap_or_else(PoisonError::into_inner).remove(&inode(meta));
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tags(pairs: &[(&str, &str)]) -> Tags {
        pairs.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned())).collect()
    }

    #[test]
    fn each_set_replaces_the_whole_of_the_last() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("f");
        let file = File::create(&path).unwrap();
        replace(&file, &tags(&[("a", "1"), ("b", "2")])).unwrap();
        replace(&file, &tags(&[("b", "3"), ("c", "")])).unwrap();
        assert_eq!(read(&path, &file.metadata().unwrap()), tags(&[("b", "3"), ("c", "")]));
        replace(&file, &Tags::new()).unwrap();
        assert_eq!(read(&path, &file.metadata().unwrap()), Tags::new());
    }

    #[test]
    fn memory_stands_in_and_is_bounded() {
        let dir = tempfile::tempdir().unwrap();
        let meta = File::create(dir.path().join("f")).unwrap().metadata().unwrap();
        to_memory(&meta, &tags(&[("k", "v")])).unwrap();
        assert_eq!(from_memory(&meta), tags(&[("k", "v")]));
        forget(&meta);
        assert_eq!(from_memory(&meta), Tags::new());
    }
}
