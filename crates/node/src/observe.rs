//! Readings and logs of one sandbox.

use std::path::Path;
use std::time::Duration;

use dormouse_types::{SandboxId, Timestamp};
use serde::Deserialize;

use crate::actor::Handle;
use crate::agent;
use crate::error::NodeError;
use crate::hub::Hub;
use crate::model::{Level, LogLine, LogQuery, Metric, SandboxInfo, State};

const LOG_LINES_MAX: usize = 1000;
/// How much of the end of a log file is read.
const LOG_TAIL_BYTES: u64 = 256 << 10;

/// envd's `/metrics`.
#[derive(Deserialize)]
struct Reading {
    #[serde(default)]
    cpu_count: u32,
    #[serde(default)]
    cpu_used_pct: f64,
    #[serde(default)]
    mem_used: u64,
    #[serde(default)]
    mem_total: u64,
    #[serde(default)]
    mem_cache: u64,
    #[serde(default)]
    disk_used: u64,
    #[serde(default)]
    disk_total: u64,
}

async fn sample(hub: &Hub, handle: &Handle) -> Result<Metric, NodeError> {
    let info = handle.info();
    let dir = hub.engine(info.engine)?.keeper_dir(&info.id);
    let body = agent::get(&dir, "/metrics", &info.access_token, Duration::from_secs(5))
        .await
        .map_err(|error| NodeError::unavailable(error.to_string()))?;
    let reading: Reading = serde_json::from_slice(&body)
        .map_err(|error| NodeError::internal(format!("the agent's metrics cannot be read: {error}")))?;
    let (disk_used, disk_total) = match reading.disk_total {
        0 => disk(hub, &info).await?,
        total => (reading.disk_used, total),
    };
    Ok(Metric {
        at: hub.now(),
        cpu_count: reading.cpu_count,
        cpu_used_pct: reading.cpu_used_pct,
        mem_used: reading.mem_used,
        mem_total: reading.mem_total,
        mem_cache: reading.mem_cache,
        disk_used,
        disk_total,
    })
}

/// The disk as seen from outside, used and all, where the kernel inside does not know it: the root file
/// system, and what was written over it of what may be.
async fn disk(hub: &Hub, info: &SandboxInfo) -> Result<(u64, u64), NodeError> {
    let written = match &info.runtime {
        Some(runtime) => hub.engine(info.engine)?.usage(&info.id, runtime).await?.disk_bytes,
        None => 0,
    };
    let (images, rootfs) = (hub.images.clone(), info.rootfs.clone());
    let image = hub
        .blocking("the reading of an image", move || images.load(&rootfs))
        .await?
        .map_err(|error| NodeError::internal(error.to_string()))?;
    let may = u64::from(info.shape.disk_mib) << 20;
    Ok((image.bytes.saturating_add(written), image.bytes.saturating_add(may)))
}

/// The history, and a fresh reading at its end where the sandbox runs and the time asked for has come.
pub async fn metrics(
    hub: &Hub,
    handle: &Handle,
    start: Option<Timestamp>,
    end: Option<Timestamp>,
) -> Result<Vec<Metric>, NodeError> {
    let info = handle.info();
    let now = hub.now();
    let to = end.unwrap_or(now);
    let from_ms = start.map_or(i64::MIN, Timestamp::as_millisecond);
    let mut history = hub.journal.metrics(info.id.clone(), from_ms, to.as_millisecond()).await?;
    if info.state == State::Running && to >= now {
        match sample(hub, handle).await {
            Ok(metric) => {
                hub.journal.post_metric(info.id.clone(), metric.clone());
                history.push(metric);
            }
            Err(error) if history.is_empty() => return Err(error),
            Err(error) => tracing::warn!(sandbox = %info.id, %error, "no fresh reading"),
        }
    }
    Ok(history)
}

/// What the node did to it, and the end of its keeper's log.
pub async fn logs(hub: &Hub, id: &SandboxId, query: LogQuery) -> Result<Vec<LogLine>, NodeError> {
    let handle = hub.actor(id)?;
    let limit = query.limit.unwrap_or(LOG_LINES_MAX).min(LOG_LINES_MAX);
    let mut lines: Vec<LogLine> = hub
        .journal
        .events_of(id.clone(), LOG_LINES_MAX)
        .await?
        .into_iter()
        .map(|event| LogLine {
            at: event.at,
            level: if event.kind.contains("failed") { Level::Error } else { Level::Info },
            source: "node".to_owned(),
            message: if event.message.is_empty() {
                event.kind
            } else {
                format!("{}: {}", event.kind, event.message)
            },
        })
        .collect();
    let path = hub.engine(handle.info().engine)?.keeper_dir(id).join(dormouse_wire::keeper::LOG_FILE);
    let tail = hub.blocking("the reading of a log", move || tail(&path)).await?;
    lines.extend(tail);
    lines.sort_by_key(|line| line.at);
    lines.retain(|line| query.start.is_none_or(|start| line.at >= start));
    lines.truncate(limit);
    Ok(lines)
}

/// A missing file has no lines.
fn tail(path: &Path) -> Vec<LogLine> {
    use std::io::{Read, Seek, SeekFrom};
    let Ok(mut file) = std::fs::File::open(path) else { return Vec::new() };
    let Ok(meta) = file.metadata() else { return Vec::new() };
    let at = meta.modified().ok().and_then(|time| Timestamp::try_from(time).ok()).unwrap_or_default();
    let skipped = meta.len().saturating_sub(LOG_TAIL_BYTES);
    let mut bytes = Vec::new();
    if file
        .seek(SeekFrom::Start(skipped))
        .and_then(|_| file.take(LOG_TAIL_BYTES).read_to_end(&mut bytes))
        .is_err()
    {
        return Vec::new();
    }
    let text = String::from_utf8_lossy(&bytes);
    let whole = if skipped > 0 { text.split_once('\n').map_or("", |(_, rest)| rest) } else { &text };
    whole.lines().filter(|line| !line.trim().is_empty()).map(|line| parse(line, at)).collect()
}

/// Lines begin with a time and a level, as `tracing` writes them; what does not gets the file's time.
fn parse(line: &str, fallback: Timestamp) -> LogLine {
    let (first, rest) = line.trim_start().split_once(char::is_whitespace).unwrap_or(("", line));
    let (at, rest) = first.parse::<Timestamp>().map_or((fallback, line), |at| (at, rest.trim_start()));
    let level = match rest.split_whitespace().next() {
        Some("ERROR") => Level::Error,
        Some("WARN") => Level::Warn,
        Some("DEBUG" | "TRACE") => Level::Debug,
        _ => Level::Info,
    };
    LogLine { at, level, source: "keeper".to_owned(), message: rest.to_owned() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_with_a_time_keeps_it() {
        let fallback = Timestamp::UNIX_EPOCH;
        let line = parse("2026-01-02T03:04:05.678Z  WARN keeper: no agent", fallback);
        assert_eq!((line.at.to_string().as_str(), line.level), ("2026-01-02T03:04:05.678Z", Level::Warn));
        let line = parse("panicked at", fallback);
        assert_eq!((line.at, line.level, line.message.as_str()), (fallback, Level::Info, "panicked at"));
    }
}
