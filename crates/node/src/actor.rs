//! One task per sandbox: owns its machine, carries out actions, answers callers.
//!
//! Invariants: only this task changes the sandbox's row; what `Handle::info` shows was written down
//! before; every caller gets exactly one answer (a dropped task answers "unavailable").

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use dormouse_engine::Exit;
use dormouse_snapshot::Reason;
use dormouse_types::{Generation, RuntimeId, SnapshotId, Timestamp};
use tokio::sync::{mpsc, oneshot, watch};
use tokio::task::JoinSet;

use crate::error::NodeError;
use crate::hub::Hub;
use crate::journal::PendingOp;
use crate::lifecycle::{
    Action, Caller, Ended, Event, EventKind, IdleTier, Machine, Outcome, Phase, Reply, Request, Rest, Work,
    step,
};
use crate::model::{IdlePolicy, Receipt, SandboxInfo, SnapshotInfo, SnapshotRequest, State};
use crate::work::{self, Birth, Ending, Once, Order, Ready, Report};

/// Messages that wait for one sandbox.
const MAILBOX_MAX: usize = 128;
/// A clock that jumps is noticed within this.
const LOOK_SECONDS_MAX: u64 = 30;

/// What a caller is told.
#[derive(Debug, Clone)]
pub struct Answer {
    pub reply: Reply,
    pub info: SandboxInfo,
    pub receipt: Option<Receipt>,
    pub snapshot: Option<SnapshotInfo>,
}

enum Message {
    Ask {
        request: Request,
        asked: Asked,
        answer: oneshot::Sender<Answer>,
    },
    Idle {
        activity: u64,
        tier: IdleTier,
    },
    Patch {
        patch: Patch,
        answer: oneshot::Sender<Result<(), NodeError>>,
    },
    /// The head is to be removed: another takes its place.
    Rehead {
        from: SnapshotId,
        to: Option<SnapshotId>,
    },
    Ended {
        generation: Generation,
        what: Ended,
    },
    Finished {
        op: u64,
        report: Box<Report>,
    },
    Look,
}

/// Changes that are no transition.
pub enum Patch {
    Idle(IdlePolicy),
    Egress(dormouse_wire::keeper::EgressRules),
}

/// What the outside sees without asking the task.
#[derive(Debug, Clone)]
pub struct View {
    pub info: SandboxInfo,
    pub activity: u64,
    /// When it came to rest where it is.
    pub since: Timestamp,
}

#[derive(Clone)]
pub struct Handle {
    mailbox: mpsc::Sender<Message>,
    view: watch::Receiver<View>,
}

impl Handle {
    pub fn info(&self) -> SandboxInfo {
        self.view.borrow().info.clone()
    }

    pub fn view(&self) -> watch::Receiver<View> {
        self.view.clone()
    }

    fn gone(&self) -> NodeError {
        NodeError::no_sandbox(&self.view.borrow().info.id)
    }

    pub async fn ask(&self, request: Request) -> Result<Answer, NodeError> {
        self.send(request, Asked::default()).await
    }

    pub async fn checkpoint(&self, reason: Reason, asked: SnapshotRequest) -> Result<Answer, NodeError> {
        let asked = Asked { snapshot: Some(asked), ..Asked::default() };
        self.send(Request::Checkpoint { reason }, asked).await
    }

    /// Makes live copies. `Reply::Already`: it is paused, and none was made.
    pub async fn fork(&self, children: Once<Vec<Ready>>) -> Result<Answer, NodeError> {
        self.send(Request::Fork, Asked { children: Some(children), ..Asked::default() }).await
    }

    async fn send(&self, request: Request, asked: Asked) -> Result<Answer, NodeError> {
        let (answer, answered) = oneshot::channel();
        if self.mailbox.send(Message::Ask { request, asked, answer }).await.is_err() {
            return Err(self.gone());
        }
        let answer = answered.await.map_err(|_| self.gone())?;
        match answer.reply {
            Reply::Error(error) => Err(error),
            _ => Ok(answer),
        }
    }

    /// Dropped when the sandbox is busy: idleness is measured again.
    pub fn idle(&self, activity: u64, tier: IdleTier) {
        drop(self.mailbox.try_send(Message::Idle { activity, tier }));
    }

