//! Properties of `step` and `recover` over random histories in a small model of the world (which
//! runtimes live, which snapshots exist), and the named cases behind them.

use std::collections::{BTreeMap, BTreeSet};

use dormouse_engine::RuntimeState;
use dormouse_snapshot::Reason;
use dormouse_types::{Generation, SnapshotId};
use proptest::prelude::*;

use super::*;
use crate::error::{ErrorCode, NodeError};
use crate::model::{OnTimeout, State, Tier};

fn snapshot(number: u64) -> SnapshotId {
    format!("snap{number}").parse().unwrap()
}

fn error() -> NodeError {
    NodeError::internal("it did not work")
}

/// The host as it really is, beside what the machine believes.
struct World {
    machine: Machine,
    now_ms: i64,
    /// Generation of the runtime that lives, and whether it is frozen.
    runtime: Option<(Generation, bool)>,
    published: BTreeSet<SnapshotId>,
    drawn: u64,
    /// Work that runs, with the generation it starts.
    work: Option<(u64, Work, Generation)>,
    watched: Option<Generation>,
    next_caller: Caller,
    waiting: BTreeSet<Caller>,
    /// Snapshots that a caller was told of.
    acknowledged: BTreeSet<SnapshotId>,
    requests: BTreeMap<Caller, Request>,
    retired: bool,
}

impl World {
    fn new(on_timeout: OnTimeout, auto_resume: bool) -> Self {
        let (machine, actions) = Machine::create(1, Generation(0), 0, 1000, on_timeout, auto_resume);
        let mut world = Self {
            machine,
            now_ms: 0,
            runtime: None,
            published: BTreeSet::new(),
            drawn: 0,
            work: None,
            watched: None,
            next_caller: 2,
            waiting: [1].into(),
            acknowledged: BTreeSet::new(),
            requests: BTreeMap::new(),
            retired: false,
        };
        world.carry_out(actions);
        world
    }

    fn running(on_timeout: OnTimeout) -> Self {
        let mut world = Self::new(on_timeout, false);
        world.finish(0);
        assert_eq!(world.machine.view(), State::Running);
        world
    }

    fn event(&mut self, kind: EventKind) -> Vec<Action> {
        let (machine, actions) = step(self.machine.clone(), Event { at_ms: self.now_ms, kind });
        self.machine = machine;
        self.carry_out(actions.clone());
        self.check();
        actions
    }

    fn carry_out(&mut self, actions: Vec<Action>) {
        for action in actions {
            match action {
                Action::Begin { op, work, generation } => {
                    assert!(self.work.is_none(), "two pieces of work at once");
                    self.work = Some((op, work, generation));
                }
                Action::Reply { caller, reply } => {
                    assert!(
                        self.waiting.remove(&caller),
                        "caller {caller} was answered twice or never asked"
                    );
                    self.check_reply(caller, &reply);
                }
                Action::Watch { generation } => self.watched = Some(generation),
                Action::CleanUp => self.runtime = None,
                Action::Retire => self.retired = true,
                Action::Commit | Action::CommitLater => {}
            }
        }
    }

    fn check_reply(&mut self, caller: Caller, reply: &Reply) {
        match (self.requests.get(&caller), reply) {
            (Some(Request::Pause { .. } | Request::Checkpoint { .. }), Reply::Done) => {
                let head = self.machine.head.clone().unwrap();
                self.acknowledged.insert(head);
            }
            (Some(Request::Wake { .. }), Reply::Ready) => {
                assert!(self.runtime.is_some_and(|(_, frozen)| !frozen), "ready, but nothing runs");
            }
            (Some(Request::Kill), Reply::Done) => assert!(self.runtime.is_none(), "killed, but it lives"),
            _ => {}
        }
    }

    fn ask(&mut self, request: Request) -> (Caller, Vec<Action>) {
        let caller = self.next_caller;
        self.next_caller += 1;
        self.waiting.insert(caller);
        self.requests.insert(caller, request.clone());
        (caller, self.event(EventKind::Ask { caller, request }))
    }

