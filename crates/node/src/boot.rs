//! Opening a node: lock, journal, what the engine still has, what was interrupted, what is left over.
//!
//! Order matters: the lock first; every sandbox is looked for before the engine sweeps what nobody owns.

use std::collections::{HashMap, HashSet};
use std::fs::{File, OpenOptions};
use std::io::{Read, Seek, Write};
use std::path::Path;
use std::sync::Arc;

use dormouse_engine::{Adopted, RuntimeState};
use dormouse_image::Images;
use dormouse_snapshot::{Manifest, Reason};
use dormouse_store::{Store, Swept};
use dormouse_types::{RuntimeId, SandboxId, SnapshotId, random_hex};
use futures_util::StreamExt;

use crate::actor;
use crate::config::NodeConfig;
use crate::error::OpenError;
use crate::hub::Hub;
use crate::journal::{self, Journal, Lost, Opened, PendingOp, SandboxRow};
use crate::lifecycle::{Action, Busy, Found, Machine, NOBODY, Phase, Rest, Work, recover};
use crate::model::{Ingress, OnTimeout, SandboxInfo, State, Tier};
use crate::retention;

const LOCK: &str = "node.lock";
/// Sandboxes that are looked for at the same time.
const LOOKS_AT_ONCE: usize = 16;

pub struct Booted {
    pub hub: Arc<Hub>,
    pub lock: File,
    pub notes: Vec<String>,
}

pub async fn open(config: NodeConfig) -> Result<Booted, OpenError> {
    if config.engines.is_empty() {
        return Err(OpenError::NoEngine);
    }
    let dir = config.data_dir.clone();
    let folder = |path: &Path| {
        std::fs::create_dir_all(path).map_err(|source| OpenError::Io {
            action: "make the folder",
            path: path.to_owned(),
            source,
        })
    };
    folder(&dir)?;
    let lock = take_lock(&dir)?;
    let Opened { journal, lost } = Journal::open(&dir)?;
    let mut notes = Vec::new();
    write_agent(&config)?;
    let failed = |error: crate::journal::JournalError| OpenError::Journal {
        path: dir.clone(),
        why: error.to_string(),
    };
    let mut rows = journal.sandboxes().await.map_err(failed)?;
    let last_event = journal.last_event().await.map_err(failed)?;
    let snapshots = dir.join("snapshots");
    let (store, swept) = Store::open(&snapshots)
        .map_err(|error| OpenError::Store { path: snapshots.clone(), why: chain(&error) })?;
    notes.extend(swept.iter().map(swept_note));
    let images_dir = dir.join("images");
    let (images, swept) = Images::open(&images_dir)
        .map_err(|error| OpenError::Images { path: images_dir.clone(), why: chain(&error) })?;
    notes.extend(swept.into_iter().map(|name| format!("removed the unfinished image {name}")));
    let hub = Arc::new(Hub::new(config, journal, store, images, last_event));
    retention::reconcile(&hub)
        .await
        .map_err(|error| OpenError::Store { path: snapshots, why: error.to_string() })?;
    if let Some(lost) = &lost {
        notes.push(lost_note(lost));
        let known: HashSet<SandboxId> = rows.iter().map(|row| row.info.id.clone()).collect();
        let asleep = paused_by_snapshots(&hub, &mut notes, &known).await;
        rows.extend(asleep);
    }
    let keep = adopt_all(&hub, rows, &mut notes).await;
    if journal::is_forgetful(&dir) {
        notes.push(
            "runtimes and keepers that are not known are left alone since the journal was lost: they may be \
             sandboxes that it forgot; `dormouse gc` removes them"
                .to_owned(),
        );
    } else {
        sweep(&hub, &keep, &mut notes).await?;
    }
    for note in &notes {
        tracing::warn!(note, "found at the start");
    }
    Ok(Booted { hub, lock, notes })
}

fn lost_note(lost: &Lost) -> String {
    let was = lost.kept_aside.as_ref().map_or_else(
        || "the journal was gone".to_owned(),
        |kept| format!("the journal was damaged and is kept at {}", kept.display()),
    );
    if lost.brought_back {
        format!("{was}; a new one was begun from its copy, which may lack the last second")
    } else {
        format!(
            "{was}, and no copy of it could be read; a new one was begun. Paused sandboxes are found again by \
             their snapshots; what ran is not known any more, and API keys and templates must be made again"
        )
    }
}

fn chain(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(error) = source {
        text = format!("{text}: {error}");
        source = error.source();
    }
    text
}

