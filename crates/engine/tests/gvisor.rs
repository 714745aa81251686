//! The driver against real runsc, as root.

#![allow(clippy::unwrap_used, reason = "a test's helper fails as its test does")]

mod common;

use std::time::Duration;

use common::{Lab, SHAPE, Sandbox, Talk, assert_whole};
use dormouse_engine::{After, Engine, Exit, Failure, RuntimeState, WarmSpec};
use dormouse_types::Generation;
use dormouse_wire::keeper::{EgressRules, Session};

#[tokio::test(flavor = "multi_thread")]
async fn a_sandbox_boots_freezes_thaws_and_leaves_nothing() {
    for cgroups in [true, false] {
        let lab = Lab::with(cgroups).await;
        let sandbox = lab.boot().await;
        let mut talk = lab.talk(&sandbox);
        assert_eq!(talk.ask("echo hello"), "hello");
        let memory = talk.ask("read /proc/meminfo");
        assert_eq!(
            memory.contains("MemTotal:         262144 kB"),
            lab.engine.cgroups().is_some(),
            "{memory}"
        );

        lab.engine.freeze(&sandbox.id, &sandbox.runtime).await.unwrap();
        lab.engine.freeze(&sandbox.id, &sandbox.runtime).await.unwrap();
        let adopted = lab.engine.adopt(&sandbox.id, Some(&sandbox.runtime)).await.unwrap();
        assert_eq!((adopted.runtime, adopted.keeper), (RuntimeState::Frozen, true));
        let before = lab.engine.usage(&sandbox.id, &sandbox.runtime).await.unwrap();
        tokio::time::sleep(Duration::from_millis(200)).await;
        let after = lab.engine.usage(&sandbox.id, &sandbox.runtime).await.unwrap();
        assert_eq!(before.cpu_us, after.cpu_us);
        assert!(after.memory_bytes > 1 << 20 && after.processes > 1, "{after:?}");

        lab.engine.thaw(&sandbox.id, &sandbox.runtime).await.unwrap();
        assert_eq!(talk.ask("echo again"), "again");
        lab.engine.destroy(&sandbox.id, Some(&sandbox.runtime)).await.unwrap();
        lab.engine.destroy(&sandbox.id, Some(&sandbox.runtime)).await.unwrap();
        assert_eq!(lab.remains(), Vec::<String>::new());
    }
}

