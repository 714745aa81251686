//! The driver against monitors and keepers that only speak: what it leaves, finds again and says. Real ones
//! are tested in the lab.

mod fake;

use std::path::Path;
use std::time::Duration;

use dormouse_snapshot::{FileDigest, FileEntry, Reason};
use dormouse_sys::process::{self, Identity};
use dormouse_types::{Shape, SnapshotId, TemplateId};
use dormouse_vmm::control::{ErrorCode, ExitReason, State};

use super::*;
use fake::Fake;

const SHAPE: Shape = Shape { cpus: 1, memory_mib: 128, disk_mib: 64, processes_max: 100 };

struct Host {
    dir: tempfile::TempDir,
    engine: Microvm,
    fake: Fake,
}

/// Whatever a failed test leaves is ended with it.
impl Drop for Host {
    fn drop(&mut self) {
        sweep::sweep(&self.engine.0, &[]);
        self.fake.stop();
        for mount in self.engine.0.hierarchies.all() {
            let _ = std::fs::remove_dir(mount.join(self.engine.group_parent()));
        }
    }
}

fn sleeper() -> Vec<OsString> {
    ["sh", "-c", "exec sleep 600"].map(OsString::from).into()
}

fn over(dir: &Path) -> Microvm {
    Microvm::over(MicrovmConfig {
        data_dir: dir.to_owned(),
        agent: AgentFile { version: "1".to_owned(), digest: "abc".to_owned() },
        keeper: sleeper(),
        monitor: sleeper(),
        users: Some(MonitorUsers::default()),
        cgroups: true,
        network: true,
        lazy_restore: false,
    })
    .unwrap()
}

fn host() -> Host {
    let dir = tempfile::tempdir().unwrap();
    let rootfs = dir.path().join("images/debian/rootfs");
    std::fs::create_dir_all(rootfs.join("etc")).unwrap();
    std::fs::write(rootfs.join("etc/hostname"), "x").unwrap();
    std::fs::create_dir_all(dir.path().join("guest")).unwrap();
    for name in ["vmlinux", "initramfs.cpio"] {
        std::fs::write(dir.path().join("guest").join(name), name).unwrap();
    }
    let engine = over(dir.path());
    let fake = Fake::start(engine.0.layout.clone());
    Host { dir, engine, fake }
}

struct Ids {
    sandbox: SandboxId,
    runtime: RuntimeId,
}

impl Ids {
    fn new() -> Self {
        Self { sandbox: SandboxId::generate(), runtime: RuntimeId::generate() }
    }

    fn kept(&self) -> [(SandboxId, Option<RuntimeId>); 1] {
        [(self.sandbox.clone(), Some(self.runtime.clone()))]
    }

    fn child(&self) -> ForkChild {
        ForkChild {
            sandbox: self.sandbox.clone(),
            runtime: self.runtime.clone(),
            generation: Generation(2),
            hostname: "child".to_owned(),
            egress: EgressRules::default(),
        }
    }
}

impl Host {
    async fn boot(&self, ids: &Ids) -> Result<(), EngineError> {
        let spec = BootSpec {
            sandbox: ids.sandbox.clone(),
            runtime: ids.runtime.clone(),
            generation: Generation(1),
            rootfs: self.dir.path().join("images/debian/rootfs"),
            shape: SHAPE,
            hostname: "h".to_owned(),
            egress: EgressRules::default(),
        };
        self.engine.boot(spec).await
    }

    async fn booted(&self) -> Ids {
        let ids = Ids::new();
        self.boot(&ids).await.unwrap();
        ids
    }

    fn runtime(&self, ids: &Ids) -> Runtime {
        self.engine.0.runtime(&ids.runtime)
    }

    fn identity(&self, ids: &Ids) -> Identity {
        self.runtime(ids).meta().unwrap().process.unwrap().0
    }

    fn folder(&self, name: &str) -> PathBuf {
        let path = self.dir.path().join(name);
        std::fs::create_dir_all(&path).unwrap();
        path
    }

    fn guest(&self, ids: &Ids) -> Option<State> {
        self.fake.world().guests.get(&self.runtime(ids).dir).copied()
    }

