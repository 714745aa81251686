//! The daemon dies at each step of each operation; a new one finds out what is true.
//!
//! The node's tokio runtime is torn down with whatever it was doing; the world (runtimes, keepers,
//! files) stays. Then a new node opens the same folder.

use std::sync::Arc;

use dormouse_types::{ManualClock, SandboxId, SnapshotId};

use super::model_engine::World;
use super::{clock, open, request};
use crate::actor::Patch;
use crate::model::{ListQuery, PauseRequest, SnapshotRequest, State, Tier};
use crate::{Node, OpenError};

struct Host {
    dir: tempfile::TempDir,
    world: World,
    clock: Arc<ManualClock>,
}

fn host() -> Host {
    let dir = tempfile::tempdir().unwrap();
    let world = World::new(dir.path());
    Host { dir, world, clock: clock() }
}

fn runtime() -> tokio::runtime::Runtime {
    tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap()
}

impl Host {
    /// One daemon's life: `work` runs in it and then it is gone, whatever is still going on.
    fn life<T>(&self, work: impl AsyncFnOnce(Arc<Node>) -> T) -> T {
        let runtime = runtime();
        let result = runtime.block_on(async {
            let node = open(self.dir.path(), &self.world, &self.clock).await.unwrap();
            work(node).await
        });
        // Its threads end; what they held (the lock, the journal) is let go.
        drop(runtime);
        result
    }

    fn stick(&self, at: Option<&'static str>) {
        self.world.state().stuck_at = at;
    }
}

#[derive(Debug, Clone, Copy, PartialEq)]
enum Operation {
    Create,
    Pause,
    Checkpoint,
    Resume,
    Rollback,
    Kill,
    Fork,
}

/// Begins the operation and dies where the engine is told to stick.
fn die(host: &Host, operation: Operation, at: &'static str) -> (SandboxId, Option<SnapshotId>) {
    host.life(async |node| {
        let id = node.create(request(None)).await.unwrap().0.id;
        host.world.set_memory(&id, "first");
        let mut snapshot = None;
        if operation == Operation::Rollback {
            snapshot = Some(node.checkpoint(&id, SnapshotRequest::default()).await.unwrap().id);
            host.world.set_memory(&id, "second");
        }
        if operation == Operation::Resume {
            snapshot = Some(node.pause(&id, PauseRequest::default()).await.unwrap().1.id);
        }
        host.world.state().live_fork = operation == Operation::Fork;
        host.stick(Some(at));
        let (node_, id_, target) = (Arc::clone(&node), id.clone(), snapshot.clone());
        tokio::spawn(async move {
            match operation {
                Operation::Create => drop(node_.create(request(Some("key"))).await),
                Operation::Pause => drop(node_.pause(&id_, PauseRequest::default()).await),
                Operation::Checkpoint => drop(node_.checkpoint(&id_, SnapshotRequest::default()).await),
                Operation::Resume => drop(node_.resume(&id_, None).await),
                Operation::Rollback => drop(node_.rollback(&id_, &target.unwrap()).await),
                Operation::Kill => drop(node_.kill(&id_).await),
                Operation::Fork => drop(node_.fork(&id_, 3, 60, None).await),
            }
        });
        host.world.stuck().await;
        (id, snapshot)
    })
}

/// After a restart: every state is true, nothing is left that nobody owns.
async fn check(host: &Host, node: &Arc<Node>) {
    settle(node).await;
    let sandboxes = node.list(ListQuery::default()).await.unwrap().0;
    for info in &sandboxes {
        let runtime = host.world.runtime_of(&info.id);
        match &info.state {
            State::Running => assert!(!runtime.unwrap().1.frozen, "{} is said to run", info.id),
            State::Paused { tier: Tier::Frozen } => assert!(runtime.unwrap().1.frozen),
            State::Paused { .. } | State::Failed { .. } => assert!(runtime.is_none(), "{:?}", info.state),
            other => panic!("{} is still {other:?}", info.id),
        }
    }
    let owned = |sandbox: &SandboxId| sandboxes.iter().any(|info| info.id == *sandbox);
    let state = host.world.state();
    assert!(state.runtimes.values().all(|it| owned(&it.sandbox)), "a runtime is left: {:?}", state.runtimes);
    assert!(state.keepers.iter().all(owned), "a keeper is left: {:?}", state.keepers);
}

/// Until nothing is on its way any more: each sandbox's task answers after what it has to do.
async fn settle(node: &Arc<Node>) {
    for actor in node.hub.actors() {
        let mut view = actor.view();
        let rests =
            |state: &State| matches!(state, State::Running | State::Paused { .. } | State::Failed { .. });
        // An error: it was removed, which is an end, too.
        drop(view.wait_for(|view| rests(&view.info.state)).await.map(drop));
        // Answered after what it began with, which may be to clean up.
        let idle = view.borrow().info.idle;
        drop(actor.patch(Patch::Idle(idle)).await);
    }
}