    /// Ends the work that runs; `choice` picks one of the outcomes that can be.
    fn finish(&mut self, choice: u8) -> Vec<Action> {
        let Some((op, work, generation)) = self.work.take() else { return Vec::new() };
        let publishes = matches!(work, Work::Checkpoint { .. } | Work::Pause { .. } | Work::ReplaceKeeper);
        let outcome = match choice % 4 {
            // The runtime died under the work.
            2 if self.runtime.is_some() && !matches!(work, Work::Destroy) => {
                self.runtime = None;
                Outcome::Lost { error: error(), snapshot: None }
            }
            3 => match work {
                Work::ReplaceKeeper if self.runtime.is_some() => {
                    self.runtime = None;
                    Outcome::Lost { error: error(), snapshot: Some(self.publish()) }
                }
                Work::Resume => Outcome::Lost { error: error(), snapshot: None },
                Work::RollBack { .. } => {
                    self.runtime = None;
                    Outcome::Lost { error: error(), snapshot: None }
                }
                _ => Outcome::Unchanged { error: error() },
            },
            1 => Outcome::Unchanged { error: error() },
            _ if publishes && self.runtime.is_none() => Outcome::Lost { error: error(), snapshot: None },
            _ => {
                let snapshot = publishes.then(|| self.publish());
                self.apply(&work, generation);
                Outcome::Done { snapshot }
            }
        };
        self.event(EventKind::Finished { op, outcome })
    }

    fn publish(&mut self) -> SnapshotId {
        self.drawn += 1;
        let id = snapshot(self.drawn);
        self.published.insert(id.clone());
        id
    }

    fn apply(&mut self, work: &Work, generation: Generation) {
        self.runtime = match work {
            Work::Create | Work::Resume | Work::RollBack { .. } | Work::ReplaceKeeper => {
                Some((generation, false))
            }
            Work::Freeze => self.runtime.map(|(generation, _)| (generation, true)),
            Work::Thaw => self.runtime.map(|(generation, _)| (generation, false)),
            Work::Checkpoint { .. } | Work::Fork => self.runtime,
            Work::Pause { .. } | Work::Destroy => None,
        };
    }

    /// No state is a lie. (An end that was not told yet is none of the machine's doing.)
    fn check(&self) {
        let Phase::At(rest) = &self.machine.phase else { return };
        match rest {
            Rest::Running => {
                if let Some((generation, frozen)) = self.runtime {
                    assert_eq!(generation, self.machine.generation, "an older runtime serves");
                    assert!(!frozen, "it is said to run and is frozen");
                }
                assert_eq!(self.watched, Some(self.machine.generation), "nobody watches what runs");
            }
            Rest::Frozen => {
                if let Some((_, frozen)) = self.runtime {
                    assert!(frozen, "it is said to be frozen and runs");
                }
            }
            Rest::Paused => {
                assert!(self.runtime.is_none(), "paused, and a runtime lives");
                let head = self.machine.head.as_ref().expect("paused on nothing");
                assert!(self.published.contains(head), "paused on a snapshot that does not exist");
            }
            Rest::Failed { .. } => {}
        }
        assert!(self.machine.queue.is_empty(), "somebody waits while nothing is done");
        assert!(!self.machine.kill, "a kill waits while nothing is done");
    }

    /// kill -9 of the daemon, and its restart.
    fn crash(&mut self, work_went_on: bool) {
        let started = self.work.clone().filter(|_| work_went_on);
        let mut found =
            Found { runtime: RuntimeState::Gone, keeper: true, started: RuntimeState::Gone, published: None };
        if let Some((_, work, generation)) = started {
            match work {
                // Held until it is published: both can be seen.
                Work::Pause { .. } | Work::Checkpoint { .. } if self.runtime.is_some() => {
                    found.published = Some(self.publish());
                    self.apply(&work, generation);
                }
                Work::Create | Work::Resume | Work::RollBack { .. } => {
                    self.runtime = None;
                    found.started = RuntimeState::Running;
                }
                Work::ReplaceKeeper if self.runtime.is_some() => {
                    found.published = Some(self.publish());
                    self.runtime = None;
                }
                Work::Freeze | Work::Thaw | Work::Fork | Work::Destroy => self.apply(&work, generation),
                _ => {}
            }
        }
        found.runtime = match self.runtime {
            None => RuntimeState::Gone,
            Some((_, true)) => RuntimeState::Frozen,
            Some((_, false)) => RuntimeState::Running,
        };
        self.work = None;
        self.watched = None;
        // Their connections ended with the daemon.
        self.waiting.clear();
        let journaled = serde_json::to_string(&self.machine).unwrap();
        let machine: Machine = serde_json::from_str(&journaled).unwrap();
        let (machine, actions) = recover(machine, &found, self.now_ms);
        self.machine = machine;
        self.carry_out(actions);
        self.check();
    }

