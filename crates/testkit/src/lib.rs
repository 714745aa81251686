//! Drivers of the correctness scenarios and the benches: a live daemon, the public API, real engines.
//!
//! Invariant: nothing is mocked; what an engine cannot do is skipped with its reason, never silently passed.

pub mod bench;
pub mod daemon;
pub mod host;
pub mod http;
pub mod sandbox;
pub mod scenarios;
