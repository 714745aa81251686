//! What is true of a sandbox after the daemon died at any point: pure, like `step`.

use dormouse_engine::RuntimeState;
use dormouse_types::SnapshotId;

use super::machine::{Action, Busy, Ended, Machine, NOBODY, Phase, Request, Rest, Work};
use super::step::Run;

/// What engine and store found.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Found {
    /// The runtime that served when the journal was last written.
    pub runtime: RuntimeState,
    pub keeper: bool,
    /// The runtime that the interrupted work was to start.
    pub started: RuntimeState,
    /// The snapshot that the interrupted work was to take, where it was published.
    pub published: Option<SnapshotId>,
}

/// The machine to go on with, and what is to be done first. `machine` is as the journal holds it.
#[must_use]
pub fn recover(mut machine: Machine, found: &Found, now_ms: i64) -> (Machine, Vec<Action>) {
    let phase = std::mem::replace(&mut machine.phase, Phase::Gone);
    let mut run = Run { machine, now_ms, actions: Vec::new() };
    match phase {
        Phase::Gone => run.machine.kill = true,
        Phase::At(rest) => run.found_at(&rest, found),
        Phase::Busy(Busy { work, from, .. }) => run.found_busy(&work, from, found),
    }
    if run.machine.kill {
        // Redone whole: to destroy is idempotent.
        run.machine.phase =
            Phase::At(Rest::Failed { why: "the daemon ended while it was killed".to_owned() });
    }
    if run.machine.phase == Phase::At(Rest::Running) || run.machine.phase == Phase::At(Rest::Frozen) {
        run.actions.push(Action::Watch { generation: run.machine.generation });
    } else if found.runtime != RuntimeState::Gone || found.started != RuntimeState::Gone {
        run.actions.push(Action::CleanUp);
    }
    run.actions.push(Action::Commit);
    run.settle();
    (run.machine, run.actions)
}

impl Run {
    fn found_at(&mut self, rest: &Rest, found: &Found) {
        if rest.is_live() {
            self.found_live(found, "it was gone when the daemon started");
        } else {
            self.machine.phase = Phase::At(rest.clone());
        }
    }

    fn found_live(&mut self, found: &Found, why: &str) {
        match Rest::of_runtime(found.runtime) {
            Some(rest) => {
                self.machine.phase = Phase::At(rest);
                if !found.keeper {
                    self.machine.ended =
                        Some(Ended::Keeper { why: "it was gone when the daemon started".to_owned() });
                }
            }
            None => self.machine.phase = Phase::At(Rest::Failed { why: why.to_owned() }),
        }
    }

    fn found_paused(&mut self) {
        self.machine.carrier_broken = true;
        self.machine.phase = Phase::At(Rest::Paused);
    }

    fn found_busy(&mut self, work: &Work, from: Option<Rest>, found: &Found) {
        let alive = found.runtime != RuntimeState::Gone;
        if found.published.is_some() {
            self.machine.head.clone_from(&found.published);
        }
        match (work, from) {
            (Work::Create | Work::Destroy, _) | (_, None) => self.machine.kill = true,
            (Work::Freeze | Work::Thaw | Work::Checkpoint { .. } | Work::Fork, _) => {
                self.found_live(found, "it was gone when the daemon started");
            }
            (Work::Pause { .. }, _) if !alive && found.published.is_some() => {
                self.machine.carrier_broken = false;
                self.machine.phase = Phase::At(Rest::Paused);
            }
            (Work::Pause { .. }, _) => {
                self.found_live(
                    found,
                    "the daemon ended while it was paused, and the snapshot is not complete",
                );
            }
            (Work::Resume, _) | (Work::RollBack { .. }, Some(Rest::Paused)) => self.found_paused(),
            (Work::RollBack { .. }, Some(Rest::Failed { why })) => {
                self.machine.phase = Phase::At(Rest::Failed { why });
            }
            // Not stopped yet, so nothing was begun that counts.
            (Work::RollBack { .. }, _) if alive => self.found_live(found, ""),
            (Work::RollBack { target }, _) => {
                self.machine.head = Some(target.clone());
                self.found_paused();
            }
            (Work::ReplaceKeeper, _) if alive => self.found_live(found, ""),
            (Work::ReplaceKeeper, _) if found.published.is_some() => {
                self.found_paused();
                self.machine.queue.push_back((NOBODY, Request::Resume { timeout_ms: None }));
            }
            (Work::ReplaceKeeper, _) => {
                self.found_live(found, "its keeper ended, and the daemon ended while it was replaced");
            }
        }
    }
}