    pub async fn patch(&self, patch: Patch) -> Result<(), NodeError> {
        let (answer, answered) = oneshot::channel();
        if self.mailbox.send(Message::Patch { patch, answer }).await.is_err() {
            return Err(self.gone());
        }
        answered.await.map_err(|_| self.gone())?
    }

    pub async fn rehead(&self, from: SnapshotId, to: Option<SnapshotId>) {
        drop(self.mailbox.send(Message::Rehead { from, to }).await);
    }

    /// Makes it look at the clock.
    pub async fn look(&self) {
        drop(self.mailbox.send(Message::Look).await);
    }
}

struct Waiting {
    answer: oneshot::Sender<Answer>,
    asked: Asked,
}

/// What belongs to a request and is nothing to the machine.
#[derive(Clone, Default)]
struct Asked {
    snapshot: Option<SnapshotRequest>,
    children: Option<Once<Vec<Ready>>>,
}

struct Actor {
    hub: Arc<Hub>,
    info: SandboxInfo,
    machine: Machine,
    birth: Option<Birth>,
    mailbox: mpsc::Receiver<Message>,
    /// For what this task starts.
    back: mpsc::WeakSender<Message>,
    /// Keeps the mailbox open until the sandbox is gone.
    own: Option<mpsc::Sender<Message>>,
    view: watch::Sender<View>,
    callers: HashMap<Caller, Waiting>,
    next_caller: Caller,
    pending: Option<PendingOp>,
    ending: Option<Ending>,
    watches: JoinSet<()>,
    /// Row is older than the machine because a write failed.
    dirty: bool,
}

/// A sandbox that does not exist yet. `start` begins to make it.
pub struct Unborn {
    actor: Actor,
    actions: Vec<Action>,
    made: oneshot::Receiver<Answer>,
}

fn build(hub: &Arc<Hub>, info: SandboxInfo, machine: Machine, birth: Option<Birth>) -> (Actor, Handle) {
    let (own, mailbox) = mpsc::channel(MAILBOX_MAX);
    let seen = View { info: info.clone(), activity: machine.activity, since: hub.now() };
    let (view, watched) = watch::channel(seen);
    let handle = Handle { mailbox: own.clone(), view: watched };
    let actor = Actor {
        hub: Arc::clone(hub),
        info,
        machine,
        birth,
        mailbox,
        back: own.downgrade(),
        own: Some(own),
        view,
        callers: HashMap::new(),
        next_caller: 1,
        pending: None,
        ending: None,
        watches: JoinSet::new(),
        dirty: false,
    };
    (actor, handle)
}

/// `info.parent` is what it is made of; `None`: it boots.
pub fn prepare(hub: &Arc<Hub>, info: SandboxInfo, timeout_ms: i64, birth: Birth) -> (Unborn, Handle) {
    let (mut machine, actions) =
        Machine::create(1, info.generation, hub.now_ms(), timeout_ms, info.on_timeout, info.auto_resume);
    machine.head.clone_from(&info.parent);
    let (mut actor, handle) = build(hub, info, machine, Some(birth));
    let (answer, made) = oneshot::channel();
    actor.callers.insert(1, Waiting { answer, asked: Asked::default() });
    actor.next_caller = 2;
    (Unborn { actor, actions, made }, handle)
}

impl Unborn {
    /// Resolves when it runs, or was removed again.
    pub async fn start(self) -> Result<Answer, NodeError> {
        let Self { actor, actions, made } = self;
        let id = actor.info.id.clone();
        tokio::spawn(actor.run(actions));
        let answer = made.await.map_err(|_| NodeError::no_sandbox(&id))?;
        match answer.reply {
            Reply::Error(error) => Err(error),
            _ => Ok(answer),
        }
    }
}

/// At boot: goes on with what `recover` found.
pub fn adopt(
    hub: &Arc<Hub>,
    info: SandboxInfo,
    machine: Machine,
    pending: Option<PendingOp>,
    actions: Vec<Action>,
) {
    let mut info = info;
    bring_in_line(&mut info, &machine);
    let (mut actor, handle) = build(hub, info, machine, None);
    actor.pending = pending;
    hub.add(handle);
    tokio::spawn(actor.run(actions));
}

