//! The microVM driver: one monitor process (`dormouse-vmm`) per running sandbox.
//!
//! ```text
//! Microvm ── control client ──> monitor.sock ── monitor ── guest ── agent
//!    └──── keeper's client ───> control.sock ── keeper ══ pipes ══╯ (vsock)
//! ```
//! Invariants: what it knows of a sandbox is in its folders, in its monitor and in the kernel ([`layout`]);
//! a runtime exists from its folder's making to its folder's removal; what a runtime is made of is linked
//! into its folder, so that the removal of a snapshot harms nobody; whatever a daemon's death interrupts is
//! either gone on with ([`Engine::adopt`]) or removed ([`Engine::sweep`]).

mod checkpoint;
mod exit;
mod guest;
mod host;
mod layout;
mod lifecycle;
mod network;
mod runtime;
mod sweep;
#[cfg(test)]
mod tests;
mod users;
mod zygote;

use std::ffi::OsString;
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use async_trait::async_trait;
use dormouse_snapshot::devices::DEVICES_VERSION;
use dormouse_snapshot::{Compat, Manifest};
use dormouse_sys::cgroup::{Hierarchies, Version};
use dormouse_types::{EngineKind, Generation, RuntimeId, SandboxId};
use dormouse_wire::keeper::{Answer, EgressRules, Request, Session, Status};

use crate::common::{blocking, check_compat, io_failure, named, usable_groups};
use crate::error::{EngineError, Failure, Operation};
use crate::keepers::{Keeper, Pipes};
use crate::model::{
    Adopted, After, AgentFile, BootSpec, Capabilities, Captured, Exit, ForkChild, Forked, RestoreSpec,
    Restored, RuntimeState, Swept, Usage, WarmSpec,
};
use crate::{Engine, host as any_host};
pub use host::{Kvm, Unusable};
use layout::Layout;
use network::Link;
pub use network::probe as probe_network;
#[cfg(test)]
use runtime::Meta;
use runtime::{Runtime, WORK_WAIT};
pub use users::MonitorUsers;

#[derive(Debug, Clone)]
pub struct MicrovmConfig {
    /// The daemon's data folder; it exists.
    pub data_dir: PathBuf,
    pub agent: AgentFile,
    /// The keeper's program and first arguments; `--dir DIR --sandbox ID` is added.
    pub keeper: Vec<OsString>,
    /// The monitor's program and first arguments; `--uid UID --gid GID`, where there is to be such a user, and its folder
    /// are added.
    pub monitor: Vec<OsString>,
    /// Whom monitors run as if the daemon is root; `None`: as the daemon.
    pub users: Option<MonitorUsers>,
    /// False: do as on a host without usable cgroups.
    pub cgroups: bool,
    /// False: do as on a host that cannot give guests a network.
    pub network: bool,
    /// True: memory is brought when the guest touches it, and not mapped from the snapshot's files.
    pub lazy_restore: bool,
}

/// Clones share everything.
#[derive(Clone)]
pub struct Microvm(Arc<Inner>);

pub(crate) struct Inner {
    layout: Layout,
    hierarchies: Hierarchies,
    agent: AgentFile,
    keeper_program: Arc<[OsString]>,
    monitor_program: Arc<[OsString]>,
    /// `None`: monitors run as the daemon does.
    users: Option<MonitorUsers>,
    disks: guest::Disks,
    zygotes: zygote::Zygotes,
    /// False: guests have no network card, and reach out through the agent's proxies alone.
    cards: bool,
    lazy_restore: bool,
    platform: String,
    cpu_features: Vec<String>,
}

impl Microvm {
    /// Finds out what the host offers: without a usable KVM or guest files it is an error that says what
    /// mends it. Touches no sandbox; call [`Engine::sweep`] afterwards.
    pub async fn open(config: MicrovmConfig) -> Result<Self, EngineError> {
        let opened = blocking(move || {
            Kvm::probe().map_err(Unusable::into_failure)?;
            let engine = Self::over(config)?;
            guest::kernel(&engine.0.layout)?;
            Ok(engine)
        });
        let opened = opened.await;
        opened.map_err(|failure| EngineError { operation: Operation::Setup, sandbox: None, failure })
    }

