//! How sandboxes, snapshots and receipts are told to people.

use dormouse_api::dormouse::{Receipt, SandboxInfo, SnapshotInfo, State, Tier};
use dormouse_api::e2b::OnTimeout;

use super::output::{bytes, pairs, relative, table};

pub fn state(info: &SandboxInfo) -> String {
    let word = match info.state {
        State::Creating => "creating",
        State::Running => "running",
        State::Pausing => "pausing",
        State::Paused => "paused",
        State::Resuming => "resuming",
        State::RollingBack => "rolling back",
        State::Killed => "killed",
        State::Failed => "failed",
    };
    match info.tier {
        Some(Tier::Frozen) => format!("{word} (frozen)"),
        Some(Tier::Disk) => format!("{word} (disk)"),
        Some(Tier::Archive) => format!("{word} (archive)"),
        None => word.to_owned(),
    }
}

pub fn sandboxes(list: &[SandboxInfo]) -> String {
    if list.is_empty() {
        return "there is no sandbox; `dormouse create` makes one".to_owned();
    }
    let mut table = table(["SANDBOX", "STATE", "TEMPLATE", "ENGINE", "STARTED", "ENDS", "METADATA"]);
    for info in list {
        let ends = if info.state == State::Paused { "–".to_owned() } else { relative(info.end_at) };
        table.add_row([
            info.sandbox_id.clone(),
            state(info),
            info.alias.clone().unwrap_or_else(|| info.template_id.clone()),
            info.engine.clone(),
            relative(info.started_at),
            ends,
            pairs(&info.metadata),
        ]);
    }
    table.to_string()
}

pub fn sandbox(info: &SandboxInfo) -> String {
    let mut lines = vec![format!("{}  {}", info.sandbox_id, state(info))];
    if let Some(why) = &info.why {
        lines.push(format!("  why failed   {why}"));
    }
    let template = info
        .alias
        .as_ref()
        .map_or_else(|| info.template_id.clone(), |alias| format!("{alias} ({})", info.template_id));
    let mut line = |name: &str, value: String| lines.push(format!("  {name:<12} {value}"));
    line("template", template);
    line("engine", info.engine.clone());
    line("hostname", info.hostname.clone());
    line("generation", info.generation.to_string());
    if let Some(parent) = &info.parent_snapshot_id {
        line("made of", parent.clone());
    }
    if let Some(source) = &info.forked_from {
        line("forked from", source.clone());
    }
    let shape = info.shape;
    line(
        "limits",
        format!(
            "{} CPUs, {} MiB memory, {} MiB disk, {} processes",
            shape.cpus, shape.memory_mb, shape.disk_mb, shape.processes_max
        ),
    );
    line("started", format!("{} ({})", info.started_at, relative(info.started_at)));
    let then = match info.on_timeout {
        OnTimeout::Kill => "it is killed",
        OnTimeout::Pause => "it is paused",
    };
    line("ends", format!("{} ({}): {then}", info.end_at, relative(info.end_at)));
    let idle = (info.idle.freeze_after, info.idle.disk_after);
    line("idle policy", idle_words(idle));
    line("network", network(info));
    if !info.metadata.is_empty() {
        line("metadata", pairs(&info.metadata));
    }
    if info.state == State::Running {
        let awake = if info.why_awake.is_empty() { "nothing".to_owned() } else { info.why_awake.join("; ") };
        line("kept awake by", awake);
    }
    lines.extend(info.receipts.iter().map(receipt));
    lines.join("\n")
}

fn idle_words(idle: (Option<u32>, Option<u32>)) -> String {
    match idle {
        (None, None) => "none: it runs until its deadline".to_owned(),
        (freeze, disk) => {
            let part = |after: Option<u32>, word| after.map(|seconds| format!("{word} after {seconds} s"));
            [part(freeze, "frozen"), part(disk, "to disk")]
                .into_iter()
                .flatten()
                .collect::<Vec<_>>()
                .join(", ")
        }
    }
}

fn network(info: &SandboxInfo) -> String {
    let mut words = vec![if info.network.internet { "internet" } else { "no internet" }.to_owned()];
    if !info.network.allow_out.is_empty() {
        words.push(format!("also {}", info.network.allow_out.join(", ")));
    }
    if !info.network.deny_out.is_empty() {
        words.push(format!("but not {}", info.network.deny_out.join(", ")));
    }
    words.join(", ")
}

/// One receipt, a few lines.
pub fn receipt(receipt: &Receipt) -> String {
    let stopped = receipt.stopped_ms.map_or_else(String::new, |ms| format!(", stopped {ms} ms"));
    let mut lines =
        vec![format!("  {} took {} ms{stopped} ({})", receipt.operation, receipt.took_ms, receipt.at)];
    let parts = [
        ("kept", &receipt.kept),
        ("refreshed", &receipt.refreshed),
        ("shared", &receipt.shared),
        ("dropped", &receipt.dropped),
    ];
    for (name, words) in parts {
        if !words.is_empty() {
            lines.push(format!("    {name:<10} {}", words.join(", ")));
        }
    }
    lines.join("\n")
}

pub fn snapshots(list: &[SnapshotInfo]) -> String {
    if list.is_empty() {
        return "there is no snapshot".to_owned();
    }
    let mut table = table(["SNAPSHOT", "NAMES", "SANDBOX", "REASON", "SIZE", "TAKEN", "EXPIRES", "PARENT"]);
    for info in list {
        table.add_row([
            info.snapshot_id.clone(),
            info.names.join(", "),
            info.sandbox_id.clone(),
            info.reason.clone(),
            bytes(info.bytes),
            relative(info.created_at),
            info.expires_at.map_or_else(|| "never".to_owned(), relative),
            info.parent_snapshot_id.clone().unwrap_or_default(),
        ]);
    }
    table.to_string()
}
