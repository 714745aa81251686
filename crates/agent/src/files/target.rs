//! Putting content where it belongs, whole or not at all.
//!
//! What clients can see is E2B's: a new file gives the events CREATE, CHMOD (it is given to the user),
//! WRITE; an existing one WRITE (it is emptied), CHMOD, WRITE, and stays the same file, with its mode,
//! its other names and whoever has it open. What E2B does not do: content is complete before it gets
//! there. Small content waits in memory; large content in an unfinished file beside the target, which
//! watchers do not see and which then takes the target's name. Over an existing file it is copied into
//! that one; only content of [`REPLACE_BYTES_MIN`] and more takes an existing file's place (its mode is
//! kept; watchers see CREATE, CHMOD, WRITE), unless that has other names: copying costs more than it is
//! worth there.

use std::fs::{File, Metadata, OpenOptions};
use std::io::{self, Seek as _, Write as _};
use std::os::unix::fs::{
    FileExt as _, FileTypeExt as _, MetadataExt as _, OpenOptionsExt as _, PermissionsExt as _, fchown,
};
use std::path::{Path, PathBuf};

use rustix::fs::{AtFlags, CWD, OFlags, RenameFlags};
use rustix::io::Errno;

use super::error::Refusal;
use crate::filesystem::metadata::{self, Tags};
use crate::filesystem::{owned, transfer};
use crate::users::User;

const FILE_MODE: u32 = 0o644;
const UNFINISHED_MODE: u32 = 0o600;
/// As many links as the kernel follows.
const LINKS_MAX: usize = 40;
const BLOCK_BYTES: u64 = 512;
/// Content from this size on replaces an existing file instead of being copied into it.
pub const REPLACE_BYTES_MIN: u64 = 32 << 20;

/// Where content goes, and whose it will be.
#[derive(Debug, Clone)]
pub struct Target {
    pub path: PathBuf,
    pub user: User,
    pub tags: Tags,
}

/// What a target's path leads to.
enum Place {
    New(PathBuf),
    Existing(PathBuf, Metadata),
}

/// A file under a name of its own, which vanishes unless it is published.
pub struct Unfinished {
    path: PathBuf,
    pub file: File,
    published: bool,
}

impl Drop for Unfinished {
    fn drop(&mut self) {
        if !self.published {
            // It is not the content that anybody asked for; that it stays is only untidy.
            let _ = std::fs::remove_file(&self.path);
        }
    }
}

impl Target {
    /// Refuses what cannot be written before any content is taken.
    pub fn check(&self, bytes: Option<u64>) -> Result<(), Refusal> {
        let place = self.place()?;
        match (&place, bytes) {
            (Place::New(path), Some(bytes)) => require_space(path, bytes),
            (Place::Existing(path, meta), Some(bytes)) => {
                require_space(path, bytes.saturating_sub(meta.blocks() * BLOCK_BYTES))
            }
            (_, None) => Ok(()),
        }
    }

    fn place(&self) -> Result<Place, Refusal> {
        let place = follow(&self.path).map_err(|why| Refusal::io("writing", &self.path, &why))?;
        if let Place::Existing(path, meta) = &place {
            if meta.is_dir() {
                return Err(Refusal::is_directory(&self.path));
            }
            let kind = meta.file_type();
            if kind.is_fifo() || kind.is_socket() {
                return Err(Refusal::bad_request(format!("path '{}' is not a regular file", path.display())));
            }
        }
        Ok(place)
    }

    fn failed(&self, why: &io::Error) -> Refusal {
        Refusal::io("writing", &self.path, why)
    }

    /// Writes content that is in memory.
    pub fn write(&self, content: &[u8]) -> Result<(), Refusal> {
        match self.place()? {
            Place::New(path) => self.create(&path, content),
            Place::Existing(path, meta) => {
                self.overwrite(&path, &meta, content.len() as u64, |mut file| file.write_all(content))
            }
        }
    }

    fn create(&self, path: &Path, content: &[u8]) -> Result<(), Refusal> {
        if !self.tags.is_empty() {
            // Attaching metadata is an event too: do it where nobody looks.
            let mut unfinished = self.begin()?;
            unfinished.file.write_all(content).map_err(|why| self.failed(&why))?;
            return self.publish(unfinished);
        }
        owned::make_parent(path, &self.user)
            .map_err(|why| Refusal::io("making the parent of", path, &why))?;
        let created = OpenOptions::new().write(true).create_new(true).mode(FILE_MODE).open(path);
        let mut file = match created {
            // Somebody was faster: it is an existing file then.
            Err(why) if why.kind() == io::ErrorKind::AlreadyExists => return self.write(content),
            created => created.map_err(|why| self.failed(&why))?,
        };
        let written = (|| {
            fchown(&file, Some(self.user.uid), Some(self.user.gid))?;
            // Only where the umask took something away: it is an event of its own.
            if file.metadata()?.mode() & 0o777 != FILE_MODE {
                file.set_permissions(std::fs::Permissions::from_mode(FILE_MODE))?;
            }
            file.write_all(content)
        })();
        written.map_err(|why: io::Error| {
            let _ = std::fs::remove_file(path);
            self.failed(&why)
        })
    }

