//! The files that microVMs boot from, in the data folder: a kernel, and an initramfs with this release's agent.

use std::path::Path;

use dormouse_engine::microvm::Kvm;
use dormouse_image::{Guest, build_guest};
use dormouse_types::EngineKind;

use super::Missing;
use crate::agent_binary::AGENT;
use crate::cli::CliError;

/// Below the data folder.
const FOLDER: &str = "guest";

/// Whether this machine is to run microVMs: where it can, or where somebody says so.
pub fn is_wanted(engine: Option<EngineKind>) -> bool {
    match engine {
        Some(engine) => engine == EngineKind::Microvm,
        None => Kvm::probe().is_ok(),
    }
}

/// What is missing, if anything is.
pub fn missing(data_dir: &Path) -> Option<Missing> {
    let why = match Guest::find(&data_dir.join(FOLDER)) {
        None => "microVMs boot from them",
        Some(guest) if !guest.has_agent(AGENT) => {
            "those that are there hold another release's agent, and microVMs boot from them"
        }
        Some(_) => return None,
    };
    Some(Missing {
        what: "the guest's kernel and initramfs".to_owned(),
        why: why.to_owned(),
        mend: "dormouse setup --engine microvm".to_owned(),
        package: None,
    })
}

/// Makes them unless they are there; tells which kernel it is.
pub fn ensure(data_dir: &Path, tell: &dyn Fn(&str)) -> Result<String, CliError> {
    if missing(data_dir).is_some() {
        tell(
            "making the guest's files: Debian's kernel for virtual machines, by apt, and an initramfs with the agent",
        );
    }
    let guest = build_guest(&data_dir.join(FOLDER), AGENT, &mut |line| tell(&format!("  {line}")))
        .map_err(|error| CliError::failed(format!("cannot make the guest's files: {}", chain(&error))))?;
    let release = guest.record.kernel.release;
    tell(&format!("guest: it is there (Linux {release})"));
    Ok(release)
}

fn chain(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(cause) = source {
        text = format!("{text}: {cause}");
        source = cause.source();
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_folder_without_the_files_lacks_them() {
        let dir = tempfile::tempdir().expect("a folder");
        assert!(missing(dir.path()).expect("missing").mend.contains("--engine microvm"));
        assert!(is_wanted(Some(EngineKind::Microvm)) && !is_wanted(Some(EngineKind::Gvisor)));
    }
}
