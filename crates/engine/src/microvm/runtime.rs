//! One monitor on the host: its folder, process and group, and how it ends.
//!
//! Everything here is found again from the folder alone, so that a new daemon can go on or clean up.
//! All calls block.

use std::ffi::OsString;
use std::fs::{DirBuilder, File};
use std::io::{self, Read};
use std::os::unix::fs::{DirBuilderExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use dormouse_sys::cgroup::{Group, Limits};
use dormouse_sys::files::next_data;
use dormouse_sys::process::{self, Identity, PidFd};
use dormouse_types::{RuntimeId, Shape};
use dormouse_vmm::control::{
    Client, ClientError, EXIT_FILE, Exit, PROTOCOL_VERSION, SOCKET, State, WORKING_SET,
};
use serde::{Deserialize, Serialize};

use super::guest::Disk;
use super::users::{self, User};
use crate::common::{identity, io_failure};
use crate::error::Failure;
use crate::model::{RuntimeState, Usage};

const LOG: &str = "monitor.log";
const SERIAL: &str = "serial.log";
/// The snapshot that it started from, as links: it stays whole whatever becomes of the snapshot.
const FROM: &str = "from";
/// Threads of the monitor, its scribes, and children on their way to groups of their own.
const PIDS_MAX: u32 = 512;
const START_WAIT: Duration = Duration::from_secs(15);
/// Short questions.
const ANSWER_WAIT: Duration = Duration::from_secs(30);
/// Boot, restore, checkpoint: they move a sandbox's whole memory.
pub(super) const WORK_WAIT: Duration = Duration::from_secs(600);
const KILL_WAIT: Duration = Duration::from_secs(20);
const KILL_ROUNDS_MAX: usize = 20;
const WORDS_MAX: usize = 600;
const EXIT_BYTES_MAX: u64 = 64 << 10;

/// What is written down about a runtime.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(super) struct Meta {
    pub shape: Shape,
    pub disk: Disk,
    /// The agent that it was booted with.
    pub agent_digest: String,
    /// The guest has a network card.
    #[serde(default)]
    pub card: bool,
    /// `None`: the monitor was not started to the end.
    pub process: Option<Process>,
    /// Whom it runs as; `None`: as the daemon.
    pub user: Option<User>,
    /// A boot, restore or fork came to its end.
    pub started: bool,
    /// Its carrier is silent since a checkpoint that may be the last thing that becomes of it.
    pub held: bool,
}