    /// With every work done, everybody has an answer.
    fn drain(&mut self) {
        for _ in 0..4 * QUEUE_MAX {
            if self.work.is_none() {
                break;
            }
            self.finish(0);
        }
        assert!(self.work.is_none(), "the work never ends");
        assert!(
            self.waiting.is_empty(),
            "callers {:?} wait for ever in {:?}",
            self.waiting,
            self.machine.phase
        );
    }
}

#[derive(Debug, Clone)]
enum Happens {
    Asks(u8),
    Finishes(u8),
    RuntimeEnds,
    KeeperEnds,
    LateOutcome,
    LateEnd,
    Idles(bool),
    TimePasses(u16),
    Crashes(bool),
}

fn happens() -> impl Strategy<Value = Happens> {
    prop_oneof![
        6 => any::<u8>().prop_map(Happens::Asks),
        8 => any::<u8>().prop_map(Happens::Finishes),
        1 => Just(Happens::RuntimeEnds),
        1 => Just(Happens::KeeperEnds),
        1 => Just(Happens::LateOutcome),
        1 => Just(Happens::LateEnd),
        1 => any::<bool>().prop_map(Happens::Idles),
        2 => (0_u16..2000).prop_map(Happens::TimePasses),
        1 => any::<bool>().prop_map(Happens::Crashes),
    ]
}

fn request(choice: u8, head: Option<&SnapshotId>) -> Request {
    match choice % 12 {
        0 | 1 => Request::Pause { reason: Reason::Pause },
        2 => Request::Checkpoint { reason: Reason::Fork },
        3 | 4 => Request::Resume { timeout_ms: Some(1000) },
        5 => Request::Connect { timeout_ms: 1500 },
        6 => Request::Wake { resume: choice > 127 },
        7 => Request::SetTimeout { timeout_ms: 800 },
        8 => head
            .map_or(Request::Wake { resume: false }, |target| Request::RollBack { target: target.clone() }),
        9 => Request::Wake { resume: true },
        10 => Request::Fork,
        _ => Request::Kill,
    }
}