    fn overwrite(
        &self,
        path: &Path,
        meta: &Metadata,
        bytes: u64,
        fill: impl FnOnce(&File) -> io::Result<()>,
    ) -> Result<(), Refusal> {
        // The old content is given up for the new one only when that will fit.
        require_space(path, bytes.saturating_sub(meta.blocks() * BLOCK_BYTES))?;
        let nonblock = i32::try_from(OFlags::NONBLOCK.bits()).unwrap_or(0);
        let filled = OpenOptions::new().write(true).custom_flags(nonblock).open(path).and_then(|file| {
            let regular = file.metadata()?.is_file();
            if regular {
                file.set_len(0)?;
                fchown(&file, Some(self.user.uid), Some(self.user.gid))?;
            }
            fill(&file)?;
            if regular { metadata::replace(&file, &self.tags) } else { Ok(()) }
        });
        filled.map_err(|why| self.failed(&why))
    }

    /// Begins a file that is not yet there. The directory that the target will be in is made.
    pub fn begin(&self) -> Result<Unfinished, Refusal> {
        let (Place::New(path) | Place::Existing(path, _)) = self.place()?;
        owned::make_parent(&path, &self.user)
            .map_err(|why| Refusal::io("making the parent of", &path, &why))?;
        let path = transfer::unfinished_beside(&path);
        let opened =
            OpenOptions::new().read(true).write(true).create_new(true).mode(UNFINISHED_MODE).open(&path);
        Ok(Unfinished { file: opened.map_err(|why| self.failed(&why))?, path, published: false })
    }

    /// Makes a finished file the target.
    pub fn publish(&self, mut finished: Unfinished) -> Result<(), Refusal> {
        let bytes = finished.file.metadata().map_err(|why| self.failed(&why))?.len();
        if let Place::New(path) = self.place()?
            && self.take_name(&mut finished, &path).map_err(|why| self.failed(&why))?
        {
            return Ok(());
        }
        // There is one, or somebody was faster.
        let Place::Existing(path, meta) = self.place()? else {
            return Err(self.failed(&io::ErrorKind::ResourceBusy.into()));
        };
        if bytes >= REPLACE_BYTES_MIN && meta.is_file() && meta.nlink() == 1 {
            return self.take_place(&mut finished, &path, &meta).map_err(|why| self.failed(&why));
        }
        self.overwrite(&path, &meta, bytes, |file| {
            finished.file.rewind()?;
            transfer::append(&finished.file, file).map(drop)
        })
    }

    /// False: the name was taken by somebody else meanwhile.
    fn take_name(&self, finished: &mut Unfinished, path: &Path) -> io::Result<bool> {
        self.prepare(&finished.file, FILE_MODE)?;
        match rustix::fs::renameat_with(CWD, &finished.path, CWD, path, RenameFlags::NOREPLACE) {
            Ok(()) => {}
            Err(Errno::EXIST) => return Ok(false),
            // Not every file system has it; a hard link refuses to replace just as well.
            Err(Errno::INVAL | Errno::NOSYS) => {
                match rustix::fs::linkat(CWD, &finished.path, CWD, path, AtFlags::empty()) {
                    Ok(()) => std::fs::remove_file(&finished.path)?,
                    Err(Errno::EXIST) => return Ok(false),
                    Err(_) => std::fs::rename(&finished.path, path)?,
                }
            }
            Err(why) => return Err(why.into()),
        }
        self.hand_over(finished).map(|()| true)
    }

    fn take_place(&self, finished: &mut Unfinished, path: &Path, old: &Metadata) -> io::Result<()> {
        self.prepare(&finished.file, old.mode() & 0o777)?;
        std::fs::rename(&finished.path, path)?;
        metadata::forget(old);
        self.hand_over(finished)
    }

    fn prepare(&self, file: &File, mode: u32) -> io::Result<()> {
        if !self.tags.is_empty() {
            metadata::replace(file, &self.tags)?;
        }
        file.set_permissions(std::fs::Permissions::from_mode(mode))
    }

    /// The events that belong to a written file under its name: given to the user, and written.
    fn hand_over(&self, finished: &mut Unfinished) -> io::Result<()> {
        finished.published = true;
        fchown(&finished.file, Some(self.user.uid), Some(self.user.gid))?;
        touch_last_byte(&finished.file)
    }
}

/// Writes a file's last byte over itself, which changes nothing and tells watchers of a write.
fn touch_last_byte(file: &File) -> io::Result<()> {
    let Some(at) = file.metadata()?.len().checked_sub(1) else { return Ok(()) };
    let mut byte = [0];
    file.read_exact_at(&mut byte, at)?;
    file.write_all_at(&byte, at)
}

/// Follows links to what is there, or to what a link that leads nowhere would create.
fn follow(path: &Path) -> io::Result<Place> {
    let mut path = path.to_owned();
    for _ in 0..LINKS_MAX {
        match std::fs::metadata(&path) {
            Ok(meta) => return Ok(Place::Existing(std::fs::canonicalize(&path)?, meta)),
            Err(why) if why.kind() == io::ErrorKind::NotFound => {}
            Err(why) => return Err(why),
        }
        match std::fs::read_link(&path) {
            Ok(target) => path = path.parent().unwrap_or(Path::new("/")).join(target),
            Err(_) => return Ok(Place::New(path)),
        }
    }
    Err(Errno::LOOP.into())
}

/// Refuses where the file system certainly has no room for `bytes` more.
fn require_space(path: &Path, bytes: u64) -> Result<(), Refusal> {
    let stat = path.ancestors().find_map(|ancestor| rustix::fs::statvfs(ancestor).ok());
    // Special and unlimited file systems report no blocks at all.
    let Some(stat) = stat.filter(|stat| stat.f_blocks > 0) else { return Ok(()) };
    let free = stat.f_bavail.saturating_mul(stat.f_frsize);
    if bytes <= free {
        return Ok(());
    }
    Err(Refusal::no_space(path, &format!("{bytes} bytes are needed, {free} are available")))
}