    async fn snapshot(&self, ids: &Ids) -> (PathBuf, Manifest) {
        let into = self.folder("snapshots/one");
        let captured =
            self.engine.checkpoint(&ids.sandbox, &ids.runtime, &into, After::KeepRunning).await.unwrap();
        let entry = |file: &crate::CapturedFile| FileEntry {
            name: file.name.clone(),
            role: file.role,
            bytes: 0,
            digest: Some(FileDigest::Sparse([0; 32])),
        };
        let manifest = Manifest {
            id: SnapshotId::generate(),
            parent: None,
            sandbox: ids.sandbox.clone(),
            runtime: ids.runtime.clone(),
            template: TemplateId::generate(),
            engine: EngineKind::Microvm,
            generation: Generation(1),
            reason: Reason::Checkpoint,
            created_at_ms: 0,
            expires_at_ms: None,
            shape: SHAPE,
            rootfs: "debian".to_owned(),
            memory: true,
            names: Vec::new(),
            labels: std::collections::BTreeMap::new(),
            compat: self.engine.compat(),
            files: captured.files.iter().map(entry).collect(),
        };
        (into, manifest)
    }

    fn restore_spec(&self, ids: &Ids, snapshot: &(PathBuf, Manifest), session: Session) -> RestoreSpec {
        RestoreSpec {
            sandbox: ids.sandbox.clone(),
            runtime: ids.runtime.clone(),
            generation: Generation(2),
            rootfs: self.dir.path().join("images/debian/rootfs"),
            snapshot_dir: snapshot.0.clone(),
            manifest: snapshot.1.clone(),
            shape: SHAPE,
            hostname: "h".to_owned(),
            egress: EgressRules::default(),
            session,
        }
    }