/// The told facts follow the machine.
fn bring_in_line(info: &mut SandboxInfo, machine: &Machine) {
    info.state = machine.view();
    info.generation = machine.generation;
    info.parent.clone_from(&machine.head);
    info.end_at = Timestamp::from_millisecond(machine.deadline_ms).unwrap_or(Timestamp::MAX);
}

impl Actor {
    async fn run(mut self, actions: Vec<Action>) {
        self.carry_out(actions, None).await;
        while !matches!(self.machine.phase, Phase::Gone) {
            let until = self
                .machine
                .alarm_ms()
                .map_or(u64::MAX, |at| u64::try_from(at.saturating_sub(self.hub.now_ms())).unwrap_or(0));
            let look = Duration::from_millis(until).min(Duration::from_secs(LOOK_SECONDS_MAX));
            let message = tokio::select! {
                message = self.mailbox.recv() => message.unwrap_or(Message::Look),
                () = tokio::time::sleep(look), if self.machine.alarm_ms().is_some() || self.dirty => Message::Look,
            };
            self.handle(message).await;
        }
        self.watches.abort_all();
        self.own = None;
    }

    async fn handle(&mut self, message: Message) {
        match message {
            Message::Ask { request, asked, answer } => {
                let caller = self.next_caller;
                self.next_caller += 1;
                self.callers.insert(caller, Waiting { answer, asked });
                self.step(EventKind::Ask { caller, request }, None).await;
            }
            Message::Idle { activity, tier } => self.step(EventKind::Idle { activity, tier }, None).await,
            Message::Ended { generation, what } => {
                self.step(EventKind::Ended { generation, what }, None).await
            }
            Message::Finished { op, report } => {
                if self.pending.as_ref().is_some_and(|pending| pending.op == op) {
                    let report = *report;
                    let outcome = report.outcome.clone();
                    if let Some(info) = report.info.clone() {
                        self.take_over(info);
                    }
                    if let (Some(runtime), Ok(engine)) =
                        (report.ending.clone(), self.hub.engine(self.info.engine))
                    {
                        let sandbox = self.info.id.clone();
                        self.ending = Some(Ending::begin(Arc::clone(engine), sandbox, runtime));
                    }
                    self.step(EventKind::Finished { op, outcome }, Some(report)).await;
                }
            }
            Message::Look => {
                if self.dirty {
                    self.commit(None).await;
                }
                self.step(EventKind::Tick, None).await;
            }
            Message::Patch { patch, answer } => {
                let result = self.patch(patch).await;
                drop(answer.send(result));
            }
            Message::Rehead { from, to } => {
                if self.machine.head.as_ref() == Some(&from) {
                    self.machine.head = to;
                    self.commit(None).await;
                }
            }
        }
    }

    /// What the work found, without what changed meanwhile.
    fn take_over(&mut self, found: SandboxInfo) {
        self.info.runtime = found.runtime;
        self.info.agent_version = found.agent_version;
        self.info.agent_digest = found.agent_digest;
    }

    async fn patch(&mut self, patch: Patch) -> Result<(), NodeError> {
        match patch {
            Patch::Idle(policy) => self.info.idle = policy,
            Patch::Egress(rules) => {
                if !matches!(self.machine.phase, Phase::At(Rest::Failed { .. })) {
                    let engine = self.hub.engine(self.info.engine)?;
                    let set = engine.set_egress(&self.info.id, &rules).await;
                    // A paused sandbox whose keeper is gone gets them when it is resumed.
                    if !matches!(self.machine.phase, Phase::At(Rest::Paused)) {
                        set?;
                    }
                }
                self.info.egress = rules;
            }
        }
        self.commit(None).await;
        self.show();
        Ok(())
    }

    async fn step(&mut self, kind: EventKind, report: Option<Report>) {
        let event = Event { at_ms: self.hub.now_ms(), kind };
        let before = self.machine.view();
        let (machine, actions) = step(self.machine.clone(), event);
        self.machine = machine;
        self.carry_out(actions, report).await;
        self.tell_change(&before);
    }

