//! The transition function.

use dormouse_snapshot::Reason;
use dormouse_types::SnapshotId;

use super::machine::{
    Action, Busy, Caller, Ended, Event, EventKind, IdleTier, Machine, NOBODY, Outcome, Phase, QUEUE_MAX,
    RETRY_MS, Reply, Request, Rest, Work,
};
use crate::error::{ErrorCode, NodeError};
use crate::model::OnTimeout;

/// One event in, the next machine and what is to be done out. Pure.
#[must_use]
pub fn step(machine: Machine, event: Event) -> (Machine, Vec<Action>) {
    let mut run = Run { machine, now_ms: event.at_ms, actions: Vec::new() };
    match event.kind {
        EventKind::Ask { caller, request } => run.ask(caller, request),
        EventKind::Finished { op, outcome } => run.finished(op, outcome),
        EventKind::Ended { generation, what } => {
            if generation == run.machine.generation {
                run.machine.ended.get_or_insert(what);
            }
        }
        EventKind::Idle { activity, tier } => run.idle(activity, tier),
        EventKind::Tick => {}
    }
    run.settle();
    (run.machine, run.actions)
}

pub(super) struct Run {
    pub machine: Machine,
    pub now_ms: i64,
    pub actions: Vec<Action>,
}

impl Run {
    fn reply(&mut self, caller: Caller, reply: Reply) {
        if caller != NOBODY {
            self.actions.push(Action::Reply { caller, reply });
        }
    }

    fn refuse(&mut self, caller: Caller, error: NodeError) {
        self.reply(caller, Reply::Error(error));
    }

    fn rest(&mut self, at: Rest) {
        self.machine.phase = Phase::At(at);
        self.actions.push(Action::Commit);
    }

    /// Where a crash loses nothing by an older row: the engine knows whether it is frozen.
    fn rest_later(&mut self, at: Rest) {
        self.machine.phase = Phase::At(at);
        self.actions.push(Action::CommitLater);
    }

    fn begin(&mut self, work: Work, caller: Caller) {
        let from = match &self.machine.phase {
            Phase::At(rest) => Some(rest.clone()),
            Phase::Busy(_) | Phase::Gone => None,
        };
        if matches!(work, Work::Create | Work::Resume | Work::RollBack { .. } | Work::ReplaceKeeper) {
            self.machine.issued = self.machine.issued.next();
        }
        self.machine.last_op += 1;
        let op = self.machine.last_op;
        self.machine.phase = Phase::Busy(Busy { op, work: work.clone(), caller, from });
        self.actions.push(Action::Begin { op, work, generation: self.machine.issued });
    }

    fn extend(&mut self, timeout_ms: i64) {
        let until = self.now_ms.saturating_add(timeout_ms);
        if until > self.machine.deadline_ms {
            self.machine.deadline_ms = until;
            self.machine.timeout_ms = timeout_ms;
        }
    }

    fn ask(&mut self, caller: Caller, request: Request) {
        if self.machine.phase == Phase::Gone {
            return self.refuse(caller, killed());
        }
        if request == Request::Kill {
            if self.machine.killers.len() >= QUEUE_MAX {
                return self.refuse(caller, busy());
            }
            self.machine.kill = true;
            self.machine.killers.push(caller);
            return;
        }
        if self.machine.kill {
            return self.refuse(caller, killed());
        }
        match request {
            Request::SetTimeout { timeout_ms } => return self.set_timeout(caller, timeout_ms),
            // Not later: the deadline must not strike while it waits for its turn.
            Request::Connect { timeout_ms } if self.holds_runtime() => self.extend(timeout_ms),
            Request::Wake { .. } => self.machine.activity += 1,
            _ => {}
        }
        if self.machine.queue.len() >= QUEUE_MAX {
            return self.refuse(caller, busy());
        }
        self.machine.queue.push_back((caller, request));
    }

    /// A runtime exists and is meant to go on existing.
    fn holds_runtime(&self) -> bool {
        match &self.machine.phase {
            Phase::At(rest) => rest.is_live(),
            Phase::Busy(busy) => matches!(
                busy.work,
                Work::Create
                    | Work::Freeze
                    | Work::Thaw
                    | Work::Checkpoint { .. }
                    | Work::Fork
                    | Work::Resume
                    | Work::ReplaceKeeper
            ),
            Phase::Gone => false,
        }
    }

