//! A model of an engine, for races and crashes of the node alone: runtimes are entries of a map, the
//! agent inside answers `/wake`, `/quiesce` and `/stat`. Its world outlives the node that uses it, as
//! real runtimes outlive the daemon. Whatever a real engine does is tested with the real one.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use async_trait::async_trait;
use dormouse_engine::{
    Adopted, After, BootSpec, Capabilities, Captured, CapturedFile, Engine, EngineError, Exit, Failure,
    ForkChild, Forked, Operation, RestoreSpec, Restored, RuntimeState, Swept, Usage, WarmSpec,
};
use dormouse_snapshot::{Compat, FileRole, Manifest};
use dormouse_types::{EngineKind, Generation, RuntimeId, SandboxId};
use dormouse_wire::control::{CONTROL_VERSION, Quiesced, Stat, Wake, Woken};
use dormouse_wire::keeper::{Carrier, EgressRules, Session, Status};
use tokio::io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader};
use tokio::net::{UnixListener, UnixStream};
use tokio::sync::Notify;

#[derive(Debug, Clone)]
pub struct Runtime {
    pub sandbox: SandboxId,
    pub frozen: bool,
    /// What its memory holds.
    pub memory: String,
    pub woken: Option<Generation>,
}

#[derive(Default)]
pub struct State {
    pub runtimes: BTreeMap<RuntimeId, Runtime>,
    pub keepers: BTreeSet<SandboxId>,
    /// Calls that are to fail with this, once.
    pub failures: HashMap<&'static str, fn() -> Failure>,
    /// Calls that stop there and never return, as under a daemon that is killed: `checkpoint:before`.
    pub stuck_at: Option<&'static str>,
    pub sessions: Vec<Session>,
    pub live_fork: bool,
}

/// The host. Clones share it.
#[derive(Clone)]
pub struct World {
    pub dir: PathBuf,
    state: Arc<Mutex<State>>,
    reached: Arc<Notify>,
    changed: Arc<Notify>,
}

impl World {
    pub fn new(dir: &Path) -> Self {
        let dir = dir.join("run");
        Self { dir, state: Arc::default(), reached: Arc::default(), changed: Arc::default() }
    }

    pub fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub fn engine(&self) -> Arc<dyn Engine> {
        Arc::new(ModelEngine(self.clone()))
    }

    /// Resolves when a call is stuck where it was told to be.
    pub async fn stuck(&self) {
        self.reached.notified().await;
    }

    pub fn runtime_of(&self, sandbox: &SandboxId) -> Option<(RuntimeId, Runtime)> {
        let state = self.state();
        let found = state.runtimes.iter().find(|(_, it)| it.sandbox == *sandbox)?;
        Some((found.0.clone(), found.1.clone()))
    }

    pub fn set_memory(&self, sandbox: &SandboxId, memory: &str) {
        for runtime in self.state().runtimes.values_mut().filter(|it| it.sandbox == *sandbox) {
            memory.clone_into(&mut runtime.memory);
        }
    }

    pub fn kill_runtime(&self, sandbox: &SandboxId) {
        self.state().runtimes.retain(|_, it| it.sandbox != *sandbox);
        self.changed.notify_waiters();
    }

    async fn at(&self, point: &'static str) {
        if self.state().stuck_at == Some(point) {
            self.reached.notify_one();
            std::future::pending::<()>().await;
        }
    }

    fn fail(&self, call: &'static str, operation: Operation, sandbox: &SandboxId) -> Result<(), EngineError> {
        match self.state().failures.remove(call) {
            Some(failure) => {
                Err(EngineError { operation, sandbox: Some(sandbox.clone()), failure: failure() })
            }
            None => Ok(()),
        }
    }

    /// The keeper and the agent behind it; ends with the tokio runtime, as if both were the node's:
    /// a new node's engine serves it again.
    fn serve(&self, sandbox: &SandboxId) {
        let dir = self.dir.join(sandbox.as_str());
        std::fs::create_dir_all(&dir).unwrap();
        let path = dir.join(dormouse_wire::keeper::AGENT_SOCKET);
        drop(std::fs::remove_file(&path));
        let listener = UnixListener::bind(path).unwrap();
        let (world, sandbox) = (self.clone(), sandbox.clone());
        tokio::spawn(async move {
            while let Ok((stream, _)) = listener.accept().await {
                tokio::spawn(answer(world.clone(), sandbox.clone(), stream));
            }
        });
        self.state().keepers.insert(sandbox_of(&dir));
    }
}

fn sandbox_of(dir: &Path) -> SandboxId {
    dir.file_name().unwrap().to_str().unwrap().parse().unwrap()
}

