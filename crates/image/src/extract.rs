//! Unpacking one archive over a root file system: a layer with whiteouts, or a flat tree.
//!
//! OCI image specification, "Image Layer Filesystem Changeset". A whiteout hides only what came before
//! its own layer, wherever in the archive it stands.

use std::collections::HashSet;
use std::ffi::OsStr;
use std::fs::File;
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use rustix::fs::{AtFlags, FileType, Gid, Mode, OFlags, Timespec, Timestamps, Uid, XattrFlags};

use crate::error::ExtractError;
use crate::root::{self, Owner, RelPath, Root};
use crate::tarstream::{Entry, Kind, TarStream};

const WHITEOUT: &[u8] = b".wh.";
const OPAQUE: &[u8] = b".wh..wh..opq";
const COPY_BYTES: usize = 256 << 10;

/// What one image may hold, over all its layers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limits {
    pub bytes_max: u64,
    pub entries_max: u64,
    pub layers_max: usize,
    /// Unpacked ÷ packed bytes of a layer, looked at beyond the first 64 MiB.
    pub ratio_max: u64,
}

impl Default for Limits {
    fn default() -> Self {
        Self { bytes_max: 32 << 30, entries_max: 4_000_000, layers_max: 256, ratio_max: 500 }
    }
}

/// What has been unpacked so far, and what was left out on purpose.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Applied {
    pub bytes: u64,
    pub entries: u64,
    pub devices_skipped: u64,
    pub xattrs_skipped: u64,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Tree {
    /// `.wh.` names hide what lower layers hold.
    Layer,
    /// Every name is a name.
    Flat,
}

/// Unpacks one uncompressed layer over the folder `rootfs`. `archive` names it in errors.
pub fn apply_layer(
    rootfs: &Path,
    reader: &mut dyn Read,
    archive: &str,
    limits: &Limits,
    applied: &mut Applied,
) -> Result<(), ExtractError> {
    let root =
        Root::open(rootfs).map_err(|source| ExtractError::Read { archive: archive.to_owned(), source })?;
    unpack(&root, reader, archive, Tree::Layer, limits, applied)
}

pub(crate) fn unpack(
    root: &Root,
    reader: &mut dyn Read,
    archive: &str,
    tree: Tree,
    limits: &Limits,
    applied: &mut Applied,
) -> Result<(), ExtractError> {
    let mut unpacker = Unpacker {
        root,
        archive,
        tree,
        limits,
        applied,
        own: HashSet::new(),
        folders: Vec::new(),
        last_parent: None,
        buffer: vec![0; COPY_BYTES],
    };
    let mut stream = TarStream::new(reader, archive);
    while let Some(entry) = stream.next_entry()? {
        unpacker.entry(&entry, &mut stream)?;
    }
    unpacker.finish()
}

struct Unpacker<'a> {
    root: &'a Root,
    archive: &'a str,
    tree: Tree,
    limits: &'a Limits,
    applied: &'a mut Applied,
    /// Names of this archive, with their parents: no whiteout of this archive hides them.
    own: HashSet<RelPath>,
    /// Times of folders are set last, since every file made in one changes them.
    folders: Vec<(RelPath, i64)>,
    /// Neighbours mostly lie in one folder. Its own path can only change by an entry elsewhere.
    last_parent: Option<(RelPath, OwnedFd)>,
    buffer: Vec<u8>,
}

