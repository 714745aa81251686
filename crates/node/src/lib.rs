//! The daemon's core: sandbox actors, journal, deadlines, tiers.
//!
//! Invariants: engines are known only through [`dormouse_engine::Engine`]; no JSON of the public API
//! is known here; a state is written to the journal before it is told to anyone.

mod config;
mod error;
pub mod model;
mod node;

pub use config::{AgentBinary, Limits, NodeConfig};
pub use error::{ErrorCode, NodeError, OpenError, StreamError};
pub use node::Node;