fn happen(world: &mut World, what: &Happens) {
    match what {
        Happens::Asks(choice) => {
            let head = world.published.first().cloned();
            drop(world.ask(request(*choice, head.as_ref())));
        }
        Happens::Finishes(choice) => drop(world.finish(*choice)),
        Happens::RuntimeEnds => {
            if let Some((generation, _)) = world.runtime.take() {
                let what = Ended::Runtime { why: "out of memory".to_owned() };
                drop(world.event(EventKind::Ended { generation, what }));
            }
        }
        Happens::KeeperEnds => {
            if let Some((generation, _)) = world.runtime {
                let what = Ended::Keeper { why: "killed".to_owned() };
                drop(world.event(EventKind::Ended { generation, what }));
            }
        }
        Happens::LateOutcome => {
            let op = world.machine.last_op.saturating_sub(1);
            let before = world.machine.phase.clone();
            let outcome = Outcome::Done { snapshot: Some(snapshot(9999)) };
            drop(world.event(EventKind::Finished { op, outcome }));
            assert!(world.machine.head != Some(snapshot(9999)), "a late outcome counted in {before:?}");
        }
        Happens::LateEnd => {
            let generation = Generation(world.machine.generation.0.wrapping_sub(1));
            let what = Ended::Runtime { why: "late".to_owned() };
            let before = world.machine.view();
            drop(world.event(EventKind::Ended { generation, what }));
            assert!(
                !matches!(world.machine.view(), State::Failed { .. })
                    || matches!(before, State::Failed { .. }),
                "the end of an older runtime counted"
            );
        }
        Happens::Idles(disk) => {
            let tier = if *disk { IdleTier::Disk } else { IdleTier::Frozen };
            drop(world.event(EventKind::Idle { activity: world.machine.activity, tier }));
        }
        Happens::TimePasses(ms) => {
            world.now_ms += i64::from(*ms);
            drop(world.event(EventKind::Tick));
        }
        Happens::Crashes(went_on) => world.crash(*went_on),
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 2000, ..ProptestConfig::default() })]

    #[test]
    fn no_history_makes_a_state_lie_or_a_caller_wait_for_ever(
        on_timeout in prop_oneof![Just(OnTimeout::Kill), Just(OnTimeout::Pause)],
        auto_resume in any::<bool>(),
        history in proptest::collection::vec(happens(), 1..60),
    ) {
        let mut world = World::new(on_timeout, auto_resume);
        for what in &history {
            if world.retired {
                break;
            }
            happen(&mut world, what);
            prop_assert!(world.acknowledged.is_subset(&world.published));
        }
        world.drain();
        prop_assert_eq!(world.retired, world.machine.phase == Phase::Gone);
    }

    /// An acknowledged pause is what a resume goes on from, whatever fails and dies in between.
    #[test]
    fn an_acknowledged_pause_is_never_lost(history in proptest::collection::vec(happens(), 0..30)) {
        let mut world = World::running(OnTimeout::Pause);
        drop(world.ask(Request::Pause { reason: Reason::Pause }));
        world.finish(0);
        let paused_on = world.machine.head.clone().unwrap();
        for what in history {
            let harmless = match &what {
                Happens::Asks(choice) => matches!(choice % 12, 0..=2 | 7 | 10),
                Happens::Finishes(_) | Happens::Crashes(_) | Happens::TimePasses(_) | Happens::LateOutcome => true,
                _ => false,
            };
            if harmless {
                happen(&mut world, &what);
                prop_assert_eq!(world.machine.head.as_ref(), Some(&paused_on));
                prop_assert!(world.machine.is_at(&Rest::Paused));
            }
        }
    }
}

/// What `caller` is told in these actions.
fn told(actions: &[Action], caller: Caller) -> Option<Reply> {
    actions.iter().find_map(|action| match action {
        Action::Reply { caller: to, reply } if *to == caller => Some(reply.clone()),
        _ => None,
    })
}

fn code(reply: Option<Reply>) -> Option<ErrorCode> {
    match reply {
        Some(Reply::Error(error)) => Some(error.code),
        _ => None,
    }
}

#[test]
fn s24_of_two_pauses_the_second_is_told_that_it_is_paused() {
    let mut world = World::running(OnTimeout::Kill);
    let (first, _) = world.ask(Request::Pause { reason: Reason::Pause });
    let (second, at_once) = world.ask(Request::Pause { reason: Reason::Pause });
    assert_eq!(told(&at_once, second), None, "not known yet");
    let actions = world.finish(0);
    assert_eq!(told(&actions, first), Some(Reply::Done));
    assert_eq!(code(told(&actions, second)), Some(ErrorCode::Conflict));
}

#[test]
fn s24_pause_then_at_once_resume_ends_running() {
    let mut world = World::running(OnTimeout::Kill);
    let (pause, _) = world.ask(Request::Pause { reason: Reason::Pause });
    let (resume, _) = world.ask(Request::Resume { timeout_ms: None });
    assert_eq!(told(&world.finish(0), pause), Some(Reply::Done));
    assert_eq!(told(&world.finish(0), resume), Some(Reply::Done));
    assert_eq!(world.machine.view(), State::Running);
    assert_eq!(world.machine.generation, Generation(2));
}

