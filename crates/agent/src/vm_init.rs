//! Process 1 of a microVM, from the initramfs to `agent init`.
//!
//! ```text
//! modules → /dev/vda (ext4) → its mounts → it becomes / → interfaces, host name → vsock → exec agent init --machine
//! ```
//!
//! Everything here happens once and in order; what fails is told on the console, and the machine ends. `/run` and
//! `/tmp` stay on the disk: an image's files there are as visible as in a container.

use std::convert::Infallible;
use std::fs;
use std::io;
use std::net::Ipv4Addr;
use std::os::fd::OwnedFd;
use std::os::unix::fs::PermissionsExt as _;
use std::os::unix::process::CommandExt as _;
use std::path::Path;
use std::process::{Command, ExitCode};
use std::time::{Duration, Instant};

use dormouse_sys::guest::{CID_HOST, connect_vsock, set_loopback_up};
use dormouse_sys::net::{GATEWAY, set_up_guest};
use rustix::fs::{CWD, Mode, OFlags};
use rustix::mount::{
    MountFlags, MoveMountFlags, OpenTreeFlags, mount, mount_move, mount_remount, move_mount, open_tree,
};
use rustix::process::{Resource, Rlimit, chdir, chroot, setrlimit};
use rustix::system::{RebootCommand, finit_module, reboot, sethostname};

/// The host's end of the carrier.
const CARRIER_PORT: u32 = 1024;
/// Where the initramfs has the modules, and which comes after which (`crates/image/src/initramfs.rs`).
const MODULES: &str = "/modules";
const ORDER: &str = "/modules/order";
const MODULES_MAX: usize = 64;
const SELF: &str = "/init";
const DISK: &str = "/dev/vda";
const CARD: &str = "eth0";
const RESOLV_CONF: &str = "/etc/resolv.conf";
const ROOT: &str = "/newroot";
/// Where every sandbox has the agent.
const AGENT: &str = "/usr/lib/dormouse/agent";
/// Devices answer at once, unless the host is very busy.
const DISK_PATIENCE: Duration = Duration::from_secs(10);
const HOST_PATIENCE: Duration = Duration::from_secs(20);
const POLL: Duration = Duration::from_millis(2);
/// As containers have it: more than anything needs, and no more than costs nothing.
const OPEN_FILES_MAX: u64 = 1 << 20;

/// Goes on by `exec`; a failure ends the machine.
pub fn run() -> ExitCode {
    let Err(why) = start();
    end(&why);
    ExitCode::FAILURE
}

/// Tells why on the console and ends the machine: the monitor sees a reset. Comes back only where nobody may
/// do that; a process 1 that then ends makes the kernel panic, which resets the machine as well.
pub fn end(why: &str) {
    eprintln!("dormouse: this machine ends: {why}");
    rustix::fs::sync();
    // What is written is on the disk; this only spares the next boot the journal.
    let _ = mount_remount("/", MountFlags::RDONLY, c"");
    if let Err(error) = reboot(RebootCommand::Restart) {
        eprintln!("dormouse: cannot end it: {error}");
    }
}

type Step<T> = Result<T, String>;

/// `cannot WHAT: the system's reason`.
fn cannot<T, E: std::fmt::Display>(what: &str, done: Result<T, E>) -> Step<T> {
    done.map_err(|error| format!("cannot {what}: {error}"))
}

fn start() -> Step<Infallible> {
    if std::process::id() != 1 {
        return Err("this is for process 1 of a virtual machine".to_owned());
    }
    cannot("mount /dev", mount("dev", "/dev", "devtmpfs", MountFlags::NOSUID, None))?;
    load_modules()?;
    let agent = mount_root()?;
    become_root(&agent)?;
    drop(agent);
    settle();
    let carrier =
        cannot("reach the host", wait_for(HOST_PATIENCE, || connect_vsock(CID_HOST, CARRIER_PORT)))?;
    cannot("use the carrier as standard input", rustix::stdio::dup2_stdin(&carrier))?;
    cannot("use the carrier as standard output", rustix::stdio::dup2_stdout(&carrier))?;
    drop(carrier);
    let mut command = Command::new(AGENT);
    command
        .args(["init", "--machine"])
        .env_clear()
        .env("PATH", "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin")
        .env("HOME", "/root")
        .env("LANG", "C.UTF-8");
    Err(format!("cannot execute {AGENT}: {}", command.exec()))
}

