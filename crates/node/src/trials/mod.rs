//! Trials of the node over a model engine: races, failures, and the daemon's death at every step.

mod crashes;
mod forks;
mod model_engine;
mod races;

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;

use dormouse_types::{EngineKind, ManualClock, Shape, TemplateId, Timestamp};
use dormouse_wire::keeper::EgressRules;

use crate::model::{CreateRequest, IdlePolicy, OnTimeout, TemplateInfo};
use crate::{Limits, Node, NodeConfig, OpenError};
use model_engine::World;

pub fn request(key: Option<&str>) -> CreateRequest {
    CreateRequest {
        source: "base".to_owned(),
        engine: None,
        timeout_s: 300,
        on_timeout: OnTimeout::Kill,
        auto_resume: false,
        metadata: BTreeMap::new(),
        env: BTreeMap::new(),
        egress: EgressRules::default(),
        ingress: crate::model::IngressRequest::default(),
        idle: IdlePolicy::default(),
        shape: None,
        owner: None,
        idempotency_key: key.map(str::to_owned),
    }
}

pub fn config(dir: &Path, world: &World, clock: &Arc<ManualClock>) -> NodeConfig {
    NodeConfig {
        engines: vec![world.engine()],
        clock: Arc::clone(clock) as Arc<dyn dormouse_types::Clock>,
        limits: Limits { sandboxes_max: 8, disk_free_bytes_min: 0, ..Limits::default() },
        ..NodeConfig::new(dir)
    }
}

pub fn clock() -> Arc<ManualClock> {
    Arc::new(ManualClock::new(Timestamp::from_second(1_800_000_000).unwrap()))
}

/// A node with the template `base`, which boots.
pub async fn open(dir: &Path, world: &World, clock: &Arc<ManualClock>) -> Result<Arc<Node>, OpenError> {
    let node = Node::open(config(dir, world, clock)).await?;
    if node.template_by_name("base").await.is_err() {
        let info = TemplateInfo {
            id: TemplateId::generate(),
            aliases: vec!["base".to_owned()],
            engine: EngineKind::Gvisor,
            shape: Shape::default(),
            rootfs: "base".to_owned(),
            snapshot: None,
            start_command: None,
            ready_command: None,
            env: BTreeMap::new(),
            user: None,
            workdir: None,
            build: String::new(),
            created_at: Timestamp::now(),
            bytes: 0,
        };
        node.hub.journal.put_template(info, None).await.unwrap();
    }
    Ok(node)
}
