//! What all parts of the agent share: the sandbox's settings and the counters of what keeps it awake.
//!
//! [`Ctx`] is cheap to clone. Settings are replaced as a whole by a wake; who needs several of them
//! takes one [`Ctx::settings`] and sees one consistent state.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, PoisonError, RwLock};

use dormouse_types::Generation;

use crate::process::Processes;

/// Awake locks at a time; more are refused.
const AWAKE_LOCKS_MAX: usize = 256;

/// What a wake sets.
#[derive(Debug, Clone, Default)]
pub struct Settings {
    /// The sandbox's id; `None` before the first wake.
    pub sandbox: Option<String>,
    pub generation: Generation,
    /// What `X-Access-Token` must be; `None`: no token is asked for.
    pub access_token: Option<String>,
    /// Variables of every process that is started from now on.
    pub env: BTreeMap<String, String>,
    /// `None`: `user` where there is one, else `root`.
    pub default_user: Option<String>,
    /// `None`: the user's home.
    pub default_workdir: Option<PathBuf>,
    /// Variables that make programs trust the CA that a wake brought.
    pub trust_env: BTreeMap<String, String>,
    /// Whether the egress proxies are offered to what is started.
    pub egress: bool,
}

#[derive(Clone)]
pub struct Ctx(Arc<Inner>);

struct Inner {
    settings: RwLock<Arc<Settings>>,
    in_flight: AtomicU32,
    outbound: AtomicU32,
    awake: Mutex<Awake>,
    processes: Processes,
}

#[derive(Default)]
struct Awake {
    next: u64,
    commands: BTreeMap<u64, String>,
}

/// What is counted while it exists.
#[derive(Clone, Copy)]
enum Counter {
    InFlight,
    Outbound,
}

impl Ctx {
    #[must_use]
    pub fn new(settings: Settings, processes: Processes) -> Self {
        Self(Arc::new(Inner {
            settings: RwLock::new(Arc::new(settings)),
            in_flight: AtomicU32::new(0),
            outbound: AtomicU32::new(0),
            awake: Mutex::default(),
            processes,
        }))
    }

    /// The settings as they are now.
    #[must_use]
    pub fn settings(&self) -> Arc<Settings> {
        self.0.settings.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Changes settings; whoever took them before keeps the former ones.
    pub fn update(&self, change: impl FnOnce(&mut Settings)) {
        let mut settings = self.0.settings.write().unwrap_or_else(PoisonError::into_inner);
        change(Arc::make_mut(&mut settings));
    }

    #[must_use]
    pub fn processes(&self) -> &Processes {
        &self.0.processes
    }

    /// A request on envd; counted until the guard is dropped.
    #[must_use]
    pub fn begin_request(&self) -> Counted {
        Counted::new(self, Counter::InFlight)
    }

    /// A connection out of the sandbox; counted until the guard is dropped.
    #[must_use]
    pub fn begin_outbound(&self) -> Counted {
        Counted::new(self, Counter::Outbound)
    }

    #[must_use]
    pub fn in_flight(&self) -> u32 {
        self.0.in_flight.load(Ordering::Relaxed)
    }

    #[must_use]
    pub fn outbound(&self) -> u32 {
        self.0.outbound.load(Ordering::Relaxed)
    }

    /// Holds the sandbox awake until the lock is dropped; `None`: too many are held.
    #[must_use]
    pub fn lock_awake(&self, command: String) -> Option<AwakeLock> {
        let mut awake = self.0.awake.lock().unwrap_or_else(PoisonError::into_inner);
        if awake.commands.len() >= AWAKE_LOCKS_MAX {
            return None;
        }
        let id = awake.next;
        awake.next += 1;
        awake.commands.insert(id, command);
        drop(awake);
        Some(AwakeLock { ctx: self.clone(), id })
    }

    /// The commands that hold the sandbox awake.
    #[must_use]
    pub fn awake_locks(&self) -> Vec<String> {
        self.0.awake.lock().unwrap_or_else(PoisonError::into_inner).commands.values().cloned().collect()
    }

    fn counter(&self, counter: Counter) -> &AtomicU32 {
        match counter {
            Counter::InFlight => &self.0.in_flight,
            Counter::Outbound => &self.0.outbound,
        }
    }
}

/// Counts as long as it exists.
pub struct Counted {
    ctx: Ctx,
    counter: Counter,
}

impl Counted {
    fn new(ctx: &Ctx, counter: Counter) -> Self {
        ctx.counter(counter).fetch_add(1, Ordering::Relaxed);
        Self { ctx: ctx.clone(), counter }
    }
}

impl Drop for Counted {
    fn drop(&mut self) {
        self.ctx.counter(self.counter).fetch_sub(1, Ordering::Relaxed);
    }
}

/// One command's hold on the sandbox.
pub struct AwakeLock {
    ctx: Ctx,
    id: u64,
}

impl Drop for AwakeLock {
    fn drop(&mut self) {
        let mut awake = self.ctx.0.awake.lock().unwrap_or_else(PoisonError::into_inner);
        awake.commands.remove(&self.id);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn guards_count_and_uncount() {
        let ctx = Ctx::new(Settings::default(), Processes::default());
        let (a, b) = (ctx.begin_request(), ctx.begin_outbound());
        assert_eq!((ctx.in_flight(), ctx.outbound()), (1, 1));
        drop((a, b));
        assert_eq!((ctx.in_flight(), ctx.outbound()), (0, 0));
    }

    #[test]
    fn awake_locks_are_bounded_and_released() {
        let ctx = Ctx::new(Settings::default(), Processes::default());
        let held: Vec<_> = (0..AWAKE_LOCKS_MAX).map(|n| ctx.lock_awake(n.to_string()).unwrap()).collect();
        assert!(ctx.lock_awake("one more".into()).is_none());
        assert_eq!(ctx.awake_locks().len(), AWAKE_LOCKS_MAX);
        drop(held);
        assert!(ctx.awake_locks().is_empty());
    }
}
