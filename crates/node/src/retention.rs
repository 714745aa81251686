//! Which snapshots stay: removal, pruning of automatic ones, expiry.
//!
//! Invariants: nothing that a sandbox is paused on, that a template is made of, or that is being
//! restored from is removed; what somebody asked for by itself stays until its time is over or it is
//! removed by name; the lineage stays a tree (children hang on the removed one's parent).

use std::collections::{BTreeSet, HashSet};
use std::sync::Arc;

use dormouse_snapshot::{Manifest, Reason};
use dormouse_types::{SandboxId, SnapshotId};

use crate::error::{ErrorCode, NodeError};
use crate::hub::Hub;
use crate::journal::SnapshotRow;
use crate::model::{Removed, SnapshotInfo, State, Tier};

/// After a pause or a kill: automatic snapshots of this sandbox that nothing depends on any more.
pub async fn prune(hub: Arc<Hub>, sandbox: SandboxId, keep: Option<SnapshotId>) {
    let rows = match hub.journal.snapshots_of(sandbox.clone()).await {
        Ok(rows) => rows,
        Err(error) => return tracing::warn!(%sandbox, %error, "superfluous snapshots were not looked for"),
    };
    for row in rows {
        let superfluous = row.automatic && row.names.is_empty() && Some(&row.id) != keep.as_ref();
        if !superfluous || hub.is_pinned(&row.id) || is_head(&hub, &row.id) {
            continue;
        }
        if let Err(error) = remove(&hub, &row).await {
            tracing::warn!(snapshot = %row.id, %error, "a superfluous snapshot stays");
        }
    }
}

/// Some sandbox stands on it.
pub fn is_head(hub: &Hub, snapshot: &SnapshotId) -> bool {
    hub.actors().iter().any(|actor| actor.info().parent.as_ref() == Some(snapshot))
}

/// Why it must stay, if it must.
async fn needed(hub: &Hub, snapshot: &SnapshotId) -> Result<Option<String>, NodeError> {
    if hub.is_pinned(snapshot) {
        return Ok(Some("it is being restored from right now".to_owned()));
    }
    for actor in hub.actors() {
        let info = actor.info();
        let asleep = matches!(
            info.state,
            State::Paused { tier: Tier::Disk | Tier::Archive }
                | State::Resuming
                | State::Pausing
                | State::RollingBack
        );
        if asleep && info.parent.as_ref() == Some(snapshot) {
            return Ok(Some(format!("sandbox {} is paused on it: resume or kill that first", info.id)));
        }
    }
    let templates = hub.journal.templates().await?;
    Ok(templates
        .iter()
        .find(|row| row.info.snapshot.as_ref() == Some(snapshot))
        .map(|row| format!("template {} starts from it: remove the template", row.info.id)))
}

/// Takes it out of store and lineage; gives the bytes that came back.
async fn remove(hub: &Hub, row: &SnapshotRow) -> Result<u64, NodeError> {
    let (store, id) = (hub.store.clone(), row.id.clone());
    let freed = match hub.blocking("the removal of a snapshot", move || store.remove(&id)).await? {
        Ok(freed) => freed.bytes,
        Err(dormouse_store::RemoveError::NotFound { .. }) => 0,
        Err(error) => return Err(NodeError::internal(error.to_string())),
    };
    hub.journal.drop_snapshot(row.id.clone()).await?;
    for actor in hub.actors() {
        if actor.info().parent.as_ref() == Some(&row.id) {
            actor.rehead(row.id.clone(), row.parent.clone()).await;
        }
    }
    hub.tell(Some(&row.sandbox), "snapshot_removed", format!("snapshot {}", row.id));
    Ok(freed)
}

pub async fn find(hub: &Hub, id_or_name: &str) -> Result<SnapshotRow, NodeError> {
    if let Ok(id) = id_or_name.parse::<SnapshotId>()
        && let Some(row) = hub.journal.snapshot(id).await?
    {
        return Ok(row);
    }
    let named = hub.journal.snapshot_by_name(id_or_name.to_owned()).await?;
    named.ok_or_else(|| {
        let shown: String = id_or_name.chars().take(80).collect();
        NodeError::not_found(format!("there is no snapshot with the id or name {shown:?}"))
    })
}

/// On behalf of a person.
pub async fn remove_asked(hub: &Hub, id_or_name: &str) -> Result<Removed, NodeError> {
    let row = find(hub, id_or_name).await?;
    if let Some(why) = needed(hub, &row.id).await? {
        return Err(NodeError::conflict(format!("snapshot {} cannot be removed: {why}", row.id)));
    }
    remove_known(hub, &row).await
}

