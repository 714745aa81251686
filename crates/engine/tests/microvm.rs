//! The driver against real KVM, with the real monitor, keeper, kernel and agent: `cargo xtask lab --test` runs it.
//!
//! `DORMOUSE_TEST_BINARY` names the `dormouse` executable, `DORMOUSE_TEST_DATA` a data folder with the guest's files.

#![allow(clippy::unwrap_used, reason = "a test's helper fails as its test does")]

mod vm;

use std::time::Duration;

use dormouse_engine::{After, Engine, Exit, Failure, RuntimeState, WarmSpec};
use dormouse_types::Generation;
use dormouse_wire::keeper::{EgressRules, Session};
use vm::{Rig, SHAPE, Sandbox};

#[tokio::test(flavor = "multi_thread")]
async fn a_sandbox_boots_freezes_thaws_and_leaves_nothing() {
    let rig = Rig::new().await;
    let sandbox = rig.boot().await;
    assert_eq!(rig.run(&sandbox, "echo hello").await, "hello\n");
    rig.engine.freeze(&sandbox.id, &sandbox.runtime).await.unwrap();
    rig.engine.freeze(&sandbox.id, &sandbox.runtime).await.unwrap();
    let adopted = rig.engine.adopt(&sandbox.id, Some(&sandbox.runtime)).await.unwrap();
    assert_eq!((adopted.runtime, adopted.keeper), (RuntimeState::Frozen, true));
    rig.engine.thaw(&sandbox.id, &sandbox.runtime).await.unwrap();
    assert_eq!(rig.run(&sandbox, "echo again").await, "again\n");
    rig.engine.destroy(&sandbox.id, Some(&sandbox.runtime)).await.unwrap();
    rig.engine.destroy(&sandbox.id, Some(&sandbox.runtime)).await.unwrap();
    assert_eq!(rig.remains(), Vec::<String>::new());
}

/// Pause and resume, again and again: processes and files go on.
#[tokio::test(flavor = "multi_thread")]
async fn a_resume_goes_on_where_the_pause_cut() {
    let rig = Rig::new().await;
    let mut sandbox = rig.boot().await;
    rig.start(&sandbox, COUNTER).await;
    let mut last = rig.number(&sandbox, "count").await;
    for round in 0..4 {
        rig.run(&sandbox, &format!("echo {round} >> /root/rounds")).await;
        let after = if round % 2 == 0 { After::Stop } else { After::Hold };
        let (image, files) = rig.checkpoint(&sandbox, &format!("image{round}"), after).await;
        if after == After::Hold {
            rig.engine.stop(&sandbox.id, &sandbox.runtime).await.unwrap();
        }
        let next = Sandbox { id: sandbox.id.clone(), ..Sandbox::new() };
        let spec = rig.restore_spec(&sandbox, &next, &image, files, Session::Continue);
        rig.engine.restore(spec).await.unwrap();
        sandbox = next;
        let now = rig.number(&sandbox, "count").await;
        assert!(now >= last, "{now} after {last}");
        last = now;
    }
    assert_eq!(rig.run(&sandbox, "cat /root/rounds").await, "0\n1\n2\n3\n");
    rig.engine.destroy(&sandbox.id, Some(&sandbox.runtime)).await.unwrap();
    assert_eq!(rig.remains(), Vec::<String>::new());
}

/// A shell that counts in its memory and tells by a file.
const COUNTER: &str = "n=0; while :; do n=$((n+1)); echo $n > /root/new; mv /root/new /root/count; done";

