//! Boot and restore. (Checkpoints: [`super::checkpoint`].)
//!
//! ```text
//!  create ─────> created ──start──> running ──checkpoint──> gone (or runs on)
//!  (or pool)        └────restore───────^
//! ```
//! A runtime exists from the moment its link is made. Whatever fails after that destroys the container
//! and the link before the error is returned.

use std::os::fd::AsFd;
use std::path::Path;
use std::sync::Arc;

use dormouse_types::{Generation, RuntimeId, SandboxId};
use dormouse_wire::keeper::{EgressRules, Request, Session};

use super::Inner;
use super::bundle::{self, Bundle};
use super::checkpoint::inspect;
use super::container::{Container, Meta};
use super::pool::{Claim, Member};
use super::runsc::{GuestEnds, Target};
use crate::common::{blocking, io_failure};
use crate::error::Failure;
use crate::keepers::Pipes;
use crate::model::{BootSpec, RestoreSpec, Restored, WarmSpec};

/// Whose pipes the keeper gets, and under which rules.
struct Binding<'a> {
    sandbox: &'a SandboxId,
    generation: Generation,
    session: Session,
    egress: &'a EgressRules,
}

impl Inner {
    pub(super) fn target<'a>(&'a self, container: &'a Container, files: &'a Path) -> Target<'a> {
        let groups = container.has_group();
        Target { runsc: &self.runsc, id: container.id.as_str(), dir: &container.dir, files, groups }
    }

    /// A new container, created and not started.
    pub(super) async fn make(
        &self,
        spec: &WarmSpec,
        agent_digest: &str,
        container: &Container,
    ) -> Result<Pipes, Failure> {
        let made = self.make_unguarded(spec, agent_digest, container).await;
        if made.is_err() {
            let failed = container.clone();
            if let Err(error) = blocking(move || failed.destroy()).await {
                tracing::warn!(container = %container.id, %error, "a container that failed was not removed whole");
            }
        }
        made
    }

    async fn make_unguarded(
        &self,
        spec: &WarmSpec,
        agent_digest: &str,
        container: &Container,
    ) -> Result<Pipes, Failure> {
        let agent = self.layout.agent(agent_digest);
        let pipes = Pipes::new().map_err(io_failure("make the pipes of", &container.dir))?;
        let meta = Meta {
            shape: spec.shape,
            rootfs: spec.rootfs.clone(),
            agent_digest: agent_digest.to_owned(),
            pipes: pipes.inodes().map_err(io_failure("look at the pipes of", &container.dir))?,
            processes: None,
            started: false,
        };
        let prepared = container.clone();
        blocking(move || {
            let (container, rootfs) = (prepared, meta.rootfs.as_path());
            bundle::prepare_rootfs(rootfs)?;
            std::fs::create_dir_all(&container.dir).map_err(io_failure("make the folder", &container.dir))?;
            container.write_meta(&meta)?;
            let group = container.has_group().then_some(container.group_path.as_path());
            Bundle { rootfs, agent: &agent, shape: meta.shape, hostname: "sandbox", group }
                .write(&container.dir)
        })
        .await?;
        let files = self.layout.files();
        let ends = GuestEnds { stdin: &pipes.stdin.read, stdout: &pipes.stdout.write };
        self.target(container, &files).create(ends).await?;
        let (container, shape) = (container.clone(), spec.shape);
        blocking(move || {
            let processes = container.find_processes()?;
            container.change_meta(|meta| meta.processes = Some(processes))?;
            container.set_limits(shape)
        })
        .await?;
        Ok(pipes)
    }

    /// A container for the pool: frozen, for it would use some 5 % of a processor to do nothing.
    /// Nobody speaks to it before it is somebody's, and whoever takes it wakes it as any other.
    pub(super) async fn make_member(&self, spec: &WarmSpec, container: &Container) -> Result<Pipes, Failure> {
        let pipes = self.make(spec, &self.agent.digest, container).await?;
        let made = async {
            if let Some(snapshot) = &spec.snapshot {
                let image = snapshot.clone();
                let direct = blocking(move || inspect(&image)).await?;
                self.target(container, &self.layout.files()).restore(snapshot, direct).await?;
            }
            let frozen = container.clone();
            blocking(move || frozen.freeze()).await
        };
        if let Err(failure) = made.await {
            let failed = container.clone();
            blocking(move || failed.destroy()).await?;
            return Err(failure);
        }
        Ok(pipes)
    }

    /// From the pool, or made now. True: it was ready.
    async fn obtain(&self, spec: &WarmSpec) -> Result<(Member, Claim<'_>, bool), Failure> {
        if let Some((member, claim)) = self.ready(spec).await? {
            return Ok((member, claim, true));
        }
        let (member, claim) = self.obtain_new(spec, &self.agent.digest).await?;
        Ok((member, claim, false))
    }

    /// A member of the pool that lives, thawed.
    async fn ready(&self, spec: &WarmSpec) -> Result<Option<(Member, Claim<'_>)>, Failure> {
        while let Some((member, claim)) = self.pool.take(spec) {
            let container = member.container.clone();
            let alive = blocking(move || {
                let alive = container.sandbox().is_some();
                if alive { container.thaw().map(|()| true) } else { Ok(false) }
            });
            if alive.await? {
                return Ok(Some((member, claim)));
            }
            let container = member.container;
            tracing::warn!(container = %container.id, "a prepared runtime had ended");
            blocking(move || container.destroy()).await?;
        }
        Ok(None)
    }

    /// For a restore: one that was restored already, one to restore into, or a new one.
    async fn obtain_for(&self, spec: &RestoreSpec) -> Result<(Member, Claim<'_>, bool), Failure> {
        let warm = WarmSpec { rootfs: spec.rootfs.clone(), shape: spec.shape, snapshot: None };
        let agent_digest = &spec.manifest.compat.agent_digest;
        if *agent_digest != self.agent.digest {
            // An image goes on with the very executable it was made with: pool members have the newest.
            let (member, claim) = self.obtain_new(&warm, agent_digest).await?;
            return Ok((member, claim, false));
        }
        if spec.session == Session::New {
            let restored = WarmSpec { snapshot: Some(spec.snapshot_dir.clone()), ..warm.clone() };
            if let Some((member, claim)) = self.ready(&restored).await? {
                return Ok((member, claim, true));
            }
        }
        self.obtain(&warm).await
    }

    async fn obtain_new(&self, spec: &WarmSpec, agent_digest: &str) -> Result<(Member, Claim<'_>), Failure> {
        let container = self.container(&RuntimeId::generate());
        let claim = self.pool.claim(&container.id);
        let pipes = self.make(spec, agent_digest, &container).await?;
        Ok((Member { spec: spec.clone(), container, pipes }, claim))
    }

    /// Starts the keeper where there is none, and gives it the pipes. Returns the real session.
    async fn bind(&self, binding: Binding<'_>, pipes: Pipes) -> Result<Session, Failure> {
        let keeper = self.keeper(binding.sandbox);
        let program = Arc::clone(&self.keeper_program);
        let (generation, wanted, rules) = (binding.generation, binding.session, binding.egress.clone());
        blocking(move || {
            let session = if keeper.ensure(&program)? { Session::New } else { wanted };
            keeper.attach(generation, session, rules, pipes.for_keeper().map(AsFd::as_fd))?;
            Ok(session)
        })
        .await
    }

    pub(super) async fn boot(&self, spec: BootSpec) -> Result<(), Failure> {
        let warm = WarmSpec { rootfs: spec.rootfs, shape: spec.shape, snapshot: None };
        let (Member { container, pipes, .. }, claim, _) = self.obtain(&warm).await?;
        let binding = Binding {
            sandbox: &spec.sandbox,
            generation: spec.generation,
            session: Session::New,
            egress: &spec.egress,
        };
        let booted = async {
            self.layout.link(&spec.runtime, &container.id)?;
            drop(claim);
            self.bind(binding, pipes).await?;
            let files = self.layout.files();
            self.target(&container, &files).start().await?;
            container.change_meta(|meta| meta.started = true)
        };
        let booted = booted.await;
        self.undo_if_failed(booted, &spec.sandbox, &spec.runtime, container).await
    }

    pub(super) async fn restore(&self, spec: RestoreSpec) -> Result<Restored, Failure> {
        self.check_manifest(&spec.manifest)?;
        let image = spec.snapshot_dir.clone();
        let direct = blocking(move || inspect(&image)).await?;
        let (Member { container, pipes, spec: warm }, claim, from_pool) = self.obtain_for(&spec).await?;
        let binding = Binding {
            sandbox: &spec.sandbox,
            generation: spec.generation,
            session: spec.session,
            egress: &spec.egress,
        };
        let restored = async {
            self.layout.link(&spec.runtime, &container.id)?;
            drop(claim);
            // What the sandbox says before somebody listens waits in its pipe.
            let files = self.layout.files();
            let target = self.target(&container, &files);
            let restore = async {
                if warm.snapshot.is_some() {
                    return Ok(());
                }
                target.restore(&spec.snapshot_dir, direct).await
            };
            // Neither is given up half done for the other's sake.
            let (bound, restored) = tokio::join!(self.bind(binding, pipes), restore);
            restored?;
            let session = bound?;
            container.change_meta(|meta| meta.started = true)?;
            Ok(Restored { session, from_pool })
        };
        let restored = restored.await;
        self.undo_if_failed(restored, &spec.sandbox, &spec.runtime, container).await
    }

    /// Leaves nothing of a runtime that did not come to life; its keeper stops writing to the pipes.
    async fn undo_if_failed<T>(
        &self,
        outcome: Result<T, Failure>,
        sandbox: &SandboxId,
        runtime: &RuntimeId,
        container: Container,
    ) -> Result<T, Failure> {
        if outcome.is_err() {
            let (keeper, layout, runtime) = (self.keeper(sandbox), self.layout.clone(), runtime.clone());
            let id = container.id.clone();
            let undone = blocking(move || {
                if let Err(error) = keeper.done(&Request::Detach, &[]) {
                    tracing::debug!(sandbox = %keeper.sandbox, %error, "no keeper to detach");
                }
                container.destroy()?;
                layout.unlink(&runtime)
            });
            if let Err(error) = undone.await {
                tracing::warn!(container = %id, %error, "a runtime that failed was not removed whole");
            }
        }
        outcome
    }
}
