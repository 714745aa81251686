//! One watched directory over inotify: raw events in, the protocol's events out. Blocking, no tasks.
//!
//! Recursive watching is a watch per directory. A directory that appears gets its watch first and is
//! read afterwards: what was put into it before the watch is found by the reading, what comes later by
//! the watch, and what both see is reported once (`fresh`). A directory that is moved inside the tree
//! keeps its watches; only their paths change.

use std::collections::{HashMap, HashSet};
use std::ffi::{OsStr, OsString};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStrExt as _;
use std::path::{Path, PathBuf};

use dormouse_wire::envd::filesystem::EventType;
use rustix::fs::inotify::{self, CreateFlags, ReadFlags, WatchFlags};
use rustix::io::Errno;

use super::super::transfer::UNFINISHED_PREFIX;

/// Directories that one watcher follows.
const DIRS_MAX: usize = 65_536;
/// Half-seen moves that are waited for.
const MOVES_MAX: usize = 4096;
const READ_BYTES: usize = 64 << 10;

#[derive(Debug, thiserror::Error)]
pub enum WatchError {
    #[error("the kernel offers no inotify: {0}")]
    Init(Errno),
    #[error("directory {0:?} cannot be watched: {1}")]
    Add(PathBuf, Errno),
    #[error("more than {DIRS_MAX} directories are below the watched one: watch a smaller tree")]
    TooManyDirs,
    #[error(
        "events were lost: they came faster than they were read. Look at the directory and watch it anew"
    )]
    Overflow,
    #[error("the events cannot be read: {0}")]
    Read(Errno),
}

impl WatchError {
    /// True where a limit was met, false where something broke.
    #[must_use]
    pub fn is_limit(&self) -> bool {
        matches!(
            self,
            Self::Init(Errno::MFILE | Errno::NFILE)
                | Self::Add(_, Errno::NOSPC)
                | Self::TooManyDirs
                | Self::Overflow
        )
    }
}

/// Something happened to `name`, which is relative to the watched directory (`.` is itself).
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Change {
    pub name: PathBuf,
    pub what: EventType,
}

struct Raw {
    watch: i32,
    flags: ReadFlags,
    cookie: u32,
    name: Option<OsString>,
}

pub struct Tree {
    inotify: OwnedFd,
    root: PathBuf,
    recursive: bool,
    /// Watch → directory, relative to the root.
    dirs: HashMap<i32, PathBuf>,
    /// Directories that left their place; the other half of the move may follow.
    moved: HashMap<u32, PathBuf>,
    /// Reported because a new directory was read; their own `CREATE` may still be queued.
    fresh: HashSet<PathBuf>,
    buffer: Box<[MaybeUninit<u8>]>,
}

impl Tree {
    pub fn watch(root: &Path, recursive: bool) -> Result<Self, WatchError> {
        let inotify =
            inotify::init(CreateFlags::NONBLOCK | CreateFlags::CLOEXEC).map_err(WatchError::Init)?;
        let mut tree = Self {
            inotify,
            root: root.to_owned(),
            recursive,
            dirs: HashMap::new(),
            moved: HashMap::new(),
            fresh: HashSet::new(),
            buffer: vec![MaybeUninit::uninit(); READ_BYTES].into_boxed_slice(),
        };
        let watch = inotify::add_watch(&tree.inotify, root, interest())
            .map_err(|why| WatchError::Add(root.to_owned(), why))?;
        tree.dirs.insert(watch, PathBuf::new());
        if recursive {
            tree.follow_below(PathBuf::new(), None)?;
        }
        Ok(tree)
    }

