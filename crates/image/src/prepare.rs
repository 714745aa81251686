//! What every root file system gets, wherever it came from: mount points, the default user, the way to
//! the agent. Done to a tree that is hostile: every step resolves its path inside the root.

use std::io;

use crate::error::ImportError;
use crate::root::{Owner, ROOT_OWNER, Root};

/// The user that commands run as unless told otherwise; wanted with this number, as E2B's has it.
pub const USER: &str = "user";
pub const USER_ID: u32 = 1000;
pub const HOME: &str = "/home/user";
/// The agent is mounted or copied here.
pub const AGENT_DIR: &str = "/usr/lib/dormouse";
/// `dormouse-awake COMMAND` keeps the sandbox awake while the command runs.
pub const AWAKE_PATH: &str = "/usr/local/bin/dormouse-awake";
/// Executables here run after a restore with a new identity.
pub const WAKE_HOOKS_DIR: &str = "/etc/dormouse/wake.d";

/// Before `/usr/bin` on every path.
const SUDO_PATH: &str = "/usr/local/bin/sudo";
const TEXT_BYTES_MAX: u64 = 4 << 20;
/// Commands are given to login shells: asking a program for the user's number, as Debian's profile does,
/// would be the most expensive part of many. Shells without the variable still ask.
const PROFILE: &str = "/etc/profile";
const PROFILE_ASKS: [&str; 2] = ["\"$(id -u)\"", "\"${EUID:-$(id -u)}\""];
const AWAKE: &str = "#!/bin/sh\nexec /usr/lib/dormouse/agent awake \"$@\"\n";
const HOSTS: &str = "127.0.0.1\tlocalhost\n::1\tlocalhost ip6-localhost ip6-loopback\n";
/// Names are answered by the agent, which asks the keeper, which asks the policy.
const RESOLV_CONF: &str = "nameserver 127.0.0.1\noptions timeout:5 attempts:2\n";
/// The way out leads through a proxy that variables name; sudo would drop them.
const SUDOERS: &str = "user ALL=(ALL:ALL) NOPASSWD: ALL\n\
Defaults:user env_keep += \"http_proxy https_proxy ftp_proxy all_proxy no_proxy\"\n\
Defaults:user env_keep += \"HTTP_PROXY HTTPS_PROXY FTP_PROXY ALL_PROXY NO_PROXY\"\n\
Defaults:user env_keep += \"SSL_CERT_FILE SSL_CERT_DIR CURL_CA_BUNDLE REQUESTS_CA_BUNDLE PIP_CERT\"\n\
Defaults:user env_keep += \"NODE_EXTRA_CA_CERTS GIT_SSL_CAINFO\"\n";

/// Idempotent.
pub fn prepare(root: &Root) -> Result<(), ImportError> {
    let failed = |action, path: &str, source| ImportError::Prepare { action, path: path.to_owned(), source };
    for (path, mode) in FOLDERS {
        // File systems are mounted over these: a link would lead the mount elsewhere.
        let real = MOUNT_POINTS.contains(path);
        let made = if real {
            root.real_folder(path, *mode, ROOT_OWNER)
        } else {
            root.folder(path, *mode, ROOT_OWNER)
        };
        made.map_err(|source| failed("make", path, source))?;
    }
    // A mount point for a file, where the engine mounts one over it.
    let agent = format!("{AGENT_DIR}/agent");
    for (path, content, mode) in [
        (agent.as_str(), "", 0o755),
        (AWAKE_PATH, AWAKE, 0o755),
        ("/etc/hosts", HOSTS, 0o644),
        ("/etc/resolv.conf", RESOLV_CONF, 0o644),
        ("/etc/hostname", "localhost\n", 0o644),
        // Empty: every sandbox gets its own when it wakes.
        ("/etc/machine-id", "", 0o644),
        // runsc puts a file system in memory over a /tmp that is empty.
        ("/tmp/.dormouse", "", 0o644),
    ] {
        root.write(path, content.as_bytes(), mode, ROOT_OWNER)
            .map_err(|source| failed("write", path, source))?;
    }
    // Where the kernel honours no set-user-id bit the agent takes sudo's place, by the name it is called.
    root.link(SUDO_PATH, &agent).map_err(|source| failed("write", SUDO_PATH, source))?;
    user(root).map_err(|source| failed("add the user to", "/etc/passwd", source))?;
    if let Some(text) =
        root.read(PROFILE, TEXT_BYTES_MAX).map_err(|source| failed("read", PROFILE, source))?
        && text.contains(PROFILE_ASKS[0])
    {
        let text = text.replace(PROFILE_ASKS[0], PROFILE_ASKS[1]);
        root.write(PROFILE, text.as_bytes(), 0o644, ROOT_OWNER)
            .map_err(|source| failed("write", PROFILE, source))?;
    }
    if root.exists("/etc/sudoers.d") {
        let path = "/etc/sudoers.d/dormouse-user";
        root.write(path, SUDOERS.as_bytes(), 0o440, ROOT_OWNER)
            .map_err(|source| failed("write", path, source))?;
    }
    Ok(())
}

