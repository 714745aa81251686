//! What the engine asks, and what is done about it.

use std::io;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use super::events::Token;
use super::guest::{Guest, GuestError, HostSide};
use super::process::{self, Side};
use super::scribe::{self, Order, ReadError, Report};
use super::{Flow, Job, Monitor, chain, exit};
use crate::control::{
    Answer, Checkpointed, ErrorCode, ExitReason, Kernel, Machine, PROTOCOL_VERSION, Request, State, Status,
};
use crate::layers::{CHAIN_MAX, Layer};
use crate::pager::PagerError;
use crate::virtio::{Net, Vsock};

/// Snapshots written at once; more are refused.
const SCRIBES_MAX: usize = 4;

/// Why a request is not done; the guest is as it was.
#[derive(Debug)]
pub struct Refusal {
    pub code: ErrorCode,
    pub message: String,
}

impl Refusal {
    pub fn bad_request(message: &str) -> Self {
        Self { code: ErrorCode::BadRequest, message: message.to_owned() }
    }

    pub fn host(error: &dyn std::error::Error) -> Self {
        Self { code: ErrorCode::Host, message: chain(error) }
    }
}

impl From<GuestError> for Refusal {
    fn from(error: GuestError) -> Self {
        let code = match error {
            GuestError::CpuTemplate(_) => ErrorCode::BadRequest,
            GuestError::Mismatch { .. } | GuestError::Layer(_) => ErrorCode::BadSnapshot,
            _ => ErrorCode::Host,
        };
        Self { code, message: chain(&error) }
    }
}

impl From<ReadError> for Refusal {
    fn from(error: ReadError) -> Self {
        Self { code: ErrorCode::BadSnapshot, message: chain(&error) }
    }
}

impl From<io::Error> for Refusal {
    fn from(error: io::Error) -> Self {
        Self::host(&error)
    }
}

/// A snapshot that a scribe writes.
pub struct Writing {
    /// Who waits for it.
    peer: u32,
    into: PathBuf,
    stopped: Duration,
    /// Frozen layers of each disk when it began.
    chains: Vec<usize>,
}

impl Monitor {
    pub(super) fn on_request(&mut self, id: u32, request: Request, fds: Vec<OwnedFd>) -> io::Result<Flow> {
        if matches!(
            request,
            Request::Checkpoint { .. } | Request::CheckpointHold { .. } | Request::Fork { .. }
        ) && let Some(pager) = self.guest.as_ref().and_then(|guest| guest.pager.as_ref())
        {
            pager.fill()?;
            self.wait_for_answer(id)?;
            self.deferred.push_back((id, request, fds));
            return Ok(Flow::Go);
        }
        let answer = match request {
            Request::Hello {} => Ok(Answer::Hello { version: PROTOCOL_VERSION, pid: std::process::id() }),
            Request::Boot { machine, kernel } => self.boot(machine, &kernel, fds),
            Request::Restore { machine, snapshot_dir, lazy } => {
                self.restore(machine, &snapshot_dir, lazy, fds)
            }
            Request::Pause {} => self.pause().map(|()| Answer::Done {}),
            Request::Resume {} => self.resume().map(|()| Answer::Done {}),
            Request::Carrier {} => self.carrier(fds),
            Request::Status {} => Ok(self.status()),
            Request::Stop {} => {
                self.answer(id, &Answer::Done {})?;
                return Ok(Flow::Exit(exit(ExitReason::Stopped, "it was stopped by request")));
            }
            Request::Checkpoint { into } => return self.checkpoint(id, into, false),
            Request::CheckpointHold { into } => return self.checkpoint(id, into, true),
            Request::Fork { children } => return self.fork(id, children, fds),
        };
        self.reply(id, answer)?;
        Ok(Flow::Go)
    }

    pub(super) fn reply(&mut self, id: u32, answer: Result<Answer, Refusal>) -> io::Result<()> {
        let answer = answer.unwrap_or_else(|Refusal { code, message }| Answer::Error { code, message });
        self.answer(id, &answer)
    }

