//! Forking: children that are monitors of their own.
//!
//! ```text
//!   source   ── parks, saves, forks once ──> runs on ─────────────── answers when all are ready
//!                       └─ first child ── forks the others ── builds its VM ── ready, paused
//!                                              └─ others ──── build theirs ─── ready, paused
//! ```
//! So the source stands still for one fork, however many children there are. If one child fails, all of them end.

use std::fs::File;
use std::io::{self, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::time::Instant;

use dormouse_sys::fds::Pipe;
use rustix::process::Pid;

use super::events::Token;
use super::guest::{Guest, GuestError, HostSide};
use super::process::{self, leave};
use super::requests::{Refusal, host_side};
use super::saved::Saved;
use super::{Flow, Job, Monitor, MonitorError, chain};
use crate::control::{Answer, ErrorCode, ForkChild, Forked};

/// A child's standard error, in its folder.
const LOG: &str = "monitor.log";
/// What a child says when it is ready; its process id follows.
const READY: &str = "ready ";

/// One fork whose children have not all reported.
pub struct Fork {
    peer: u32,
    stopped_us: u64,
    members: Vec<Member>,
}

/// A child as its source sees it.
enum Member {
    /// It has not reported; its report comes here.
    Waiting(OwnedFd),
    Ready(Pid),
    Failed(String),
}

/// A child that is still to be: its side of the host, and where it reports.
struct Seed {
    host: HostSide,
    report: OwnedFd,
}

/// What a forked child is to become.
pub struct Plan {
    seed: Seed,
    saved: Saved,
    /// Children of this one that are its siblings for everybody else.
    others: Vec<Pid>,
}

impl Monitor {
    pub(super) fn fork(&mut self, id: u32, children: Vec<ForkChild>, fds: Vec<OwnedFd>) -> io::Result<Flow> {
        match self.fork_all(id, children, fds) {
            Ok(Some(plan)) => return Ok(Flow::Become(plan)),
            Ok(None) => self.wait_for_answer(id)?,
            Err(refusal) => self.reply(id, Err(refusal))?,
        }
        Ok(Flow::Go)
    }

    /// In a child: what it is to become.
    fn fork_all(
        &mut self,
        peer: u32,
        children: Vec<ForkChild>,
        fds: Vec<OwnedFd>,
    ) -> Result<Option<Box<Plan>>, Refusal> {
        let net = self.guest()?.machine.net;
        let mut fds = fds.into_iter();
        let (mut seeds, mut reports) = (Vec::new(), Vec::new());
        for ForkChild { dir } in children {
            let pipe = Pipe::new()?;
            seeds.push(Seed { host: host_side(dir, &mut fds, net)?, report: pipe.write });
            reports.push(pipe.read);
        }
        process::adopt_orphans();
        let begun = Instant::now();
        let was_running = self.guest()?.running;
        self.pause()?;
        let forked = self.fork_first(seeds);
        if let Ok(Some(plan)) = forked {
            return Ok(Some(plan));
        }
        if was_running {
            self.resume()?;
        }
        let stopped_us = u64::try_from(begun.elapsed().as_micros()).unwrap_or(u64::MAX);
        forked?;
        let fork = self.id();
        for (number, report) in (0_u32..).zip(&reports) {
            self.watch
                .add(report, Token::Child { fork, number: u16::try_from(number).unwrap_or(u16::MAX) })?;
        }
        let members = reports.into_iter().map(Member::Waiting).collect();
        self.forks.insert(fork, Fork { peer, stopped_us, members });
        Ok(None)
    }

    fn fork_first(&mut self, seeds: Vec<Seed>) -> Result<Option<Box<Plan>>, Refusal> {
        let dir = self.dir.clone();
        let guest = self.guest()?;
        let saved = guest.save()?;
        guest.disks.freeze(&dir).map_err(GuestError::Layer)?;
        // The source's part of the pipes and of the children's descriptors goes with `seeds`.
        Ok(if process::split()?.is_none() { fork_others(seeds, saved) } else { None })
    }

    /// A child is ready, or failed.
    pub(super) fn on_child(&mut self, id: u32, number: u16) -> io::Result<()> {
        let Some(member) = self.forks.get_mut(&id).and_then(|fork| fork.members.get_mut(usize::from(number)))
        else {
            return Ok(());
        };
        let Member::Waiting(report) = member else { return Ok(()) };
        self.watch.remove(&*report)?;
        let said = process::read_report(report.as_fd()).unwrap_or_default();
        let said = String::from_utf8_lossy(&said).into_owned();
        let pid = said.strip_prefix(READY).and_then(|pid| pid.parse().ok()).and_then(Pid::from_raw);
        *member = match pid {
            Some(pid) => Member::Ready(pid),
            None if said.is_empty() => Member::Failed("it was killed or crashed".to_owned()),
            None => Member::Failed(said),
        };
        if let Some(pid) = pid {
            self.watch_end(pid)?;
        }
        self.settle(id)
    }

    /// Answers a fork when all children have reported.
    fn settle(&mut self, id: u32) -> io::Result<()> {
        let waits = |fork: &Fork| fork.members.iter().any(|member| matches!(member, Member::Waiting(_)));
        if self.forks.get(&id).is_none_or(waits) {
            return Ok(());
        }
        let Some(fork) = self.forks.remove(&id) else { return Ok(()) };
        let failed = fork.members.iter().enumerate().find_map(|(number, member)| match member {
            Member::Failed(why) => Some(format!("child {number}: {why}")),
            _ => None,
        });
        let pids = fork.members.iter().filter_map(|member| match member {
            Member::Ready(pid) => Some(*pid),
            _ => None,
        });
        if let Some(message) = failed {
            for pid in pids {
                self.forked
                    .values()
                    .filter(|(forked, _)| forked.pid == pid)
                    .for_each(|(forked, _)| forked.kill());
            }
            return self.answer(fork.peer, &Answer::Error { code: ErrorCode::Host, message });
        }
        let pids = pids.map(|pid| pid.as_raw_nonzero().get().unsigned_abs()).collect();
        self.answer(fork.peer, &Answer::Forked(Forked { stopped_us: fork.stopped_us, pids }))
    }

    /// Takes the exit status of a child's monitor when it ends.
    fn watch_end(&mut self, pid: Pid) -> io::Result<()> {
        let pipe = Pipe::new()?;
        // It may have ended already: then there is nothing to watch.
        let Ok(forked) = process::Forked::open(pid, pipe.read) else { return Ok(()) };
        let id = self.id();
        self.watch.add(forked.handle(), Token::Ended(id))?;
        self.forked.insert(id, (forked, Job::Settled));
        Ok(())
    }
}

/// In the first child: forks the others. In each of them: what it is to become.
fn fork_others(seeds: Vec<Seed>, saved: Saved) -> Option<Box<Plan>> {
    let mut seeds = seeds.into_iter();
    let first = seeds.next()?;
    let mut others = Vec::new();
    for seed in seeds.by_ref() {
        match process::split() {
            // What is left of `seeds`, and `first`, are closed here: they are for others.
            Ok(None) => return Some(Box::new(Plan { seed, saved, others: Vec::new() })),
            Ok(Some(pid)) => others.push(pid),
            Err(error) => tell(seed.report, &chain(&error)),
        }
    }
    Some(Box::new(Plan { seed: first, saved, others }))
}

/// If nobody listens any more, nobody misses it.
fn tell(report: OwnedFd, what: &str) {
    let _ = File::from(report).write_all(what.as_bytes());
}

impl Plan {
    /// In the forked child: makes its monitor, in the place of `parent`, which is what it has of its parent's.
    pub(super) fn carry_out(self: Box<Self>, mut parent: Monitor) -> Monitor {
        let Self { seed: Seed { host, report }, saved, others } = *self;
        // The descriptor of `/dev/kvm` makes VMs of whoever asks: it serves here as well.
        let (guest, kvm) = (parent.guest.take(), crate::vm::share_kvm(&parent.kvm));
        let made = guest
            .ok_or_else(|| "it has no guest".to_owned())
            .and_then(|guest| become_child(guest, kvm.map_err(|error| chain(&error))?, host, &saved, others));
        // Closes what is the parent's here, and only here.
        drop(parent);
        match made {
            Ok(monitor) => {
                tell(report, &format!("{READY}{}", std::process::id()));
                monitor
            }
            Err(message) => {
                tell(report, &message);
                leave(1)
            }
        }
    }
}

/// From here on standard error is the child's own file: nobody else could give it one. Best effort.
fn own_log(dir: &Path) {
    if let Ok(log) = File::options().create(true).append(true).open(dir.join(LOG)) {
        let _ = rustix::stdio::dup2_stderr(log);
    }
}

fn become_child(
    guest: Guest,
    kvm: kvm_ioctls::Kvm,
    host: HostSide,
    saved: &Saved,
    others: Vec<Pid>,
) -> Result<Monitor, String> {
    let dir: PathBuf = host.dir.clone();
    own_log(&dir);
    let mut kept = guest.abandon();
    kept.base.keep(&dir);
    kept.disks.renew(&dir).map_err(|error| chain(&error))?;
    let guest = Guest::rebuild(&kvm, kept, saved, host).map_err(|error| chain(&error))?;
    let mut monitor = Monitor::new(&dir, kvm).map_err(|error: MonitorError| chain(&error))?;
    monitor.adopt(guest).map_err(|error| chain(&error))?;
    for pid in others {
        monitor.watch_end(pid).map_err(|error| chain(&error))?;
    }
    Ok(monitor)
}