impl Unpacker<'_> {
    fn entry<R: Read>(&mut self, entry: &Entry, stream: &mut TarStream<R>) -> Result<(), ExtractError> {
        self.applied.entries += 1;
        self.applied.bytes = self.applied.bytes.saturating_add(entry.bytes);
        self.limit("entries", self.applied.entries, self.limits.entries_max)?;
        self.limit("unpacked bytes", self.applied.bytes, self.limits.bytes_max)?;
        let path = RelPath::parse(&entry.name).map_err(|why| self.refused(entry, why))?;
        let Some((parent, name)) = path.split() else {
            return if entry.kind == Kind::Folder {
                self.folder_itself(entry, &path)
            } else {
                Err(self.refused(entry, "it would replace the root folder"))
            };
        };
        if self.tree == Tree::Layer && name.as_bytes().starts_with(WHITEOUT) {
            return self.whiteout(entry, &parent, name);
        }
        let dir = self.parent(entry, parent)?;
        let made = match &entry.kind {
            Kind::Folder => self.folder(entry, dir.as_fd(), name, &path)?,
            Kind::File => self.file(entry, dir.as_fd(), name, stream)?,
            Kind::Symlink { target } => self.symlink(entry, dir.as_fd(), name, target)?,
            Kind::HardLink { target } => self.hard_link(entry, dir.as_fd(), name, &path, target)?,
            Kind::Fifo => self.fifo(entry, dir.as_fd(), name)?,
            Kind::Device => {
                // A sandbox's devices are its engine's; made on the host they would be the host's.
                self.applied.devices_skipped += 1;
                false
            }
        };
        if made && self.tree == Tree::Layer {
            self.remember(path);
        }
        Ok(())
    }

    fn remember(&mut self, path: RelPath) {
        let mut next = Some(path);
        while let Some(path) = next {
            next = path.split().map(|(parent, _)| parent);
            if !self.own.insert(path) {
                return;
            }
        }
    }

    fn parent(&mut self, entry: &Entry, parent: RelPath) -> Result<OwnedFd, ExtractError> {
        if self.last_parent.as_ref().is_none_or(|(path, _)| *path != parent) {
            let dir = self.root.make_dirs(&parent).map_err(|source| match source.raw_os_error() {
                Some(code) if code == rustix::io::Errno::NOTDIR.raw_os_error() => {
                    self.refused(entry, "a part of its path is not a folder")
                }
                Some(code) if code == rustix::io::Errno::LOOP.raw_os_error() => {
                    self.refused(entry, "a part of its path is a loop of links")
                }
                _ => self.write("make the folder of", entry, source),
            })?;
            self.last_parent = Some((parent, dir));
        }
        let (_, dir) = self.last_parent.as_ref().ok_or_else(|| self.refused(entry, "it has no folder"))?;
        dir.try_clone().map_err(|source| self.write("open the folder of", entry, source))
    }

    /// Removes what is there, unless both are folders.
    fn make_way(&mut self, entry: &Entry, dir: BorrowedFd<'_>, name: &OsStr) -> Result<(), ExtractError> {
        root::remove_at(dir, name).map_err(|source| self.write("replace", entry, source))
    }

    fn folder_itself(&mut self, entry: &Entry, path: &RelPath) -> Result<(), ExtractError> {
        let dir = self.root.dir(path).map_err(|source| self.write("open", entry, source))?;
        let dir = root::readable(dir.as_fd()).map_err(|source| self.write("open", entry, source))?;
        self.attributes(entry, dir.as_fd())?;
        self.folders.push((path.clone(), entry.mtime_s));
        Ok(())
    }

    fn folder(
        &mut self,
        entry: &Entry,
        dir: BorrowedFd<'_>,
        name: &OsStr,
        path: &RelPath,
    ) -> Result<bool, ExtractError> {
        let there = root::file_type_at(dir, name).map_err(|source| self.write("examine", entry, source))?;
        if there != Some(FileType::Directory) {
            self.make_way(entry, dir, name)?;
            rustix::fs::mkdirat(dir, name, Mode::from_raw_mode(0o700))
                .map_err(|source| self.write("make", entry, source.into()))?;
        }
        let made = root::open_child_dir(dir, name).map_err(|source| self.write("open", entry, source))?;
        self.attributes(entry, made.as_fd())?;
        self.folders.push((path.clone(), entry.mtime_s));
        Ok(true)
    }

    fn file<R: Read>(
        &mut self,
        entry: &Entry,
        dir: BorrowedFd<'_>,
        name: &OsStr,
        stream: &mut TarStream<R>,
    ) -> Result<bool, ExtractError> {
        self.make_way(entry, dir, name)?;
        let mut file = root::create_file(dir, name).map_err(|source| self.write("make", entry, source))?;
        match entry.sparse_bytes {
            None => self.content(entry, &mut file, entry.bytes, stream)?,
            Some(file_bytes) => {
                self.limit("bytes in a file", file_bytes, self.limits.bytes_max)?;
                for segment in stream.sparse_map(file_bytes)? {
                    file.seek(SeekFrom::Start(segment.offset))
                        .map_err(|source| self.write("write", entry, source))?;
                    self.content(entry, &mut file, segment.bytes, stream)?;
                }
                file.set_len(file_bytes).map_err(|source| self.write("write", entry, source))?;
            }
        }
        self.attributes(entry, file.as_fd())?;
        rustix::fs::futimens(&file, &times(entry.mtime_s))
            .map_err(|source| self.write("set the time of", entry, source.into()))?;
        Ok(true)
    }

    fn content<R: Read>(
        &mut self,
        entry: &Entry,
        file: &mut File,
        mut bytes: u64,
        stream: &mut TarStream<R>,
    ) -> Result<(), ExtractError> {
        while bytes > 0 {
            let want = usize::try_from(bytes).map_or(COPY_BYTES, |bytes| bytes.min(COPY_BYTES));
            let read = stream.read_content(&mut self.buffer[..want])?;
            if read == 0 {
                return Err(self.refused(entry, "its content ends early"));
            }
            file.write_all(&self.buffer[..read]).map_err(|source| self.write("write", entry, source))?;
            bytes -= read as u64;
        }
        Ok(())
    }

    fn symlink(
        &mut self,
        entry: &Entry,
        dir: BorrowedFd<'_>,
        name: &OsStr,
        target: &[u8],
    ) -> Result<bool, ExtractError> {
        if target.is_empty() || target.contains(&0) || target.len() > 4095 {
            return Err(self.refused(entry, "its target is empty or too long"));
        }
        self.make_way(entry, dir, name)?;
        rustix::fs::symlinkat(OsStr::from_bytes(target), dir, name)
            .map_err(|source| self.write("make", entry, source.into()))?;
        self.own_by_name(entry, dir, name)
    }

    fn hard_link(
        &mut self,
        entry: &Entry,
        dir: BorrowedFd<'_>,
        name: &OsStr,
        path: &RelPath,
        target: &[u8],
    ) -> Result<bool, ExtractError> {
        let target = RelPath::parse(target)
            .map_err(|why| self.refused(entry, &format!("the target of the hard link: {why}")))?;
        if target == *path {
            return Err(self.refused(entry, "the hard link is its own target"));
        }
        let Some((parent, target_name)) = target.split() else {
            return Err(self.refused(entry, "the hard link's target is the root folder"));
        };
        let missing = |_| self.refused(entry, "the hard link's target does not exist");
        let from = self.root.dir(&parent).map_err(missing)?;
        let there = root::file_type_at(from.as_fd(), target_name)
            .map_err(|source| self.write("examine the target of", entry, source))?;
        match there {
            Some(FileType::RegularFile | FileType::Symlink | FileType::Fifo) => {}
            Some(_) => return Err(self.refused(entry, "the hard link's target is not a file")),
            None => return Err(self.refused(entry, "the hard link's target does not exist")),
        }
        self.make_way(entry, dir, name)?;
        // Never through a link: what it would link to may lie outside.
        rustix::fs::linkat(&from, target_name, dir, name, AtFlags::empty())
            .map_err(|source| self.write("link", entry, source.into()))?;
        Ok(true)
    }

    fn fifo(&mut self, entry: &Entry, dir: BorrowedFd<'_>, name: &OsStr) -> Result<bool, ExtractError> {
        self.make_way(entry, dir, name)?;
        rustix::fs::mknodat(dir, name, FileType::Fifo, Mode::from_raw_mode(entry.mode & 0o777), 0)
            .map_err(|source| self.write("make", entry, source.into()))?;
        self.own_by_name(entry, dir, name)
    }

    fn own_by_name(&self, entry: &Entry, dir: BorrowedFd<'_>, name: &OsStr) -> Result<bool, ExtractError> {
        let owner = self.owner(entry)?;
        let (uid, gid) = (Uid::from_raw(owner.uid), Gid::from_raw(owner.gid));
        rustix::fs::chownat(dir, name, Some(uid), Some(gid), AtFlags::SYMLINK_NOFOLLOW)
            .and_then(|()| rustix::fs::utimensat(dir, name, &times(entry.mtime_s), AtFlags::SYMLINK_NOFOLLOW))
            .map_err(|source| self.write("set the owner of", entry, source.into()))?;
        Ok(true)
    }

    fn attributes(&mut self, entry: &Entry, fd: BorrowedFd<'_>) -> Result<(), ExtractError> {
        root::set_owner_and_mode(fd, self.owner(entry)?, entry.mode)
            .map_err(|source| self.write("set owner and mode of", entry, source))?;
        // After the owner: a change of owner drops file capabilities.
        for (name, value) in &entry.xattrs {
            if !(name.starts_with("user.") || name == "security.capability") {
                self.applied.xattrs_skipped += 1;
                continue;
            }
            match rustix::fs::fsetxattr(fd, name.as_str(), value, XattrFlags::empty()) {
                Err(rustix::io::Errno::OPNOTSUPP) => self.applied.xattrs_skipped += 1,
                other => other.map_err(|source| self.write("set an attribute of", entry, source.into()))?,
            }
        }
        Ok(())
    }

    fn owner(&self, entry: &Entry) -> Result<Owner, ExtractError> {
        let id = |id: u64| {
            // The highest number means "no change" to the kernel.
            let fits = u32::try_from(id).ok().filter(|id| *id != u32::MAX);
            fits.ok_or_else(|| self.refused(entry, "its owner's number is too large"))
        };
        Ok(Owner { uid: id(entry.uid)?, gid: id(entry.gid)? })
    }

    fn whiteout(&mut self, entry: &Entry, parent: &RelPath, name: &OsStr) -> Result<(), ExtractError> {
        self.last_parent = None;
        let dir = match self.root.dir(parent) {
            // Hides what does not exist.
            Err(error) if matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::NotADirectory) => {
                return Ok(());
            }
            other => other.map_err(|source| self.write("open the folder of", entry, source))?,
        };
        if name.as_bytes() == OPAQUE {
            return self.hide_below(entry, dir.as_fd(), parent);
        }
        let hidden = &name.as_bytes()[WHITEOUT.len()..];
        if hidden.is_empty() || hidden == b"." || hidden == b".." || hidden.starts_with(WHITEOUT) {
            return Err(self.refused(entry, "it is not a valid whiteout"));
        }
        self.hide(entry, dir.as_fd(), parent, OsStr::from_bytes(hidden))
    }

    fn hide_below(&mut self, entry: &Entry, dir: BorrowedFd<'_>, path: &RelPath) -> Result<(), ExtractError> {
        let readable =
            root::readable(dir).map_err(|source| self.write("open the folder of", entry, source))?;
        let names = root::names_of(readable.as_fd()).map_err(|source| self.write("list", entry, source))?;
        names.iter().try_for_each(|name| self.hide(entry, readable.as_fd(), path, name))
    }

    /// Removes a name of a lower layer; what this layer holds of it stays.
    fn hide(
        &mut self,
        entry: &Entry,
        dir: BorrowedFd<'_>,
        parent: &RelPath,
        name: &OsStr,
    ) -> Result<(), ExtractError> {
        let path = parent.join(name);
        if !self.own.contains(&path) {
            return self.make_way(entry, dir, name);
        }
        let there = root::file_type_at(dir, name).map_err(|source| self.write("examine", entry, source))?;
        if there != Some(FileType::Directory) {
            return Ok(());
        }
        let child = root::open_child_dir(dir, name).map_err(|source| self.write("open", entry, source))?;
        self.hide_below(entry, child.as_fd(), &path)
    }

    fn finish(&mut self) -> Result<(), ExtractError> {
        for (path, mtime_s) in self.folders.iter().rev() {
            // One that was replaced later in the archive is none any more.
            let Ok(dir) = self.root.open_at(path, OFlags::RDONLY | OFlags::DIRECTORY) else { continue };
            rustix::fs::futimens(&dir, &times(*mtime_s)).map_err(|source| ExtractError::Write {
                archive: self.archive.to_owned(),
                action: "set the time of",
                entry: String::from_utf8_lossy(path.as_bytes()).into_owned(),
                source: source.into(),
            })?;
        }
        Ok(())
    }

    fn limit(&self, what: &'static str, given: u64, limit: u64) -> Result<(), ExtractError> {
        if given <= limit {
            return Ok(());
        }
        Err(ExtractError::Limit { archive: self.archive.to_owned(), what, limit })
    }

    fn refused(&self, entry: &Entry, why: &str) -> ExtractError {
        let archive = self.archive.to_owned();
        ExtractError::Refused { archive, entry: entry.display(), why: why.to_owned() }
    }

    fn write(&self, action: &'static str, entry: &Entry, source: io::Error) -> ExtractError {
        ExtractError::Write { archive: self.archive.to_owned(), action, entry: entry.display(), source }
    }
}

fn times(mtime_s: i64) -> Timestamps {
    let time = Timespec { tv_sec: mtime_s, tv_nsec: 0 };
    Timestamps { last_access: time, last_modification: time }
}
