//! Taking a snapshot: quiesce → checkpoint into a draft → publish → write down.
//!
//! Where the runtime is to end, it is held, frozen as the image has it, until the snapshot exists: a
//! pause that fails or is interrupted anywhere before that leaves the sandbox to be thawed.

use std::path::Path;
use std::time::Duration;

use dormouse_engine::{After, EngineError, Failure};
use dormouse_snapshot::{Compat, FileRole, Manifest, Reason};
use dormouse_store::{BeginError, Draft, PublishError};
use dormouse_types::RuntimeId;

use super::{Job, Report};
use crate::agent;
use crate::complete;
use crate::error::{ErrorCode, NodeError};
use crate::journal::SnapshotRow;
use crate::model::{SnapshotInfo, SnapshotRequest};
use crate::retention;

/// A snapshot that exists.
pub struct Taken {
    pub manifest: Manifest,
    /// On the disk.
    pub bytes: u64,
    pub stopped: Duration,
    pub notes: Vec<String>,
}

impl Taken {
    pub fn info(&self) -> SnapshotInfo {
        SnapshotInfo { bytes: self.bytes, ..SnapshotInfo::of(&self.manifest) }
    }
}

/// No snapshot was taken.
pub enum NotTaken {
    /// The sandbox was not touched, or runs on.
    Unchanged(NodeError),
    /// The runtime ended.
    Lost(NodeError),
}

impl NotTaken {
    pub fn report(self) -> Report {
        match self {
            Self::Unchanged(error) => Report::unchanged(error),
            Self::Lost(error) => Report::lost(error),
        }
    }
}

impl Job {
    /// `After::KeepRunning`, or `After::Hold` with the runtime to be ended once there is a snapshot.
    pub(super) async fn capture(&self, reason: Reason, after: After) -> Result<Taken, NotTaken> {
        let runtime = self.runtime().map_err(NotTaken::Unchanged)?;
        self.check_room(&runtime).await.map_err(NotTaken::Unchanged)?;
        self.reached("room");
        let dir = self.engine.keeper_dir(&self.order.info.id);
        let mut notes = Vec::new();
        // Without a keeper nobody can be asked.
        if reason != Reason::Internal {
            match agent::quiesce(&dir).await {
                Ok(quiesced) => notes.extend(quiesced.notes),
                Err(error) => notes.push(format!("the file systems were not synced first: {error}")),
            }
        }
        self.reached("quiesced");
        let taken = self.take(reason, after, &runtime, notes).await;
        if after == After::KeepRunning || matches!(taken, Err(NotTaken::Unchanged(_))) {
            self.go_on(&dir).await;
        }
        taken
    }

    async fn take(
        &self,
        reason: Reason,
        after: After,
        runtime: &RuntimeId,
        notes: Vec<String>,
    ) -> Result<Taken, NotTaken> {
        let id = &self.order.info.id;
        let draft = self.begin_draft().await.map_err(NotTaken::Unchanged)?;
        let captured = self.engine.checkpoint(id, runtime, draft.path(), after).await.map_err(not_taken)?;
        self.reached("captured");
        let files = captured.files.into_iter().map(|file| (file.name, file.role)).collect();
        let published = self.publish(draft, files, self.manifest(reason)).await;
        self.reached("published");
        match published {
            Ok(manifest) => {
                self.write_down(&manifest).await;
                complete::later(&self.order.hub, manifest.id.clone());
                let bytes = retention::occupied(&self.order.hub, &manifest).await;
                let notes = [notes, captured.notes].concat();
                Ok(Taken { manifest, bytes, stopped: captured.stopped, notes })
            }
            Err(error) if after == After::Hold => Err(self.let_go(runtime, error).await),
            Err(error) => Err(NotTaken::Unchanged(error)),
        }
    }

    /// Undoes `After::Hold`.
    async fn let_go(&self, runtime: &RuntimeId, error: NodeError) -> NotTaken {
        match self.engine.thaw(&self.order.info.id, runtime).await {
            Ok(()) => NotTaken::Unchanged(error),
            Err(thaw) => {
                let message = format!("{error}; and it cannot be let go on: {thaw}");
                NotTaken::Lost(NodeError::new(error.code, message))
            }
        }
    }

    async fn publish(
        &self,
        mut draft: Draft,
        files: Vec<(String, FileRole)>,
        manifest: Manifest,
    ) -> Result<Manifest, NodeError> {
        let work = move || {
            let names: Vec<(&str, FileRole)> =
                files.iter().map(|(name, role)| (name.as_str(), *role)).collect();
            draft.publish(manifest, &names)
        };
        let published = self.order.hub.blocking("the publication of a snapshot", work).await?;
        published.map_err(|error: PublishError| {
            let code = if error.is_no_space() { ErrorCode::NoSpace } else { ErrorCode::Internal };
            NodeError::new(code, format!("the snapshot cannot be published: {error}"))
        })
    }

