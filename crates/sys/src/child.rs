//! What a child process does between fork and exec to become somebody else's process.
//!
//! Everything is prepared before the fork; in between only raw system calls are made, as the parent
//! may have other threads that hold locks. (A child that shares its parent's memory until it executes
//! something, which spares the copy of the page tables: [`crate::launch`].)

use std::ffi::CString;
use std::io;
use std::os::unix::process::CommandExt;
use std::process::Command;

/// Whom the child runs as.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Identity {
    pub uid: u32,
    pub gid: u32,
    /// Supplementary groups.
    pub groups: Vec<u32>,
}

/// How the child differs from its parent.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Setup {
    /// `None`: as the parent.
    pub identity: Option<Identity>,
    /// Entered with the child's own rights; `None`: as the parent.
    pub cwd: Option<CString>,
    /// Makes the child lead a new session, and so a new process group of its own.
    pub session: bool,
    /// Makes standard input, a terminal, the session's controlling one.
    pub controlling_terminal: bool,
    pub umask: Option<u32>,
    /// A control group's list of processes that the child writes itself into, before it changes its user.
    pub cgroup_procs: Option<CString>,
    /// -1000 (never) to 1000 (first), for the kernel's choice when memory runs out. Best effort.
    pub oom_score_adj: Option<i16>,
}

/// Arranges for `setup` to be carried out in the child. An error of any step is `spawn`'s error.
pub fn prepare(command: &mut Command, setup: Setup) {
    let oom = setup.oom_score_adj.map(|score| score.to_string());
    // SAFETY: the closure makes system calls on memory that exists before the fork; it takes no
    // lock and allocates nothing.
    unsafe {
        command.pre_exec(move || become_child(&setup, oom.as_deref()));
    }
}

pub(crate) fn become_child(setup: &Setup, oom: Option<&str>) -> io::Result<()> {
    if setup.session {
        rustix::process::setsid()?;
    }
    if setup.controlling_terminal {
        rustix::process::ioctl_tiocsctty(rustix::stdio::stdin())?;
    }
    if let Some(mask) = setup.umask {
        rustix::process::umask(rustix::fs::Mode::from_raw_mode(mask & 0o777));
    }
    if let Some(score) = oom {
        // Some kernels have no such file, and that changes nothing for the child.
        let _ = write_oom_score(score);
    }
    if let Some(path) = &setup.cgroup_procs {
        join(path)?;
    }
    if let Some(identity) = &setup.identity {
        assume(identity)?;
    }
    if let Some(cwd) = &setup.cwd {
        rustix::process::chdir(cwd.as_c_str())?;
    }
    Ok(())
}

fn write_oom_score(score: &str) -> io::Result<()> {
    use rustix::fs::{Mode, OFlags};
    let file =
        rustix::fs::open(c"/proc/self/oom_score_adj", OFlags::WRONLY | OFlags::CLOEXEC, Mode::empty())?;
    rustix::io::write(&file, score.as_bytes())?;
    Ok(())
}

/// Writes the child's own number, as not every kernel takes 0 for "me".
fn join(path: &CString) -> io::Result<()> {
    use rustix::fs::{Mode, OFlags};
    let mut digits = [0_u8; 10];
    let mut at = digits.len();
    let mut number = rustix::process::getpid().as_raw_nonzero().get().unsigned_abs();
    while number > 0 {
        at -= 1;
        digits[at] = b"0123456789"[(number % 10) as usize];
        number /= 10;
    }
    let file = rustix::fs::open(path.as_c_str(), OFlags::WRONLY | OFlags::CLOEXEC, Mode::empty())?;
    rustix::io::write(&file, &digits[at..])?;
    Ok(())
}

fn check(result: libc::c_long) -> io::Result<()> {
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

/// Groups first: after setuid there is no right to change them.
fn assume(identity: &Identity) -> io::Result<()> {
    let groups = identity.groups.as_ptr();
    // SAFETY: the pointer and the length are one slice's, which is alive. The raw call, as the C
    // library's would signal threads that this process does not have.
    check(unsafe { libc::syscall(libc::SYS_setgroups, identity.groups.len(), groups) })?;
    // SAFETY: takes numbers only.
    check(unsafe { libc::syscall(libc::SYS_setresgid, identity.gid, identity.gid, identity.gid) })?;
    // SAFETY: takes numbers only.
    check(unsafe { libc::syscall(libc::SYS_setresuid, identity.uid, identity.uid, identity.uid) })?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::process::Stdio;

    #[test]
    fn the_child_has_its_own_session_mask_and_folder() {
        let mut command = Command::new("/bin/sh");
        command.args([
            "-c",
            "umask; pwd; ps -o sid= -p $$ >/dev/null 2>&1; echo $$; cut -d' ' -f6 /proc/$$/stat",
        ]);
        command.stdin(Stdio::null()).stdout(Stdio::piped());
        let setup = Setup {
            cwd: Some(c"/usr".into()),
            session: true,
            umask: Some(0o027),
            oom_score_adj: Some(100),
            ..Setup::default()
        };
        prepare(&mut command, setup);
        let output = String::from_utf8(command.output().unwrap().stdout).unwrap();
        let lines: Vec<&str> = output.lines().collect();
        assert_eq!(&lines[..2], ["0027", "/usr"]);
        assert_eq!(lines[2], lines[3], "the child leads its session");
    }

    #[test]
    fn the_child_names_itself_to_its_group() {
        let list = std::env::temp_dir().join(format!("cgroup-procs-{}", std::process::id()));
        std::fs::write(&list, "").unwrap();
        let path = CString::new(list.to_str().unwrap()).unwrap();
        let mut command = Command::new("/bin/true");
        prepare(&mut command, Setup { cgroup_procs: Some(path), ..Setup::default() });
        let mut child = command.spawn().unwrap();
        let pid = child.id();
        child.wait().unwrap();
        let written = std::fs::read_to_string(&list).unwrap();
        std::fs::remove_file(&list).unwrap();
        assert_eq!(written, pid.to_string());
    }

    #[test]
    fn a_missing_folder_fails_the_spawn() {
        let mut command = Command::new("/bin/true");
        prepare(&mut command, Setup { cwd: Some(c"/nowhere".into()), ..Setup::default() });
        assert_eq!(command.status().unwrap_err().kind(), io::ErrorKind::NotFound);
    }

    #[test]
    fn root_becomes_somebody_else() {
        if !rustix::process::geteuid().is_root() {
            return;
        }
        let mut command = Command::new("/usr/bin/id");
        let identity = Identity { uid: 65534, gid: 65534, groups: vec![65534, 27] };
        prepare(&mut command, Setup { identity: Some(identity), ..Setup::default() });
        let output = String::from_utf8(command.output().unwrap().stdout).unwrap();
        assert!(output.starts_with("uid=65534"), "{output}");
        assert!(output.contains("gid=65534") && output.contains("27"), "{output}");
    }
}