    pub fn fd(&self) -> BorrowedFd<'_> {
        self.inotify.as_fd()
    }

    pub fn root(&self) -> &Path {
        &self.root
    }

    /// Handles queued events until none is left (true) or about `max` changes were reported (false).
    pub fn drain(&mut self, max: usize, report: &mut dyn FnMut(Change)) -> Result<bool, WatchError> {
        let mut reported = 0;
        loop {
            if reported >= max {
                return Ok(false);
            }
            let Some(batch) = self.read()? else { break };
            for raw in batch {
                self.handle(raw, &mut |change| {
                    reported += 1;
                    report(change);
                })?;
            }
        }
        // All that was queued when the new directories were read has been seen by now.
        self.fresh.clear();
        let gone: Vec<PathBuf> = self.moved.drain().map(|(_, dir)| dir).collect();
        gone.iter().for_each(|dir| self.forget_below(dir));
        Ok(true)
    }

    /// One read's worth of events; `None`: nothing is queued.
    fn read(&mut self) -> Result<Option<Vec<Raw>>, WatchError> {
        let mut reader = inotify::Reader::new(self.inotify.as_fd(), &mut self.buffer);
        let mut batch = Vec::new();
        loop {
            match reader.next() {
                Ok(event) => batch.push(Raw {
                    watch: event.wd(),
                    flags: event.events(),
                    cookie: event.cookie(),
                    name: event.file_name().map(|name| OsStr::from_bytes(name.to_bytes()).to_owned()),
                }),
                Err(Errno::INTR) => continue,
                Err(Errno::AGAIN) => return Ok(None),
                Err(why) => return Err(WatchError::Read(why)),
            }
            if reader.is_buffer_empty() {
                return Ok(Some(batch));
            }
        }
    }

    fn handle(&mut self, raw: Raw, report: &mut dyn FnMut(Change)) -> Result<(), WatchError> {
        if raw.flags.contains(ReadFlags::QUEUE_OVERFLOW) {
            return Err(WatchError::Overflow);
        }
        if raw.flags.contains(ReadFlags::IGNORED) {
            self.dirs.remove(&raw.watch);
            return Ok(());
        }
        let Some(dir) = self.dirs.get(&raw.watch) else { return Ok(()) };
        let Some(name) = raw.name else {
            // About a watched directory itself: its parent's watch tells that too, where it has one.
            if dir.as_os_str().is_empty() {
                of_itself(raw.flags).into_iter().for_each(|what| report(Change { name: ".".into(), what }));
            }
            return Ok(());
        };
        if name.as_bytes().starts_with(UNFINISHED_PREFIX.as_bytes()) {
            return Ok(());
        }
        let path = dir.join(name);
        if raw.flags.intersects(ReadFlags::CREATE | ReadFlags::MOVED_TO) && self.fresh.remove(&path) {
            return Ok(());
        }
        if raw.flags.intersects(ReadFlags::DELETE | ReadFlags::MOVED_FROM) {
            self.fresh.remove(&path);
        }
        for what in of_child(raw.flags) {
            report(Change { name: path.clone(), what });
        }
        if self.recursive && raw.flags.contains(ReadFlags::ISDIR) {
            self.directory_changed(path, raw.flags, raw.cookie, report)?;
        }
        Ok(())
    }

    fn directory_changed(
        &mut self,
        path: PathBuf,
        flags: ReadFlags,
        cookie: u32,
        report: &mut dyn FnMut(Change),
    ) -> Result<(), WatchError> {
        if flags.contains(ReadFlags::MOVED_FROM) {
            if self.moved.len() < MOVES_MAX {
                self.moved.insert(cookie, path);
            } else {
                self.forget_below(&path);
            }
        } else if flags.contains(ReadFlags::MOVED_TO) {
            match self.moved.remove(&cookie) {
                Some(old) => self.rename_below(&old, &path),
                None => return self.follow(path, false, report),
            }
        } else if flags.contains(ReadFlags::CREATE) {
            return self.follow(path, true, report);
        }
        Ok(())
    }

    /// Watches a directory that appeared and reports what is in it already. With `made`, what is in it
    /// was written there; otherwise it came along with a move.
    fn follow(&mut self, dir: PathBuf, made: bool, report: &mut dyn FnMut(Change)) -> Result<(), WatchError> {
        if self.add(&dir)? { self.follow_below(dir, Some((made, report))) } else { Ok(()) }
    }

    fn follow_below(
        &mut self,
        dir: PathBuf,
        mut found: Option<(bool, &mut dyn FnMut(Change))>,
    ) -> Result<(), WatchError> {
        let mut pending = vec![dir];
        while let Some(dir) = pending.pop() {
            // One that is gone again is told by its own events.
            let Ok(entries) = std::fs::read_dir(self.root.join(&dir)) else { continue };
            for entry in entries.flatten() {
                let name = entry.file_name();
                let Ok(kind) = entry.file_type() else { continue };
                if name.as_bytes().starts_with(UNFINISHED_PREFIX.as_bytes()) {
                    continue;
                }
                let path = dir.join(name);
                if let Some((made, report)) = &mut found {
                    report(Change { name: path.clone(), what: EventType::Create });
                    if *made && kind.is_file() && entry.metadata().is_ok_and(|meta| meta.len() > 0) {
                        report(Change { name: path.clone(), what: EventType::Write });
                    }
                    self.fresh.insert(path.clone());
                }
                if kind.is_dir() && self.add(&path)? {
                    pending.push(path);
                }
            }
        }
        Ok(())
    }

    /// False when the directory is gone, or is none any more.
    fn add(&mut self, dir: &Path) -> Result<bool, WatchError> {
        if self.dirs.len() >= DIRS_MAX {
            return Err(WatchError::TooManyDirs);
        }
        let flags = interest() | WatchFlags::DONT_FOLLOW;
        match inotify::add_watch(&self.inotify, self.root.join(dir), flags) {
            Ok(watch) => {
                self.dirs.insert(watch, dir.to_owned());
                Ok(true)
            }
            Err(Errno::NOENT | Errno::NOTDIR | Errno::ACCESS | Errno::LOOP) => Ok(false),
            Err(why) => Err(WatchError::Add(dir.to_owned(), why)),
        }
    }

    /// The directory left the tree, and with it all that is below.
    fn forget_below(&mut self, dir: &Path) {
        let gone: Vec<i32> =
            self.dirs.iter().filter(|(_, path)| path.starts_with(dir)).map(|(watch, _)| *watch).collect();
        for watch in gone {
            self.dirs.remove(&watch);
            // It may be gone with its directory already.
            let _ = inotify::remove_watch(&self.inotify, watch);
        }
    }

    fn rename_below(&mut self, old: &Path, new: &Path) {
        for path in self.dirs.values_mut() {
            if let Ok(rest) = path.strip_prefix(old) {
                *path = if rest.as_os_str().is_empty() { new.to_owned() } else { new.join(rest) };
            }
        }
    }
}