fn load_modules() -> Step<()> {
    let order = cannot(&format!("read {ORDER}"), fs::read_to_string(ORDER))?;
    for name in order.lines().take(MODULES_MAX) {
        let path = Path::new(MODULES).join(name);
        let loaded = fs::File::open(&path)
            .and_then(|file| finit_module(file, c"", 0).map_err(io::Error::from))
            .or_else(|error| match error.kind() {
                // In this kernel already.
                io::ErrorKind::AlreadyExists => Ok(()),
                _ => Err(error),
            });
        cannot(&format!("load the module {name}"), loaded)?;
        // The initramfs is memory, and stays: what was read is given back.
        let _ = fs::remove_file(path);
    }
    Ok(())
}

/// Mounts the root disk with all that belongs into it; gives the agent, as a mount that is nowhere yet.
fn mount_root() -> Step<OwnedFd> {
    cannot(&format!("find the root disk {DISK}"), wait_for(DISK_PATIENCE, || fs::metadata(DISK)))?;
    cannot("make the root's mount point", fs::create_dir_all(ROOT))?;
    // Reading must not write: a snapshot would keep it.
    cannot("mount the root disk", mount(DISK, ROOT, "ext4", MountFlags::NOATIME, None))?;
    let hardened = MountFlags::NOSUID | MountFlags::NODEV | MountFlags::NOEXEC;
    for (name, kind, flags, mode) in [("proc", "proc", hardened, 0o555), ("sys", "sysfs", hardened, 0o555)] {
        let target = point(name, mode)?;
        cannot(&format!("mount /{name}"), mount(kind, &target, kind, flags, None))?;
    }
    cannot("move /dev", mount_move("/dev", point("dev", 0o755)?))?;
    let terminals = c"gid=5,mode=620,ptmxmode=666";
    let no_exec = MountFlags::NOSUID | MountFlags::NOEXEC;
    cannot("mount /dev/pts", mount("devpts", point("dev/pts", 0o755)?, "devpts", no_exec, Some(terminals)))?;
    let shared = MountFlags::NOSUID | MountFlags::NODEV;
    cannot("mount /dev/shm", mount("shm", point("dev/shm", 0o1777)?, "tmpfs", shared, Some(c"mode=1777")))?;
    // A kernel without control groups runs everything but the limit on processes.
    let _ = mount("cgroup2", format!("{ROOT}/sys/fs/cgroup"), "cgroup2", hardened, Some(c"nsdelegate"));
    let flags = OpenTreeFlags::OPEN_TREE_CLONE | OpenTreeFlags::OPEN_TREE_CLOEXEC;
    let agent = cannot("take the agent along", open_tree(CWD, SELF, flags))?;
    Ok(agent)
}

/// A mount point of the root disk, made if it is missing.
fn point(name: &str, mode: u32) -> Step<String> {
    let path = format!("{ROOT}/{name}");
    if !Path::new(&path).is_dir() {
        cannot(&format!("make /{name}"), fs::create_dir_all(&path))?;
        cannot(&format!("make /{name}"), fs::set_permissions(&path, fs::Permissions::from_mode(mode)))?;
    }
    Ok(path)
}

/// The root disk becomes `/` (`util-linux`'s switch_root does the same), with the agent in its place.
fn become_root(agent: &OwnedFd) -> Step<()> {
    cannot("enter the root disk", chdir(ROOT))?;
    cannot("move the root disk", mount_move(".", "/"))?;
    cannot("change to the root disk", chroot("."))?;
    cannot("change to the root disk", chdir("/"))?;
    if let Some(folder) = Path::new(AGENT).parent() {
        cannot(&format!("make {}", folder.display()), fs::create_dir_all(folder))?;
    }
    let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::CLOEXEC;
    cannot(&format!("make {AGENT}"), rustix::fs::open(AGENT, flags, Mode::from_raw_mode(0o755)))?;
    let placed = move_mount(agent, "", CWD, AGENT, MoveMountFlags::MOVE_MOUNT_F_EMPTY_PATH);
    cannot(&format!("put the agent at {AGENT}"), placed)?;
    // Root inside could replace it otherwise, and would end its own machine.
    let read_only = MountFlags::BIND | MountFlags::RDONLY;
    cannot(&format!("protect {AGENT}"), mount_remount(AGENT, read_only, c""))
}

