//! What the node is asked and what it tells: the model above which only JSON shapes differ.

use std::collections::BTreeMap;
use std::path::PathBuf;

use dormouse_snapshot::{Manifest, Reason};
use dormouse_types::{
    EngineKind, Generation, KeyId, RuntimeId, SandboxId, Shape, SnapshotId, TemplateId, Timestamp,
};
use dormouse_wire::keeper::EgressRules;
use serde::{Deserialize, Serialize};

/// Where a sandbox is. Never a lie: written before it is told.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "state", rename_all = "snake_case")]
pub enum State {
    Creating,
    Running,
    Pausing,
    Paused { tier: Tier },
    Resuming,
    RollingBack,
    Killed,
    Failed { why: String },
}

/// Standby tiers. A frozen sandbox counts as running for E2B's clients: any request thaws it at once.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Tier {
    Frozen,
    Disk,
    Archive,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum OnTimeout {
    Kill,
    Pause,
}

/// When a sandbox that does nothing is put to sleep. `None` everywhere: never.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct IdlePolicy {
    /// Seconds of idleness until it is frozen.
    pub freeze_after_s: Option<u32>,
    /// Seconds of idleness until it goes to disk.
    pub disk_after_s: Option<u32>,
}

/// How programs outside reach the ports of a sandbox. The agent's own port has a token of its own.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct Ingress {
    /// What a request must carry; `None`: none is asked for.
    pub token: Option<String>,
    /// The Host that services are told, with `${PORT}` for the port; `None`: the one of the request.
    pub host: Option<String>,
}

/// What is asked of the way in.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct IngressRequest {
    pub with_token: bool,
    pub host: Option<String>,
}

#[derive(Debug, Clone)]
pub struct CreateRequest {
    /// Template id, alias, `alias:tag`, snapshot id or snapshot name.
    pub source: String,
    pub engine: Option<EngineKind>,
    pub timeout_s: u32,
    pub on_timeout: OnTimeout,
    pub auto_resume: bool,
    pub metadata: BTreeMap<String, String>,
    pub env: BTreeMap<String, String>,
    pub egress: EgressRules,
    pub ingress: IngressRequest,
    pub idle: IdlePolicy,
    /// `None`: the template's.
    pub shape: Option<Shape>,
    pub owner: Option<KeyId>,
    pub idempotency_key: Option<String>,
}

/// `memory: false` asks for the file system only; `reason` goes into the manifest.
#[derive(Debug, Clone, Copy)]
pub struct PauseRequest {
    pub memory: bool,
    pub reason: Reason,
}

impl Default for PauseRequest {
    fn default() -> Self {
        Self { memory: true, reason: Reason::Pause }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Order {
    Ascending,
    #[default]
    Descending,
}

/// Which sandboxes; an empty field lets all pass.
#[derive(Debug, Clone, Default)]
pub struct ListQuery {
    pub states: Vec<StateFilter>,
    /// All of these must be there with this value.
    pub metadata: BTreeMap<String, String>,
    /// Id or alias.
    pub template: Option<String>,
    /// Inclusive.
    pub started_after: Option<Timestamp>,
    pub order: Order,
    /// `None`: the most there is, 100.
    pub limit: Option<usize>,
    pub cursor: Option<String>,
}

/// States as E2B's clients filter by them: `Running` includes frozen and what is being made or resumed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum StateFilter {
    Running,
    Paused,
    Failed,
}

#[derive(Debug, Clone, Default)]
pub struct ListSnapshots {
    pub sandbox: Option<SandboxId>,
    pub name: Option<String>,
    /// `None`: the most there is, 100.
    pub limit: Option<usize>,
    pub cursor: Option<String>,
    /// Also those that nobody asked for by name: templates', automatic ones'.
    pub all: bool,
}

/// What the removal of a snapshot or template gave back.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Removed {
    pub id: String,
    pub freed_bytes: u64,
    /// Who goes on without it: snapshots and sandboxes made of it.
    pub children: Vec<String>,
    /// What stays because children need it (a root file system).
    pub kept: Vec<String>,
}

/// Why a stream is opened.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Purpose {
    /// Resumes a sandbox that is on disk.
    Wake,
    /// Resumes it only when it was created with `auto_resume`.
    NoWake,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub enum PlanSource {
    Toml(String),
    Dockerfile(String),
    /// Put together by a program.
    Parsed(Box<dormouse_image::template::Template>),
}

#[derive(Debug, Clone)]
pub struct BuildRequest {
    /// `name` or `name:tag`; empty: the plan's own name.
    pub aliases: Vec<String>,
    pub plan: PlanSource,
    /// Folder that COPY takes from.
    pub context: PathBuf,
    pub engine: Option<EngineKind>,
    pub shape: Option<Shape>,
    pub start_command: Option<String>,
    pub ready_command: Option<String>,
    /// Builds every step anew.
    pub no_cache: bool,
    pub owner: Option<KeyId>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Level {
    Debug,
    Info,
    Warn,
    Error,
}

/// One line of a build's progress.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct BuildProgress {
    pub at: Timestamp,
    pub level: Level,
    /// `base`, the step's index, or `finalize`.
    pub step: String,
    pub message: String,
}

/// One line of a sandbox's log.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct LogLine {
    pub at: Timestamp,
    pub level: Level,
    /// `node`, `keeper` or `agent`.
    pub source: String,
    pub message: String,
}

#[derive(Debug, Clone, Default)]
pub struct LogQuery {
    pub start: Option<Timestamp>,
    /// `None`: 1,000.
    pub limit: Option<usize>,
}

