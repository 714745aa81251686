//! Carries one piece of work of the lifecycle out, through the engine, the store and the agent.
//!
//! Invariants: the outcome says what is true of the sandbox now; a work ends within the limit
//! (`operation_s_max`), by an error if need be; it decides nothing about states.

mod capture;
mod fork;
mod launch;

use std::sync::Arc;
use std::time::{Duration, Instant};

use dormouse_engine::{After, Engine, EngineError, Failure};
use dormouse_snapshot::{Manifest, Reason};
use dormouse_types::{Generation, RuntimeId, SandboxId, SnapshotId};
use dormouse_wire::keeper::Session;
use tokio::task::JoinHandle;

use crate::agent;
pub use fork::{Awaited, Born, Once, Place, Ready, place};

use crate::error::{ErrorCode, NodeError};
use crate::hub::Hub;
use crate::journal::PendingOp;
use crate::lifecycle::{Outcome, Work};
use crate::model::{Receipt, SandboxInfo, SnapshotInfo, SnapshotRequest};

/// What is known when the work begins.
#[derive(Clone)]
pub struct Order {
    pub hub: Arc<Hub>,
    pub info: SandboxInfo,
    pub pending: PendingOp,
    pub generation: Generation,
    pub head: Option<SnapshotId>,
    pub carrier_broken: bool,
    pub birth: Option<Birth>,
    /// How the snapshot that a client asks for is called and kept.
    pub asked: Option<SnapshotRequest>,
    /// Whom a live fork is to make.
    pub children: Option<Once<Vec<Ready>>>,
}

/// What only the first start of a sandbox needs.
#[derive(Debug, Clone)]
pub struct Birth {
    /// `create` or `fork`.
    pub operation: &'static str,
    pub default_user: Option<String>,
    pub default_workdir: Option<String>,
    /// It becomes a copy of a running one.
    pub live: Option<Once<Place>>,
}

impl Birth {
    #[must_use]
    pub fn of(operation: &'static str) -> Self {
        Self { operation, default_user: None, default_workdir: None, live: None }
    }
}

/// The outcome, and what the actor writes down and answers with.
pub struct Report {
    pub outcome: Outcome,
    /// The sandbox as it is now, where that changed.
    pub info: Option<SandboxInfo>,
    pub receipt: Option<Receipt>,
    pub snapshot: Option<SnapshotInfo>,
    /// Held, and to be ended now; the next work waits for that.
    pub ending: Option<RuntimeId>,
}

impl Report {
    fn new(outcome: Outcome) -> Self {
        Self { outcome, info: None, receipt: None, snapshot: None, ending: None }
    }

    pub fn unchanged(error: impl Into<NodeError>) -> Self {
        Self::new(Outcome::Unchanged { error: error.into() })
    }

    fn lost(error: NodeError) -> Self {
        Self::new(Outcome::Lost { error, snapshot: None })
    }

    fn done() -> Self {
        Self::new(Outcome::Done { snapshot: None })
    }
}

/// A held runtime that is being ended.
pub struct Ending {
    engine: Arc<dyn Engine>,
    sandbox: SandboxId,
    runtime: RuntimeId,
    task: JoinHandle<Result<(), EngineError>>,
}

impl Ending {
    pub fn begin(engine: Arc<dyn Engine>, sandbox: SandboxId, runtime: RuntimeId) -> Self {
        let task = tokio::spawn({
            let (engine, sandbox, runtime) = (Arc::clone(&engine), sandbox.clone(), runtime.clone());
            async move { engine.stop(&sandbox, &runtime).await }
        });
        Self { engine, sandbox, runtime, task }
    }

    /// Until it has ended; tried once more where that failed.
    pub async fn ended(self) -> Result<(), EngineError> {
        match self.task.await {
            Ok(Ok(())) => Ok(()),
            Ok(Err(_)) | Err(_) => self.engine.stop(&self.sandbox, &self.runtime).await,
        }
    }
}

/// An agent that runs answers at once; one that does not is better restored.
const KEEPER_WAKE_SECONDS_MAX: u64 = 15;