fn take_lock(dir: &Path) -> Result<File, OpenError> {
    let path = dir.join(LOCK);
    let failed = |action, source| OpenError::Io { action, path: path.clone(), source };
    let mut file = OpenOptions::new()
        .read(true)
        .write(true)
        .create(true)
        .truncate(false)
        .open(&path)
        .map_err(|source| failed("open the lock", source))?;
    match file.try_lock() {
        Ok(()) => {}
        Err(std::fs::TryLockError::WouldBlock) => {
            let mut pid = String::new();
            drop(file.read_to_string(&mut pid));
            let pid = if pid.trim().is_empty() { "unknown".to_owned() } else { pid.trim().to_owned() };
            return Err(OpenError::Locked { folder: dir.to_owned(), pid });
        }
        Err(std::fs::TryLockError::Error(source)) => return Err(failed("lock", source)),
    }
    let write =
        file.set_len(0).and_then(|()| file.rewind()).and_then(|()| writeln!(file, "{}", std::process::id()));
    write.map_err(|source| failed("write", source))?;
    Ok(file)
}

/// `agent/<digest>/agent`: written whole, then renamed.
fn write_agent(config: &NodeConfig) -> Result<(), OpenError> {
    use std::os::unix::fs::PermissionsExt;
    let Some(agent) = &config.agent else { return Ok(()) };
    let dir = config.data_dir.join("agent").join(agent.digest());
    let path = dir.join("agent");
    if path.is_file() {
        return Ok(());
    }
    let tmp = dir.join("agent.tmp");
    let write = || {
        std::fs::create_dir_all(&dir)?;
        let mut file = File::create(&tmp)?;
        file.write_all(&agent.bytes)?;
        file.set_permissions(std::fs::Permissions::from_mode(0o755))?;
        file.sync_all()?;
        std::fs::rename(&tmp, &path)
    };
    write().map_err(|source| OpenError::Io { action: "write the agent", path: path.clone(), source })
}

/// Without a journal a snapshot that a pause left still says which sandbox sleeps there. Tokens and
/// metadata are lost.
async fn paused_by_snapshots(
    hub: &Arc<Hub>,
    notes: &mut Vec<String>,
    known: &HashSet<SandboxId>,
) -> Vec<SandboxRow> {
    let store = hub.store.clone();
    let listed = hub.blocking("the list of snapshots", move || store.list()).await;
    let mut newest: HashMap<SandboxId, Manifest> = HashMap::new();
    for manifest in listed.ok().and_then(Result::ok).unwrap_or_default() {
        // Oldest first: the last one of each stays.
        if manifest.reason != Reason::Template && !known.contains(&manifest.sandbox) {
            newest.insert(manifest.sandbox.clone(), manifest);
        }
    }
    let asleep = newest.into_values().filter(|it| matches!(it.reason, Reason::Pause | Reason::Policy));
    let rows: Vec<SandboxRow> = asleep.map(|manifest| paused_row(hub, manifest)).collect();
    notes.extend(
        rows.iter().map(|row| format!("sandbox {} was found again, paused, by its snapshot", row.info.id)),
    );
    rows
}

fn paused_row(hub: &Hub, manifest: Manifest) -> SandboxRow {
    let now = hub.now();
    let timeout_ms = 300_000;
    let (mut machine, _) = Machine::create(
        NOBODY,
        manifest.generation,
        now.as_millisecond(),
        timeout_ms,
        OnTimeout::Pause,
        false,
    );
    machine.phase = Phase::At(Rest::Paused);
    machine.head = Some(manifest.id.clone());
    machine.carrier_broken = true;
    let info = SandboxInfo {
        hostname: manifest.sandbox.to_string(),
        id: manifest.sandbox,
        state: State::Paused { tier: Tier::Disk },
        engine: manifest.engine,
        template: manifest.template,
        template_alias: None,
        parent: Some(manifest.id),
        forked_from: None,
        runtime: None,
        generation: manifest.generation,
        shape: manifest.shape,
        access_token: random_hex(32),
        metadata: std::collections::BTreeMap::new(),
        env: std::collections::BTreeMap::new(),
        egress: dormouse_wire::keeper::EgressRules::default(),
        ingress: Ingress::default(),
        idle: hub.config.idle,
        on_timeout: OnTimeout::Pause,
        auto_resume: false,
        started_at: now,
        end_at: now,
        owner: None,
        rootfs: manifest.rootfs,
        agent_version: Some(manifest.compat.agent_version),
        agent_digest: Some(manifest.compat.agent_digest),
    };
    SandboxRow { info, machine, op: None }
}

fn swept_note(swept: &Swept) -> String {
    match swept {
        Swept::Unfinished { id, bytes } => format!("removed the unfinished snapshot {id} ({bytes} bytes)"),
        Swept::Damaged { id, kept_at, why } => {
            format!("the manifest of snapshot {id} is damaged ({why}); it is kept at {}", kept_at.display())
        }
        Swept::Unreadable { id, why } => format!("snapshot {id} cannot be read and was left alone: {why}"),
    }
}

type Keep = HashMap<dormouse_types::EngineKind, Vec<(SandboxId, Option<RuntimeId>)>>;

