//! A byte stream into a sandbox: waits while it is on its way, wakes it where it may, gives up truly.

use std::sync::Arc;
use std::time::Duration;

use dormouse_types::SandboxId;
use dormouse_wire::keeper_client::{ConnectError, connect_agent};
use dormouse_wire::stream::Refusal;
use tokio::net::UnixStream;

use crate::actor::Handle;
use crate::error::{ErrorCode, NodeError, StreamError};
use crate::hub::Hub;
use crate::lifecycle::{Reply, Request};
use crate::model::{Purpose, State, Tier};

/// The state changed under the attempt this often: something is wrong.
const ATTEMPTS_MAX: usize = 5;
/// A keeper that does not answer within this is not going to.
const CONNECT_SECONDS_MAX: u64 = 60;

pub async fn open(
    hub: &Arc<Hub>,
    id: &SandboxId,
    port: u16,
    purpose: Purpose,
) -> Result<UnixStream, StreamError> {
    let handle = hub.actor(id).map_err(|_| StreamError::NotFound(id.to_string()))?;
    let mut last = StreamError::Failed(format!("sandbox {id} changed its state again and again; try again"));
    for _ in 0..ATTEMPTS_MAX {
        wake(&handle, id, purpose).await?;
        let engine = hub.engine(handle.info().engine).map_err(|error| StreamError::Failed(error.message))?;
        let dir = engine.keeper_dir(id);
        let attempt =
            tokio::time::timeout(Duration::from_secs(CONNECT_SECONDS_MAX), connect_agent(&dir, port));
        let opened = tokio::select! {
            opened = attempt => opened,
            // A pause overtook it: ask again what is to be done.
            () = asleep(&handle) => continue,
        };
        match opened {
            Ok(Ok(stream)) => return Ok(stream),
            Ok(Err(ConnectError::Refused { why: Refusal::Closed | Refusal::Unreachable, .. })) => {
                return Err(StreamError::PortClosed(port));
            }
            Ok(Err(error)) => last = StreamError::Failed(format!("sandbox {id}: {error}")),
            Err(_) => {
                return Err(StreamError::Failed(format!(
                    "the keeper of sandbox {id} did not connect to port {port} within {CONNECT_SECONDS_MAX} s"
                )));
            }
        }
        if handle.info().state == State::Running {
            return Err(last);
        }
    }
    Err(last)
}

async fn wake(handle: &Handle, id: &SandboxId, purpose: Purpose) -> Result<(), StreamError> {
    let answer = handle.ask(Request::Wake { resume: purpose == Purpose::Wake }).await;
    match answer {
        Ok(answer) if answer.reply == Reply::Asleep => Err(StreamError::Paused(id.to_string())),
        Ok(_) => Ok(()),
        Err(NodeError { code: ErrorCode::NotFound, .. }) => Err(StreamError::NotFound(id.to_string())),
        Err(error) => Err(StreamError::Failed(error.message)),
    }
}

/// Resolves when the sandbox is where no connection can be made.
async fn asleep(handle: &Handle) {
    let mut view = handle.view();
    let gone = view.wait_for(|view| {
        matches!(
            view.info.state,
            State::Paused { tier: Tier::Disk | Tier::Archive } | State::Failed { .. } | State::Killed
        )
    });
    // The task ended: the sandbox is gone.
    drop(gone.await.map(drop));
}
