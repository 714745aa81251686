//! What callers are told when they meet, and when things fail.

use dormouse_engine::Failure;
use dormouse_types::SandboxId;
use tokio::io::AsyncReadExt;

use super::model_engine::World;
use super::{clock, open, request};
use crate::model::{
    CreateRequest, ListQuery, OnTimeout, PauseRequest, Purpose, SnapshotRequest, State, StateFilter, Tier,
};
use crate::{ErrorCode, Node, StreamError};

struct Trial {
    _dir: tempfile::TempDir,
    world: World,
    node: std::sync::Arc<Node>,
    clock: std::sync::Arc<dormouse_types::ManualClock>,
}

async fn trial() -> Trial {
    let dir = tempfile::tempdir().unwrap();
    let world = World::new(dir.path());
    let clock = clock();
    let node = open(dir.path(), &world, &clock).await.unwrap();
    Trial { _dir: dir, world, node, clock }
}

impl Trial {
    async fn sandbox(&self) -> SandboxId {
        self.node.create(request(None)).await.unwrap().0.id
    }

    async fn state(&self, id: &SandboxId) -> State {
        self.node.get(id).await.unwrap().state
    }
}

const PAUSED: State = State::Paused { tier: Tier::Disk };

#[tokio::test]
async fn s01_edits_survive_pause_and_resume() {
    let trial = trial().await;
    let id = trial.sandbox().await;
    for turn in 0..5 {
        trial.world.set_memory(&id, &format!("edit {turn}"));
        let (receipt, snapshot) = trial.node.pause(&id, PauseRequest::default()).await.unwrap();
        assert_eq!((receipt.snapshot, snapshot.reason.as_str()), (Some(snapshot.id), "pause"));
        assert!(trial.world.runtime_of(&id).is_none_or(|(_, it)| it.frozen));
        assert_eq!(trial.state(&id).await, PAUSED);
        trial.node.resume(&id, None).await.unwrap();
        assert_eq!(trial.world.runtime_of(&id).unwrap().1.memory, format!("edit {turn}"));
    }
    let info = trial.node.get(&id).await.unwrap();
    assert_eq!(trial.world.runtime_of(&id).unwrap().1.woken, Some(info.generation));
}

#[tokio::test]
async fn s24_everything_at_once_is_serialised_and_each_answer_is_true() {
    let trial = trial().await;
    let id = trial.sandbox().await;
    let node = &trial.node;
    let (first, second, fork, resume) = tokio::join!(
        node.pause(&id, PauseRequest::default()),
        node.pause(&id, PauseRequest::default()),
        node.fork(&id, 2, 60, None),
        node.resume(&id, Some(60)),
    );
    assert!(first.is_ok());
    assert_eq!(second.unwrap_err().code, ErrorCode::Conflict);
    assert!(fork.unwrap().iter().all(Result::is_ok));
    assert!(resume.is_ok());
    assert_eq!(trial.state(&id).await, State::Running);
    let (kill, again, late) =
        tokio::join!(node.kill(&id), node.kill(&id), node.pause(&id, PauseRequest::default()));
    assert!(kill.is_ok() && again.is_ok());
    assert_eq!(late.unwrap_err().code, ErrorCode::NotFound);
    assert_eq!(node.get(&id).await.unwrap_err().code, ErrorCode::NotFound);
    assert!(trial.world.runtime_of(&id).is_none());
}

#[tokio::test]
async fn s25_a_pause_that_fails_leaves_it_running_and_gives_the_space_back() {
    let trial = trial().await;
    let id = trial.sandbox().await;
    trial.world.state().failures.insert("checkpoint", || Failure::NoSpace { path: "/data".into() });
    let error = trial.node.pause(&id, PauseRequest::default()).await.unwrap_err();
    assert_eq!(error.code, ErrorCode::NoSpace);
    assert_eq!(trial.state(&id).await, State::Running);
    assert_eq!(trial.node.usage_summary().await.unwrap().snapshots, 0);
    // Held, published, and then it does not end at once: what comes next sees to it first.
    trial.world.state().failures.insert("stop", || Failure::Keeper { why: "does not answer".to_owned() });
    trial.node.pause(&id, PauseRequest::default()).await.unwrap();
    assert_eq!(trial.state(&id).await, PAUSED);
    trial.node.resume(&id, None).await.unwrap();
    assert_eq!(trial.world.state().runtimes.len(), 1);
}

