//! Making sandboxes: what the source is, idempotency, create. (Forks: [`crate::fork`].)

use std::collections::HashMap;
use std::sync::{Arc, Mutex};

use dormouse_engine::WarmSpec;
use dormouse_types::{Generation, SandboxId, SnapshotId, random_hex};
use tokio::sync::watch;

use crate::actor::{self, Answer};
use crate::error::{ErrorCode, NodeError};
use crate::hub::{Hub, lock};
use crate::journal::{Idempotent, TemplateRow};
use crate::model::{CreateRequest, Ingress, Receipt, SandboxInfo, State, TemplateInfo};
use crate::retention;
use crate::work::Birth;

const METADATA_MAX: usize = 256;
const TEXT_BYTES_MAX: usize = 32 << 10;
const KEY_BYTES_MAX: usize = 255;

/// Idempotency keys of requests that are being carried out.
#[derive(Default)]
pub struct InFlight(Mutex<HashMap<(String, String), watch::Receiver<()>>>);

/// While it lives, others with the same key wait.
pub struct Turn<'a> {
    all: &'a InFlight,
    key: (String, String),
    _tell: watch::Sender<()>,
}

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        lock(&self.all.0).remove(&self.key);
    }
}

impl InFlight {
    pub async fn turn(&self, owner: &str, key: &str) -> Turn<'_> {
        let key = (owner.to_owned(), key.to_owned());
        loop {
            let mut theirs = {
                let mut all = lock(&self.0);
                match all.get(&key) {
                    Some(theirs) => theirs.clone(),
                    None => {
                        let (tell, told) = watch::channel(());
                        all.insert(key.clone(), told);
                        return Turn { all: self, key, _tell: tell };
                    }
                }
            };
            // Ends with an error when the other's turn is over.
            while theirs.changed().await.is_ok() {}
        }
    }
}

/// What a sandbox is made of.
pub struct Source {
    pub template: TemplateInfo,
    pub snapshot: Option<SnapshotId>,
    pub alias: Option<String>,
}

pub fn check_timeout(hub: &Hub, timeout_s: u32) -> Result<i64, NodeError> {
    let max = hub.config.limits.timeout_s_max;
    if timeout_s == 0 || timeout_s > max {
        return Err(NodeError::invalid(
            "timeout",
            format!("timeout = {timeout_s} is outside 1..={max} seconds"),
        ));
    }
    Ok(i64::from(timeout_s) * 1000)
}

fn check(hub: &Hub, request: &CreateRequest) -> Result<i64, NodeError> {
    let timeout_ms = check_timeout(hub, request.timeout_s)?;
    let bounded = |field: &'static str, map: &std::collections::BTreeMap<String, String>| {
        let bytes: usize = map.iter().map(|(key, value)| key.len() + value.len()).sum();
        if map.len() > METADATA_MAX || bytes > TEXT_BYTES_MAX {
            let message = format!(
                "{field} has {} entries and {bytes} bytes; at most {METADATA_MAX} and {TEXT_BYTES_MAX} are kept",
                map.len()
            );
            return Err(NodeError::invalid(field, message));
        }
        Ok(())
    };
    bounded("metadata", &request.metadata)?;
    bounded("envVars", &request.env)?;
    if let Some(name) = request.env.keys().find(|name| name.is_empty() || name.contains(['=', '\0'])) {
        return Err(NodeError::invalid("envVars", format!("{name:?} cannot be the name of a variable")));
    }
    if let Some(value) = request.env.values().find(|value| value.contains('\0')) {
        return Err(NodeError::invalid("envVars", format!("the value {value:?} holds a zero byte")));
    }
    dormouse_policy::EgressPolicy::compile(&request.egress)
        .map_err(|error| NodeError::invalid("network", error.to_string()))?;
    if let Some(shape) = request.shape {
        shape.validate().map_err(|error| NodeError::invalid(error.field, error.to_string()))?;
    }
    if request.idempotency_key.as_ref().is_some_and(|key| key.is_empty() || key.len() > KEY_BYTES_MAX) {
        return Err(NodeError::invalid(
            "Idempotency-Key",
            format!("the key must have 1 to {KEY_BYTES_MAX} bytes"),
        ));
    }
    Ok(timeout_ms)
}

fn shown(source: &str) -> String {
    source.chars().take(100).collect()
}

