//! The node's model in the API's words.

use std::collections::BTreeMap;

use dormouse_api::dormouse as ours;
use dormouse_api::{CLIENT_ID, ENVD_VERSION, e2b};
use dormouse_node::model;
use dormouse_types::{Shape, Timestamp};
use serde_json::json;
use sha2::{Digest, Sha256};

use super::route::Domain;

/// To the millisecond: some clients read no more digits.
fn millis(time: Timestamp) -> Timestamp {
    Timestamp::from_millisecond(time.as_millisecond()).unwrap_or(time)
}

pub fn sandbox(info: &model::SandboxInfo, domain: &Domain) -> e2b::Sandbox {
    e2b::Sandbox {
        template_id: info.template.to_string(),
        sandbox_id: info.id.to_string(),
        client_id: CLIENT_ID.to_owned(),
        envd_version: ENVD_VERSION.to_owned(),
        alias: info.template_alias.clone(),
        envd_access_token: Some(info.access_token.clone()),
        traffic_access_token: info.ingress.token.clone(),
        domain: Some(domain.text.clone()),
    }
}

/// E2B knows two states; a frozen sandbox runs for all that a client can see.
fn e2b_state(state: &model::State) -> e2b::SandboxState {
    match state {
        model::State::Paused { tier: model::Tier::Disk | model::Tier::Archive } => e2b::SandboxState::Paused,
        _ => e2b::SandboxState::Running,
    }
}

pub fn listed(info: &model::SandboxInfo) -> e2b::ListedSandbox {
    e2b::ListedSandbox {
        template_id: info.template.to_string(),
        sandbox_id: info.id.to_string(),
        client_id: CLIENT_ID.to_owned(),
        started_at: millis(info.started_at),
        end_at: millis(info.end_at),
        cpu_count: info.shape.cpus,
        memory_mb: info.shape.memory_mib,
        disk_size_mb: info.shape.disk_mib,
        state: e2b_state(&info.state),
        envd_version: ENVD_VERSION.to_owned(),
        alias: info.template_alias.clone(),
        metadata: info.metadata.clone(),
    }
}

fn on_timeout(given: model::OnTimeout) -> e2b::OnTimeout {
    match given {
        model::OnTimeout::Kill => e2b::OnTimeout::Kill,
        model::OnTimeout::Pause => e2b::OnTimeout::Pause,
    }
}

pub fn detail(info: &model::SandboxInfo, domain: &Domain) -> e2b::SandboxDetail {
    let paused = e2b_state(&info.state) == e2b::SandboxState::Paused;
    let network = e2b::SandboxNetworkConfig {
        allow_public_traffic: Some(info.ingress.token.is_none()),
        mask_request_host: info.ingress.host.clone(),
        allow_out: Some(info.egress.allow.clone()),
        deny_out: Some(info.egress.deny.clone()),
        ..e2b::SandboxNetworkConfig::default()
    };
    e2b::SandboxDetail {
        listed: listed(info),
        envd_access_token: Some(info.access_token.clone()),
        allow_internet_access: Some(info.egress.internet),
        domain: Some(domain.text.clone()),
        network: Some(network),
        lifecycle: Some(e2b::Lifecycle {
            auto_resume: info.auto_resume,
            on_timeout: on_timeout(info.on_timeout),
        }),
        pause_mode: paused.then_some(e2b::PauseMode::Full),
    }
}

fn shape(given: Shape) -> ours::Shape {
    ours::Shape {
        cpus: given.cpus,
        memory_mb: given.memory_mib,
        disk_mb: given.disk_mib,
        processes_max: given.processes_max,
    }
}

fn state(given: &model::State) -> (ours::State, Option<ours::Tier>, Option<String>) {
    match given {
        model::State::Creating => (ours::State::Creating, None, None),
        model::State::Running => (ours::State::Running, None, None),
        model::State::Pausing => (ours::State::Pausing, None, None),
        model::State::Paused { tier } => {
            let tier = match tier {
                model::Tier::Frozen => ours::Tier::Frozen,
                model::Tier::Disk => ours::Tier::Disk,
                model::Tier::Archive => ours::Tier::Archive,
            };
            (ours::State::Paused, Some(tier), None)
        }
        model::State::Resuming => (ours::State::Resuming, None, None),
        model::State::RollingBack => (ours::State::RollingBack, None, None),
        model::State::Killed => (ours::State::Killed, None, None),
        model::State::Failed { why } => (ours::State::Failed, None, Some(why.clone())),
    }
}

