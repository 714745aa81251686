//! The control protocol of a monitor: what the engine asks, what the monitor answers, both ends.
//!
//! A frame on the Unix stream socket `DIR/monitor.sock` is its length (4 bytes, little endian), then
//! JSON; descriptors travel beside its bytes (SCM_RIGHTS), as many as one message holds beside each of the first. One request, one answer, in order, per
//! connection; several connections may be open. The client blocks; the monitor's side ([`Peer`]) never
//! does, as it is read from the thread that serves the devices.
//!
//! Descriptors, always in this order: `carrier_in` (the monitor reads it and passes it to the guest),
//! `carrier_out` (the guest's bytes go there), then one tap if [`Machine::net`] asks for it. [`Request::Boot`],
//! [`Request::Restore`] and [`Request::Carrier`] take one such set, [`Request::Fork`] one per child, all others none.
//!
//! Invariant: a frame's length is checked before room is made for it; unknown fields, too long lists and
//! a wrong number of descriptors are refused, and the descriptors closed.

mod frame;

use std::io;
use std::os::fd::BorrowedFd;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

pub use frame::{Event, Peer};
use frame::{Inbox, Progress, encode, send};

/// The socket's name in the monitor's folder.
pub const SOCKET: &str = "monitor.sock";
/// Why the monitor ended, in its folder: an [`Exit`].
pub const EXIT_FILE: &str = "exit.json";
/// Which pages a lazy restore touched first: in the monitor's folder once it is known, and for the next restore in the
/// snapshot's.
pub const WORKING_SET: &str = "working-set";
pub const PROTOCOL_VERSION: u32 = 1;
pub const FRAME_BYTES_MAX: usize = 256 << 10;
/// What one SCM_RIGHTS message can hold (SCM_MAX_FD, unix(7)).
const FDS_PER_MESSAGE: usize = 253;
/// Beside one frame: a fork into as many children as there may be needs so many.
pub const FDS_MAX: usize = CHILDREN_MAX * 3;
pub const VCPUS_MAX: u8 = 32;
pub const MEMORY_MIB_MAX: u32 = 64 << 10;
pub const DISKS_MAX: usize = 4;
/// Layers of one disk below its upper one.
pub const LAYERS_MAX: usize = 64;
pub const CHILDREN_MAX: usize = 100;
pub const CMDLINE_BYTES_MAX: usize = 1024;
const PATH_BYTES_MAX: usize = 4096;

/// One disk of the guest, `/dev/vda` first.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Disk {
    /// Read-only files below everything that this sandbox writes, bottom first; at least one. The lowest
    /// one's length is the disk's size. A snapshot's own layers are not named here: they lie in its folder.
    pub layers: Vec<PathBuf>,
    /// True: no upper layer is made, and the guest sees a read-only disk.
    #[serde(default)]
    pub read_only: bool,
}

/// What the guest is made of; the same at boot and at restore.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Machine {
    pub vcpus: u8,
    pub memory_mib: u32,
    pub disks: Vec<Disk>,
    /// A baseline that CPU features are masked to: `host`, `x86-64-v2` or `x86-64-v3`. `None`: `host`.
    #[serde(default)]
    pub cpu_template: Option<String>,
    /// True: a network device on the tap that is passed as third descriptor.
    #[serde(default)]
    pub net: bool,
    /// False: guest memory is kept in 4 KiB pages.
    #[serde(default = "yes")]
    pub huge_pages: bool,
}

fn yes() -> bool {
    true
}

impl Machine {
    /// Descriptors that a monitor of such a machine is given.
    #[must_use]
    pub fn fds(&self) -> usize {
        2 + usize::from(self.net)
    }
}

/// How a guest starts that comes from no snapshot.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Kernel {
    /// An ELF vmlinux or a bzImage.
    pub image: PathBuf,
    #[serde(default)]
    pub initramfs: Option<PathBuf>,
    /// Put after the monitor's own words.
    #[serde(default)]
    pub cmdline_extra: String,
}

