//! Sandboxes with everything that is known of them.

use std::collections::BTreeMap;

use jiff::Timestamp;
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use super::SnapshotInfo;
use crate::e2b::OnTimeout;
use crate::error::ErrorBody;

/// Where a sandbox is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum State {
    Creating,
    Running,
    Pausing,
    Paused,
    Resuming,
    RollingBack,
    Killed,
    Failed,
}

/// Standby tier of a paused sandbox.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum Tier {
    Frozen,
    Disk,
    Archive,
}

/// `dormouse` in the body of a create.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct CreateOptions {
    /// `gvisor` or `microvm`; the template's where it is left out.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub engine: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub idle: Option<IdlePolicy>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub shape: Option<ShapeRequest>,
    /// Wins over `autoPause`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub on_timeout: Option<OnTimeout>,
}

/// When a sandbox that does nothing is put to sleep; null: never.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct IdlePolicy {
    /// Seconds of idleness until it is frozen.
    #[serde(default)]
    pub freeze_after: Option<u32>,
    /// Seconds of idleness until it goes to disk.
    #[serde(default)]
    pub disk_after: Option<u32>,
}

/// Limits to change; what is left out is the template's.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct ShapeRequest {
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cpus: Option<u32>,
    #[serde(rename = "memoryMB", skip_serializing_if = "Option::is_none")]
    pub memory_mb: Option<u32>,
    #[serde(rename = "diskMB", skip_serializing_if = "Option::is_none")]
    pub disk_mb: Option<u32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub processes_max: Option<u32>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct Shape {
    pub cpus: u32,
    #[serde(rename = "memoryMB")]
    pub memory_mb: u32,
    #[serde(rename = "diskMB")]
    pub disk_mb: u32,
    pub processes_max: u32,
}

#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct Network {
    pub internet: bool,
    pub allow_out: Vec<String>,
    pub deny_out: Vec<String>,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct SandboxInfo {
    #[serde(rename = "sandboxID")]
    pub sandbox_id: String,
    #[serde(rename = "templateID")]
    pub template_id: String,
    #[serde(default)]
    pub alias: Option<String>,
    pub state: State,
    #[serde(default)]
    pub tier: Option<Tier>,
    /// Of a failed sandbox: why, and what is left of it.
    #[serde(default)]
    pub why: Option<String>,
    pub engine: String,
    /// The snapshot that it was made of or last went back to.
    #[serde(rename = "parentSnapshotID", default)]
    pub parent_snapshot_id: Option<String>,
    /// The sandbox that it was forked from.
    #[serde(default)]
    pub forked_from: Option<String>,
    pub generation: u64,
    pub hostname: String,
    pub shape: Shape,
    pub metadata: BTreeMap<String, String>,
    pub idle: IdlePolicy,
    pub on_timeout: OnTimeout,
    pub auto_resume: bool,
    pub network: Network,
    #[schema(value_type = String, format = DateTime)]
    pub started_at: Timestamp,
    #[schema(value_type = String, format = DateTime)]
    pub end_at: Timestamp,
    #[serde(default)]
    pub agent_version: Option<String>,
    pub envd_access_token: String,
    /// What keeps it awake right now. Only in the answer about one sandbox.
    #[serde(default)]
    pub why_awake: Vec<String>,
    /// Latest first. Only in the answer about one sandbox.
    #[serde(default)]
    pub receipts: Vec<Receipt>,
}

/// What a restore kept, refreshed and could not keep.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct Receipt {
    #[serde(rename = "sandboxID")]
    pub sandbox_id: String,
    pub operation: String,
    pub engine: String,
    #[serde(rename = "snapshotID", default)]
    pub snapshot_id: Option<String>,
    #[schema(value_type = String, format = DateTime)]
    pub at: Timestamp,
    /// Whole time of the operation, milliseconds.
    pub took_ms: u64,
    /// Milliseconds that the source did not run, where it was stopped.
    #[serde(default)]
    pub stopped_ms: Option<u64>,
    pub kept: Vec<String>,
    pub refreshed: Vec<String>,
    pub shared: Vec<String>,
    pub dropped: Vec<String>,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct PauseResult {
    pub receipt: Receipt,
    pub snapshot: SnapshotInfo,
}

/// One of several forks: `sandbox` and `receipt`, or `error`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct ForkResult {
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub sandbox: Option<SandboxInfo>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub receipt: Option<Receipt>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub error: Option<ErrorBody>,
}

/// Body of a rollback.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Rollback {
    /// Id or name of one of the sandbox's snapshots.
    #[serde(rename = "snapshotID")]
    pub snapshot_id: String,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum LineageKind {
    Template,
    Snapshot,
    Sandbox,
}

/// One node of the lineage: a snapshot or a sandbox, and what it came from.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Lineage {
    pub kind: LineageKind,
    pub id: String,
    /// A snapshot's id; null: a root.
    #[serde(default)]
    pub parent: Option<String>,
    pub label: String,
    #[schema(value_type = String, format = DateTime)]
    pub at: Timestamp,
    /// True for the sandbox that was asked about, and its current parent.
    pub current: bool,
}
