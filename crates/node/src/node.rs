//! The facade: everything that the API asks of a node.

use std::sync::Arc;

use dormouse_types::{KeyId, SandboxId, SnapshotId, Timestamp};
use dormouse_wire::keeper::EgressRules;
use tokio::net::UnixStream;
use tokio::sync::{broadcast, mpsc};

use crate::config::NodeConfig;
use crate::error::{NodeError, OpenError, StreamError};
use crate::model::{
    BuildProgress, BuildRequest, Collected, CreateRequest, Event, IdlePolicy, KeyInfo, LineageEntry,
    ListQuery, ListSnapshots, LogLine, LogQuery, Metric, PauseRequest, Purpose, Receipt, Removed,
    SandboxInfo, SnapshotInfo, SnapshotRequest, TemplateInfo, UsageSummary,
};

/// One host's sandboxes. Share it as `Arc<Node>`.
pub struct Node {}

fn not_yet<T>() -> Result<T, NodeError> {
    Err(NodeError::unavailable("the node is being built"))
}

#[allow(clippy::unused_async, reason = "bodies follow")]
impl Node {
    pub async fn open(_config: NodeConfig) -> Result<Arc<Self>, OpenError> {
        Err(OpenError::NoEngine)
    }

    /// What opening found and did: a journal kept aside, sandboxes lost, leftovers removed.
    #[must_use]
    pub fn notes(&self) -> Vec<String> {
        Vec::new()
    }

    pub async fn create(&self, _request: CreateRequest) -> Result<(SandboxInfo, Receipt), NodeError> {
        not_yet()
    }

    pub async fn get(&self, _id: &SandboxId) -> Result<SandboxInfo, NodeError> {
        not_yet()
    }

    pub async fn list(&self, _query: ListQuery) -> Result<(Vec<SandboxInfo>, Option<String>), NodeError> {
        not_yet()
    }

    pub async fn kill(&self, _id: &SandboxId) -> Result<(), NodeError> {
        not_yet()
    }

    /// The deadline becomes now + `timeout_s`.
    pub async fn set_timeout(&self, _id: &SandboxId, _timeout_s: u32) -> Result<SandboxInfo, NodeError> {
        not_yet()
    }

    pub async fn pause(
        &self,
        _id: &SandboxId,
        _request: PauseRequest,
    ) -> Result<(Receipt, SnapshotInfo), NodeError> {
        not_yet()
    }

    pub async fn resume(&self, _id: &SandboxId, _timeout_s: Option<u32>) -> Result<Receipt, NodeError> {
        not_yet()
    }

    /// Running: only extends the deadline. Paused: resumes. The flag says which.
    pub async fn connect(
        &self,
        _id: &SandboxId,
        _timeout_s: u32,
    ) -> Result<(SandboxInfo, bool, Option<Receipt>), NodeError> {
        not_yet()
    }

    pub async fn checkpoint(
        &self,
        _id: &SandboxId,
        _request: SnapshotRequest,
    ) -> Result<SnapshotInfo, NodeError> {
        not_yet()
    }

    /// The outer error: nothing was forked. Each child has its own outcome.
    #[allow(clippy::type_complexity, reason = "the children's outcomes are independent of each other")]
    pub async fn fork(
        &self,
        _id: &SandboxId,
        _count: usize,
        _timeout_s: u32,
        _idempotency_key: Option<String>,
    ) -> Result<Vec<Result<(SandboxInfo, Receipt), NodeError>>, NodeError> {
        not_yet()
    }

    pub async fn rollback(&self, _id: &SandboxId, _snapshot: &SnapshotId) -> Result<Receipt, NodeError> {
        not_yet()
    }

    /// `None`: everything on this node.
    pub async fn lineage(&self, _id: Option<&SandboxId>) -> Result<Vec<LineageEntry>, NodeError> {
        not_yet()
    }

