//! The engines that this host can run, and the agent that goes into their sandboxes.

use std::ffi::OsString;
use std::fs;
use std::io::{self, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use std::sync::Arc;

use dormouse_engine::{AgentFile, Engine};
use dormouse_engine::gvisor::{Gvisor, GvisorConfig};
use dormouse_node::AgentBinary;

use super::{ServeConfig, ServeError};
use crate::agent_binary::AGENT;

pub fn agent() -> AgentBinary {
    AgentBinary { version: env!("CARGO_PKG_VERSION").to_owned(), bytes: AGENT.into() }
}

/// In order of preference. There is one so far; that it cannot be had is an error that says what
/// mends it.
pub async fn open(config: &ServeConfig, agent: &AgentBinary) -> Result<Vec<Arc<dyn Engine>>, ServeError> {
    let digest = agent.digest();
    write_agent(&config.data_dir, &digest, &agent.bytes)
        .map_err(|source| ServeError::DataDir { path: config.data_dir.clone(), source })?;
    let program = std::env::current_exe().map_err(ServeError::Program)?;
    let keeper = vec![program.into_os_string(), OsString::from("keeper")];
    let agent = AgentFile { version: agent.version.clone(), digest };
    let data_dir = config.data_dir.clone();
    let gvisor =
        Gvisor::open(GvisorConfig { data_dir, agent, keeper, runsc: config.runsc.clone(), cgroups: true });
    let gvisor: Arc<dyn Engine> = Arc::new(gvisor.await.map_err(Box::new)?);
    Ok(vec![gvisor])
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
