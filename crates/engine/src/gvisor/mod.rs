//! The gVisor driver: runsc, its pool, its pipes.
//!
//! Invariants: what it knows of a sandbox is in its folders and in the kernel ([`layout`]); a runtime
//! exists from its link's making to its link's removal; a sandbox's root file system is shared and
//! never written to, its changes live in an unlinked file and travel in the image; whatever a daemon's
//! death interrupts is either gone on with ([`Engine::adopt`]) or removed ([`Engine::sweep`]).

mod bundle;
mod checkpoint;
mod container;
mod exit;
mod layout;
mod lifecycle;
mod pool;
mod runsc;
mod seal;
mod sweep;

use std::ffi::OsString;
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use dormouse_snapshot::{Compat, Manifest};
use dormouse_sys::cgroup::{Hierarchies, Version};
use dormouse_types::{EngineKind, Generation, RuntimeId, SandboxId};
use dormouse_wire::keeper::{Answer, EgressRules, Request, Session, Status};

pub use runsc::Runsc;

use crate::Engine;
use crate::common::{blocking, check_compat, named, plain_digest, usable_groups};
use crate::error::{EngineError, Failure, Operation};
use crate::keepers::Keeper;
use crate::model::{
    Adopted, After, BootSpec, Capabilities, Captured, Exit, ForkChild, Forked, RestoreSpec, Restored,
    RuntimeState, Swept, Usage, WarmSpec,
};
use crate::{AgentFile, host};
use container::Container;
use layout::Layout;
use pool::{Member, Pool};

const PLATFORM: &str = "systrap";
/// What was just started gets the processors first, the pool afterwards.
const REFILL_AFTER: Duration = Duration::from_millis(500);

#[derive(Debug, Clone)]
pub struct GvisorConfig {
    /// The daemon's data folder; it exists.
    pub data_dir: PathBuf,
    pub agent: AgentFile,
    /// The keeper's program and first arguments; `--dir DIR --sandbox ID` is added.
    pub keeper: Vec<OsString>,
    /// `None`: looked for on `PATH`.
    pub runsc: Option<PathBuf>,
    /// False: do as on a host without usable cgroups.
    pub cgroups: bool,
}

/// Clones share everything.
#[derive(Clone)]
pub struct Gvisor(Arc<Inner>);

pub(crate) struct Inner {
    layout: Layout,
    hierarchies: Hierarchies,
    runsc: Runsc,
    agent: AgentFile,
    keeper_program: Arc<[OsString]>,
    pool: Pool,
    cpu_features: Vec<String>,
}

impl Gvisor {
    /// Finds out what the host offers. Touches no sandbox; call [`Engine::sweep`] afterwards.
    pub async fn open(config: GvisorConfig) -> Result<Self, EngineError> {
        let opened = Self::open_unnamed(config).await;
        opened.map_err(|failure| EngineError { operation: Operation::Setup, sandbox: None, failure })
    }

    async fn open_unnamed(config: GvisorConfig) -> Result<Self, Failure> {
        if !rustix::process::geteuid().is_root() {
            return Err(Failure::Unfit {
                what: "gVisor's engine".to_owned(),
                why: "only root can restore a checkpoint".to_owned(),
                mend: "run the daemon as root".to_owned(),
            });
        }
        let runsc = Runsc::probe(config.runsc.as_deref()).await?;
        let agent = config.agent;
        let (layout, hierarchies) = blocking({
            let digest = agent.digest.clone();
            move || {
                let layout = Layout::open(&config.data_dir)?;
                let agent = layout.agent(&digest);
                if !agent.is_file() {
                    let mend = "restart the daemon, it writes the file".to_owned();
                    return Err(Failure::Missing { what: format!("the agent {}", agent.display()), mend });
                }
                let hierarchies = if config.cgroups {
                    usable_groups(&layout.group_parent())
                } else {
                    Hierarchies::default()
                };
                Ok((layout, hierarchies))
            }
        })
        .await?;
        Ok(Self(Arc::new(Inner {
            layout,
            hierarchies,
            runsc,
            agent,
            keeper_program: config.keeper.into(),
            pool: Pool::default(),
            cpu_features: host::cpu_features(),
        })))
    }

