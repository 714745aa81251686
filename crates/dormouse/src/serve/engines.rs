//! The engines that this host can run, and the agent that goes into their sandboxes.

use std::sync::Arc;

use dormouse_engine::Engine;
use dormouse_node::AgentBinary;

use super::ServeConfig;
use crate::agent_binary::AGENT;

pub fn agent() -> AgentBinary {
    AgentBinary { version: env!("CARGO_PKG_VERSION").to_owned(), bytes: AGENT.into() }
}

/// In order of preference. An engine that cannot be had is logged with what mends it.
pub async fn open(_config: &ServeConfig, _agent: &AgentBinary) -> Vec<Arc<dyn Engine>> {
    Vec::new()
}