/// Runs it to its end. Never fails: the report says how it went.
pub async fn run(order: Order) -> Report {
    let engine = match order.hub.engine(order.info.engine) {
        Ok(engine) => Arc::clone(engine),
        Err(error) => return Report::unchanged(error),
    };
    let limit = Duration::from_secs(order.hub.config.limits.operation_s_max);
    let (sandbox, spare) = (order.info.id.clone(), order.pending.runtime.clone());
    let work = order.pending.work.clone();
    let job = Job { engine: Arc::clone(&engine), started: Instant::now(), order };
    if let Ok(report) = tokio::time::timeout(limit, job.run()).await {
        return report;
    }
    let error = NodeError::failed(format!("it did not end within {} s", limit.as_secs()));
    match work {
        // Where nothing was taken away, nothing is.
        Work::Freeze | Work::Thaw | Work::Fork | Work::Destroy => Report::unchanged(error),
        // Unknown where it stands: made certain.
        _ => {
            if let Err(error) = engine.stop(&sandbox, &spare).await {
                tracing::warn!(%sandbox, %error, "a start that took too long could not be ended");
            }
            Report::lost(error)
        }
    }
}

struct Job {
    engine: Arc<dyn Engine>,
    started: Instant,
    order: Order,
}

impl Job {
    async fn run(self) -> Report {
        match self.order.pending.work.clone() {
            Work::Create => self.create().await,
            Work::Freeze => self.freeze().await,
            Work::Thaw => self.thaw().await,
            Work::Checkpoint { reason } => self.checkpoint(reason).await,
            Work::Fork => self.fork().await,
            Work::Pause { reason } => self.pause(reason).await,
            Work::Resume => self.resume().await,
            Work::RollBack { target } => self.roll_back(&target).await,
            Work::ReplaceKeeper => self.replace_keeper().await,
            Work::Destroy => self.destroy().await,
        }
    }

    fn took_ms(&self) -> u64 {
        u64::try_from(self.started.elapsed().as_millis()).unwrap_or(u64::MAX)
    }

    /// For whoever looks where the time goes.
    fn reached(&self, step: &'static str) {
        tracing::debug!(sandbox = %self.order.info.id, step, after_ms = self.took_ms());
    }

    fn receipt(&self, operation: &str, snapshot: Option<SnapshotId>) -> Receipt {
        Receipt {
            sandbox: self.order.info.id.clone(),
            operation: operation.to_owned(),
            engine: self.order.info.engine,
            snapshot,
            at: self.order.hub.now(),
            took_ms: self.took_ms(),
            stopped_ms: None,
            kept: Vec::new(),
            refreshed: Vec::new(),
            shared: Vec::new(),
            dropped: Vec::new(),
        }
    }

    /// The runtime that serves now.
    fn runtime(&self) -> Result<RuntimeId, NodeError> {
        self.order
            .info
            .runtime
            .clone()
            .ok_or_else(|| NodeError::internal(format!("sandbox {} has no runtime", self.order.info.id)))
    }

    async fn freeze(&self) -> Report {
        let runtime = match self.runtime() {
            Ok(runtime) => runtime,
            Err(error) => return Report::unchanged(error),
        };
        match self.engine.freeze(&self.order.info.id, &runtime).await {
            Ok(()) => Report::done(),
            Err(error) => self.failed(error),
        }
    }

    async fn thaw(&self) -> Report {
        let runtime = match self.runtime() {
            Ok(runtime) => runtime,
            Err(error) => return Report::unchanged(error),
        };
        match self.engine.thaw(&self.order.info.id, &runtime).await {
            Ok(()) => Report { receipt: Some(self.thaw_receipt()), ..Report::done() },
            Err(error) => self.failed(error),
        }
    }

    fn thaw_receipt(&self) -> Receipt {
        Receipt {
            kept: words(&["memory", "processes", "files", "connections"]),
            ..self.receipt("thaw", self.order.head.clone())
        }
    }

    /// The engine's error on a runtime that it left as it was, unless it says that it ended.
    fn failed(&self, error: EngineError) -> Report {
        let lost = matches!(error.failure, Failure::Exited { .. });
        let error = NodeError::from(error);
        if lost { Report::lost(error) } else { Report::unchanged(error) }
    }

    async fn checkpoint(self, reason: Reason) -> Report {
        match self.capture(reason, After::KeepRunning).await {
            Ok(captured) => {
                let receipt = self.capture_receipt("checkpoint", &captured);
                Report {
                    outcome: Outcome::Done { snapshot: Some(captured.manifest.id.clone()) },
                    receipt: Some(receipt),
                    snapshot: Some(captured.info()),
                    ..Report::done()
                }
            }
            Err(failed) => failed.report(),
        }
    }

