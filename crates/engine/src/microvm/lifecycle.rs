//! Boot, restore, fork. (Checkpoints: [`super::checkpoint`].)
//!
//! ```text
//!  boot:     monitor started ── boots ─────────────────────────> running
//!  restore:  monitor started ── loads, paused ── resumed ──────> running     keeper started, given the
//!  fork:     running ── fork(2) ── children paused ── resumed ─> running     other ends of the pipes, beside it
//! ```
//! A runtime exists from the moment its folder is made. Whatever fails after that removes it whole before
//! the error is returned.

use std::ffi::OsString;
use std::os::fd::{AsFd, BorrowedFd};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use dormouse_snapshot::Manifest;
use dormouse_types::{Generation, RuntimeId, SandboxId, Shape};
use dormouse_vmm::control::{self, CHILDREN_MAX, Client, Kernel, Machine};
use dormouse_wire::keeper::{EgressRules, Request, Session};

use super::Inner;
use super::checkpoint::Described;
use super::guest::{self, Disk};
use super::network::Link;
use super::runtime::{Meta, Runtime, WORK_WAIT};
use super::users;
use crate::common::{blocking, io_failure};
use crate::error::Failure;
use crate::keepers::{Keeper, Pipes};
use crate::model::{BootSpec, ForkChild, RestoreSpec, Restored};

/// A pager has noted by then what is touched first.
const WORKING_SET_WAIT: Duration = Duration::from_secs(15);

/// Whose pipes the keeper gets, and under which rules.
struct Binding {
    keeper: Keeper,
    generation: Generation,
    session: Session,
    egress: EgressRules,
}

/// How a monitor that was just started comes to its guest.
enum Begin {
    Boot(Kernel),
    /// From the files in its own folder. `lazy`: by a pager.
    Restore {
        from: PathBuf,
        lazy: bool,
    },
}

impl Inner {
    pub(super) fn machine(&self, meta: &Meta) -> Result<Machine, Failure> {
        let Meta { shape, disk, card, .. } = meta;
        let vcpus = u8::try_from(shape.cpus).map_err(|_| Failure::Unsupported {
            why: format!("a microVM has at most {} processors", control::VCPUS_MAX),
        })?;
        let layers = vec![self.layout.disks().join(&disk.name)];
        self.let_read(&layers)?;
        Ok(Machine {
            vcpus,
            memory_mib: shape.memory_mib,
            disks: vec![control::Disk { layers, read_only: false }],
            cpu_template: None,
            net: *card,
            huge_pages: true,
        })
    }

    /// Lets monitors read what they start guests from.
    fn let_read(&self, files: &[PathBuf]) -> Result<(), Failure> {
        let Some(users) = self.users else { return Ok(()) };
        files.iter().try_for_each(|file| users::let_read(file, users.first))
    }

    pub(super) async fn boot(self: &Arc<Self>, spec: BootSpec) -> Result<(), Failure> {
        let inner = Arc::clone(self);
        let (rootfs, shape) = (spec.rootfs.clone(), spec.shape);
        let prepare = move || {
            let kernel = guest::kernel(&inner.layout)?;
            inner.let_read(std::slice::from_ref(&kernel.image))?;
            inner.let_read(kernel.initramfs.as_slice())?;
            Ok((kernel, inner.disks.obtain(&inner.layout, &rootfs, shape)?))
        };
        let (kernel, disk) = blocking(prepare).await?;
        let binding = self.binding(&spec.sandbox, spec.generation, Session::New, spec.egress);
        let runtime = self.runtime(&spec.runtime);
        let meta = self.meta(&runtime, shape, disk, self.agent.digest.clone());
        let begun = self.begin(&runtime, meta, Begin::Boot(kernel), binding).await;
        self.undo_if_failed(begun, &spec.sandbox, runtime).await.map(drop)
    }

    pub(super) async fn restore(self: &Arc<Self>, spec: RestoreSpec) -> Result<Restored, Failure> {
        self.check_manifest(&spec.manifest)?;
        same_machine(&spec)?;
        let binding = self.binding(&spec.sandbox, spec.generation, spec.session, spec.egress.clone());
        let runtime = self.runtime(&spec.runtime);
        if spec.session == Session::New
            && let Some(restored) = self.restore_from_zygote(&spec).await
        {
            return restored;
        }
        let (inner, snapshot) = (Arc::clone(self), spec.snapshot_dir.clone());
        let described = blocking(move || inner.examine(&snapshot)).await?;
        let lazy = self.lazy_restore;
        let (learned, snapshot) = (runtime.clone(), spec.snapshot_dir.clone());
        let meta = self.meta(&runtime, spec.manifest.shape, described.disk, described.agent_digest);
        let meta = Meta { card: described.card, ..meta };
        let begun = async {
            let made = runtime.clone();
            let from = blocking(move || {
                made.create(&meta)?;
                let from = made.link_snapshot(&spec.snapshot_dir, &names(&spec.manifest))?;
                if lazy {
                    made.link_working_set(&spec.snapshot_dir, &from);
                }
                Ok((from, meta))
            });
            let (from, meta) = from.await?;
            self.begin_made(&runtime, meta, Begin::Restore { from, lazy }, binding).await
        };
        let begun = begun.await;
        let session = self.undo_if_failed(begun, &spec.sandbox, runtime).await?;
        if lazy {
            keep_working_set(learned, snapshot);
        }
        Ok(Restored { session, from_pool: false })
    }

