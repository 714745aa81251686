//! An engine in a folder of its own, sandboxes with a small root file system, and the proof that nothing of them
//! is left.

#![allow(clippy::unwrap_used, reason = "a test's helper fails as its test does")]

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use base64::Engine as _;
use bytes::Bytes;
use dormouse_engine::microvm::{Microvm, MicrovmConfig};
use dormouse_engine::{After, AgentFile, BootSpec, CapturedFile, Engine, ForkChild, RestoreSpec};
use dormouse_image::{ImageConfig, Images, Limits, Source};
use dormouse_snapshot::{FileEntry, Manifest, Reason};
use dormouse_types::{EngineKind, Generation, RuntimeId, SandboxId, Shape, SnapshotId, TemplateId};
use dormouse_wire::control::Wake;
use dormouse_wire::envd::connect::{self, Decoder};
use dormouse_wire::envd::process::{ProcessConfig, StartRequest, StartResponse};
use dormouse_wire::keeper::{EgressRules, Session};
use dormouse_wire::keeper_client::connect_agent;
use dormouse_wire::stream::{CONTROL_PORT, ENVD_PORT};
use http_body_util::{BodyExt, Full};
use hyper::body::Incoming;
use hyper_util::rt::TokioIo;
use tempfile::TempDir;

/// Two processors: what a fork must stop and start is more than one thread.
pub const SHAPE: Shape = Shape { cpus: 2, memory_mib: 128, disk_mib: 64, processes_max: 64 };
const IMAGE: &str = "small";
/// What the tests' commands need beside the C library; the rest of the root file system is the image's own.
const PROGRAMS: [&str; 8] = ["sh", "cat", "dd", "mv", "mkdir", "sleep", "sync", "touch"];

pub struct Rig {
    dir: TempDir,
    pub engine: Microvm,
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

fn given(name: &str) -> PathBuf {
    std::env::var_os(name)
        .unwrap_or_else(|| panic!("{name} is not set: `cargo xtask lab --test` sets it"))
        .into()
}

impl Rig {
    pub async fn new() -> Self {
        let dir = tempfile::Builder::new()
            .prefix("dormouse-engine-")
            .tempdir_in(given("DORMOUSE_TEST_DATA"))
            .unwrap();
        std::os::unix::fs::symlink(given("DORMOUSE_TEST_DATA").join("guest"), dir.path().join("guest"))
            .unwrap();
        make_image(dir.path());
        let engine = open(dir.path()).await;
        Self { dir, engine }
    }

    /// As a daemon that was killed and started again.
    pub async fn reopen(&mut self) {
        self.engine = open(self.dir.path()).await;
    }

    pub fn rootfs(&self) -> PathBuf {
        self.dir.path().join("images").join(IMAGE).join("rootfs")
    }

    pub fn image(&self, name: &str) -> PathBuf {
        let image = self.dir.path().join(name);
        std::fs::create_dir_all(&image).unwrap();
        image
    }

    pub async fn boot(&self) -> Sandbox {
        let sandbox = Sandbox::new();
        let spec = BootSpec {
            sandbox: sandbox.id.clone(),
            runtime: sandbox.runtime.clone(),
            generation: Generation(1),
            rootfs: self.rootfs(),
            shape: SHAPE,
            hostname: "box".to_owned(),
            egress: EgressRules::default(),
        };
        self.engine.boot(spec).await.unwrap();
        self.wake(&sandbox).await;
        sandbox
    }

    pub async fn checkpoint(&self, sandbox: &Sandbox, name: &str, after: After) -> (PathBuf, Vec<FileEntry>) {
        let image = self.image(name);
        let captured = self.engine.checkpoint(&sandbox.id, &sandbox.runtime, &image, after).await.unwrap();
        let entry = |file: CapturedFile| {
            let bytes = std::fs::metadata(image.join(&file.name)).unwrap().len();
            FileEntry { name: file.name, role: file.role, bytes, digest: None }
        };
        let files = captured.files.into_iter().map(entry).collect();
        (image, files)
    }

    /// What a restore of `image` as `to` is asked with.
    pub fn restore_spec(
        &self,
        from: &Sandbox,
        to: &Sandbox,
        image: &Path,
        files: Vec<FileEntry>,
        session: Session,
    ) -> RestoreSpec {
        RestoreSpec {
            sandbox: to.id.clone(),
            runtime: to.runtime.clone(),
            generation: Generation(2),
            rootfs: self.rootfs(),
            snapshot_dir: image.to_owned(),
            manifest: self.manifest(from, files),
            shape: SHAPE,
            hostname: "box".to_owned(),
            egress: EgressRules::default(),
            session,
        }
    }

