//! Monitors that hold a template's snapshot, never started: a create is a fork of one.
//!
//! ```text
//! prewarm(snapshot, n > 0) ── restore, paused ──> ready ── fork ──> sandboxes
//! prewarm(snapshot, 0), its death, shutdown ────> gone
//! ```
//! One serves any number of creates, so how many are wanted does not matter. Whoever finds one that this
//! process does not own removes it (`sweep`): the ends of its pipes exist only here.

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use dormouse_types::{RuntimeId, Shape};
use tokio::task::JoinHandle;

use super::Inner;
use super::network::Link;
use super::runtime::{Meta, Runtime};
use crate::common::blocking;
use crate::error::Failure;
use crate::keepers::Pipes;
use crate::model::{ForkChild, RestoreSpec, Restored};
use dormouse_wire::keeper::Session;

/// Each holds a monitor's own memory and what of its devices is not shared.
const ZYGOTES_MAX: usize = 8;

#[derive(Debug, Default)]
pub(super) struct Zygotes {
    wanted: Mutex<HashMap<PathBuf, Zygote>>,
    /// What is being made is ended by its maker alone, wanted or not: a monitor that is not yet known as a
    /// process could not be ended by anybody else.
    makers: Mutex<HashMap<RuntimeId, JoinHandle<()>>>,
}

#[derive(Debug)]
struct Zygote {
    runtime: Runtime,
    /// `None`: it is being made. The carrier of no sandbox: nobody speaks on it.
    pipes: Option<Pipes>,
}

impl Zygotes {
    fn all(&self) -> MutexGuard<'_, HashMap<PathBuf, Zygote>> {
        self.wanted.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn makers(&self) -> MutexGuard<'_, HashMap<RuntimeId, JoinHandle<()>>> {
        self.makers.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub fn owns(&self, id: &RuntimeId) -> bool {
        self.makers().contains_key(id) || self.all().values().any(|zygote| zygote.runtime.id == *id)
    }

    pub fn ready(&self, snapshot: &Path) -> Option<Runtime> {
        let all = self.all();
        let zygote = all.get(snapshot).filter(|zygote| zygote.pipes.is_some())?;
        Some(zygote.runtime.clone())
    }

    /// True: the caller is to make it.
    fn claim(&self, snapshot: &Path, runtime: &Runtime) -> bool {
        let mut all = self.all();
        if all.contains_key(snapshot) || all.len() >= ZYGOTES_MAX {
            return false;
        }
        all.insert(snapshot.to_owned(), Zygote { runtime: runtime.clone(), pipes: None });
        true
    }

    /// False: it is not wanted any more.
    fn made(&self, snapshot: &Path, runtime: &Runtime, pipes: Pipes) -> bool {
        match self.all().get_mut(snapshot) {
            Some(zygote) if zygote.runtime.id == runtime.id => {
                zygote.pipes = Some(pipes);
                true
            }
            _ => false,
        }
    }

    /// It is wanted no more; what was there is the caller's to end.
    fn take(&self, snapshot: &Path) -> Option<Runtime> {
        self.all().remove(snapshot).filter(|zygote| zygote.pipes.is_some()).map(|zygote| zygote.runtime)
    }

    /// None is wanted any more. Comes back when no more are being made, with those that are to be ended.
    pub async fn take_all(&self) -> Vec<Runtime> {
        let there: Vec<Zygote> = self.all().drain().map(|(_, zygote)| zygote).collect();
        let makers: Vec<JoinHandle<()>> = self.makers().drain().map(|(_, maker)| maker).collect();
        for maker in makers {
            // One that panicked has said so.
            drop(maker.await);
        }
        there.into_iter().filter(|zygote| zygote.pipes.is_some()).map(|zygote| zygote.runtime).collect()
    }
}

