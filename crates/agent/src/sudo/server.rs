//! The agent's side: who may become whom, and the command as a child of the agent.

use std::collections::BTreeMap;
use std::ffi::CString;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStrExt as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use dormouse_sys::child::{Identity, Setup, prepare};
use dormouse_wire::local;
use rustix::process::Signal;
use tokio::net::{UnixListener, UnixStream};

use super::{Call, Forward, NAME, Reply, SOCKET, SOCKET_DIR};
use crate::limits;
use crate::process::{Exit, Reaper, Started};
use crate::users::{self, User};

/// Commands under way at a time; more are refused.
const CALLS_MAX: usize = 256;
const SECURE_PATH: &str = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";
/// Before the real one on every sandbox's path.
const LINK: &str = "/usr/local/bin/sudo";
const AGENT: &str = "/usr/lib/dormouse/agent";
const SUDOERS: &str = "/etc/sudoers";
const SUDOERS_DIR: &str = "/etc/sudoers.d";

/// Puts the link on the path and answers calls. Ends with the runtime.
pub fn start(reaper: &Reaper) -> io::Result<()> {
    std::fs::create_dir_all(SOCKET_DIR)?;
    let listener = local::bind(Path::new(SOCKET_DIR), SOCKET)?;
    // Everybody may ask; who may have is decided by the caller's credentials.
    rustix::fs::chmod(Path::new(SOCKET_DIR).join(SOCKET), rustix::fs::Mode::from_raw_mode(0o666))?;
    place_link()?;
    let listener = UnixListener::from_std(listener)?;
    let reaper = reaper.clone();
    let places = std::sync::Arc::new(tokio::sync::Semaphore::new(CALLS_MAX));
    tokio::spawn(async move {
        loop {
            let Ok(place) = places.clone().acquire_owned().await else { return };
            let Ok((socket, _)) = listener.accept().await else { continue };
            let reaper = reaper.clone();
            tokio::spawn(async move {
                serve(&socket, &reaper).await;
                drop(place);
            });
        }
    });
    Ok(())
}

fn place_link() -> io::Result<()> {
    if std::fs::read_link(LINK).is_ok_and(|target| target == Path::new(AGENT)) {
        return Ok(());
    }
    let folder = Path::new(LINK).parent().unwrap_or(Path::new("/"));
    std::fs::create_dir_all(folder)?;
    let fresh = folder.join(format!(".{NAME}.new"));
    // A former attempt's leftover is in the way of the new link only.
    let _ = std::fs::remove_file(&fresh);
    std::os::unix::fs::symlink(AGENT, &fresh)?;
    std::fs::rename(&fresh, LINK)
}

async fn serve(socket: &UnixStream, reaper: &Reaper) {
    let reply = match call(socket, reaper).await {
        Ok(Some(reply)) => reply,
        Ok(None) => return,
        Err(message) => Reply::Refused { message },
    };
    // A caller that is gone needs no answer.
    let _ = local::send_frame(socket, &reply, &[]).await;
}

async fn call(socket: &UnixStream, reaper: &Reaper) -> Result<Option<Reply>, String> {
    let credentials = socket.peer_cred().map_err(|error| format!("cannot tell who asks: {error}"))?;
    let received =
        local::recv_frame::<Call>(socket).await.map_err(|error| format!("the request: {error}"))?;
    let Some((call, fds)) = received else { return Ok(None) };
    let caller = users::lookup(&credentials.uid().to_string())
        .map_err(|_| format!("user {} has no entry in /etc/passwd", credentials.uid()))?;
    if !may(&caller) {
        return Err(format!("{} is not allowed to become another user here", caller.name));
    }
    let target = users::lookup(&call.user).map_err(|error| error.to_string())?;
    let started = start_command(reaper, &call, &caller, &target, fds)?;
    Ok(Some(wait(socket, reaper, started).await))
}

/// Root, members of `sudo`, `wheel` or `admin`, and whom the sudoers files give everything without a password.
fn may(caller: &User) -> bool {
    caller.uid == 0
        || caller.groups.iter().any(|gid| {
            users::group_name(*gid).is_some_and(|name| ["sudo", "wheel", "admin"].contains(&name.as_str()))
        })
        || sudoers().iter().any(|text| grants(text, &caller.name))
}

fn sudoers() -> Vec<String> {
    let mut files = vec![PathBuf::from(SUDOERS)];
    let listed = std::fs::read_dir(SUDOERS_DIR).into_iter().flatten().flatten();
    files.extend(listed.take(64).map(|entry| entry.path()));
    files.iter().filter_map(|path| std::fs::read_to_string(path).ok()).collect()
}

fn grants(text: &str, name: &str) -> bool {
    text.lines().any(|line| {
        let mut words = line.split_whitespace();
        words.next() == Some(name) && line.contains("NOPASSWD:") && line.trim_end().ends_with("ALL")
    })
}