    async fn pause(self, reason: Reason) -> Report {
        match self.capture(reason, After::Hold).await {
            Ok(captured) => {
                let receipt = self.capture_receipt("pause", &captured);
                Report {
                    // It is frozen for good: its end takes as long as it takes, nobody waits for it.
                    ending: self.order.info.runtime.clone(),
                    outcome: Outcome::Done { snapshot: Some(captured.manifest.id.clone()) },
                    info: Some(SandboxInfo { runtime: None, ..self.order.info.clone() }),
                    receipt: Some(receipt),
                    snapshot: Some(captured.info()),
                }
            }
            Err(failed) => failed.report(),
        }
    }

    fn capture_receipt(&self, operation: &str, captured: &capture::Taken) -> Receipt {
        let stopped_ms = u64::try_from(captured.stopped.as_millis()).unwrap_or(u64::MAX);
        Receipt {
            stopped_ms: Some(stopped_ms),
            kept: words(&["memory", "processes", "files", "loopback connections", "client streams"]),
            dropped: captured.notes.clone(),
            ..self.receipt(operation, Some(captured.manifest.id.clone()))
        }
    }

    async fn resume(self) -> Report {
        let Some(head) = self.order.head.clone() else {
            return Report::unchanged(NodeError::internal("a paused sandbox has no snapshot"));
        };
        let session = if self.order.carrier_broken { Session::New } else { Session::Continue };
        let manifest = match self.load(&head).await {
            Ok(manifest) => manifest,
            Err(error) => return Report::unchanged(error),
        };
        match self.launch(&manifest, session, None).await {
            Ok(launched) => self.started("resume", Some(&manifest), launched),
            Err(failed) => failed.report(),
        }
    }

    async fn roll_back(self, target: &SnapshotId) -> Report {
        let manifest = match self.load_fit(target).await {
            Ok(manifest) => manifest,
            Err(error) => return Report::unchanged(error),
        };
        // Looked at whole before anything is taken away.
        if let Err(error) = self.verify(&manifest).await {
            return Report::unchanged(error);
        }
        if let Some(runtime) = self.order.info.runtime.clone()
            && let Err(error) = self.engine.stop(&self.order.info.id, &runtime).await
        {
            return Report::unchanged(error);
        }
        match self.launch(&manifest, Session::New, None).await {
            Ok(launched) => {
                let mut report = self.started("rollback", Some(&manifest), launched);
                if let Some(receipt) = &mut report.receipt {
                    let lost_s = self.order.hub.now_ms().saturating_sub(manifest.created_at_ms) / 1000;
                    receipt.dropped.push(format!("all that happened in the {lost_s} s since the snapshot"));
                }
                report
            }
            Err(failed) => {
                let mut report = failed.report();
                // The old runtime is gone, whatever became of the new one.
                if let Outcome::Unchanged { error } = report.outcome {
                    report.outcome = Outcome::Lost { error, snapshot: None };
                }
                report.info = Some(SandboxInfo { runtime: None, ..self.order.info.clone() });
                report
            }
        }
    }

    async fn replace_keeper(self) -> Report {
        if let Some(report) = self.keeper_beneath().await {
            return report;
        }
        let captured = match self.capture(Reason::Internal, After::Hold).await {
            Ok(captured) => captured,
            Err(failed) => return failed.report(),
        };
        if let Some(runtime) = self.order.info.runtime.clone()
            && let Err(error) = self.engine.stop(&self.order.info.id, &runtime).await
        {
            return Report::unchanged(error);
        }
        let snapshot = Some(captured.manifest.id.clone());
        match self.launch(&captured.manifest, Session::New, None).await {
            Ok(launched) => {
                let mut report = self.started("keeper_replaced", Some(&captured.manifest), launched);
                report.outcome = Outcome::Done { snapshot };
                report
            }
            Err(failed) => {
                let (Outcome::Unchanged { error } | Outcome::Lost { error, .. }) = failed.report().outcome
                else {
                    return Report::lost(NodeError::internal("the keeper could not be replaced"));
                };
                let info = Some(SandboxInfo { runtime: None, ..self.order.info.clone() });
                Report { info, ..Report::new(Outcome::Lost { error, snapshot }) }
            }
        }
    }