    fn boot(&mut self, machine: Machine, kernel: &Kernel, fds: Vec<OwnedFd>) -> Result<Answer, Refusal> {
        self.must_be_empty()?;
        let host = host_side(self.dir.clone(), &mut fds.into_iter(), machine.net)?;
        let guest = Guest::boot(&self.kvm, machine, kernel, host)?;
        self.adopt(guest)?;
        self.resume()?;
        Ok(Answer::Done {})
    }

    fn restore(
        &mut self,
        machine: Machine,
        from: &Path,
        lazy: bool,
        fds: Vec<OwnedFd>,
    ) -> Result<Answer, Refusal> {
        self.must_be_empty()?;
        let userfaults = match (lazy, &self.userfaults) {
            (false, _) => None,
            (true, None) => return Err(Refusal::host(&PagerError::NoDevice)),
            (true, device) => device.as_ref(),
        };
        let host = host_side(self.dir.clone(), &mut fds.into_iter(), machine.net)?;
        let (inventory, saved) = scribe::read_devices(from)?;
        let guest = Guest::restore(&self.kvm, machine, from, (&inventory, &saved), userfaults, host)?;
        self.adopt(guest)?;
        Ok(Answer::Done {})
    }

    fn must_be_empty(&self) -> Result<(), Refusal> {
        if self.guest.is_none() { Ok(()) } else { Err(Refusal::bad_request("it has a guest already")) }
    }

    pub(super) fn guest(&mut self) -> Result<&mut Guest, Refusal> {
        self.guest.as_mut().ok_or_else(|| Refusal::bad_request("it has no guest"))
    }

    /// Idempotent. The devices are deaf afterwards.
    pub(super) fn pause(&mut self) -> Result<(), Refusal> {
        let guest = self.guest.as_mut().ok_or_else(|| Refusal::bad_request("it has no guest"))?;
        if guest.running {
            guest.pause()?;
            self.watch.remove(&self.devices)?;
        }
        Ok(())
    }

    /// Idempotent.
    pub(super) fn resume(&mut self) -> Result<(), Refusal> {
        let guest = self.guest.as_mut().ok_or_else(|| Refusal::bad_request("it has no guest"))?;
        if !guest.running {
            self.watch.add(&self.devices, Token::Devices)?;
            guest.resume()?;
        }
        Ok(())
    }

    fn carrier(&mut self, fds: Vec<OwnedFd>) -> Result<Answer, Refusal> {
        let mut fds = fds.into_iter();
        let mut pipes = Some((fds.next(), fds.next()));
        let mut tap = fds.next();
        for endpoint in &self.guest()?.endpoints {
            let set = endpoint.with_device(|vsock: &mut Vsock, _| {
                pipes.take().map_or(Ok(()), |(input, output)| vsock.set_carrier(input, output))
            });
            set.unwrap_or(Ok(()))?;
            let set =
                endpoint.with_device(|net: &mut Net, _| tap.take().map_or(Ok(()), |tap| net.set_tap(tap)));
            set.unwrap_or(Ok(()))?;
        }
        Ok(Answer::Done {})
    }

    fn status(&self) -> Answer {
        let guest = self.guest.as_ref();
        let state = guest.map_or(State::Empty, |guest| match guest.running {
            true => State::Running,
            false => State::Paused,
        });
        Answer::Status(Status {
            state,
            vcpus: guest.map_or(0, |guest| guest.machine.vcpus),
            memory_mib: guest.map_or(0, |guest| guest.machine.memory_mib),
            cpu_us: dormouse_sys::process::cpu_us(&[std::process::id()]),
            scribes: u32::try_from(self.scribes()).unwrap_or(u32::MAX),
        })
    }

    fn scribes(&self) -> usize {
        self.forked.values().filter(|(_, job)| matches!(job, Job::Scribe(_))).count()
    }

    fn checkpoint(&mut self, id: u32, into: PathBuf, hold: bool) -> io::Result<Flow> {
        let begun = self.begin_checkpoint(id, into, hold);
        match begun {
            Ok(()) => self.wait_for_answer(id)?,
            Err(refusal) => self.reply(id, Err(refusal))?,
        }
        Ok(Flow::Go)
    }

