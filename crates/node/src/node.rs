//! The facade: everything that the API asks of a node.

use std::fs::File;
use std::sync::{Arc, Mutex};

use dormouse_engine::Engine;
use dormouse_types::{EngineKind, KeyId, SandboxId, SnapshotId, Timestamp, random_hex};
use dormouse_wire::keeper::EgressRules;
use tokio::net::UnixStream;
use tokio::sync::broadcast;
use tokio::task::JoinSet;

use crate::actor::Patch;
use crate::boot;
use crate::complete;
use crate::config::NodeConfig;
use crate::create::{self, InFlight, check_timeout};
use crate::error::{NodeError, OpenError, StreamError};
use crate::fork::{self, Child};
use crate::gc;
use crate::hub::{Hub, lock};
use crate::idle;
use crate::journal::{PAGE_MAX, hash_secret};
use crate::lifecycle::{Reply, Request};
use crate::lineage;
use crate::model::{
    Collected, CreateRequest, Event, IdlePolicy, KeyInfo, LineageEntry, ListQuery, LogLine, LogQuery, Metric,
    PauseRequest, Purpose, Receipt, SandboxInfo, SnapshotInfo, UsageSummary,
};
use crate::observe;
use crate::{agent, query, stream};

const KEY_NAME_BYTES_MAX: usize = 100;

/// One host's sandboxes. Share it as `Arc<Node>`.
pub struct Node {
    pub(crate) hub: Arc<Hub>,
    in_flight: InFlight,
    notes: Vec<String>,
    /// What looks after things; ends with the node.
    helpers: Mutex<JoinSet<()>>,
    /// One daemon per folder: held while the node lives.
    _lock: File,
}

impl Node {
    pub async fn open(config: NodeConfig) -> Result<Arc<Self>, OpenError> {
        let boot::Booted { hub, lock, notes } = boot::open(config).await?;
        let mut helpers = JoinSet::new();
        helpers.spawn(idle::run(Arc::downgrade(&hub)));
        helpers.spawn(gc::run(Arc::downgrade(&hub)));
        helpers.spawn(complete::all(Arc::downgrade(&hub)));
        helpers.spawn(prewarm_all(Arc::clone(&hub)));
        helpers.spawn(end_builders(Arc::clone(&hub)));
        let node =
            Self { hub, in_flight: InFlight::default(), notes, helpers: Mutex::new(helpers), _lock: lock };
        Ok(Arc::new(node))
    }

    /// What opening found and did: a journal kept aside, sandboxes lost, leftovers removed.
    #[must_use]
    pub fn notes(&self) -> Vec<String> {
        self.notes.clone()
    }

    /// The engines that can be used here.
    #[must_use]
    pub fn engines(&self) -> Vec<EngineKind> {
        self.hub.config.engines.iter().map(|engine| engine.kind()).collect()
    }

    pub async fn create(&self, request: CreateRequest) -> Result<(SandboxInfo, Receipt), NodeError> {
        create::create(&self.hub, &self.in_flight, request).await
    }

    pub async fn get(&self, id: &SandboxId) -> Result<SandboxInfo, NodeError> {
        Ok(self.hub.actor(id)?.info())
    }

    pub async fn list(&self, query: ListQuery) -> Result<(Vec<SandboxInfo>, Option<String>), NodeError> {
        let all = self.hub.actors().into_iter().map(|actor| actor.info()).collect();
        query::sandboxes(all, &query)
    }

    pub async fn kill(&self, id: &SandboxId) -> Result<(), NodeError> {
        self.hub.actor(id)?.ask(Request::Kill).await.map(drop)
    }

    /// The deadline becomes now + `timeout_s`; 0: it is reached.
    pub async fn set_timeout(&self, id: &SandboxId, timeout_s: u32) -> Result<SandboxInfo, NodeError> {
        let actor = self.hub.actor(id)?;
        let timeout_ms = if timeout_s == 0 { 0 } else { check_timeout(&self.hub, timeout_s)? };
        Ok(actor.ask(Request::SetTimeout { timeout_ms }).await?.info)
    }

    pub async fn pause(
        &self,
        id: &SandboxId,
        request: PauseRequest,
    ) -> Result<(Receipt, SnapshotInfo), NodeError> {
        let actor = self.hub.actor(id)?;
        if !request.memory {
            let message = "this release keeps memory and files together: a pause with memory = false (files only) \
                           is not offered; pause with memory";
            return Err(NodeError::invalid("memory", message));
        }
        let answer = actor.ask(Request::Pause { reason: request.reason }).await?;
        answer.receipt.zip(answer.snapshot).ok_or_else(|| NodeError::internal("a pause gave no receipt"))
    }