    /// Before anything is touched.
    pub(super) fn examine(&self, snapshot: &Path) -> Result<Described, Failure> {
        let described = Described::read(snapshot)?;
        guest::find_disk(&self.layout, &described.disk)?;
        Ok(described)
    }

    pub(super) fn meta(&self, runtime: &Runtime, shape: Shape, disk: Disk, agent_digest: String) -> Meta {
        let user = self.users.map(|users| users.of(&runtime.id));
        Meta { shape, disk, agent_digest, card: self.cards, process: None, user, started: false, held: false }
    }

    fn binding(
        &self,
        sandbox: &SandboxId,
        generation: Generation,
        session: Session,
        egress: EgressRules,
    ) -> Binding {
        Binding { keeper: self.keeper(sandbox), generation, session, egress }
    }

    async fn begin(
        &self,
        runtime: &Runtime,
        meta: Meta,
        begin: Begin,
        binding: Binding,
    ) -> Result<Session, Failure> {
        let (made, known) = (runtime.clone(), meta.clone());
        blocking(move || made.create(&known)).await?;
        self.begin_made(runtime, meta, begin, binding).await
    }

    /// Monitor and keeper beside each other; what the guest says before somebody listens waits in its pipe.
    async fn begin_made(
        &self,
        runtime: &Runtime,
        meta: Meta,
        begin: Begin,
        binding: Binding,
    ) -> Result<Session, Failure> {
        let pipes = Arc::new(Pipes::new().map_err(io_failure("make the pipes of", &runtime.dir))?);
        let machine = self.machine(&meta)?;
        let (keeper, session) = (binding.keeper.clone(), binding.session);
        let link = blocking(move || Link::find_or_make(meta.card, &keeper, session));
        let link = Arc::new(link.await?);
        let (program, started, ends) =
            (Arc::clone(&self.monitor_program), runtime.clone(), (Arc::clone(&pipes), Arc::clone(&link)));
        let start = blocking(move || {
            let mut client = started.start(&program, meta.shape.cpus)?;
            start_guest(&started, &mut client, machine, begin, &ends.1.monitor_ends(&ends.0))
        });
        // Neither is given up half done for the other's sake.
        let (bound, started) = tokio::join!(self.bind(binding, pipes, link), start);
        started?;
        let session = bound?;
        let woken = runtime.clone();
        blocking(move || resume(&woken)).await?;
        Ok(session)
    }

    /// Starts the keeper where there is none, and gives it the pipes and the network. Returns the real session.
    async fn bind(&self, binding: Binding, pipes: Arc<Pipes>, link: Arc<Link>) -> Result<Session, Failure> {
        let program = Arc::clone(&self.keeper_program);
        blocking(move || {
            let Binding { keeper, generation, session, egress } = binding;
            let started = keeper.ensure(&program)?;
            let session = if started { Session::New } else { session };
            link.serve(&keeper, started)?;
            keeper.attach(generation, session, egress, pipes.for_keeper().map(AsFd::as_fd))?;
            Ok(session)
        })
        .await
    }

