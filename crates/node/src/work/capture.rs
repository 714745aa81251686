//! Taking a snapshot: quiesce → checkpoint into a draft → publish → write down.
//!
//! Where the runtime was stopped and the snapshot cannot be published, the sandbox is started again
//! from what was written: a failed pause leaves a running sandbox.

use std::collections::BTreeMap;
use std::time::Duration;

use dormouse_engine::{After, EngineError, Failure};
use dormouse_snapshot::{Compat, FileRole, Manifest, Reason};
use dormouse_store::{BeginError, Draft, PublishError};
use dormouse_wire::keeper::Session;

use super::{Job, Report};
use crate::agent;
use crate::error::{ErrorCode, NodeError};
use crate::journal::{PendingOp, SnapshotRow};
use crate::lifecycle::Outcome;
use crate::model::SandboxInfo;

/// A snapshot that exists.
pub struct Taken {
    pub manifest: Manifest,
    pub stopped: Duration,
    pub notes: Vec<String>,
}

/// No snapshot was taken.
pub enum NotTaken {
    /// The sandbox was not touched, or runs on.
    Unchanged(NodeError),
    /// The runtime ended.
    Lost(NodeError),
    /// The runtime was stopped; its state is in the draft, which cannot be published.
    Stopped { error: NodeError, draft: Box<Draft>, manifest: Box<Manifest> },
}

impl Job {
    /// `Work::Checkpoint`, `Work::Pause`, `Work::ReplaceKeeper`.
    pub(super) async fn capture(&self, reason: Reason, after: After) -> Result<Taken, NotTaken> {
        let runtime = self.runtime().map_err(NotTaken::Unchanged)?;
        self.check_room().await.map_err(NotTaken::Unchanged)?;
        let dir = self.engine.keeper_dir(&self.order.info.id);
        let mut notes = Vec::new();
        if reason != Reason::Internal {
            match agent::quiesce(&dir).await {
                Ok(quiesced) => notes.extend(quiesced.notes),
                Err(error) => notes.push(format!("the file systems were not synced first: {error}")),
            }
        }
        let mut draft = self.begin_draft().await.map_err(NotTaken::Unchanged)?;
        let taken = self.engine.checkpoint(&self.order.info.id, &runtime, draft.path(), after).await;
        if after == After::KeepRunning || taken.is_err() {
            self.go_on(&dir).await;
        }
        let captured = taken.map_err(|error| not_taken(error))?;
        notes.extend(captured.notes);
        let mut pending = self.order.pending.clone();
        pending.captured = Some(PendingOp::files_of(&captured.files));
        pending.notes.clone_from(&notes);
        let written = self.order.hub.journal.update_op(self.order.info.id.clone(), pending, self.order.hub.now()).await;
        if let Err(error) = written {
            tracing::warn!(sandbox = %self.order.info.id, %error, "the end of a checkpoint was not written down");
        }
        let files: Vec<(String, FileRole)> =
            captured.files.into_iter().map(|file| (file.name, file.role)).collect();
        let manifest = manifest(&self.order.hub, &self.order.info, &self.order.pending, reason, self.engine.compat());
        let asked = self.order.asked.clone().unwrap_or_default();
        let expires_at_ms = match asked.ttl_s {
            None => manifest.expires_at_ms,
            Some(0) => None,
            Some(ttl_s) => Some(manifest.created_at_ms.saturating_add(i64::try_from(ttl_s).unwrap_or(i64::MAX).saturating_mul(1000))),
        };
        let manifest = Manifest {
            parent: self.order.head.clone(),
            expires_at_ms,
            names: asked.name.into_iter().collect(),
            labels: asked.labels,
            ..manifest
        };
        let unpublished = manifest.clone();
        let result = self
            .order
            .hub
            .blocking("the publication of a snapshot", move || {
                let names: Vec<(&str, FileRole)> =
                    files.iter().map(|(name, role)| (name.as_str(), *role)).collect();
                let published = draft.publish(manifest, &names);
                (published, draft)
            })
            .await;
        let (published, draft) = result.map_err(NotTaken::Lost)?;
        match published {
            Ok(manifest) => {
                write_down(self, &manifest).await;
                Ok(Taken { manifest, stopped: captured.stopped, notes })
            }
            Err(error) if after == After::KeepRunning => Err(NotTaken::Unchanged(publish_error(&error))),
            Err(error) => Err(NotTaken::Stopped {
                error: publish_error(&error),
                draft: Box::new(draft),
                manifest: Box::new(unpublished),
            }),
        }
    }

