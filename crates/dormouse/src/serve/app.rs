//! What every request needs: the node and what the daemon was told.

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use dormouse_api::dormouse::EngineReport;
use dormouse_node::Node;
use dormouse_types::KeyId;
use tokio_util::sync::CancellationToken;

use super::proxy::Gate;
use super::route::Domain;

pub struct App {
    pub node: Arc<Node>,
    pub domain: Domain,
    pub data_dir: PathBuf,
    pub listen: String,
    pub engines: Vec<EngineReport>,
    pub gate: Gate<Arc<Node>>,
    pub requests: Requests,
    /// Cancelled when the daemon goes: streams without an end are ended.
    pub going: CancellationToken,
}

/// Requests since the start, by kind.
#[derive(Debug, Default)]
pub struct Requests {
    pub control: AtomicU64,
    pub data: AtomicU64,
    pub failed: AtomicU64,
    pub panicked: AtomicU64,
}

impl Requests {
    pub fn count(counter: &AtomicU64) {
        counter.fetch_add(1, Ordering::Relaxed);
    }
}

/// Who asks: the key that was shown. In the extensions of every request to the control plane.
#[derive(Debug, Clone)]
pub struct Caller {
    pub key: KeyId,
    pub secret: String,
}