#[tokio::test(flavor = "multi_thread")]
async fn forks_and_forks_of_forks_go_on_side_by_side() {
    let rig = Rig::new().await;
    let source = rig.boot().await;
    rig.start(&source, COUNTER).await;
    let count = rig.number(&source, "count").await;
    rig.run(&source, "echo source > /root/who; sync").await;
    let children = rig.fork(&source, 8).await;
    for (number, child) in children.iter().enumerate() {
        assert_eq!(rig.run(child, "cat /root/who").await, "source\n");
        rig.run(child, &format!("echo {number} > /root/who")).await;
        assert!(rig.number(child, "count").await >= count);
    }
    let grandchild = rig.fork(&children[3], 1).await.remove(0);
    assert_eq!(rig.run(&grandchild, "cat /root/who").await, "3\n");
    assert_eq!(rig.run(&source, "cat /root/who").await, "source\n");
    // Each has a life of its own.
    rig.engine.destroy(&source.id, Some(&source.runtime)).await.unwrap();
    for (number, child) in children.iter().enumerate() {
        assert_eq!(rig.run(child, "cat /root/who").await, format!("{number}\n"));
        rig.engine.destroy(&child.id, Some(&child.runtime)).await.unwrap();
    }
    let before = rig.number(&grandchild, "count").await;
    while rig.number(&grandchild, "count").await <= before {
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    rig.engine.destroy(&grandchild.id, Some(&grandchild.runtime)).await.unwrap();
    assert_eq!(rig.remains(), Vec::<String>::new());
}

/// Writes files beside the sums of what it wrote, synced one by one, until it is told to end.
const WRITER: &str = "n=0; mkdir /root/w; while [ ! -e /root/end ]; do n=$((n+1)); \
    dd if=/dev/urandom of=/root/w/$n bs=64k count=2 2>/dev/null; cksum < /root/w/$n > /root/w/$n.sum; sync; \
    echo $n > /root/written; done";
/// Prints how many there are; a file whose sum is there and differs is an error.
const VERIFY: &str = "cd /root/w; n=0; for sum in *.sum; do [ -s $sum ] || continue; \
    [ \"$(cksum < ${sum%.sum})\" = \"$(cat $sum)\" ] || { echo $sum differs; exit 1; }; n=$((n+1)); done; echo $n";

/// What was written and synced before a checkpoint is whole after it: in the source, and in what is restored.
#[tokio::test(flavor = "multi_thread")]
async fn checkpoints_under_a_write_load_are_whole() {
    let rig = Rig::new().await;
    let source = rig.boot().await;
    rig.start(&source, WRITER).await;
    let mut images = Vec::new();
    for round in 0..3 {
        let before = rig.number(&source, "written").await;
        images.push((before, rig.checkpoint(&source, &format!("image{round}"), After::KeepRunning).await));
        while rig.number(&source, "written").await < before + 3 {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    }
    rig.run(&source, "touch /root/end; sync").await;
    for (written, (image, files)) in images {
        let copy = Sandbox::new();
        let spec = rig.restore_spec(&source, &copy, &image, files, Session::New);
        rig.engine.restore(spec).await.unwrap();
        rig.run(&copy, "touch /root/end").await;
        let whole: u64 = rig.run(&copy, VERIFY).await.trim().parse().unwrap();
        assert!(whole >= written, "{whole} of {written}");
        rig.engine.destroy(&copy.id, Some(&copy.runtime)).await.unwrap();
    }
    rig.run(&source, VERIFY).await;
    rig.engine.destroy(&source.id, Some(&source.runtime)).await.unwrap();
    assert_eq!(rig.remains(), Vec::<String>::new());
}

/// A create is a fork of a monitor that holds the template's snapshot.
#[tokio::test(flavor = "multi_thread")]
async fn a_zygote_makes_sandboxes() {
    let rig = Rig::new().await;
    let source = rig.boot().await;
    let (image, files) = rig.checkpoint(&source, "image", After::Stop).await;
    let warm = WarmSpec { rootfs: rig.rootfs(), shape: SHAPE, snapshot: Some(image.clone()) };
    rig.engine.prewarm(warm.clone(), 1).await;
    let mut from_zygote = 0;
    while from_zygote < 3 {
        let made = Sandbox::new();
        let spec = rig.restore_spec(&source, &made, &image, files.clone(), Session::New);
        let restored = rig.engine.restore(spec).await.unwrap();
        from_zygote += u32::from(restored.from_pool);
        assert_eq!(rig.run(&made, "echo made").await, "made\n");
        rig.engine.destroy(&made.id, Some(&made.runtime)).await.unwrap();
    }
    rig.engine.prewarm(warm, 0).await;
    rig.engine.destroy(&source.id, None).await.unwrap();
    assert_eq!(rig.remains(), Vec::<String>::new());
}

#[tokio::test(flavor = "multi_thread")]
async fn ends_are_noticed_with_their_reason() {
    let rig = Rig::new().await;
    let crashed = rig.boot().await;
    rig.start(&crashed, "echo c > /proc/sysrq-trigger").await;
    let exit = rig.engine.exited(&crashed.id, &crashed.runtime).await;
    assert!(matches!(&exit, Exit::Runtime { why } if why.contains("last words")), "{exit:?}");
    let image = rig.image("image");
    let error = rig.engine.checkpoint(&crashed.id, &crashed.runtime, &image, After::Stop).await.unwrap_err();
    assert!(matches!(error.failure, Failure::Exited { .. }), "{error}");
    rig.engine.destroy(&crashed.id, Some(&crashed.runtime)).await.unwrap();

    // Another keeper takes over at once.
    let orphan = rig.boot().await;
    let keeper = std::fs::read(rig.engine.keeper_dir(&orphan.id).join("keeper.json")).unwrap();
    let (pid, _): (u32, u64) = serde_json::from_slice(&keeper).unwrap();
    dormouse_sys::process::PidFd::open(pid).unwrap().kill().unwrap();
    let exit = rig.engine.exited(&orphan.id, &orphan.runtime).await;
    assert!(matches!(exit, Exit::Keeper { .. }), "{exit:?}");
    let (rules, generation) = (EgressRules::default(), Generation(2));
    for _ in 0..2 {
        rig.engine.replace_keeper(&orphan.id, &orphan.runtime, generation, &rules).await.unwrap();
    }
    assert_eq!(rig.run(&orphan, "echo over").await, "over\n");
    rig.engine.destroy(&orphan.id, Some(&orphan.runtime)).await.unwrap();
    assert_eq!(rig.remains(), Vec::<String>::new());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_new_daemon_finds_its_sandboxes_and_sweeps_the_rest() {
    let mut rig = Rig::new().await;
    let (kept, lost) = (rig.boot().await, rig.boot().await);
    rig.start(&kept, COUNTER).await;
    let count = rig.number(&kept, "count").await;
    rig.reopen().await;
    let adopted = rig.engine.adopt(&kept.id, Some(&kept.runtime)).await.unwrap();
    assert_eq!((adopted.runtime, adopted.keeper), (RuntimeState::Running, true));
    let keep = [(kept.id.clone(), Some(kept.runtime.clone()))];
    let swept = rig.engine.sweep(&keep).await.unwrap();
    assert_eq!((swept.keepers, swept.runtimes), (vec![lost.id.to_string()], vec![lost.runtime.to_string()]));
    assert!(rig.number(&kept, "count").await >= count);
    assert_eq!(rig.engine.sweep(&keep).await.unwrap(), Default::default());
    rig.engine.destroy(&kept.id, Some(&kept.runtime)).await.unwrap();
    assert_eq!(rig.remains(), Vec::<String>::new());
}

/// A damaged snapshot is an error, and what was begun for it is gone.
#[tokio::test(flavor = "multi_thread")]
async fn a_restore_that_fails_leaves_nothing_but_the_keeper() {
    let rig = Rig::new().await;
    let sandbox = rig.boot().await;
    let (image, files) = rig.checkpoint(&sandbox, "image", After::Stop).await;
    let devices = image.join("devices");
    let bytes = std::fs::read(&devices).unwrap();
    std::fs::write(&devices, &bytes[..bytes.len() / 2]).unwrap();
    let next = Sandbox { id: sandbox.id.clone(), ..Sandbox::new() };
    let spec = rig.restore_spec(&sandbox, &next, &image, files.clone(), Session::Continue);
    let error = rig.engine.restore(spec).await.unwrap_err();
    assert!(matches!(error.failure, Failure::Damaged { .. }), "{error}");
    let adopted = rig.engine.adopt(&sandbox.id, Some(&next.runtime)).await.unwrap();
    assert_eq!((adopted.runtime, adopted.keeper), (RuntimeState::Gone, true));

    // Once it is mended, the same keeper goes on.
    std::fs::write(&devices, &bytes).unwrap();
    let again = Sandbox { id: sandbox.id.clone(), ..Sandbox::new() };
    let spec = rig.restore_spec(&sandbox, &again, &image, files, Session::Continue);
    rig.engine.restore(spec).await.unwrap();
    assert_eq!(rig.run(&again, "echo back").await, "back\n");
    rig.engine.destroy(&sandbox.id, Some(&again.runtime)).await.unwrap();
    assert_eq!(rig.remains(), Vec::<String>::new());
}