    /// `None`: the last time-out's length again.
    pub async fn resume(&self, id: &SandboxId, timeout_s: Option<u32>) -> Result<Receipt, NodeError> {
        let actor = self.hub.actor(id)?;
        let timeout_ms = timeout_s.map(|timeout_s| check_timeout(&self.hub, timeout_s)).transpose()?;
        let answer = actor.ask(Request::Resume { timeout_ms }).await?;
        answer.receipt.ok_or_else(|| NodeError::internal("a resume gave no receipt"))
    }

    /// Running: only extends the deadline. Paused: resumes. The flag says which.
    pub async fn connect(
        &self,
        id: &SandboxId,
        timeout_s: u32,
    ) -> Result<(SandboxInfo, bool, Option<Receipt>), NodeError> {
        let actor = self.hub.actor(id)?;
        let timeout_ms = check_timeout(&self.hub, timeout_s)?;
        let answer = actor.ask(Request::Connect { timeout_ms }).await?;
        Ok((answer.info, answer.reply != Reply::Connected, answer.receipt))
    }

    /// The outer error: nothing was forked. Each child has its own outcome.
    pub async fn fork(
        &self,
        id: &SandboxId,
        count: usize,
        timeout_s: u32,
        idempotency_key: Option<String>,
    ) -> Result<Vec<Child>, NodeError> {
        fork::fork(&self.hub, &self.in_flight, id, count, timeout_s, idempotency_key).await
    }

    pub async fn rollback(&self, id: &SandboxId, snapshot: &SnapshotId) -> Result<Receipt, NodeError> {
        let actor = self.hub.actor(id)?;
        let rows = self.hub.journal.snapshots().await?;
        if !rows.iter().any(|row| row.id == *snapshot) {
            return Err(NodeError::not_found(format!("there is no snapshot {snapshot}")));
        }
        if !lineage::is_of(&rows, id, actor.info().parent.as_ref(), snapshot) {
            let message = format!(
                "snapshot {snapshot} is none of sandbox {id} or of what it came from; `dormouse log {id}` lists \
                 those, and `dormouse create {snapshot}` makes a new sandbox of it"
            );
            return Err(NodeError::invalid("snapshot", message));
        }
        let answer = actor.ask(Request::RollBack { target: snapshot.clone() }).await?;
        answer.receipt.ok_or_else(|| NodeError::internal("a rollback gave no receipt"))
    }

    /// `None`: everything on this node.
    pub async fn lineage(&self, id: Option<&SandboxId>) -> Result<Vec<LineageEntry>, NodeError> {
        lineage::lineage(&self.hub, id).await
    }

    /// A byte stream to a port inside, after the keeper's OK. Waits while the sandbox is being
    /// checkpointed or resumed, thaws it, and counts as activity.
    pub async fn stream(
        &self,
        id: &SandboxId,
        port: u16,
        purpose: Purpose,
    ) -> Result<UnixStream, StreamError> {
        stream::open(&self.hub, id, port, purpose).await
    }

    /// A GET on the agent's own HTTP service, body only, at most 1 MiB.
    pub async fn agent_get(&self, id: &SandboxId, path: &str) -> Result<Vec<u8>, NodeError> {
        let actor = self.hub.actor(id)?;
        let answer = actor.ask(Request::Wake { resume: false }).await?;
        if answer.reply == Reply::Asleep {
            return Err(NodeError::conflict(format!("sandbox {id} is paused")));
        }
        let info = answer.info;
        let dir = self.engine(info.engine)?.keeper_dir(id);
        let body = agent::get(&dir, path, &info.access_token, std::time::Duration::from_secs(30)).await;
        body.map(Vec::from).map_err(|error| NodeError::unavailable(error.to_string()))
    }

    pub(crate) fn engine(&self, kind: EngineKind) -> Result<&Arc<dyn Engine>, NodeError> {
        self.hub.engine(kind)
    }

    pub async fn metrics(
        &self,
        id: &SandboxId,
        start: Option<Timestamp>,
        end: Option<Timestamp>,
    ) -> Result<Vec<Metric>, NodeError> {
        observe::metrics(&self.hub, &self.hub.actor(id)?, start, end).await
    }

    /// Events after `since`, oldest first, at most 1,000.
    pub async fn events(&self, since: u64) -> Result<Vec<Event>, NodeError> {
        Ok(self.hub.journal.events(since, PAGE_MAX).await?)
    }

