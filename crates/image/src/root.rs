//! File operations inside one root file system, whatever links it holds.
//!
//! Every path is resolved by the kernel with the root as `/` (openat2(2), RESOLVE_IN_ROOT), so that
//! neither `..` nor a link leads out of it; the last component is never followed. Paths are bounded in
//! depth, also where links lengthen them, so that a removal never runs out of stack or descriptors.

use std::ffi::{OsStr, OsString};
use std::fs::File;
use std::io::{self, Read, Write};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::Path;

use rustix::fs::{AtFlags, Dir, FileType, Gid, Mode, OFlags, ResolveFlags, Uid};
use rustix::io::Errno;

/// Deepest path that is created, in components.
pub const DEPTH_MAX: usize = 128;
const NAME_BYTES_MAX: usize = 255;
const PATH_BYTES_MAX: usize = 4095;

/// A relative path of plain components: no `..`, no empty ones. Empty itself for the root.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct RelPath(Vec<u8>);

impl RelPath {
    /// `./` in front and doubled slashes are dropped; whatever could lead elsewhere is refused.
    pub fn parse(given: &[u8]) -> Result<Self, &'static str> {
        if given.starts_with(b"/") {
            return Err("its name is absolute");
        }
        if given.contains(&0) {
            return Err("its name holds a zero byte");
        }
        Self::components(given)
    }

    /// For paths as seen from inside, with `/` in front.
    pub fn inside(given: &str) -> Result<Self, &'static str> {
        Self::components(given.as_bytes())
    }

    fn components(given: &[u8]) -> Result<Self, &'static str> {
        let mut path = Vec::with_capacity(given.len());
        let mut depth = 0;
        for part in given.split(|byte| *byte == b'/') {
            match part {
                b"" | b"." => continue,
                b".." => return Err("its name holds `..`"),
                _ if part.len() > NAME_BYTES_MAX => return Err("a part of its name is too long"),
                _ => {}
            }
            if !path.is_empty() {
                path.push(b'/');
            }
            path.extend_from_slice(part);
            depth += 1;
        }
        if depth > DEPTH_MAX {
            return Err("it lies too deep");
        }
        if path.len() > PATH_BYTES_MAX { Err("its name is too long") } else { Ok(Self(path)) }
    }

    pub fn is_root(&self) -> bool {
        self.0.is_empty()
    }

    pub fn as_bytes(&self) -> &[u8] {
        &self.0
    }

    /// Folder and last component; `None` for the root.
    pub fn split(&self) -> Option<(Self, &OsStr)> {
        if self.is_root() {
            return None;
        }
        let cut = self.0.iter().rposition(|byte| *byte == b'/');
        let (parent, name) = cut.map_or((&[][..], &self.0[..]), |cut| (&self.0[..cut], &self.0[cut + 1..]));
        Some((Self(parent.to_vec()), OsStr::from_bytes(name)))
    }

    pub fn join(&self, name: &OsStr) -> Self {
        let mut path = self.0.clone();
        if !path.is_empty() {
            path.push(b'/');
        }
        path.extend_from_slice(name.as_bytes());
        Self(path)
    }

    fn as_os(&self) -> &OsStr {
        if self.is_root() { OsStr::new(".") } else { OsStr::from_bytes(&self.0) }
    }
}

#[derive(Debug, Clone, Copy)]
pub struct Owner {
    pub uid: u32,
    pub gid: u32,
}

pub const ROOT_OWNER: Owner = Owner { uid: 0, gid: 0 };

pub struct Root {
    fd: OwnedFd,
    depth: usize,
}

impl Root {
    pub fn open(path: &Path) -> io::Result<Self> {
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let fd = rustix::fs::open(path, flags, Mode::empty())?;
        let depth = physical_depth(fd.as_fd())?;
        Ok(Self { fd, depth })
    }

    /// Opens anything but follows no link in the last component.
    pub fn open_at(&self, path: &RelPath, flags: OFlags) -> io::Result<OwnedFd> {
        let flags = flags | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        Ok(self.resolve(path, flags, ResolveFlags::IN_ROOT)?)
    }

    /// Opens for reading, follows links, and fails with `CrossesDevices` where one leads out.
    pub fn open_beneath(&self, path: &RelPath) -> io::Result<OwnedFd> {
        let flags = OFlags::RDONLY | OFlags::NONBLOCK | OFlags::NOCTTY | OFlags::CLOEXEC;
        Ok(self.resolve(path, flags, ResolveFlags::BENEATH)?)
    }

    fn resolve(&self, path: &RelPath, flags: OFlags, how: ResolveFlags) -> Result<OwnedFd, Errno> {
        let how = how | ResolveFlags::NO_MAGICLINKS;
        let mut tries = 0;
        loop {
            match rustix::fs::openat2(&self.fd, path.as_os(), flags, Mode::empty(), how) {
                // The kernel asks for another try where a rename elsewhere disturbed the walk.
                Err(Errno::AGAIN) if tries < 32 => tries += 1,
                other => return other,
            }
        }
    }

