//! All processes that were started for clients: those that run, and for a while those that ended.
//!
//! ```text
//!  start ──> running ── leader collected, output read ──> ended ── 30 s ──> forgotten
//! ```

use std::collections::{BTreeMap, VecDeque};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use dormouse_wire::envd::connect::Error;
use dormouse_wire::envd::process::{
    ENDED_KEPT_SECONDS, ProcessConfig, ProcessInfo, ProcessInput, ProcessSelector, PtySize,
};
use rustix::process::Signal;
use tokio_util::sync::CancellationToken;

use super::fd::Fd;
use super::output::{Output, Subscription};
use super::reaper::Reaper;
use super::spawn::{Plan, Spawned, spawn, winsize};
use super::supervise::supervise;
use crate::clock::sleep_awake;
use crate::context::Settings;

/// Processes at a time; their descendants are limited by the sandbox.
const RUNNING_MAX: usize = 1024;
const ENDED_MAX: usize = 64;
/// Output kept per process, and of all processes together.
const REPLAY_BYTES_MAX: usize = 1 << 20;
const REPLAY_BYTES_MIN: usize = 64 << 10;
const REPLAY_BYTES_ALL_MAX: usize = 32 << 20;

/// One process, from its start until it is forgotten.
#[derive(Debug)]
pub struct Process {
    pub pid: u32,
    pub config: ProcessConfig,
    pub tag: Option<String>,
    pub output: Arc<Output>,
    /// Where input goes; gone when closed, ended, or never opened. Held over a write, so that inputs
    /// do not mix.
    pub input: tokio::sync::Mutex<Option<Arc<Fd>>>,
    /// The terminal while the process runs.
    pub pty: Mutex<Option<Arc<Fd>>>,
    pub has_pty: bool,
    /// A client sent a signal: what still holds the output is not waited for.
    pub signalled: CancellationToken,
    pub ended: CancellationToken,
    /// Its deadline has passed and it was killed for that.
    pub overdue: AtomicBool,
    reaper: Reaper,
}

impl Process {
    fn new(
        plan: Plan,
        tag: Option<String>,
        spawned: &mut Spawned,
        output: Arc<Output>,
        reaper: Reaper,
    ) -> Arc<Self> {
        Arc::new(Self {
            pid: spawned.started.pid,
            config: plan.config,
            tag,
            output,
            has_pty: spawned.pty.is_some(),
            // The only owner: a pipe's end is closed by letting it go.
            input: tokio::sync::Mutex::new(spawned.input.take()),
            pty: Mutex::new(spawned.pty.take()),
            signalled: CancellationToken::new(),
            ended: CancellationToken::new(),
            overdue: AtomicBool::new(false),
            reaper,
        })
    }

    /// Signals the process and all of its group.
    pub fn signal(&self, signal: Signal) {
        // Nothing left to signal is what was wanted.
        let _ = self.reaper.signal_group(self.pid, signal);
        self.signalled.cancel();
    }

    /// Writes all of an input, however long the process takes to read it.
    pub async fn write(&self, input: &ProcessInput) -> Result<(), Error> {
        let bytes = match (&input.stdin, &input.pty, self.has_pty) {
            (Some(bytes), _, false) | (None, Some(bytes), true) => bytes,
            (Some(_), _, true) => return Err(Error::internal("the process has a terminal: send pty input")),
            (None, Some(_), false) => return Err(Error::internal("the process has no terminal: send stdin")),
            (None, None, _) => return Err(Error::invalid_argument("the input is neither stdin nor pty")),
        };
        let closed = || Error::internal(format!("the input of process {} is not open", self.pid));
        let write = async {
            let input = self.input.lock().await;
            let fd = input.as_ref().ok_or_else(closed)?;
            fd.write_all(bytes).await.map_err(|why| {
                Error::internal(format!("cannot write to the input of process {}: {why}", self.pid))
            })
        };
        tokio::select! {
            biased;
            result = write => result,
            () = self.ended.cancelled() => Err(closed()),
        }
    }

    /// End of file on standard input. Closing it again is fine.
    pub async fn close_stdin(&self) -> Result<(), Error> {
        if self.has_pty {
            return Err(Error::failed_precondition(
                "a terminal cannot be closed: send Ctrl+D (0x04) instead",
            ));
        }
        self.input.lock().await.take();
        Ok(())
    }

    pub fn resize(&self, size: PtySize) -> Result<(), Error> {
        let pty = self.pty.lock().unwrap_or_else(PoisonError::into_inner).clone();
        let Some(pty) = pty else {
            return Err(Error::failed_precondition(format!("process {} has no terminal", self.pid)));
        };
        rustix::termios::tcsetwinsize(&*pty, winsize(size)).map_err(|why| {
            Error::internal(format!("cannot resize the terminal of process {}: {why}", self.pid))
        })
    }

    /// Closes the agent's ends. Called once all output was read.
    pub async fn disconnect(&self) {
        self.ended.cancel();
        self.pty.lock().unwrap_or_else(PoisonError::into_inner).take();
        self.input.lock().await.take();
    }

    fn info(&self) -> ProcessInfo {
        ProcessInfo { config: Some(self.config.clone()), pid: self.pid, tag: self.tag.clone() }
    }
}

#[derive(Debug, Default)]
struct Table {
    running: BTreeMap<u32, Arc<Process>>,
    /// Oldest first.
    ended: VecDeque<Arc<Process>>,
}