    fn set_timeout(&mut self, caller: Caller, timeout_ms: i64) {
        match &self.machine.phase {
            Phase::At(Rest::Paused) => self.refuse(
                caller,
                NodeError::conflict("the sandbox is paused and has no deadline; resume it with a time-out"),
            ),
            Phase::At(Rest::Failed { why }) => {
                let error = failed(why, self.machine.head.as_ref());
                self.refuse(caller, error);
            }
            _ => {
                self.machine.deadline_ms = self.now_ms.saturating_add(timeout_ms);
                // "Now" is a wish for an end, not a length for the next time.
                if timeout_ms > 0 {
                    self.machine.timeout_ms = timeout_ms;
                }
                self.actions.push(Action::Commit);
                self.reply(caller, Reply::TimeoutSet);
            }
        }
    }

    fn idle(&mut self, activity: u64, tier: IdleTier) {
        if activity != self.machine.activity || !self.machine.queue.is_empty() {
            return;
        }
        match (&self.machine.phase, tier) {
            (Phase::At(Rest::Running), IdleTier::Frozen) => self.begin(Work::Freeze, NOBODY),
            (Phase::At(Rest::Running | Rest::Frozen), IdleTier::Disk) => {
                self.machine.queue.push_back((NOBODY, Request::Pause { reason: Reason::Policy }));
            }
            _ => {}
        }
    }

    /// Goes on until work runs or nothing is left to do.
    pub(super) fn settle(&mut self) {
        while let Phase::At(rest) = &self.machine.phase {
            let rest = rest.clone();
            if self.machine.kill {
                return self.begin(Work::Destroy, NOBODY);
            }
            if let Some(ended) = self.machine.ended.take() {
                if rest.is_live() {
                    self.runtime_ended(ended);
                }
                continue;
            }
            if rest.is_live() && self.machine.deadline_ms <= self.now_ms {
                self.deadline(&rest);
                continue;
            }
            let Some((caller, request)) = self.machine.queue.pop_front() else { return };
            match rest {
                Rest::Running => self.running(caller, request),
                Rest::Frozen => self.frozen(caller, request),
                Rest::Paused => self.paused(caller, request),
                Rest::Failed { why } => self.failed(caller, request, &why),
            }
        }
    }

    fn runtime_ended(&mut self, ended: Ended) {
        match ended {
            Ended::Runtime { why } => {
                self.actions.push(Action::CleanUp);
                self.rest(Rest::Failed { why });
            }
            Ended::Keeper { .. } => self.begin(Work::ReplaceKeeper, NOBODY),
        }
    }

    fn deadline(&mut self, rest: &Rest) {
        match (self.machine.on_timeout, rest) {
            (OnTimeout::Kill, _) => self.machine.kill = true,
            (OnTimeout::Pause, Rest::Frozen) => self.begin(Work::Thaw, NOBODY),
            (OnTimeout::Pause, _) => self.begin(Work::Pause { reason: Reason::Policy }, NOBODY),
        }
    }

    fn running(&mut self, caller: Caller, request: Request) {
        match request {
            Request::Pause { reason } => self.begin(Work::Pause { reason }, caller),
            Request::Checkpoint { reason } => self.begin(Work::Checkpoint { reason }, caller),
            Request::Fork => self.begin(Work::Fork, caller),
            Request::RollBack { target } => self.begin(Work::RollBack { target }, caller),
            Request::Resume { .. } => {
                self.refuse(caller, NodeError::conflict("the sandbox is already running"))
            }
            Request::Connect { timeout_ms } => self.connected(caller, timeout_ms),
            Request::Wake { .. } => self.reply(caller, Reply::Ready),
            Request::Kill | Request::SetTimeout { .. } => {}
        }
    }

    fn connected(&mut self, caller: Caller, timeout_ms: i64) {
        self.extend(timeout_ms);
        self.actions.push(Action::Commit);
        self.reply(caller, Reply::Connected);
    }

