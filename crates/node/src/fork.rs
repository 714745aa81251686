//! Copies of a sandbox that go on from one instant: live where the engine can, else through a snapshot.

use std::sync::Arc;

use dormouse_snapshot::Reason;
use dormouse_types::{SandboxId, SnapshotId, random_hex};
use futures_util::StreamExt;
use futures_util::future::join_all;

use crate::actor::{self, Answer};
use crate::create::{InFlight, check_same, check_timeout, digest, found_again, make};
use crate::error::NodeError;
use crate::hub::Hub;
use crate::journal::Idempotent;
use crate::lifecycle::Reply;
use crate::model::{Ingress, Receipt, SandboxInfo, SnapshotRequest, State, Tier};
use crate::work::{Awaited, Birth, Born, Once, Ready, place};

/// One child's outcome.
pub type Child = Result<(SandboxInfo, Receipt), NodeError>;

pub async fn fork(
    hub: &Arc<Hub>,
    in_flight: &InFlight,
    id: &SandboxId,
    count: usize,
    timeout_s: u32,
    key: Option<String>,
) -> Result<Vec<Child>, NodeError> {
    let timeout_ms = check_timeout(hub, timeout_s)?;
    let max = hub.config.limits.fork_count_max;
    if count == 0 || count > max {
        return Err(NodeError::invalid("count", format!("count = {count} is outside 1..={max}")));
    }
    let source = hub.actor(id)?;
    let children: Vec<SandboxId> = (0..count).map(|_| SandboxId::generate()).collect();
    let Some(key) = key else { return fork_into(hub, &source, children, timeout_ms).await };
    let owner = source.info().owner.map_or_else(String::new, |owner| owner.to_string());
    let _turn = in_flight.turn(&owner, &key).await;
    let same = digest(&["fork", id.as_str(), &count.to_string(), &timeout_s.to_string()]);
    if let Some(before) = hub.journal.idempotent(owner.clone(), key.clone()).await? {
        check_same(&before, &same, &key)?;
        let found = found_again(hub, &before).await?;
        if !found.is_empty() {
            return Ok(found);
        }
    }
    let result = Idempotent { sandboxes: children.clone(), digest: same };
    hub.journal.remember(owner.clone(), key.clone(), result, hub.now()).await?;
    let forked = fork_into(hub, &source, children, timeout_ms).await;
    if forked.as_ref().map_or(true, |children| children.iter().all(Result::is_err)) {
        hub.journal.unremember(owner, key).await?;
    }
    forked
}

async fn fork_into(
    hub: &Arc<Hub>,
    source: &actor::Handle,
    children: Vec<SandboxId>,
    timeout_ms: i64,
) -> Result<Vec<Child>, NodeError> {
    let info = source.info();
    let awake = matches!(info.state, State::Running | State::Paused { tier: Tier::Frozen });
    if awake && hub.engine(info.engine)?.capabilities().live_fork {
        return fork_live(hub, source, &info, children, timeout_ms).await;
    }
    fork_through_snapshot(hub, source, children, timeout_ms).await
}

/// The copy's identity: everything that tells it apart is new.
fn copy_of(hub: &Hub, source: &SandboxInfo, id: SandboxId, parent: Option<SnapshotId>) -> SandboxInfo {
    SandboxInfo {
        hostname: id.to_string(),
        id,
        state: State::Creating,
        parent,
        forked_from: Some(source.id.clone()),
        runtime: None,
        access_token: random_hex(32),
        ingress: Ingress {
            token: source.ingress.token.as_ref().map(|_| random_hex(32)),
            host: source.ingress.host.clone(),
        },
        started_at: hub.now(),
        ..source.clone()
    }
}

/// No snapshot is taken: what the copies could go back to is what the source could.
async fn fork_live(
    hub: &Arc<Hub>,
    source: &actor::Handle,
    info: &SandboxInfo,
    children: Vec<SandboxId>,
    timeout_ms: i64,
) -> Result<Vec<Child>, NodeError> {
    let (makes, awaited): (Vec<_>, Vec<_>) = children
        .into_iter()
        .map(|id| {
            let (place, awaited) = place();
            let place = Once::new(place);
            let birth = Birth { live: Some(place.clone()), ..Birth::of("fork") };
            let making = make(hub, copy_of(hub, info, id, info.parent.clone()), timeout_ms, birth);
            let made = async move {
                let made = making.await;
                // One that failed before its turn is not waited for.
                drop(place.take());
                made
            };
            (made, awaited)
        })
        .unzip();
    let (made, forked) = tokio::join!(join_all(makes), bear(hub, source, awaited));
    match forked {
        Err(error) if made.iter().all(Result::is_err) => Err(error),
        _ => Ok(made),
    }
}

/// Once every child is ready, or has failed: all at once.
async fn bear(hub: &Arc<Hub>, source: &actor::Handle, awaited: Vec<Awaited>) -> Result<(), NodeError> {
    let mut ready = Vec::with_capacity(awaited.len());
    for Awaited { told, born } in awaited {
        if let Ok(child) = told.await {
            ready.push(Ready { child, born });
        }
    }
    if ready.is_empty() {
        return Ok(());
    }
    let children = Once::new(ready);
    let answer = source.fork(children.clone()).await?;
    let Reply::Already { snapshot } = answer.reply else { return Ok(()) };
    let _pin = hub.pin(&snapshot);
    // The children need it as what they go back to.
    hub.journal.claim_snapshot(snapshot.clone(), None, hub.now()).await?;
    for Ready { born, .. } in children.take().unwrap_or_default() {
        drop(born.send(Ok(Born::FromSnapshot(snapshot.clone()))));
    }
    Ok(())
}

async fn fork_through_snapshot(
    hub: &Arc<Hub>,
    source: &actor::Handle,
    children: Vec<SandboxId>,
    timeout_ms: i64,
) -> Result<Vec<Child>, NodeError> {
    let taken: Answer = source.checkpoint(Reason::Fork, SnapshotRequest::default()).await?;
    let stopped_ms = taken.receipt.as_ref().and_then(|receipt| receipt.stopped_ms);
    let snapshot = match (&taken.reply, &taken.snapshot) {
        (Reply::Already { snapshot }, _) => snapshot.clone(),
        (_, Some(snapshot)) => snapshot.id.clone(),
        _ => return Err(NodeError::internal("the fork's snapshot is not known")),
    };
    let _pin = hub.pin(&snapshot);
    // The children need it as what they go back to.
    hub.journal.claim_snapshot(snapshot.clone(), None, hub.now()).await?;
    let at_once = hub.config.limits.starts_at_once_max.max(1);
    let made = futures_util::stream::iter(children.into_iter().map(|id| {
        let info = copy_of(hub, &taken.info, id, Some(snapshot.clone()));
        async move {
            let (info, receipt) = make(hub, info, timeout_ms, Birth::of("fork")).await?;
            Ok((info, Receipt { stopped_ms, ..receipt }))
        }
    }));
    Ok(made.buffered(at_once).collect().await)
}