/// What `gc` removed.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Collected {
    pub snapshots: Vec<String>,
    pub images: Vec<String>,
    pub agents: Vec<String>,
    pub leftovers: Vec<String>,
    pub freed_bytes: u64,
}

#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct UsageSummary {
    pub running: usize,
    pub frozen: usize,
    pub paused: usize,
    pub failed: usize,
    pub busy: usize,
    pub snapshots: usize,
    pub snapshot_bytes: u64,
    pub templates: usize,
    pub disk_free_bytes: u64,
    pub created_total: u64,
    pub paused_total: u64,
    pub resumed_total: u64,
    pub forked_total: u64,
    pub failed_total: u64,
}

/// Everything about one sandbox.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct SandboxInfo {
    pub id: SandboxId,
    #[serde(flatten)]
    pub state: State,
    pub engine: EngineKind,
    pub template: TemplateId,
    pub template_alias: Option<String>,
    /// The snapshot that it was made of or last went back to.
    pub parent: Option<SnapshotId>,
    /// The sandbox that it was forked from.
    pub forked_from: Option<SandboxId>,
    pub runtime: Option<RuntimeId>,
    pub generation: Generation,
    pub shape: Shape,
    pub hostname: String,
    pub access_token: String,
    pub metadata: BTreeMap<String, String>,
    pub env: BTreeMap<String, String>,
    pub egress: EgressRules,
    #[serde(default)]
    pub ingress: Ingress,
    pub idle: IdlePolicy,
    pub on_timeout: OnTimeout,
    pub auto_resume: bool,
    pub started_at: Timestamp,
    /// The deadline.
    pub end_at: Timestamp,
    pub owner: Option<KeyId>,
    pub rootfs: String,
    pub agent_version: Option<String>,
    /// BLAKE3 of the agent's executable inside, hex.
    #[serde(default)]
    pub agent_digest: Option<String>,
}

/// What a restore kept, refreshed and could not keep. Every resume, fork, rollback and create gives one.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Receipt {
    pub sandbox: SandboxId,
    pub operation: String,
    pub engine: EngineKind,
    pub snapshot: Option<SnapshotId>,
    pub at: Timestamp,
    /// Whole time of the operation, milliseconds.
    pub took_ms: u64,
    /// Milliseconds that the source did not run, where it was stopped.
    pub stopped_ms: Option<u64>,
    pub kept: Vec<String>,
    pub refreshed: Vec<String>,
    pub shared: Vec<String>,
    pub dropped: Vec<String>,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct SnapshotInfo {
    pub id: SnapshotId,
    pub names: Vec<String>,
    pub parent: Option<SnapshotId>,
    pub sandbox: SandboxId,
    pub template: TemplateId,
    pub engine: EngineKind,
    pub reason: String,
    pub created_at: Timestamp,
    pub expires_at: Option<Timestamp>,
    pub bytes: u64,
    pub labels: BTreeMap<String, String>,
}

/// How a snapshot that a client asks for is called and kept.
#[derive(Debug, Clone, Default)]
pub struct SnapshotRequest {
    pub name: Option<String>,
    pub labels: BTreeMap<String, String>,
    /// `None`: the default of 30 days; `Some(0)`: never expires.
    pub ttl_s: Option<u64>,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct TemplateInfo {
    pub id: TemplateId,
    pub aliases: Vec<String>,
    pub engine: EngineKind,
    pub shape: Shape,
    pub rootfs: String,
    /// `None`: no base snapshot, a create boots.
    pub snapshot: Option<SnapshotId>,
    pub start_command: Option<String>,
    pub ready_command: Option<String>,
    pub env: BTreeMap<String, String>,
    pub user: Option<String>,
    pub workdir: Option<String>,
    pub build: String,
    pub created_at: Timestamp,
    pub bytes: u64,
}

/// One line of a lineage: a snapshot or a sandbox, and what it came from.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct LineageEntry {
    pub kind: LineageKind,
    pub id: String,
    /// A snapshot's id; `None`: a root.
    pub parent: Option<String>,
    pub label: String,
    pub at: Timestamp,
    /// True for the sandbox that was asked about, and its current parent.
    pub current: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum LineageKind {
    Template,
    Snapshot,
    Sandbox,
}

/// One thing that happened, in the stream of events and in the log.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Event {
    pub seq: u64,
    pub at: Timestamp,
    pub sandbox: Option<SandboxId>,
    /// `created paused resumed forked rolled_back killed failed frozen thawed snapshot_created …`
    pub kind: String,
    pub message: String,
}

/// One reading of a sandbox's use.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Metric {
    pub at: Timestamp,
    pub cpu_count: u32,
    pub cpu_used_pct: f64,
    pub mem_used: u64,
    pub mem_total: u64,
    pub mem_cache: u64,
    pub disk_used: u64,
    pub disk_total: u64,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct KeyInfo {
    pub id: KeyId,
    pub name: String,
    /// The first characters, enough to tell keys apart.
    pub hint: String,
    pub created_at: Timestamp,
}

impl SnapshotInfo {
    #[must_use]
    pub fn of(manifest: &Manifest) -> Self {
        let time = |ms| Timestamp::from_millisecond(ms).unwrap_or_default();
        Self {
            id: manifest.id.clone(),
            names: manifest.names.clone(),
            parent: manifest.parent.clone(),
            sandbox: manifest.sandbox.clone(),
            template: manifest.template.clone(),
            engine: manifest.engine,
            reason: Reason::as_str(manifest.reason).to_owned(),
            created_at: time(manifest.created_at_ms),
            expires_at: manifest.expires_at_ms.map(time),
            bytes: manifest.bytes(),
            labels: manifest.labels.clone(),
        }
    }
}