    fn frozen(&mut self, caller: Caller, request: Request) {
        match request {
            Request::RollBack { target } => self.begin(Work::RollBack { target }, caller),
            Request::Resume { .. } => self.begin(Work::Thaw, caller),
            Request::Connect { timeout_ms } => self.connected(caller, timeout_ms),
            Request::Pause { .. } | Request::Checkpoint { .. } | Request::Fork | Request::Wake { .. } => {
                self.machine.queue.push_front((caller, request));
                self.begin(Work::Thaw, NOBODY);
            }
            Request::Kill | Request::SetTimeout { .. } => {}
        }
    }

    fn paused(&mut self, caller: Caller, request: Request) {
        match request {
            Request::Pause { .. } => {
                self.refuse(caller, NodeError::conflict("the sandbox is already paused"))
            }
            Request::Checkpoint { .. } | Request::Fork => match self.machine.head.clone() {
                Some(snapshot) => self.reply(caller, Reply::Already { snapshot }),
                None => self.refuse(caller, NodeError::internal("a paused sandbox has no snapshot")),
            },
            Request::Resume { timeout_ms } => self.resume(caller, timeout_ms),
            Request::Connect { timeout_ms } => self.resume(caller, Some(timeout_ms)),
            Request::RollBack { target } => {
                self.machine.deadline_ms = self.now_ms.saturating_add(self.machine.timeout_ms);
                self.begin(Work::RollBack { target }, caller);
            }
            Request::Wake { resume } if resume || self.machine.auto_resume || self.machine.dozing => {
                self.machine.queue.push_front((caller, request));
                self.resume(NOBODY, None);
            }
            Request::Wake { .. } => self.reply(caller, Reply::Asleep),
            Request::Kill | Request::SetTimeout { .. } => {}
        }
    }

    fn resume(&mut self, caller: Caller, timeout_ms: Option<i64>) {
        self.machine.timeout_ms = timeout_ms.unwrap_or(self.machine.timeout_ms);
        self.machine.deadline_ms = self.now_ms.saturating_add(self.machine.timeout_ms);
        self.begin(Work::Resume, caller);
    }

    fn failed(&mut self, caller: Caller, request: Request, why: &str) {
        if let Request::RollBack { target } = request {
            self.machine.deadline_ms = self.now_ms.saturating_add(self.machine.timeout_ms);
            return self.begin(Work::RollBack { target }, caller);
        }
        let error = failed(why, self.machine.head.as_ref());
        self.refuse(caller, error);
    }

    fn finished(&mut self, op: u64, outcome: Outcome) {
        let Phase::Busy(busy) = &self.machine.phase else { return };
        if busy.op != op {
            return;
        }
        let Busy { work, caller, from, .. } = busy.clone();
        match outcome {
            Outcome::Done { snapshot } => self.done(&work, caller, snapshot),
            Outcome::Unchanged { error } => self.unchanged(&work, caller, from, error),
            Outcome::Lost { error, snapshot } => self.lost(&work, caller, from, error, snapshot),
        }
    }

    fn done(&mut self, work: &Work, caller: Caller, snapshot: Option<SnapshotId>) {
        if snapshot.is_some() {
            self.machine.head = snapshot;
        }
        match work {
            Work::Create | Work::Resume | Work::ReplaceKeeper => self.started(),
            Work::RollBack { target } => {
                self.machine.head = Some(target.clone());
                self.started();
            }
            Work::Freeze => self.rest_later(Rest::Frozen),
            Work::Thaw | Work::Fork => self.rest_later(Rest::Running),
            Work::Checkpoint { .. } => self.rest(Rest::Running),
            Work::Pause { .. } => {
                self.machine.ended = None;
                self.machine.carrier_broken = false;
                let unasked = caller == NOBODY && self.machine.deadline_ms > self.now_ms;
                self.machine.dozing = unasked;
                self.rest(Rest::Paused);
            }
            Work::Destroy => return self.gone(),
        }
        self.reply(caller, Reply::Done);
    }

    fn started(&mut self) {
        self.machine.generation = self.machine.issued;
        self.machine.carrier_broken = false;
        self.machine.dozing = false;
        self.machine.ended = None;
        self.rest(Rest::Running);
        self.actions.push(Action::Watch { generation: self.machine.generation });
    }

