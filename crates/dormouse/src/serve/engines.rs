//! The engines that this host can run, and the agent that goes into their sandboxes.

use std::ffi::{OsStr, OsString};
use std::fs;
use std::io::{self, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use std::sync::Arc;

use dormouse_engine::gvisor::{Gvisor, GvisorConfig};
use dormouse_engine::microvm::{Microvm, MicrovmConfig};
use dormouse_engine::{AgentFile, Engine, EngineError};
use dormouse_image::{Guest, GuestError, KernelPackage, build_guest};
use dormouse_node::AgentBinary;
use dormouse_types::EngineKind;

use super::{ServeConfig, ServeError};
use crate::agent_binary::AGENT;
use crate::cli::EngineChoice;

pub fn agent() -> AgentBinary {
    AgentBinary { version: env!("CARGO_PKG_VERSION").to_owned(), bytes: AGENT.into() }
}

/// In order of preference: the one that was asked for must be usable. The other one is opened where it can be,
/// for sandboxes that it has already and for whoever asks for it by name.
pub async fn open(config: &ServeConfig, agent: &AgentBinary) -> Result<Vec<Arc<dyn Engine>>, ServeError> {
    let digest = agent.digest();
    write_agent(&config.data_dir, &digest, &agent.bytes)
        .map_err(|source| ServeError::DataDir { path: config.data_dir.clone(), source })?;
    let program = std::env::current_exe().map_err(ServeError::Program)?.into_os_string();
    let agent = AgentFile { version: agent.version.clone(), digest };
    let microvm = open_microvm(config, &agent, &program).await;
    let gvisor = open_gvisor(config, &agent, &program).await;
    let (first, second) = match config.engine {
        EngineChoice::Named(EngineKind::Microvm) => (microvm?, gvisor),
        EngineChoice::Named(EngineKind::Gvisor) => (gvisor?, microvm),
        EngineChoice::Auto => match (microvm, gvisor) {
            (Ok(microvm), gvisor) => (microvm, gvisor),
            (Err(why), Ok(gvisor)) => (gvisor, Err(why)),
            (Err(microvm), Err(gvisor)) => return Err(ServeError::NoEngine { microvm, gvisor }),
        },
    };
    match second {
        Ok(second) => {
            tracing::info!(engine = %first.kind(), beside = %second.kind(), "engines");
            Ok(vec![first, second])
        }
        Err(why) => {
            tracing::info!(engine = %first.kind(), "engines; the other one cannot be had: {why}");
            Ok(vec![first])
        }
    }
}

type Opened = Result<Arc<dyn Engine>, Box<EngineError>>;

async fn open_gvisor(config: &ServeConfig, agent: &AgentFile, program: &OsStr) -> Opened {
    let engine = Gvisor::open(GvisorConfig {
        data_dir: config.data_dir.clone(),
        agent: agent.clone(),
        keeper: vec![program.to_owned(), OsString::from("keeper")],
        runsc: config.runsc.clone(),
        cgroups: true,
    });
    Ok(Arc::new(engine.await?))
}

async fn open_microvm(config: &ServeConfig, agent: &AgentFile, program: &OsStr) -> Opened {
    let guest = config.data_dir.join("guest");
    match tokio::task::spawn_blocking(move || renew_guest(&guest)).await {
        Ok(Ok(())) => {}
        Ok(Err(why)) => tracing::warn!("new microVMs keep the agent of an older release: {why}"),
        Err(error) => tracing::warn!(%error, "new microVMs keep the agent of an older release"),
    }
    let engine = Microvm::open(MicrovmConfig {
        data_dir: config.data_dir.clone(),
        agent: agent.clone(),
        keeper: vec![program.to_owned(), OsString::from("keeper")],
        monitor: monitor_program(program, &config.data_dir),
        users: config.monitor_users,
        cgroups: true,
        network: config.microvm_network,
        lazy_restore: config.lazy_restore,
    });
    Ok(Arc::new(engine.await?))
}

/// A monitor reads and writes in the data folder only, as absolute as the engine names its files.
fn monitor_program(program: &OsStr, data_dir: &Path) -> Vec<OsString> {
    let within = std::fs::canonicalize(data_dir).unwrap_or_else(|_| data_dir.to_owned());
    vec![program.to_owned(), "monitor".into(), "--within".into(), within.into()]
}

/// The set-up put the agent of its release into what microVMs boot from: this release's takes its place.
fn renew_guest(dir: &Path) -> Result<(), GuestError> {
    // Without the kernel's package beside it, it would be fetched, which only the set-up does.
    let renewable = KernelPackage::find(&dir.join("kernel")).is_some();
    match Guest::find(dir) {
        Some(guest) if renewable && !guest.has_agent(AGENT) => {
            build_guest(dir, AGENT, &mut |line| tracing::info!("{line}")).map(drop)
        }
        _ => Ok(()),
    }
}

/// `agent/<digest>/agent`, whole or not there.
fn write_agent(data_dir: &Path, digest: &str, bytes: &[u8]) -> io::Result<()> {
    let folder = data_dir.join("agent").join(digest);
    let path = folder.join("agent");
    if path.is_file() {
        return Ok(());
    }
    fs::create_dir_all(&folder)?;
    let new = folder.join(format!("agent.{}", std::process::id()));
    let mut file = fs::OpenOptions::new().write(true).create(true).truncate(true).mode(0o755).open(&new)?;
    file.write_all(bytes)?;
    file.sync_all()?;
    fs::rename(new, path)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_agent_is_written_once() {
        let data_dir = tempfile::tempdir().expect("a folder");
        write_agent(data_dir.path(), "abc", b"first").expect("written");
        write_agent(data_dir.path(), "abc", b"second").expect("there already");
        let folder = data_dir.path().join("agent/abc");
        assert_eq!(fs::read(folder.join("agent")).expect("readable"), b"first");
        assert_eq!(fs::read_dir(folder).expect("a folder").count(), 1);
    }
}