    #[must_use]
    pub fn runsc(&self) -> &Runsc {
        &self.0.runsc
    }

    /// `None`: there are no usable cgroups: limits are not enforced, freezing is by signals.
    #[must_use]
    pub fn cgroups(&self) -> Option<Version> {
        self.0.hierarchies.version()
    }

    /// Parent of all its groups, relative to a hierarchy's mount point.
    #[must_use]
    pub fn group_parent(&self) -> PathBuf {
        self.0.layout.group_parent()
    }

    /// Fills the pool in the background, one member after the other.
    fn fill(&self, after: Duration) {
        if !self.0.pool.start_filling() {
            return;
        }
        let engine = self.clone();
        tokio::spawn(async move {
            tokio::time::sleep(after).await;
            let inner = &engine.0;
            let mut failed = false;
            while let Some(spec) = inner.pool.lacks() {
                let container = inner.container(&RuntimeId::generate());
                let claim = inner.pool.claim(&container.id);
                match inner.make_member(&spec, &container).await {
                    Ok(pipes) => engine.drop_members(inner.pool.put(Member { spec, container, pipes })).await,
                    // The snapshot may have gone: starts of it do without.
                    Err(error) if spec.snapshot.is_some() => {
                        tracing::debug!(snapshot = ?spec.snapshot, %error, "no runtime is kept restored");
                        engine.drop_members(inner.pool.want(spec, 0)).await;
                    }
                    Err(error) => {
                        tracing::warn!(rootfs = %spec.rootfs.display(), %error, "no runtime could be prepared");
                        failed = true;
                        break;
                    }
                }
                drop(claim);
            }
            inner.pool.filled();
            if !failed {
                // Somebody may have wanted more while the last look was taken.
                engine.fill(Duration::ZERO);
            }
        });
    }

    async fn drop_members(&self, members: impl IntoIterator<Item = Member>) {
        for member in members {
            let id = member.container.id.clone();
            if let Err(error) = blocking(move || member.container.destroy()).await {
                tracing::warn!(container = %id, %error, "a pool member was not removed whole");
            }
        }
    }
}

impl Inner {
    fn container(&self, id: &RuntimeId) -> Container {
        Container::new(&self.layout, &self.hierarchies, id)
    }

    fn keeper(&self, sandbox: &SandboxId) -> Keeper {
        Keeper { sandbox: sandbox.clone(), dir: self.layout.keeper(sandbox) }
    }

    fn linked(&self, runtime: &RuntimeId) -> Option<Container> {
        self.layout.linked(runtime).map(|id| self.container(&id))
    }

    fn running(&self, runtime: &RuntimeId) -> Result<Container, Failure> {
        let container = self.linked(runtime);
        let gone = || Failure::Exited { why: format!("there is no runtime {runtime}") };
        container.filter(|container| container.sandbox().is_some()).ok_or_else(gone)
    }

    /// Ends a runtime and removes it. Idempotent.
    fn end(&self, runtime: &RuntimeId) -> Result<(), Failure> {
        if let Some(container) = self.linked(runtime) {
            container.destroy()?;
        }
        self.layout.unlink(runtime)
    }

    fn check_manifest(&self, manifest: &Manifest) -> Result<(), Failure> {
        check_compat(manifest, EngineKind::Gvisor, &self.compat())?;
        let needs = &manifest.compat;
        if !plain_digest(&needs.agent_digest) || !self.layout.agent(&needs.agent_digest).is_file() {
            return Err(Failure::Incompatible {
                needs: format!("the agent {} ({})", needs.agent_version, needs.agent_digest),
                has: format!("the agent {} ({})", self.agent.version, self.agent.digest),
            });
        }
        Ok(())
    }

    fn compat(&self) -> Compat {
        Compat {
            engine_version: format!("runsc {}", self.runsc.version()),
            platform: PLATFORM.to_owned(),
            cpu_features: self.cpu_features.clone(),
            agent_version: self.agent.version.clone(),
            agent_digest: self.agent.digest.clone(),
        }
    }
}