    fn manifest(&self, of: &Sandbox, files: Vec<FileEntry>) -> Manifest {
        Manifest {
            id: SnapshotId::generate(),
            parent: None,
            sandbox: of.id.clone(),
            runtime: of.runtime.clone(),
            template: TemplateId::generate(),
            engine: EngineKind::Microvm,
            generation: Generation(1),
            reason: Reason::Pause,
            created_at_ms: 0,
            expires_at_ms: None,
            shape: SHAPE,
            rootfs: IMAGE.to_owned(),
            memory: true,
            names: Vec::new(),
            labels: Default::default(),
            compat: self.engine.compat(),
            files,
        }
    }

    pub async fn fork(&self, source: &Sandbox, count: usize) -> Vec<Sandbox> {
        let children: Vec<Sandbox> = (0..count).map(|_| Sandbox::new()).collect();
        let asked = children.iter().map(|child| ForkChild {
            sandbox: child.id.clone(),
            runtime: child.runtime.clone(),
            generation: Generation(1),
            hostname: "fork".to_owned(),
            egress: EgressRules::default(),
        });
        let forked = self.engine.fork(&source.id, &source.runtime, asked.collect()).await.unwrap();
        assert_eq!(forked.children.len(), count);
        for born in forked.children {
            born.unwrap();
        }
        for child in &children {
            self.wake(child).await;
        }
        children
    }

    /// As the node does it before a sandbox is served; without a token.
    async fn wake(&self, sandbox: &Sandbox) {
        let wake = Wake {
            sandbox: sandbox.id.clone(),
            generation: Generation(1),
            entropy: base64::engine::general_purpose::STANDARD.encode([7; 64]),
            wall_clock_ns: 1_800_000_000_000_000_000,
            hostname: "box".to_owned(),
            machine_id: "0123456789abcdef0123456789abcdef".to_owned(),
            access_token: None,
            new_identity: true,
            env: None,
            default_user: Some("root".to_owned()),
            default_workdir: None,
            trusted_ca: None,
            egress: false,
            processes_max: None,
        };
        let body = serde_json::to_vec(&wake).unwrap();
        let answer = self.call(sandbox, CONTROL_PORT, "/wake", "application/json", body.into()).await;
        answer.collect().await.unwrap();
    }

    async fn call(
        &self,
        sandbox: &Sandbox,
        port: u16,
        path: &str,
        content_type: &str,
        body: Bytes,
    ) -> Incoming {
        let stream = connect_agent(&self.engine.keeper_dir(&sandbox.id), port).await.unwrap();
        let (mut sender, connection) =
            hyper::client::conn::http1::handshake(TokioIo::new(stream)).await.unwrap();
        tokio::spawn(connection);
        let request = hyper::Request::post(path)
            .header("host", "sandbox")
            .header("authorization", "Basic cm9vdDo=")
            .header("content-type", content_type)
            .header("connect-protocol-version", "1")
            .body(Full::new(body))
            .unwrap();
        let answer = sender.send_request(request).await.unwrap();
        assert!(answer.status().is_success(), "{path}: {}", answer.status());
        answer.into_body()
    }

    async fn process(&self, sandbox: &Sandbox, shell: &str) -> Incoming {
        let process = ProcessConfig {
            cmd: "/bin/sh".to_owned(),
            args: vec!["-c".to_owned(), shell.to_owned()],
            envs: [("PATH".to_owned(), "/bin".to_owned())].into(),
            cwd: Some("/root".to_owned()),
        };
        let request = StartRequest { process: Some(process), pty: None, tag: None, stdin: Some(false) };
        let body = connect::message(&request);
        self.call(sandbox, ENVD_PORT, "/process.Process/Start", connect::STREAM_TYPE, body).await
    }

    /// What a command that must succeed writes.
    pub async fn run(&self, sandbox: &Sandbox, shell: &str) -> String {
        let mut body = self.process(sandbox, shell).await;
        let (mut decoder, mut said, mut code) = (Decoder::default(), Vec::new(), None);
        while let Some(frame) = body.frame().await {
            decoder.push(&frame.unwrap().into_data().unwrap_or_default());
            while let Some(frame) = decoder.next_frame().unwrap().filter(|frame| !frame.is_end()) {
                let Some(event) = frame.parse::<StartResponse>().unwrap().event else { continue };
                if let Some(data) = event.data {
                    said.extend([data.stdout, data.stderr].into_iter().flatten().flatten());
                }
                code = code.or(event.end.map(|end| end.exit_code));
            }
        }
        let said = String::from_utf8(said).unwrap();
        assert_eq!(code, Some(0), "{shell}: {said}");
        said
    }

