//! The monitor: the process that runs one microVM, and its life.
//!
//! ```text
//!            boot ─────────────▶ running ◀──────── resume ───────┐
//!   empty ──┤                       │ │  └──────── pause ──────▶ paused ◀── a fork's child begins here
//!            restore ──▶ paused     │ │                           │
//!                                   │ └─ checkpoint: a scribe is forked, the guest runs on
//!                                   ▼
//!   ended: by request, by the guest, by a failure ── exit.json, and the process is gone
//! ```
//!
//! One thread, this one, owns everything: the control socket and the devices; only a disk's requests are served on a
//! thread of its own, as they may block. It is the thread that forks; before that every vCPU (`vcpu`) and every disk's
//! thread (`virtio::Worker`) is parked, so that the child has a whole picture of everything and no lock is
//! held. A forked child is one of two things: a [`scribe`] that writes a snapshot and is gone, or a monitor of its
//! own, which builds a new VM over the memory that it has from its parent.
//!
//! Invariants: a paused guest's devices take nothing from the host's side; what a request could not do leaves the
//! guest as it was; the monitor ends when its guest does, and its forked scribes with it.

mod children;
mod devices;
mod disks;
mod events;
mod guest;
mod probe;
pub(crate) mod process;
mod requests;
mod saved;
mod scribe;

use std::collections::{BTreeMap, VecDeque};
use std::fs::File;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};

use kvm_ioctls::Kvm;

use self::children::Plan;
use self::events::{Token, Watch};
use self::guest::Guest;
use self::process::Forked;
use crate::control::{self, Answer, EXIT_FILE, Event, Exit, ExitReason, Peer, Request};
use crate::ending::EndReason;
use crate::jail::{self, User};

/// Connections at once; more are closed at once.
const PEERS_MAX: usize = 64;
/// Without a guest and without anybody to give it one, a monitor ends after so long.
const ORPHAN_SECONDS: u64 = 60;

