//! Noticing that a sandbox or its keeper ended, or must be ended.

use std::sync::Arc;
use std::time::Duration;

use dormouse_types::{RuntimeId, SandboxId};

use super::Inner;
use super::container::{Container, DiskWatch};
use crate::common::{blocking, ended};
use crate::model::Exit;

const LOOK_AT_DISK: Duration = Duration::from_secs(5);

/// What ended first.
enum End {
    Runtime,
    Keeper,
    Disk { limit_mib: u32 },
}

pub(super) async fn exited(inner: Arc<Inner>, sandbox: &SandboxId, runtime: &RuntimeId) -> Exit {
    let keeper = inner.keeper(sandbox);
    let (asked, id) = (keeper.clone(), runtime.clone());
    let looked = blocking(move || {
        let container = inner.linked(&id);
        let sandbox = container.as_ref().and_then(Container::sandbox);
        let disk = container.as_ref().and_then(Container::disk_watch);
        Ok((container, sandbox, disk, asked.process()))
    });
    let (container, sandbox, disk, keeper_process) = match looked.await {
        Ok(looked) => looked,
        Err(error) => return Exit::Runtime { why: error.to_string() },
    };
    let Some(container) = container else {
        return Exit::Runtime { why: format!("there is no runtime {runtime}") };
    };
    let end = tokio::select! {
        biased;
        () = ended(sandbox) => End::Runtime,
        limit_mib = exceeded(disk) => End::Disk { limit_mib },
        () = ended(keeper_process) => End::Keeper,
    };
    let told = blocking(move || {
        Ok(match end {
            End::Runtime => Exit::Runtime { why: container.why_ended() },
            End::Keeper => {
                Exit::Keeper { why: format!("its process ended; its last words: {}", keeper.log_tail()) }
            }
            End::Disk { limit_mib } => {
                container.kill()?;
                Exit::Runtime { why: format!("it wrote more than its limit of {limit_mib} MiB on disk") }
            }
        })
    });
    told.await.unwrap_or_else(|error| Exit::Runtime { why: error.to_string() })
}

/// runsc knows no limit for what a sandbox writes: it is watched from outside, and ended beyond it.
async fn exceeded(disk: Option<DiskWatch>) -> u32 {
    let Some(disk) = disk else { return std::future::pending().await };
    let mut looks = tokio::time::interval(LOOK_AT_DISK);
    loop {
        looks.tick().await;
        if disk.is_exceeded() {
            return disk.limit_mib;
        }
    }
}
