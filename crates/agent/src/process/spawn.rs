//! How a process is started: its user, variables, folder, pipes or terminal.

use std::collections::BTreeMap;
use std::ffi::CString;
use std::fs::File;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStrExt as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use dormouse_sys::child::{Identity, Setup};
use dormouse_sys::launch::Launch;
use dormouse_wire::envd::connect::Error;
use dormouse_wire::envd::process::{ProcessConfig, PtySize};
use rustix::fs::{Mode, OFlags};
use rustix::pipe::{PipeFlags, pipe_with};
use rustix::pty::{OpenptFlags, openpt, ptsname, unlockpt};
use rustix::termios::Winsize;

use super::fd::Fd;
use super::output::Kind;
use super::reaper::{Reaper, Started};
use crate::context::Settings;
use crate::egress;
use crate::limits;
use crate::users::User;

const PATH_DEFAULT: &str = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";

/// A process as it is wished for.
pub struct Plan {
    pub config: ProcessConfig,
    pub user: User,
    pub pty: Option<PtySize>,
    pub stdin: bool,
}

/// A started process and the agent's ends of what connects to it.
pub struct Spawned {
    pub started: Started,
    /// Where input goes; `None`: `/dev/null`.
    pub input: Option<Arc<Fd>>,
    pub pty: Option<Arc<Fd>>,
    pub outputs: Vec<(Kind, Arc<Fd>)>,
}

/// Starts it, or says in the protocol's words why not.
pub fn spawn(reaper: &Reaper, settings: &Settings, plan: &Plan) -> Result<Spawned, Error> {
    if plan.config.cmd.is_empty() {
        return Err(Error::invalid_argument("the process has no cmd"));
    }
    let cwd = folder(settings, plan)?;
    let env = variables(settings, plan)?;
    let setup = Setup {
        identity: Some(Identity { uid: plan.user.uid, gid: plan.user.gid, groups: plan.user.groups.clone() }),
        cwd: CString::new(cwd.as_os_str().as_bytes()).ok(),
        session: true,
        controlling_terminal: plan.pty.is_some(),
        umask: Some(0o022),
        cgroup_procs: limits::procs(),
        // Inherited from the agent: a look into `/proc` per process would stay in gVisor's memory, and
        // in every image.
        oom_score_adj: None,
    };
    let launch = |stdio: [OwnedFd; 3]| Launch {
        program: plan.config.cmd.clone().into(),
        args: plan.config.args.iter().map(Into::into).collect(),
        env: env.into_iter().map(|(name, value)| (name.into(), value.into())).collect(),
        stdio,
        setup,
    };
    let connected = match plan.pty {
        Some(size) => with_terminal(reaper, launch, size, &plan.user),
        None => with_pipes(reaper, launch, plan.stdin),
    };
    connected.map_err(|why| refused(plan, &cwd, &why))
}

fn refused(plan: &Plan, cwd: &Path, why: &io::Error) -> Error {
    let message = format!(
        "cannot start {:?} as {} in {}: {why}",
        plan.config.cmd.chars().take(200).collect::<String>(),
        plan.user.name,
        cwd.display()
    );
    match why.kind() {
        io::ErrorKind::WouldBlock | io::ErrorKind::OutOfMemory => Error::resource_exhausted(message),
        io::ErrorKind::NotFound
        | io::ErrorKind::PermissionDenied
        | io::ErrorKind::InvalidInput
        | io::ErrorKind::ExecutableFileBusy
        | io::ErrorKind::ArgumentListTooLong
        | io::ErrorKind::IsADirectory
        | io::ErrorKind::NotADirectory => Error::invalid_argument(message),
        // No constant of std for ENOEXEC: neither a program nor a script.
        _ if why.raw_os_error() == Some(rustix::io::Errno::NOEXEC.raw_os_error()) => {
            Error::invalid_argument(message)
        }
        _ => Error::internal(message),
    }
}

/// The folder asked for must exist; the default one is given up for `/` when it does not.
fn folder(settings: &Settings, plan: &Plan) -> Result<PathBuf, Error> {
    let default = settings.default_workdir.as_deref().unwrap_or(&plan.user.home);
    let Some(given) = plan.config.cwd.as_deref().filter(|cwd| !cwd.is_empty()) else {
        return Ok(if default.is_dir() { default.to_owned() } else { PathBuf::from("/") });
    };
    let path = match given.strip_prefix('~') {
        Some("") => plan.user.home.clone(),
        Some(rest) if rest.starts_with('/') => plan.user.home.join(rest.trim_start_matches('/')),
        _ => default.join(given),
    };
    match std::fs::metadata(&path) {
        Ok(metadata) if metadata.is_dir() => Ok(path),
        Ok(_) => Err(Error::invalid_argument(format!("cwd '{}' is not a directory", path.display()))),
        Err(_) => Err(Error::invalid_argument(format!("cwd '{}' does not exist", path.display()))),
    }
}