#[tokio::test]
async fn s07_a_resume_that_fails_deletes_nothing_and_works_when_tried_again() {
    let trial = trial().await;
    let id = trial.sandbox().await;
    trial.world.set_memory(&id, "precious");
    trial.node.pause(&id, PauseRequest::default()).await.unwrap();
    trial.world.state().failures.insert("restore", || Failure::NoSpace { path: "/data".into() });
    assert_eq!(trial.node.resume(&id, None).await.unwrap_err().code, ErrorCode::NoSpace);
    assert_eq!(trial.state(&id).await, PAUSED);
    trial.node.resume(&id, None).await.unwrap();
    assert_eq!(trial.world.runtime_of(&id).unwrap().1.memory, "precious");
}

#[tokio::test]
async fn s10_a_damaged_snapshot_is_named_and_never_served() {
    let trial = trial().await;
    let id = trial.sandbox().await;
    let (_, snapshot) = trial.node.pause(&id, PauseRequest::default()).await.unwrap();
    std::fs::write(trial.node.hub.store.dir(&snapshot.id).join("memory.img"), "FRESH").unwrap();
    let error = trial.node.resume(&id, None).await.unwrap_err();
    assert!(error.message.contains("memory.img"), "{error}");
    assert_eq!(trial.state(&id).await, PAUSED);
    assert!(trial.world.state().runtimes.is_empty(), "it was started and left");
}

#[tokio::test]
async fn s27_one_key_makes_one_sandbox() {
    let trial = trial().await;
    let (one, other) =
        tokio::join!(trial.node.create(request(Some("k"))), trial.node.create(request(Some("k"))));
    let (one, other) = (one.unwrap().0, other.unwrap().0);
    assert_eq!(one.id, other.id);
    assert_eq!(trial.world.state().runtimes.len(), 1);
    let differs = CreateRequest { timeout_s: 7, ..request(Some("k")) };
    assert_eq!(trial.node.create(differs).await.unwrap_err().code, ErrorCode::Conflict);
    let forks = [
        trial.node.fork(&one.id, 2, 60, Some("f".to_owned())).await.unwrap(),
        trial.node.fork(&one.id, 2, 60, Some("f".to_owned())).await.unwrap(),
    ];
    let ids = forks.map(|fork| fork.into_iter().map(|child| child.unwrap().0.id).collect::<Vec<_>>());
    assert_eq!(ids[0], ids[1]);
}

#[tokio::test]
async fn a_create_that_fails_leaves_nothing() {
    let trial = trial().await;
    trial.world.state().failures.insert("boot", || Failure::Exited { why: "no init".to_owned() });
    let error = trial.node.create(request(Some("k"))).await.unwrap_err();
    assert!(error.message.contains("no init"), "{error}");
    // The removal goes on after the answer: the next create waits for nothing of it.
    let id = trial.node.create(request(Some("k"))).await.unwrap().0.id;
    trial.node.kill(&id).await.unwrap();
    assert!(trial.world.state().runtimes.is_empty());
}

#[tokio::test]
async fn s32_a_hundred_cycles_keep_one_snapshot() {
    let trial = trial().await;
    let id = trial.sandbox().await;
    let first =
        trial.node.checkpoint(&id, SnapshotRequest { name: Some("first".into()), ..Default::default() });
    let first = first.await.unwrap();
    for _ in 0..100 {
        trial.node.pause(&id, PauseRequest::default()).await.unwrap();
        trial.node.resume(&id, None).await.unwrap();
    }
    crate::retention::prune(trial.node.hub.clone(), id.clone(), trial.node.get(&id).await.unwrap().parent)
        .await;
    let rows = trial.node.hub.journal.snapshots().await.unwrap();
    assert_eq!(rows.len(), 2, "the named one and the newest");
    let newest = rows.iter().find(|row| row.id != first.id).unwrap();
    assert_eq!(newest.parent.as_ref(), Some(&first.id), "the line is whole without those between");
}