/// Without the question whether it is needed.
pub async fn remove_known(hub: &Hub, row: &SnapshotRow) -> Result<Removed, NodeError> {
    let mut children: Vec<String> =
        hub.journal.children(row.id.clone()).await?.into_iter().map(String::from).collect();
    let sandboxes = hub.actors().into_iter().map(|actor| actor.info());
    children.extend(
        sandboxes.filter(|info| info.parent.as_ref() == Some(&row.id)).map(|info| info.id.to_string()),
    );
    let freed_bytes = remove(hub, row).await?;
    Ok(Removed { id: row.id.to_string(), freed_bytes, children, kept: Vec::new() })
}

/// Removes what has expired; gives names and bytes.
pub async fn expire(hub: &Hub) -> Result<(Vec<String>, u64), NodeError> {
    let (store, now) = (hub.store.clone(), hub.now());
    let expired = hub.blocking("the look for expired snapshots", move || store.expired(now)).await?;
    let expired = expired.map_err(|error| NodeError::internal(error.to_string()))?;
    let (mut names, mut bytes) = (Vec::new(), 0);
    for id in expired {
        if needed(hub, &id).await?.is_some() {
            continue;
        }
        let Some(row) = hub.journal.snapshot(id).await? else { continue };
        bytes += remove(hub, &row).await?;
        names.push(row.id.to_string());
    }
    Ok((names, bytes))
}

/// Root file systems that something still needs.
pub async fn rootfs_in_use(hub: &Hub) -> Result<BTreeSet<String>, NodeError> {
    let store = hub.store.clone();
    let listed = hub.blocking("the list of snapshots", move || store.list()).await?;
    let listed = listed.map_err(|error| NodeError::internal(error.to_string()))?;
    let mut used: BTreeSet<String> = listed.into_iter().map(|manifest| manifest.rootfs).collect();
    used.extend(hub.actors().into_iter().map(|actor| actor.info().rootfs));
    used.extend(hub.journal.templates().await?.into_iter().map(|row| row.info.rootfs));
    Ok(used)
}

pub async fn load(hub: &Hub, id: &SnapshotId) -> Result<Manifest, NodeError> {
    let (store, wanted) = (hub.store.clone(), id.clone());
    let loaded = hub.blocking("the reading of a manifest", move || store.load(&wanted)).await?;
    loaded.map_err(|error| match error {
        dormouse_store::LoadError::NotFound { .. } => NodeError::not_found(error.to_string()),
        _ => NodeError::new(ErrorCode::Failed, error.to_string()),
    })
}

/// The manifest's facts under the lineage as it is now.
pub async fn info(hub: &Hub, row: SnapshotRow) -> Result<SnapshotInfo, NodeError> {
    let manifest = load(hub, &row.id).await?;
    let bytes = occupied(hub, &manifest).await;
    Ok(SnapshotInfo { names: row.names, parent: row.parent, bytes, ..SnapshotInfo::of(&manifest) })
}

/// What it takes on the disk: the files of a microVM's are mostly holes.
pub async fn occupied(hub: &Hub, manifest: &Manifest) -> u64 {
    let (store, id) = (hub.store.clone(), manifest.id.clone());
    let asked = hub.blocking("the look at a snapshot's size", move || store.occupied_bytes(&id)).await;
    asked.unwrap_or_else(|_| manifest.bytes())
}

/// Brings the rows in line with the store, which alone knows what exists.
pub async fn reconcile(hub: &Hub) -> Result<(), NodeError> {
    let store = hub.store.clone();
    let listed = hub.blocking("the list of snapshots", move || store.list()).await?;
    let manifests = listed.map_err(|error| NodeError::internal(error.to_string()))?;
    let rows = hub.journal.snapshots().await?;
    let exist: HashSet<SnapshotId> = manifests.iter().map(|manifest| manifest.id.clone()).collect();
    let known: HashSet<SnapshotId> = rows.iter().map(|row| row.id.clone()).collect();
    for row in rows {
        if !exist.contains(&row.id) {
            hub.journal.drop_snapshot(row.id).await?;
        }
    }
    for manifest in manifests {
        if known.contains(&manifest.id) {
            continue;
        }
        let automatic = matches!(manifest.reason, Reason::Pause | Reason::Policy | Reason::Internal);
        let row = SnapshotRow {
            id: manifest.id,
            parent: manifest.parent.filter(|parent| exist.contains(parent)),
            sandbox: manifest.sandbox,
            automatic,
            owner: None,
            created_ms: manifest.created_at_ms,
            names: manifest.names,
        };
        hub.journal.put_snapshot(row).await?;
    }
    Ok(())
}
