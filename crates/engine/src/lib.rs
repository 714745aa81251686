//! What isolates a sandbox, behind one trait: boot, checkpoint, restore, freeze, adopt, destroy.
//!
//! Invariants: an engine holds no state that its files and the kernel do not hold (it is rebuilt by
//! [`Engine::adopt`] after the daemon died); it never decides (tiers, retries, names are the node's);
//! it never starts a fresh sandbox in place of a failed restore.
//!
//! A *runtime* is one incarnation: `boot` and `restore` make one under a [`RuntimeId`] that the
//! caller drew and journaled beforehand; `stop` ends it and leaves the keeper; `destroy` ends all.

mod common;
mod error;
pub mod gvisor;
mod host;
mod keepers;
pub mod microvm;
mod model;

use std::path::{Path, PathBuf};

use async_trait::async_trait;
use dormouse_snapshot::{Compat, Manifest};
use dormouse_types::{EngineKind, Generation, RuntimeId, SandboxId};
use dormouse_wire::keeper::{EgressRules, Status};

pub use error::{EngineError, Failure, Operation};
pub use model::{
    Adopted, After, AgentFile, BootSpec, Capabilities, Captured, CapturedFile, Exit, ForkChild, Forked,
    RestoreSpec, Restored, RuntimeState, Swept, Usage, WarmSpec,
};

#[async_trait]
pub trait Engine: Send + Sync + 'static {
    fn kind(&self) -> EngineKind;

    fn capabilities(&self) -> Capabilities;

    /// True: what a sandbox reads as randomness comes from this host's kernel at the moment it is read,
    /// so that copies differ without a reseed (gVisor has no generator of its own).
    fn random_from_host(&self) -> bool {
        self.kind() == EngineKind::Gvisor
    }

    /// What a snapshot taken here now needs of the host that restores it.
    fn compat(&self) -> Compat;

    /// Answered from the manifest alone, before anything is touched.
    fn can_restore(&self, manifest: &Manifest) -> Result<(), EngineError>;

    /// The keeper's folder of a sandbox: holds `agent.sock` and `control.sock`.
    fn keeper_dir(&self, sandbox: &SandboxId) -> PathBuf;

    /// Starts a sandbox from its root file system. On an error nothing of the runtime is left.
    async fn boot(&self, spec: BootSpec) -> Result<(), EngineError>;

    /// Writes the sandbox's state into the empty folder `into`. After [`After::Stop`] the runtime is
    /// gone and its keeper detached; after [`After::Hold`] it is frozen until `stop` or `thaw`; after
    /// [`After::KeepRunning`] it runs on. On an error it runs on as before, or the error says
    /// `Failure::Exited`.
    async fn checkpoint(
        &self,
        sandbox: &SandboxId,
        runtime: &RuntimeId,
        into: &Path,
        after: After,
    ) -> Result<Captured, EngineError>;

    /// Starts a runtime from a snapshot's folder. On an error nothing of the new runtime is left.
    async fn restore(&self, spec: RestoreSpec) -> Result<Restored, EngineError>;

    /// Live copies without a snapshot in between, where [`Capabilities::live_fork`] says so: all go on from
    /// one instant, as does the source. Each has a new carrier session and is to be woken before it is
    /// served. The outer error: no child is left, the source is as before (or `Failure::Exited`).
    async fn fork(
        &self,
        sandbox: &SandboxId,
        runtime: &RuntimeId,
        children: Vec<ForkChild>,
    ) -> Result<Forked, EngineError>;

    /// Takes all CPU time away; memory stays. Idempotent.
    async fn freeze(&self, sandbox: &SandboxId, runtime: &RuntimeId) -> Result<(), EngineError>;

    async fn thaw(&self, sandbox: &SandboxId, runtime: &RuntimeId) -> Result<(), EngineError>;

    /// Ends the runtime at once and leaves the keeper. Idempotent.
    async fn stop(&self, sandbox: &SandboxId, runtime: &RuntimeId) -> Result<(), EngineError>;

    /// Ends the runtime and the keeper and removes all that either had. Idempotent.
    async fn destroy(&self, sandbox: &SandboxId, runtime: Option<&RuntimeId>) -> Result<(), EngineError>;

    async fn set_egress(&self, sandbox: &SandboxId, rules: &EgressRules) -> Result<(), EngineError>;

    /// Puts a new keeper in the place of one that ended, under a running sandbox: the carrier gets a
    /// new session, open streams are lost, nothing else is. Idempotent: a keeper that lives stays.
    /// `Failure::Unsupported`: a checkpoint and a restore do the same here.
    async fn replace_keeper(
        &self,
        sandbox: &SandboxId,
        runtime: &RuntimeId,
        generation: Generation,
        egress: &EgressRules,
    ) -> Result<(), EngineError> {
        let _ = (runtime, generation, egress);
        let why = "its carrier is bound to the keeper that made it".to_owned();
        let failure = Failure::Unsupported { why };
        Err(EngineError { operation: Operation::Adopt, sandbox: Some(sandbox.clone()), failure })
    }

    /// What the keeper knows of the sandbox's traffic.
    async fn keeper_status(&self, sandbox: &SandboxId) -> Result<Status, EngineError>;

    async fn usage(&self, sandbox: &SandboxId, runtime: &RuntimeId) -> Result<Usage, EngineError>;

    /// Resolves when the runtime or its keeper ends by itself, with the reason. Cancel-safe.
    async fn exited(&self, sandbox: &SandboxId, runtime: &RuntimeId) -> Exit;

    /// Finds a sandbox again after the daemon died.
    async fn adopt(&self, sandbox: &SandboxId, runtime: Option<&RuntimeId>) -> Result<Adopted, EngineError>;

    /// Removes whatever this engine left in this data folder that is not in `keep` (runtimes, keepers,
    /// mounts, cgroups, files), and says what that was. Pool members of a former daemon go too.
    async fn sweep(&self, keep: &[(SandboxId, Option<RuntimeId>)]) -> Result<Swept, EngineError>;

    /// Keeps `count` runtimes ready for this kind of sandbox; 0 removes them. Returns at once; the
    /// pool fills in the background.
    async fn prewarm(&self, spec: WarmSpec, count: usize);

    /// Ends what only serves this daemon (the pool). Sandboxes and keepers stay.
    async fn shutdown(&self);
}