/// Template id, alias, `alias:tag`, snapshot id or snapshot name.
pub async fn resolve(hub: &Hub, source: &str) -> Result<Source, NodeError> {
    if source.is_empty() {
        return Err(NodeError::invalid("templateID", "no template was named; the default one is `base`"));
    }
    if let Some(TemplateRow { info, .. }) = find_template(hub, source).await? {
        let alias = info.aliases.iter().find(|alias| *alias == source).or(info.aliases.first()).cloned();
        return Ok(Source { snapshot: info.snapshot.clone(), alias, template: info });
    }
    let row = match retention::find(hub, source).await {
        Ok(row) => row,
        Err(error) if error.code == ErrorCode::NotFound => {
            let message = format!(
                "there is no template or snapshot {:?} on this node; `dormouse template ls` lists what there is, \
                 `dormouse setup` makes the default one (`base`)",
                shown(source)
            );
            return Err(NodeError::not_found(message));
        }
        Err(error) => return Err(error),
    };
    let manifest = retention::load(hub, &row.id).await?;
    let template = match hub.journal.template(manifest.template.to_string()).await? {
        Some(row) => TemplateInfo { rootfs: manifest.rootfs.clone(), ..row.info },
        // The template was removed; its children live on.
        None => TemplateInfo {
            id: manifest.template.clone(),
            aliases: Vec::new(),
            engine: manifest.engine,
            shape: manifest.shape,
            rootfs: manifest.rootfs.clone(),
            snapshot: None,
            start_command: None,
            ready_command: None,
            env: std::collections::BTreeMap::new(),
            user: None,
            workdir: None,
            build: String::new(),
            created_at: hub.now(),
            bytes: 0,
        },
    };
    let alias = template.aliases.first().cloned();
    let template = TemplateInfo { engine: manifest.engine, shape: manifest.shape, ..template };
    Ok(Source { template, snapshot: Some(row.id), alias })
}

/// `name:latest` and `name:default` mean `name`.
pub async fn find_template(hub: &Hub, name: &str) -> Result<Option<TemplateRow>, NodeError> {
    if let Some(row) = hub.journal.template(name.to_owned()).await? {
        return Ok(Some(row));
    }
    match name.rsplit_once(':') {
        Some((alias, "latest" | "default")) => Ok(hub.journal.template(alias.to_owned()).await?),
        _ => Ok(None),
    }
}

pub fn digest(parts: &[&str]) -> String {
    let mut hasher = blake3::Hasher::new();
    for part in parts {
        hasher.update(&(part.len() as u64).to_le_bytes());
        hasher.update(part.as_bytes());
    }
    hasher.finalize().to_hex().to_string()
}

/// Makes one sandbox, once per idempotency key.
pub async fn create(
    hub: &Arc<Hub>,
    in_flight: &InFlight,
    request: CreateRequest,
) -> Result<(SandboxInfo, Receipt), NodeError> {
    let timeout_ms = check(hub, &request)?;
    let Some(key) = request.idempotency_key.clone() else {
        return make_asked(hub, &request, timeout_ms, SandboxId::generate()).await;
    };
    let owner = request.owner.as_ref().map_or_else(String::new, ToString::to_string);
    let _turn = in_flight.turn(&owner, &key).await;
    let same = digest(&["create", &format!("{:?}", CreateRequest { owner: None, ..request.clone() })]);
    if let Some(before) = hub.journal.idempotent(owner.clone(), key.clone()).await? {
        check_same(&before, &same, &key)?;
        if let Some(found) = found_again(hub, &before).await?.pop() {
            return found;
        }
    }
    let id = SandboxId::generate();
    // Before the sandbox: after a crash in between the key leads to it, not to a second one.
    let result = Idempotent { sandboxes: vec![id.clone()], digest: same };
    hub.journal.remember(owner.clone(), key.clone(), result, hub.now()).await?;
    let made = make_asked(hub, &request, timeout_ms, id).await;
    if made.is_err() {
        hub.journal.unremember(owner, key).await?;
    }
    made
}

pub fn check_same(before: &Idempotent, same: &str, key: &str) -> Result<(), NodeError> {
    if before.digest == same {
        return Ok(());
    }
    let message = format!("the idempotency key {key:?} was used before with another request");
    Err(NodeError::new(ErrorCode::Conflict, message))
}

