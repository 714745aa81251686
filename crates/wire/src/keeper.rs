//! What the daemon asks of a keeper over its `control.sock`.
//!
//! Frames: 4-byte little-endian length, JSON, at most [`FRAME_BYTES_MAX`]; one answer per request, in
//! order. File descriptors travel beside a frame (SCM_RIGHTS), in the order that the request names.
//! A keeper's folder holds `control.sock`, `agent.sock` and `keeper.log`.

use dormouse_types::{Generation, SandboxId};
use serde::{Deserialize, Serialize};

pub const FRAME_BYTES_MAX: usize = 256 << 10;
pub const CONTROL_SOCKET: &str = "control.sock";
pub const AGENT_SOCKET: &str = "agent.sock";
pub const LOG_FILE: &str = "keeper.log";
/// Version of this protocol; a daemon that finds an older keeper replaces it.
pub const KEEPER_VERSION: u32 = 2;

/// Whether the carrier goes on with its session or starts a new one.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Session {
    /// Resume: nothing that is open breaks; bytes still in the former pipes are carried over first.
    Continue,
    /// Boot, fork, rollback, a replaced keeper: open streams end, stale bytes are dropped.
    New,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "request", rename_all = "snake_case")]
pub enum Request {
    Hello,
    /// Binds the carrier to pipes. Four descriptors: write end towards the sandbox's stdin, read end
    /// of its stdout, then duplicates of the sandbox's own ends (stdin's read end, stdout's write
    /// end), which keep the bytes in flight alive while nothing runs.
    Attach {
        generation: Generation,
        session: Session,
    },
    /// Stops reading from and writing to the pipes (before a checkpoint that is not to be disturbed);
    /// streams stay open and wait. Answered once no more byte is moved.
    Detach,
    /// Goes on after a `Detach` with the same pipes (a checkpoint that kept it running).
    Reattach,
    SetEgress {
        rules: EgressRules,
    },
    /// Serves the sandbox's network (`dormouse_sys::net`). Five descriptors: its tap, the listener of all
    /// connections, the socket for names, the copies of datagrams, the steering. What was served before is
    /// closed, and all its connections with it.
    Network,
    /// The tap of the network that is served, beside `Done`. `Failed`: none is.
    Tap,
    Status,
    /// Closes everything and ends the keeper.
    Shutdown,
}

/// What may be reached from inside. Names and networks are text here; crate `policy` compiles them.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct EgressRules {
    /// Public addresses are allowed unless denied.
    pub internet: bool,
    /// CIDR, address, domain or `*.domain`; allow beats deny. The only way to the host's own,
    /// private, link-local and metadata addresses.
    #[serde(default)]
    pub allow: Vec<String>,
    /// CIDR or address.
    #[serde(default)]
    pub deny: Vec<String>,
}

impl Default for EgressRules {
    fn default() -> Self {
        Self { internet: true, allow: Vec::new(), deny: Vec::new() }
    }
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "answer", rename_all = "snake_case")]
pub enum Answer {
    Hello { version: u32, pid: u32, sandbox: SandboxId },
    Done,
    Status(Status),
    Failed { message: String },
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Carrier {
    /// No pipes yet, or stopped by `Detach`.
    Detached,
    /// Waiting for the agent to answer the session's greeting.
    Greeting,
    Up,
    /// The stream of bytes is broken; a new session is needed.
    Broken,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Status {
    pub carrier: Carrier,
    pub generation: Generation,
    /// Streams that clients have open (ingress).
    pub ingress_open: u32,
    /// Connections that the sandbox has open to the outside (egress).
    pub egress_open: u32,
    /// Unix time, milliseconds, when a byte last moved on a client's stream; 0: never.
    pub last_activity_ms: i64,
    pub bytes_in: u64,
    pub bytes_out: u64,
    pub egress_denied: u64,
}
