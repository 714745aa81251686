//! Starting a program without copying the parent's memory first: `clone(CLONE_VM | CLONE_VFORK)`.
//!
//! Where every new address space is expensive (gVisor: several milliseconds) this is the larger part
//! of what a short command costs. The caller's thread stands still until the child has executed the
//! program or given up, on a stack of its own and with all signals blocked, so that nothing of the
//! parent runs in it.
//!
//! System calls are what it costs (gVisor: 11 µs each), so the child undoes only those dispositions of
//! signals that differ from the default ones. They are looked up at the first launch: handlers are to
//! be installed before that.

use std::ffi::{CString, OsStr, OsString, c_char, c_int, c_void};
use std::io;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::ptr;
use std::sync::OnceLock;

use rustix::io::Errno;

use crate::child::{Setup, become_child};

const STACK_BYTES: usize = 64 << 10;
const PATH_DEFAULT: &[u8] = b"/bin:/usr/bin";
const SHELL: &std::ffi::CStr = c"/bin/sh";
const SIGNALS: std::ops::RangeInclusive<c_int> = 1..=64;
const GAVE_UP: c_int = 127;

/// What is started, as `execvp` would: a name without a slash is looked for on the child's own `PATH`.
#[derive(Debug)]
pub struct Launch {
    pub program: OsString,
    /// Without the program's own name.
    pub args: Vec<OsString>,
    /// All of the child's variables.
    pub env: Vec<(OsString, OsString)>,
    /// Standard input, output and error. Everything else must be close-on-exec.
    pub stdio: [OwnedFd; 3],
    pub setup: Setup,
}

impl Launch {
    /// The child's number. It is the caller's to wait for; after an error there is none.
    pub fn spawn(self) -> io::Result<u32> {
        let prepared = Prepared::new(self)?;
        let mut stack: Vec<u128> = Vec::with_capacity(STACK_BYTES / size_of::<u128>());
        // SAFETY: one past the end of the allocation, which is aligned to 16 bytes.
        let top = unsafe { stack.as_mut_ptr().add(stack.capacity()) };
        let mut shared = Shared { prepared: &prepared, failed: 0 };
        let argument = (&raw mut shared).cast::<c_void>();
        let flags = libc::CLONE_VM | libc::CLONE_VFORK | libc::SIGCHLD;
        let blocked = Blocked::all()?;
        // SAFETY: the child runs `enter` on `stack`; both it and `shared` outlive the child's use of
        // them, as this thread goes on only once the child has executed or ended.
        let pid = unsafe { libc::clone(enter, top.cast(), flags, argument) };
        let cloned = if pid < 0 { Err(io::Error::last_os_error()) } else { Ok(pid) };
        drop(blocked);
        let pid = cloned?;
        // SAFETY: as above. The child wrote it, which the compiler cannot see.
        let failed = unsafe { ptr::read_volatile(&raw const shared.failed) };
        if failed != 0 {
            collect(pid);
            return Err(io::Error::from_raw_os_error(failed));
        }
        Ok(pid.unsigned_abs())
    }
}

/// The child has given up: nobody shall hear of it.
fn collect(pid: c_int) {
    if let Some(pid) = rustix::process::Pid::from_raw(pid) {
        while let Err(Errno::INTR) =
            rustix::process::waitpid(Some(pid), rustix::process::WaitOptions::empty())
        {}
    }
}

/// While it lives, this thread takes no signals. The C library's own are among those blocked.
struct Blocked(u64);

impl Blocked {
    fn all() -> io::Result<Self> {
        let mut former = 0;
        set_mask(u64::MAX, &mut former)?;
        Ok(Self(former))
    }
}

impl Drop for Blocked {
    fn drop(&mut self) {
        // It cannot fail with a mask that the kernel gave.
        let _ = set_mask(self.0, &mut 0);
    }
}