fn start_command(
    reaper: &Reaper,
    call: &Call,
    caller: &User,
    target: &User,
    fds: Vec<OwnedFd>,
) -> Result<Started, String> {
    let [stdin, stdout, stderr]: [OwnedFd; 3] =
        fds.try_into().map_err(|_| "the three standard descriptors did not come along".to_owned())?;
    let (program, arguments) = command_line(call, target);
    let mut command = Command::new(&program);
    command.args(arguments).env_clear().envs(variables(call, caller, target));
    command.stdin(Stdio::from(stdin)).stdout(Stdio::from(stdout)).stderr(Stdio::from(stderr));
    let cwd = if call.login { target.home.clone() } else { PathBuf::from(&call.cwd) };
    let identity = Identity { uid: target.uid, gid: target.gid, groups: target.groups.clone() };
    let setup = Setup {
        identity: Some(identity),
        cwd: CString::new(cwd.as_os_str().as_bytes()).ok(),
        session: true,
        umask: Some(0o022),
        cgroup_procs: limits::procs(),
        ..Setup::default()
    };
    prepare(&mut command, setup);
    reaper.spawn(&mut command).map_err(|error| match error.kind() {
        io::ErrorKind::NotFound => format!("{program}: command not found"),
        _ => format!("cannot start {program} in {}: {error}", cwd.display()),
    })
}

fn command_line(call: &Call, target: &User) -> (String, Vec<String>) {
    let shell = target.shell.to_string_lossy().into_owned();
    match (call.login, call.command.split_first()) {
        (true, None) => (shell, vec!["-l".to_owned()]),
        (true, Some(_)) => {
            let quoted: Vec<String> = call.command.iter().map(|word| quote(word)).collect();
            (shell, vec!["-l".to_owned(), "-c".to_owned(), quoted.join(" ")])
        }
        (false, None) => (shell, Vec::new()),
        (false, Some((program, rest))) => (program.clone(), rest.to_vec()),
    }
}

/// So that a shell reads the word back as it was.
fn quote(word: &str) -> String {
    format!("'{}'", word.replace('\'', r"'\''"))
}

fn variables(call: &Call, caller: &User, target: &User) -> BTreeMap<String, String> {
    let mut env = call.env.clone();
    env.retain(|name, value| !name.is_empty() && !name.contains(['=', '\0']) && !value.contains('\0'));
    let home = target.home.to_string_lossy().into_owned();
    let shell = target.shell.to_string_lossy().into_owned();
    for (name, value) in [
        ("PATH", SECURE_PATH.to_owned()),
        ("HOME", home),
        ("USER", target.name.clone()),
        ("LOGNAME", target.name.clone()),
        ("SHELL", shell),
        ("SUDO_USER", caller.name.clone()),
        ("SUDO_UID", caller.uid.to_string()),
        ("SUDO_GID", caller.gid.to_string()),
        ("SUDO_COMMAND", call.command.join(" ")),
    ] {
        if !(call.keep_env && name == "PATH" && env.contains_key("PATH")) {
            env.insert(name.to_owned(), value);
        }
    }
    env
}

/// Passes signals on until the command ended; a caller that goes away hangs the command up.
async fn wait(socket: &UnixStream, reaper: &Reaper, started: Started) -> Reply {
    let pid = started.pid;
    let forward = async {
        while let Ok(Some((forward, _))) = local::recv_frame::<Forward>(socket).await {
            if let Some(signal) = Signal::from_named_raw(forward.signal) {
                // Already over: then there is nothing to tell.
                let _ = reaper.signal_group(pid, signal);
            }
        }
        let _ = reaper.signal_group(pid, Signal::HUP);
        std::future::pending::<()>().await;
    };
    tokio::select! {
        exit = started.exit => match exit {
            Ok(Exit::Code(code)) => Reply::Ended { code },
            Ok(Exit::Signal(signal)) => Reply::Killed { signal },
            Err(_) => Reply::Refused { message: "the command's end was not seen".to_owned() },
        },
        () = forward => Reply::Refused { message: "the caller is gone".to_owned() },
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sudoers_lines_grant_by_name() {
        assert!(grants("user ALL=(ALL) NOPASSWD:ALL\n", "user"));
        assert!(grants("# x\nuser\tALL=(ALL:ALL) NOPASSWD: ALL", "user"));
        assert!(!grants("user ALL=(ALL) ALL", "user"));
        assert!(!grants("other ALL=(ALL) NOPASSWD:ALL", "user"));
        assert!(!grants("# user ALL=(ALL) NOPASSWD:ALL", "user"));
    }

    #[test]
    fn words_survive_a_login_shell() {
        let output =
            Command::new("sh").args(["-c", &format!("printf %s {}", quote("it's a $HOME `x`"))]).output();
        assert_eq!(output.unwrap().stdout, b"it's a $HOME `x`");
    }
}
