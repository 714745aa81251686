//! The plain data of the lifecycle: what `step` takes and gives.

use std::collections::VecDeque;

use dormouse_engine::RuntimeState;
use dormouse_snapshot::Reason;
use dormouse_types::{Generation, SnapshotId};
use serde::{Deserialize, Serialize};

use crate::error::NodeError;
use crate::model::{OnTimeout, State, Tier};

/// Requests that wait for one sandbox at the same time; more are told to come back.
pub const QUEUE_MAX: usize = 64;
/// A pause that the deadline asked for and that failed is tried again after this.
pub const RETRY_MS: i64 = 60_000;

/// Who waits for an answer.
pub type Caller = u64;
/// The caller of what the node itself asks for.
pub const NOBODY: Caller = 0;

#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Machine {
    pub phase: Phase,
    /// Of the runtime that serves, or last served.
    pub generation: Generation,
    /// The newest one that was ever drawn; every start draws the next.
    pub issued: Generation,
    /// The snapshot that the present state goes back to: while paused, the one it is paused on.
    pub head: Option<SnapshotId>,
    /// A start after the head was taken has moved bytes: the next one opens a new carrier session.
    pub carrier_broken: bool,
    /// Idleness put it to disk, nobody asked for it: whoever wants something wakes it.
    #[serde(default)]
    pub dozing: bool,
    pub last_op: u64,
    pub deadline_ms: i64,
    /// Length of the time-out that was last asked for: what a wake by traffic gets.
    pub timeout_ms: i64,
    pub on_timeout: OnTimeout,
    pub auto_resume: bool,
    /// Counts what needed the sandbox awake.
    #[serde(skip)]
    pub activity: u64,
    /// The serving runtime or its keeper ended while work ran.
    #[serde(skip)]
    pub ended: Option<Ended>,
    #[serde(skip)]
    pub kill: bool,
    #[serde(skip)]
    pub killers: Vec<Caller>,
    #[serde(skip)]
    pub queue: VecDeque<(Caller, Request)>,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum Phase {
    At(Rest),
    Busy(Busy),
    Gone,
}

