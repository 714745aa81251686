//! One sandbox's carrier, its clients' streams and its connections to the outside.
//!
//! ```text
//! daemon ── control.sock ──> control ─┐
//! client ── agent.sock ────> ingress ─┼─ Host (carrier) ══ pipes ══ agent
//! internet <── policy, TCP ─ egress ──┤
//!                                     └─ network ══ tap ══ microVM
//! ```
//!
//! A process of its own: it outlives the daemon and holds what must not break when that dies. It ends
//! only by a `Shutdown` request or SIGKILL; other signals that ask processes to end are ignored, since
//! a terminal or a service manager that stops the daemon must not stop the sandbox.
//!
//! Invariants: one keeper per folder (a lock); only its own user talks to it; it never interprets what
//! it carries; nothing that the sandbox sends makes it panic, grow without bound or wait for ever.

mod control;
mod egress;
mod ingress;
mod log;
mod meter;
mod network;
mod peer;

use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::{OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use dormouse_policy::EgressPolicy;
use dormouse_types::SandboxId;
use dormouse_wire::carrier::Host;
use dormouse_wire::keeper::{AGENT_SOCKET, CONTROL_SOCKET, EgressRules, LOG_FILE};
use dormouse_wire::local;
use rustix::fs::FlockOperation;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use tokio::net::UnixListener;
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::{Notify, watch};

use meter::Meter;
use network::Network;

const LOCK_FILE: &str = "keeper.lock";
/// Name look-ups at a time; each may hang for the system resolver's whole patience.
const LOOKUP_THREADS_MAX: usize = 8;
const OPEN_FILES_MAX: u64 = 8192;
const THREAD_STACK_BYTES: usize = 256 << 10;

/// Whose keeper it is, and where.
#[derive(Debug, Clone)]
pub struct KeeperArgs {
    pub dir: PathBuf,
    pub sandbox: SandboxId,
}

#[derive(Debug, thiserror::Error)]
pub enum KeeperError {
    #[error("the keeper's folder {} cannot be used", dir.display())]
    Dir { dir: PathBuf, source: io::Error },
    #[error("another keeper runs in {}", dir.display())]
    Locked { dir: PathBuf },
    #[error("the keeper's socket {} cannot be opened", path.display())]
    Listen { path: PathBuf, source: io::Error },
    #[error("the keeper's runtime cannot be started")]
    Runtime { source: io::Error },
    #[error("the rules that hold before any are set do not compile")]
    Rules { source: dormouse_policy::RuleError },
}

/// What the parts of a keeper share.
struct Keeper {
    sandbox: SandboxId,
    host: Host,
    policy: watch::Sender<Arc<EgressPolicy>>,
    meter: Meter,
    network: Network,
    shutdown: Notify,
}

/// Runs a keeper until it is asked to shut down.
pub fn run(args: KeeperArgs) -> Result<(), KeeperError> {
    let dir_error = |source| KeeperError::Dir { dir: args.dir.clone(), source };
    std::fs::set_permissions(&args.dir, std::fs::Permissions::from_mode(0o700)).map_err(dir_error)?;
    let _lock = lock(&args.dir)?;
    log::start(&args.dir.join(LOG_FILE)).map_err(dir_error)?;
    raise_open_files();
    // Fails when it leads a session already: then that is what was wanted.
    let _ = rustix::process::setsid();
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .max_blocking_threads(LOOKUP_THREADS_MAX)
        .thread_stack_size(THREAD_STACK_BYTES)
        .build()
        .map_err(|source| KeeperError::Runtime { source })?;
    let served = runtime.block_on(serve(&args));
    // A look-up that hangs must not hold the process.
    runtime.shutdown_background();
    served
}

/// Each connection takes two descriptors. Where it cannot be raised, connections fail when all are taken.
fn raise_open_files() {
    let hard = getrlimit(Resource::Nofile).maximum;
    let limit = Rlimit { current: Some(hard.unwrap_or(OPEN_FILES_MAX).min(OPEN_FILES_MAX)), maximum: hard };
    if let Err(error) = setrlimit(Resource::Nofile, limit) {
        tracing::warn!(%error, "the number of open files cannot be raised");
    }
}

fn lock(dir: &Path) -> Result<File, KeeperError> {
    let path = dir.join(LOCK_FILE);
    let opened = OpenOptions::new().create(true).truncate(false).write(true).mode(0o600).open(path);
    let file = opened.map_err(|source| KeeperError::Dir { dir: dir.to_owned(), source })?;
    match rustix::fs::flock(&file, FlockOperation::NonBlockingLockExclusive) {
        Ok(()) => Ok(file),
        Err(rustix::io::Errno::WOULDBLOCK) => Err(KeeperError::Locked { dir: dir.to_owned() }),
        Err(error) => Err(KeeperError::Dir { dir: dir.to_owned(), source: error.into() }),
    }
}

async fn serve(args: &KeeperArgs) -> Result<(), KeeperError> {
    // Registered and never asked: the signals do nothing.
    for kind in [SignalKind::hangup(), SignalKind::interrupt(), SignalKind::terminate()] {
        drop(signal(kind).map_err(|source| KeeperError::Runtime { source })?);
    }
    let rules = EgressRules { internet: false, allow: Vec::new(), deny: Vec::new() };
    let policy = EgressPolicy::compile(&rules).map_err(|source| KeeperError::Rules { source })?;
    let keeper = Arc::new(Keeper {
        sandbox: args.sandbox.clone(),
        host: Host::new(),
        policy: watch::Sender::new(Arc::new(policy)),
        meter: Meter::default(),
        network: Network::default(),
        shutdown: Notify::new(),
    });
    // The agent's socket first: who finds the control socket may use both.
    let agent = listen(&args.dir, AGENT_SOCKET)?;
    let control = listen(&args.dir, CONTROL_SOCKET)?;
    let carrier = keeper.host.clone();
    tokio::spawn(async move { carrier.run().await });
    tokio::spawn(ingress::serve(agent, keeper.clone()));
    tokio::spawn(egress::serve(keeper.clone()));
    tokio::spawn(control::serve(control, keeper.clone()));
    tracing::info!(sandbox = %keeper.sandbox, pid = std::process::id(), "the keeper is ready");
    keeper.shutdown.notified().await;
    tracing::info!(sandbox = %keeper.sandbox, "the keeper ends: it was asked to");
    keeper.host.close();
    keeper.network.close();
    for name in [AGENT_SOCKET, CONTROL_SOCKET] {
        // Whoever comes next replaces them anyway.
        let _ = std::fs::remove_file(args.dir.join(name));
    }
    Ok(())
}

fn listen(dir: &Path, name: &str) -> Result<UnixListener, KeeperError> {
    let listen = local::bind(dir, name).and_then(UnixListener::from_std);
    listen.map_err(|source| KeeperError::Listen { path: dir.join(name), source })
}

/// An error and its causes in one line.
fn chain(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        text.push_str(": ");
        text.push_str(&error.to_string());
        cause = error.source();
    }
    text
}
