//! The agent's control service, which only the host reaches (port [`crate::stream::CONTROL_PORT`]).
//!
//! HTTP/1.1 with JSON bodies over a carrier stream: `POST /quiesce` ([`Quiesced`]), `POST /wake`
//! ([`Wake`] → [`Woken`]), `GET /stat` ([`Stat`]), `POST /shutdown` (204). Errors: status and
//! `{"message": …}`. `Dial` is the carrier's `CONNECT`.

use std::collections::BTreeMap;

use dormouse_types::{Generation, SandboxId};
use serde::{Deserialize, Serialize};

/// Version of this service: a node that finds another one in a resumed sandbox says so.
pub const CONTROL_VERSION: u32 = 1;

/// Sent after each boot and restore, before the sandbox is served: fail closed.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Wake {
    pub sandbox: SandboxId,
    pub generation: Generation,
    /// 64 random bytes from the host, base64: mixed into the kernel's random source.
    pub entropy: String,
    /// Unix time, nanoseconds.
    pub wall_clock_ns: i64,
    pub hostname: String,
    /// 32 hex digits for `/etc/machine-id`.
    pub machine_id: String,
    /// What `X-Access-Token` must be; `None`: no token is asked for.
    pub access_token: Option<String>,
    /// True after a fork or a boot: identity is new, wake hooks run, the old access token is void.
    pub new_identity: bool,
    /// Variables of every process that is started from now on; replaces the former set. `None`: as before.
    pub env: Option<BTreeMap<String, String>>,
    /// `None`: as before.
    pub default_user: Option<String>,
    pub default_workdir: Option<String>,
    /// PEM certificates that the sandbox shall trust beside its own (a TLS-inspecting gateway's).
    pub trusted_ca: Option<String>,
    /// Whether the egress proxies are offered (variables set for what is started).
    pub egress: bool,
    /// How many processes may run inside at a time, the agent not counted; `None`: no limit of its own.
    #[serde(default)]
    pub processes_max: Option<u32>,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Woken {
    pub control_version: u32,
    pub agent_version: String,
    pub generation: Generation,
    /// What could not be refreshed, in words: goes into the receipt.
    pub notes: Vec<String>,
    /// True when the random numbers that follow are new: the kernel took the entropy, or its source
    /// is the host's.
    pub reseeded: bool,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Quiesced {
    /// Notes for the receipt: what will not survive.
    pub notes: Vec<String>,
}

/// What keeps this sandbox awake.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
pub struct Stat {
    /// Processes started by a client that have one attached right now.
    pub attached: u32,
    /// All processes of the sandbox, the agent not counted.
    pub processes: u32,
    /// CPU time used by all processes but the agent's own since boot, milliseconds.
    pub cpu_ms: u64,
    /// Established outbound connections through egress.
    pub outbound: u32,
    /// Requests in flight on the agent's own API.
    pub in_flight: u32,
    /// Held by `dormouse-awake`: the command of each.
    pub awake_locks: Vec<String>,
}