impl Inner {
    /// Makes one in the background, where there is none yet.
    pub(super) fn want_zygote(self: &Arc<Self>, snapshot: PathBuf, shape: Shape) {
        let runtime = self.zygote(&RuntimeId::generate());
        if !self.zygotes.claim(&snapshot, &runtime) {
            return;
        }
        let inner = Arc::clone(self);
        let id = runtime.id.clone();
        // Held until its handle is in: a maker that is quick takes it out after that.
        let mut makers = self.zygotes.makers();
        let maker = tokio::spawn(async move {
            let made = inner.make_zygote(&snapshot, shape, &runtime).await;
            let kept = match made {
                Ok(pipes) => inner.zygotes.made(&snapshot, &runtime, pipes),
                Err(error) => {
                    tracing::debug!(snapshot = %snapshot.display(), %error, "no zygote is kept");
                    inner.zygotes.take(&snapshot);
                    false
                }
            };
            let id = runtime.id.clone();
            if !kept {
                end(runtime).await;
            }
            inner.zygotes.makers().remove(&id);
        });
        makers.insert(id, maker);
    }

    async fn make_zygote(&self, snapshot: &Path, shape: Shape, runtime: &Runtime) -> Result<Pipes, Failure> {
        let (described, files) = {
            let described = self.examine(snapshot)?;
            (described, names_in(snapshot))
        };
        let meta = self.meta(runtime, shape, described.disk, described.agent_digest);
        let meta = Meta { card: described.card, ..meta };
        let machine = self.machine(&meta)?;
        let (made, program, snapshot) =
            (runtime.clone(), Arc::clone(&self.monitor_program), snapshot.to_owned());
        let card = meta.card;
        blocking(move || {
            made.create(&meta)?;
            let names: Vec<&str> = files.iter().map(String::as_str).collect();
            let from = made.link_snapshot(&snapshot, &names)?;
            let pipes = Pipes::new().map_err(crate::common::io_failure("make the pipes of", &made.dir))?;
            // Its guest never runs: nobody serves its card's other side.
            let link = Link::make(card)?;
            super::lifecycle::load(&made, &program, machine, from, &link.monitor_ends(&pipes))?;
            Ok(pipes)
        })
        .await
    }

    pub(super) async fn drop_zygote(&self, snapshot: &Path) {
        if let Some(runtime) = self.zygotes.take(snapshot) {
            end(runtime).await;
        }
    }

    /// A fork of the snapshot's zygote; `None`: there is none that can, an ordinary restore does it.
    pub(super) async fn restore_from_zygote(
        self: &Arc<Self>,
        spec: &RestoreSpec,
    ) -> Option<Result<Restored, Failure>> {
        let zygote = self.zygotes.ready(&spec.snapshot_dir)?;
        let child = ForkChild {
            sandbox: spec.sandbox.clone(),
            runtime: spec.runtime.clone(),
            generation: spec.generation,
            hostname: spec.hostname.clone(),
            egress: spec.egress.clone(),
        };
        let forked = self.fork(zygote, vec![child]).await;
        match forked.map(|(_, mut children)| children.pop()) {
            Ok(Some(Ok(()))) => Some(Ok(Restored { session: Session::New, from_pool: true })),
            Ok(Some(Err(failure))) | Err(failure) => {
                tracing::warn!(snapshot = %spec.snapshot_dir.display(), error = %failure, "a zygote cannot fork; it is given up");
                self.drop_zygote(&spec.snapshot_dir).await;
                None
            }
            Ok(None) => None,
        }
    }
}

pub(super) async fn end(runtime: Runtime) {
    let id = runtime.id.clone();
    if let Err(error) = blocking(move || runtime.destroy()).await {
        tracing::warn!(zygote = %id, %error, "a zygote was not removed whole");
    }
}

/// The snapshot's files without the manifest.
fn names_in(snapshot: &Path) -> Vec<String> {
    let entries = std::fs::read_dir(snapshot).into_iter().flatten().flatten();
    let names = entries.filter_map(|entry| entry.file_name().into_string().ok());
    names.filter(|name| !name.starts_with("manifest")).collect()
}