/// A monitor that a fork makes.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ForkChild {
    /// An empty folder: the child's socket and its upper disk layers go there.
    pub dir: PathBuf,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub enum Request {
    Hello {},
    /// Starts the guest; it runs when the answer comes.
    Boot {
        machine: Machine,
        kernel: Kernel,
    },
    /// Loads a snapshot; the guest is paused until [`Request::Resume`].
    Restore {
        machine: Machine,
        snapshot_dir: PathBuf,
        /// True: memory is brought by a pager when the guest touches it; false: it is mapped from the files.
        #[serde(default)]
        lazy: bool,
    },
    Pause {},
    Resume {},
    /// Writes a snapshot into `into`, a folder that is there and empty, while the guest runs on. Answered
    /// when its files are complete and synced.
    Checkpoint {
        into: PathBuf,
    },
    /// The same, and the guest stays paused.
    CheckpointHold {
        into: PathBuf,
    },
    /// Makes children that go on from this instant, each paused until `Resume` reaches its own socket. The
    /// source runs on if it was running.
    Fork {
        children: Vec<ForkChild>,
    },
    /// Puts other ends in the place of the carrier's, and another tap: whoever held the other side of the former
    /// ones is gone.
    /// What was read from the guest and not yet written goes to the new ones.
    Carrier {},
    Status {},
    /// Ends the monitor. The answer comes before.
    Stop {},
}

impl Request {
    /// Checks what the types do not say.
    fn validate(&self) -> Result<(), String> {
        match self {
            Self::Boot { machine, kernel } => {
                validate_machine(machine)?;
                path(&kernel.image)?;
                kernel.initramfs.as_deref().map_or(Ok(()), path)?;
                cmdline(&kernel.cmdline_extra)
            }
            Self::Restore { machine, snapshot_dir, .. } => {
                validate_machine(machine)?;
                path(snapshot_dir)
            }
            Self::Checkpoint { into } | Self::CheckpointHold { into } => path(into),
            Self::Fork { children } => {
                within("children", children.len(), 1, CHILDREN_MAX)?;
                children.iter().try_for_each(|child| path(&child.dir))
            }
            Self::Hello {}
            | Self::Pause {}
            | Self::Resume {}
            | Self::Carrier {}
            | Self::Status {}
            | Self::Stop {} => Ok(()),
        }
    }

    /// How many descriptors must come with it, where the running machine has `per_machine` of them.
    #[must_use]
    pub fn fds(&self, per_machine: usize) -> usize {
        match self {
            Self::Boot { machine, .. } | Self::Restore { machine, .. } => machine.fds(),
            Self::Fork { children } => children.len() * per_machine,
            Self::Carrier {} => per_machine,
            _ => 0,
        }
    }
}

fn within(what: &str, given: usize, min: usize, max: usize) -> Result<(), String> {
    if (min..=max).contains(&given) {
        return Ok(());
    }
    Err(format!("{what}: {given} is not between {min} and {max}"))
}

fn path(path: &Path) -> Result<(), String> {
    let bytes = path.as_os_str().as_encoded_bytes();
    if path.is_absolute() && bytes.len() <= PATH_BYTES_MAX && !bytes.contains(&0) {
        return Ok(());
    }
    Err(format!("{}: not an absolute path of at most {PATH_BYTES_MAX} bytes", path.display()))
}

fn cmdline(words: &str) -> Result<(), String> {
    within("cmdline_extra, bytes", words.len(), 0, CMDLINE_BYTES_MAX)?;
    if words.bytes().all(|byte| (b' '..=b'~').contains(&byte)) {
        return Ok(());
    }
    Err("cmdline_extra: only printable ASCII can be passed to a kernel".into())
}

fn validate_machine(machine: &Machine) -> Result<(), String> {
    within("vcpus", machine.vcpus.into(), 1, VCPUS_MAX.into())?;
    within("memory_mib", machine.memory_mib as usize, 1, MEMORY_MIB_MAX as usize)?;
    within("disks", machine.disks.len(), 0, DISKS_MAX)?;
    for disk in &machine.disks {
        within("layers of a disk", disk.layers.len(), 1, LAYERS_MAX)?;
        disk.layers.iter().try_for_each(|layer| path(layer))?;
    }
    Ok(())
}