/// The later ones win: the user's, the egress proxies', the sandbox's, the request's.
fn variables(settings: &Settings, plan: &Plan) -> Result<BTreeMap<String, String>, Error> {
    let path = std::env::var("PATH").ok().filter(|path| !path.is_empty());
    let home = plan.user.home.to_string_lossy().into_owned();
    let mut all = BTreeMap::from([
        ("PATH".to_owned(), path.unwrap_or_else(|| PATH_DEFAULT.to_owned())),
        ("HOME".to_owned(), home),
        ("USER".to_owned(), plan.user.name.clone()),
        ("LOGNAME".to_owned(), plan.user.name.clone()),
    ]);
    if plan.pty.is_some() {
        all.insert("TERM".to_owned(), "xterm-256color".to_owned());
    }
    if settings.egress {
        all.extend(egress::proxy_env());
    }
    all.extend(settings.trust_env.clone());
    all.extend(settings.env.clone());
    for (name, value) in &plan.config.envs {
        if name.is_empty() || name.contains(['=', '\0']) || value.contains('\0') {
            return Err(Error::invalid_argument(format!("the variable {name:?} cannot be set")));
        }
        all.insert(name.clone(), value.clone());
    }
    Ok(all)
}

fn with_pipes(
    reaper: &Reaper,
    launch: impl FnOnce([OwnedFd; 3]) -> Launch,
    stdin: bool,
) -> io::Result<Spawned> {
    let (child_stdin, input) = if stdin {
        let (child, ours) = pipe_with(PipeFlags::CLOEXEC)?;
        (child, Some(Arc::new(Fd::new(ours)?)))
    } else {
        (File::open("/dev/null")?.into(), None)
    };
    let (stdout, child_stdout) = pipe_with(PipeFlags::CLOEXEC)?;
    let (stderr, child_stderr) = pipe_with(PipeFlags::CLOEXEC)?;
    let outputs =
        vec![(Kind::Stdout, Arc::new(Fd::new(stdout)?)), (Kind::Stderr, Arc::new(Fd::new(stderr)?))];
    // Our copies of the child's ends go with the launch.
    let started = reaper.launch(launch([child_stdin, child_stdout, child_stderr]))?;
    Ok(Spawned { started, input, pty: None, outputs })
}

fn with_terminal(
    reaper: &Reaper,
    launch: impl FnOnce([OwnedFd; 3]) -> Launch,
    size: PtySize,
    user: &User,
) -> io::Result<Spawned> {
    let (ours, child) = open_terminal(user)?;
    rustix::termios::tcsetwinsize(&ours, winsize(size))?;
    let ours = Arc::new(Fd::new(ours)?);
    let started = reaper.launch(launch([child.try_clone()?, child.try_clone()?, child]))?;
    Ok(Spawned {
        started,
        input: Some(ours.clone()),
        pty: Some(ours.clone()),
        outputs: vec![(Kind::Pty, ours)],
    })
}

fn open_terminal(user: &User) -> io::Result<(OwnedFd, OwnedFd)> {
    let ours = openpt(OpenptFlags::RDWR | OpenptFlags::NOCTTY | OpenptFlags::CLOEXEC)?;
    unlockpt(&ours)?;
    let name = ptsname(&ours, Vec::new())?;
    let child = rustix::fs::open(&name, OFlags::RDWR | OFlags::NOCTTY | OFlags::CLOEXEC, Mode::empty())?;
    // So that the user's programs can open it by name. Not all kernels allow it, and few need it.
    let _ = std::os::unix::fs::fchown(&child, Some(user.uid), Some(user.gid));
    Ok((ours, child))
}

/// A size as terminals have it; 0 would make many programs misbehave.
#[must_use]
pub fn winsize(size: PtySize) -> Winsize {
    let bound = |given: u32| u16::try_from(given.max(1)).unwrap_or(u16::MAX);
    Winsize { ws_row: bound(size.rows), ws_col: bound(size.cols), ws_xpixel: 0, ws_ypixel: 0 }
}