fn interest() -> WatchFlags {
    WatchFlags::CREATE
        | WatchFlags::MOVED_TO
        | WatchFlags::MOVED_FROM
        | WatchFlags::MODIFY
        | WatchFlags::ATTRIB
        | WatchFlags::DELETE
        | WatchFlags::DELETE_SELF
        | WatchFlags::MOVE_SELF
        | WatchFlags::ONLYDIR
}

/// The protocol's events of one inotify event, in its order. A name that a move gave away is a RENAME,
/// the name that it took is a CREATE.
fn of_child(flags: ReadFlags) -> Vec<EventType> {
    [
        (ReadFlags::CREATE | ReadFlags::MOVED_TO, EventType::Create),
        (ReadFlags::MOVED_FROM, EventType::Rename),
        (ReadFlags::ATTRIB, EventType::Chmod),
        (ReadFlags::MODIFY, EventType::Write),
        (ReadFlags::DELETE, EventType::Remove),
    ]
    .into_iter()
    .filter_map(|(wanted, what)| flags.intersects(wanted).then_some(what))
    .collect()
}

fn of_itself(flags: ReadFlags) -> Vec<EventType> {
    [
        (ReadFlags::MOVE_SELF, EventType::Rename),
        (ReadFlags::ATTRIB, EventType::Chmod),
        (ReadFlags::DELETE_SELF, EventType::Remove),
    ]
    .into_iter()
    .filter_map(|(wanted, what)| flags.intersects(wanted).then_some(what))
    .collect()
}
