//! `dormouse serve`: one listener for the control plane and every sandbox's ports.
//!
//! ```text
//!            ┌ /health ─────────────────────────────────► ready
//! listener ──┼ E2b-Sandbox-Id, or Host <port>-<id>.<domain> ─► proxy ──► node.stream(id, port)
//!            ├ /files?signature=… without a sandbox ─► whose token signed it? ─► proxy
//!            └ anything else ─► API key ─► control ──► node
//! ```
//!
//! Invariants: holds nothing that a sandbox needs; everything that is read is bounded; a request that
//! panics is answered 500 and leaves the daemon up; the agent's control port is not reachable.

mod app;
mod body;
mod control;
mod convert;
mod engines;
mod listener;
mod pool;
mod proxy;
mod reply;
mod route;
mod signed;
mod start;
#[cfg(test)]
mod tests;

use std::net::SocketAddr;
use std::path::PathBuf;

use dormouse_engine::EngineError;
use dormouse_engine::microvm::MonitorUsers;
use dormouse_node::OpenError;
use dormouse_node::model::IdlePolicy;

use crate::cli::EngineChoice;
pub use start::serve;

/// Where the daemon listens when nothing else is said.
pub const LISTEN_DEFAULT: &str = "127.0.0.1:3000";

/// What `dormouse serve` is told.
#[derive(Debug, Clone)]
pub struct ServeConfig {
    pub data_dir: PathBuf,
    pub listen: SocketAddr,
    /// Sandbox ports are `<port>-<sandbox>.<domain>`; it may carry a port. `None`: `localhost:<port>`.
    pub domain: Option<String>,
    /// A PEM bundle of the host that sandboxes shall trust too (a TLS-inspecting gateway's).
    pub trust_host_ca: Option<PathBuf>,
    /// For sandboxes whose request asks for none.
    pub idle: IdlePolicy,
    /// Runtimes kept ready per template; `None`: the node's default.
    pub pool: Option<usize>,
    /// The runsc executable; `None`: found in PATH.
    pub runsc: Option<PathBuf>,
    pub engine: EngineChoice,
    /// MicroVMs' memory is brought when they touch it.
    pub lazy_restore: bool,
    /// MicroVMs that are booted have a network card.
    pub microvm_network: bool,
    /// Whom the monitors of microVMs run as; `None`: as the daemon.
    pub monitor_users: Option<MonitorUsers>,
}

impl ServeConfig {
    #[must_use]
    pub fn new(data_dir: impl Into<PathBuf>, listen: SocketAddr) -> Self {
        Self {
            data_dir: data_dir.into(),
            listen,
            domain: None,
            trust_host_ca: None,
            idle: IdlePolicy::default(),
            pool: None,
            runsc: None,
            engine: EngineChoice::Auto,
            lazy_restore: false,
            microvm_network: false,
            monitor_users: None,
        }
    }
}

/// The daemon could not be started, or had to end.
#[derive(Debug, thiserror::Error)]
pub enum ServeError {
    #[error(
        "cannot listen on {listen}: the address is in use, perhaps by another daemon; stop that one, or \
         choose another address with --listen"
    )]
    InUse { listen: SocketAddr },
    #[error("cannot listen on {listen}: {source}; choose another address with --listen")]
    Listen {
        listen: SocketAddr,
        #[source]
        source: std::io::Error,
    },
    #[error("the domain {given:?} cannot be part of a host name: {why}")]
    Domain { given: String, why: &'static str },
    #[error("cannot read the certificates to trust from {}: {source}", path.display())]
    TrustedCa {
        path: PathBuf,
        #[source]
        source: std::io::Error,
    },
    #[error("{} holds no PEM certificate; give --trust-host-ca the host's bundle", path.display())]
    NoCertificate { path: PathBuf },
    #[error("cannot write into the data folder {}: {source}; give a folder that can be written to with --data-dir", path.display())]
    DataDir {
        path: PathBuf,
        #[source]
        source: std::io::Error,
    },
    #[error("cannot find out which program this is, which keepers are started from: {0}")]
    Program(std::io::Error),
    #[error(
        "this host cannot run sandboxes: {0}; `dormouse doctor` tells more, `dormouse setup` installs what is missing"
    )]
    Engine(#[from] Box<EngineError>),
    #[error(
        "this host cannot run sandboxes, neither as microVMs ({microvm}) nor with gVisor ({gvisor}); `dormouse \
         doctor` tells more, `dormouse setup` installs what is missing"
    )]
    NoEngine { microvm: Box<EngineError>, gvisor: Box<EngineError> },
    #[error(transparent)]
    Node(#[from] OpenError),
    #[error("cannot wait for signals: {0}")]
    Signals(std::io::Error),
}