async fn answer(world: World, sandbox: SandboxId, stream: UnixStream) {
    let mut stream = BufReader::new(stream);
    let mut line = String::new();
    stream.read_line(&mut line).await.unwrap();
    let port = line.trim().strip_prefix("CONNECT ").unwrap().to_owned();
    if port != "1" && port != "8000" {
        stream.write_all(b"ERR closed nothing listens\n").await.unwrap();
        return;
    }
    stream.write_all(format!("OK {port}\n").as_bytes()).await.unwrap();
    if port == "8000" {
        stream.write_all(b"hello").await.unwrap();
        return;
    }
    let (path, body) = request(&mut stream).await;
    let json = match path.as_str() {
        "/quiesce" => serde_json::to_string(&Quiesced { notes: Vec::new() }),
        "/stat" => serde_json::to_string(&Stat::default()),
        _ => serde_json::to_string(&woken(&world, &sandbox, &serde_json::from_slice(&body).unwrap())),
    };
    let json = json.unwrap();
    let head = format!("HTTP/1.1 200 OK\r\ncontent-length: {}\r\nconnection: close\r\n\r\n", json.len());
    drop(stream.write_all(format!("{head}{json}").as_bytes()).await);
}

fn woken(world: &World, sandbox: &SandboxId, wake: &Wake) -> Woken {
    for runtime in world.state().runtimes.values_mut().filter(|it| it.sandbox == *sandbox) {
        runtime.woken = Some(wake.generation);
    }
    Woken {
        control_version: CONTROL_VERSION,
        agent_version: "model".to_owned(),
        generation: wake.generation,
        notes: Vec::new(),
        reseeded: true,
    }
}

async fn request(stream: &mut BufReader<UnixStream>) -> (String, Vec<u8>) {
    let mut path = String::new();
    let mut length = 0;
    loop {
        let mut line = String::new();
        stream.read_line(&mut line).await.unwrap();
        if path.is_empty() {
            line.split(' ').nth(1).unwrap().clone_into(&mut path);
        }
        if let Some(value) = line.to_ascii_lowercase().strip_prefix("content-length:") {
            length = value.trim().parse().unwrap();
        }
        if line.trim().is_empty() {
            break;
        }
    }
    let mut body = vec![0; length];
    stream.read_exact(&mut body).await.unwrap();
    (path, body)
}

pub struct ModelEngine(World);

impl ModelEngine {
    fn start(&self, sandbox: &SandboxId, runtime: &RuntimeId, memory: String) {
        let new = Runtime { sandbox: sandbox.clone(), frozen: false, memory, woken: None };
        self.0.state().runtimes.insert(runtime.clone(), new);
        self.0.serve(sandbox);
    }

    fn end(&self, runtime: &RuntimeId) {
        self.0.state().runtimes.remove(runtime);
        self.0.changed.notify_waiters();
    }

    fn set_frozen(&self, runtime: &RuntimeId, frozen: bool) {
        if let Some(runtime) = self.0.state().runtimes.get_mut(runtime) {
            runtime.frozen = frozen;
        }
    }
}

#[async_trait]
impl Engine for ModelEngine {
    fn kind(&self) -> EngineKind {
        EngineKind::Gvisor
    }

    fn capabilities(&self) -> Capabilities {
        Capabilities {
            memory: true,
            external_tcp: false,
            incremental: false,
            live_fork: self.0.state().live_fork,
            live_checkpoint: true,
        }
    }

    fn compat(&self) -> Compat {
        Compat { engine_version: "model".to_owned(), ..Compat::default() }
    }

    fn can_restore(&self, manifest: &Manifest) -> Result<(), EngineError> {
        self.0.fail("can_restore", Operation::Restore, &manifest.sandbox)
    }

    fn keeper_dir(&self, sandbox: &SandboxId) -> PathBuf {
        self.0.dir.join(sandbox.as_str())
    }

    async fn boot(&self, spec: BootSpec) -> Result<(), EngineError> {
        self.0.at("boot:before").await;
        self.0.fail("boot", Operation::Boot, &spec.sandbox)?;
        self.start(&spec.sandbox, &spec.runtime, "fresh".to_owned());
        self.0.at("boot:after").await;
        Ok(())
    }

    async fn checkpoint(
        &self,
        sandbox: &SandboxId,
        runtime: &RuntimeId,
        into: &Path,
        after: After,
    ) -> Result<Captured, EngineError> {
        self.0.at("checkpoint:before").await;
        self.0.fail("checkpoint", Operation::Checkpoint, sandbox)?;
        let memory = self.0.state().runtimes.get(runtime).map(|it| it.memory.clone());
        let Some(memory) = memory else {
            let failure = Failure::Exited { why: "it is gone".to_owned() };
            return Err(EngineError {
                operation: Operation::Checkpoint,
                sandbox: Some(sandbox.clone()),
                failure,
            });
        };
        std::fs::write(into.join("memory.img"), memory).unwrap();
        if after == After::Hold {
            self.set_frozen(runtime, true);
        }
        self.0.at("checkpoint:after").await;
        let files = vec![CapturedFile { name: "memory.img".to_owned(), role: FileRole::Memory }];
        Ok(Captured { files, stopped: Duration::from_millis(1), notes: Vec::new() })
    }

