//! Keepers, the same for every engine: started, asked, found again, ended. All calls block, each for a bounded time.

use std::ffi::OsString;
use std::fs::File;
use std::io::{self, Read, Write};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use dormouse_sys::fds::Pipe;
use dormouse_sys::process::{self, Identity, PidFd};
use dormouse_types::{Generation, SandboxId};
use dormouse_wire::keeper::{
    AGENT_SOCKET, Answer, CONTROL_SOCKET, EgressRules, FRAME_BYTES_MAX, KEEPER_VERSION, LOG_FILE, Request,
    Session,
};

use crate::common::io_failure;
use crate::error::Failure;

const ANSWER_WAIT: Duration = Duration::from_secs(10);
const START_WAIT: Duration = Duration::from_secs(15);
const START_STEP: Duration = Duration::from_millis(2);
const END_WAIT: Duration = Duration::from_secs(3);
const PROCESS_FILE: &str = "keeper.json";
const LOG_TAIL_CHARS: usize = 400;

/// Both ends of the carrier's pipes: the host's and the sandbox's.
#[derive(Debug)]
pub(crate) struct Pipes {
    pub stdin: Pipe,
    pub stdout: Pipe,
}

impl Pipes {
    pub fn new() -> io::Result<Self> {
        Ok(Self { stdin: Pipe::new()?, stdout: Pipe::new()? })
    }

    pub fn inodes(&self) -> io::Result<[u64; 2]> {
        let inode = |end: &OwnedFd| rustix::fs::fstat(end).map(|stat| stat.st_ino);
        Ok([inode(&self.stdin.read)?, inode(&self.stdout.write)?])
    }

    /// In the order that the keeper's `Attach` names.
    pub fn for_keeper(&self) -> [&OwnedFd; 4] {
        [&self.stdin.write, &self.stdout.read, &self.stdin.read, &self.stdout.write]
    }
}

/// One sandbox's keeper, known by its folder.
#[derive(Debug, Clone)]
pub(crate) struct Keeper {
    pub sandbox: SandboxId,
    pub dir: PathBuf,
}