#[derive(Debug, thiserror::Error)]
pub enum MonitorError {
    #[error("the control socket cannot be made in {}", dir.display())]
    Socket { dir: PathBuf, source: io::Error },
    #[error("the monitor cannot wait for events")]
    Watch(#[source] io::Error),
    #[error("the monitor's jail cannot be closed")]
    Jail(#[source] jail::JailError),
    #[error("KVM cannot be used")]
    Kvm(#[source] crate::error::VmError),
    #[error("cannot write {}", path.display())]
    Exit { path: PathBuf, source: io::Error },
}

/// Runs the monitor of `dir` to its end. It writes below `within` only: its own folder, its children's and those that
/// snapshots go to must lie there.
/// `user`: see [`jail::enter`].
pub fn run(dir: &Path, within: &Path, user: Option<User>) -> Result<(), MonitorError> {
    // In the jail neither could be opened any more. Without the first there is no lazy restore; children use the second.
    let userfaults = crate::pager::open_device().ok();
    let kvm = crate::vm::open_kvm().map_err(MonitorError::Kvm)?;
    jail::enter(within, user).map_err(MonitorError::Jail)?;
    let mut monitor = Monitor::new(dir, kvm)?;
    monitor.userfaults = userfaults;
    loop {
        match monitor.serve()? {
            Outcome::Exit(exit) => return monitor.end(&exit),
            // From here on this is the forked child: what it has of its parent's monitor goes with `monitor`.
            Outcome::Become(plan) => {
                jail::part(within);
                monitor = plan.carry_out(monitor);
            }
        }
    }
}

/// An error with all that caused it.
pub(crate) fn chain(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(cause) = source {
        text = format!("{text}: {cause}");
        source = cause.source();
    }
    text
}

/// How serving ended.
enum Outcome {
    Exit(Exit),
    Become(Box<Plan>),
}

/// What is to be done after an event.
enum Flow {
    Go,
    Exit(Exit),
    Become(Box<Plan>),
}

/// A connection of the control socket.
struct Connection {
    peer: Peer,
    /// It waits for an answer and is not read.
    waits: bool,
}

/// Something that a connection waits for, or nobody any more.
enum Job {
    Scribe(requests::Writing),
    /// A child's monitor that lives: only its end is waited for.
    Settled,
}

struct Monitor {
    dir: PathBuf,
    kvm: Kvm,
    watch: Watch,
    /// The guest's devices; hangs in `watch` while the guest runs.
    devices: Watch,
    listener: UnixListener,
    peers: BTreeMap<u32, Connection>,
    forked: BTreeMap<u32, (Forked, Job)>,
    forks: BTreeMap<u32, children::Fork>,
    guest: Option<Guest>,
    /// What userfaults are made by; there until it has a guest.
    userfaults: Option<File>,
    /// Requests that wait until all memory is there.
    deferred: VecDeque<(u32, Request, Vec<OwnedFd>)>,
    next_id: u32,
}

impl Monitor {
    fn new(dir: &Path, kvm: Kvm) -> Result<Self, MonitorError> {
        let socket = |source| MonitorError::Socket { dir: dir.to_owned(), source };
        let listener = dormouse_sys::unix::bind(dir, control::SOCKET).map_err(socket)?;
        listener.set_nonblocking(true).map_err(socket)?;
        let watch = Watch::new().map_err(MonitorError::Watch)?;
        watch.add(&listener, Token::Listener).map_err(MonitorError::Watch)?;
        Ok(Self {
            dir: dir.to_owned(),
            kvm,
            watch,
            devices: Watch::new().map_err(MonitorError::Watch)?,
            listener,
            peers: BTreeMap::new(),
            forked: BTreeMap::new(),
            forks: BTreeMap::new(),
            guest: None,
            userfaults: None,
            deferred: VecDeque::new(),
            next_id: 0,
        })
    }

    fn id(&mut self) -> u32 {
        self.next_id = self.next_id.wrapping_add(1);
        self.next_id
    }

    fn serve(&mut self) -> Result<Outcome, MonitorError> {
        loop {
            let orphan = self.guest.is_none() && self.peers.is_empty();
            let limit = orphan.then_some(ORPHAN_SECONDS);
            let tokens = self.watch.wait(limit).map_err(MonitorError::Watch)?;
            let Some(tokens) = tokens else {
                return Ok(Outcome::Exit(exit(ExitReason::Stopped, "nobody gave it a guest")));
            };
            for token in tokens {
                match self.on_event(token).map_err(MonitorError::Watch)? {
                    Flow::Go => {}
                    Flow::Exit(exit) => return Ok(Outcome::Exit(exit)),
                    Flow::Become(plan) => return Ok(Outcome::Become(plan)),
                }
            }
        }
    }

    fn on_event(&mut self, token: Token) -> io::Result<Flow> {
        match token {
            Token::Listener => self.accept()?,
            Token::Ending => return Ok(self.on_ending()),
            Token::Devices => self.on_devices()?,
            Token::Peer(id) => return self.on_peer(id),
            Token::Child { fork, number } => self.on_child(fork, number)?,
            Token::Report(id) => self.on_report(id)?,
            Token::Ended(id) => self.on_ended(id)?,
            Token::Filled => return self.on_filled(),
            // These are the inner instance's.
            Token::Queue { .. } | Token::Backend { .. } => {}
        }
        Ok(Flow::Go)
    }

    fn accept(&mut self) -> io::Result<()> {
        let Ok((stream, _)) = self.listener.accept() else { return Ok(()) };
        if self.peers.len() >= PEERS_MAX {
            return Ok(());
        }
        let id = self.id();
        let peer = Peer::new(stream)?;
        self.watch.add(&peer, Token::Peer(id))?;
        self.peers.insert(id, Connection { peer, waits: false });
        Ok(())
    }

    /// Events of devices, one batch of them.
    fn on_devices(&mut self) -> io::Result<()> {
        let Some(guest) = self.guest.as_ref().filter(|guest| guest.running) else { return Ok(()) };
        for token in self.devices.poll()? {
            match token {
                Token::Queue { slot, queue } => {
                    if let Some(endpoint) = guest.endpoints.get(usize::from(slot)) {
                        endpoint.queue_event(queue.into());
                    }
                }
                Token::Backend { slot } => {
                    if let Some(endpoint) = guest.endpoints.get(usize::from(slot)) {
                        endpoint.backend_event();
                    }
                }
                _ => {}
            }
        }
        Ok(())
    }

    fn on_ending(&mut self) -> Flow {
        let reason = self.guest.as_ref().and_then(|guest| guest.ending.reason());
        reason.map_or(Flow::Go, |reason| Flow::Exit(ended(reason)))
    }

    fn on_peer(&mut self, id: u32) -> io::Result<Flow> {
        let per_machine = self.guest.as_ref().map_or(2, |guest| guest.machine.fds());
        let Some(connection) = self.peers.get_mut(&id) else { return Ok(Flow::Go) };
        match connection.peer.read(per_machine) {
            Event::More => Ok(Flow::Go),
            Event::Request(request, fds) => self.on_request(id, request, fds),
            Event::Refused(message) => {
                self.answer(id, &Answer::Error { code: control::ErrorCode::BadRequest, message })?;
                self.close(id)?;
                Ok(Flow::Go)
            }
            Event::End => self.close(id).map(|()| Flow::Go),
        }
    }

    /// Takes a connection out of what is watched until its answer is there.
    fn wait_for_answer(&mut self, id: u32) -> io::Result<()> {
        let Some(connection) = self.peers.get_mut(&id) else { return Ok(()) };
        connection.waits = true;
        self.watch.remove(&connection.peer)
    }

    fn answer(&mut self, id: u32, answer: &Answer) -> io::Result<()> {
        let Some(connection) = self.peers.get_mut(&id) else { return Ok(()) };
        if connection.peer.answer(answer).is_err() {
            return self.close(id);
        }
        if std::mem::take(&mut connection.waits) {
            self.watch.add(&connection.peer, Token::Peer(id))?;
        }
        Ok(())
    }

    fn close(&mut self, id: u32) -> io::Result<()> {
        match self.peers.remove(&id) {
            // A forked child may still have the socket: closing it here would not end the watching.
            Some(connection) if !connection.waits => self.watch.remove(&connection.peer),
            _ => Ok(()),
        }
    }

    fn watch_forked(&mut self, forked: Forked, job: Job) -> io::Result<u32> {
        let id = self.id();
        self.watch.add(forked.report_fd(), Token::Report(id))?;
        self.watch.add(forked.handle(), Token::Ended(id))?;
        self.forked.insert(id, (forked, job));
        Ok(id)
    }

    /// A report is there, or the process has closed its end without one.
    fn on_report(&mut self, id: u32) -> io::Result<()> {
        let Some((forked, job)) = self.forked.get_mut(&id) else { return Ok(()) };
        self.watch.remove(forked.report_fd())?;
        let report = forked.report().unwrap_or_default();
        match std::mem::replace(job, Job::Settled) {
            Job::Scribe(writing) => self.on_written(writing, &report),
            Job::Settled => Ok(()),
        }
    }

    fn on_ended(&mut self, id: u32) -> io::Result<()> {
        // Its report comes first: both become readable at once when it dies.
        if self.forked.get(&id).is_some_and(|(_, job)| !matches!(job, Job::Settled)) {
            self.on_report(id)?;
        }
        if let Some((forked, _)) = self.forked.get(&id)
            && forked.reap()
        {
            self.watch.remove(forked.handle())?;
            self.forked.remove(&id);
        }
        Ok(())
    }

    /// The guest and its devices from now on.
    fn adopt(&mut self, guest: Guest) -> io::Result<()> {
        jail::limit_files(guest.largest_file_bytes())?;
        self.watch.add(process::borrowed(guest.ending.event()), Token::Ending)?;
        if let Some(pager) = &guest.pager {
            self.watch.add(process::borrowed(pager.complete()), Token::Filled)?;
        }
        let served_here =
            (0_u16..).zip(&guest.endpoints).filter(|(_, endpoint)| !guest::has_worker(endpoint));
        for (slot, endpoint) in served_here {
            for (queue, event) in (0_u16..).zip(endpoint.queue_fds()) {
                self.devices.add(process::borrowed(event), Token::Queue { slot, queue })?;
            }
            if let Some(backend) = endpoint.backend_fd() {
                self.devices.add(backend, Token::Backend { slot })?;
            }
        }
        self.guest = Some(guest);
        // A guest that took this process over is not to make any.
        self.userfaults = None;
        Ok(())
    }

    /// All memory is there: what waited for that is done now.
    fn on_filled(&mut self) -> io::Result<Flow> {
        if let Some(pager) = self.guest.as_mut().and_then(|guest| guest.pager.take()) {
            self.watch.remove(process::borrowed(pager.complete()))?;
            if let Err(error) = pager.finish() {
                end_without_pager(&self.dir, format!("its memory cannot be taken over: {error}"));
            }
        }
        while let Some((id, request, fds)) = self.deferred.pop_front() {
            let Some(connection) = self.peers.get_mut(&id) else { continue };
            connection.waits = false;
            self.watch.add(&connection.peer, Token::Peer(id))?;
            match self.on_request(id, request, fds)? {
                Flow::Go => {}
                flow => return Ok(flow),
            }
        }
        Ok(Flow::Go)
    }

    fn end(mut self, exit: &Exit) -> Result<(), MonitorError> {
        for (forked, job) in self.forked.values() {
            if matches!(job, Job::Scribe(_)) {
                forked.kill();
            }
        }
        if let Some(guest) = self.guest.take()
            && let Err(error) = guest.stop()
        {
            tracing::warn!(error = chain(&error), "a vCPU did not stop at the end");
        }
        write_exit(&self.dir, exit)
    }
}

fn write_exit(dir: &Path, exit: &Exit) -> Result<(), MonitorError> {
    let path = dir.join(EXIT_FILE);
    let written = serde_json::to_vec(exit).map_err(io::Error::from).and_then(|bytes| {
        let temporary = dir.join("exit.tmp");
        std::fs::write(&temporary, bytes)?;
        std::fs::rename(temporary, &path)
    });
    written.map_err(|source| MonitorError::Exit { path, source })
}

/// Ends the process, on whatever thread: the pager is gone. No destructor runs, as one could let the guest go on.
fn end_without_pager(dir: &Path, why: String) {
    let exit = ended(&EndReason::Pager { why });
    if let Err(error) = write_exit(dir, &exit) {
        tracing::error!(
            error = chain(&error),
            why = exit.message,
            "the monitor ends and cannot leave its reason"
        );
    }
    process::leave(1)
}

fn exit(reason: ExitReason, message: &str) -> Exit {
    Exit { reason, message: message.to_owned() }
}

fn ended(reason: &EndReason) -> Exit {
    let kind = match reason {
        EndReason::PowerOff => ExitReason::GuestPowerOff,
        EndReason::Reset => ExitReason::GuestReset,
        EndReason::TripleFault { .. }
        | EndReason::EntryFailed { .. }
        | EndReason::KvmInternal { .. }
        | EndReason::UnknownExit { .. }
        | EndReason::EndlessExits { .. } => ExitReason::GuestFault,
        EndReason::Device { .. } => ExitReason::DeviceFailed,
        EndReason::RunFailed { .. }
        | EndReason::MemoryFault { .. }
        | EndReason::Pager { .. }
        | EndReason::Monitor { .. } => ExitReason::HostFailed,
    };
    exit(kind, &reason.to_string())
}