#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
pub(super) struct Process(#[serde(with = "identity")] pub Identity);

/// A monitor's folder, what is written down of it, and its group; whether it lives is asked of the kernel each time.
#[derive(Debug, Clone)]
pub(super) struct Runtime {
    pub id: RuntimeId,
    pub dir: PathBuf,
    pub meta_path: PathBuf,
    pub group: Option<Group>,
}

impl Runtime {
    /// Makes its folder, with what is known of it so far.
    pub fn create(&self, meta: &Meta) -> Result<(), Failure> {
        DirBuilder::new().mode(0o700).create(&self.dir).map_err(io_failure("make the folder", &self.dir))?;
        meta.user.map_or(Ok(()), |user| users::lend(&self.dir, user))?;
        self.write_meta(meta)
    }

    pub fn exists(&self) -> bool {
        self.dir.is_dir()
    }

    fn write_meta(&self, meta: &Meta) -> Result<(), Failure> {
        let (path, temporary) = (&self.meta_path, self.meta_path.with_extension("tmp"));
        let bytes = serde_json::to_vec(meta).map_err(|error| io_failure("write", path)(error.into()))?;
        std::fs::write(&temporary, bytes).map_err(io_failure("write", &temporary))?;
        std::fs::rename(&temporary, path).map_err(io_failure("write", path))
    }

    pub fn change_meta(&self, change: impl FnOnce(&mut Meta)) -> Result<(), Failure> {
        let missing = || io_failure("read", &self.meta_path)(io::Error::from(io::ErrorKind::NotFound));
        let mut meta = self.meta().ok_or_else(missing)?;
        change(&mut meta);
        self.write_meta(&meta)
    }

    pub fn meta(&self) -> Option<Meta> {
        serde_json::from_slice(&std::fs::read(&self.meta_path).ok()?).ok()
    }

    /// Links a snapshot's files into its own folder. Returns where.
    pub fn link_snapshot(&self, snapshot: &Path, names: &[&str]) -> Result<PathBuf, Failure> {
        let from = self.dir.join(FROM);
        DirBuilder::new().mode(0o700).create(&from).map_err(io_failure("make the folder", &from))?;
        let gid = self.meta().and_then(|meta| meta.user).map(|user| user.gid);
        gid.map_or(Ok(()), |gid| users::let_pass(&from, gid))?;
        for name in names {
            match std::fs::hard_link(snapshot.join(name), from.join(name)) {
                Err(error) if error.kind() == io::ErrorKind::NotFound => {
                    return Err(Failure::Damaged {
                        file: (*name).to_owned(),
                        why: "it is missing".to_owned(),
                    });
                }
                // Snapshots may lie on a file system of their own.
                Err(error) if error.kind() == io::ErrorKind::CrossesDevices => {
                    copy_sparse(&snapshot.join(name), &from.join(name))
                        .map_err(io_failure("copy the snapshot's file", &snapshot.join(name)))?;
                }
                other => other.map_err(io_failure("link the snapshot's file", &snapshot.join(name)))?,
            }
            gid.map_or(Ok(()), |gid| users::let_read(&from.join(name), gid))?;
        }
        Ok(from)
    }

    /// What the snapshot's restores touch first, if that is known: it came after the snapshot's manifest.
    pub fn link_working_set(&self, snapshot: &Path, from: &Path) {
        // It may not be there, or on another file system: it is a hint.
        let _ = std::fs::hard_link(snapshot.join(WORKING_SET), from.join(WORKING_SET));
    }

    /// Gives the snapshot what its monitor found out about it, unless it knew that already.
    pub fn give_working_set(&self, snapshot: &Path) -> Result<(), Failure> {
        let (own, theirs) = (self.dir.join(WORKING_SET), snapshot.join(WORKING_SET));
        match std::fs::hard_link(&own, &theirs) {
            Err(error) if matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::AlreadyExists) => {
                Ok(())
            }
            other => other.map_err(io_failure("keep the working set in", snapshot)),
        }
    }

    /// Starts the monitor; it has no guest yet.
    pub fn start(&self, program: &[OsString], cpus: u32) -> Result<Client, Failure> {
        let Some((name, args)) = program.split_first() else {
            return Err(Failure::Monitor { why: "cannot be started: no program is configured".to_owned() });
        };
        let log_path = self.dir.join(LOG);
        let log = File::options().create(true).append(true).open(&log_path);
        let log = log.map_err(io_failure("open the monitor's log", &log_path))?;
        self.make_group(cpus)?;
        let mut command = Command::new(name);
        command.args(args);
        if let Some(User { uid, gid }) = self.meta().and_then(|meta| meta.user) {
            command.args(["--uid", &uid.to_string(), "--gid", &gid.to_string()]);
        }
        command.arg(&self.dir).stdin(Stdio::null()).stdout(Stdio::null()).stderr(log);
        command.current_dir("/");
        dormouse_sys::spawn::in_new_session(&mut command);
        let child = command.spawn().map_err(io_failure("start the monitor", Path::new(name)))?;
        let pid = child.id();
        let known = self.know(pid);
        reap(child);
        known?;
        self.greet(pid)
    }

    /// The first words with a monitor that is starting.
    fn greet(&self, pid: u32) -> Result<Client, Failure> {
        let until = std::time::Instant::now() + START_WAIT;
        loop {
            match self.connect(ANSWER_WAIT) {
                Ok(client) => return Ok(client),
                Err(_) if self.process().is_none() => {
                    return Err(Failure::Monitor { why: format!("ended at once: {}", self.why_ended()) });
                }
                Err(error) if std::time::Instant::now() > until => {
                    let why =
                        format!("(process {pid}) did not answer within {} s: {error}", START_WAIT.as_secs());
                    return Err(Failure::Monitor { why });
                }
                Err(_) => std::thread::sleep(Duration::from_millis(1)),
            }
        }
    }

    /// Writes down which process it is, and gives it its group.
    fn know(&self, pid: u32) -> Result<(), Failure> {
        let identity = Identity::of(pid);
        let ended = || Failure::Monitor { why: format!("ended at once: {}", self.why_ended()) };
        let identity = identity.ok_or_else(ended)?;
        self.change_meta(|meta| meta.process = Some(Process(identity)))?;
        if let Some(group) = &self.group {
            group.add(pid).map_err(io_failure("put the monitor into the group of", &self.dir))?;
        }
        Ok(())
    }

    /// The same for one that a fork made. `told`: what its source says; the kernel knows better.
    pub fn know_forked(&self, told: u32) -> Result<(), Failure> {
        let pid = self.listener().or(Some(told).filter(|pid| self.is_monitor(*pid)));
        let unknown =
            || Failure::Monitor { why: format!("made a process {told} that is none of its copies") };
        self.know(pid.ok_or_else(unknown)?)
    }

    /// The process that listens on its socket.
    fn listener(&self) -> Option<u32> {
        let stream = dormouse_sys::unix::connect(&self.dir, SOCKET).ok()?;
        let pid = rustix::net::sockopt::socket_peercred(&stream).ok()?.pid;
        u32::try_from(pid.as_raw_nonzero().get()).ok().filter(|pid| self.is_monitor(*pid))
    }

    /// Whether the process was started as a monitor in this data folder: nothing that a monitor says leads
    /// to the end of anything else.
    fn is_monitor(&self, pid: u32) -> bool {
        let Some(own) = self.dir.parent().and_then(Path::parent) else { return false };
        process::arguments(pid).iter().any(|argument| Path::new(argument).starts_with(own))
    }

    /// No limit of memory: what the guest can have is what it was given, and after a fork the pages that
    /// children still share with it stay charged to it.
    pub fn make_group(&self, cpus: u32) -> Result<(), Failure> {
        let Some(group) = &self.group else { return Ok(()) };
        let limits = Limits { memory_bytes: None, cpus: Some(cpus), pids: Some(PIDS_MAX) };
        group
            .create()
            .and_then(|()| group.set_limits(&limits))
            .map_err(io_failure("make the group of", &self.dir))
    }

    /// A connection to the monitor, which speaks this protocol.
    pub fn connect(&self, timeout: Duration) -> Result<Client, Failure> {
        let mut client = Client::connect(&self.dir).map_err(|error| self.failure(error))?;
        client
            .set_timeout(Some(timeout.min(ANSWER_WAIT)))
            .map_err(io_failure("speak to the monitor in", &self.dir))?;
        let (version, _) = client.hello().map_err(|error| self.failure(error))?;
        if version != PROTOCOL_VERSION {
            let why =
                format!("speaks version {version} of its protocol, this daemon version {PROTOCOL_VERSION}");
            return Err(Failure::Monitor { why });
        }
        client.set_timeout(Some(timeout)).map_err(io_failure("speak to the monitor in", &self.dir))?;
        Ok(client)
    }

    /// Asks the running monitor one thing.
    pub fn ask<T>(
        &self,
        timeout: Duration,
        question: impl FnOnce(&mut Client) -> Result<T, ClientError>,
    ) -> Result<T, Failure> {
        let mut client = self.connect(timeout)?;
        question(&mut client).map_err(|error| self.failure(error))
    }

    /// What a failed question means.
    pub fn failure(&self, error: ClientError) -> Failure {
        use dormouse_vmm::control::ErrorCode;
        if self.process().is_none() {
            return Failure::Exited { why: self.why_ended() };
        }
        match error {
            ClientError::Refused { message, .. } if message.contains("No space left") => {
                Failure::NoSpace { path: self.dir.clone() }
            }
            ClientError::Refused { code: ErrorCode::BadSnapshot, message, .. } => {
                Failure::Damaged { file: "of its memory, devices or disk".to_owned(), why: message }
            }
            ClientError::Refused { what, message, .. } => {
                Failure::Monitor { why: format!("cannot {what}: {message}") }
            }
            ClientError::Io { what, source } => {
                Failure::Monitor { why: format!("was asked to {what} and did not answer: {source}") }
            }
            ClientError::Connect { source, .. } => {
                Failure::Monitor { why: format!("cannot be reached: {source}") }
            }
            other @ ClientError::Unexpected { .. } => Failure::Monitor { why: other.to_string() },
        }
    }

    /// A handle of its process; `None`: it has ended or never was.
    pub fn process(&self) -> Option<PidFd> {
        match self.meta()?.process {
            Some(Process(identity)) => identity.open(),
            // Made by a fork whose daemon died before it wrote down what it made.
            None => Identity::of(self.listener()?)?.open(),
        }
    }

    /// What becomes of it without a daemon: nothing, so what it is can be seen.
    pub fn state(&self) -> RuntimeState {
        let Some(meta) = self.meta().filter(|meta| meta.started) else { return RuntimeState::Gone };
        if self.process().is_none() {
            return RuntimeState::Gone;
        }
        match self.ask(ANSWER_WAIT, Client::status) {
            Ok(status) if status.state == State::Running => RuntimeState::Running,
            Ok(status) if status.state == State::Paused => RuntimeState::Frozen,
            Ok(_) => RuntimeState::Gone,
            // It lives and is at something that takes long: a checkpoint whose daemon died.
            Err(error) => {
                tracing::warn!(runtime = %self.id, %error, "a monitor that lives does not tell its state");
                if meta.held { RuntimeState::Frozen } else { RuntimeState::Running }
            }
        }
    }

    pub fn usage(&self) -> Usage {
        let processes = self.processes();
        let (cpu_us, memory_bytes) = match &self.group {
            Some(group) => (group.cpu_us().unwrap_or(0), group.memory_bytes().unwrap_or(0)),
            None => (process::cpu_us(&processes), process::resident_bytes(&processes)),
        };
        Usage {
            cpu_us,
            memory_bytes,
            disk_bytes: own_bytes(&self.dir),
            processes: u32::try_from(processes.len()).unwrap_or(u32::MAX),
        }
    }

    /// All host processes that belong to it. Without a group: the monitor alone, for its children may be
    /// other sandboxes'.
    fn processes(&self) -> Vec<u32> {
        if let Some(procs) = self.group.as_ref().and_then(|group| group.procs().ok()) {
            return procs;
        }
        let known = self.meta().and_then(|meta| meta.process);
        known.filter(|process| process.0.is_alive()).map(|process| process.0.pid).into_iter().collect()
    }

    fn told_exit(&self) -> Option<Exit> {
        let mut bytes = Vec::new();
        // The monitor's own word: as long as it likes.
        File::open(self.dir.join(EXIT_FILE)).ok()?.take(EXIT_BYTES_MAX).read_to_end(&mut bytes).ok()?;
        serde_json::from_slice(&bytes).ok()
    }

    /// Why it ended, as far as the host can tell. Asked before [`Runtime::destroy`].
    pub fn why_ended(&self) -> String {
        if let Some(exit) = self.told_exit() {
            let message = shortened(&exit.message);
            return match last_line(&self.dir.join(SERIAL)) {
                Some(line) => format!("{message}; the guest's last words: {line}"),
                None => message,
            };
        }
        if self.group.as_ref().is_some_and(|group| group.oom_kills().is_ok_and(|kills| kills > 0)) {
            return "the host ran out of memory and its kernel ended the monitor".to_owned();
        }
        let words = last_line(&self.dir.join(LOG)).unwrap_or_else(|| "none".to_owned());
        format!("its monitor was killed or crashed; its last words: {words}")
    }

    /// Ends all its processes and removes everything that it had on the host. Idempotent.
    pub fn destroy(&self) -> Result<(), Failure> {
        self.kill()?;
        if let Some(group) = &self.group {
            group.remove().map_err(io_failure("remove the group of", &self.dir))?;
        }
        let gone = |done: io::Result<()>, path| match done {
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
            other => other.map_err(io_failure("remove", path)),
        };
        // The folder last: by it a runtime is found.
        gone(std::fs::remove_file(&self.meta_path), &self.meta_path)?;
        gone(std::fs::remove_dir_all(&self.dir), &self.dir)
    }

    /// Ends all its processes; what else it had stays. Idempotent.
    fn kill(&self) -> Result<(), Failure> {
        for _ in 0..KILL_ROUNDS_MAX {
            let others = self.processes().into_iter().filter_map(|pid| PidFd::open(pid).ok());
            let handles: Vec<PidFd> =
                self.process().into_iter().chain(others).filter(|handle| !handle.has_ended()).collect();
            if handles.is_empty() {
                return Ok(());
            }
            for handle in &handles {
                handle.kill().map_err(io_failure("end the processes of", &self.dir))?;
            }
            for handle in &handles {
                handle.wait(KILL_WAIT).map_err(io_failure("await the end of the processes of", &self.dir))?;
            }
        }
        let source = io::Error::new(io::ErrorKind::TimedOut, "new ones appear faster than they are ended");
        Err(io_failure("end the processes of", &self.dir)(source))
    }
}