    fn over(config: MicrovmConfig) -> Result<Self, Failure> {
        let users = config.users.filter(|_| rustix::process::geteuid().is_root());
        if users.is_none() && config.users.is_some() {
            tracing::warn!(
                "the daemon is not root: monitors run as its user, and see what that user sees of the host"
            );
        }
        let layout = Layout::open(&config.data_dir, users)?;
        let hierarchies =
            if config.cgroups { usable_groups(&layout.group_parent()) } else { Hierarchies::default() };
        Ok(Self(Arc::new(Inner {
            layout,
            hierarchies,
            agent: config.agent,
            keeper_program: config.keeper.into(),
            monitor_program: config.monitor.into(),
            users,
            disks: guest::Disks::default(),
            zygotes: zygote::Zygotes::default(),
            cards: config.network && network_is_usable(),
            lazy_restore: config.lazy_restore,
            platform: host::platform(),
            cpu_features: any_host::cpu_features(),
        })))
    }

    /// The guest's kernel and initramfs, or what is missing of them and what mends that.
    pub fn guest_files(data_dir: &Path) -> Result<(PathBuf, PathBuf), Failure> {
        guest::files(&data_dir.join(layout::GUEST))
    }

    /// `None`: there are no usable cgroups, and limits are not enforced.
    #[must_use]
    pub fn cgroups(&self) -> Option<Version> {
        self.0.hierarchies.version()
    }

    /// False: this host cannot give guests a network, and they reach out through the agent's proxies alone.
    #[must_use]
    pub fn network(&self) -> bool {
        self.0.cards
    }

    /// Parent of all its groups, relative to a hierarchy's mount point.
    #[must_use]
    pub fn group_parent(&self) -> PathBuf {
        self.0.layout.group_parent()
    }
}

fn network_is_usable() -> bool {
    match network::probe() {
        Ok(()) => true,
        Err((why, mend)) => {
            tracing::warn!(
                why,
                mend,
                "microVMs get no network card: only programs that use proxies reach out"
            );
            false
        }
    }
}

impl Inner {
    fn runtime(&self, id: &RuntimeId) -> Runtime {
        let group = self.hierarchies.group(&self.layout.group(id));
        Runtime { id: id.clone(), dir: self.layout.runtime(id), meta_path: self.layout.meta(id), group }
    }

    fn zygote(&self, id: &RuntimeId) -> Runtime {
        Runtime { dir: self.layout.zygote(id), ..self.runtime(id) }
    }

    fn keeper(&self, sandbox: &SandboxId) -> Keeper {
        Keeper { sandbox: sandbox.clone(), dir: self.layout.keeper(sandbox) }
    }

    fn check_manifest(&self, manifest: &Manifest) -> Result<(), Failure> {
        check_compat(manifest, EngineKind::Microvm, &self.compat())
    }

    fn compat(&self) -> Compat {
        Compat {
            engine_version: format!("microvm state {DEVICES_VERSION}"),
            platform: self.platform.clone(),
            cpu_features: self.cpu_features.clone(),
            agent_version: self.agent.version.clone(),
            agent_digest: self.agent.digest.clone(),
        }
    }
}

#[async_trait]
impl Engine for Microvm {
    fn kind(&self) -> EngineKind {
        EngineKind::Microvm
    }

    fn capabilities(&self) -> Capabilities {
        Capabilities {
            memory: true,
            // Outbound connections are the keeper's; the guest's side of them is in its memory.
            external_tcp: true,
            incremental: true,
            live_fork: true,
            live_checkpoint: true,
        }
    }

    fn random_from_host(&self) -> bool {
        false
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
        named(Operation::Boot, &sandbox, self.0.boot(spec).await)
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
        named(Operation::Restore, &sandbox, self.0.restore(spec).await)
    }