fn crash_and_check(operation: Operation, at: &'static str) -> (Host, SandboxId, State) {
    let host = host();
    let (id, _) = die(&host, operation, at);
    host.stick(None);
    let state = host.life(async |node| {
        check(&host, &node).await;
        node.get(&id).await.map_or(State::Killed, |info| info.state)
    });
    (host, id, state)
}

/// What it is can be gone on with, and its memory is what it was.
fn goes_on(host: &Host, id: &SandboxId, memory: &str) {
    host.life(async |node| {
        let info = node.get(id).await.unwrap();
        if info.state == (State::Paused { tier: Tier::Disk }) {
            node.resume(id, None).await.unwrap();
        }
        node.pause(id, PauseRequest::default()).await.unwrap();
        node.resume(id, None).await.unwrap();
        assert_eq!(host.world.runtime_of(id).unwrap().1.memory, memory);
        node.kill(id).await.unwrap();
        assert!(host.world.state().runtimes.is_empty());
    });
}

#[test]
fn s29_a_create_that_was_cut_off_is_undone_and_its_key_makes_one() {
    for at in ["boot:before", "boot:after"] {
        let (host, id, state) = crash_and_check(Operation::Create, at);
        assert_eq!(state, State::Running, "the other one lives on ({at})");
        host.life(async |node| {
            node.create(request(Some("key"))).await.unwrap();
            assert_eq!(node.list(ListQuery::default()).await.unwrap().0.len(), 2);
            assert!(node.get(&id).await.is_ok());
        });
    }
}

#[test]
fn s29_a_pause_that_was_cut_off_loses_nothing() {
    for (at, expected) in [
        ("checkpoint:before", State::Running),
        ("checkpoint:after", State::Paused { tier: Tier::Frozen }),
        // Either is true, as the daemon's last commit came before its end or not.
        ("stop:before", State::Paused { tier: Tier::Disk }),
        ("stop:after", State::Paused { tier: Tier::Disk }),
    ] {
        let (host, id, state) = crash_and_check(Operation::Pause, at);
        let thawable = at == "stop:before" && state == (State::Paused { tier: Tier::Frozen });
        assert!(state == expected || thawable, "{at}: {state:?}");
        goes_on(&host, &id, "first");
    }
}

#[test]
fn s29_a_checkpoint_that_was_cut_off_leaves_it_running() {
    for at in ["checkpoint:before", "checkpoint:after"] {
        let (host, id, state) = crash_and_check(Operation::Checkpoint, at);
        assert_eq!(state, State::Running, "{at}");
        goes_on(&host, &id, "first");
    }
}

#[test]
fn s29_a_live_fork_that_was_cut_off_leaves_the_source_alone() {
    for at in ["fork:before", "fork:after"] {
        let (host, id, state) = crash_and_check(Operation::Fork, at);
        assert_eq!(state, State::Running, "{at}");
        assert_eq!(host.world.state().runtimes.len(), 1, "{at}");
        goes_on(&host, &id, "first");
    }
}

#[test]
fn s29_a_resume_that_was_cut_off_is_paused_again() {
    for at in ["restore:before", "restore:after"] {
        let (host, id, state) = crash_and_check(Operation::Resume, at);
        assert_eq!(state, State::Paused { tier: Tier::Disk }, "{at}");
        goes_on(&host, &id, "first");
    }
}

#[test]
fn s29_a_rollback_that_was_cut_off_is_before_it_or_on_its_target() {
    for (at, expected, memory) in [
        ("stop:before", State::Running, "second"),
        ("stop:after", State::Paused { tier: Tier::Disk }, "first"),
        ("restore:before", State::Paused { tier: Tier::Disk }, "first"),
        ("restore:after", State::Paused { tier: Tier::Disk }, "first"),
    ] {
        let (host, id, state) = crash_and_check(Operation::Rollback, at);
        assert_eq!(state, expected, "{at}");
        goes_on(&host, &id, memory);
    }
}

#[test]
fn s29_a_kill_that_was_cut_off_is_carried_out() {
    for at in ["destroy:before", "destroy:after"] {
        let (host, _, state) = crash_and_check(Operation::Kill, at);
        assert_eq!(state, State::Killed, "{at}");
        assert!(host.world.state().runtimes.is_empty());
    }
}