pub fn info(info: &model::SandboxInfo) -> ours::SandboxInfo {
    let (state, tier, why) = state(&info.state);
    // What there is to go on from belongs to the bad news.
    let why = why.map(|why| match &info.parent {
        Some(parent) => format!("{why}; its last snapshot is {parent}: roll back to it to go on from there"),
        None => format!("{why}; it has no snapshot to go back to"),
    });
    ours::SandboxInfo {
        sandbox_id: info.id.to_string(),
        template_id: info.template.to_string(),
        alias: info.template_alias.clone(),
        state,
        tier,
        why,
        engine: info.engine.to_string(),
        parent_snapshot_id: info.parent.as_ref().map(ToString::to_string),
        forked_from: info.forked_from.as_ref().map(ToString::to_string),
        generation: info.generation.0,
        hostname: info.hostname.clone(),
        shape: shape(info.shape),
        metadata: info.metadata.clone(),
        idle: ours::IdlePolicy { freeze_after: info.idle.freeze_after_s, disk_after: info.idle.disk_after_s },
        on_timeout: on_timeout(info.on_timeout),
        auto_resume: info.auto_resume,
        network: ours::Network {
            internet: info.egress.internet,
            allow_out: info.egress.allow.clone(),
            deny_out: info.egress.deny.clone(),
        },
        started_at: millis(info.started_at),
        end_at: millis(info.end_at),
        agent_version: info.agent_version.clone(),
        envd_access_token: info.access_token.clone(),
        why_awake: Vec::new(),
        receipts: Vec::new(),
    }
}

pub fn receipt(given: &model::Receipt) -> ours::Receipt {
    ours::Receipt {
        sandbox_id: given.sandbox.to_string(),
        operation: given.operation.clone(),
        engine: given.engine.to_string(),
        snapshot_id: given.snapshot.as_ref().map(ToString::to_string),
        at: millis(given.at),
        took_ms: given.took_ms,
        stopped_ms: given.stopped_ms,
        kept: given.kept.clone(),
        refreshed: given.refreshed.clone(),
        shared: given.shared.clone(),
        dropped: given.dropped.clone(),
    }
}

pub fn snapshot(given: &model::SnapshotInfo) -> ours::SnapshotInfo {
    ours::SnapshotInfo {
        snapshot_id: given.id.to_string(),
        names: given.names.clone(),
        parent_snapshot_id: given.parent.as_ref().map(ToString::to_string),
        sandbox_id: given.sandbox.to_string(),
        template_id: given.template.to_string(),
        engine: given.engine.to_string(),
        reason: given.reason.clone(),
        created_at: millis(given.created_at),
        expires_at: given.expires_at.map(millis),
        bytes: given.bytes,
        labels: given.labels.clone(),
    }
}

pub fn removed(given: model::Removed) -> ours::Removed {
    ours::Removed { id: given.id, freed_bytes: given.freed_bytes, children: given.children, kept: given.kept }
}

pub fn lineage(given: model::LineageEntry) -> ours::Lineage {
    let kind = match given.kind {
        model::LineageKind::Template => ours::LineageKind::Template,
        model::LineageKind::Snapshot => ours::LineageKind::Snapshot,
        model::LineageKind::Sandbox => ours::LineageKind::Sandbox,
    };
    let at = millis(given.at);
    ours::Lineage { kind, id: given.id, parent: given.parent, label: given.label, at, current: given.current }
}

pub fn event(given: model::Event) -> ours::Event {
    ours::Event {
        seq: given.seq,
        at: millis(given.at),
        sandbox_id: given.sandbox.map(|id| id.to_string()),
        kind: given.kind,
        message: given.message,
    }
}

pub fn key(given: model::KeyInfo, secret: Option<String>) -> ours::KeyInfo {
    ours::KeyInfo {
        key_id: given.id.to_string(),
        name: given.name,
        hint: given.hint,
        created_at: millis(given.created_at),
        key: secret,
    }
}

pub fn usage(given: &model::UsageSummary) -> ours::Usage {
    ours::Usage {
        running: given.running,
        frozen: given.frozen,
        paused: given.paused,
        failed: given.failed,
        busy: given.busy,
        snapshots: given.snapshots,
        snapshot_bytes: given.snapshot_bytes,
        templates: given.templates,
        disk_free_bytes: given.disk_free_bytes,
    }
}

pub fn metric(given: &model::Metric) -> e2b::SandboxMetric {
    e2b::SandboxMetric {
        timestamp: millis(given.at),
        timestamp_unix: given.at.as_second(),
        cpu_count: given.cpu_count,
        cpu_used_pct: given.cpu_used_pct,
        mem_used: given.mem_used,
        mem_total: given.mem_total,
        mem_cache: given.mem_cache,
        disk_used: given.disk_used,
        disk_total: given.disk_total,
    }
}

pub fn level_word(given: model::Level) -> &'static str {
    match given {
        model::Level::Debug => "debug",
        model::Level::Info => "info",
        model::Level::Warn => "warn",
        model::Level::Error => "error",
    }
}