#[tokio::test]
async fn s05_children_outlive_what_they_came_from() {
    let trial = trial().await;
    let id = trial.sandbox().await;
    trial.world.set_memory(&id, "before");
    let named = SnapshotRequest { name: Some("point".to_owned()), ..SnapshotRequest::default() };
    let snapshot = trial.node.checkpoint(&id, named).await.unwrap();
    let child =
        trial.node.create(CreateRequest { source: "point".to_owned(), ..request(None) }).await.unwrap().0;
    trial.node.pause(&child.id, PauseRequest::default()).await.unwrap();
    trial.node.kill(&id).await.unwrap();
    let removed = trial.node.snapshot_rm("point").await.unwrap();
    assert_eq!(removed.id, snapshot.id.to_string());
    trial.node.template_rm("base").await.unwrap();
    trial.node.resume(&child.id, None).await.unwrap();
    assert_eq!(trial.world.runtime_of(&child.id).unwrap().1.memory, "before");
}

#[tokio::test]
async fn what_a_sandbox_is_paused_on_is_not_removed() {
    let trial = trial().await;
    let id = trial.sandbox().await;
    let (_, snapshot) = trial.node.pause(&id, PauseRequest::default()).await.unwrap();
    let error = trial.node.snapshot_rm(snapshot.id.as_str()).await.unwrap_err();
    assert_eq!(error.code, ErrorCode::Conflict);
    assert!(error.message.contains(id.as_str()), "{error}");
}

#[tokio::test]
async fn s28_an_expired_snapshot_is_refused_by_name() {
    let trial = trial().await;
    let id = trial.sandbox().await;
    let short = SnapshotRequest { name: Some("short".into()), ttl_s: Some(60), ..SnapshotRequest::default() };
    let snapshot = trial.node.checkpoint(&id, short).await.unwrap();
    trial.clock.advance(jiff::SignedDuration::from_secs(61));
    let created = trial.node.create(CreateRequest { source: "short".into(), ..request(None) }).await;
    assert_eq!(created.unwrap_err().code, ErrorCode::Expired);
    let rolled = trial.node.rollback(&id, &snapshot.id).await;
    assert_eq!(rolled.unwrap_err().code, ErrorCode::Expired);
    assert_eq!(trial.state(&id).await, State::Running);
}

#[tokio::test]
async fn deadlines_kill_or_pause_and_time_outs_move_them() {
    let trial = trial().await;
    let killed = trial.sandbox().await;
    let pauses = CreateRequest { on_timeout: OnTimeout::Pause, ..request(None) };
    let paused = trial.node.create(pauses).await.unwrap().0.id;
    let kept = trial.sandbox().await;
    trial.node.set_timeout(&kept, 10_000).await.unwrap();
    let (info, resumed, _) = trial.node.connect(&kept, 5).await.unwrap();
    assert!(!resumed && info.end_at > trial.node.get(&paused).await.unwrap().end_at, "never shortened");
    let mut events = trial.node.subscribe();
    trial.clock.advance(jiff::SignedDuration::from_secs(301));
    trial.node.look_at_clock().await;
    let mut ended = 0;
    while ended < 2 {
        let event = events.recv().await.unwrap();
        ended += usize::from(matches!(event.kind.as_str(), "killed" | "paused"));
    }
    assert_eq!(trial.node.get(&killed).await.unwrap_err().code, ErrorCode::NotFound);
    assert_eq!(trial.state(&paused).await, PAUSED);
    assert_eq!(trial.state(&kept).await, State::Running);
}

#[tokio::test]
async fn a_runtime_that_ends_by_itself_is_failed_and_can_be_rolled_back() {
    let trial = trial().await;
    let id = trial.sandbox().await;
    trial.world.set_memory(&id, "good");
    let snapshot = trial.node.checkpoint(&id, SnapshotRequest::default()).await.unwrap();
    let mut events = trial.node.subscribe();
    trial.world.kill_runtime(&id);
    while events.recv().await.unwrap().kind != "failed" {}
    let error = trial.node.resume(&id, None).await.unwrap_err();
    assert!(error.message.contains(snapshot.id.as_str()), "the last snapshot is offered: {error}");
    trial.node.rollback(&id, &snapshot.id).await.unwrap();
    assert_eq!(trial.world.runtime_of(&id).unwrap().1.memory, "good");
}