fn set_mask(mask: u64, former: &mut u64) -> io::Result<()> {
    // SAFETY: both point to a mask of the size that is given.
    let done = unsafe {
        libc::syscall(libc::SYS_rt_sigprocmask, libc::SIG_SETMASK, &raw const mask, &raw mut *former, 8_usize)
    };
    if done < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

/// A list as `execve` takes it.
struct Strings {
    /// Points into `_owned`.
    pointers: Vec<*const c_char>,
    _owned: Vec<CString>,
}

impl Strings {
    fn new(owned: Vec<CString>) -> Self {
        let pointers = owned.iter().map(|one| one.as_ptr()).chain([ptr::null()]).collect();
        Self { pointers, _owned: owned }
    }
}

/// Everything that the child needs, so that it allocates nothing.
struct Prepared {
    /// What the program may be, in order.
    candidates: Vec<CString>,
    args: Strings,
    /// The same for a script without an interpreter's name, one per candidate.
    script_args: Vec<Strings>,
    env: Strings,
    stdio: [OwnedFd; 3],
    setup: Setup,
    oom: Option<String>,
    signals: &'static [c_int],
}

impl Prepared {
    fn new(launch: Launch) -> io::Result<Self> {
        let Launch { program, args, env, stdio, setup } = launch;
        let candidates = candidates(&program, &env)?;
        let rest = args.into_iter().map(text).collect::<io::Result<Vec<_>>>()?;
        let script = |path: &CString| {
            Strings::new([SHELL.to_owned(), path.clone()].into_iter().chain(rest.iter().cloned()).collect())
        };
        let script_args = candidates.iter().map(script).collect();
        let args = [text(program)?].into_iter().chain(rest).collect();
        let pair = |(mut name, value): (OsString, OsString)| {
            name.push("=");
            name.push(value);
            text(name)
        };
        let env = env.into_iter().map(pair).collect::<io::Result<Vec<_>>>()?;
        let oom = setup.oom_score_adj.map(|score| score.to_string());
        Ok(Self {
            candidates,
            args: Strings::new(args),
            script_args,
            env: Strings::new(env),
            stdio: above_standard(stdio)?,
            setup,
            oom,
            signals: not_default(),
        })
    }
}

fn text(text: OsString) -> io::Result<CString> {
    CString::new(text.into_vec()).map_err(|error| io::Error::new(io::ErrorKind::InvalidInput, error))
}

fn candidates(program: &OsStr, env: &[(OsString, OsString)]) -> io::Result<Vec<CString>> {
    if program.is_empty() {
        return Err(io::ErrorKind::NotFound.into());
    }
    if program.as_bytes().contains(&b'/') {
        return Ok(vec![text(program.to_owned())?]);
    }
    let path = env.iter().find(|(name, _)| name == "PATH").map_or(PATH_DEFAULT, |(_, path)| path.as_bytes());
    path.split(|byte| *byte == b':')
        .map(|folder| {
            let folder = if folder.is_empty() { b".".as_slice() } else { folder };
            text(OsString::from_vec([folder, b"/", program.as_bytes()].concat()))
        })
        .collect()
}

/// One that has a standard number already would be overwritten before it is used.
fn above_standard(given: [OwnedFd; 3]) -> io::Result<[OwnedFd; 3]> {
    let mut moved = given;
    for fd in &mut moved {
        if fd.as_raw_fd() <= libc::STDERR_FILENO {
            *fd = rustix::io::fcntl_dupfd_cloexec(&*fd, libc::STDERR_FILENO + 1)?;
        }
    }
    Ok(moved)
}

struct Shared<'a> {
    prepared: &'a Prepared,
    /// Error number of what the child gave up for.
    failed: c_int,
}

/// The child, in its parent's memory.
extern "C" fn enter(argument: *mut c_void) -> c_int {
    // SAFETY: it is the parent's `Shared`, which nobody else uses meanwhile.
    let shared = unsafe { &mut *argument.cast::<Shared>() };
    let error = shared.prepared.run();
    // SAFETY: a place of the parent's, which reads it after this process has ended.
    unsafe { ptr::write_volatile(&raw mut shared.failed, error.raw_os_error().unwrap_or(libc::EIO)) };
    // SAFETY: ends this process alone and runs nothing of the parent's.
    unsafe { libc::_exit(GAVE_UP) }
}

impl Prepared {
    /// Comes back only with an error.
    fn run(&self) -> io::Error {
        match self.become_it() {
            Ok(()) => self.execute(),
            Err(error) => error,
        }
    }

    fn become_it(&self) -> io::Result<()> {
        for (number, fd) in (0..).zip(&self.stdio) {
            duplicate(fd.as_raw_fd(), number)?;
        }
        become_child(&self.setup, self.oom.as_deref())?;
        for signal in self.signals {
            default_action(*signal);
        }
        set_mask(0, &mut 0)
    }

    fn execute(&self) -> io::Error {
        let mut denied = false;
        for (path, script_args) in self.candidates.iter().zip(&self.script_args) {
            let error = execve(path.as_ptr(), &self.args, &self.env);
            match error.raw_os_error() {
                Some(libc::ENOEXEC) => return execve(SHELL.as_ptr(), script_args, &self.env),
                Some(libc::EACCES) => denied = true,
                Some(libc::ENOENT | libc::ENOTDIR) => {}
                _ => return error,
            }
        }
        io::Error::from_raw_os_error(if denied { libc::EACCES } else { libc::ENOENT })
    }
}

fn duplicate(fd: RawFd, number: c_int) -> io::Result<()> {
    // SAFETY: takes numbers only.
    if unsafe { libc::dup2(fd, number) } < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

/// Handler, flags, restorer and mask, as the kernel has them.
type Action = [u64; 4];

/// Signals that this process handles or ignores.
fn not_default() -> &'static [c_int] {
    static FOUND: OnceLock<Vec<c_int>> = OnceLock::new();
    FOUND.get_or_init(|| SIGNALS.filter(|signal| !has_default_action(*signal)).collect())
}