    /// The folder `path`, links in it followed inside the root.
    pub fn dir(&self, path: &RelPath) -> io::Result<OwnedFd> {
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
        match self.resolve(path, flags, ResolveFlags::IN_ROOT | ResolveFlags::NO_SYMLINKS) {
            Err(Errno::LOOP) => {}
            other => return Ok(other?),
        }
        let dir = self.resolve(path, flags, ResolveFlags::IN_ROOT)?;
        if physical_depth(dir.as_fd())? > self.depth + DEPTH_MAX {
            return Err(io::Error::new(io::ErrorKind::InvalidInput, "it lies too deep behind links"));
        }
        Ok(dir)
    }

    /// The same; what is missing is made, with mode 0755.
    pub fn make_dirs(&self, path: &RelPath) -> io::Result<OwnedFd> {
        match self.dir(path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            other => return other,
        }
        let Some((parent, name)) = path.split() else { return self.dir(path) };
        let parent = self.make_dirs(&parent)?;
        match rustix::fs::mkdirat(&parent, name, Mode::from_raw_mode(0o755)) {
            Ok(()) | Err(Errno::EXIST) => self.dir(path),
            Err(error) => Err(error.into()),
        }
    }

    /// Makes a folder with this mode and owner, or sets them on the one that is there.
    pub fn folder(&self, path: &str, mode: u32, owner: Owner) -> io::Result<()> {
        let path = RelPath::inside(path).map_err(invalid)?;
        let dir = readable(self.make_dirs(&path)?.as_fd())?;
        set_owner_and_mode(dir.as_fd(), owner, mode)
    }

    /// The same, and not behind a link: whatever else is there goes.
    pub fn real_folder(&self, path: &str, mode: u32, owner: Owner) -> io::Result<()> {
        let inside = RelPath::inside(path).map_err(invalid)?;
        let (parent, name) = inside.split().ok_or_else(|| invalid("it has no name"))?;
        let parent = self.make_dirs(&parent)?;
        if file_type_at(parent.as_fd(), name)?.is_some_and(|kind| kind != FileType::Directory) {
            remove_at(parent.as_fd(), name)?;
        }
        self.folder(path, mode, owner)
    }

    /// Replaces whatever is at `path` by a regular file.
    pub fn write(&self, path: &str, content: &[u8], mode: u32, owner: Owner) -> io::Result<()> {
        let path = RelPath::inside(path).map_err(invalid)?;
        let (parent, name) = path.split().ok_or_else(|| invalid("it has no name"))?;
        let parent = self.make_dirs(&parent)?;
        remove_at(parent.as_fd(), name)?;
        let mut file = create_file(parent.as_fd(), name)?;
        file.write_all(content)?;
        set_owner_and_mode(file.as_fd(), owner, mode)
    }

    /// Replaces whatever is at `path` by a link.
    pub fn link(&self, path: &str, target: &str) -> io::Result<()> {
        let path = RelPath::inside(path).map_err(invalid)?;
        let (parent, name) = path.split().ok_or_else(|| invalid("it has no name"))?;
        let parent = self.make_dirs(&parent)?;
        remove_at(parent.as_fd(), name)?;
        Ok(rustix::fs::symlinkat(target, &parent, name)?)
    }

    /// A regular file's text; `None` where there is none. Links are followed, inside the root.
    pub fn read(&self, path: &str, bytes_max: u64) -> io::Result<Option<String>> {
        let path = RelPath::inside(path).map_err(invalid)?;
        let flags = OFlags::RDONLY | OFlags::NONBLOCK | OFlags::CLOEXEC | OFlags::NOCTTY;
        let fd = match self.resolve(&path, flags, ResolveFlags::IN_ROOT) {
            Err(Errno::NOENT | Errno::NOTDIR) => return Ok(None),
            other => other?,
        };
        let file = File::from(fd);
        let meta = file.metadata()?;
        if !meta.is_file() || meta.len() > bytes_max {
            return Err(invalid("it is no regular file, or too long"));
        }
        let mut text = String::new();
        file.take(bytes_max).read_to_string(&mut text)?;
        Ok(Some(text))
    }

    pub fn exists(&self, path: &str) -> bool {
        let flags = OFlags::PATH | OFlags::CLOEXEC;
        RelPath::inside(path).is_ok_and(|path| self.resolve(&path, flags, ResolveFlags::IN_ROOT).is_ok())
    }