    /// Copies of a running (or frozen) sandbox. The outer error: none was made, the source is as before.
    pub(super) async fn fork(
        self: &Arc<Self>,
        source: Runtime,
        children: Vec<ForkChild>,
    ) -> Result<(Duration, Vec<Result<(), Failure>>), Failure> {
        let gone = || Failure::Exited { why: format!("there is no runtime {}", source.id) };
        let known = source.meta().ok_or_else(gone)?;
        // A copy of its monitor is the same user.
        let meta = Meta { process: None, started: false, held: false, ..known };
        let mut newborn = Vec::with_capacity(children.len());
        let mut failed = None;
        for child in children {
            match self.prepare_child(child, &meta).await {
                Ok(child) => newborn.push(child),
                Err(failure) => {
                    failed = Some(failure);
                    break;
                }
            }
        }
        if let Some(failure) = failed {
            self.undo_all(newborn).await;
            return Err(failure);
        }
        // Keepers start while the monitor forks.
        let keepers = spawn_each(&newborn, {
            let program = Arc::clone(&self.keeper_program);
            move |child: &Newborn| child.keeper.ensure(&program).map(drop)
        });
        let newborn = Arc::new(newborn);
        let (forking, born) = (source, Arc::clone(&newborn));
        let forked = blocking(move || fork_all(&forking, &born)).await;
        let kept = outcomes(keepers).await;
        let newborn = Arc::try_unwrap(newborn).unwrap_or_else(|shared| shared.to_vec());
        let (stopped, pids) = match forked {
            Ok(forked) => forked,
            Err(failure) => {
                self.undo_all(newborn).await;
                return Err(failure);
            }
        };
        let mut born = Vec::with_capacity(newborn.len());
        for ((child, pid), kept) in newborn.iter().zip(pids).zip(kept) {
            let child = child.clone();
            born.push(tokio::task::spawn_blocking(move || kept.and_then(|()| child.live(pid))));
        }
        let lived = outcomes(born).await;
        let mut done = Vec::with_capacity(lived.len());
        for (child, lived) in newborn.into_iter().zip(lived) {
            done.push(self.undo_if_failed(lived, &child.sandbox, child.runtime).await);
        }
        Ok((stopped, done))
    }

    async fn prepare_child(&self, child: ForkChild, meta: &Meta) -> Result<Newborn, Failure> {
        let runtime = self.runtime(&child.runtime);
        let pipes = Pipes::new().map_err(io_failure("make the pipes of", &runtime.dir))?;
        let keeper = self.keeper(&child.sandbox);
        let ForkChild { sandbox, generation, egress, .. } = child;
        let (made, meta) = (runtime.clone(), meta.clone());
        let link = blocking(move || {
            let link = Link::make(meta.card)?;
            made.create(&meta)?;
            made.make_group(meta.shape.cpus)?;
            Ok(link)
        });
        let (pipes, link) = (Arc::new(pipes), Arc::new(link.await?));
        Ok(Newborn { sandbox, runtime, keeper, generation, egress, pipes, link })
    }

    async fn undo_all(&self, newborn: Vec<Newborn>) {
        for child in newborn {
            let failure = Failure::Exited { why: "the fork failed".to_owned() };
            drop(self.undo_if_failed::<()>(Err(failure), &child.sandbox, child.runtime).await);
        }
    }

    /// Leaves nothing of a runtime that did not come to life; its keeper stops writing to the pipes.
    pub(super) async fn undo_if_failed<T>(
        &self,
        outcome: Result<T, Failure>,
        sandbox: &SandboxId,
        runtime: Runtime,
    ) -> Result<T, Failure> {
        if outcome.is_err() {
            let keeper = self.keeper(sandbox);
            let id = runtime.id.clone();
            let undone = blocking(move || {
                if let Err(error) = keeper.done(&Request::Detach, &[]) {
                    tracing::debug!(sandbox = %keeper.sandbox, %error, "no keeper to detach");
                }
                runtime.destroy()
            });
            if let Err(error) = undone.await {
                tracing::warn!(runtime = %id, %error, "a runtime that failed was not removed whole");
            }
        }
        outcome
    }
}

/// A child of a fork on its way to life.
#[derive(Debug, Clone)]
struct Newborn {
    sandbox: SandboxId,
    runtime: Runtime,
    keeper: Keeper,
    generation: Generation,
    egress: EgressRules,
    pipes: Arc<Pipes>,
    link: Arc<Link>,
}

impl Newborn {
    /// Its monitor exists, paused.
    fn live(&self, pid: u32) -> Result<(), Failure> {
        self.runtime.know_forked(pid)?;
        self.link.serve(&self.keeper, true)?;
        let ends = self.pipes.for_keeper().map(AsFd::as_fd);
        self.keeper.attach(self.generation, Session::New, self.egress.clone(), ends)?;
        resume(&self.runtime)
    }
}

fn spawn_each(
    newborn: &[Newborn],
    work: impl Fn(&Newborn) -> Result<(), Failure> + Clone + Send + 'static,
) -> Vec<tokio::task::JoinHandle<Result<(), Failure>>> {
    let each = |child: &Newborn| {
        let (child, work) = (child.clone(), work.clone());
        tokio::task::spawn_blocking(move || work(&child))
    };
    newborn.iter().map(each).collect()
}

async fn outcomes(tasks: Vec<tokio::task::JoinHandle<Result<(), Failure>>>) -> Vec<Result<(), Failure>> {
    let mut outcomes = Vec::with_capacity(tasks.len());
    for task in tasks {
        outcomes.push(task.await.unwrap_or_else(|error| {
            Err(Failure::Unsupported { why: format!("the daemon is shutting down: {error}") })
        }));
    }
    outcomes
}