    /// Once it is made.
    async fn zygote(&self, snapshot: &Path) -> Runtime {
        for _ in 0..1000 {
            if let Some(zygote) = self.engine.0.zygotes.ready(snapshot) {
                return zygote;
            }
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        panic!("no zygote was made");
    }

    fn assert_nothing_of(&self, ids: &Ids, what: &str) {
        let runtime = self.runtime(ids);
        assert!(!runtime.exists(), "{what}: its folder is left");
        assert!(runtime.group.is_none_or(|group| !group.exists()), "{what}: its group is left");
        let dir = runtime.dir.to_string_lossy().into_owned();
        let named = |pid: &u32| process::arguments(*pid).contains(&dir);
        assert!(!process::pids().iter().any(named), "{what}: its monitor is left");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn without_guest_files_the_set_up_is_named() {
    let host = host();
    std::fs::remove_file(host.dir.path().join("guest/vmlinux")).unwrap();
    let ids = Ids::new();
    let error = host.boot(&ids).await.unwrap_err();
    assert!(matches!(error.failure, Failure::Missing { .. }), "{error}");
    assert!(error.to_string().contains("dormouse setup --engine microvm"), "{error}");
    host.assert_nothing_of(&ids, "no kernel");
    std::fs::write(host.dir.path().join("guest/bzImage"), "").unwrap();
    host.boot(&ids).await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_life_from_boot_to_sweep() {
    let host = host();
    let ids = host.booted().await;
    let (engine, sandbox, runtime) = (&host.engine, &ids.sandbox, &ids.runtime);
    assert_eq!(host.guest(&ids), Some(State::Running));
    assert_eq!(engine.usage(sandbox, runtime).await.unwrap().processes, 1);
    for _ in 0..2 {
        engine.freeze(sandbox, runtime).await.unwrap();
    }
    assert_eq!(host.guest(&ids), Some(State::Paused));
    let adopted = over(host.dir.path()).adopt(sandbox, Some(runtime)).await.unwrap();
    assert_eq!(adopted, Adopted { runtime: RuntimeState::Frozen, keeper: true });
    for _ in 0..2 {
        engine.thaw(sandbox, runtime).await.unwrap();
    }
    let adopted = over(host.dir.path()).adopt(sandbox, Some(runtime)).await.unwrap();
    assert_eq!(adopted.runtime, RuntimeState::Running);
    assert_eq!(engine.sweep(&ids.kept()).await.unwrap(), Swept::default());
    let monitor = host.identity(&ids);
    let swept = engine.sweep(&[]).await.unwrap();
    assert_eq!((swept.runtimes, swept.keepers), (vec![runtime.to_string()], vec![sandbox.to_string()]));
    assert!(!monitor.is_alive());
    host.assert_nothing_of(&ids, "swept");
    let gone = engine.adopt(sandbox, Some(runtime)).await.unwrap();
    assert_eq!(gone, Adopted { runtime: RuntimeState::Gone, keeper: false });
    engine.stop(sandbox, runtime).await.unwrap();
    engine.destroy(sandbox, Some(runtime)).await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_disk_goes_with_its_root_file_system() {
    let host = host();
    let ids = host.booted().await;
    let disk = host.engine.0.layout.disks().join("debian-64.ext4");
    assert!(disk.is_file());
    std::fs::remove_dir_all(host.dir.path().join("images/debian")).unwrap();
    let swept = host.engine.sweep(&ids.kept()).await.unwrap();
    assert_eq!(swept.leftovers, ["disk debian-64.ext4"]);
    assert!(!disk.exists());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_boot_that_fails_leaves_nothing() {
    let host = host();
    let ids = Ids::new();
    host.fake.fail("boot", ErrorCode::Host, "cannot make the VM");
    let error = host.boot(&ids).await.unwrap_err();
    assert!(error.to_string().contains("cannot make the VM"), "{error}");
    host.assert_nothing_of(&ids, "refused");

    // Where nobody speaks in its place.
    let dir = tempfile::tempdir().unwrap();
    let meta_path = dir.path().join("meta.json");
    let runtime =
        Runtime { id: ids.runtime.clone(), dir: dir.path().join("runtime"), meta_path, group: None };
    runtime.create(&host.runtime(&host.booted().await).meta().unwrap()).unwrap();
    let failure = runtime.start(&[OsString::from("false")], 1).unwrap_err();
    assert!(matches!(failure, Failure::Monitor { .. }), "{failure}");
}

#[tokio::test(flavor = "multi_thread")]
async fn an_end_is_told_with_its_reason() {
    let host = host();
    let ids = host.booted().await;
    let dir = host.runtime(&ids).dir;
    let exit = dormouse_vmm::control::Exit {
        reason: ExitReason::GuestReset,
        message: "the guest asked for a reset".to_owned(),
    };
    std::fs::write(dir.join("exit.json"), serde_json::to_vec(&exit).unwrap()).unwrap();
    std::fs::write(dir.join("serial.log"), "booting\nKernel panic - not syncing\n\n").unwrap();
    let watching = {
        let (engine, sandbox, runtime) = (host.engine.clone(), ids.sandbox.clone(), ids.runtime.clone());
        tokio::spawn(async move { engine.exited(&sandbox, &runtime).await })
    };
    host.identity(&ids).open().unwrap().kill().unwrap();
    let Exit::Runtime { why } = watching.await.unwrap() else { panic!("the keeper lives") };
    assert!(why.contains("asked for a reset") && why.contains("Kernel panic"), "{why}");
    let error = host.engine.freeze(&ids.sandbox, &ids.runtime).await.unwrap_err();
    assert!(matches!(error.failure, Failure::Exited { .. }), "{error}");
    let adopted = host.engine.adopt(&ids.sandbox, Some(&ids.runtime)).await.unwrap();
    assert_eq!(adopted.runtime, RuntimeState::Gone);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_keeper_that_ends_is_replaced_under_the_guest() {
    let host = host();
    let ids = host.booted().await;
    let keeper = host.engine.0.keeper(&ids.sandbox);
    keeper.process().unwrap().kill().unwrap();
    let exit = host.engine.exited(&ids.sandbox, &ids.runtime).await;
    assert!(matches!(exit, Exit::Keeper { .. }), "{exit:?}");
    std::fs::remove_file(keeper.dir.join("control.sock")).unwrap();
    let rules = EgressRules::default();
    host.engine.replace_keeper(&ids.sandbox, &ids.runtime, Generation(2), &rules).await.unwrap();
    assert!(host.fake.was_asked("carrier"));
    assert!(keeper.process().is_some());
    assert_eq!(host.guest(&ids), Some(State::Running));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_held_checkpoint_can_be_gone_on_from() {
    let host = host();
    let ids = host.booted().await;
    let (engine, sandbox, runtime) = (&host.engine, &ids.sandbox, &ids.runtime);
    host.fake.fail("checkpoint_hold", ErrorCode::Host, "cannot write: No space left on device");
    let into = host.folder("full");
    let error = engine.checkpoint(sandbox, runtime, &into, After::Hold).await.unwrap_err();
    assert!(matches!(error.failure, Failure::NoSpace { .. }), "{error}");
    assert!(host.fake.was_asked("keeper Reattach"));
    assert_eq!(host.guest(&ids), Some(State::Running));

    let captured = engine.checkpoint(sandbox, runtime, &host.folder("held"), After::Hold).await.unwrap();
    assert_eq!(captured.stopped, Duration::from_micros(700));
    let names: Vec<&str> = captured.files.iter().map(|file| file.name.as_str()).collect();
    assert_eq!(names, ["devices", "memory.0", "disk.0.0", "machine.json"]);
    // Found so by the next daemon, which lets it go on.
    let next = over(host.dir.path());
    assert_eq!(next.adopt(sandbox, Some(runtime)).await.unwrap().runtime, RuntimeState::Frozen);
    host.fake.world().asked.clear();
    next.thaw(sandbox, runtime).await.unwrap();
    assert!(host.fake.was_asked("keeper Reattach"));
    assert_eq!(host.guest(&ids), Some(State::Running));

    engine.checkpoint(sandbox, runtime, &host.folder("stopped"), After::Stop).await.unwrap();
    host.assert_nothing_of(&ids, "stopped");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_restored_sandbox_needs_its_snapshot_no_more() {
    let host = host();
    let source = host.booted().await;
    let snapshot = host.snapshot(&source).await;
    let ids = Ids::new();
    let restored = host.engine.restore(host.restore_spec(&ids, &snapshot, Session::Continue)).await.unwrap();
    // Its keeper was new.
    assert_eq!((restored.session, restored.from_pool), (Session::New, false));
    assert_eq!(host.guest(&ids), Some(State::Running));
    std::fs::remove_dir_all(&snapshot.0).unwrap();
    assert_eq!(std::fs::read(host.runtime(&ids).dir.join("from/memory.0")).unwrap(), b"memory.0");
}

#[tokio::test(flavor = "multi_thread")]
async fn what_a_restore_touched_first_is_the_snapshots() {
    let host = host();
    let source = host.booted().await;
    let (snapshot, _) = host.snapshot(&source).await;
    let runtime = host.runtime(&source);
    runtime.give_working_set(&snapshot).unwrap();
    assert!(!snapshot.join("working-set").exists(), "it is not known yet");
    std::fs::write(runtime.dir.join("working-set"), "first").unwrap();
    runtime.give_working_set(&snapshot).unwrap();
    std::fs::write(runtime.dir.join("other"), "second").unwrap();
    std::fs::rename(runtime.dir.join("other"), runtime.dir.join("working-set")).unwrap();
    runtime.give_working_set(&snapshot).unwrap();
    assert_eq!(std::fs::read(snapshot.join("working-set")).unwrap(), b"first");
    runtime.link_working_set(&snapshot, &runtime.dir.join("nowhere"));
    let from = host.folder("from");
    runtime.link_working_set(&snapshot, &from);
    assert_eq!(std::fs::read(from.join("working-set")).unwrap(), b"first");
}

#[tokio::test(flavor = "multi_thread")]
async fn what_does_not_fit_is_refused_before_anything_is_made() {
    let host = host();
    let (path, manifest) = host.snapshot(&host.booted().await).await;
    let ids = Ids::new();
    let refused = async |spec: RestoreSpec| {
        let error = host.engine.restore(spec).await.unwrap_err();
        host.assert_nothing_of(&ids, "refused");
        error
    };
    let spec = host.restore_spec(&ids, &(path.clone(), manifest.clone()), Session::New);
    let larger = RestoreSpec { shape: Shape { memory_mib: 256, ..SHAPE }, ..spec.clone() };
    let error = refused(larger).await;
    assert!(matches!(error.failure, Failure::Unsupported { .. }), "{error}");

    for (compat, needs) in [
        (Compat { engine_version: "microvm state 99".to_owned(), ..manifest.compat.clone() }, "state 99"),
        (Compat { cpu_features: vec!["avx99".to_owned()], ..manifest.compat.clone() }, "avx99"),
        (Compat { platform: "kvm Other".to_owned(), ..manifest.compat.clone() }, "kvm Other"),
    ] {
        let manifest = Manifest { compat, ..manifest.clone() };
        let error = host.engine.can_restore(&manifest).unwrap_err();
        assert!(error.to_string().contains(needs), "{error}");
        let error = refused(RestoreSpec { manifest, ..spec.clone() }).await;
        assert!(matches!(error.failure, Failure::Incompatible { .. }), "{error}");
    }

    std::fs::remove_file(path.join("memory.0")).unwrap();
    let error = refused(spec.clone()).await;
    assert!(matches!(error.failure, Failure::Damaged { ref file, .. } if file == "memory.0"), "{error}");
    std::fs::write(path.join("memory.0"), "").unwrap();
    let disk = host.engine.0.layout.disks().join("debian-64.ext4");
    std::fs::write(&disk, vec![0; 4096]).unwrap();
    let error = refused(spec.clone()).await;
    assert!(matches!(error.failure, Failure::Incompatible { .. }), "{error}");
    std::fs::remove_file(disk).unwrap();
    let error = refused(spec).await;
    assert!(matches!(error.failure, Failure::Missing { .. }), "{error}");
}

#[tokio::test(flavor = "multi_thread")]
async fn copies_live_or_leave_nothing() {
    let host = host();
    let source = host.booted().await;
    let children: Vec<Ids> = (0..3).map(|_| Ids::new()).collect();
    let asked = || children.iter().map(Ids::child).collect::<Vec<_>>();
    host.fake.fail("fork", ErrorCode::Host, "fork(2): Resource temporarily unavailable");
    let error = host.engine.fork(&source.sandbox, &source.runtime, asked()).await.unwrap_err();
    assert!(error.to_string().contains("temporarily"), "{error}");
    for child in &children {
        host.assert_nothing_of(child, "the fork failed");
    }
    host.fake.fail("resume", ErrorCode::Host, "no vCPU");
    let forked = host.engine.fork(&source.sandbox, &source.runtime, asked()).await.unwrap();
    assert_eq!(forked.stopped, Duration::from_micros(1500));
    let lived: Vec<bool> = forked.children.iter().map(Result::is_ok).collect();
    assert_eq!(lived.iter().filter(|lived| **lived).count(), 2);
    for (child, lived) in children.iter().zip(lived) {
        if lived {
            assert_eq!(host.guest(child), Some(State::Running));
            assert!(host.identity(child).is_alive());
            let adopted = host.engine.adopt(&child.sandbox, Some(&child.runtime)).await.unwrap();
            assert_eq!(adopted, Adopted { runtime: RuntimeState::Running, keeper: true });
        } else {
            host.assert_nothing_of(child, "its guest did not start");
        }
    }
    assert_eq!(host.guest(&source), Some(State::Running));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_child_that_was_cut_off_is_swept() {
    let host = host();
    let source = host.booted().await;
    let child = Ids::new();
    // As a daemon leaves it that dies between the fork and the child's first step.
    let runtime = host.runtime(&child);
    runtime.create(&Meta { process: None, started: false, ..host.runtime(&source).meta().unwrap() }).unwrap();
    let adopted = host.engine.adopt(&child.sandbox, Some(&child.runtime)).await.unwrap();
    assert_eq!(adopted.runtime, RuntimeState::Gone);
    let swept = host.engine.sweep(&source.kept()).await.unwrap();
    assert_eq!(swept.runtimes, [child.runtime.to_string()]);
    assert!(host.identity(&source).is_alive());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_zygote_makes_sandboxes_until_it_cannot() {
    let host = host();
    let snapshot = host.snapshot(&host.booted().await).await;
    let warm = WarmSpec {
        rootfs: host.dir.path().join("images/debian/rootfs"),
        shape: SHAPE,
        snapshot: Some(snapshot.0.clone()),
    };
    host.engine.prewarm(warm.clone(), 1).await;
    let zygote = host.zygote(&snapshot.0).await;
    for _ in 0..2 {
        let ids = Ids::new();
        let restored = host.engine.restore(host.restore_spec(&ids, &snapshot, Session::New)).await.unwrap();
        assert!(restored.from_pool);
        assert_eq!(host.guest(&ids), Some(State::Running));
    }
    assert_eq!(host.fake.world().guests.get(&zygote.dir), Some(&State::Paused));
    // One that cannot is given up, and the sandbox starts all the same.
    host.fake.fail("fork", ErrorCode::Host, "no more processes");
    let ids = Ids::new();
    let restored = host.engine.restore(host.restore_spec(&ids, &snapshot, Session::New)).await.unwrap();
    assert!(!restored.from_pool && !zygote.exists());
    // A zygote of a daemon that died is nobody's.
    host.engine.prewarm(warm, 1).await;
    let zygote = host.zygote(&snapshot.0).await;
    let swept = over(host.dir.path()).sweep(&ids.kept()).await.unwrap();
    assert!(swept.runtimes.contains(&zygote.id.to_string()), "{swept:?}");
}
