//! What nobody needs any more: expired snapshots, root file systems, agents, leftovers of engines.

use std::collections::{BTreeSet, HashMap};
use std::sync::{Arc, Weak};
use std::time::Duration;

use dormouse_types::EngineKind;

use crate::boot;
use crate::error::NodeError;
use crate::hub::Hub;
use crate::journal;
use crate::model::{Collected, State};
use crate::retention;

const EXPIRY_LOOK: Duration = Duration::from_secs(600);

pub async fn collect(hub: &Arc<Hub>) -> Result<Collected, NodeError> {
    let (snapshots, mut freed_bytes) = retention::expire(hub).await?;
    let (images, bytes) = images(hub).await?;
    freed_bytes += bytes;
    let agents = agents(hub).await?;
    let mut leftovers = Vec::new();
    sweep(hub, &mut leftovers).await?;
    let collected = Collected { snapshots, images, agents, leftovers, freed_bytes };
    hub.tell(None, "gc", format!("freed {} bytes", collected.freed_bytes));
    Ok(collected)
}

/// Root file systems that no snapshot, sandbox, template or build names.
async fn images(hub: &Arc<Hub>) -> Result<(Vec<String>, u64), NodeError> {
    let used = retention::rootfs_in_use(hub).await?;
    let images = hub.images.clone();
    let remove = move || {
        let (mut names, mut bytes) = (Vec::new(), 0);
        for image in images.list().map_err(|error| error.to_string())? {
            if used.contains(&image.id) {
                continue;
            }
            bytes += images.remove(&image.id, &[]).map_err(|error| error.to_string())?.bytes;
            names.push(image.id);
        }
        Ok::<_, String>((names, bytes))
    };
    // A build may be about to use one: none is removed while one runs.
    let Ok(_no_build) = hub.builds.try_acquire_many(crate::build::BUILDS_AT_ONCE) else {
        return Ok((Vec::new(), 0));
    };
    let removed = hub.blocking("the removal of images", remove).await?;
    let (names, bytes) = removed.map_err(NodeError::internal)?;
    for name in &names {
        hub.journal.uncache_rootfs(name.clone()).await?;
    }
    Ok((names, bytes))
}

/// Agents that neither this release nor a snapshot or sandbox needs.
async fn agents(hub: &Arc<Hub>) -> Result<Vec<String>, NodeError> {
    let store = hub.store.clone();
    let listed = hub.blocking("the list of snapshots", move || store.list()).await?;
    let listed = listed.map_err(|error| NodeError::internal(error.to_string()))?;
    let mut used: BTreeSet<String> =
        listed.into_iter().map(|manifest| manifest.compat.agent_digest).collect();
    used.extend(hub.actors().into_iter().filter_map(|actor| actor.info().agent_digest));
    used.insert(hub.agent_digest.clone());
    let dir = hub.config.data_dir.join("agent");
    let remove = move || {
        let mut removed = Vec::new();
        for entry in std::fs::read_dir(&dir).into_iter().flatten().flatten() {
            let name = entry.file_name().to_string_lossy().into_owned();
            if !used.contains(&name) && std::fs::remove_dir_all(entry.path()).is_ok() {
                removed.push(name);
            }
        }
        removed
    };
    // While something is being made its agent is not yet written down.
    if hub.actors().iter().any(|actor| actor.info().state == State::Creating) || hub.agent_digest.is_empty() {
        return Ok(Vec::new());
    }
    hub.blocking("the removal of agents", remove).await
}

async fn sweep(hub: &Arc<Hub>, leftovers: &mut Vec<String>) -> Result<(), NodeError> {
    // No runtime is started meanwhile, and one whose start ended is not yet told by a busy state.
    let _alone = hub.gate.write().await;
    let actors: Vec<_> = hub.actors().into_iter().map(|actor| actor.info()).collect();
    let settled =
        |state: &State| matches!(state, State::Running | State::Paused { .. } | State::Failed { .. });
    if let Some(busy) = actors.iter().find(|info| !settled(&info.state)) {
        leftovers.push(format!("not looked for: sandbox {} is on its way; try again", busy.id));
        return Ok(());
    }
    let mut keep: HashMap<EngineKind, Vec<_>> = HashMap::new();
    for info in actors {
        keep.entry(info.engine).or_default().push((info.id, info.runtime));
    }
    boot::sweep(hub, &keep, leftovers).await.map_err(|error| NodeError::internal(error.to_string()))?;
    // Only a person calls this: what the journal had forgotten is gone now, or was not there.
    journal::trust_again(&hub.config.data_dir).map_err(|error| NodeError::internal(error.to_string()))
}

/// Removes what expires while the daemon runs.
pub async fn run(hub: Weak<Hub>) {
    loop {
        tokio::time::sleep(EXPIRY_LOOK).await;
        let Some(hub) = hub.upgrade() else { return };
        if let Err(error) = retention::expire(&hub).await {
            tracing::warn!(%error, "expired snapshots were not removed");
        }
    }
}