#[test]
fn s24_a_kill_goes_before_all_that_waits() {
    let mut world = World::running(OnTimeout::Kill);
    let (pause, _) = world.ask(Request::Pause { reason: Reason::Pause });
    let (resume, _) = world.ask(Request::Resume { timeout_ms: None });
    let (kill, _) = world.ask(Request::Kill);
    let (again, _) = world.ask(Request::Kill);
    let (late, at_once) = world.ask(Request::Wake { resume: true });
    assert_eq!(code(told(&at_once, late)), Some(ErrorCode::NotFound));
    assert_eq!(told(&world.finish(0), pause), Some(Reply::Done), "it was paused, truly");
    assert_eq!(world.machine.view(), State::Killed);
    let actions = world.finish(0);
    assert_eq!((told(&actions, kill), told(&actions, again)), (Some(Reply::Done), Some(Reply::Done)));
    assert_eq!(code(told(&actions, resume)), Some(ErrorCode::NotFound));
    assert!(world.retired);
}

#[test]
fn s24_a_fork_during_a_pause_gets_the_pauses_snapshot() {
    let mut world = World::running(OnTimeout::Kill);
    world.ask(Request::Pause { reason: Reason::Pause });
    let (fork, _) = world.ask(Request::Checkpoint { reason: Reason::Fork });
    let actions = world.finish(0);
    assert_eq!(told(&actions, fork), Some(Reply::Already { snapshot: snapshot(1) }));
}

#[test]
fn s25_a_failed_pause_leaves_it_running_and_says_why() {
    let mut world = World::running(OnTimeout::Kill);
    let (pause, _) = world.ask(Request::Pause { reason: Reason::Pause });
    let actions = world.finish(1);
    assert_eq!(told(&actions, pause), Some(Reply::Error(error())));
    assert_eq!(world.machine.view(), State::Running);
}

#[test]
fn s06_a_failed_resume_leaves_it_paused_and_starts_nothing_else() {
    let mut world = World::running(OnTimeout::Kill);
    world.ask(Request::Pause { reason: Reason::Pause });
    world.finish(0);
    let (resume, _) = world.ask(Request::Resume { timeout_ms: None });
    let actions = world.finish(3);
    assert_eq!(told(&actions, resume), Some(Reply::Error(error())));
    assert_eq!(world.machine.view(), State::Paused { tier: Tier::Disk });
    assert!(world.machine.carrier_broken, "what it had begun to say is not continued");
    assert!(world.work.is_none());
}

#[test]
fn a_wake_is_not_retried_for_ever() {
    let mut world = World::running(OnTimeout::Kill);
    world.ask(Request::Pause { reason: Reason::Pause });
    world.finish(0);
    let (wake, _) = world.ask(Request::Wake { resume: true });
    let actions = world.finish(1);
    assert_eq!(told(&actions, wake), Some(Reply::Error(error())));
    assert!(world.work.is_none());
}

#[test]
fn s20_a_stream_waits_for_a_checkpoint_and_is_served() {
    let mut world = World::running(OnTimeout::Kill);
    world.ask(Request::Checkpoint { reason: Reason::Checkpoint });
    let (wake, at_once) = world.ask(Request::Wake { resume: false });
    assert_eq!(told(&at_once, wake), None);
    assert_eq!(told(&world.finish(0), wake), Some(Reply::Ready));
}

#[test]
fn s02_the_deadline_pauses_as_a_person_does() {
    let mut world = World::running(OnTimeout::Pause);
    world.now_ms = 1000;
    world.event(EventKind::Tick);
    assert!(matches!(world.work, Some((_, Work::Pause { .. }, _))));
    world.finish(1);
    assert_eq!(world.machine.view(), State::Running, "a failure is tried again later, not at once");
    world.now_ms += RETRY_MS;
    world.event(EventKind::Tick);
    world.finish(0);
    assert_eq!(world.machine.view(), State::Paused { tier: Tier::Disk });
}

#[test]
fn a_connect_during_a_checkpoint_beats_the_deadline() {
    let mut world = World::running(OnTimeout::Kill);
    world.ask(Request::Checkpoint { reason: Reason::Checkpoint });
    world.now_ms = 900;
    let (connect, _) = world.ask(Request::Connect { timeout_ms: 1000 });
    world.now_ms = 1500;
    assert_eq!(told(&world.finish(0), connect), Some(Reply::Connected));
    assert_eq!(world.machine.deadline_ms, 2500, "counted from the answer");
}

