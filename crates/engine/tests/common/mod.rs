//! An engine in a folder of its own, sandboxes with the probe as their init process, and the proof
//! that nothing of them is left.

#![allow(clippy::unwrap_used, reason = "a test's helper fails as its test does")]

use std::collections::BTreeSet;
use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::Duration;

use dormouse_engine::AgentFile;
use dormouse_engine::gvisor::{Gvisor, GvisorConfig};
use dormouse_engine::{BootSpec, Captured, Engine, RestoreSpec};
use dormouse_snapshot::{Manifest, Reason};
use dormouse_types::{EngineKind, Generation, RuntimeId, SandboxId, Shape, SnapshotId, TemplateId};
use dormouse_wire::keeper::{AGENT_SOCKET, EgressRules, Session};
use tempfile::TempDir;

const PROBE: &str = env!("CARGO_BIN_EXE_dormouse-engine-probe");
const DIGEST: &str = "0123abcd";

pub struct Lab {
    pub dir: TempDir,
    pub engine: Gvisor,
    pub cgroups: bool,
}

#[derive(Clone)]
pub struct Sandbox {
    pub id: SandboxId,
    pub runtime: RuntimeId,
}

impl Sandbox {
    pub fn new() -> Self {
        Self { id: SandboxId::generate(), runtime: RuntimeId::generate() }
    }
}

pub const SHAPE: Shape = Shape { cpus: 1, memory_mib: 256, disk_mib: 1024, processes_max: 64 };

impl Lab {
    pub async fn new() -> Self {
        Self::with(true).await
    }

    pub async fn with(cgroups: bool) -> Self {
        let dir = tempfile::Builder::new().prefix("dormouse-engine-").tempdir().unwrap();
        let agent = dir.path().join("agent").join(DIGEST);
        std::fs::create_dir_all(&agent).unwrap();
        std::fs::copy(PROBE, agent.join("agent")).unwrap();
        make_rootfs(&dir.path().join("rootfs"));
        let engine = open(dir.path(), cgroups).await;
        Self { dir, engine, cgroups }
    }

    /// As a daemon that was killed and started again.
    pub async fn reopen(&mut self) {
        self.engine = open(self.dir.path(), self.cgroups).await;
    }

    pub fn rootfs(&self) -> PathBuf {
        self.dir.path().join("rootfs")
    }

    pub fn boot_spec(&self, sandbox: &Sandbox) -> BootSpec {
        BootSpec {
            sandbox: sandbox.id.clone(),
            runtime: sandbox.runtime.clone(),
            generation: Generation(1),
            rootfs: self.rootfs(),
            shape: SHAPE,
            hostname: "box".to_owned(),
            egress: EgressRules::default(),
        }
    }

    pub async fn boot(&self) -> Sandbox {
        let sandbox = Sandbox::new();
        self.engine.boot(self.boot_spec(&sandbox)).await.unwrap();
        sandbox
    }

    pub fn image(&self, name: &str) -> PathBuf {
        let image = self.dir.path().join(name);
        std::fs::create_dir_all(&image).unwrap();
        image
    }

    /// What a restore of `image` as `to` is asked with.
    pub fn restore_spec(&self, from: &Sandbox, to: &Sandbox, image: &Path, session: Session) -> RestoreSpec {
        RestoreSpec {
            sandbox: to.id.clone(),
            runtime: to.runtime.clone(),
            generation: Generation(2),
            rootfs: self.rootfs(),
            snapshot_dir: image.to_owned(),
            manifest: self.manifest(from),
            shape: SHAPE,
            hostname: "box".to_owned(),
            egress: EgressRules::default(),
            session,
        }
    }

    pub fn manifest(&self, of: &Sandbox) -> Manifest {
        Manifest {
            id: SnapshotId::generate(),
            parent: None,
            sandbox: of.id.clone(),
            runtime: of.runtime.clone(),
            template: TemplateId::generate(),
            engine: EngineKind::Gvisor,
            generation: Generation(1),
            reason: Reason::Pause,
            created_at_ms: 0,
            expires_at_ms: None,
            shape: SHAPE,
            rootfs: "rootfs".to_owned(),
            memory: true,
            names: Vec::new(),
            labels: Default::default(),
            compat: self.engine.compat(),
            files: Vec::new(),
        }
    }

    pub fn talk(&self, sandbox: &Sandbox) -> Talk {
        let dir = self.engine.keeper_dir(&sandbox.id);
        let stream = dormouse_sys::unix::connect(&dir, AGENT_SOCKET).unwrap();
        stream.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
        Talk { lines: BufReader::new(stream.try_clone().unwrap()), stream }
    }