/// What the key was answered with, where that still exists.
pub async fn found_again(
    hub: &Arc<Hub>,
    before: &Idempotent,
) -> Result<Vec<Result<(SandboxInfo, Receipt), NodeError>>, NodeError> {
    let mut found = Vec::new();
    for id in &before.sandboxes {
        let Ok(actor) = hub.actor(id) else { continue };
        let info = actor.info();
        if matches!(info.state, State::Creating | State::Killed) {
            continue;
        }
        let receipts = hub.journal.receipts(id.clone()).await?;
        if let Some(first) = receipts.into_iter().next() {
            found.push(Ok((info, first)));
        }
    }
    Ok(found)
}

async fn make_asked(
    hub: &Arc<Hub>,
    request: &CreateRequest,
    timeout_ms: i64,
    id: SandboxId,
) -> Result<(SandboxInfo, Receipt), NodeError> {
    let source = resolve(hub, &request.source).await?;
    let engine = source.template.engine;
    if request.engine.is_some_and(|asked| asked != engine) {
        let message = format!(
            "{:?} was made for the engine {engine}; build the template for the other one first",
            shown(&request.source)
        );
        return Err(NodeError::invalid("engine", message));
    }
    hub.engine(engine)?;
    let mut env = source.template.env.clone();
    env.extend(request.env.clone());
    let idle =
        if request.idle == crate::model::IdlePolicy::default() { hub.config.idle } else { request.idle };
    let generation = match &source.snapshot {
        Some(snapshot) => retention::load(hub, snapshot).await?.generation,
        None => Generation(0),
    };
    let now = hub.now();
    let info = SandboxInfo {
        hostname: id.to_string(),
        id,
        state: State::Creating,
        engine,
        template: source.template.id.clone(),
        template_alias: source.alias,
        parent: source.snapshot,
        forked_from: None,
        runtime: None,
        generation,
        shape: request.shape.unwrap_or(source.template.shape),
        access_token: random_hex(32),
        metadata: request.metadata.clone(),
        env,
        egress: request.egress.clone(),
        ingress: Ingress {
            token: request.ingress.with_token.then(|| random_hex(32)),
            host: request.ingress.host.clone(),
        },
        idle,
        on_timeout: request.on_timeout,
        auto_resume: request.auto_resume,
        started_at: now,
        end_at: now,
        owner: request.owner.clone(),
        rootfs: source.template.rootfs.clone(),
        agent_version: None,
        agent_digest: None,
    };
    let birth = Birth {
        default_user: source.template.user.clone(),
        default_workdir: source.template.workdir.clone(),
        ..Birth::of("create")
    };
    let made = make(hub, info, timeout_ms, birth).await;
    if made.is_ok() {
        prewarm(hub, &source.template).await;
    }
    made
}

/// Keeps runtimes ready for the next of this template.
pub async fn prewarm(hub: &Hub, template: &TemplateInfo) {
    if let Ok(engine) = hub.engine(template.engine)
        && hub.config.pool > 0
    {
        let rootfs = hub.rootfs(&template.rootfs);
        // Some for starts of whatever snapshot, and some that are at the template's base snapshot already.
        let for_any = WarmSpec { rootfs, shape: template.shape, snapshot: None };
        engine.prewarm(for_any.clone(), hub.config.pool).await;
        if let Some(base) = &template.snapshot {
            engine
                .prewarm(WarmSpec { snapshot: Some(hub.store.dir(base)), ..for_any }, hub.config.pool)
                .await;
        }
    }
}

/// Ends the runtimes that were kept ready for starts of this template's base snapshot.
pub async fn cool(hub: &Hub, template: &TemplateInfo) {
    if let Ok(engine) = hub.engine(template.engine)
        && let Some(base) = &template.snapshot
    {
        let rootfs = hub.rootfs(&template.rootfs);
        let spec = WarmSpec { rootfs, shape: template.shape, snapshot: Some(hub.store.dir(base)) };
        engine.prewarm(spec, 0).await;
    }
}

pub async fn make(
    hub: &Arc<Hub>,
    info: SandboxInfo,
    timeout_ms: i64,
    birth: Birth,
) -> Result<(SandboxInfo, Receipt), NodeError> {
    // Held until it runs: what it is made of must not go before it was read.
    let _pin = info.parent.as_ref().map(|snapshot| hub.pin(snapshot));
    let (unborn, handle) = actor::prepare(hub, info, timeout_ms, birth);
    hub.admit(&handle)?;
    let Answer { info, receipt, .. } = unborn.start().await?;
    let receipt = receipt.ok_or_else(|| NodeError::internal("a sandbox was made without a receipt"))?;
    Ok((info, receipt))
}