    /// Refuses before anything is touched when the state would not fit on the disk.
    async fn check_room(&self, runtime: &RuntimeId) -> Result<(), NodeError> {
        let usage = self.engine.usage(&self.order.info.id, runtime).await.unwrap_or_default();
        let needed = usage.memory_bytes + usage.disk_bytes + self.order.hub.config.limits.disk_free_bytes_min;
        let store = self.order.hub.store.clone();
        let space = self.order.hub.blocking("the look at the disk", move || store.space()).await?;
        let space = space.map_err(|error| NodeError::internal(error.to_string()))?;
        if space.available_bytes < needed {
            let message = format!(
                "the data folder's disk has {} MiB left and the snapshot of {} needs about {} MiB: free some \
                 (`dormouse gc`, `dormouse snapshot rm`) and try again; the sandbox runs on",
                space.available_bytes >> 20,
                self.order.info.id,
                needed >> 20,
            );
            return Err(NodeError::new(ErrorCode::NoSpace, message));
        }
        Ok(())
    }

    async fn begin_draft(&self) -> Result<Draft, NodeError> {
        let (store, id) = (self.order.hub.store.clone(), self.order.pending.snapshot.clone());
        let draft = self.order.hub.blocking("the start of a snapshot", move || store.begin(&id)).await?;
        draft.map_err(|error: BeginError| {
            let code = match error {
                BeginError::NoSpace { .. } => ErrorCode::NoSpace,
                _ => ErrorCode::Internal,
            };
            NodeError::new(code, error.to_string())
        })
    }

    /// Ends what the quiesce began, where the same runtime goes on.
    async fn go_on(&self, dir: &Path) {
        let wake = self.wake_as_before();
        if let Err(error) = agent::wake(dir, &wake, Duration::from_secs(20)).await {
            tracing::warn!(sandbox = %self.order.info.id, %error, "the agent was not told to go on");
        }
    }

    /// Its files are the store's to fill in.
    fn manifest(&self, reason: Reason) -> Manifest {
        let (info, hub) = (&self.order.info, &self.order.hub);
        let SnapshotRequest { name, labels, ttl_s } = self.order.asked.clone().unwrap_or_default();
        let created_at_ms = hub.now_ms();
        // Templates' go when the template goes, what a sandbox is paused on when the sandbox goes.
        let ttl_s = match ttl_s {
            Some(0) => None,
            None if reason == Reason::Template => None,
            asked => Some(asked.unwrap_or(hub.config.limits.snapshot_ttl_s)),
        };
        let until = |ttl_s: u64| {
            created_at_ms.saturating_add(i64::try_from(ttl_s).unwrap_or(i64::MAX).saturating_mul(1000))
        };
        let compat = Compat {
            agent_version: info.agent_version.clone().unwrap_or_default(),
            agent_digest: info.agent_digest.clone().unwrap_or_default(),
            ..self.engine.compat()
        };
        Manifest {
            id: self.order.pending.snapshot.clone(),
            parent: self.order.head.clone(),
            sandbox: info.id.clone(),
            runtime: info.runtime.clone().unwrap_or_else(|| self.order.pending.runtime.clone()),
            template: info.template.clone(),
            engine: info.engine,
            generation: info.generation,
            reason,
            created_at_ms,
            expires_at_ms: ttl_s.map(until),
            shape: info.shape,
            rootfs: info.rootfs.clone(),
            memory: true,
            names: name.into_iter().collect(),
            labels,
            compat,
            files: Vec::new(),
        }
    }

    async fn write_down(&self, manifest: &Manifest) {
        let row = SnapshotRow {
            id: manifest.id.clone(),
            parent: manifest.parent.clone(),
            sandbox: manifest.sandbox.clone(),
            automatic: matches!(manifest.reason, Reason::Pause | Reason::Policy | Reason::Internal),
            owner: self.order.info.owner.clone(),
            created_ms: manifest.created_at_ms,
            names: manifest.names.clone(),
        };
        // The manifest itself is the snapshot; the row is made again from it at the next start.
        if let Err(error) = self.order.hub.journal.put_snapshot(row).await {
            tracing::warn!(snapshot = %manifest.id, %error, "a snapshot's row was not written");
        }
    }
}

fn not_taken(error: EngineError) -> NotTaken {
    let lost = matches!(error.failure, Failure::Exited { .. });
    let error = NodeError::from(error);
    if lost { NotTaken::Lost(error) } else { NotTaken::Unchanged(error) }
}