fn has_default_action(signal: c_int) -> bool {
    let mut action: Action = [0; 4];
    let asked = ptr::null::<c_void>();
    // SAFETY: the kernel writes one action, whose mask has the size that is given.
    let done = unsafe { libc::syscall(libc::SYS_rt_sigaction, signal, asked, &raw mut action, 8_usize) };
    done < 0 || action[0] == libc::SIG_DFL as u64
}

/// A handler of the parent's must not run here; what it ignores is not this program's affair.
fn default_action(signal: c_int) {
    static DEFAULT: Action = [0; 4];
    // SAFETY: the kernel reads one action, whose mask has the size that is given.
    let _ = unsafe {
        libc::syscall(libc::SYS_rt_sigaction, signal, &raw const DEFAULT, ptr::null_mut::<c_void>(), 8_usize)
    };
}

fn execve(path: *const c_char, args: &Strings, env: &Strings) -> io::Error {
    // SAFETY: the path and both lists end with a null, and what they point to is alive.
    unsafe { libc::execve(path, args.pointers.as_ptr(), env.pointers.as_ptr()) };
    io::Error::last_os_error()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs::File;
    use std::io::Read;

    fn launch(program: &str, args: &[&str]) -> (Launch, File) {
        let (ours, theirs) = rustix::pipe::pipe_with(rustix::pipe::PipeFlags::CLOEXEC).unwrap();
        let launch = Launch {
            program: program.into(),
            args: args.iter().map(OsString::from).collect(),
            env: vec![("PATH".into(), "/nowhere:/bin:/usr/bin".into()), ("A".into(), "b c".into())],
            stdio: [File::open("/dev/null").unwrap().into(), theirs.try_clone().unwrap(), theirs],
            setup: Setup::default(),
        };
        (launch, File::from(ours))
    }

    fn output(launch: Launch, mut from: File) -> String {
        let pid = launch.spawn().unwrap();
        let mut text = String::new();
        from.read_to_string(&mut text).unwrap();
        collect(i32::try_from(pid).unwrap());
        text
    }

    #[test]
    fn it_runs_with_its_own_variables_session_and_signals() {
        let script =
            "echo $A; umask; pwd; cut -d' ' -f6 /proc/$$/stat; echo $$; grep Sig[BI] /proc/self/status";
        let (mut launch, from) = launch("sh", &["-c", script]);
        launch.setup =
            Setup { session: true, umask: Some(0o027), cwd: Some(c"/usr".into()), ..Setup::default() };
        let text = output(launch, from);
        let lines: Vec<&str> = text.lines().collect();
        assert_eq!(&lines[..3], ["b c", "0027", "/usr"]);
        assert_eq!(lines[3], lines[4], "it leads its session");
        for line in &lines[5..] {
            assert!(line.ends_with("0000000000000000"), "signals are as in a new login: {line}");
        }
    }

    #[test]
    fn a_script_without_an_interpreter_is_the_shells() {
        let path = std::env::temp_dir().join(format!("launch-script-{}", std::process::id()));
        std::fs::write(&path, "echo $1\n").unwrap();
        std::fs::set_permissions(&path, std::os::unix::fs::PermissionsExt::from_mode(0o755)).unwrap();
        let (launch, from) = launch(path.to_str().unwrap(), &["given"]);
        let text = output(launch, from);
        std::fs::remove_file(&path).unwrap();
        assert_eq!(text, "given\n");
    }

    #[test]
    fn what_cannot_be_started_is_an_error_and_leaves_no_child() {
        let (nothing, _) = launch("no-such-program", &[]);
        assert_eq!(nothing.spawn().unwrap_err().kind(), io::ErrorKind::NotFound);
        let (folder, _) = launch("/usr", &[]);
        assert_eq!(folder.spawn().unwrap_err().kind(), io::ErrorKind::PermissionDenied);
        let (mut no_folder, _) = launch("true", &[]);
        no_folder.setup.cwd = Some(c"/nowhere".into());
        assert_eq!(no_folder.spawn().unwrap_err().kind(), io::ErrorKind::NotFound);
        let (nul, _) = launch("true", &["a\0b"]);
        assert_eq!(nul.spawn().unwrap_err().kind(), io::ErrorKind::InvalidInput);
    }

    #[test]
    fn many_at_a_time_from_many_threads() {
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    for round in 0..20 {
                        let (launch, from) = launch("echo", &[&round.to_string()]);
                        assert_eq!(output(launch, from), format!("{round}\n"));
                    }
                });
            }
        });
    }
}