    /// Processes, groups, folders: whatever names this lab's folder.
    pub fn remains(&self) -> Vec<String> {
        let dir = self.dir.path().to_string_lossy().into_owned();
        let mut found: Vec<String> = dormouse_sys::process::pids()
            .into_iter()
            .filter(|pid| {
                dormouse_sys::process::arguments(*pid).iter().any(|argument| argument.contains(&dir))
            })
            // One that has ended and was not reaped yet has no arguments and is not found.
            .map(|pid| format!("process {pid}: {:?}", dormouse_sys::process::arguments(pid)))
            .collect();
        for folder in ["gvisor/run", "gvisor/runtimes", "gvisor/files", "run"] {
            let entries = std::fs::read_dir(self.dir.path().join(folder)).unwrap();
            found.extend(entries.map(|entry| entry.unwrap().path().display().to_string()));
        }
        found
    }
}

const SWEEPS_MAX: u32 = 50;

fn is_named_by_a_process(dir: &str) -> bool {
    let names = |pid: &u32| dormouse_sys::process::arguments(*pid).iter().any(|word| word.contains(dir));
    dormouse_sys::process::pids().iter().any(names)
}

/// Whatever a failed test leaves is ended with it.
impl Drop for Lab {
    fn drop(&mut self) {
        let engine = self.engine.clone();
        let dir = self.dir.path().display().to_string();
        let swept = std::thread::spawn(move || {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
            runtime.block_on(async {
                engine.shutdown().await;
                // The pool may have been filling: what it was making appears after a first sweep.
                for _ in 0..SWEEPS_MAX {
                    engine.sweep(&[]).await?;
                    if !is_named_by_a_process(&dir) {
                        break;
                    }
                    tokio::time::sleep(Duration::from_millis(100)).await;
                }
                Ok::<_, dormouse_engine::EngineError>(())
            })
        });
        if let Err(error) = swept.join().unwrap() {
            eprintln!("the lab could not be swept: {error}");
        }
        for parent in dormouse_sys::cgroup::Hierarchies::detect().unwrap().all() {
            let _ = std::fs::remove_dir(parent.join(self.engine.group_parent()));
        }
    }
}

async fn open(dir: &Path, cgroups: bool) -> Gvisor {
    let config = GvisorConfig {
        data_dir: dir.to_owned(),
        agent: AgentFile { version: "probe".to_owned(), digest: DIGEST.to_owned() },
        keeper: vec![PROBE.into(), "keeper".into()],
        runsc: None,
        cgroups,
    };
    // Integration tests need the real thing: without root or runsc this fails, and says what to do.
    Gvisor::open(config).await.unwrap()
}

/// What the probe is linked with, and nothing else: the files that this very process has mapped.
fn make_rootfs(rootfs: &Path) {
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
    let libraries: BTreeSet<&str> = maps
        .lines()
        .filter_map(|line| line.split_ascii_whitespace().nth(5))
        .filter(|path| path.contains(".so"))
        .collect();
    for library in libraries {
        let to = rootfs.join(library.trim_start_matches('/'));
        std::fs::create_dir_all(to.parent().unwrap()).unwrap();
        std::fs::copy(library, to).unwrap();
    }
    // The loader's own name is written into the probe.
    let loader = Path::new("/lib64/ld-linux-x86-64.so.2");
    let to = rootfs.join("lib64/ld-linux-x86-64.so.2");
    std::fs::create_dir_all(to.parent().unwrap()).unwrap();
    std::fs::copy(loader, to).unwrap();
    std::fs::create_dir_all(rootfs.join("root")).unwrap();
}

pub struct Talk {
    stream: UnixStream,
    lines: BufReader<UnixStream>,
}

impl Talk {
    pub fn send(&mut self, line: &str) {
        self.stream.write_all(format!("{line}\n").as_bytes()).unwrap();
    }

    pub fn line(&mut self) -> String {
        let mut line = String::new();
        self.lines.read_line(&mut line).unwrap();
        assert!(line.ends_with('\n'), "the stream ended in the middle of {line:?}");
        line.trim_end().to_owned()
    }

    pub fn ask(&mut self, line: &str) -> String {
        self.send(line);
        self.line()
    }

    pub fn number(&mut self, line: &str) -> u64 {
        self.ask(line).parse().unwrap()
    }
}

/// Everything that a checkpoint said it wrote is there.
pub fn assert_whole(image: &Path, captured: &Captured) {
    for file in &captured.files {
        assert!(image.join(&file.name).is_file(), "{} is missing", file.name);
    }
}
