//! Everything that host and sandbox, or daemon and keeper, say to each other.
//!
//! Invariants: no policy, no processes, no files on disk; whatever arrives is untrusted and bounded
//! before it is believed.
//!
//! ```text
//! daemon ── control.sock (`keeper`) ──┐
//! client ── agent.sock (`stream`) ──> keeper ══ carrier (`carrier`) ══ agent ── `control`, `envd`
//! ```

pub mod carrier;
pub mod control;
pub mod dns;
pub mod envd;
pub mod keeper;
pub mod keeper_client;
pub mod local;
pub mod ready;
pub mod stream;