    async fn fork(
        &self,
        sandbox: &SandboxId,
        runtime: &RuntimeId,
        children: Vec<ForkChild>,
    ) -> Result<Forked, EngineError> {
        let ids: Vec<SandboxId> = children.iter().map(|child| child.sandbox.clone()).collect();
        let source = named(Operation::Fork, sandbox, self.0.running(runtime))?;
        let (stopped, lived) = named(Operation::Fork, sandbox, self.0.fork(source, children).await)?;
        let children = ids.iter().zip(lived).map(|(child, lived)| named(Operation::Fork, child, lived));
        Ok(Forked { stopped, children: children.collect() })
    }

    async fn freeze(&self, sandbox: &SandboxId, runtime: &RuntimeId) -> Result<(), EngineError> {
        let (inner, runtime) = (Arc::clone(&self.0), runtime.clone());
        let frozen = blocking(move || checkpoint::freeze(&inner.running(&runtime)?)).await;
        named(Operation::Freeze, sandbox, frozen)
    }

    async fn thaw(&self, sandbox: &SandboxId, runtime: &RuntimeId) -> Result<(), EngineError> {
        let (inner, keeper, runtime) = (Arc::clone(&self.0), self.0.keeper(sandbox), runtime.clone());
        let thawed = blocking(move || checkpoint::thaw(&inner.running(&runtime)?, &keeper)).await;
        named(Operation::Thaw, sandbox, thawed)
    }

    async fn stop(&self, sandbox: &SandboxId, runtime: &RuntimeId) -> Result<(), EngineError> {
        let (keeper, runtime) = (self.0.keeper(sandbox), self.0.runtime(runtime));
        let stopped = blocking(move || {
            if let Err(error) = keeper.done(&Request::Detach, &[]) {
                tracing::debug!(sandbox = %keeper.sandbox, %error, "no keeper to detach");
            }
            runtime.destroy()
        });
        named(Operation::Stop, sandbox, stopped.await)
    }

    async fn destroy(&self, sandbox: &SandboxId, runtime: Option<&RuntimeId>) -> Result<(), EngineError> {
        let (keeper, runtime) = (self.0.keeper(sandbox), runtime.map(|runtime| self.0.runtime(runtime)));
        let destroyed = blocking(move || {
            // Both are tried, whatever the first says.
            let ended = runtime.map_or(Ok(()), |runtime| runtime.destroy());
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
            let runtime = inner.running(&runtime)?;
            if !keeper.ensure(&inner.keeper_program)? {
                return Ok(());
            }
            let pipes = Pipes::new().map_err(io_failure("make the pipes of", &runtime.dir))?;
            let link = Link::make(runtime.meta().is_some_and(|meta| meta.card))?;
            runtime.ask(WORK_WAIT, |client| client.carrier(&link.monitor_ends(&pipes)))?;
            link.serve(&keeper, true)?;
            keeper.attach(generation, Session::New, rules, pipes.for_keeper().map(AsFd::as_fd))?;
            // A sandbox that was held for a keeper that is gone is held no longer.
            runtime.change_meta(|meta| meta.held = false)
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
        let (keeper, runtime) = (self.0.keeper(sandbox), runtime.map(|runtime| self.0.runtime(runtime)));
        let adopted = blocking(move || {
            let runtime = match runtime.filter(Runtime::exists) {
                Some(runtime) => checkpoint::recover(&runtime, &keeper)?,
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
        let Some(snapshot) = spec.snapshot else { return };
        if count == 0 {
            self.0.drop_zygote(&snapshot).await;
        } else {
            self.0.want_zygote(snapshot, spec.shape);
        }
    }

    async fn shutdown(&self) {
        for zygote in self.0.zygotes.take_all().await {
            zygote::end(zygote).await;
        }
        // The parent of all groups goes when nothing is in it.
        for mount in self.0.hierarchies.all() {
            let _ = std::fs::remove_dir(mount.join(self.0.layout.group_parent()));
        }
    }
}
