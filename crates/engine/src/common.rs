//! What every driver needs and none owns: named I/O errors, folders of ids, blocking work, a process's end.

use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

use dormouse_snapshot::{Compat, Manifest};
use dormouse_sys::cgroup::Hierarchies;
use dormouse_sys::process::PidFd;
use dormouse_types::{EngineKind, SandboxId};
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;

use crate::error::{EngineError, Failure, Operation};

const LOOK_AGAIN: Duration = Duration::from_secs(1);

/// For `map_err`: what was tried on which path.
pub(crate) fn io_failure(action: &'static str, path: &Path) -> impl FnOnce(io::Error) -> Failure + use<> {
    let path = path.to_owned();
    move |source| match source.kind() {
        io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => Failure::NoSpace { path },
        _ => Failure::Io { action, path, source },
    }
}

/// The names in a folder that are valid ids; a folder that is not there has none.
pub(crate) fn names<T: std::str::FromStr>(dir: &Path) -> Vec<T> {
    let Ok(entries) = std::fs::read_dir(dir) else { return Vec::new() };
    entries.flatten().filter_map(|entry| entry.file_name().to_str()?.parse().ok()).collect()
}

/// Parent of all groups of this data folder, relative to a hierarchy's mount point: daemons of other
/// folders have others.
pub(crate) fn group_parent(data_dir: &Path) -> PathBuf {
    PathBuf::from(format!("dormouse-{:016x}", fnv1a(data_dir.as_os_str().as_encoded_bytes())))
}

/// FNV-1a, 64 bits: stable over releases, which the standard library's hasher is not.
pub(crate) fn fnv1a(bytes: &[u8]) -> u64 {
    bytes
        .iter()
        .fold(0xcbf2_9ce4_8422_2325, |hash, byte| (hash ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3))
}

/// Without usable groups an engine still works: the reason is logged, its `cgroups` tells.
pub(crate) fn usable_groups(parent: &Path) -> Hierarchies {
    match Hierarchies::detect().and_then(|found| found.prepare(parent).map(|()| found)) {
        Ok(found) => found,
        Err(error) => {
            tracing::warn!(%error, "cgroups cannot be used here: limits are not enforced");
            Hierarchies::default()
        }
    }
}

pub(crate) fn named<T>(
    operation: Operation,
    sandbox: &SandboxId,
    outcome: Result<T, Failure>,
) -> Result<T, EngineError> {
    outcome.map_err(|failure| EngineError { operation, sandbox: Some(sandbox.clone()), failure })
}

/// What every engine asks of a snapshot before it is restored.
pub(crate) fn check_compat(manifest: &Manifest, engine: EngineKind, has: &Compat) -> Result<(), Failure> {
    let refuse = |needs: String, has: String| Err(Failure::Incompatible { needs, has });
    let needs = &manifest.compat;
    if manifest.engine != engine {
        return refuse(format!("the engine {}", manifest.engine), format!("the engine {engine}"));
    }
    if !manifest.memory {
        return refuse("a boot: it holds no memory".to_owned(), "only restores here".to_owned());
    }
    if needs.engine_version != has.engine_version {
        return refuse(needs.engine_version.clone(), has.engine_version.clone());
    }
    if needs.platform != has.platform {
        return refuse(format!("the platform {}", needs.platform), format!("the platform {}", has.platform));
    }
    let lacks = |feature: &&String| !has.cpu_features.contains(feature);
    let missing: Vec<&str> = needs.cpu_features.iter().filter(lacks).map(String::as_str).collect();
    if missing.is_empty() {
        return Ok(());
    }
    refuse(format!("the CPU features {}", missing.join(", ")), "a CPU without them".to_owned())
}

/// A digest that can be a folder's name.
pub(crate) fn plain_digest(digest: &str) -> bool {
    !digest.is_empty() && digest.bytes().all(|byte| byte.is_ascii_alphanumeric())
}

/// Runs what blocks where it may.
pub(crate) async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> Result<T, Failure> + Send + 'static,
) -> Result<T, Failure> {
    match tokio::task::spawn_blocking(work).await {
        Ok(outcome) => outcome,
        Err(error) => match error.try_into_panic() {
            Ok(panic) => std::panic::resume_unwind(panic),
            Err(_) => Err(Failure::Unsupported { why: "the daemon is shutting down".to_owned() }),
        },
    }
}

/// Resolves when the process has ended; at once where there is none. Cancel-safe.
#[allow(
    deprecated,
    reason = "the successor is unsafe for types whose descriptor changes; a pidfd's never does"
)]
pub(crate) async fn ended(handle: Option<PidFd>) {
    let Some(handle) = handle else { return };
    match AsyncFd::try_with_interest(handle, Interest::READABLE) {
        Ok(watched) => {
            if let Err(error) = watched.readable().await {
                tracing::warn!(%error, "a process's end cannot be awaited; it counts as ended");
            }
        }
        Err(error) => {
            let (handle, source) = error.into_parts();
            tracing::warn!(error = %source, "a process's end cannot be awaited; it is looked at now and then");
            while !handle.has_ended() {
                tokio::time::sleep(LOOK_AGAIN).await;
            }
        }
    }
}

/// A process's identity as `[pid, start]`.
pub(crate) mod identity {
    use dormouse_sys::process::Identity;
    use serde::{Deserialize, Deserializer, Serialize, Serializer};

    pub fn serialize<S: Serializer>(identity: &Identity, to: S) -> Result<S::Ok, S::Error> {
        (identity.pid, identity.start_ticks).serialize(to)
    }

    pub fn deserialize<'de, D: Deserializer<'de>>(from: D) -> Result<Identity, D::Error> {
        let (pid, start_ticks) = Deserialize::deserialize(from)?;
        Ok(Identity { pid, start_ticks })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_hash_is_the_published_one() {
        assert_eq!(fnv1a(b""), 0xcbf2_9ce4_8422_2325);
        assert_eq!(fnv1a(b"foobar"), 0x8594_4171_f739_67e8);
    }
}