const MOUNT_POINTS: [&str; 5] = ["/proc", "/sys", "/dev", "/run", "/tmp"];

const FOLDERS: &[(&str, u32)] = &[
    ("/proc", 0o555),
    ("/sys", 0o555),
    ("/dev", 0o755),
    ("/run", 0o755),
    ("/tmp", 0o1777),
    ("/var/tmp", 0o1777),
    ("/root", 0o700),
    ("/etc", 0o755),
    ("/home", 0o755),
    ("/usr/local/bin", 0o755),
    (AGENT_DIR, 0o755),
    (WAKE_HOOKS_DIR, 0o755),
];

fn user(root: &Root) -> io::Result<()> {
    let passwd = root.read("/etc/passwd", TEXT_BYTES_MAX)?.unwrap_or_default();
    let group = root.read("/etc/group", TEXT_BYTES_MAX)?.unwrap_or_default();
    let shadow = root.read("/etc/shadow", TEXT_BYTES_MAX)?.unwrap_or_default();
    let shell = if root.exists("/bin/bash") { "/bin/bash" } else { "/bin/sh" };
    let mut passwd = lines(&passwd);
    let mut group = lines(&group);
    let mut shadow = lines(&shadow);
    if !has(&passwd, "root") {
        passwd.insert(0, format!("root:x:0:0:root:/root:{shell}"));
    }
    if !has(&group, "root") {
        group.insert(0, "root:x:0:".to_owned());
    }
    let owner = match number(&passwd, USER) {
        Some(uid) => Owner { uid, gid: column(&passwd, USER, 3).unwrap_or(uid) },
        None => {
            // An image may have given the number to a user of its own: then the next free one.
            let free = |id: &u32| !uses(&passwd, *id) && !uses(&group, *id);
            let id = (USER_ID..USER_ID + 1000).find(free).unwrap_or(USER_ID);
            let gid = number(&group, USER).unwrap_or(id);
            passwd.push(format!("{USER}:x:{id}:{gid}::{HOME}:{shell}"));
            if !has(&group, USER) {
                group.push(format!("{USER}:x:{gid}:"));
            }
            if !has(&shadow, USER) {
                shadow.push(format!("{USER}:*:19000:0:99999:7:::"));
            }
            Owner { uid: id, gid }
        }
    };
    for (path, content, mode) in
        [("/etc/passwd", &passwd, 0o644), ("/etc/group", &group, 0o644), ("/etc/shadow", &shadow, 0o640)]
    {
        let text: String = content.iter().map(|line| format!("{line}\n")).collect();
        root.write(path, text.as_bytes(), mode, ROOT_OWNER)?;
    }
    if !root.exists(HOME) {
        root.folder(HOME, 0o755, owner)?;
        for name in [".bashrc", ".profile", ".bash_logout"] {
            if let Some(text) = root.read(&format!("/etc/skel/{name}"), TEXT_BYTES_MAX)? {
                root.write(&format!("{HOME}/{name}"), text.as_bytes(), 0o644, owner)?;
            }
        }
    }
    Ok(())
}

fn lines(text: &str) -> Vec<String> {
    text.lines().filter(|line| !line.is_empty()).map(str::to_owned).collect()
}

fn entry<'a>(table: &'a [String], name: &str) -> Option<&'a String> {
    table.iter().find(|line| line.split(':').next() == Some(name))
}

fn has(table: &[String], name: &str) -> bool {
    entry(table, name).is_some()
}

fn column(table: &[String], name: &str, at: usize) -> Option<u32> {
    entry(table, name)?.split(':').nth(at)?.parse().ok()
}

/// Third column of both tables: the user's or the group's number.
fn number(table: &[String], name: &str) -> Option<u32> {
    column(table, name, 2)
}

fn uses(table: &[String], id: u32) -> bool {
    table.iter().any(|line| line.split(':').nth(2).and_then(|id| id.parse().ok()) == Some(id))
}
