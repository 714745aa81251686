//! Whom monitors run as, and what of the data folder they reach.
//!
//! A runtime's monitor is a user of its own, out of a range that is nobody else's; a fork's children are their source's
//! user. All monitors have one group. By it they pass through the data folder to their own one, and read
//! what snapshots hold, once it is linked there; what is nobody's but the daemon's stays root's, closed to the group.

use std::fs::{Metadata, Permissions};
use std::io;
use std::os::unix::fs::{MetadataExt, PermissionsExt, lchown};
use std::path::Path;

use dormouse_types::RuntimeId;
use serde::{Deserialize, Serialize};

use crate::common::{fnv1a, io_failure};
use crate::error::Failure;

const PASS_GROUP: u32 = 0o010;
const PASS_OTHERS: u32 = 0o001;
const READ_GROUP: u32 = 0o040;
const READ_OTHERS: u32 = 0o004;

/// A range of user and group ids that the host gives to nobody else.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MonitorUsers {
    /// The group of all monitors; their users follow.
    pub first: u32,
    /// With the first one. The more, the less likely it is that two runtimes have the same.
    pub count: u32,
}

/// What systemd's table of ids leaves unused ("Users, Groups, UIDs and GIDs on systemd systems").
impl Default for MonitorUsers {
    fn default() -> Self {
        Self { first: 0x7000_0000, count: 0x0fff_fffe }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct User {
    pub uid: u32,
    pub gid: u32,
}

impl MonitorUsers {
    /// Always the same for the same runtime.
    pub(super) fn of(&self, runtime: &RuntimeId) -> User {
        let users = u64::from(self.count.max(2) - 1);
        let number = u32::try_from(fnv1a(runtime.as_str().as_bytes()) % users).unwrap_or(0);
        User { uid: self.first.saturating_add(1).saturating_add(number), gid: self.first }
    }
}

/// Lets monitors pass through a folder, not list it.
pub(super) fn let_pass(dir: &Path, gid: u32) -> Result<(), Failure> {
    open_to(dir, gid, PASS_GROUP, PASS_OTHERS)
}

/// The same for all folders from `top` down to `dir`'s parent.
pub(super) fn let_pass_to(top: &Path, dir: &Path, gid: u32) -> Result<(), Failure> {
    let above = dir.ancestors().skip(1).take_while(|above| above.starts_with(top));
    above.into_iter().try_for_each(|above| let_pass(above, gid))
}

/// Lets monitors read a file that they can reach.
pub(super) fn let_read(file: &Path, gid: u32) -> Result<(), Failure> {
    open_to(file, gid, READ_GROUP, READ_OTHERS)
}

fn open_to(path: &Path, gid: u32, group: u32, others: u32) -> Result<(), Failure> {
    let failed = || io_failure("open to monitors", path);
    let meta = path.symlink_metadata().map_err(failed())?;
    let mode = meta.mode();
    if mode & others != 0 || (meta.gid() == gid && mode & group != 0) {
        return Ok(());
    }
    // What its former group could do is not for the new one.
    let changed = lchown(path, None, Some(gid)).and_then(|()| set_mode(path, mode & 0o707 | group));
    changed.map_err(failed())
}

/// Gives a folder to a monitor, and to nobody else.
pub(super) fn lend(dir: &Path, user: User) -> Result<(), Failure> {
    let given = set_mode(dir, 0o700).and_then(|()| lchown(dir, Some(user.uid), Some(user.gid)));
    given.map_err(io_failure("give to the monitor", dir))
}

/// Takes a folder back with what a monitor put there, all of it files. Nobody writes to them any more; monitors read them
/// where they can reach them.
pub(super) fn take_back(dir: &Path, user: User) -> Result<(), Failure> {
    let taken = lchown(dir, Some(0), Some(0)).and_then(|()| {
        for entry in std::fs::read_dir(dir)? {
            let (path, meta) = entry.and_then(|entry| Ok((entry.path(), entry.metadata()?)))?;
            take_file(&path, &meta, user)?;
        }
        Ok(())
    });
    taken.map_err(io_failure("take back from the monitor", dir))
}

fn take_file(path: &Path, meta: &Metadata, user: User) -> io::Result<()> {
    // A layer that it was lent and linked is as it is to be.
    if !meta.is_file() || meta.uid() != user.uid {
        return Ok(());
    }
    lchown(path, Some(0), Some(user.gid))?;
    set_mode(path, 0o640)
}

fn set_mode(path: &Path, mode: u32) -> io::Result<()> {
    std::fs::set_permissions(path, Permissions::from_mode(mode & 0o7777))
}

#[cfg(test)]
mod tests {
    use super::*;

    const USER: User = User { uid: 0x7000_0007, gid: 0x7000_0000 };

    fn of(path: &Path) -> (u32, u32, u32) {
        let meta = path.symlink_metadata().unwrap();
        (meta.uid(), meta.gid(), meta.mode() & 0o7777)
    }

    #[test]
    fn a_runtimes_user_is_its_own_and_stays() {
        let users = MonitorUsers::default();
        let (one, other) = (RuntimeId::generate(), RuntimeId::generate());
        assert_eq!(users.of(&one), users.of(&one));
        assert_ne!(users.of(&one).uid, users.of(&other).uid);
        let small = MonitorUsers { first: 100, count: 3 };
        let all: std::collections::BTreeSet<u32> =
            (0..200).map(|_| small.of(&RuntimeId::generate()).uid).collect();
        assert_eq!(all.into_iter().collect::<Vec<_>>(), [101, 102]);
        assert_eq!(MonitorUsers { first: 100, count: 0 }.of(&one), User { uid: 101, gid: 100 });
    }

    #[test]
    fn folders_are_passed_and_not_read() {
        if !rustix::process::geteuid().is_root() {
            return;
        }
        let root = tempfile::tempdir().unwrap();
        let (closed, open) = (root.path().join("closed"), root.path().join("closed/open"));
        std::fs::create_dir_all(&open).unwrap();
        set_mode(root.path(), 0o700).unwrap();
        set_mode(&closed, 0o750).unwrap();
        set_mode(&open, 0o755).unwrap();
        let file = open.join("file");
        std::fs::write(&file, "x").unwrap();
        set_mode(&file, 0o600).unwrap();
        let_pass_to(root.path(), &file, USER.gid).unwrap();
        assert_eq!(of(root.path()), (0, USER.gid, 0o710));
        assert_eq!(of(&closed), (0, USER.gid, 0o710));
        assert_eq!(of(&open), (0, 0, 0o755));
        let_read(&file, USER.gid).unwrap();
        assert_eq!(of(&file), (0, USER.gid, 0o640));
    }

    #[test]
    fn what_a_monitor_made_is_taken_back() {
        if !rustix::process::geteuid().is_root() {
            return;
        }
        let dir = tempfile::tempdir().unwrap();
        lend(dir.path(), USER).unwrap();
        assert_eq!(of(dir.path()), (USER.uid, USER.gid, 0o700));
        let (own, lent) = (dir.path().join("own"), dir.path().join("lent"));
        std::fs::write(&own, "x").unwrap();
        lchown(&own, Some(USER.uid), Some(USER.gid)).unwrap();
        std::fs::write(&lent, "x").unwrap();
        set_mode(&lent, 0o600).unwrap();
        take_back(dir.path(), USER).unwrap();
        assert_eq!(of(dir.path()), (0, 0, 0o700));
        assert_eq!(of(&own), (0, USER.gid, 0o640));
        assert_eq!(of(&lent), (0, 0, 0o600));
    }
}