/// All children go on from one instant: more than one call can make are made of a guest that stands still.
fn fork_all(source: &Runtime, newborn: &[Newborn]) -> Result<(Duration, Vec<u32>), Failure> {
    let started = Instant::now();
    let still = newborn.len() > CHILDREN_MAX;
    let mut client = source.connect(WORK_WAIT)?;
    let failed = |error| source.failure(error);
    let was_running = client.status().map_err(failed)?.state == control::State::Running;
    if still && was_running {
        client.pause().map_err(failed)?;
    }
    let mut pids = Vec::with_capacity(newborn.len());
    let mut forked = Ok(());
    let mut stopped = Duration::ZERO;
    for some in newborn.chunks(CHILDREN_MAX) {
        let children =
            some.iter().map(|child| control::ForkChild { dir: child.runtime.dir.clone() }).collect();
        let ends: Vec<BorrowedFd<'_>> =
            some.iter().flat_map(|child| child.link.monitor_ends(&child.pipes)).collect();
        match client.fork(children, &ends) {
            Ok(done) => {
                stopped += Duration::from_micros(done.stopped_us);
                pids.extend(done.pids);
            }
            Err(error) => {
                forked = Err(source.failure(error));
                break;
            }
        }
    }
    if still && was_running {
        client.resume().map_err(failed)?;
        stopped = started.elapsed();
    }
    forked.map(|()| (stopped, pids))
}

/// What a lazy restore touched first goes to the snapshot, for the next one. Best effort: whatever ends before it is known
/// leaves the next restore as slow as this one.
fn keep_working_set(runtime: Runtime, snapshot: PathBuf) {
    tokio::spawn(async move {
        tokio::time::sleep(WORKING_SET_WAIT).await;
        let name = runtime.id.clone();
        let kept = blocking(move || runtime.give_working_set(&snapshot)).await;
        if let Err(error) = kept {
            tracing::debug!(runtime = %name, %error, "what was touched first is not kept");
        }
    });
}

fn start_guest(
    runtime: &Runtime,
    client: &mut Client,
    machine: Machine,
    begin: Begin,
    ends: &[BorrowedFd<'_>],
) -> Result<(), Failure> {
    client.set_timeout(Some(WORK_WAIT)).map_err(io_failure("speak to the monitor in", &runtime.dir))?;
    let started = match begin {
        Begin::Boot(kernel) => client.boot(machine, kernel, ends),
        Begin::Restore { from, lazy } => client.restore(machine, from, lazy, ends),
    };
    started.map_err(|error| runtime.failure(error))
}

/// Starts a monitor with a snapshot's guest, paused.
pub(super) fn load(
    runtime: &Runtime,
    program: &[OsString],
    machine: Machine,
    from: PathBuf,
    ends: &[BorrowedFd<'_>],
) -> Result<(), Failure> {
    let mut client = runtime.start(program, u32::from(machine.vcpus))?;
    start_guest(runtime, &mut client, machine, Begin::Restore { from, lazy: false }, ends)
}

/// The guest runs, and it is written down that this runtime came to life.
fn resume(runtime: &Runtime) -> Result<(), Failure> {
    super::checkpoint::go_on(runtime)?;
    runtime.change_meta(|meta| meta.started = true)
}

/// What a snapshot holds of memory and processors cannot be had in another number.
fn same_machine(spec: &RestoreSpec) -> Result<(), Failure> {
    let (asked, has) = (spec.shape, spec.manifest.shape);
    if (asked.cpus, asked.memory_mib, asked.disk_mib) == (has.cpus, has.memory_mib, has.disk_mib) {
        return Ok(());
    }
    let why = format!(
        "a microVM that starts from a snapshot has the snapshot's {} processors, {} MiB of memory and {} MiB of disk, \
         not {}, {} and {}: build a template of the shape that you want",
        has.cpus, has.memory_mib, has.disk_mib, asked.cpus, asked.memory_mib, asked.disk_mib
    );
    Err(Failure::Unsupported { why })
}

fn names(manifest: &Manifest) -> Vec<&str> {
    manifest.files.iter().map(|file| file.name.as_str()).collect()
}

/// What a runtime that serves is asked for by its id.
impl Inner {
    pub(super) fn running(&self, runtime: &RuntimeId) -> Result<Runtime, Failure> {
        let runtime = self.runtime(runtime);
        if runtime.process().is_some() {
            return Ok(runtime);
        }
        let why = if runtime.exists() {
            runtime.why_ended()
        } else {
            format!("there is no runtime {}", runtime.id)
        };
        Err(Failure::Exited { why })
    }
}
