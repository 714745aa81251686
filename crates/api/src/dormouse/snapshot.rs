//! Snapshots with everything that is known of them.

use std::collections::BTreeMap;

use jiff::Timestamp;
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// Body of a checkpoint.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Checkpoint {
    #[serde(skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub labels: Option<BTreeMap<String, String>>,
    /// Seconds until it expires; 0: never; 30 days where it is left out.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub ttl: Option<u64>,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct SnapshotInfo {
    #[serde(rename = "snapshotID")]
    pub snapshot_id: String,
    pub names: Vec<String>,
    #[serde(rename = "parentSnapshotID", default)]
    pub parent_snapshot_id: Option<String>,
    #[serde(rename = "sandboxID")]
    pub sandbox_id: String,
    #[serde(rename = "templateID")]
    pub template_id: String,
    pub engine: String,
    pub reason: String,
    #[schema(value_type = String, format = DateTime)]
    pub created_at: Timestamp,
    #[schema(value_type = Option<String>, format = DateTime)]
    #[serde(default)]
    pub expires_at: Option<Timestamp>,
    pub bytes: u64,
    pub labels: BTreeMap<String, String>,
}

/// What the removal of a snapshot or template gave back.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct Removed {
    pub id: String,
    pub freed_bytes: u64,
    /// Snapshots and sandboxes made of it, which go on without it.
    pub children: Vec<String>,
    /// What stays on disk because they need it.
    pub kept: Vec<String>,
}
