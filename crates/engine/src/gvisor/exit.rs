//! Noticing that a sandbox or its keeper ended.

use std::sync::Arc;
use std::time::Duration;

use dormouse_sys::process::PidFd;
use dormouse_types::{RuntimeId, SandboxId};
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;

use super::{Inner, blocking};
use crate::model::Exit;

const LOOK_AGAIN: Duration = Duration::from_secs(1);

pub(super) async fn exited(inner: Arc<Inner>, sandbox: &SandboxId, runtime: &RuntimeId) -> Exit {
    let keeper = inner.keeper(sandbox);
    let (asked, id) = (keeper.clone(), runtime.clone());
    let looked = blocking(move || {
        let container = inner.linked(&id);
        let sandbox = container.as_ref().and_then(super::container::Container::sandbox);
        Ok((container, sandbox, asked.process()))
    });
    let (container, sandbox, keeper_process) = match looked.await {
        Ok(looked) => looked,
        Err(error) => return Exit::Runtime { why: error.to_string() },
    };
    let Some(container) = container else {
        return Exit::Runtime { why: format!("there is no runtime {runtime}") };
    };
    let runtime_ended = async {
        if let Some(handle) = sandbox {
            ended(handle).await;
        }
    };
    let keeper_ended = async {
        if let Some(handle) = keeper_process {
            ended(handle).await;
        }
    };
    let of_runtime = tokio::select! {
        biased;
        () = runtime_ended => true,
        () = keeper_ended => false,
    };
    let why = blocking(move || Ok(if of_runtime { container.why_ended() } else { keeper.log_tail() }))
        .await
        .unwrap_or_else(|error| error.to_string());
    if of_runtime {
        Exit::Runtime { why }
    } else {
        Exit::Keeper { why: format!("its process ended; its last words: {why}") }
    }
}

#[allow(
    deprecated,
    reason = "the successor is unsafe for types whose descriptor changes; a pidfd's never does"
)]
async fn ended(handle: PidFd) {
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
