//! What clients are told of a file: `EntryInfo`.

use std::collections::HashMap;
use std::fs::Metadata;
use std::io;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};

use dormouse_types::Timestamp;
use dormouse_wire::envd::filesystem::{EntryInfo, FileType};

use super::{metadata, mode, path};
use crate::users;

/// Names of users and groups, looked up once per call: a listing asks for the same ones again and again.
#[derive(Default)]
pub struct Names {
    users: HashMap<u32, String>,
    groups: HashMap<u32, String>,
}

impl Names {
    fn user(&mut self, uid: u32) -> String {
        self.users
            .entry(uid)
            .or_insert_with(|| users::user_name(uid).unwrap_or_else(|| uid.to_string()))
            .clone()
    }

    fn group(&mut self, gid: u32) -> String {
        self.groups
            .entry(gid)
            .or_insert_with(|| users::group_name(gid).unwrap_or_else(|| gid.to_string()))
            .clone()
    }
}

/// Describes what is at `path`. A symbolic link is described as itself, but with type and mode of what
/// it leads to; one that leads nowhere has the type `SYMLINK`.
///
/// `is_symlink` stays unset: servers of the version that we announce do not send it, and clients that
/// see it show another type than with them. `symlink_target` tells a link.
pub fn describe(path: &Path, names: &mut Names) -> io::Result<EntryInfo> {
    let own = std::fs::symlink_metadata(path)?;
    let mut entry = EntryInfo {
        name: path::base_name(path),
        path: path.to_string_lossy().into_owned(),
        file_type: file_type(&own),
        size: i64::try_from(own.len()).unwrap_or(i64::MAX),
        mode: mode::permission_bits(own.mode()),
        permissions: mode::text(own.mode()),
        owner: names.user(own.uid()),
        group: names.group(own.gid()),
        modified_time: modified(&own),
        ..EntryInfo::default()
    };
    if !own.is_symlink() {
        entry.metadata = metadata::read(path, &own);
        return Ok(entry);
    }
    match std::fs::canonicalize(path).and_then(|target| Ok((std::fs::metadata(&target)?, target))) {
        Ok((meta, target)) => {
            entry.file_type = file_type(&meta);
            entry.mode = mode::permission_bits(meta.mode());
            entry.metadata = metadata::read(&target, &meta);
            entry.symlink_target = Some(target.to_string_lossy().into_owned());
        }
        Err(_) => entry.symlink_target = dangling(path).map(|target| target.to_string_lossy().into_owned()),
    }
    Ok(entry)
}

fn dangling(link: &Path) -> Option<PathBuf> {
    let target = std::fs::read_link(link).ok()?;
    Some(link.parent()?.join(target))
}

fn file_type(meta: &Metadata) -> FileType {
    if meta.is_file() {
        FileType::File
    } else if meta.is_dir() {
        FileType::Directory
    } else if meta.is_symlink() {
        FileType::Symlink
    } else {
        FileType::Unspecified
    }
}

fn modified(meta: &Metadata) -> Option<Timestamp> {
    Timestamp::new(meta.mtime(), i32::try_from(meta.mtime_nsec()).ok()?).ok()
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::{PermissionsExt as _, symlink};

    use super::*;

    #[test]
    fn links_show_what_they_lead_to() {
        let dir = tempfile::tempdir().unwrap();
        let at = |name: &str| dir.path().join(name);
        std::fs::write(at("f"), "12345").unwrap();
        std::fs::set_permissions(at("f"), std::fs::Permissions::from_mode(0o600)).unwrap();
        symlink("f", at("link")).unwrap();
        symlink(dir.path(), at("dirlink")).unwrap();
        symlink("nowhere", at("broken")).unwrap();
        symlink("loop", at("loop")).unwrap();
        let mut names = Names::default();
        let mut show = |name: &str| describe(&at(name), &mut names).unwrap();

        let file = show("f");
        assert_eq!((file.size, file.mode, file.permissions.as_str()), (5, 0o600, "-rw-------"));
        assert_eq!((file.owner.as_str(), file.symlink_target), ("root", None));
        let link = show("link");
        assert_eq!(
            (link.file_type, link.mode, link.permissions.as_str()),
            (FileType::File, 0o600, "Lrwxrwxrwx")
        );
        assert_eq!(link.symlink_target, at("f").canonicalize().unwrap().to_str().map(str::to_owned));
        assert_eq!(show("dirlink").file_type, FileType::Directory);
        let broken = show("broken");
        assert_eq!(broken.file_type, FileType::Symlink);
        assert_eq!(broken.symlink_target.as_deref(), at("nowhere").to_str());
        assert_eq!(show("loop").file_type, FileType::Symlink);
        assert_eq!(describe(&at("missing"), &mut names).unwrap_err().kind(), io::ErrorKind::NotFound);
    }
}