    async fn carry_out(&mut self, actions: Vec<Action>, report: Option<Report>) {
        let mut report = report;
        let ended = self.pending.clone().filter(|_| report.is_some());
        for action in actions {
            match action {
                Action::Begin { op, work, generation } => self.begin(op, work, generation).await,
                Action::Commit => {
                    let receipt = report.as_mut().and_then(|report| report.receipt.clone());
                    let first = self.pending.is_some();
                    self.commit(receipt.filter(|_| first)).await;
                }
                Action::CommitLater => self.commit_later(),
                Action::Reply { caller, reply } => self.reply(caller, reply, report.as_ref()),
                Action::Watch { generation } => self.watch(generation),
                Action::CleanUp => self.clean_up().await,
                Action::Retire => self.hub.forget(&self.info.id),
            }
        }
        self.show();
        if let (Some(report), Some(ended)) = (report, ended) {
            self.tell_report(&report, &ended);
        }
    }

    fn reply(&mut self, caller: Caller, reply: Reply, report: Option<&Report>) {
        let Some(waiting) = self.callers.remove(&caller) else { return };
        // Who has an answer finds the state that it speaks of.
        self.show();
        let with_result = matches!(reply, Reply::Done);
        let told = Answer {
            reply,
            info: self.info.clone(),
            receipt: report.filter(|_| with_result).and_then(|report| report.receipt.clone()),
            snapshot: report.filter(|_| with_result).and_then(|report| report.snapshot.clone()),
        };
        // A caller that hung up is no error.
        drop(waiting.answer.send(told));
    }

    fn refresh(&mut self) {
        bring_in_line(&mut self.info, &self.machine);
    }

    fn show(&mut self) {
        self.refresh();
        let (info, activity, now) = (&self.info, self.machine.activity, self.hub.now());
        self.view.send_if_modified(|view| {
            let moved = view.info.state != info.state;
            let changed = view.info != *info || view.activity != activity;
            if moved || view.activity != activity {
                view.since = now;
            }
            view.info = info.clone();
            view.activity = activity;
            changed
        });
    }

    async fn begin(&mut self, op: u64, work: Work, generation: Generation) {
        let pending = PendingOp {
            op,
            work: work.clone(),
            runtime: RuntimeId::generate(),
            snapshot: SnapshotId::generate(),
        };
        let asked = match &self.machine.phase {
            Phase::Busy(busy) => self.callers.get(&busy.caller).map(|waiting| waiting.asked.clone()),
            Phase::At(_) | Phase::Gone => None,
        };
        let Asked { snapshot: asked, children } = asked.unwrap_or_default();
        self.pending = Some(pending.clone());
        self.refresh();
        // One step and the engine knows where it stands: nothing to undo after a crash.
        let single = matches!(work, Work::Freeze | Work::Thaw | Work::Fork);
        let written = if single {
            Ok(())
        } else {
            let now = self.hub.now();
            self.hub.journal.begin(self.info.clone(), self.machine.clone(), pending.clone(), now).await
        };
        let order = Order {
            hub: Arc::clone(&self.hub),
            info: self.info.clone(),
            pending,
            generation,
            head: self.machine.head.clone(),
            carrier_broken: self.machine.carrier_broken,
            birth: self.birth.clone(),
            asked,
            children,
        };
        let Some(back) = self.back.upgrade() else { return };
        let ending = self.ending.take();
        tokio::spawn(async move {
            let ended = match ending {
                Some(ending) => ending.ended().await.map_err(NodeError::from),
                None => Ok(()),
            };
            let report = match written.map_err(NodeError::from).and(ended) {
                // A kill must work on a full disk: it gives space back.
                Err(error) if work != Work::Destroy => Report::unchanged(error),
                _ => work::run(order).await,
            };
            drop(back.send(Message::Finished { op, report: Box::new(report) }).await);
        });
    }

    async fn commit(&mut self, receipt: Option<Receipt>) {
        self.refresh();
        let ended = !matches!(self.machine.phase, Phase::Busy(_));
        let result = if self.machine.phase == Phase::Gone {
            self.hub.journal.forget(self.info.id.clone()).await
        } else {
            let (info, machine) = (self.info.clone(), self.machine.clone());
            self.hub.journal.commit(info, machine, ended, receipt).await
        };
        if ended {
            self.pending = None;
        }
        self.dirty = result.is_err();
        if let Err(error) = result {
            // The operation's row and the published snapshot still tell a restart what is true.
            tracing::error!(sandbox = %self.info.id, %error, "a state was not written down; it is tried again");
        }
    }

