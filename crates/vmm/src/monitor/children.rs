//! Forking: children that are monitors of their own.
//!
//! The source stands still from the moment its vCPUs are parked until the last child is forked off. Each child then
//! builds its VM by itself, reports, and waits to be resumed; when all have reported, the fork is answered. If one
//! fails, all of them end.

use std::fs::File;
use std::io::{self, Write};
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::time::Instant;

use super::guest::{Guest, GuestError, HostSide};
use super::process::{self, Side, leave};
use super::requests::{Refusal, host_side};
use super::saved::Saved;
use super::{Flow, Job, Monitor, MonitorError, chain};
use crate::control::{Answer, ErrorCode, ForkChild, Forked};

/// What a child says when it is ready.
const READY: &[u8] = b"ready";

/// One fork whose children have not all reported.
pub struct Fork {
    peer: u32,
    done: Forked,
    /// The children, by their number among the forked processes.
    members: Vec<u32>,
    waiting: usize,
    failed: Option<String>,
}

/// A child that has reported.
pub struct Settled {
    pub forked: u32,
    pub report: Vec<u8>,
}

/// What a forked child is to become.
pub struct Plan {
    host: HostSide,
    saved: Saved,
    report: OwnedFd,
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
        let mut hosts = Vec::with_capacity(children.len());
        for ForkChild { dir } in children {
            hosts.push(host_side(dir, &mut fds, net)?);
        }
        let begun = Instant::now();
        let was_running = self.guest()?.running;
        self.pause()?;
        let forked = match self.fork_each(hosts) {
            Ok(Each::Parent(forked)) => Ok(forked),
            Ok(Each::Child(plan)) => return Ok(Some(plan)),
            Err(refusal) => Err(refusal),
        };
        if was_running {
            self.resume()?;
        }
        let stopped_us = u64::try_from(begun.elapsed().as_micros()).unwrap_or(u64::MAX);
        self.watch_children(peer, forked?, stopped_us)?;
        Ok(None)
    }

    fn fork_each(&mut self, hosts: Vec<HostSide>) -> Result<Each, Refusal> {
        let dir = self.dir.clone();
        let guest = self.guest()?;
        let saved = guest.save()?;
        guest.disks.freeze(&dir).map_err(GuestError::Layer)?;
        let mut forked: Vec<process::Forked> = Vec::with_capacity(hosts.len());
        let mut hosts = hosts.into_iter();
        for host in hosts.by_ref() {
            match process::fork() {
                Ok(Side::Parent(child)) => forked.push(child),
                // The descriptors of the children still to come go with `hosts`.
                Ok(Side::Child(report)) => return Ok(Each::Child(Box::new(Plan { host, saved, report }))),
                Err(error) => {
                    for child in &forked {
                        child.kill();
                        child.wait();
                    }
                    return Err(error.into());
                }
            }
        }
        Ok(Each::Parent(forked))
    }

    fn watch_children(&mut self, peer: u32, forked: Vec<process::Forked>, stopped_us: u64) -> io::Result<()> {
        let fork = self.id();
        let pids = forked.iter().map(|child| child.pid.as_raw_nonzero().get().unsigned_abs()).collect();
        let waiting = forked.len();
        let mut members = Vec::with_capacity(waiting);
        for child in forked {
            members.push(self.watch_forked(child, Job::Child { fork })?);
        }
        let done = Forked { stopped_us, pids };
        self.forks.insert(fork, Fork { peer, done, members, waiting, failed: None });
        Ok(())
    }

    /// A child is ready, or failed.
    pub(super) fn on_child(&mut self, fork: u32, settled: Settled) -> io::Result<()> {
        let Some(state) = self.forks.get_mut(&fork) else { return Ok(()) };
        state.waiting = state.waiting.saturating_sub(1);
        if settled.report != READY {
            let said = String::from_utf8_lossy(&settled.report);
            let why = if said.is_empty() { "it was killed or crashed" } else { &*said };
            let place = state.members.iter().position(|member| *member == settled.forked).unwrap_or(0);
            state.failed.get_or_insert_with(|| format!("child {place}: {why}"));
        }
        if state.waiting > 0 {
            return Ok(());
        }
        let Some(fork) = self.forks.remove(&fork) else { return Ok(()) };
        let Some(message) = fork.failed else {
            return self.answer(fork.peer, &Answer::Forked(fork.done));
        };
        for member in &fork.members {
            if let Some((child, _)) = self.forked.get(member) {
                child.kill();
            }
        }
        self.answer(fork.peer, &Answer::Error { code: ErrorCode::Host, message })
    }
}

enum Each {
    Parent(Vec<process::Forked>),
    Child(Box<Plan>),
}

impl Plan {
    /// In the forked child: makes its monitor, in the place of `parent`, which is what it has of its parent's.
    pub(super) fn carry_out(self: Box<Self>, mut parent: Monitor) -> Monitor {
        let Self { host, saved, report } = *self;
        let mut report = File::from(report);
        let made = parent.guest.take().ok_or_else(|| "it has no guest".to_owned()).and_then(|guest| {
            let kvm = crate::vm::open_kvm().map_err(|error| chain(&error))?;
            become_child(guest, kvm, host, &saved)
        });
        // Closes what is the parent's here, and only here.
        drop(parent);
        match made {
            Ok(monitor) if report.write_all(READY).is_ok() => monitor,
            Ok(_) => leave(1),
            Err(message) => {
                // If nobody listens any more, nobody misses it.
                let _ = report.write_all(message.as_bytes());
                leave(1)
            }
        }
    }
}

fn become_child(
    guest: Guest,
    kvm: kvm_ioctls::Kvm,
    host: HostSide,
    saved: &Saved,
) -> Result<Monitor, String> {
    let dir: PathBuf = host.dir.clone();
    let mut kept = guest.abandon();
    kept.base.keep(&dir);
    kept.disks.renew(&dir).map_err(|error| chain(&error))?;
    let guest = Guest::rebuild(&kvm, kept, saved, host).map_err(|error| chain(&error))?;
    let mut monitor = Monitor::new(&dir, kvm).map_err(|error: MonitorError| chain(&error))?;
    monitor.adopt(guest).map_err(|error| chain(&error))?;
    Ok(monitor)
}