    /// What is true after a snapshot was not taken; starts the sandbox again where it was stopped.
    pub(super) async fn not_captured(&self, failed: NotTaken) -> Report {
        match failed {
            NotTaken::Unchanged(error) => Report::unchanged(error),
            NotTaken::Lost(error) => Report::lost(error),
            NotTaken::Stopped { error, draft, manifest } => {
                let launched = self.launch_from(&manifest, draft.path(), Session::Continue).await;
                drop(draft);
                match launched {
                    Ok(launched) => {
                        let mut report = self.started("pause_undone", None, launched);
                        report.outcome = Outcome::Restarted { error };
                        report
                    }
                    Err(failed) => {
                        let message = format!("{error}; and it cannot be started again: {}", failed.error());
                        let info = Some(SandboxInfo { runtime: None, ..self.order.info.clone() });
                        Report { info, ..Report::lost(NodeError::new(error.code, message)) }
                    }
                }
            }
        }
    }

    /// Refuses before anything is touched when the state would not fit on the disk.
    async fn check_room(&self) -> Result<(), NodeError> {
        let runtime = self.runtime()?;
        let usage = self.engine.usage(&self.order.info.id, &runtime).await.unwrap_or_default();
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
        let names = self.engine.checkpoint_files();
        let draft = self
            .order
            .hub
            .blocking("the start of a snapshot", move || {
                let mut draft = store.begin(&id)?;
                for name in names {
                    draft.digest_while_written(name);
                }
                Ok(draft)
            })
            .await?;
        draft.map_err(|error: BeginError| {
            let code = match error {
                BeginError::NoSpace { .. } => ErrorCode::NoSpace,
                _ => ErrorCode::Internal,
            };
            NodeError::new(code, error.to_string())
        })
    }

    /// Ends what the quiesce began, where the same runtime goes on.
    async fn go_on(&self, dir: &std::path::Path) {
        let wake = self.wake_as_before();
        if let Err(error) = agent::wake(dir, &wake, Duration::from_secs(20)).await {
            tracing::warn!(sandbox = %self.order.info.id, %error, "the agent was not told to go on");
        }
    }
}

fn not_taken(error: EngineError) -> NotTaken {
    let lost = matches!(error.failure, Failure::Exited { .. });
    let error = NodeError::from(error);
    if lost { NotTaken::Lost(error) } else { NotTaken::Unchanged(error) }
}

fn publish_error(error: &PublishError) -> NodeError {
    let code = if error.is_no_space() { ErrorCode::NoSpace } else { ErrorCode::Internal };
    NodeError::new(code, format!("the snapshot cannot be published: {error}"))
}

/// Without its parent and files.
pub fn manifest(
    hub: &crate::hub::Hub,
    info: &SandboxInfo,
    pending: &PendingOp,
    reason: Reason,
    compat: Compat,
) -> Manifest {
    let now_ms = hub.now_ms();
    let ttl_ms = i64::try_from(hub.config.limits.snapshot_ttl_s.saturating_mul(1000)).unwrap_or(i64::MAX);
    // Templates' go when the template goes, what a sandbox is paused on when the sandbox goes.
    let expires_at_ms = (reason != Reason::Template).then(|| now_ms.saturating_add(ttl_ms));
    let compat = Compat {
        agent_version: info.agent_version.clone().unwrap_or_default(),
        agent_digest: info.agent_digest.clone().unwrap_or_default(),
        ..compat
    };
    Manifest {
        id: pending.snapshot.clone(),
        parent: None,
        sandbox: info.id.clone(),
        runtime: info.runtime.clone().unwrap_or_else(|| pending.runtime.clone()),
        template: info.template.clone(),
        engine: info.engine,
        generation: info.generation,
        reason,
        created_at_ms: now_ms,
        expires_at_ms,
        shape: info.shape,
        rootfs: info.rootfs.clone(),
        memory: true,
        names: Vec::new(),
        labels: BTreeMap::new(),
        compat,
        files: Vec::new(),
    }
}

async fn write_down(job: &Job, manifest: &Manifest) {
    let row = SnapshotRow {
        id: manifest.id.clone(),
        parent: manifest.parent.clone(),
        sandbox: manifest.sandbox.clone(),
        automatic: matches!(manifest.reason, Reason::Pause | Reason::Policy | Reason::Internal),
        owner: job.order.info.owner.clone(),
        created_ms: manifest.created_at_ms,
        names: manifest.names.clone(),
    };
    // The manifest itself is the snapshot; the row is made again from it at the next start.
    if let Err(error) = job.order.hub.journal.put_snapshot(row).await {
        tracing::warn!(snapshot = %manifest.id, %error, "a snapshot's row was not written");
    }
}