    /// A byte stream to a port inside, after the keeper's OK. Waits while the sandbox is being
    /// checkpointed or resumed, thaws it, and counts as activity.
    pub async fn stream(
        &self,
        _id: &SandboxId,
        _port: u16,
        _purpose: Purpose,
    ) -> Result<UnixStream, StreamError> {
        Err(StreamError::Failed("the node is being built".to_owned()))
    }

    /// A GET on the agent's own HTTP service, body only, at most 1 MiB.
    pub async fn agent_get(&self, _id: &SandboxId, _path: &str) -> Result<Vec<u8>, NodeError> {
        not_yet()
    }

    pub async fn metrics(
        &self,
        _id: &SandboxId,
        _start: Option<Timestamp>,
        _end: Option<Timestamp>,
    ) -> Result<Vec<Metric>, NodeError> {
        not_yet()
    }

    /// Events after `since`, oldest first, at most 1,000.
    pub async fn events(&self, _since: u64) -> Result<Vec<Event>, NodeError> {
        not_yet()
    }

    pub fn subscribe(&self) -> broadcast::Receiver<Event> {
        broadcast::channel(1).1
    }

    pub async fn logs(&self, _id: &SandboxId, _query: LogQuery) -> Result<Vec<LogLine>, NodeError> {
        not_yet()
    }

    /// Empty: nothing keeps it awake.
    pub async fn why_awake(&self, _id: &SandboxId) -> Result<Vec<String>, NodeError> {
        not_yet()
    }

    pub async fn receipts(&self, _id: &SandboxId) -> Result<Vec<Receipt>, NodeError> {
        not_yet()
    }

    pub async fn snapshots(
        &self,
        _query: ListSnapshots,
    ) -> Result<(Vec<SnapshotInfo>, Option<String>), NodeError> {
        not_yet()
    }

    /// By id or name.
    pub async fn snapshot_get(&self, _id_or_name: &str) -> Result<SnapshotInfo, NodeError> {
        not_yet()
    }

    /// By id or name.
    pub async fn snapshot_rm(&self, _id_or_name: &str) -> Result<Removed, NodeError> {
        not_yet()
    }

    pub async fn templates(&self) -> Result<Vec<TemplateInfo>, NodeError> {
        not_yet()
    }

    /// By id, alias or `alias:tag`.
    pub async fn template_by_name(&self, _name: &str) -> Result<TemplateInfo, NodeError> {
        not_yet()
    }

    pub async fn template_rm(&self, _name: &str) -> Result<Removed, NodeError> {
        not_yet()
    }

    pub async fn build_template(
        &self,
        _request: BuildRequest,
        _progress: mpsc::Sender<BuildProgress>,
    ) -> Result<TemplateInfo, NodeError> {
        not_yet()
    }

    pub async fn set_egress(&self, _id: &SandboxId, _rules: EgressRules) -> Result<(), NodeError> {
        not_yet()
    }

    pub async fn set_idle(&self, _id: &SandboxId, _policy: IdlePolicy) -> Result<(), NodeError> {
        not_yet()
    }

    /// The secret (`e2b_` + 40 hex digits) is told once; only its hash is kept.
    pub async fn key_create(&self, _name: &str) -> Result<(KeyInfo, String), NodeError> {
        not_yet()
    }

    pub async fn keys(&self) -> Result<Vec<KeyInfo>, NodeError> {
        not_yet()
    }

    pub async fn key_rm(&self, _id: &KeyId) -> Result<(), NodeError> {
        not_yet()
    }

    pub async fn key_verify(&self, _secret: &str) -> Result<Option<KeyInfo>, NodeError> {
        not_yet()
    }

    pub async fn gc(&self) -> Result<Collected, NodeError> {
        not_yet()
    }

    pub async fn usage_summary(&self) -> Result<UsageSummary, NodeError> {
        not_yet()
    }

    /// Ends what only serves this daemon; sandboxes and keepers stay.
    pub async fn shutdown(&self) {}
}