pub fn log_entry(given: &model::LogLine) -> e2b::SandboxLogEntry {
    let level = match given.level {
        model::Level::Debug => e2b::LogLevel::Debug,
        model::Level::Info => e2b::LogLevel::Info,
        model::Level::Warn => e2b::LogLevel::Warn,
        model::Level::Error => e2b::LogLevel::Error,
    };
    let fields = BTreeMap::from([("source".to_owned(), given.source.clone())]);
    e2b::SandboxLogEntry { timestamp: millis(given.at), message: given.message.clone(), level, fields }
}

/// E2B's command line reads each line as JSON with these fields.
pub fn log_line(entry: &e2b::SandboxLogEntry) -> e2b::SandboxLog {
    let logger = entry.fields.get("source").map_or("", String::as_str);
    let line = json!({"level": entry.level, "logger": logger, "message": entry.message});
    e2b::SandboxLog { timestamp: entry.timestamp, line: line.to_string() }
}

pub fn template(given: &model::TemplateInfo) -> e2b::Template {
    let created = millis(given.created_at);
    e2b::Template {
        template_id: given.id.to_string(),
        build_id: uuid_of(&given.build),
        cpu_count: given.shape.cpus,
        memory_mb: given.shape.memory_mib,
        disk_size_mb: given.shape.disk_mib,
        public: false,
        aliases: given.aliases.clone(),
        names: given.aliases.clone(),
        created_at: created,
        updated_at: created,
        created_by: None,
        last_spawned_at: None,
        spawn_count: 0,
        build_count: 1,
        envd_version: ENVD_VERSION.to_owned(),
        build_status: e2b::BuildStatus::Ready,
    }
}

pub fn template_with_builds(given: &model::TemplateInfo) -> e2b::TemplateWithBuilds {
    let template = template(given);
    let build = e2b::TemplateBuild {
        build_id: template.build_id.clone(),
        status: e2b::BuildStatus::Ready,
        created_at: template.created_at,
        updated_at: template.created_at,
        finished_at: template.created_at,
        cpu_count: template.cpu_count,
        memory_mb: template.memory_mb,
        disk_size_mb: template.disk_size_mb,
        envd_version: template.envd_version.clone(),
    };
    e2b::TemplateWithBuilds { template, builds: vec![build] }
}

pub fn template_info(given: &model::TemplateInfo) -> ours::TemplateInfo {
    ours::TemplateInfo {
        template_id: given.id.to_string(),
        aliases: given.aliases.clone(),
        engine: given.engine.to_string(),
        shape: shape(given.shape),
        snapshot_id: given.snapshot.as_ref().map(ToString::to_string),
        start_command: given.start_command.clone(),
        ready_command: given.ready_command.clone(),
        env: given.env.clone(),
        user: given.user.clone(),
        workdir: given.workdir.clone(),
        created_at: millis(given.created_at),
        bytes: given.bytes,
    }
}

/// Clients parse build ids as UUIDs, ours are not: the same one always gives the same UUID
/// (version 8 of RFC 9562, made of a digest).
fn uuid_of(id: &str) -> String {
    let digest = Sha256::digest(id.as_bytes());
    let hex: String = digest.iter().take(16).map(|byte| format!("{byte:02x}")).collect();
    format!("{}-{}-8{}-8{}-{}", &hex[..8], &hex[8..12], &hex[13..16], &hex[17..20], &hex[20..32])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn build_ids_are_uuids() {
        let uuid = uuid_of("b123");
        assert_eq!(uuid, uuid_of("b123"));
        assert_ne!(uuid, uuid_of("b124"));
        let groups: Vec<usize> = uuid.split('-').map(str::len).collect();
        assert_eq!(groups, [8, 4, 4, 4, 12]);
        assert_eq!((&uuid[14..15], &uuid[19..20]), ("8", "8"));
    }

    #[test]
    fn log_lines_are_json() {
        let given = model::LogLine {
            at: Timestamp::UNIX_EPOCH,
            level: model::Level::Warn,
            source: "keeper".to_owned(),
            message: "a \"word\"\n".to_owned(),
        };
        let line: serde_json::Value =
            serde_json::from_str(&log_line(&log_entry(&given)).line).expect("it is JSON");
        assert_eq!(line, json!({"level": "warn", "logger": "keeper", "message": "a \"word\"\n"}));
    }

    #[test]
    fn a_frozen_sandbox_counts_as_running() {
        let paused = |tier| e2b_state(&model::State::Paused { tier });
        assert_eq!(paused(model::Tier::Frozen), e2b::SandboxState::Running);
        assert_eq!(paused(model::Tier::Disk), e2b::SandboxState::Paused);
        assert_eq!(e2b_state(&model::State::Resuming), e2b::SandboxState::Running);
    }

    #[test]
    fn times_have_milliseconds() {
        let time: Timestamp = "2026-01-02T03:04:05.123456789Z".parse().expect("a time");
        assert_eq!(millis(time).to_string(), "2026-01-02T03:04:05.123Z");
    }
}
