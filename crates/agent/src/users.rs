//! Users and groups, read from `/etc/passwd` and `/etc/group` at each use: images change them, and
//! the agent is static, so it cannot load the name service's modules.

use std::path::PathBuf;

use base64::Engine as _;
use base64::prelude::BASE64_STANDARD;
use dormouse_wire::envd::connect;
use http::HeaderMap;
use http::header::AUTHORIZATION;

use crate::context::Settings;

const PASSWD: &str = "/etc/passwd";
const GROUP: &str = "/etc/group";
/// A larger file is cut there: nothing that has one is a sandbox's user database.
const FILE_BYTES_MAX: u64 = 4 << 20;
/// Room for a usual one: it is read in one piece.
const FILE_BYTES_USUAL: usize = 8 << 10;
/// E2B's default user; images without one use root.
const DEFAULT_USER: &str = "user";

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct User {
    pub name: String,
    pub uid: u32,
    pub gid: u32,
    pub home: PathBuf,
    pub shell: PathBuf,
    /// All groups, the primary one among them.
    pub groups: Vec<u32>,
}

#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("invalid username: '{0}'")]
pub struct UnknownUser(pub String);

impl From<UnknownUser> for connect::Error {
    fn from(error: UnknownUser) -> Self {
        Self::unauthenticated(error.to_string())
    }
}

fn read(path: &str) -> String {
    use std::io::Read as _;
    let mut bytes = Vec::with_capacity(FILE_BYTES_USUAL);
    // A missing file is an empty one: only lookups that need it fail.
    if let Ok(file) = std::fs::File::open(path) {
        let _ = file.take(FILE_BYTES_MAX).read_to_end(&mut bytes);
    }
    String::from_utf8_lossy(&bytes).into_owned()
}

/// The user of that name (or of that number).
pub fn lookup(name: &str) -> Result<User, UnknownUser> {
    find(&read(PASSWD), &read(GROUP), name).ok_or_else(|| UnknownUser(name.chars().take(64).collect()))
}

/// The name of a user id, for display.
#[must_use]
pub fn user_name(uid: u32) -> Option<String> {
    name_of(&read(PASSWD), uid)
}

/// The name of a group id, for display.
#[must_use]
pub fn group_name(gid: u32) -> Option<String> {
    name_of(&read(GROUP), gid)
}

/// The user whom a request runs as where it names none.
pub fn default_user(settings: &Settings) -> Result<User, UnknownUser> {
    match &settings.default_user {
        Some(name) => lookup(name),
        None => lookup(DEFAULT_USER).or_else(|_| lookup("root")),
    }
}

/// The user of an optional name: an empty one is none.
pub fn named_or_default(name: Option<&str>, settings: &Settings) -> Result<User, UnknownUser> {
    match name.filter(|name| !name.is_empty()) {
        Some(name) => lookup(name),
        None => default_user(settings),
    }
}

/// The user of a request: from Basic authentication (the password is ignored), else the default one.
pub fn of_request(headers: &HeaderMap, settings: &Settings) -> Result<User, UnknownUser> {
    named_or_default(basic_user(headers).as_deref(), settings)
}

/// The user name of an `Authorization: Basic` header.
#[must_use]
pub fn basic_user(headers: &HeaderMap) -> Option<String> {
    let value = headers.get(AUTHORIZATION)?.to_str().ok()?;
    let (scheme, encoded) = value.split_once(' ')?;
    if !scheme.eq_ignore_ascii_case("basic") {
        return None;
    }
    let decoded = String::from_utf8(BASE64_STANDARD.decode(encoded.trim()).ok()?).ok()?;
    Some(decoded.split_once(':').map_or(decoded.as_str(), |(user, _)| user).to_owned())
}

fn find(passwd: &str, group: &str, wanted: &str) -> Option<User> {
    let mut users = passwd.lines().filter_map(parse_user);
    let mut user = users.clone().find(|user| user.name == wanted).or_else(|| {
        let uid: u32 = wanted.parse().ok()?;
        users.find(|user| user.uid == uid)
    })?;
    for line in group.lines() {
        let mut fields = line.split(':');
        let (Some(_), Some(_), Some(gid), Some(members)) =
            (fields.next(), fields.next(), fields.next(), fields.next())
        else {
            continue;
        };
        let Ok(gid) = gid.parse::<u32>() else { continue };
        if members.split(',').any(|member| member.trim() == user.name) && !user.groups.contains(&gid) {
            user.groups.push(gid);
        }
    }
    Some(user)
}

fn parse_user(line: &str) -> Option<User> {
    let fields: Vec<&str> = line.split(':').collect();
    let [name, _, uid, gid, _, home, rest @ ..] = fields.as_slice() else { return None };
    let gid = gid.parse().ok()?;
    Some(User {
        name: (*name).to_owned(),
        uid: uid.parse().ok()?,
        gid,
        home: PathBuf::from(if home.is_empty() { "/" } else { home }),
        shell: PathBuf::from(rest.first().filter(|shell| !shell.is_empty()).unwrap_or(&"/bin/sh")),
        groups: vec![gid],
    })
}

fn name_of(file: &str, id: u32) -> Option<String> {
    file.lines().find_map(|line| {
        let mut fields = line.split(':');
        let (name, _, number) = (fields.next()?, fields.next()?, fields.next()?);
        (number.parse() == Ok(id)).then(|| name.to_owned())
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const USERS: &str = "root:x:0:0:root:/root:/bin/bash\nbroken\nuser:x:1000:1000::/home/user:\n";
    const GROUPS: &str = "root:x:0:\nuser:x:1000:\nsudo:x:27:other,user\nbad:x:y:user\n";

    #[test]
    fn users_are_found_with_their_groups() {
        let user = find(USERS, GROUPS, "user").unwrap();
        assert_eq!((user.uid, user.gid, user.groups.as_slice()), (1000, 1000, &[1000, 27][..]));
        assert_eq!(user.home, PathBuf::from("/home/user"));
        assert_eq!(user.shell, PathBuf::from("/bin/sh"));
        assert_eq!(find(USERS, GROUPS, "1000").map(|user| user.name), Some("user".into()));
        assert_eq!(find(USERS, GROUPS, "nobody"), None);
        assert_eq!(name_of(GROUPS, 27).as_deref(), Some("sudo"));
    }

    #[test]
    fn the_basic_user_is_read() {
        let headers = |value: &str| HeaderMap::from_iter([(AUTHORIZATION, value.parse().unwrap())]);
        assert_eq!(basic_user(&headers("Basic dXNlcjo=")).as_deref(), Some("user"));
        assert_eq!(basic_user(&headers("basic cm9vdDpwdw==")).as_deref(), Some("root"));
        assert_eq!(basic_user(&headers("Bearer x")), None);
        assert_eq!(basic_user(&headers("Basic %%%")), None);
        assert_eq!(lookup("no such user").unwrap_err().to_string(), "invalid username: 'no such user'");
    }
}