#[async_trait]
impl Engine for Gvisor {
    fn kind(&self) -> EngineKind {
        EngineKind::Gvisor
    }

    fn capabilities(&self) -> Capabilities {
        Capabilities {
            memory: true,
            external_tcp: true,
            incremental: false,
            live_fork: false,
            live_checkpoint: true,
        }
    }

    fn compat(&self) -> Compat {
        self.0.compat()
    }

    fn can_restore(&self, manifest: &Manifest) -> Result<(), EngineError> {
        named(Operation::Restore, &manifest.sandbox, self.0.check_manifest(manifest))
    }

    fn keeper_dir(&self, sandbox: &SandboxId) -> PathBuf {
        self.0.layout.keeper(sandbox)
    }

    async fn boot(&self, spec: BootSpec) -> Result<(), EngineError> {
        let sandbox = spec.sandbox.clone();
        let booted = self.0.boot(spec).await;
        self.fill(REFILL_AFTER);
        named(Operation::Boot, &sandbox, booted)
    }

    async fn checkpoint(
        &self,
        sandbox: &SandboxId,
        runtime: &RuntimeId,
        into: &Path,
        after: After,
    ) -> Result<Captured, EngineError> {
        named(Operation::Checkpoint, sandbox, self.0.checkpoint(sandbox, runtime, into, after).await)
    }

    async fn restore(&self, spec: RestoreSpec) -> Result<Restored, EngineError> {
        let sandbox = spec.sandbox.clone();
        let restored = self.0.restore(spec).await;
        self.fill(REFILL_AFTER);
        named(Operation::Restore, &sandbox, restored)
    }

    async fn fork(
        &self,
        sandbox: &SandboxId,
        _runtime: &RuntimeId,
        _children: Vec<ForkChild>,
    ) -> Result<Forked, EngineError> {
        let why = "gVisor forks through a snapshot: checkpoint, then restore".to_owned();
        named(Operation::Fork, sandbox, Err(Failure::Unsupported { why }))
    }

    async fn freeze(&self, sandbox: &SandboxId, runtime: &RuntimeId) -> Result<(), EngineError> {
        let (inner, runtime) = (Arc::clone(&self.0), runtime.clone());
        let frozen = blocking(move || inner.running(&runtime)?.freeze()).await;
        named(Operation::Freeze, sandbox, frozen)
    }

    async fn thaw(&self, sandbox: &SandboxId, runtime: &RuntimeId) -> Result<(), EngineError> {
        let (inner, keeper, runtime) = (Arc::clone(&self.0), self.0.keeper(sandbox), runtime.clone());
        let thawed = blocking(move || checkpoint::thaw(&inner.running(&runtime)?, &keeper)).await;
        named(Operation::Thaw, sandbox, thawed)
    }

    async fn stop(&self, sandbox: &SandboxId, runtime: &RuntimeId) -> Result<(), EngineError> {
        let (inner, keeper, runtime) = (Arc::clone(&self.0), self.0.keeper(sandbox), runtime.clone());
        let stopped = blocking(move || {
            if let Err(error) = keeper.done(&Request::Detach, &[]) {
                tracing::debug!(sandbox = %keeper.sandbox, %error, "no keeper to detach");
            }
            inner.end(&runtime)
        });
        named(Operation::Stop, sandbox, stopped.await)
    }

    async fn destroy(&self, sandbox: &SandboxId, runtime: Option<&RuntimeId>) -> Result<(), EngineError> {
        let (inner, keeper, runtime) = (Arc::clone(&self.0), self.0.keeper(sandbox), runtime.cloned());
        let destroyed = blocking(move || {
            // Both are tried, whatever the first says.
            let ended = runtime.map_or(Ok(()), |runtime| inner.end(&runtime));
            keeper.destroy().and(ended)
        });
        named(Operation::Destroy, sandbox, destroyed.await)
    }

    async fn set_egress(&self, sandbox: &SandboxId, rules: &EgressRules) -> Result<(), EngineError> {
        let (keeper, rules) = (self.0.keeper(sandbox), rules.clone());
        let set = blocking(move || keeper.done(&Request::SetEgress { rules }, &[])).await;
        named(Operation::SetEgress, sandbox, set)
    }