#[test]
fn frozen_thaws_for_a_request_and_pauses_by_way_of_it() {
    let mut world = World::running(OnTimeout::Kill);
    world.event(EventKind::Idle { activity: 0, tier: IdleTier::Frozen });
    world.finish(0);
    assert_eq!(world.machine.view(), State::Paused { tier: Tier::Frozen });
    world.event(EventKind::Idle { activity: 0, tier: IdleTier::Disk });
    world.finish(0);
    world.finish(0);
    assert_eq!(world.machine.view(), State::Paused { tier: Tier::Disk });
    assert_eq!(world.machine.head, Some(snapshot(1)));
    let (wake, _) = world.ask(Request::Wake { resume: false });
    assert_eq!(told(&world.finish(0), wake), Some(Reply::Ready), "idleness sleeps until somebody comes");
}

#[test]
fn what_was_paused_on_purpose_stays_so_under_traffic() {
    let mut world = World::running(OnTimeout::Pause);
    world.ask(Request::Pause { reason: Reason::Pause });
    world.finish(0);
    let (wake, actions) = world.ask(Request::Wake { resume: false });
    assert_eq!(told(&actions, wake), Some(Reply::Asleep));
    world.ask(Request::Resume { timeout_ms: None });
    world.finish(0);
    world.now_ms += 2000;
    world.event(EventKind::Tick);
    world.finish(0);
    let (wake, actions) = world.ask(Request::Wake { resume: false });
    assert_eq!(told(&actions, wake), Some(Reply::Asleep), "the deadline is no idleness");
}

#[test]
fn idleness_that_was_measured_before_a_request_does_not_count() {
    let mut world = World::running(OnTimeout::Kill);
    world.ask(Request::Wake { resume: false });
    world.event(EventKind::Idle { activity: 0, tier: IdleTier::Frozen });
    assert_eq!(world.machine.view(), State::Running);
    assert!(world.work.is_none());
}

#[test]
fn a_failed_sandbox_offers_its_snapshot_and_goes_on_by_rollback_alone() {
    let mut world = World::running(OnTimeout::Kill);
    world.ask(Request::Checkpoint { reason: Reason::Checkpoint });
    world.finish(0);
    let what = Ended::Runtime { why: "killed".to_owned() };
    world.runtime = None;
    world.event(EventKind::Ended { generation: Generation(1), what });
    assert_eq!(world.machine.view(), State::Failed { why: "killed".to_owned() });
    let (resume, actions) = world.ask(Request::Resume { timeout_ms: None });
    let Some(Reply::Error(error)) = told(&actions, resume) else { panic!("{actions:?}") };
    assert_eq!(error.code, ErrorCode::Failed);
    assert!(error.message.contains("snap1"), "{error}");
    let (back, _) = world.ask(Request::RollBack { target: snapshot(1) });
    assert_eq!(told(&world.finish(0), back), Some(Reply::Done));
    assert_eq!(world.machine.view(), State::Running);
}

#[test]
fn a_lost_keeper_is_replaced_and_its_sandbox_goes_on() {
    let mut world = World::running(OnTimeout::Kill);
    let (wake, _) = {
        world.event(EventKind::Ended {
            generation: Generation(1),
            what: Ended::Keeper { why: "killed".into() },
        });
        world.ask(Request::Wake { resume: false })
    };
    assert!(matches!(world.work, Some((_, Work::ReplaceKeeper, _))));
    assert_eq!(told(&world.finish(0), wake), Some(Reply::Ready));
    assert_eq!(world.machine.generation, Generation(2));
}

#[test]
fn the_queue_is_bounded() {
    let mut world = World::running(OnTimeout::Kill);
    world.ask(Request::Checkpoint { reason: Reason::Checkpoint });
    for _ in 0..QUEUE_MAX {
        world.ask(Request::Wake { resume: false });
    }
    let (over, actions) = world.ask(Request::Wake { resume: false });
    assert_eq!(code(told(&actions, over)), Some(ErrorCode::Unavailable));
    world.drain();
}