/// Nothing is in progress.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum Rest {
    Running,
    Frozen,
    Paused,
    Failed { why: String },
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Busy {
    pub op: u64,
    pub work: Work,
    #[serde(skip)]
    pub caller: Caller,
    /// `None`: being created.
    pub from: Option<Rest>,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum Work {
    Create,
    Freeze,
    Thaw,
    Checkpoint {
        #[serde(with = "reason")]
        reason: Reason,
    },
    /// Live copies are made of it; it runs on.
    Fork,
    Pause {
        #[serde(with = "reason")]
        reason: Reason,
    },
    Resume,
    RollBack {
        target: SnapshotId,
    },
    ReplaceKeeper,
    Destroy,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum Request {
    Pause {
        reason: Reason,
    },
    Checkpoint {
        reason: Reason,
    },
    Fork,
    /// `None`: the last time-out's length again.
    Resume {
        timeout_ms: Option<i64>,
    },
    Connect {
        timeout_ms: i64,
    },
    RollBack {
        target: SnapshotId,
    },
    /// Something wants to talk to it. `resume`: even if it was not made with `auto_resume`.
    Wake {
        resume: bool,
    },
    Kill,
    SetTimeout {
        timeout_ms: i64,
    },
}

#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Event {
    /// Unix time, milliseconds.
    pub at_ms: i64,
    pub kind: EventKind,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum EventKind {
    Ask {
        caller: Caller,
        request: Request,
    },
    Finished {
        op: u64,
        outcome: Outcome,
    },
    Ended {
        generation: Generation,
        what: Ended,
    },
    /// Idle since `activity` was what it is here.
    Idle {
        activity: u64,
        tier: IdleTier,
    },
    /// Time has passed.
    Tick,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum Ended {
    Runtime { why: String },
    Keeper { why: String },
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum IdleTier {
    Frozen,
    Disk,
}

/// How work ended, and what is true now.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum Outcome {
    /// `snapshot`: the one that was published.
    Done { snapshot: Option<SnapshotId> },
    /// All is as before the work began.
    Unchanged { error: NodeError },
    /// No runtime is left. `snapshot`: published before it went.
    Lost { error: NodeError, snapshot: Option<SnapshotId> },
}

#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum Action {
    /// Write down the intention, then carry it out and tell [`EventKind::Finished`]. Always tells.
    Begin {
        op: u64,
        work: Work,
        generation: Generation,
    },
    /// Write down the machine. Before any reply that follows.
    Commit,
    /// The same, but nothing waits for it: the engine can be asked instead after a crash.
    CommitLater,
    Reply {
        caller: Caller,
        reply: Reply,
    },
    /// Tell [`EventKind::Ended`] when the serving runtime or its keeper ends.
    Watch {
        generation: Generation,
    },
    /// Remove what a runtime that ended by itself left.
    CleanUp,
    /// Nothing is left of the sandbox: forget it.
    Retire,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum Reply {
    /// The work that this caller asked for is done; the actor adds its receipt and snapshot.
    Done,
    /// It is paused; this snapshot is its state.
    Already {
        snapshot: SnapshotId,
    },
    /// It ran already; its deadline was extended.
    Connected,
    Ready,
    /// Paused, and not to be woken by this.
    Asleep,
    TimeoutSet,
    Error(NodeError),
}

impl Machine {
    /// A sandbox that is to be made; begins with [`Action::Begin`] of [`Work::Create`]. `generation`: of
    /// the memory that it starts from, which takes no older one.
    #[must_use]
    pub fn create(
        caller: Caller,
        generation: Generation,
        now_ms: i64,
        timeout_ms: i64,
        on_timeout: OnTimeout,
        auto_resume: bool,
    ) -> (Self, Vec<Action>) {
        let machine = Self {
            phase: Phase::Busy(Busy { op: 1, work: Work::Create, caller, from: None }),
            generation,
            issued: generation.next(),
            head: None,
            carrier_broken: false,
            dozing: false,
            last_op: 1,
            deadline_ms: now_ms.saturating_add(timeout_ms),
            timeout_ms,
            on_timeout,
            auto_resume,
            activity: 0,
            ended: None,
            kill: false,
            killers: Vec::new(),
            queue: VecDeque::new(),
        };
        let begin = Action::Begin { op: 1, work: Work::Create, generation: machine.issued };
        (machine, vec![begin])
    }

    /// What is told to the outside.
    #[must_use]
    pub fn view(&self) -> State {
        match &self.phase {
            Phase::Gone => State::Killed,
            Phase::At(rest) => rest.view(),
            Phase::Busy(busy) => match &busy.work {
                Work::Create => State::Creating,
                // Shown as where it still is: they take the sandbox nowhere but there and back.
                Work::Freeze | Work::Checkpoint { .. } | Work::Fork => State::Running,
                Work::Thaw => State::Paused { tier: Tier::Frozen },
                Work::Pause { .. } => State::Pausing,
                Work::Resume | Work::ReplaceKeeper => State::Resuming,
                Work::RollBack { .. } => State::RollingBack,
                Work::Destroy => State::Killed,
            },
        }
    }

    /// When the time is to be looked at again.
    #[must_use]
    pub fn alarm_ms(&self) -> Option<i64> {
        match &self.phase {
            Phase::At(Rest::Running | Rest::Frozen) => Some(self.deadline_ms),
            _ => None,
        }
    }

    #[must_use]
    pub fn is_at(&self, rest: &Rest) -> bool {
        matches!(&self.phase, Phase::At(at) if at == rest)
    }
}

impl Rest {
    #[must_use]
    pub fn view(&self) -> State {
        match self {
            Self::Running => State::Running,
            Self::Frozen => State::Paused { tier: Tier::Frozen },
            Self::Paused => State::Paused { tier: Tier::Disk },
            Self::Failed { why } => State::Failed { why: why.clone() },
        }
    }

    /// Has a runtime.
    #[must_use]
    pub fn is_live(&self) -> bool {
        matches!(self, Self::Running | Self::Frozen)
    }

    pub(super) fn of_runtime(state: RuntimeState) -> Option<Self> {
        match state {
            RuntimeState::Running => Some(Self::Running),
            RuntimeState::Frozen => Some(Self::Frozen),
            RuntimeState::Gone => None,
        }
    }
}

/// A snapshot's reason as its name.
mod reason {
    use dormouse_snapshot::Reason;
    use serde::{Deserialize, Deserializer, Serializer, de::Error};

    const ALL: [Reason; 6] =
        [Reason::Pause, Reason::Checkpoint, Reason::Fork, Reason::Template, Reason::Policy, Reason::Internal];

    pub fn serialize<S: Serializer>(reason: &Reason, to: S) -> Result<S::Ok, S::Error> {
        to.serialize_str(reason.as_str())
    }

    pub fn deserialize<'de, D: Deserializer<'de>>(from: D) -> Result<Reason, D::Error> {
        let name = String::deserialize(from)?;
        let found = ALL.into_iter().find(|reason| reason.as_str() == name);
        found.ok_or_else(|| D::Error::custom(format!("{name:?} is no reason of a snapshot")))
    }
}
