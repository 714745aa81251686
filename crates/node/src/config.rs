//! What the node is opened with.

use std::path::PathBuf;
use std::sync::Arc;

use dormouse_engine::Engine;
use dormouse_types::{Clock, Shape, SystemClock};

use crate::model::IdlePolicy;

/// The agent that is put into sandboxes, written out under `agent/<digest>/agent` of the data folder.
#[derive(Clone)]
pub struct AgentBinary {
    pub version: String,
    pub bytes: Arc<[u8]>,
}

impl AgentBinary {
    /// BLAKE3 of the executable, hex.
    #[must_use]
    pub fn digest(&self) -> String {
        blake3::hash(&self.bytes).to_hex().to_string()
    }
}

/// Upper bounds; what is over one is refused with its name.
#[derive(Debug, Clone)]
pub struct Limits {
    pub sandboxes_max: usize,
    pub sandboxes_per_key_max: usize,
    pub fork_count_max: usize,
    /// Restores and boots that run at once.
    pub starts_at_once_max: usize,
    pub timeout_s_max: u32,
    /// Free bytes that must remain on the data folder's disk beside what a checkpoint will need.
    pub disk_free_bytes_min: u64,
    pub snapshot_ttl_s: u64,
    /// Longest that one step of a sandbox's lifecycle may take.
    pub operation_s_max: u64,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            sandboxes_max: 1000,
            sandboxes_per_key_max: 500,
            fork_count_max: 100,
            starts_at_once_max: 8,
            timeout_s_max: 30 * 24 * 3600,
            disk_free_bytes_min: 256 << 20,
            snapshot_ttl_s: 30 * 24 * 3600,
            operation_s_max: 900,
        }
    }
}

#[derive(Clone)]
pub struct NodeConfig {
    pub data_dir: PathBuf,
    /// In order of preference: a create that asks for none gets the template's, else the first.
    pub engines: Vec<Arc<dyn Engine>>,
    pub agent: Option<AgentBinary>,
    pub clock: Arc<dyn Clock>,
    pub limits: Limits,
    pub shape: Shape,
    /// For sandboxes whose request and template ask for none: never, unless told otherwise.
    pub idle: IdlePolicy,
    /// Runtimes kept ready per template that was used lately.
    pub pool: usize,
    /// PEM certificates that sandboxes shall trust beside their own.
    pub trusted_ca: Option<String>,
}

impl NodeConfig {
    #[must_use]
    pub fn new(data_dir: impl Into<PathBuf>) -> Self {
        Self {
            data_dir: data_dir.into(),
            engines: Vec::new(),
            agent: None,
            clock: Arc::new(SystemClock),
            limits: Limits::default(),
            shape: Shape::default(),
            idle: IdlePolicy::default(),
            pool: 2,
            trusted_ca: None,
        }
    }
}
