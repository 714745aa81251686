//! Freezing and thawing because somebody asked: the lifecycle's own steps, with no policy behind them.

use std::time::Duration;

use dormouse_types::SandboxId;

use crate::actor::View;
use crate::error::NodeError;
use crate::lifecycle::{IdleTier, Reply, Request};
use crate::model::{State, Tier};
use crate::node::Node;

/// The lifecycle drops the wish while something else is asked of the sandbox: it is said again.
const ATTEMPTS_MAX: usize = 20;
const ATTEMPT: Duration = Duration::from_millis(500);

impl Node {
    /// Takes all CPU time away; the next request to the sandbox gives it back. Idempotent.
    pub async fn freeze(&self, id: &SandboxId) -> Result<(), NodeError> {
        let handle = self.hub.actor(id)?;
        let mut view = handle.view();
        for _ in 0..ATTEMPTS_MAX {
            let View { info, activity, .. } = view.borrow_and_update().clone();
            match info.state {
                State::Paused { tier: Tier::Frozen } => return Ok(()),
                State::Running => handle.idle(activity, IdleTier::Frozen),
                State::Creating | State::Pausing | State::Resuming | State::RollingBack => {}
                State::Paused { .. } => {
                    return Err(NodeError::conflict(format!(
                        "sandbox {id} is paused to disk: resume it first"
                    )));
                }
                State::Killed | State::Failed { .. } => return Err(NodeError::no_sandbox(id)),
            }
            // Either way the state is looked at again.
            let settled = view.wait_for(|view| view.info.state == State::Paused { tier: Tier::Frozen });
            drop(tokio::time::timeout(ATTEMPT, settled).await.map(|seen| seen.map(drop)));
        }
        Err(NodeError::unavailable(format!("sandbox {id} was too busy to be frozen; try again")))
    }

    /// Gives a frozen sandbox its CPU time back. A running one is left alone.
    pub async fn thaw(&self, id: &SandboxId) -> Result<(), NodeError> {
        let answer = self.hub.actor(id)?.ask(Request::Wake { resume: false }).await?;
        if answer.reply == Reply::Asleep {
            return Err(NodeError::conflict(format!("sandbox {id} is paused to disk: resume it instead")));
        }
        Ok(())
    }
}