    async fn restore(&self, spec: RestoreSpec) -> Result<Restored, EngineError> {
        self.0.at("restore:before").await;
        self.0.fail("restore", Operation::Restore, &spec.sandbox)?;
        self.0.state().sessions.push(spec.session);
        let memory = std::fs::read_to_string(spec.snapshot_dir.join("memory.img")).unwrap();
        self.start(&spec.sandbox, &spec.runtime, memory);
        self.0.at("restore:after").await;
        Ok(Restored { session: spec.session, from_pool: false })
    }

    async fn fork(
        &self,
        sandbox: &SandboxId,
        runtime: &RuntimeId,
        children: Vec<ForkChild>,
    ) -> Result<Forked, EngineError> {
        self.0.at("fork:before").await;
        self.0.fail("fork", Operation::Fork, sandbox)?;
        let memory = self.0.state().runtimes.get(runtime).map(|it| it.memory.clone()).unwrap_or_default();
        let mut made = Vec::new();
        for child in children {
            let outcome = self.0.fail("fork_child", Operation::Fork, &child.sandbox);
            if outcome.is_ok() {
                self.start(&child.sandbox, &child.runtime, memory.clone());
            }
            made.push(outcome);
        }
        self.0.at("fork:after").await;
        Ok(Forked { stopped: Duration::from_millis(3), children: made })
    }

    async fn freeze(&self, sandbox: &SandboxId, runtime: &RuntimeId) -> Result<(), EngineError> {
        self.0.fail("freeze", Operation::Freeze, sandbox)?;
        self.set_frozen(runtime, true);
        Ok(())
    }

    async fn thaw(&self, sandbox: &SandboxId, runtime: &RuntimeId) -> Result<(), EngineError> {
        self.0.fail("thaw", Operation::Thaw, sandbox)?;
        self.set_frozen(runtime, false);
        Ok(())
    }

    async fn stop(&self, sandbox: &SandboxId, runtime: &RuntimeId) -> Result<(), EngineError> {
        self.0.at("stop:before").await;
        self.0.fail("stop", Operation::Stop, sandbox)?;
        self.end(runtime);
        self.0.at("stop:after").await;
        Ok(())
    }

    async fn destroy(&self, sandbox: &SandboxId, runtime: Option<&RuntimeId>) -> Result<(), EngineError> {
        self.0.at("destroy:before").await;
        self.0.fail("destroy", Operation::Destroy, sandbox)?;
        if let Some(runtime) = runtime {
            self.end(runtime);
        }
        self.0.state().keepers.remove(sandbox);
        drop(std::fs::remove_dir_all(self.keeper_dir(sandbox)));
        self.0.at("destroy:after").await;
        Ok(())
    }

    async fn set_egress(&self, _sandbox: &SandboxId, _rules: &EgressRules) -> Result<(), EngineError> {
        Ok(())
    }

    async fn keeper_status(&self, _sandbox: &SandboxId) -> Result<Status, EngineError> {
        Ok(Status {
            carrier: Carrier::Up,
            generation: Generation(1),
            ingress_open: 0,
            egress_open: 0,
            last_activity_ms: 0,
            bytes_in: 0,
            bytes_out: 0,
            egress_denied: 0,
        })
    }

    async fn usage(&self, _sandbox: &SandboxId, _runtime: &RuntimeId) -> Result<Usage, EngineError> {
        Ok(Usage::default())
    }

    async fn exited(&self, _sandbox: &SandboxId, runtime: &RuntimeId) -> Exit {
        loop {
            let changed = self.0.changed.notified();
            if !self.0.state().runtimes.contains_key(runtime) {
                return Exit::Runtime { why: "it was killed".to_owned() };
            }
            changed.await;
        }
    }

    async fn adopt(&self, sandbox: &SandboxId, runtime: Option<&RuntimeId>) -> Result<Adopted, EngineError> {
        let found = runtime.and_then(|runtime| self.0.state().runtimes.get(runtime).cloned());
        let keeper = self.0.state().keepers.contains(sandbox);
        if keeper {
            self.0.serve(sandbox);
        }
        let runtime = match found {
            None => RuntimeState::Gone,
            Some(found) if found.frozen => RuntimeState::Frozen,
            Some(_) => RuntimeState::Running,
        };
        Ok(Adopted { runtime, keeper })
    }

    async fn sweep(&self, keep: &[(SandboxId, Option<RuntimeId>)]) -> Result<Swept, EngineError> {
        let mut swept = Swept::default();
        let mut state = self.0.state();
        state.runtimes.retain(|id, _| {
            let kept = keep.iter().any(|(_, runtime)| runtime.as_ref() == Some(id));
            if !kept {
                swept.runtimes.push(id.to_string());
            }
            kept
        });
        state.keepers.retain(|id| keep.iter().any(|(sandbox, _)| sandbox == id));
        Ok(swept)
    }

    async fn prewarm(&self, _spec: WarmSpec, _count: usize) {}

    async fn shutdown(&self) {}
}