    fn begin_checkpoint(&mut self, peer: u32, into: PathBuf, hold: bool) -> Result<(), Refusal> {
        if self.scribes() >= SCRIBES_MAX {
            return Err(Refusal::bad_request("too many snapshots are being written"));
        }
        let begun = Instant::now();
        let was_running = self.guest()?.running;
        self.pause()?;
        let forked = self.fork_scribe(&into);
        if was_running && !(hold && forked.is_ok()) {
            self.resume()?;
        }
        let (forked, chains) = forked?;
        let stopped = begun.elapsed();
        self.watch_forked(forked, Job::Scribe(Writing { peer, into, stopped, chains }))?;
        Ok(())
    }

    fn fork_scribe(&mut self, into: &Path) -> Result<(process::Forked, Vec<usize>), Refusal> {
        let dir = self.dir.clone();
        let guest = self.guest()?;
        let saved = guest.save()?;
        let disks = guest.disks.freeze(&dir).map_err(GuestError::Layer)?;
        match process::fork()? {
            Side::Parent(forked) => Ok((forked, disks.iter().map(|disk| disk.layers.len()).collect())),
            Side::Child(report) => {
                let order = Order {
                    into,
                    machine: &guest.machine,
                    memory: &guest.memory,
                    base: &guest.base,
                    last: &guest.last,
                    disks: &disks,
                    records: guest.disks.records(),
                    saved: &saved,
                };
                scribe::live(&order, report)
            }
        }
    }

    /// The scribe has reported, or is gone without.
    pub(super) fn on_written(&mut self, writing: Writing, report: &[u8]) -> io::Result<()> {
        let answer = match serde_json::from_slice(report) {
            Ok(Report::Written(mut done)) => {
                done.stopped_us = u64::try_from(writing.stopped.as_micros()).unwrap_or(u64::MAX);
                self.use_flattened(&writing, &done);
                self.use_memory(&writing, &done);
                Ok(Answer::Checkpointed(done))
            }
            Ok(Report::Failed { code, message }) => Err(Refusal { code, message }),
            Err(_) => Err(Refusal {
                code: ErrorCode::Host,
                message: "the process that wrote the snapshot was killed or crashed".to_owned(),
            }),
        };
        self.reply(writing.peer, answer)
    }

    /// The next snapshot's memory lies on this one's.
    fn use_memory(&mut self, writing: &Writing, done: &Checkpointed) {
        let Some(guest) = &mut self.guest else { return };
        let layers = done.files.iter().filter(|file| file.name.starts_with("memory."));
        guest.set_last(layers.map(|file| writing.into.join(&file.name)), &self.dir);
    }

    /// Where the scribe made one layer of a disk's many, the running disk goes on with that one. Best effort: the many
    /// answer the same.
    fn use_flattened(&mut self, writing: &Writing, done: &Checkpointed) {
        let Some(guest) = &mut self.guest else { return };
        for (disk, chain) in writing.chains.iter().enumerate().filter(|(_, chain)| **chain > CHAIN_MAX) {
            let name = super::disks::layer_name(disk, 0);
            let Some(file) = done.files.iter().find(|file| file.name == name && !file.shared) else {
                continue;
            };
            if let Ok(layer) = Layer::open(&writing.into.join(&name), file.bytes, true) {
                guest.disks.replace(disk, *chain, layer, &self.dir);
            }
        }
    }
}

/// One set of descriptors, in the protocol's order.
pub fn host_side(
    dir: PathBuf,
    fds: &mut impl Iterator<Item = OwnedFd>,
    net: bool,
) -> Result<HostSide, Refusal> {
    let mut next = || fds.next().ok_or_else(|| Refusal::bad_request("a descriptor is missing"));
    let (carrier_in, carrier_out) = (next()?, next()?);
    let tap = if net { Some(next()?) } else { None };
    Ok(HostSide { dir, carrier_in, carrier_out, tap })
}