async fn adopt_all(hub: &Arc<Hub>, rows: Vec<SandboxRow>, notes: &mut Vec<String>) -> Keep {
    let mut keep = Keep::new();
    let looks = futures_util::stream::iter(rows.into_iter().map(|row| async move {
        let row = settle_row(row);
        let (found, notes) = look(hub, &row.info, row.op.as_ref()).await;
        (row, found, notes)
    }));
    let mut looks = std::pin::pin!(looks.buffered(LOOKS_AT_ONCE));
    while let Some((row, found, told)) = looks.next().await {
        notes.extend(told);
        adopt(hub, row, &found, notes, &mut keep);
    }
    keep
}

/// Without an operation that was never begun.
fn settle_row(row: SandboxRow) -> SandboxRow {
    let SandboxRow { info, mut machine, op } = row;
    // Written in two commits: the state that names the work, then the work's own row.
    let op = match &machine.phase {
        Phase::Busy(busy) => match op.filter(|op| op.op == busy.op) {
            None => {
                let Busy { from, work, .. } = busy.clone();
                let undone = from.filter(|_| work != Work::Destroy);
                machine.phase = undone.map_or(Phase::Gone, Phase::At);
                None
            }
            found => found,
        },
        Phase::At(_) | Phase::Gone => None,
    };
    SandboxRow { info, machine, op }
}

fn adopt(hub: &Arc<Hub>, row: SandboxRow, found: &Found, notes: &mut Vec<String>, keep: &mut Keep) {
    let SandboxRow { mut info, machine, op } = row;
    let (machine, actions) = recover(machine, found, hub.now_ms());
    if found.runtime == RuntimeState::Gone {
        info.runtime = None;
    } else if !found.keeper {
        notes.push(format!("the keeper of sandbox {} is gone and will be replaced", info.id));
    }
    if let State::Failed { why } = machine.view()
        && !matches!(info.state, State::Failed { .. })
    {
        notes.push(format!("sandbox {} failed: {why}", info.id));
    }
    let killed = matches!(&machine.phase, Phase::Busy(busy) if busy.work == Work::Destroy);
    if !killed {
        let runtimes = [info.runtime.clone(), started_runtime(&actions, op.as_ref())];
        let kept = keep.entry(info.engine).or_default();
        kept.push((info.id.clone(), runtimes.into_iter().flatten().next()));
    }
    actor::adopt(hub, info, machine, op, actions);
}

/// Kept from the sweep only while the actor has still to clean it up itself.
fn started_runtime(actions: &[Action], op: Option<&PendingOp>) -> Option<RuntimeId> {
    actions.contains(&Action::CleanUp).then(|| op.map(|op| op.runtime.clone())).flatten()
}

async fn look(hub: &Arc<Hub>, info: &SandboxInfo, op: Option<&PendingOp>) -> (Found, Vec<String>) {
    let mut notes = Vec::new();
    let gone = Adopted { runtime: RuntimeState::Gone, keeper: false };
    let engine = match hub.engine(info.engine) {
        Ok(engine) => engine,
        Err(error) => {
            notes.push(format!("sandbox {}: {error}", info.id));
            let published = published(hub, op).await;
            let gone = RuntimeState::Gone;
            return (Found { runtime: gone, keeper: false, started: gone, published }, notes);
        }
    };
    let mut serving = gone.clone();
    match engine.adopt(&info.id, info.runtime.as_ref()).await {
        Ok(adopted) => serving = adopted,
        Err(error) => notes.push(error.to_string()),
    }
    let mut started = RuntimeState::Gone;
    if let Some(op) = op
        && let Ok(adopted) = engine.adopt(&info.id, Some(&op.runtime)).await
    {
        started = adopted.runtime;
    }
    if info.runtime.is_none() {
        serving.runtime = RuntimeState::Gone;
    }
    let published = published(hub, op).await;
    (Found { runtime: serving.runtime, keeper: serving.keeper, started, published }, notes)
}

async fn published(hub: &Arc<Hub>, op: Option<&PendingOp>) -> Option<SnapshotId> {
    let id = op?.snapshot.clone();
    retention::load(hub, &id).await.ok().map(|manifest| manifest.id)
}

pub async fn sweep(hub: &Arc<Hub>, keep: &Keep, notes: &mut Vec<String>) -> Result<(), OpenError> {
    for engine in &hub.config.engines {
        let kept = keep.get(&engine.kind()).map_or(&[][..], Vec::as_slice);
        let swept = engine.sweep(kept).await.map_err(|error| OpenError::Sweep { why: error.to_string() })?;
        notes.extend(swept.runtimes.into_iter().map(|name| format!("removed the leftover runtime {name}")));
        notes.extend(swept.keepers.into_iter().map(|name| format!("removed the leftover keeper {name}")));
        notes.extend(swept.leftovers.into_iter().map(|name| format!("removed the leftover {name}")));
    }
    Ok(())
}