/// While this process lives it is the monitor's parent: whoever ends must be waited for.
fn reap(mut child: std::process::Child) {
    let waiting = std::thread::Builder::new().name("monitor-reaper".to_owned()).stack_size(64 << 10);
    if let Err(error) = waiting.spawn(move || child.wait()) {
        tracing::warn!(%error, "a monitor's end will not be reaped");
    }
}

/// Copies what of the file is no hole.
fn copy_sparse(from: &Path, to: &Path) -> io::Result<()> {
    use std::io::{Read, Seek};
    let (mut from, mut to) = (File::open(from)?, File::create_new(to)?);
    let bytes = from.metadata()?.len();
    to.set_len(bytes)?;
    let mut at = 0;
    while let Some(data) = next_data(&from, at)? {
        from.seek(io::SeekFrom::Start(data.start))?;
        to.seek(io::SeekFrom::Start(data.start))?;
        if io::copy(&mut (&from).take(data.end - data.start), &mut to)? < data.end - data.start {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        at = data.end;
    }
    Ok(())
}

/// What the files below the folder occupy that nobody else has, too.
fn own_bytes(dir: &Path) -> u64 {
    let Ok(entries) = std::fs::read_dir(dir) else { return 0 };
    let metas = entries.flatten().filter_map(|entry| entry.metadata().ok());
    metas.filter(|meta| meta.is_file() && meta.nlink() == 1).map(|meta| meta.blocks() * 512).sum()
}

/// The last line of a log that says anything.
fn last_line(path: &Path) -> Option<String> {
    use std::os::unix::fs::FileExt;
    let file = File::open(path).ok()?;
    let bytes = file.metadata().ok()?.len();
    let mut tail = vec![0; 4096];
    let read = file.read_at(&mut tail, bytes.saturating_sub(4096)).ok()?;
    let text = String::from_utf8_lossy(&tail[..read]).into_owned();
    text.lines().map(str::trim).rfind(|line| !line.is_empty()).map(shortened)
}

fn shortened(text: &str) -> String {
    text.chars().filter(|c| !c.is_control()).take(WORDS_MAX).collect()
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::FileExt;

    use super::*;

    #[test]
    fn a_copy_has_the_holes_of_its_original() {
        let dir = tempfile::tempdir().unwrap();
        let (from, to) = (dir.path().join("from"), dir.path().join("to"));
        let file = File::create(&from).unwrap();
        file.set_len(1 << 40).unwrap();
        file.write_all_at(b"here", 1 << 30).unwrap();
        file.write_all_at(b"and there", (1 << 39) + 5).unwrap();
        copy_sparse(&from, &to).unwrap();
        let copied = File::open(&to).unwrap();
        let mut text = [0; 9];
        copied.read_exact_at(&mut text, (1 << 39) + 5).unwrap();
        assert_eq!(&text, b"and there");
        copied.read_exact_at(&mut text[..4], 1 << 30).unwrap();
        assert_eq!(&text[..4], b"here");
        let (was, is) = (file.metadata().unwrap(), copied.metadata().unwrap());
        assert_eq!((is.len(), is.blocks()), (was.len(), was.blocks()));
    }
}
