//! The public API as types: E2B's control plane, our own additions, one error shape, the OpenAPI
//! document and the client.
//!
//! Invariants: the only crate that knows the JSON shapes of the public API; decides nothing; what a
//! client may leave out is an `Option` here and gets its default in one named place.

pub mod client;
pub mod dormouse;
pub mod e2b;
pub mod endpoints;
pub mod error;
pub mod openapi;
pub mod query;

/// What `envdVersion` says: the version of the protocol that the agent speaks, which clients gate on.
pub const ENVD_VERSION: &str = "0.6.13";
/// `clientID` of every answer: required by clients, used by none.
pub const CLIENT_ID: &str = "dormouse";