#[derive(Debug, Clone, Default)]
pub struct Processes(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    table: Mutex<Table>,
    reaper: Reaper,
    /// The sandbox goes away: streams are cut, so that the kill does not look like a command's exit.
    closing: CancellationToken,
    replay_cap: Arc<AtomicUsize>,
}

impl Default for Inner {
    fn default() -> Self {
        Self {
            table: Mutex::default(),
            reaper: Reaper::default(),
            closing: CancellationToken::new(),
            replay_cap: Arc::new(AtomicUsize::new(REPLAY_BYTES_MAX)),
        }
    }
}

impl Processes {
    #[must_use]
    pub fn reaper(&self) -> &Reaper {
        &self.0.reaper
    }

    #[must_use]
    pub fn closing(&self) -> &CancellationToken {
        &self.0.closing
    }

    /// Starts a process and subscribes to its output from the first byte. The deadline kills it.
    pub fn start(
        &self,
        settings: &Settings,
        plan: Plan,
        tag: Option<String>,
        deadline: Option<Duration>,
    ) -> Result<(Arc<Process>, Subscription), Error> {
        if self.0.closing.is_cancelled() {
            return Err(Error::unavailable("the sandbox is shutting down"));
        }
        if self.lock().running.len() >= RUNNING_MAX {
            return Err(Error::resource_exhausted(format!("{RUNNING_MAX} processes run already")));
        }
        let mut spawned = spawn(&self.0.reaper, settings, &plan)?;
        let output = Output::new(self.0.replay_cap.clone());
        let subscription = output.subscribe(None);
        let process = Process::new(plan, tag, &mut spawned, output, self.0.reaper.clone());
        let mut table = self.lock();
        table.running.insert(process.pid, process.clone());
        self.adjust(&table);
        drop(table);
        let (processes, kept) = (self.clone(), process.clone());
        tokio::spawn(async move {
            supervise(&kept, spawned, deadline, processes.closing()).await;
            processes.retire(&kept).await;
        });
        Ok((process, subscription))
    }

    /// The process that a selector names: one that runs, else one that ended a short while ago.
    pub fn find(&self, selector: Option<&ProcessSelector>) -> Result<Arc<Process>, Error> {
        let selector = selector.ok_or_else(|| Error::invalid_argument("the request names no process"))?;
        let matches = |process: &&Arc<Process>| match (selector.pid, &selector.tag) {
            (Some(pid), _) => process.pid == pid,
            (None, Some(tag)) => process.tag.as_ref() == Some(tag),
            (None, None) => false,
        };
        let table = self.lock();
        let found =
            table.running.values().rev().find(matches).or_else(|| table.ended.iter().rev().find(matches));
        match (found, selector.pid, &selector.tag) {
            (Some(process), _, _) => Ok(process.clone()),
            (None, Some(pid), _) => Err(Error::not_found(format!("process with pid {pid} not found"))),
            (None, None, Some(tag)) => Err(Error::not_found(format!("process with tag {tag:?} not found"))),
            (None, None, None) => Err(Error::invalid_argument("the selector has neither pid nor tag")),
        }
    }

    /// The same among those that run.
    pub fn find_running(&self, selector: Option<&ProcessSelector>) -> Result<Arc<Process>, Error> {
        let process = self.find(selector)?;
        if process.ended.is_cancelled() {
            return Err(Error::not_found(format!(
                "process with pid {} not found: it has ended",
                process.pid
            )));
        }
        Ok(process)
    }

    #[must_use]
    pub fn list(&self) -> Vec<ProcessInfo> {
        self.lock().running.values().map(|process| process.info()).collect()
    }

    /// How many of those that run have a client attached.
    #[must_use]
    pub fn attached(&self) -> u32 {
        let attached =
            self.lock().running.values().filter(|process| process.output.subscribers() > 0).count();
        u32::try_from(attached).unwrap_or(u32::MAX)
    }

    /// The sandbox goes away: cuts all streams and asks all processes to end.
    pub fn close(&self) {
        self.0.closing.cancel();
        let running: Vec<_> = self.lock().running.values().cloned().collect();
        for process in running {
            process.signal(Signal::TERM);
        }
    }

    /// Waits until none of those that run now is left.
    pub async fn all_ended(&self) {
        let running: Vec<_> = self.lock().running.values().cloned().collect();
        for process in running {
            process.ended.cancelled().await;
        }
    }

    async fn retire(&self, process: &Arc<Process>) {
        self.move_to_ended(process);
        sleep_awake(Duration::from_secs(ENDED_KEPT_SECONDS)).await;
        let mut table = self.lock();
        table.ended.retain(|found| !Arc::ptr_eq(found, process));
        self.adjust(&table);
    }

    fn move_to_ended(&self, process: &Arc<Process>) {
        let mut table = self.lock();
        // The number may have been given to another process already.
        if table.running.get(&process.pid).is_some_and(|found| Arc::ptr_eq(found, process)) {
            table.running.remove(&process.pid);
        }
        if table.ended.len() >= ENDED_MAX {
            table.ended.pop_front();
        }
        table.ended.push_back(process.clone());
        self.adjust(&table);
    }

    /// Shares the memory for output among the processes.
    fn adjust(&self, table: &Table) {
        let count = (table.running.len() + table.ended.len()).max(1);
        let cap = (REPLAY_BYTES_ALL_MAX / count).clamp(REPLAY_BYTES_MIN, REPLAY_BYTES_MAX);
        self.0.replay_cap.store(cap, Ordering::Relaxed);
    }

    fn lock(&self) -> MutexGuard<'_, Table> {
        self.0.table.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
