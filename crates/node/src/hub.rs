//! What all parts of the node share: journal, store, images, engines, events, pins.
//!
//! Invariant: no lock here is held across an await.

use std::collections::HashMap;
use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use dormouse_engine::Engine;
use dormouse_image::Images;
use dormouse_store::Store;
use dormouse_types::{EngineKind, SandboxId, SnapshotId, Timestamp};
use tokio::sync::{RwLock, Semaphore, broadcast};

use crate::actor::Handle;
use crate::config::NodeConfig;
use crate::error::{ErrorCode, NodeError};
use crate::journal::Journal;
use crate::model::Event;

/// Events that a slow subscriber may be behind.
const EVENTS_BEHIND_MAX: usize = 1024;

pub struct Hub {
    pub config: NodeConfig,
    pub journal: Journal,
    pub store: Store,
    pub images: Images,
    pub events: broadcast::Sender<Event>,
    pub counts: Counts,
    /// Creates that may run at once.
    pub starts: Semaphore,
    pub builds: Semaphore,
    /// Snapshots that are hashed at once.
    pub completions: Semaphore,
    /// Held in common by whatever starts a runtime, alone by the sweep of leftovers.
    pub gate: RwLock<()>,
    /// Digest of the agent that new sandboxes get.
    pub agent_digest: String,
    last_event: AtomicU64,
    actors: Mutex<HashMap<SandboxId, Handle>>,
    pins: Mutex<HashMap<SnapshotId, usize>>,
}

/// Since the daemon started.
#[derive(Default)]
pub struct Counts {
    pub created: AtomicU64,
    pub paused: AtomicU64,
    pub resumed: AtomicU64,
    pub forked: AtomicU64,
    pub failed: AtomicU64,
}

/// While it lives, the snapshot is not removed.
pub struct Pin {
    hub: Arc<Hub>,
    snapshot: SnapshotId,
}

impl Drop for Pin {
    fn drop(&mut self) {
        let mut pins = lock(&self.hub.pins);
        if let Some(count) = pins.get_mut(&self.snapshot) {
            *count -= 1;
            if *count == 0 {
                pins.remove(&self.snapshot);
            }
        }
    }
}

pub fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Hub {
    pub fn new(config: NodeConfig, journal: Journal, store: Store, images: Images, last_event: u64) -> Self {
        let starts = Semaphore::new(config.limits.starts_at_once_max.max(1));
        let agent_digest = config.agent.as_ref().map_or_else(String::new, crate::AgentBinary::digest);
        Self {
            config,
            journal,
            store,
            images,
            events: broadcast::channel(EVENTS_BEHIND_MAX).0,
            counts: Counts::default(),
            starts,
            builds: Semaphore::new(crate::build::BUILDS_AT_ONCE as usize),
            completions: Semaphore::new(1),
            gate: RwLock::new(()),
            agent_digest,
            last_event: AtomicU64::new(last_event),
            actors: Mutex::default(),
            pins: Mutex::default(),
        }
    }

    pub fn now(&self) -> Timestamp {
        self.config.clock.now()
    }

    pub fn now_ms(&self) -> i64 {
        self.now().as_millisecond()
    }

    pub fn engine(&self, kind: EngineKind) -> Result<&Arc<dyn Engine>, NodeError> {
        self.config.engines.iter().find(|engine| engine.kind() == kind).ok_or_else(|| {
            let have: Vec<String> =
                self.config.engines.iter().map(|engine| engine.kind().to_string()).collect();
            NodeError::invalid(
                "engine",
                format!(
                    "the engine {kind} cannot be had on this host (there is: {}); `dormouse doctor` says why",
                    have.join(", ")
                ),
            )
        })
    }

    pub fn rootfs(&self, id: &str) -> PathBuf {
        self.images.rootfs(id)
    }

    pub fn tell(&self, sandbox: Option<&SandboxId>, kind: &str, message: impl Into<String>) {
        let event = Event {
            seq: self.last_event.fetch_add(1, Ordering::Relaxed) + 1,
            at: self.now(),
            sandbox: sandbox.cloned(),
            kind: kind.to_owned(),
            message: message.into(),
        };
        tracing::info!(
            sandbox = event.sandbox.as_ref().map(SandboxId::as_str),
            kind,
            message = event.message
        );
        self.journal.post_event(event.clone());
        // Nobody listening is no error.
        drop(self.events.send(event));
    }

    pub fn actor(&self, id: &SandboxId) -> Result<Handle, NodeError> {
        lock(&self.actors).get(id).cloned().ok_or_else(|| NodeError::no_sandbox(id))
    }

    pub fn actors(&self) -> Vec<Handle> {
        lock(&self.actors).values().cloned().collect()
    }

    /// Refuses when a limit is reached; counts and adds under one lock, so that no two slip in.
    pub fn admit(&self, handle: &Handle) -> Result<(), NodeError> {
        let info = handle.info();
        let mut actors = lock(&self.actors);
        let limits = &self.config.limits;
        if actors.len() >= limits.sandboxes_max {
            let message =
                format!("this node's limit sandboxes_max = {} is reached; kill some", limits.sandboxes_max);
            return Err(NodeError::new(ErrorCode::QuotaExceeded, message));
        }
        if info.owner.is_some() {
            let mine = actors.values().filter(|actor| actor.info().owner == info.owner).count();
            if mine >= limits.sandboxes_per_key_max {
                let message = format!(
                    "the API key's limit sandboxes_per_key_max = {} is reached; kill some",
                    limits.sandboxes_per_key_max
                );
                return Err(NodeError::new(ErrorCode::QuotaExceeded, message));
            }
        }
        actors.insert(info.id, handle.clone());
        Ok(())
    }

    /// At boot: what exists is never refused.
    pub fn add(&self, handle: Handle) {
        lock(&self.actors).insert(handle.info().id, handle);
    }

    pub fn forget(&self, id: &SandboxId) {
        lock(&self.actors).remove(id);
    }

    pub fn pin(self: &Arc<Self>, snapshot: &SnapshotId) -> Pin {
        *lock(&self.pins).entry(snapshot.clone()).or_default() += 1;
        Pin { hub: Arc::clone(self), snapshot: snapshot.clone() }
    }

    pub fn is_pinned(&self, snapshot: &SnapshotId) -> bool {
        lock(&self.pins).contains_key(snapshot)
    }

    /// Runs blocking work on tokio's blocking pool.
    pub async fn blocking<T: Send + 'static>(
        &self,
        what: &'static str,
        work: impl FnOnce() -> T + Send + 'static,
    ) -> Result<T, NodeError> {
        tokio::task::spawn_blocking(work)
            .await
            .map_err(|error| NodeError::internal(format!("{what} ended abnormally: {error}")))
    }
}