/// What a machine has beside its files; none of it is worth not starting for.
fn settle() {
    let note = |what: &str, done: io::Result<()>| {
        if let Err(error) = done {
            eprintln!("dormouse: cannot {what}: {error}");
        }
    };
    for (link, target) in [("fd", "/proc/self/fd"), ("stdin", "fd/0"), ("stdout", "fd/1"), ("stderr", "fd/2")]
    {
        note("link /dev/fd", std::os::unix::fs::symlink(target, Path::new("/dev").join(link)));
    }
    for (folder, mode) in [("/run", 0o755), ("/tmp", 0o1777)] {
        if !Path::new(folder).is_dir() {
            let made = fs::create_dir_all(folder)
                .and_then(|()| fs::set_permissions(folder, fs::Permissions::from_mode(mode)));
            note(&format!("make {folder}"), made);
        }
    }
    note("set the loopback interface up", set_loopback_up());
    note("set the network card up", set_up_card());
    let limit = Rlimit { current: Some(OPEN_FILES_MAX), maximum: Some(OPEN_FILES_MAX) };
    note("raise the number of open files", setrlimit(Resource::Nofile, limit).map_err(io::Error::from));
    let name = fs::read_to_string("/etc/hostname").unwrap_or_default();
    let name = Some(name.trim()).filter(|name| !name.is_empty()).unwrap_or("localhost");
    note("set the host name", sethostname(name.as_bytes()).map_err(io::Error::from));
}

/// The same address in every machine, so that a fork has nothing to change. A machine without a card reaches out
/// through the agent's proxies.
fn set_up_card() -> io::Result<()> {
    if !set_up_guest(CARD)? {
        return Ok(());
    }
    let text = fs::read_to_string(RESOLV_CONF)?;
    match at_gateway(&text) {
        Some(text) => fs::write(RESOLV_CONF, text),
        None => Ok(()),
    }
}

/// Names are asked for in the network instead of the agent, who is deaf while a machine is restored. A file that an
/// image's maker wrote stays.
fn at_gateway(resolv_conf: &str) -> Option<String> {
    let agents = format!("nameserver {}\n", Ipv4Addr::LOCALHOST);
    resolv_conf.contains(&agents).then(|| resolv_conf.replace(&agents, &format!("nameserver {GATEWAY}\n")))
}

/// Tries until it succeeds or the time is over; the last error is what is told.
fn wait_for<T>(patience: Duration, mut attempt: impl FnMut() -> io::Result<T>) -> io::Result<T> {
    let began = Instant::now();
    loop {
        match attempt() {
            Err(error) if began.elapsed() > patience => return Err(error),
            Err(_) => std::thread::sleep(POLL),
            done => return done,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn waiting_is_bounded_and_tells_the_last_error() {
        let mut attempts = 0;
        let done = wait_for(Duration::from_secs(60), || {
            attempts += 1;
            if attempts < 3 { Err(io::ErrorKind::NotFound.into()) } else { Ok(attempts) }
        });
        assert_eq!(done.unwrap(), 3);
        let failed = wait_for::<()>(Duration::ZERO, || Err(io::ErrorKind::ConnectionRefused.into()));
        assert_eq!(failed.unwrap_err().kind(), io::ErrorKind::ConnectionRefused);
    }

    #[test]
    fn only_the_agents_own_line_is_changed() {
        let changed = at_gateway("nameserver 127.0.0.1\noptions timeout:5\n");
        assert_eq!(changed.as_deref(), Some("nameserver 198.18.0.1\noptions timeout:5\n"));
        assert_eq!(at_gateway("nameserver 127.0.0.11\n"), None);
        assert_eq!(at_gateway(""), None);
    }

    #[test]
    fn it_is_for_process_1_alone() {
        assert!(start().unwrap_err().contains("process 1"));
    }
}