    /// Starts a command that goes on by itself.
    pub async fn start(&self, sandbox: &Sandbox, shell: &str) {
        let mut body = self.process(sandbox, shell).await;
        // The first frame says that it was started.
        body.frame().await.unwrap().unwrap();
    }

    /// The number in a file in /root, once there is one.
    pub async fn number(&self, sandbox: &Sandbox, file: &str) -> u64 {
        let shell = format!("while [ ! -s /root/{file} ]; do sleep 0.05; done; cat /root/{file}");
        self.run(sandbox, &shell).await.trim().parse().unwrap()
    }

    /// Processes and folders: whatever names this rig's folder.
    pub fn remains(&self) -> Vec<String> {
        let dir = self.dir.path().to_string_lossy().into_owned();
        let arguments = |pid: &u32| dormouse_sys::process::arguments(*pid);
        let ours = |pid: &u32| arguments(pid).iter().any(|argument| argument.contains(&dir));
        let processes = dormouse_sys::process::pids().into_iter().filter(ours);
        let mut found: Vec<String> =
            processes.map(|pid| format!("process {pid}: {:?}", arguments(&pid))).collect();
        for folder in ["runtimes", "zygotes", "run"] {
            let entries = std::fs::read_dir(self.dir.path().join("microvm").join(folder)).unwrap();
            found.extend(entries.map(|entry| entry.unwrap().path().display().to_string()));
        }
        found
    }
}

/// Whatever a failed test leaves is ended with it.
impl Drop for Rig {
    fn drop(&mut self) {
        let engine = self.engine.clone();
        let swept = std::thread::spawn(move || {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
            runtime.block_on(async {
                let swept = engine.sweep(&[]).await;
                engine.shutdown().await;
                swept
            })
        });
        if let Err(error) = swept.join().unwrap() {
            eprintln!("the rig could not be swept: {error}");
        }
    }
}

async fn open(dir: &Path) -> Microvm {
    let binary = given("DORMOUSE_TEST_BINARY").into_os_string();
    let within = std::fs::canonicalize(dir).unwrap().into_os_string();
    let config = MicrovmConfig {
        data_dir: dir.to_owned(),
        // The initramfs has it.
        agent: AgentFile { version: "test".to_owned(), digest: "0123abcd".to_owned() },
        keeper: vec![binary.clone(), "keeper".into()],
        monitor: vec![binary, "monitor".into(), "--within".into(), within],
        cgroups: true,
        network: false,
        lazy_restore: false,
        users: None,
    };
    Microvm::open(config).await.unwrap()
}

/// A root file system of a shell and a few programs, taken from the machine that the tests run on.
fn make_image(dir: &Path) {
    let tree = dir.join("tree");
    let mut needed = vec!["/lib64/ld-linux-x86-64.so.2".to_owned(), "/usr/bin/cksum".to_owned()];
    needed.extend(PROGRAMS.iter().map(|name| format!("/bin/{name}")));
    for program in needed.clone() {
        let said = Command::new("ldd").arg(&program).output().unwrap().stdout;
        let said = String::from_utf8(said).unwrap();
        let library =
            |line: &str| line.split_whitespace().find(|word| word.starts_with('/')).map(str::to_owned);
        needed.extend(said.lines().filter_map(library));
    }
    for path in needed {
        let to = match path.strip_prefix("/usr/bin/") {
            Some(name) => tree.join("bin").join(name),
            None => tree.join(path.trim_start_matches('/')),
        };
        std::fs::create_dir_all(to.parent().unwrap()).unwrap();
        std::fs::copy(&path, to).unwrap();
    }
    for folder in ["root", "etc", "tmp"] {
        std::fs::create_dir_all(tree.join(folder)).unwrap();
    }
    std::fs::write(tree.join("etc/passwd"), "root:x:0:0:root:/root:/bin/sh\n").unwrap();
    std::fs::write(tree.join("etc/group"), "root:x:0:\n").unwrap();
    let mut tar = Command::new("tar")
        .args(["-c", "--owner=0", "--group=0", "-C"])
        .arg(&tree)
        .arg(".")
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let (images, _) = Images::open(&dir.join("images")).unwrap();
    let source = Source::Sandbox { base: "the tests".to_owned(), name: IMAGE.to_owned() };
    let mut archive = tar.stdout.take().unwrap();
    images.import_tar(IMAGE, &mut archive, source, ImageConfig::default(), &Limits::default()).unwrap();
    assert!(tar.wait().unwrap().success());
}