    fn unchanged(&mut self, work: &Work, caller: Caller, from: Option<Rest>, error: NodeError) {
        match (work, from) {
            (Work::Create, _) | (_, None) => return self.not_created(caller, error),
            (Work::Destroy, _) => return self.not_destroyed(&error),
            (Work::ReplaceKeeper, _) => {
                self.actions.push(Action::CleanUp);
                self.machine.ended = None;
                self.rest(Rest::Failed { why: format!("its keeper ended and cannot be replaced: {error}") });
            }
            (_, Some(from)) => self.rest(from),
        }
        self.after_failure(work, caller, error);
    }

    fn lost(
        &mut self,
        work: &Work,
        caller: Caller,
        from: Option<Rest>,
        error: NodeError,
        snapshot: Option<SnapshotId>,
    ) {
        let published = snapshot.is_some();
        if published {
            self.machine.head = snapshot;
        }
        self.machine.ended = None;
        match (work, from) {
            (Work::Create, _) | (_, None) => return self.not_created(caller, error),
            (Work::Destroy, _) => return self.not_destroyed(&error),
            (Work::Resume, _) | (Work::RollBack { .. }, Some(Rest::Paused)) => {
                self.machine.carrier_broken = true;
                self.rest(Rest::Paused);
            }
            (Work::RollBack { .. }, Some(Rest::Failed { why })) => self.rest(Rest::Failed { why }),
            (Work::RollBack { target }, _) => {
                self.machine.head = Some(target.clone());
                self.machine.carrier_broken = true;
                self.rest(Rest::Paused);
            }
            (Work::ReplaceKeeper | Work::Pause { .. }, _) if published => {
                self.machine.carrier_broken = true;
                self.rest(Rest::Paused);
            }
            _ => {
                self.actions.push(Action::CleanUp);
                self.rest(Rest::Failed { why: error.message.clone() });
            }
        }
        self.after_failure(work, caller, error);
    }

    /// Tells the caller, and whoever waits for the very thing that just failed: it is not tried again
    /// without end on their behalf.
    fn after_failure(&mut self, work: &Work, caller: Caller, error: NodeError) {
        if matches!(work, Work::Resume | Work::Thaw | Work::ReplaceKeeper) {
            for (waiting, request) in std::mem::take(&mut self.machine.queue) {
                match (work, request) {
                    (Work::Thaw, _) | (_, Request::Wake { .. }) => self.refuse(waiting, error.clone()),
                    (_, request) => self.machine.queue.push_back((waiting, request)),
                }
            }
        }
        let overdue = self.machine.deadline_ms <= self.now_ms;
        if overdue && self.machine.on_timeout == OnTimeout::Pause {
            self.machine.deadline_ms = self.now_ms.saturating_add(RETRY_MS);
        }
        self.refuse(caller, error);
    }

    fn not_created(&mut self, caller: Caller, error: NodeError) {
        for (waiting, _) in std::mem::take(&mut self.machine.queue) {
            self.refuse(waiting, error.clone());
        }
        self.machine.kill = true;
        // Never shown: `settle` begins the removal in this same step.
        self.machine.phase = Phase::At(Rest::Failed { why: error.message.clone() });
        self.refuse(caller, error);
    }

    fn not_destroyed(&mut self, error: &NodeError) {
        self.machine.kill = false;
        self.rest(Rest::Failed { why: format!("the kill did not end: {error}; kill it again") });
        for killer in std::mem::take(&mut self.machine.killers) {
            self.refuse(killer, error.clone());
        }
    }

    fn gone(&mut self) {
        self.machine.phase = Phase::Gone;
        self.actions.push(Action::Commit);
        for killer in std::mem::take(&mut self.machine.killers) {
            self.reply(killer, Reply::Done);
        }
        for (waiting, _) in std::mem::take(&mut self.machine.queue) {
            self.refuse(waiting, killed());
        }
        self.actions.push(Action::Retire);
    }
}

fn killed() -> NodeError {
    NodeError::not_found("the sandbox was not found: it was killed")
}

fn busy() -> NodeError {
    NodeError::unavailable(format!("{QUEUE_MAX} requests already wait for this sandbox; try again"))
}

fn failed(why: &str, head: Option<&SnapshotId>) -> NodeError {
    let offer = head.map_or_else(
        || "it has no snapshot to go back to; kill it".to_owned(),
        |head| format!("its last snapshot is {head}: roll back to it to go on from there"),
    );
    NodeError::new(ErrorCode::Failed, format!("the sandbox failed: {why}; {offer}"))
}
