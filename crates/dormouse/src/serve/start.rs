//! From what `serve` is told to a daemon that answers.
//!
//! The address is taken first: a second daemon fails before it touches anything. The node is opened
//! (sandboxes found again, leftovers removed) before the first request is read.

use std::fs;
use std::io::{self, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use dormouse_api::dormouse::EngineReport;
use dormouse_engine::Engine;
use dormouse_node::{AgentBinary, Node, NodeConfig};
use tokio::signal::unix::{SignalKind, signal};
use tokio_util::sync::CancellationToken;

use super::app::{App, Requests};
use super::control::UPLOADS_DIR;
use super::pool;
use super::proxy::Gate;
use super::route::Domain;
use super::{ServeConfig, ServeError, engines, listener};

/// In the data folder while a daemon runs: where it listens.
const LISTEN_FILE: &str = "listen";
/// In the data folder: a key for whoever may read it, which the command line uses.
const ADMIN_KEY_FILE: &str = "admin.key";
const ADMIN_KEY_NAME: &str = "admin";
const PEM_MARK: &str = "-----BEGIN CERTIFICATE-----";

/// Runs until SIGTERM or SIGINT. Sandboxes stay.
pub async fn serve(config: ServeConfig) -> Result<(), ServeError> {
    let mut terminate = signal(SignalKind::terminate()).map_err(ServeError::Signals)?;
    let mut interrupt = signal(SignalKind::interrupt()).map_err(ServeError::Signals)?;
    let going = CancellationToken::new();
    let daemon = Daemon::start(&config, going.clone()).await?;
    tracing::info!(listen = %daemon.app.listen, data_dir = %config.data_dir.display(), "serving");
    let serving = daemon.run();
    let told = async {
        tokio::select! {
            _ = terminate.recv() => {}
            _ = interrupt.recv() => {}
        }
        tracing::info!("told to go; sandboxes stay");
        going.cancel();
    };
    tokio::join!(serving, told);
    Ok(())
}

/// A daemon that listens and has its node.
pub struct Daemon {
    listener: tokio::net::TcpListener,
    pub app: Arc<App>,
}

impl Daemon {
    pub async fn start(config: &ServeConfig, going: CancellationToken) -> Result<Self, ServeError> {
        let listener = listener::bind(config.listen).await?;
        let bound = listener.local_addr().unwrap_or(config.listen);
        let domain = config.domain.clone().unwrap_or_else(|| format!("localhost:{}", bound.port()));
        let domain = Domain::parse(&domain).map_err(|why| ServeError::Domain { given: domain, why })?;
        let trusted_ca = config.trust_host_ca.as_deref().map(certificates).transpose()?;
        // Paths are handed to programs with other working directories.
        let config = &ServeConfig { data_dir: absolute(&config.data_dir)?, ..config.clone() };
        let agent = engines::agent();
        let engines = engines::open(config, &agent).await?;
        let reports = engines.iter().map(|engine| report(engine.as_ref())).collect();
        let node = Node::open(node_config(config, engines, agent, trusted_ca)).await?;
        clear_uploads(&config.data_dir);
        admin_key(&node, &config.data_dir).await;
        let app = app(node, domain, config.data_dir.clone(), bound.to_string(), reports, going);
        Ok(Self { listener, app })
    }

    /// Serves until told to go.
    pub async fn run(self) {
        let Self { listener, app } = self;
        let listen_file = app.data_dir.join(LISTEN_FILE);
        if let Err(error) = fs::write(&listen_file, &app.listen) {
            tracing::warn!(%error, file = %listen_file.display(), "the address could not be written down");
        }
        let sweeping = tokio::spawn({
            let app = Arc::clone(&app);
            async move {
                loop {
                    tokio::time::sleep(pool::SWEEP_EVERY).await;
                    app.gate.pool.sweep();
                }
            }
        });
        listener::run(listener, Arc::clone(&app)).await;
        sweeping.abort();
        app.node.shutdown().await;
        // Absent when the folder went meanwhile; nothing depends on it.
        let _ = fs::remove_file(listen_file);
    }
}

pub fn app(
    node: Arc<Node>,
    domain: Domain,
    data_dir: PathBuf,
    listen: String,
    engines: Vec<EngineReport>,
    going: CancellationToken,
) -> Arc<App> {
    let gate = Gate { inside: Arc::clone(&node), pool: Arc::default(), going: going.clone() };
    Arc::new(App { node, domain, data_dir, listen, engines, gate, requests: Requests::default(), going })
}

fn absolute(data_dir: &Path) -> Result<PathBuf, ServeError> {
    let failed = |source| ServeError::DataDir { path: data_dir.to_owned(), source };
    fs::create_dir_all(data_dir).map_err(failed)?;
    data_dir.canonicalize().map_err(failed)
}

fn node_config(
    config: &ServeConfig,
    engines: Vec<Arc<dyn Engine>>,
    agent: AgentBinary,
    trusted_ca: Option<String>,
) -> NodeConfig {
    let base = NodeConfig::new(&config.data_dir);
    NodeConfig {
        engines,
        agent: Some(agent),
        idle: config.idle,
        pool: config.pool.unwrap_or(base.pool),
        trusted_ca,
        ..base
    }
}

fn report(engine: &dyn Engine) -> EngineReport {
    let can = engine.capabilities();
    EngineReport {
        engine: engine.kind().to_string(),
        memory: can.memory,
        external_tcp: can.external_tcp,
        incremental: can.incremental,
        live_fork: can.live_fork,
        live_checkpoint: can.live_checkpoint,
    }
}

fn certificates(path: &Path) -> Result<String, ServeError> {
    let text =
        fs::read_to_string(path).map_err(|source| ServeError::TrustedCa { path: path.to_owned(), source })?;
    if text.contains(PEM_MARK) { Ok(text) } else { Err(ServeError::NoCertificate { path: path.to_owned() }) }
}

/// Contexts of builds that a former daemon did not finish.
fn clear_uploads(data_dir: &Path) {
    match fs::remove_dir_all(data_dir.join(UPLOADS_DIR)) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => {
            tracing::warn!(%error, "unfinished uploads could not be removed");
        }
        _ => {}
    }
}

/// Sees to it that the data folder holds a key that works. A daemon without one still serves others.
async fn admin_key(node: &Node, data_dir: &Path) {
    let path = data_dir.join(ADMIN_KEY_FILE);
    if let Ok(secret) = fs::read_to_string(&path)
        && matches!(node.key_verify(secret.trim()).await, Ok(Some(_)))
    {
        return;
    }
    let made = match node.key_create(ADMIN_KEY_NAME).await {
        Ok((_, secret)) => write_secret(&path, &secret).map_err(|error| error.to_string()),
        Err(error) => Err(error.to_string()),
    };
    if let Err(error) = made {
        tracing::warn!(%error, "no key could be put into the data folder; `dormouse key create` makes one");
    }
}

fn write_secret(path: &Path, secret: &str) -> io::Result<()> {
    let new = path.with_extension("key.new");
    match fs::remove_file(&new) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    let mut file = fs::OpenOptions::new().write(true).create_new(true).mode(0o600).open(&new)?;
    writeln!(file, "{secret}")?;
    fs::rename(new, path)
}