    /// Another keeper under the running sandbox, where the engine can do that and the agent confirms it.
    async fn keeper_beneath(&self) -> Option<Report> {
        let runtime = self.runtime().ok()?;
        let (info, generation) = (&self.order.info, self.order.generation);
        let replaced = async {
            self.engine.replace_keeper(&info.id, &runtime, generation, &info.egress).await?;
            // Frozen, the agent could not answer.
            self.engine.thaw(&info.id, &runtime).await
        };
        if let Err(error) = replaced.await {
            tracing::debug!(sandbox = %info.id, %error, "the keeper is replaced by a checkpoint and a restore");
            return None;
        }
        let limit = Duration::from_secs(KEEPER_WAKE_SECONDS_MAX);
        let woken = agent::wake(&self.engine.keeper_dir(&info.id), &self.wake_again(), limit).await;
        if let Err(error) = woken {
            tracing::warn!(sandbox = %info.id, %error, "a new keeper does not reach the agent; the sandbox is restored");
            return None;
        }
        let receipt = Receipt {
            kept: words(&["memory", "processes", "files", "loopback connections", "listening ports"]),
            dropped: words(&["client streams", "outbound connections"]),
            ..self.receipt("keeper_replaced", self.order.head.clone())
        };
        let info = Some(SandboxInfo { generation, ..info.clone() });
        Some(Report { info, receipt: Some(receipt), ..Report::done() })
    }

    async fn create(self) -> Report {
        let birth = self.order.birth.clone().unwrap_or_else(|| Birth::of("create"));
        if let Some(live) = &birth.live {
            return match live.take() {
                Some(place) => self.be_born(&birth, place).await,
                None => Report::unchanged(NodeError::internal("a copy is to be made twice")),
            };
        }
        let Ok(_permit) = self.order.hub.starts.acquire().await else {
            return Report::unchanged(NodeError::unavailable("the node is shutting down"));
        };
        let Some(parent) = self.order.head.clone() else {
            return match self.boot(&birth).await {
                Ok(launched) => self.started(birth.operation, None, launched),
                Err(failed) => failed.report(),
            };
        };
        let manifest = match self.load_fit(&parent).await {
            Ok(manifest) => manifest,
            Err(error) => return Report::unchanged(error),
        };
        match self.launch(&manifest, Session::New, Some(&birth)).await {
            Ok(launched) => self.started(birth.operation, Some(&manifest), launched),
            Err(failed) => failed.report(),
        }
    }

    fn started(&self, operation: &str, manifest: Option<&Manifest>, launched: launch::Launched) -> Report {
        let snapshot = manifest.map(|manifest| manifest.id.clone());
        let receipt = launched.receipt(operation, self.receipt(operation, snapshot));
        let info = SandboxInfo {
            runtime: Some(self.order.pending.runtime.clone()),
            generation: self.order.generation,
            agent_version: Some(launched.woken.agent_version.clone()),
            agent_digest: launched.agent_digest.clone(),
            ..self.order.info.clone()
        };
        Report { info: Some(info), receipt: Some(receipt), ..Report::done() }
    }

    async fn destroy(self) -> Report {
        let info = &self.order.info;
        if let Err(error) = self.engine.destroy(&info.id, info.runtime.as_ref()).await {
            return Report::unchanged(error);
        }
        Report { info: Some(SandboxInfo { runtime: None, ..self.order.info.clone() }), ..Report::done() }
    }

    async fn load(&self, snapshot: &SnapshotId) -> Result<Manifest, NodeError> {
        let (store, id) = (self.order.hub.store.clone(), snapshot.clone());
        let manifest = self.order.hub.blocking("the reading of a manifest", move || store.load(&id)).await?;
        manifest.map_err(|error| match error {
            dormouse_store::LoadError::NotFound { .. } => NodeError::not_found(error.to_string()),
            dormouse_store::LoadError::Damaged { .. } => NodeError::failed(error.to_string()),
            dormouse_store::LoadError::Read { .. } => NodeError::unavailable(error.to_string()),
        })
    }

    /// Loads it and refuses one whose time is over.
    async fn load_fit(&self, snapshot: &SnapshotId) -> Result<Manifest, NodeError> {
        let manifest = self.load(snapshot).await?;
        if dormouse_store::is_expired(&manifest, self.order.hub.now()) {
            let message =
                format!("snapshot {snapshot} has expired; it is kept no longer and cannot be started from");
            return Err(NodeError::new(ErrorCode::Expired, message));
        }
        Ok(manifest)
    }
}

fn words(given: &[&str]) -> Vec<String> {
    given.iter().map(|word| (*word).to_owned()).collect()
}