/// What a monitor's guest is doing.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum State {
    /// No guest yet.
    Empty,
    Running,
    Paused,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Status {
    pub state: State,
    pub vcpus: u8,
    pub memory_mib: u32,
    /// CPU time of the monitor and so of its guest, microseconds.
    pub cpu_us: u64,
    /// Snapshots being written now.
    pub scribes: u32,
}

/// A snapshot that is complete in its folder.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Checkpointed {
    /// How long the guest stood still, microseconds.
    pub stopped_us: u64,
    /// Bytes written into the new memory layer.
    pub memory_bytes: u64,
    /// Every file of the snapshot, in the order: devices, memory layers bottom first, disk layers.
    pub files: Vec<SnapshotFile>,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SnapshotFile {
    pub name: String,
    /// Logical length, holes and all.
    pub bytes: u64,
    /// True: a link to a file that another snapshot or sandbox holds too, and that never changes again.
    pub shared: bool,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Forked {
    pub stopped_us: u64,
    /// Process ids of the children's monitors, in the order asked for.
    pub pids: Vec<u32>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ErrorCode {
    /// The request makes no sense, or not in this state.
    BadRequest,
    /// The snapshot or a layer is damaged or does not fit.
    BadSnapshot,
    /// The host refused something.
    Host,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub enum Answer {
    Hello { version: u32, pid: u32 },
    Done {},
    Checkpointed(Checkpointed),
    Forked(Forked),
    Status(Status),
    Error { code: ErrorCode, message: String },
}

/// How the guest or the monitor ended: the content of [`EXIT_FILE`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Exit {
    pub reason: ExitReason,
    /// For people.
    pub message: String,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ExitReason {
    /// Asked to by [`Request::Stop`].
    Stopped,
    /// The guest shut down.
    GuestPowerOff,
    /// The guest rebooted: a panic with `panic=-1` does this, too.
    GuestReset,
    /// The guest did what no guest may: triple fault, an exit that cannot be served.
    GuestFault,
    /// A device cannot go on.
    DeviceFailed,
    /// KVM or the host refused something.
    HostFailed,
}

#[derive(Debug, thiserror::Error)]
pub enum ClientError {
    #[error("cannot reach the monitor in {}", dir.display())]
    Connect { dir: PathBuf, source: io::Error },
    #[error("the connection to the monitor failed while it was asked to {what}")]
    Io { what: &'static str, source: io::Error },
    #[error("the monitor cannot {what}: {message}")]
    Refused { what: &'static str, code: ErrorCode, message: String },
    #[error("the monitor answered {what} with something else: {answer}")]
    Unexpected { what: &'static str, answer: String },
}

/// The engine's end: blocks.
#[derive(Debug)]
pub struct Client {
    stream: UnixStream,
}

impl Client {
    /// Connects to the monitor of `dir`.
    pub fn connect(dir: &Path) -> Result<Self, ClientError> {
        let failed = |source| ClientError::Connect { dir: dir.to_path_buf(), source };
        let stream = dormouse_sys::unix::connect(dir, SOCKET).map_err(failed)?;
        Ok(Self { stream })
    }

    /// Connects to a monitor that may still be starting, trying until `timeout` is over.
    pub fn connect_within(dir: &Path, timeout: Duration) -> Result<Self, ClientError> {
        let deadline = Instant::now() + timeout;
        loop {
            match Self::connect(dir) {
                Err(error) if Instant::now() >= deadline => return Err(error),
                Err(_) => std::thread::sleep(Duration::from_millis(1)),
                Ok(client) => return Ok(client),
            }
        }
    }

    /// An answer that takes longer is an error, and the connection of no use afterwards. `None`: no limit.
    pub fn set_timeout(&self, timeout: Option<Duration>) -> io::Result<()> {
        self.stream.set_read_timeout(timeout)?;
        self.stream.set_write_timeout(timeout)
    }

    /// The monitor's version of this protocol, and its process id.
    pub fn hello(&mut self) -> Result<(u32, u32), ClientError> {
        match self.call("say hello", &Request::Hello {}, &[])? {
            Answer::Hello { version, pid } => Ok((version, pid)),
            other => Err(unexpected("hello", &other)),
        }
    }

    pub fn boot(
        &mut self,
        machine: Machine,
        kernel: Kernel,
        fds: &[BorrowedFd<'_>],
    ) -> Result<(), ClientError> {
        self.done("boot", &Request::Boot { machine, kernel }, fds)
    }

    pub fn restore(
        &mut self,
        machine: Machine,
        snapshot_dir: PathBuf,
        lazy: bool,
        fds: &[BorrowedFd<'_>],
    ) -> Result<(), ClientError> {
        self.done("restore", &Request::Restore { machine, snapshot_dir, lazy }, fds)
    }

    pub fn pause(&mut self) -> Result<(), ClientError> {
        self.done("pause", &Request::Pause {}, &[])
    }

    pub fn resume(&mut self) -> Result<(), ClientError> {
        self.done("resume", &Request::Resume {}, &[])
    }

    /// `hold`: the guest stays paused.
    pub fn checkpoint(&mut self, into: PathBuf, hold: bool) -> Result<Checkpointed, ClientError> {
        let request = if hold { Request::CheckpointHold { into } } else { Request::Checkpoint { into } };
        match self.call("checkpoint", &request, &[])? {
            Answer::Checkpointed(done) => Ok(done),
            other => Err(unexpected("checkpoint", &other)),
        }
    }

    /// `fds`: a set per child, in their order.
    pub fn fork(&mut self, children: Vec<ForkChild>, fds: &[BorrowedFd<'_>]) -> Result<Forked, ClientError> {
        match self.call("fork", &Request::Fork { children }, fds)? {
            Answer::Forked(done) => Ok(done),
            other => Err(unexpected("fork", &other)),
        }
    }

    /// `fds`: one set, as at boot.
    pub fn carrier(&mut self, fds: &[BorrowedFd<'_>]) -> Result<(), ClientError> {
        self.done("take another carrier", &Request::Carrier {}, fds)
    }

    pub fn status(&mut self) -> Result<Status, ClientError> {
        match self.call("tell its state", &Request::Status {}, &[])? {
            Answer::Status(status) => Ok(status),
            other => Err(unexpected("status", &other)),
        }
    }

    pub fn stop(&mut self) -> Result<(), ClientError> {
        self.done("stop", &Request::Stop {}, &[])
    }

    fn done(
        &mut self,
        what: &'static str,
        request: &Request,
        fds: &[BorrowedFd<'_>],
    ) -> Result<(), ClientError> {
        match self.call(what, request, fds)? {
            Answer::Done {} => Ok(()),
            other => Err(unexpected(what, &other)),
        }
    }

    fn call(
        &mut self,
        what: &'static str,
        request: &Request,
        fds: &[BorrowedFd<'_>],
    ) -> Result<Answer, ClientError> {
        let io = |source| ClientError::Io { what, source };
        send(&self.stream, &encode(request).map_err(io)?, fds).map_err(io)?;
        let mut inbox = Inbox::default();
        let body = loop {
            match inbox.read(&self.stream).map_err(io)? {
                Progress::Frame(body) => break body,
                Progress::More => {}
                Progress::End => return Err(io(io::ErrorKind::UnexpectedEof.into())),
            }
        };
        match serde_json::from_slice(&body).map_err(|error| io(error.into()))? {
            Answer::Error { code, message } => Err(ClientError::Refused { what, code, message }),
            answer => Ok(answer),
        }
    }
}

fn unexpected(what: &'static str, answer: &Answer) -> ClientError {
    ClientError::Unexpected { what, answer: format!("{answer:?}") }
}

#[cfg(test)]
mod tests;
