//! Starts children and collects what became of them.
//!
//! As process 1 the agent inherits every orphan, so it waits for *any* child. Whoever starts a
//! process does it through [`Reaper::spawn`], which registers it under the same lock that the
//! collecting holds: no exit status is lost or given to somebody else.

use std::collections::HashMap;
use std::io;
use std::process::Command;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use dormouse_sys::launch::Launch;
use rustix::process::{Pid, Signal, WaitOptions, kill_process_group};
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::oneshot;

/// How a process ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Exit {
    Code(i32),
    Signal(i32),
}

type Children = HashMap<u32, oneshot::Sender<Exit>>;

#[derive(Debug, Clone, Default)]
pub struct Reaper(Arc<Mutex<Children>>);

/// A child that runs.
#[derive(Debug)]
pub struct Started {
    pub pid: u32,
    pub exit: oneshot::Receiver<Exit>,
}

impl Reaper {
    /// Collects from now on, until the runtime ends. To be called once, before the first spawn.
    pub fn start(&self) -> io::Result<()> {
        let mut signals = signal(SignalKind::child())?;
        let reaper = self.clone();
        tokio::spawn(async move {
            loop {
                reaper.collect();
                if signals.recv().await.is_none() {
                    return;
                }
            }
        });
        Ok(())
    }

    pub fn spawn(&self, command: &mut Command) -> io::Result<Started> {
        self.register(|| command.spawn().map(|child| child.id()))
    }

    /// The same without a copy of this process's memory: quicker by far where that is expensive.
    pub fn launch(&self, launch: Launch) -> io::Result<Started> {
        self.register(|| launch.spawn())
    }

    fn register(&self, start: impl FnOnce() -> io::Result<u32>) -> io::Result<Started> {
        let mut children = self.lock();
        let pid = start()?;
        let (sender, exit) = oneshot::channel();
        children.insert(pid, sender);
        Ok(Started { pid, exit })
    }

    /// Signals all of a process group that [`Self::spawn`] made. False: nothing is left of it.
    #[must_use]
    pub fn signal_group(&self, pid: u32, signal: Signal) -> bool {
        // The lock keeps the leader from being collected, and its number from being reused.
        let _children = self.lock();
        i32::try_from(pid)
            .ok()
            .and_then(Pid::from_raw)
            .is_some_and(|pid| kill_process_group(pid, signal).is_ok())
    }

    fn collect(&self) {
        loop {
            let mut children = self.lock();
            let (pid, status) = match rustix::process::wait(WaitOptions::NOHANG) {
                Ok(Some(ended)) => ended,
                Err(rustix::io::Errno::INTR) => continue,
                Ok(None) | Err(_) => return,
            };
            let exit = match (status.exit_status(), status.terminating_signal()) {
                (Some(code), _) => Exit::Code(code),
                (None, Some(signal)) => Exit::Signal(signal),
                (None, None) => continue,
            };
            let pid = u32::try_from(pid.as_raw_nonzero().get()).unwrap_or(0);
            if let Some(sender) = children.remove(&pid) {
                // Nobody waits for it any more: then nobody needs to know.
                let _ = sender.send(exit);
            }
        }
    }

    fn lock(&self) -> MutexGuard<'_, Children> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