/// Both directions saturated, generation after generation, from the pool and not: no byte is lost,
/// repeated or reordered.
#[tokio::test(flavor = "multi_thread")]
async fn a_resume_goes_on_where_the_pause_cut() {
    goes_on(true, 4).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_resume_goes_on_also_without_cgroups() {
    goes_on(false, 2).await;
}

/// Numbered lines of two kinds, each expected without a gap.
#[derive(Default)]
struct Numbered {
    flood: u64,
    echoed: u64,
}

impl Numbered {
    /// Returns a line that is of neither kind.
    fn read(&mut self, talk: &mut Talk) -> Option<String> {
        let line = talk.line();
        let (kind, number) = line.split_once(' ').unwrap_or((&line, ""));
        let counter = match kind {
            "flood" => &mut self.flood,
            "number" => &mut self.echoed,
            _ => return Some(line),
        };
        assert_eq!(number.parse(), Ok(*counter), "{line}");
        *counter += 1;
        None
    }

    fn ask(&mut self, talk: &mut Talk, question: &str) -> String {
        talk.send(question);
        loop {
            if let Some(line) = self.read(talk) {
                return line;
            }
        }
    }
}

async fn goes_on(cgroups: bool, rounds: u32) {
    let lab = Lab::with(cgroups).await;
    let mut sandbox = lab.boot().await;
    let mut talk = lab.talk(&sandbox);
    assert_eq!(talk.ask("fill 40"), "filled");
    assert_eq!(talk.ask("write /root/note kept"), "Ok(())");
    let (sum, count) = (talk.ask("sum"), talk.number("count"));
    talk.send("flood");
    let (mut seen, mut sent) = (Numbered::default(), 0_u64);
    for round in 0..rounds {
        for _ in 0..500 {
            talk.send(&format!("echo number {sent}"));
            sent += 1;
            assert_eq!(seen.read(&mut talk), None);
        }
        let image = lab.image(&format!("image{round}"));
        let after = if round % 2 == 0 { After::Stop } else { After::Hold };
        let captured = lab.engine.checkpoint(&sandbox.id, &sandbox.runtime, &image, after).await.unwrap();
        assert_whole(&image, &captured);
        if after == After::Hold {
            lab.engine.stop(&sandbox.id, &sandbox.runtime).await.unwrap();
        }
        for _ in 0..500 {
            talk.send(&format!("echo number {sent}"));
            sent += 1;
        }
        let next = Sandbox { id: sandbox.id.clone(), ..Sandbox::new() };
        let spec = lab.restore_spec(&sandbox, &next, &image, Session::Continue);
        assert_eq!(lab.engine.restore(spec).await.unwrap().session, Session::Continue);
        sandbox = next;
        while seen.echoed < sent {
            assert_eq!(seen.read(&mut talk), None);
        }
        lab.engine.prewarm(WarmSpec { rootfs: lab.rootfs(), shape: SHAPE, snapshot: None }, 1).await;
    }
    assert_eq!(seen.ask(&mut talk, "sum"), sum);
    assert_eq!(seen.ask(&mut talk, "read /root/note"), "kept");
    let now: u64 = seen.ask(&mut talk, "count").parse().unwrap();
    assert!(now >= count, "the counter began anew");
    lab.engine.shutdown().await;
    lab.engine.destroy(&sandbox.id, Some(&sandbox.runtime)).await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn copies_go_on_side_by_side_and_their_source_too() {
    let lab = Lab::new().await;
    let source = lab.boot().await;
    let mut talk = lab.talk(&source);
    assert_eq!(talk.ask("write /root/who source"), "Ok(())");
    let count = talk.number("count");
    let image = lab.image("image");
    let captured =
        lab.engine.checkpoint(&source.id, &source.runtime, &image, After::KeepRunning).await.unwrap();
    assert_whole(&image, &captured);
    let (a, b) = (Sandbox::new(), Sandbox::new());
    for copy in [&a, &b] {
        let spec = lab.restore_spec(&source, copy, &image, Session::New);
        assert_eq!(lab.engine.restore(spec).await.unwrap().session, Session::New);
    }
    let (mut talk_a, mut talk_b) = (lab.talk(&a), lab.talk(&b));
    assert!(talk_a.number("count") >= count);
    assert_eq!(talk_a.ask("write /root/who a"), "Ok(())");
    assert_eq!(talk_b.ask("read /root/who"), "source");
    assert_eq!(talk.ask("read /root/who"), "source");
    assert_eq!(talk_a.ask("read /root/who"), "a");
    assert!(!lab.rootfs().join("root/who").exists(), "the shared root file system was written to");
    for sandbox in [&a, &b, &source] {
        lab.engine.destroy(&sandbox.id, Some(&sandbox.runtime)).await.unwrap();
    }
    assert_eq!(lab.remains(), Vec::<String>::new());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_checkpoint_that_fails_leaves_the_sandbox_as_it_was() {
    let lab = Lab::new().await;
    let sandbox = lab.boot().await;
    let mut talk = lab.talk(&sandbox);
    let count = talk.number("count");
    for after in [After::Stop, After::Hold, After::KeepRunning] {
        // runsc refuses to write over a file.
        let image = lab.image(&format!("taken-{after:?}"));
        std::fs::write(image.join("checkpoint.img"), "taken").unwrap();
        let error = lab.engine.checkpoint(&sandbox.id, &sandbox.runtime, &image, after).await.unwrap_err();
        assert!(matches!(error.failure, Failure::Command { .. }), "{error}");
        assert!(talk.number("count") >= count);
        let adopted = lab.engine.adopt(&sandbox.id, Some(&sandbox.runtime)).await.unwrap();
        assert_eq!(adopted.runtime, RuntimeState::Running);
    }
    // A disk that is full is noticed before anything is touched.
    let small = lab.image("small");
    rustix::mount::mount("tmpfs", &small, "tmpfs", rustix::mount::MountFlags::empty(), Some(c"size=4m"))
        .unwrap();
    let full = lab.engine.checkpoint(&sandbox.id, &sandbox.runtime, &small, After::Stop).await.unwrap_err();
    let left = std::fs::read_dir(&small).unwrap().count();
    rustix::mount::unmount(&small, rustix::mount::UnmountFlags::DETACH).unwrap();
    assert!(matches!(full.failure, Failure::NoSpace { .. }), "{full}");
    assert_eq!(left, 0);
    assert!(talk.number("count") >= count);

    // Held, and let go on instead of stopped.
    let image = lab.image("held");
    lab.engine.checkpoint(&sandbox.id, &sandbox.runtime, &image, After::Hold).await.unwrap();
    let adopted = lab.engine.adopt(&sandbox.id, Some(&sandbox.runtime)).await.unwrap();
    assert_eq!(adopted.runtime, RuntimeState::Frozen);
    lab.engine.thaw(&sandbox.id, &sandbox.runtime).await.unwrap();
    assert!(talk.number("count") >= count);
    lab.engine.destroy(&sandbox.id, Some(&sandbox.runtime)).await.unwrap();
}

/// The daemon dies after it stopped the carrier for a checkpoint and before anything else was done.
#[tokio::test(flavor = "multi_thread")]
async fn a_carrier_that_was_stopped_moves_again_under_the_next_daemon() {
    use std::io::{Read as _, Write as _};
    let mut lab = Lab::new().await;
    let sandbox = lab.boot().await;
    let mut talk = lab.talk(&sandbox);
    assert_eq!(talk.ask("fill 1"), "filled");
    let sum = talk.ask("sum");
    let detach = serde_json::to_vec(&dormouse_wire::keeper::Request::Detach).unwrap();
    let socket = lab.engine.keeper_dir(&sandbox.id).join(dormouse_wire::keeper::CONTROL_SOCKET);
    let mut control = std::os::unix::net::UnixStream::connect(socket).unwrap();
    control.write_all(&u32::try_from(detach.len()).unwrap().to_le_bytes()).unwrap();
    control.write_all(&detach).unwrap();
    control.read_exact(&mut [0_u8; 4]).unwrap();
    drop(control);
    lab.reopen().await;
    let adopted = lab.engine.adopt(&sandbox.id, Some(&sandbox.runtime)).await.unwrap();
    assert_eq!((adopted.runtime, adopted.keeper), (RuntimeState::Running, true));
    assert_eq!(talk.ask("sum"), sum);
    lab.engine.destroy(&sandbox.id, Some(&sandbox.runtime)).await.unwrap();
}

/// The daemon dies while runsc writes the image: its successor finds a running sandbox.
#[tokio::test(flavor = "multi_thread")]
async fn a_daemon_that_dies_in_a_checkpoint_loses_nothing() {
    let mut lab = Lab::new().await;
    let sandbox = lab.boot().await;
    let mut talk = lab.talk(&sandbox);
    assert_eq!(talk.ask("fill 150"), "filled");
    let sum = talk.ask("sum");
    talk.send("flood");
    for expected in 0..100 {
        assert_eq!(talk.line(), format!("flood {expected}"));
    }
    let image = lab.image("image");
    let sealed = {
        let (engine, sandbox, into) = (lab.engine.clone(), sandbox.clone(), image.clone());
        let task = tokio::spawn(async move {
            engine.checkpoint(&sandbox.id, &sandbox.runtime, &into, After::Stop).await
        });
        while !image.join("pages.img").exists() {
            tokio::task::yield_now().await;
        }
        task.abort();
        task.await.is_err()
    };
    assert!(sealed, "the checkpoint ended before it could be cut");
    lab.reopen().await;
    let adopted = lab.engine.adopt(&sandbox.id, Some(&sandbox.runtime)).await.unwrap();
    assert_eq!((adopted.runtime, adopted.keeper), (RuntimeState::Running, true));
    talk.send("sum");
    let mut next = 100;
    let line = loop {
        let line = talk.line();
        if !line.starts_with("flood ") {
            break line;
        }
        assert_eq!(line, format!("flood {next}"));
        next += 1;
    };
    assert_eq!(line, sum);
    let keep = [(sandbox.id.clone(), Some(sandbox.runtime.clone()))];
    assert_eq!(lab.engine.sweep(&keep).await.unwrap(), Default::default());
    lab.engine.destroy(&sandbox.id, Some(&sandbox.runtime)).await.unwrap();
    assert_eq!(lab.remains(), Vec::<String>::new());
}

#[tokio::test(flavor = "multi_thread")]
async fn ends_are_noticed_with_their_reason() {
    let lab = Lab::new().await;
    let ended = lab.boot().await;
    lab.talk(&ended).send("exit 3");
    let exit = lab.engine.exited(&ended.id, &ended.runtime).await;
    assert!(matches!(&exit, Exit::Runtime { why } if why.contains("init process")), "{exit:?}");
    let adopted = lab.engine.adopt(&ended.id, Some(&ended.runtime)).await.unwrap();
    assert_eq!(adopted.runtime, RuntimeState::Gone);
    let image = lab.image("image");
    let error = lab.engine.checkpoint(&ended.id, &ended.runtime, &image, After::Stop).await.unwrap_err();
    assert!(matches!(error.failure, Failure::Exited { .. }), "{error}");

    if lab.engine.cgroups().is_some() {
        let greedy = lab.boot().await;
        lab.talk(&greedy).send("fill 1500");
        let exit = lab.engine.exited(&greedy.id, &greedy.runtime).await;
        assert!(matches!(&exit, Exit::Runtime { why } if why.contains("256 MiB")), "{exit:?}");
    }

    let mut spec = lab.boot_spec(&Sandbox::new());
    spec.shape.disk_mib = 64;
    let writer = Sandbox { id: spec.sandbox.clone(), runtime: spec.runtime.clone() };
    lab.engine.boot(spec).await.unwrap();
    assert_eq!(lab.talk(&writer).ask("grow /root/big 100"), "Ok(())");
    let exit = lab.engine.exited(&writer.id, &writer.runtime).await;
    assert!(matches!(&exit, Exit::Runtime { why } if why.contains("64 MiB on disk")), "{exit:?}");

    let orphan = lab.boot().await;
    let status = lab.engine.keeper_status(&orphan.id).await.unwrap();
    assert_eq!(status.generation.0, 1);
    let keeper = std::fs::read(lab.engine.keeper_dir(&orphan.id).join("keeper.json")).unwrap();
    let (pid, _): (u32, u64) = serde_json::from_slice(&keeper).unwrap();
    dormouse_sys::process::PidFd::open(pid).unwrap().kill().unwrap();
    let exit = lab.engine.exited(&orphan.id, &orphan.runtime).await;
    assert!(matches!(exit, Exit::Keeper { .. }), "{exit:?}");

    // Another keeper takes over at once.
    let (rules, generation) = (EgressRules::default(), Generation(2));
    for _ in 0..2 {
        lab.engine.replace_keeper(&orphan.id, &orphan.runtime, generation, &rules).await.unwrap();
    }
    assert_eq!(lab.engine.keeper_status(&orphan.id).await.unwrap().generation, generation);
    assert_eq!(lab.talk(&orphan).ask("echo over"), "over");

    // Without one, a checkpoint and a restore do it as well, and the new session says so.
    let keeper = std::fs::read(lab.engine.keeper_dir(&orphan.id).join("keeper.json")).unwrap();
    let (pid, _): (u32, u64) = serde_json::from_slice(&keeper).unwrap();
    dormouse_sys::process::PidFd::open(pid).unwrap().kill().unwrap();
    let image = lab.image("again");
    lab.engine.checkpoint(&orphan.id, &orphan.runtime, &image, After::Stop).await.unwrap();
    let next = Sandbox { id: orphan.id.clone(), ..Sandbox::new() };
    let spec = lab.restore_spec(&orphan, &next, &image, Session::Continue);
    assert_eq!(lab.engine.restore(spec).await.unwrap().session, Session::New);
    assert_eq!(lab.talk(&next).ask("echo back"), "back");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_new_daemon_finds_its_sandboxes_and_sweeps_the_rest() {
    let mut lab = Lab::new().await;
    let (kept, lost) = (lab.boot().await, lab.boot().await);
    lab.engine.prewarm(WarmSpec { rootfs: lab.rootfs(), shape: SHAPE, snapshot: None }, 1).await;
    let runs = lab.dir.path().join("gvisor/run");
    let is_made = |run: &std::fs::DirEntry| {
        let meta = std::fs::read_to_string(run.path().join("meta.json")).unwrap_or_default();
        meta.contains("\"processes\":{")
    };
    while std::fs::read_dir(&runs).unwrap().flatten().filter(is_made).count() < 3 {
        tokio::task::yield_now().await;
    }
    lab.reopen().await;
    let adopted = lab.engine.adopt(&kept.id, Some(&kept.runtime)).await.unwrap();
    assert_eq!((adopted.runtime, adopted.keeper), (RuntimeState::Running, true));
    let keep = [(kept.id.clone(), Some(kept.runtime.clone()))];
    let swept = lab.engine.sweep(&keep).await.unwrap();
    assert_eq!(swept.keepers, vec![lost.id.to_string()]);
    assert_eq!(swept.runtimes.len(), 2, "a lost sandbox and a pool member: {swept:?}");
    assert_eq!(lab.talk(&kept).ask("echo alive"), "alive");
    assert_eq!(lab.engine.sweep(&keep).await.unwrap(), Default::default());
    lab.engine.destroy(&kept.id, Some(&kept.runtime)).await.unwrap();
    assert_eq!(lab.remains(), Vec::<String>::new());
}

#[tokio::test(flavor = "multi_thread")]
async fn what_cannot_be_restored_is_refused_before_anything_is_touched() {
    let lab = Lab::new().await;
    let sandbox = Sandbox::new();
    let image = lab.image("image");
    let mut spec = lab.restore_spec(&sandbox, &sandbox, &image, Session::New);
    let error = lab.engine.restore(spec.clone()).await.unwrap_err();
    assert!(matches!(error.failure, Failure::Damaged { .. }), "{error}");
    spec.manifest.compat.cpu_features.push("avx4096".to_owned());
    let error = lab.engine.can_restore(&spec.manifest).unwrap_err();
    assert!(error.to_string().contains("avx4096"), "{error}");
    let error = lab.engine.restore(spec).await.unwrap_err();
    assert!(matches!(error.failure, Failure::Incompatible { .. }), "{error}");
    let mut older = lab.manifest(&sandbox);
    older.compat.engine_version = "runsc 0.0~20210101".to_owned();
    assert!(lab.engine.can_restore(&older).is_err());
    let mut other = lab.manifest(&sandbox);
    other.compat.agent_digest = "../../etc".to_owned();
    assert!(lab.engine.can_restore(&other).is_err());
    assert_eq!(lab.remains(), Vec::<String>::new());
}

/// A damaged image is an error, and what was begun for it is gone.
#[tokio::test(flavor = "multi_thread")]
async fn a_restore_that_fails_leaves_nothing_but_the_keeper() {
    let lab = Lab::new().await;
    let sandbox = lab.boot().await;
    let image = lab.image("image");
    lab.engine.checkpoint(&sandbox.id, &sandbox.runtime, &image, After::Stop).await.unwrap();
    let bytes = std::fs::read(image.join("checkpoint.img")).unwrap();
    std::fs::write(image.join("checkpoint.img"), &bytes[..bytes.len() / 2]).unwrap();
    let next = Sandbox { id: sandbox.id.clone(), ..Sandbox::new() };
    let spec = lab.restore_spec(&sandbox, &next, &image, Session::Continue);
    let error = lab.engine.restore(spec).await.unwrap_err();
    assert!(matches!(error.failure, Failure::Command { .. }), "{error}");
    let adopted = lab.engine.adopt(&sandbox.id, Some(&next.runtime)).await.unwrap();
    assert_eq!((adopted.runtime, adopted.keeper), (RuntimeState::Gone, true));

    // Once it is mended, the same keeper goes on.
    std::fs::write(image.join("checkpoint.img"), &bytes).unwrap();
    let again = Sandbox { id: sandbox.id.clone(), ..Sandbox::new() };
    let spec = lab.restore_spec(&sandbox, &again, &image, Session::Continue);
    assert_eq!(lab.engine.restore(spec).await.unwrap().session, Session::Continue);
    assert_eq!(lab.talk(&again).ask("echo back"), "back");
    lab.engine.destroy(&sandbox.id, Some(&again.runtime)).await.unwrap();
    assert_eq!(lab.remains(), Vec::<String>::new());
}
