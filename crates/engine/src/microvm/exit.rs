//! Noticing that a sandbox or its keeper ended.

use std::sync::Arc;

use dormouse_types::{RuntimeId, SandboxId};

use super::Inner;
use crate::common::{blocking, ended};
use crate::model::Exit;

pub(super) async fn exited(inner: Arc<Inner>, sandbox: &SandboxId, runtime: &RuntimeId) -> Exit {
    let keeper = inner.keeper(sandbox);
    let runtime = inner.runtime(runtime);
    if !runtime.exists() {
        return Exit::Runtime { why: format!("there is no runtime {}", runtime.id) };
    }
    let (watched, asked) = (runtime.clone(), keeper.clone());
    let looked = blocking(move || Ok((watched.process(), asked.process())));
    let (process, keeper_process) = match looked.await {
        Ok(looked) => looked,
        Err(error) => return Exit::Runtime { why: error.to_string() },
    };
    let runtime_ended = tokio::select! {
        biased;
        () = ended(process) => true,
        () = ended(keeper_process) => false,
    };
    let told = blocking(move || {
        Ok(if runtime_ended {
            Exit::Runtime { why: runtime.why_ended() }
        } else {
            Exit::Keeper { why: format!("its process ended; its last words: {}", keeper.log_tail()) }
        })
    });
    told.await.unwrap_or_else(|error| Exit::Runtime { why: error.to_string() })
}