#[tokio::test]
async fn a_rollback_to_a_strangers_snapshot_is_refused() {
    let trial = trial().await;
    let (id, stranger) = (trial.sandbox().await, trial.sandbox().await);
    let snapshot = trial.node.checkpoint(&stranger, SnapshotRequest::default()).await.unwrap();
    let error = trial.node.rollback(&id, &snapshot.id).await.unwrap_err();
    assert_eq!(error.code, ErrorCode::Invalid { field: "snapshot".to_owned() });
}

#[tokio::test]
async fn a_rollback_that_fails_says_so_and_can_be_resumed() {
    let trial = trial().await;
    let id = trial.sandbox().await;
    trial.world.set_memory(&id, "then");
    let snapshot = trial.node.checkpoint(&id, SnapshotRequest::default()).await.unwrap();
    trial.world.state().failures.insert("restore", || Failure::NoSpace { path: "/data".into() });
    trial.node.rollback(&id, &snapshot.id).await.unwrap_err();
    assert_eq!(trial.state(&id).await, PAUSED);
    trial.node.resume(&id, None).await.unwrap();
    assert_eq!(trial.world.runtime_of(&id).unwrap().1.memory, "then");
    let last = *trial.world.state().sessions.last().unwrap();
    assert_eq!(last, dormouse_wire::keeper::Session::New, "old streams do not go on in another time");
}

#[tokio::test]
async fn streams_are_served_refused_or_told_that_it_sleeps() {
    let trial = trial().await;
    let id = trial.sandbox().await;
    let (checkpoint, stream) = tokio::join!(
        trial.node.checkpoint(&id, SnapshotRequest::default()),
        trial.node.stream(&id, 8000, Purpose::NoWake),
    );
    checkpoint.unwrap();
    let mut said = String::new();
    stream.unwrap().read_to_string(&mut said).await.unwrap();
    assert_eq!(said, "hello");
    assert_eq!(trial.node.stream(&id, 81, Purpose::NoWake).await.unwrap_err(), StreamError::PortClosed(81));
    trial.node.pause(&id, PauseRequest::default()).await.unwrap();
    let asleep = trial.node.stream(&id, 8000, Purpose::NoWake).await.unwrap_err();
    assert_eq!(asleep, StreamError::Paused(id.to_string()));
    trial.node.stream(&id, 8000, Purpose::Wake).await.unwrap();
    assert_eq!(trial.state(&id).await, State::Running);
    trial.node.kill(&id).await.unwrap();
    let gone = trial.node.stream(&id, 8000, Purpose::Wake).await.unwrap_err();
    assert_eq!(gone, StreamError::NotFound(id.to_string()));
}

#[tokio::test]
async fn limits_are_named() {
    let trial = trial().await;
    for _ in 0..8 {
        trial.sandbox().await;
    }
    let error = trial.node.create(request(None)).await.unwrap_err();
    assert_eq!(error.code, ErrorCode::QuotaExceeded);
    assert!(error.message.contains("sandboxes_max = 8"), "{error}");
    let paused = ListQuery { states: vec![StateFilter::Paused], ..ListQuery::default() };
    assert!(trial.node.list(paused).await.unwrap().0.is_empty());
    let page = ListQuery { limit: Some(5), ..ListQuery::default() };
    let (first, next) = trial.node.list(page.clone()).await.unwrap();
    let (second, end) = trial.node.list(ListQuery { cursor: next, ..page }).await.unwrap();
    assert_eq!((first.len(), second.len(), end), (5, 3, None));
}

#[tokio::test]
async fn keys_are_told_once_and_found_by_their_hash() {
    let trial = trial().await;
    let (info, secret) = trial.node.key_create("ci").await.unwrap();
    assert!(secret.starts_with("e2b_") && secret.len() == 44);
    assert_eq!(trial.node.key_verify(&secret).await.unwrap(), Some(info.clone()));
    for wrong in ["", "e2b_", "e2b_00", &secret[..43], &secret.replace("e2b_", "x2b_")] {
        assert_eq!(trial.node.key_verify(wrong).await.unwrap(), None, "{wrong:?}");
    }
    trial.node.key_rm(&info.id).await.unwrap();
    assert_eq!(trial.node.key_verify(&secret).await.unwrap(), None);
}