    async fn replace_keeper(
        &self,
        sandbox: &SandboxId,
        runtime: &RuntimeId,
        generation: Generation,
        egress: &EgressRules,
    ) -> Result<(), EngineError> {
        let (inner, keeper, runtime) = (Arc::clone(&self.0), self.0.keeper(sandbox), runtime.clone());
        let rules = egress.clone();
        let replaced = blocking(move || {
            let container = inner.running(&runtime)?;
            if !keeper.ensure(&inner.keeper_program)? {
                return Ok(());
            }
            let gone = || Failure::Exited { why: format!("the runtime {runtime} is gone") };
            let ends = container.seal().ok_or_else(gone)?.ends()?;
            keeper.attach(generation, Session::New, rules, ends.each_ref().map(AsFd::as_fd))
        });
        named(Operation::Adopt, sandbox, replaced.await)
    }

    async fn keeper_status(&self, sandbox: &SandboxId) -> Result<Status, EngineError> {
        let keeper = self.0.keeper(sandbox);
        let status = blocking(move || match keeper.ask(&Request::Status, &[])? {
            Answer::Status(status) => Ok(status),
            other => Err(Failure::Keeper { why: format!("answered something else than asked: {other:?}") }),
        });
        named(Operation::Status, sandbox, status.await)
    }

    async fn usage(&self, sandbox: &SandboxId, runtime: &RuntimeId) -> Result<Usage, EngineError> {
        let (inner, runtime) = (Arc::clone(&self.0), runtime.clone());
        let usage = blocking(move || Ok(inner.running(&runtime)?.usage())).await;
        named(Operation::Status, sandbox, usage)
    }

    async fn exited(&self, sandbox: &SandboxId, runtime: &RuntimeId) -> Exit {
        exit::exited(Arc::clone(&self.0), sandbox, runtime).await
    }

    async fn adopt(&self, sandbox: &SandboxId, runtime: Option<&RuntimeId>) -> Result<Adopted, EngineError> {
        let (inner, keeper, runtime) = (Arc::clone(&self.0), self.0.keeper(sandbox), runtime.cloned());
        let adopted = blocking(move || {
            let runtime = match runtime.and_then(|runtime| inner.linked(&runtime)) {
                Some(container) => found(&container, &keeper)?,
                None => RuntimeState::Gone,
            };
            Ok(Adopted { runtime, keeper: keeper.answers() })
        });
        named(Operation::Adopt, sandbox, adopted.await)
    }

    async fn sweep(&self, keep: &[(SandboxId, Option<RuntimeId>)]) -> Result<Swept, EngineError> {
        let (inner, keep) = (Arc::clone(&self.0), keep.to_vec());
        let swept = blocking(move || Ok(sweep::sweep(&inner, &keep))).await;
        swept.map_err(|failure| EngineError { operation: Operation::Sweep, sandbox: None, failure })
    }

    async fn prewarm(&self, spec: WarmSpec, count: usize) {
        let dropped = self.0.pool.want(spec, count);
        self.fill(Duration::ZERO);
        self.drop_members(dropped).await;
    }

    async fn shutdown(&self) {
        let members = self.0.pool.close();
        self.drop_members(members).await;
        // The parent of all groups goes when nothing is in it.
        for mount in self.0.hierarchies.all() {
            let _ = std::fs::remove_dir(mount.join(self.0.layout.group_parent()));
        }
    }
}

/// What became of a container while no daemon watched it.
fn found(container: &Container, keeper: &Keeper) -> Result<RuntimeState, Failure> {
    checkpoint::recover(container, keeper)?;
    let started = container.meta().is_some_and(|meta| meta.started);
    Ok(match container.sandbox() {
        Some(_) if started && container.is_frozen() => RuntimeState::Frozen,
        Some(_) if started => RuntimeState::Running,
        // A boot or restore that did not come to its end is nobody's sandbox.
        _ => RuntimeState::Gone,
    })
}