#[test]
fn s31_after_the_hosts_end_paused_ones_resume_and_running_ones_offer_their_last_snapshot() {
    let host = host();
    let (paused, running, snapshot) = host.life(async |node| {
        let paused = node.create(request(None)).await.unwrap().0.id;
        node.pause(&paused, PauseRequest::default()).await.unwrap();
        let running = node.create(request(None)).await.unwrap().0.id;
        host.world.set_memory(&running, "point");
        let snapshot = node.checkpoint(&running, SnapshotRequest::default()).await.unwrap().id;
        (paused, running, snapshot)
    });
    host.world.kill_runtime(&running);
    host.world.state().keepers.clear();
    host.life(async |node| {
        node.resume(&paused, None).await.unwrap();
        let error = node.resume(&running, None).await.unwrap_err();
        assert!(error.message.contains(snapshot.as_str()), "{error}");
        node.rollback(&running, &snapshot).await.unwrap();
        assert_eq!(host.world.runtime_of(&running).unwrap().1.memory, "point");
    });
}

#[test]
fn a_lost_keeper_is_replaced_at_the_start() {
    let host = host();
    let id = host.life(async |node| {
        let id = node.create(request(None)).await.unwrap().0.id;
        host.world.set_memory(&id, "kept");
        id
    });
    host.world.state().keepers.clear();
    host.life(async |node| {
        check(&host, &node).await;
        assert!(node.notes().iter().any(|note| note.contains(id.as_str())), "{:?}", node.notes());
        assert_eq!(node.get(&id).await.unwrap().state, State::Running);
        assert_eq!(host.world.runtime_of(&id).unwrap().1.memory, "kept");
    });
}

#[test]
fn a_second_daemon_is_refused_by_name() {
    let host = host();
    host.life(async |_node| {
        let error = open(host.dir.path(), &host.world, &host.clock).await.err().expect("two daemons at once");
        let OpenError::Locked { folder, pid } = error else { panic!("{error}") };
        assert_eq!((folder.as_path(), pid), (host.dir.path(), std::process::id().to_string()));
    });
    host.life(async |_node| {});
}

/// One that sleeps and one that runs, made in a daemon's life that is over.
fn asleep_and_awake(host: &Host) -> (SandboxId, SandboxId) {
    host.life(async |node| {
        let asleep = node.create(request(None)).await.unwrap().0.id;
        host.world.set_memory(&asleep, "asleep");
        node.pause(&asleep, PauseRequest::default()).await.unwrap();
        (asleep, node.create(request(None)).await.unwrap().0.id)
    })
}

fn damage(host: &Host, damage: impl Fn(&std::path::Path)) {
    damage(&host.dir.path().join("node.db"));
    for suffix in ["-wal", "-shm"] {
        drop(std::fs::remove_file(host.dir.path().join(format!("node.db{suffix}"))));
    }
}

#[test]
fn a_lost_journal_is_begun_anew_from_its_copy() {
    type Harm = fn(&std::path::Path);
    let damages: [(&str, Harm); 3] = [
        ("node.db.damaged.1", |path| std::fs::write(path, vec![9_u8; 40_000]).unwrap()),
        ("node.db.damaged.1", |path| std::fs::write(path, b"").unwrap()),
        ("was gone", |path| std::fs::remove_file(path).unwrap()),
    ];
    for (word, how) in damages {
        let host = host();
        let (asleep, awake) = asleep_and_awake(&host);
        let (key, template) = host.life(async |node| {
            (node.key_create("kept").await.unwrap().1, node.templates().await.unwrap().len())
        });
        damage(&host, how);
        host.life(async |node| {
            assert!(node.notes().iter().any(|note| note.contains(word)), "{:?}", node.notes());
            assert_eq!(node.get(&awake).await.unwrap().state, State::Running);
            node.resume(&asleep, None).await.unwrap();
            assert_eq!(host.world.runtime_of(&asleep).unwrap().1.memory, "asleep");
            assert!(node.key_verify(&key).await.unwrap().is_some(), "the key was forgotten");
            assert_eq!(node.templates().await.unwrap().len(), template);
        });
    }
}

#[test]
fn what_a_lost_journal_forgot_is_not_swept_until_somebody_says_so() {
    let host = host();
    let (asleep, awake) = asleep_and_awake(&host);
    damage(&host, |path| std::fs::write(path, vec![9_u8; 40_000]).unwrap());
    std::fs::remove_file(host.dir.path().join("node.db.copy")).unwrap();
    host.life(async |node| {
        let said = node.notes().into_iter().any(|note| note.contains("node.db.damaged.1"));
        assert!(said, "{:?}", node.notes());
        node.resume(&asleep, None).await.unwrap();
        assert_eq!(host.world.runtime_of(&asleep).unwrap().1.memory, "asleep");
    });
    // The next start finds a sound journal, which still knows nothing of what runs.
    host.life(async |node| {
        assert!(host.world.runtime_of(&awake).is_some(), "it was swept away");
        assert!(node.notes().iter().any(|note| note.contains("left alone")), "{:?}", node.notes());
        node.gc().await.unwrap();
        assert!(host.world.runtime_of(&awake).is_none());
    });
    host.life(async |node| {
        assert!(!node.notes().iter().any(|note| note.contains("left alone")), "{:?}", node.notes());
    });
}
