//! Live forks: what the copies are, and what is left when something fails or dies on the way.

use dormouse_engine::Failure;
use dormouse_types::SandboxId;

use super::model_engine::World;
use super::{clock, open, request};
use crate::model::{ListQuery, PauseRequest, SnapshotRequest, State};
use crate::{ErrorCode, Node};

struct Trial {
    _dir: tempfile::TempDir,
    world: World,
    node: std::sync::Arc<Node>,
    id: SandboxId,
}

async fn trial() -> Trial {
    let dir = tempfile::tempdir().unwrap();
    let world = World::new(dir.path());
    world.state().live_fork = true;
    let node = open(dir.path(), &world, &clock()).await.unwrap();
    let id = node.create(request(None)).await.unwrap().0.id;
    world.set_memory(&id, "the source's");
    Trial { _dir: dir, world, node, id }
}

#[tokio::test]
async fn copies_go_on_from_the_sources_memory_without_a_snapshot() {
    let trial = trial().await;
    let before = trial.node.checkpoint(&trial.id, SnapshotRequest::default()).await.unwrap();
    trial.world.set_memory(&trial.id, "later");
    let source = trial.node.get(&trial.id).await.unwrap();
    let copies = trial.node.fork(&trial.id, 4, 60, None).await.unwrap();
    assert_eq!(copies.len(), 4);
    for copy in copies {
        let (info, receipt) = copy.unwrap();
        let runtime = trial.world.runtime_of(&info.id).unwrap().1;
        assert_eq!(runtime.memory, "later");
        assert_eq!(runtime.woken, Some(info.generation));
        assert!(info.generation > source.generation);
        assert_eq!((info.forked_from.as_ref(), info.parent.as_ref()), (Some(&trial.id), Some(&before.id)));
        assert_ne!((&info.access_token, &info.hostname), (&source.access_token, &source.hostname));
        assert_eq!(
            (receipt.operation.as_str(), receipt.snapshot, receipt.stopped_ms),
            ("fork", None, Some(3))
        );
    }
    assert_eq!(trial.node.usage_summary().await.unwrap().snapshots, 1, "none was taken for the fork");
    let grandchild = trial.node.fork(&trial.id, 1, 60, None).await.unwrap().pop().unwrap().unwrap().0;
    trial.node.kill(&trial.id).await.unwrap();
    let (_, snapshot) = trial.node.pause(&grandchild.id, PauseRequest::default()).await.unwrap();
    assert_eq!(snapshot.parent, Some(before.id));
    trial.node.resume(&grandchild.id, None).await.unwrap();
    assert_eq!(trial.world.runtime_of(&grandchild.id).unwrap().1.memory, "later");
}

#[tokio::test]
async fn a_fork_that_fails_leaves_the_source_and_nothing_else() {
    let trial = trial().await;
    trial.world.state().failures.insert("fork", || Failure::NoSpace { path: "/data".into() });
    let error = trial.node.fork(&trial.id, 3, 60, None).await.unwrap_err();
    assert_eq!(error.code, ErrorCode::NoSpace);
    trial.world.state().failures.insert("fork_child", || Failure::Keeper { why: "did not start".to_owned() });
    let copies = trial.node.fork(&trial.id, 3, 60, None).await.unwrap();
    assert_eq!(copies.iter().filter(|copy| copy.is_ok()).count(), 2);
    let failed = copies.into_iter().find_map(Result::err).unwrap();
    assert!(failed.message.contains("did not start"), "{failed}");
    assert_eq!(trial.node.get(&trial.id).await.unwrap().state, State::Running);
    assert_eq!(trial.world.state().runtimes.len(), 3);
}

#[tokio::test]
async fn copies_over_the_limit_are_refused_and_do_not_hold_up_the_others() {
    let trial = trial().await;
    let copies = trial.node.fork(&trial.id, 10, 60, None).await.unwrap();
    assert_eq!(copies.iter().filter(|copy| copy.is_ok()).count(), 7, "eight are allowed in all");
    let refused = copies.into_iter().find_map(Result::err).unwrap();
    assert_eq!(refused.code, ErrorCode::QuotaExceeded);
}

#[tokio::test]
async fn a_source_that_was_just_paused_is_copied_from_its_snapshot() {
    let trial = trial().await;
    let node = &trial.node;
    let (paused, copies) =
        tokio::join!(node.pause(&trial.id, PauseRequest::default()), node.fork(&trial.id, 2, 60, None),);
    let (_, snapshot) = paused.unwrap();
    for copy in copies.unwrap() {
        let (info, _) = copy.unwrap();
        assert_eq!(info.parent, Some(snapshot.id.clone()));
        assert_eq!(trial.world.runtime_of(&info.id).unwrap().1.memory, "the source's");
    }
    // And one that has been asleep all along.
    let copy = node.fork(&trial.id, 1, 60, None).await.unwrap().pop().unwrap().unwrap();
    assert_eq!(copy.0.parent, Some(snapshot.id));
    assert_eq!(node.list(ListQuery::default()).await.unwrap().0.len(), 4);
}
