//! Live forks: the source's work makes the children's runtimes, each child's own work waits for its turn.
//!
//! ```text
//! child  Create ── its runtime is journaled ── told ──┐                        ┌── born ── woken, served
//! child  Create ── its runtime is journaled ── told ──┼── source: engine.fork ─┴── born ── woken, served
//! source is paused meanwhile: no runtime to copy, the children start from what it is paused on ──╯
//! ```
//! Every child's row exists before its runtime does, so that a crash leaves nothing that nobody owns.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use dormouse_engine::ForkChild;
use dormouse_types::SnapshotId;
use tokio::sync::oneshot;

use super::launch::NotLaunched;
use super::{Birth, Job, Report, words};
use crate::error::NodeError;
use crate::lifecycle::Outcome;

/// How a child comes to life.
#[derive(Debug, Clone)]
pub enum Born {
    /// Its runtime exists, and has not been woken.
    Live { stopped: Duration },
    /// The source is paused on this.
    FromSnapshot(SnapshotId),
}

/// What a child tells and waits for.
#[derive(Debug)]
pub struct Place {
    told: oneshot::Sender<ForkChild>,
    born: oneshot::Receiver<Result<Born, NodeError>>,
}

/// The other side of a [`Place`].
#[derive(Debug)]
pub struct Awaited {
    pub told: oneshot::Receiver<ForkChild>,
    pub born: oneshot::Sender<Result<Born, NodeError>>,
}

#[must_use]
pub fn place() -> (Place, Awaited) {
    let (told, hear) = oneshot::channel();
    let (born, await_born) = oneshot::channel();
    (Place { told, born: await_born }, Awaited { told: hear, born })
}

/// A child that is ready to be made.
#[derive(Debug)]
pub struct Ready {
    pub child: ForkChild,
    pub born: oneshot::Sender<Result<Born, NodeError>>,
}

/// Taken by whoever comes first; clones are one.
#[derive(Debug)]
pub struct Once<T>(Arc<Mutex<Option<T>>>);

impl<T> Clone for Once<T> {
    fn clone(&self) -> Self {
        Self(Arc::clone(&self.0))
    }
}

impl<T> Once<T> {
    pub fn new(value: T) -> Self {
        Self(Arc::new(Mutex::new(Some(value))))
    }

    pub fn take(&self) -> Option<T> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).take()
    }
}

impl Job {
    /// The source's part.
    pub(super) async fn fork(self) -> Report {
        let Some(ready) = self.order.children.as_ref().and_then(Once::take) else {
            return Report::unchanged(NodeError::internal("the children of a fork are not known"));
        };
        let runtime = match self.runtime() {
            Ok(runtime) => runtime,
            Err(error) => return Report::unchanged(error),
        };
        let _gate = self.order.hub.gate.read().await;
        // What the agent inside has served under is not to be served under again.
        let (ready, late): (Vec<Ready>, Vec<Ready>) =
            ready.into_iter().partition(|ready| ready.child.generation > self.order.info.generation);
        for Ready { born, .. } in late {
            let error = NodeError::conflict("the source was started anew while it was forked; try again");
            drop(born.send(Err(error)));
        }
        let (children, born): (Vec<_>, Vec<_>) = ready.into_iter().map(|it| (it.child, it.born)).unzip();
        match self.engine.fork(&self.order.info.id, &runtime, children).await {
            Ok(forked) => {
                self.reached("forked");
                for (born, child) in born.into_iter().zip(forked.children) {
                    let told = child.map(|()| Born::Live { stopped: forked.stopped });
                    // A child that does not wait any more is removed by its own work.
                    drop(born.send(told.map_err(NodeError::from)));
                }
                Report::done()
            }
            Err(error) => {
                let told = NodeError::from(&error);
                for born in born {
                    drop(born.send(Err(told.clone())));
                }
                self.failed(error)
            }
        }
    }

    /// A child's part.
    pub(super) async fn be_born(self, birth: &Birth, place: Place) -> Report {
        let info = &self.order.info;
        let child = ForkChild {
            sandbox: info.id.clone(),
            runtime: self.order.pending.runtime.clone(),
            generation: self.order.generation,
            hostname: info.hostname.clone(),
            egress: info.egress.clone(),
        };
        let gone = || NodeError::unavailable("the fork was given up before the copy was made");
        if place.told.send(child).is_err() {
            return Report::unchanged(gone());
        }
        let born = match place.born.await {
            Ok(Ok(born)) => born,
            Ok(Err(error)) => return Report::unchanged(error),
            Err(_) => return Report::unchanged(gone()),
        };
        let Ok(_permit) = self.order.hub.starts.acquire().await else {
            return NotLaunched::Ended(NodeError::unavailable("the node is shutting down")).report();
        };
        match born {
            Born::Live { stopped } => match self.wake_child(birth).await {
                Ok(launched) => {
                    let mut report = self.started(birth.operation, None, launched);
                    if let Some(receipt) = &mut report.receipt {
                        receipt.stopped_ms = Some(u64::try_from(stopped.as_millis()).unwrap_or(u64::MAX));
                        receipt
                            .shared
                            .extend(words(&["memory and disk up to the fork (copied when written)"]));
                    }
                    report
                }
                Err(failed) => failed.report(),
            },
            Born::FromSnapshot(snapshot) => {
                let manifest = match self.load(&snapshot).await {
                    Ok(manifest) => manifest,
                    Err(error) => return Report::unchanged(error),
                };
                match self.launch(&manifest, dormouse_wire::keeper::Session::New, Some(birth)).await {
                    Ok(launched) => {
                        let report = self.started(birth.operation, Some(&manifest), launched);
                        Report { outcome: Outcome::Done { snapshot: Some(snapshot) }, ..report }
                    }
                    Err(failed) => failed.report(),
                }
            }
        }
    }
}
