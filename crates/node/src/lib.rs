//! The daemon's core: sandbox actors, journal, deadlines, tiers.
//!
//! Invariants: engines are known only through [`dormouse_engine::Engine`]; no JSON of the public API
//! is known here; a state is written to the journal before it is told to anyone.

mod actor;
mod agent;
mod boot;
mod build;
mod complete;
mod config;
mod create;
mod error;
mod fork;
mod freeze;
mod gc;
mod hub;
mod idle;
mod journal;
mod key_store;
pub mod lifecycle;
mod lineage;
pub mod model;
mod node;
mod observe;
mod query;
mod retention;
mod snapshots;
mod stream;
#[cfg(test)]
mod trials;
mod work;

pub use config::{AgentBinary, Limits, NodeConfig};
pub use error::{ErrorCode, NodeError, OpenError, StreamError};
pub use key_store::KeyStore;
pub use node::Node;