impl Keeper {
    /// Asks and awaits the answer; `fds` travel with the request.
    pub fn ask(&self, request: &Request, fds: &[BorrowedFd<'_>]) -> Result<Answer, Failure> {
        self.ask_for(request, fds).map(|(answer, _)| answer)
    }

    /// The same, with what came beside the answer.
    fn ask_for(&self, request: &Request, fds: &[BorrowedFd<'_>]) -> Result<(Answer, Vec<OwnedFd>), Failure> {
        let failed = |what: &str, error: io::Error| Failure::Keeper { why: format!("{what}: {error}") };
        let mut stream = dormouse_sys::unix::connect(&self.dir, CONTROL_SOCKET)
            .map_err(|error| failed("does not listen", error))?;
        match exchange(&mut stream, request, fds).map_err(|error| failed("does not answer", error))? {
            (Answer::Failed { message }, _) => Err(Failure::Keeper { why: format!("refused: {message}") }),
            answered => Ok(answered),
        }
    }

    /// The tap of the network that it serves.
    pub fn tap(&self) -> Result<OwnedFd, Failure> {
        let (_, fds) = self.ask_for(&Request::Tap, &[])?;
        let none = || Failure::Keeper { why: "answered without a tap".to_owned() };
        fds.into_iter().next().ok_or_else(none)
    }

    pub fn done(&self, request: &Request, fds: &[BorrowedFd<'_>]) -> Result<(), Failure> {
        match self.ask(request, fds)? {
            Answer::Done => Ok(()),
            other => Err(Failure::Keeper { why: format!("answered something else than asked: {other:?}") }),
        }
    }

    /// Gives it the pipes, under rules that hold from the first connection on.
    pub fn attach(
        &self,
        generation: Generation,
        session: Session,
        rules: EgressRules,
        ends: [BorrowedFd<'_>; 4],
    ) -> Result<(), Failure> {
        self.done(&Request::SetEgress { rules }, &[])?;
        self.done(&Request::Attach { generation, session }, &ends)
    }

    /// Whether a keeper of this protocol's version answers for this very sandbox.
    pub fn answers(&self) -> bool {
        matches!(
            self.ask(&Request::Hello, &[]),
            Ok(Answer::Hello { version: KEEPER_VERSION, sandbox, .. }) if sandbox == self.sandbox
        )
    }

    /// Makes sure that a keeper runs. True: it was started just now and has no session yet.
    pub fn ensure(&self, program: &[OsString]) -> Result<bool, Failure> {
        if self.answers() {
            return Ok(false);
        }
        self.end()?;
        std::fs::create_dir_all(&self.dir).map_err(io_failure("make the keeper's folder", &self.dir))?;
        for name in [CONTROL_SOCKET, AGENT_SOCKET, PROCESS_FILE] {
            remove_file(&self.dir.join(name))?;
        }
        self.start(program)?;
        Ok(true)
    }

    fn start(&self, program: &[OsString]) -> Result<(), Failure> {
        let Some((name, args)) = program.split_first() else {
            return Err(Failure::Keeper { why: "cannot be started: no program is configured".to_owned() });
        };
        let log_path = self.dir.join(LOG_FILE);
        let log = File::options().create(true).append(true).open(&log_path);
        let log = log.map_err(io_failure("open the keeper's log", &log_path))?;
        let mut command = Command::new(name);
        command.args(args).arg("--dir").arg(&self.dir).arg("--sandbox").arg(self.sandbox.as_str());
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(log).current_dir("/");
        dormouse_sys::spawn::in_new_session(&mut command);
        let mut child = command.spawn().map_err(io_failure("start the keeper", Path::new(name)))?;
        let identity = Identity::of(child.id());
        if let Some(identity) = identity {
            self.record(identity)?;
        }
        let until = Instant::now() + START_WAIT;
        let outcome = loop {
            if self.answers() {
                break Ok(());
            }
            match child.try_wait() {
                Ok(Some(status)) => break Err(format!("ended at once with {status}: {}", self.log_tail())),
                Err(error) => break Err(format!("cannot be watched: {error}")),
                Ok(None) if Instant::now() > until => {
                    let _ = child.kill();
                    break Err(format!(
                        "did not answer within {} s: {}",
                        START_WAIT.as_secs(),
                        self.log_tail()
                    ));
                }
                Ok(None) => std::thread::sleep(START_STEP),
            }
        };
        reap(child);
        outcome.map_err(|why| Failure::Keeper { why })
    }

    fn record(&self, identity: Identity) -> Result<(), Failure> {
        let path = self.dir.join(PROCESS_FILE);
        let text = format!("[{},{}]", identity.pid, identity.start_ticks);
        std::fs::write(&path, text).map_err(io_failure("record the keeper in", &path))
    }

    /// A handle of its process; `None`: it has ended.
    pub fn process(&self) -> Option<PidFd> {
        let bytes = std::fs::read(self.dir.join(PROCESS_FILE)).ok()?;
        let (pid, start_ticks) = serde_json::from_slice(&bytes).ok()?;
        Identity { pid, start_ticks }.open()
    }

    /// Ends the keeper: asked first, then killed. Idempotent.
    pub fn end(&self) -> Result<(), Failure> {
        let mut handles: Vec<PidFd> = self.process().into_iter().collect();
        if handles.is_empty() {
            handles = keepers_of(&self.dir).into_iter().filter_map(|pid| PidFd::open(pid).ok()).collect();
        }
        if handles.is_empty() {
            return Ok(());
        }
        let asked = self.ask(&Request::Shutdown, &[]);
        for handle in &handles {
            let ended = asked.is_ok() && handle.wait(END_WAIT).unwrap_or(false);
            if !ended {
                handle.kill().map_err(io_failure("end the keeper of", &self.dir))?;
                handle.wait(END_WAIT).map_err(io_failure("await the end of the keeper of", &self.dir))?;
            }
        }
        Ok(())
    }

    /// Ends the keeper and removes its folder. Idempotent.
    pub fn destroy(&self) -> Result<(), Failure> {
        self.end()?;
        match std::fs::remove_dir_all(&self.dir) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
            other => other.map_err(io_failure("remove the keeper's folder", &self.dir)),
        }
    }

    /// The last that it had to say.
    pub fn log_tail(&self) -> String {
        let text = std::fs::read_to_string(self.dir.join(LOG_FILE)).unwrap_or_default();
        let last = text.lines().rev().find(|line| !line.trim().is_empty());
        last.map_or_else(|| "its log is empty".to_owned(), |line| line.chars().take(LOG_TAIL_CHARS).collect())
    }
}

/// While this process lives it is the keeper's parent: whoever ends must be waited for.
fn reap(mut child: std::process::Child) {
    let waiting = std::thread::Builder::new().name("keeper-reaper".to_owned()).stack_size(64 << 10);
    if let Err(error) = waiting.spawn(move || child.wait()) {
        tracing::warn!(%error, "a keeper's end will not be reaped");
    }
}

/// Processes that were started as the keeper of this folder.
fn keepers_of(dir: &Path) -> Vec<u32> {
    let dir = dir.to_string_lossy();
    let is_one = |pid: &u32| {
        let arguments = process::arguments(*pid);
        let names_dir = |pair: &[String]| pair[0] == "--dir" && pair[1] == *dir;
        arguments.windows(2).any(names_dir) && arguments.iter().any(|argument| argument == "--sandbox")
    };
    process::pids().into_iter().filter(is_one).collect()
}

fn remove_file(path: &Path) -> Result<(), Failure> {
    match std::fs::remove_file(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        other => other.map_err(io_failure("remove", path)),
    }
}

fn exchange(
    stream: &mut UnixStream,
    request: &Request,
    fds: &[BorrowedFd<'_>],
) -> io::Result<(Answer, Vec<OwnedFd>)> {
    stream.set_read_timeout(Some(ANSWER_WAIT))?;
    stream.set_write_timeout(Some(ANSWER_WAIT))?;
    let body = serde_json::to_vec(request)?;
    let length = u32::try_from(body.len()).ok().filter(|length| *length as usize <= FRAME_BYTES_MAX);
    let length = length.ok_or_else(|| io::Error::from(io::ErrorKind::InvalidInput))?;
    let frame = [&length.to_le_bytes()[..], &body].concat();
    let sent = dormouse_sys::fds::send_with_fds(stream.as_fd(), &frame, fds)?;
    stream.write_all(&frame[sent..])?;
    let mut length = [0_u8; 4];
    let (got, beside) = dormouse_sys::fds::recv_with_fds(stream.as_fd(), &mut length)?;
    stream.read_exact(&mut length[got..])?;
    let length = u32::from_le_bytes(length) as usize;
    if length > FRAME_BYTES_MAX {
        return Err(io::Error::new(io::ErrorKind::InvalidData, format!("an answer of {length} bytes")));
    }
    let mut body = vec![0_u8; length];
    stream.read_exact(&mut body)?;
    Ok((serde_json::from_slice(&body)?, beside))
}
