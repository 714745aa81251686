//! Digests of large files, after their snapshot was published: nobody waits for them.
//!
//! One snapshot at a time, so that sandboxes keep the processors. What a daemon did not get to is found
//! by the next one.

use std::sync::{Arc, Weak};
use std::time::Duration;

use dormouse_snapshot::Manifest;
use dormouse_store::Cancel;
use dormouse_types::SnapshotId;

use crate::error::NodeError;
use crate::hub::Hub;

/// What took the snapshot is answered first: hashing keeps the disk and the processors busy.
const DELAY: Duration = Duration::from_millis(200);

/// Begins to hash what the snapshot has no digests of, and comes back at once.
pub fn later(hub: &Arc<Hub>, id: SnapshotId) {
    let hub = Arc::clone(hub);
    tokio::spawn(async move {
        tokio::time::sleep(DELAY).await;
        one(&hub, id).await;
    });
}

/// The same for all that a former daemon left.
pub async fn all(hub: Weak<Hub>) {
    let Some(hub) = hub.upgrade() else { return };
    let store = hub.store.clone();
    let listed = hub.blocking("the list of snapshots", move || store.list()).await;
    let left = |manifest: &Manifest| manifest.files.iter().any(|file| file.digest.is_none());
    for manifest in listed.ok().and_then(Result::ok).unwrap_or_default() {
        if left(&manifest) {
            one(&hub, manifest.id).await;
        }
    }
}

async fn one(hub: &Hub, id: SnapshotId) {
    let _turn = hub.completions.acquire().await;
    let (store, of) = (hub.store.clone(), id.clone());
    let work = move || store.complete(&of, &Cancel::default());
    let completed = hub.blocking("the hashing of a snapshot", work).await;
    match completed.and_then(|completed| completed.map_err(|error| NodeError::internal(error.to_string()))) {
        Ok(_) => {}
        Err(error) => tracing::warn!(snapshot = %id, %error, "its files can be checked by their length only"),
    }
}