    pub fn subscribe(&self) -> broadcast::Receiver<Event> {
        self.hub.events.subscribe()
    }

    pub async fn logs(&self, id: &SandboxId, query: LogQuery) -> Result<Vec<LogLine>, NodeError> {
        observe::logs(&self.hub, id, query).await
    }

    /// Empty: nothing keeps it awake.
    pub async fn why_awake(&self, id: &SandboxId) -> Result<Vec<String>, NodeError> {
        idle::why_awake(&self.hub, &self.hub.actor(id)?).await
    }

    /// Oldest first.
    pub async fn receipts(&self, id: &SandboxId) -> Result<Vec<Receipt>, NodeError> {
        self.hub.actor(id)?;
        Ok(self.hub.journal.receipts(id.clone()).await?)
    }

    pub async fn set_egress(&self, id: &SandboxId, rules: EgressRules) -> Result<(), NodeError> {
        dormouse_policy::EgressPolicy::compile(&rules)
            .map_err(|error| NodeError::invalid("network", error.to_string()))?;
        self.hub.actor(id)?.patch(Patch::Egress(rules)).await
    }

    pub async fn set_idle(&self, id: &SandboxId, policy: IdlePolicy) -> Result<(), NodeError> {
        self.hub.actor(id)?.patch(Patch::Idle(policy)).await
    }

    /// The secret (`e2b_` + 40 hex digits) is told once; only its hash is kept.
    pub async fn key_create(&self, name: &str) -> Result<(KeyInfo, String), NodeError> {
        if name.is_empty() || name.len() > KEY_NAME_BYTES_MAX || name.chars().any(char::is_control) {
            let message =
                format!("a key's name has 1 to {KEY_NAME_BYTES_MAX} bytes and no control characters");
            return Err(NodeError::invalid("name", message));
        }
        let secret = format!("e2b_{}", random_hex(20));
        let info = KeyInfo {
            id: KeyId::generate(),
            name: name.to_owned(),
            hint: secret.chars().take(10).collect(),
            created_at: self.hub.now(),
        };
        self.hub.journal.put_key(info.clone(), hash_secret(&secret)).await?;
        self.hub.tell(None, "key_created", format!("key {} ({name})", info.id));
        Ok((info, secret))
    }

    pub async fn keys(&self) -> Result<Vec<KeyInfo>, NodeError> {
        Ok(self.hub.journal.keys().await?)
    }

    pub async fn key_rm(&self, id: &KeyId) -> Result<(), NodeError> {
        if !self.hub.journal.drop_key(id.clone()).await? {
            return Err(NodeError::not_found(format!("there is no API key {id}")));
        }
        self.hub.tell(None, "key_removed", format!("key {id}"));
        Ok(())
    }

    pub async fn key_verify(&self, secret: &str) -> Result<Option<KeyInfo>, NodeError> {
        let hex = secret.strip_prefix("e2b_").unwrap_or_default();
        if hex.len() != 40 || !hex.bytes().all(|byte| byte.is_ascii_hexdigit()) {
            return Ok(None);
        }
        Ok(self.hub.journal.key_by_hash(hash_secret(secret)).await?)
    }

    pub async fn gc(&self) -> Result<Collected, NodeError> {
        gc::collect(&self.hub).await
    }

    pub async fn usage_summary(&self) -> Result<UsageSummary, NodeError> {
        query::summary(&self.hub).await
    }

    /// Makes every sandbox look at the clock at once (after a clock was moved by hand).
    pub async fn look_at_clock(&self) {
        for actor in self.hub.actors() {
            actor.look().await;
        }
    }

    /// Ends what only serves this daemon; sandboxes and keepers stay.
    pub async fn shutdown(&self) {
        lock(&self.helpers).abort_all();
        for engine in &self.hub.config.engines {
            engine.shutdown().await;
        }
    }
}

/// Fills the pool for the templates there are, newest first.
async fn prewarm_all(hub: Arc<Hub>) {
    let Ok(templates) = hub.journal.templates().await else { return };
    for row in templates.iter().take(4) {
        create::prewarm(&hub, &row.info).await;
    }
}

/// A build that the daemon's end interrupted is begun again by whoever wants it; its sandboxes go.
async fn end_builders(hub: Arc<Hub>) {
    for actor in hub.actors() {
        if actor.info().metadata.contains_key(crate::build::BUILDER) {
            drop(actor.ask(Request::Kill).await);
        }
    }
}