    /// Removes a file or a whole folder. Nothing there: nothing done.
    pub fn remove(&self, path: &str) -> io::Result<()> {
        let path = RelPath::inside(path).map_err(invalid)?;
        let Some((parent, name)) = path.split() else { return Err(invalid("the root stays")) };
        match self.dir(&parent) {
            Err(error) if matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::NotADirectory) => {
                Ok(())
            }
            other => remove_at(other?.as_fd(), name),
        }
    }

    /// Names in a folder; none where there is no such folder.
    pub fn names(&self, path: &str) -> io::Result<Vec<OsString>> {
        let path = RelPath::inside(path).map_err(invalid)?;
        match self.dir(&path) {
            Err(error) if matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::NotADirectory) => {
                Ok(Vec::new())
            }
            other => names_of(readable(other?.as_fd())?.as_fd()),
        }
    }
}

fn invalid(why: &'static str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidInput, why)
}

/// How many components the folder's real path has.
fn physical_depth(dir: BorrowedFd<'_>) -> io::Result<usize> {
    let link = rustix::fs::readlink(rustix_fd_path(dir), Vec::new())?;
    Ok(link.as_bytes().iter().filter(|byte| **byte == b'/').count())
}

fn rustix_fd_path(fd: BorrowedFd<'_>) -> String {
    use std::os::fd::AsRawFd;
    format!("/proc/self/fd/{}", fd.as_raw_fd())
}

pub fn create_file(parent: BorrowedFd<'_>, name: &OsStr) -> io::Result<File> {
    let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    Ok(File::from(rustix::fs::openat(parent, name, flags, Mode::from_raw_mode(0o600))?))
}

/// Owner first: a change of owner clears the set-user-id bit.
pub fn set_owner_and_mode(fd: BorrowedFd<'_>, owner: Owner, mode: u32) -> io::Result<()> {
    rustix::fs::fchown(fd, Some(Uid::from_raw(owner.uid)), Some(Gid::from_raw(owner.gid)))?;
    Ok(rustix::fs::fchmod(fd, Mode::from_raw_mode(mode & 0o7777))?)
}

/// Removes a name, and all below it. Nothing there: nothing done.
pub fn remove_at(parent: BorrowedFd<'_>, name: &OsStr) -> io::Result<()> {
    match rustix::fs::unlinkat(parent, name, AtFlags::empty()) {
        Ok(()) | Err(Errno::NOENT) => return Ok(()),
        Err(Errno::ISDIR | Errno::PERM) => {}
        Err(error) => return Err(error.into()),
    }
    let dir = open_child_dir(parent, name)?;
    for child in names_of(dir.as_fd())? {
        remove_at(dir.as_fd(), &child)?;
    }
    Ok(rustix::fs::unlinkat(parent, name, AtFlags::REMOVEDIR)?)
}

pub fn open_child_dir(parent: BorrowedFd<'_>, name: &OsStr) -> io::Result<OwnedFd> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    Ok(rustix::fs::openat(parent, name, flags, Mode::empty())?)
}

/// A folder that is only a place in a path, opened to be read.
pub fn readable(dir: BorrowedFd<'_>) -> io::Result<OwnedFd> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
    Ok(rustix::fs::openat(dir, ".", flags, Mode::empty())?)
}

pub fn names_of(dir: BorrowedFd<'_>) -> io::Result<Vec<OsString>> {
    let mut names = Vec::new();
    for entry in Dir::read_from(dir)? {
        let entry = entry?;
        let name = entry.file_name().to_bytes();
        if name != b"." && name != b".." {
            names.push(OsString::from_vec(name.to_vec()));
        }
    }
    Ok(names)
}

pub fn file_type_at(parent: BorrowedFd<'_>, name: &OsStr) -> io::Result<Option<FileType>> {
    match rustix::fs::statat(parent, name, AtFlags::SYMLINK_NOFOLLOW) {
        Ok(stat) => Ok(Some(FileType::from_raw_mode(stat.st_mode))),
        Err(Errno::NOENT) => Ok(None),
        Err(error) => Err(error.into()),
    }
}

/// Disk blocks and number of files below a folder; hard links count once.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct TreeSize {
    pub bytes: u64,
    pub files: u64,
}

pub fn tree_size(dir: &Path) -> io::Result<TreeSize> {
    use std::os::unix::fs::MetadataExt;
    let mut size = TreeSize::default();
    let mut linked = std::collections::HashSet::new();
    let mut open = vec![dir.to_owned()];
    while let Some(dir) = open.pop() {
        for entry in std::fs::read_dir(&dir)? {
            let entry = entry?;
            let meta = entry.metadata()?;
            if meta.is_dir() {
                open.push(entry.path());
            } else if meta.nlink() > 1 && !linked.insert(meta.ino()) {
                continue;
            }
            size.bytes += meta.blocks() * 512;
            size.files += 1;
        }
    }
    Ok(size)
}
