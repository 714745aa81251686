//! The messages of envd, the sandbox's API: E2B's protocol as serde types, for server and client.
//!
//! Invariants: protobuf JSON (lowerCamelCase; snake_case accepted on input; bytes are base64; 64-bit
//! integers are strings, numbers accepted; defaults omitted; unknown fields ignored); every frame is
//! bounded before it is buffered.

pub mod connect;
pub mod filesystem;
pub mod json;
pub mod process;
