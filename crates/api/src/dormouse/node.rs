//! The node itself: version, keys, events, doctor, gc.

use std::collections::BTreeMap;

use jiff::Timestamp;
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct NodeInfo {
    pub version: String,
    pub envd_version: String,
    pub pid: u32,
    pub data_dir: String,
    pub listen: String,
    /// Sandbox ports are `<port>-<sandbox>.<domain>`.
    pub domain: String,
    pub engines: Vec<EngineReport>,
    pub usage: Usage,
    /// What opening the data folder found and did.
    pub notes: Vec<String>,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct EngineReport {
    pub engine: String,
    pub memory: bool,
    pub external_tcp: bool,
    pub incremental: bool,
    pub live_fork: bool,
    pub live_checkpoint: bool,
}

#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct Usage {
    pub running: usize,
    pub frozen: usize,
    pub paused: usize,
    pub failed: usize,
    /// In transition.
    pub busy: usize,
    pub snapshots: usize,
    pub snapshot_bytes: u64,
    pub templates: usize,
    pub disk_free_bytes: u64,
}

/// One thing that happened. In the stream: `id` is `seq`, `event` is `kind`, `data` is this.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Event {
    pub seq: u64,
    #[schema(value_type = String, format = DateTime)]
    pub at: Timestamp,
    #[serde(rename = "sandboxID", default)]
    pub sandbox_id: Option<String>,
    pub kind: String,
    pub message: String,
}

/// Body of a key's creation.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct NewKey {
    #[serde(skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct KeyInfo {
    #[serde(rename = "keyID")]
    pub key_id: String,
    pub name: String,
    /// The first characters, enough to tell keys apart.
    pub hint: String,
    #[schema(value_type = String, format = DateTime)]
    pub created_at: Timestamp,
    /// The secret, told once: only in the answer to its creation.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub key: Option<String>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub enum CheckOutcome {
    Ok,
    Warn,
    Fail,
}

/// One thing that this host can do or not.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Check {
    pub name: String,
    pub outcome: CheckOutcome,
    pub detail: String,
    /// The command that mends it.
    #[serde(default)]
    pub mend: Option<String>,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct DoctorReport {
    pub checks: Vec<Check>,
    /// The engine that would be chosen; null: none can be had.
    #[serde(default)]
    pub engine: Option<String>,
    pub why: String,
}

/// What was removed, by kind.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct GcReport {
    pub removed: BTreeMap<String, Vec<String>>,
    pub freed_bytes: u64,
}