    fn commit_later(&mut self) {
        self.refresh();
        self.pending = None;
        let (journal, info, machine) = (self.hub.journal.clone(), self.info.clone(), self.machine.clone());
        // In the writer's queue before anything that this task sends it later.
        journal.post(move |connection| crate::journal::put_sandbox(connection, &info, &machine));
    }

    fn watch(&mut self, generation: Generation) {
        let Some(runtime) = self.info.runtime.clone() else { return };
        let Ok(engine) = self.hub.engine(self.info.engine).cloned() else { return };
        let (id, back) = (self.info.id.clone(), self.back.clone());
        // The former watch ends with its set.
        self.watches = JoinSet::new();
        self.watches.spawn(async move {
            let what = match engine.exited(&id, &runtime).await {
                Exit::Runtime { why } => Ended::Runtime { why },
                Exit::Keeper { why } => Ended::Keeper { why },
            };
            if let Some(back) = back.upgrade() {
                drop(back.send(Message::Ended { generation, what }).await);
            }
        });
    }

    /// Removes what runtimes left that are not to serve.
    async fn clean_up(&mut self) {
        let Ok(engine) = self.hub.engine(self.info.engine).cloned() else { return };
        let started = self.pending.as_ref().map(|pending| pending.runtime.clone());
        for runtime in self.info.runtime.take().into_iter().chain(started) {
            if let Err(error) = engine.stop(&self.info.id, &runtime).await {
                tracing::warn!(sandbox = %self.info.id, %error, "what an ended runtime left was not removed");
            }
        }
        // A keeper holds streams open for a resume, which a failed sandbox never gets: its clients would
        // wait for ever.
        if matches!(self.machine.phase, Phase::At(Rest::Failed { .. }))
            && let Err(error) = engine.destroy(&self.info.id, None).await
        {
            tracing::warn!(sandbox = %self.info.id, %error, "the keeper of a failed sandbox was not ended");
        }
    }

    fn tell_report(&self, report: &Report, pending: &PendingOp) {
        let (what, failed) = match &pending.work {
            Work::Create => ("created", "create_failed"),
            Work::Freeze => ("frozen", "freeze_failed"),
            Work::Thaw => ("thawed", "thaw_failed"),
            Work::Checkpoint { .. } => ("snapshot_created", "checkpoint_failed"),
            Work::Fork => ("copied", "fork_failed"),
            Work::Pause { .. } => ("paused", "pause_failed"),
            Work::Resume => ("resumed", "resume_failed"),
            Work::RollBack { .. } => ("rolled_back", "rollback_failed"),
            Work::ReplaceKeeper => ("keeper_replaced", "keeper_not_replaced"),
            Work::Destroy => ("killed", "kill_failed"),
        };
        let forked = self.birth.as_ref().is_some_and(|birth| birth.operation == "fork");
        match &report.outcome {
            Outcome::Done { snapshot } => {
                self.count(&pending.work, forked);
                if matches!(pending.work, Work::Pause { .. } | Work::ReplaceKeeper | Work::Destroy) {
                    let keep = self.machine.head.clone().filter(|_| pending.work != Work::Destroy);
                    tokio::spawn(crate::retention::prune(Arc::clone(&self.hub), self.info.id.clone(), keep));
                }
                let kind = if forked && pending.work == Work::Create { "forked" } else { what };
                let message = snapshot.as_ref().map_or_else(String::new, |id| format!("snapshot {id}"));
                self.hub.tell(Some(&self.info.id), kind, message);
            }
            Outcome::Unchanged { error } | Outcome::Lost { error, .. } => {
                self.hub.tell(Some(&self.info.id), failed, error.message.clone());
            }
        }
    }

    fn count(&self, work: &Work, forked: bool) {
        let counts = &self.hub.counts;
        let counter = match work {
            Work::Create if forked => &counts.forked,
            Work::Create => &counts.created,
            Work::Pause { .. } => &counts.paused,
            Work::Resume => &counts.resumed,
            _ => return,
        };
        counter.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
    }

    fn tell_change(&self, before: &State) {
        if let State::Failed { why } = self.machine.view()
            && !matches!(before, State::Failed { .. })
        {
            self.hub.counts.failed.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
            self.hub.tell(Some(&self.info.id), "failed", why);
        }
    }
}
