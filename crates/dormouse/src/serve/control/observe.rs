//! Metrics, logs, the one team, and the daemon's own figures.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use axum::extract::State as Extracted;
use dormouse_api::e2b::{
    LogLevel, SandboxLogEntry, SandboxLogs, SandboxLogsV2, SandboxMetric, SandboxesWithMetrics, Team,
};
use dormouse_api::error::ApiError;
use dormouse_api::query::Query;
use dormouse_node::ErrorCode;
use dormouse_node::model::{LogQuery, UsageSummary};
use dormouse_types::{SandboxId, Timestamp};

use super::extract::{Asked, Id};
use crate::serve::app::{App, Caller, Requests};
use crate::serve::convert;
use crate::serve::reply::{self, Failure, Outcome};

type Shared = Extracted<Arc<App>>;

const LOG_LINES_MAX: usize = 1000;
const SANDBOXES_AT_ONCE_MAX: usize = 100;

fn time(query: &Query, name: &str, of: fn(i64) -> Option<Timestamp>) -> Result<Option<Timestamp>, ApiError> {
    query
        .number::<i64>(name)?
        .map(|given| of(given).ok_or_else(|| ApiError::invalid(name, format!("{given} is no time"))))
        .transpose()
}

fn of_seconds(given: i64) -> Option<Timestamp> {
    Timestamp::from_second(given).ok()
}

fn of_milliseconds(given: i64) -> Option<Timestamp> {
    Timestamp::from_millisecond(given).ok()
}

pub async fn metrics(app: Shared, Id(id): Id, Asked(query): Asked) -> Outcome {
    let (start, end) = (time(&query, "start", of_seconds)?, time(&query, "end", of_seconds)?);
    let metrics: Vec<SandboxMetric> =
        app.node.metrics(&id, start, end).await?.iter().map(convert::metric).collect();
    Ok(reply::json(200, &metrics))
}

pub async fn metrics_of_many(app: Shared, Asked(query): Asked) -> Outcome {
    let given = query.get("sandbox_ids").unwrap_or("");
    let ids: Vec<&str> = given.split(',').filter(|id| !id.is_empty()).collect();
    if ids.len() > SANDBOXES_AT_ONCE_MAX {
        return Err(Failure(ApiError::invalid("sandbox_ids", format!("more than {SANDBOXES_AT_ONCE_MAX}"))));
    }
    let mut sandboxes = BTreeMap::new();
    for id in ids {
        let id: SandboxId = id.parse().map_err(|error| ApiError::invalid("sandbox_ids", error))?;
        match app.node.metrics(&id, None, None).await {
            Ok(metrics) => {
                sandboxes.extend(metrics.last().map(|latest| (id.to_string(), convert::metric(latest))));
            }
            Err(error) if error.code == ErrorCode::NotFound => {}
            Err(error) => return Err(error.into()),
        }
    }
    Ok(reply::json(200, &SandboxesWithMetrics { sandboxes }))
}

fn log_limit(query: &Query) -> Result<usize, ApiError> {
    query.limit(LOG_LINES_MAX)
}

pub async fn logs(app: Shared, Id(id): Id, Asked(query): Asked) -> Outcome {
    let asked = LogQuery { start: time(&query, "start", of_milliseconds)?, limit: Some(log_limit(&query)?) };
    let log_entries: Vec<SandboxLogEntry> =
        app.node.logs(&id, asked).await?.iter().map(convert::log_entry).collect();
    let logs = log_entries.iter().map(convert::log_line).collect();
    Ok(reply::json(200, &SandboxLogs { logs, log_entries }))
}

/// Which lines of a log page pass.
struct LogFilter {
    level: LogLevel,
    search: String,
    backward: bool,
    /// Backward: lines before this time; forward: the node was asked for lines since.
    before: Option<Timestamp>,
    limit: usize,
}

impl LogFilter {
    fn parse(query: &Query) -> Result<Self, ApiError> {
        let level = match query.get("level") {
            None | Some("debug") => LogLevel::Debug,
            Some("info") => LogLevel::Info,
            Some("warn") => LogLevel::Warn,
            Some("error") => LogLevel::Error,
            Some(other) => return Err(ApiError::invalid("level", format!("{other:?} is no level"))),
        };
        let backward = match query.get("direction") {
            None | Some("forward") => false,
            Some("backward") => true,
            Some(other) => {
                return Err(ApiError::invalid(
                    "direction",
                    format!("{other:?} is neither forward nor backward"),
                ));
            }
        };
        let before = if backward { time(query, "cursor", of_milliseconds)? } else { None };
        let search = query.get("search").unwrap_or("").to_owned();
        Ok(Self { level, search, backward, before, limit: log_limit(query)? })
    }

    fn apply(&self, entries: Vec<SandboxLogEntry>) -> Vec<SandboxLogEntry> {
        let passes = |entry: &SandboxLogEntry| {
            entry.level >= self.level
                && entry.message.contains(&self.search)
                && self.before.is_none_or(|before| entry.timestamp < before)
        };
        let mut passing: Vec<_> = entries.into_iter().filter(passes).collect();
        if self.backward {
            passing.reverse();
        }
        passing.truncate(self.limit);
        passing
    }
}

pub async fn logs_v2(app: Shared, Id(id): Id, Asked(query): Asked) -> Outcome {
    let filter = LogFilter::parse(&query)?;
    let start = if filter.backward { None } else { time(&query, "cursor", of_milliseconds)? };
    let lines = app.node.logs(&id, LogQuery { start, limit: Some(LOG_LINES_MAX) }).await?;
    let logs = filter.apply(lines.iter().map(convert::log_entry).collect());
    Ok(reply::json(200, &SandboxLogsV2 { logs }))
}

/// There are no teams here: all keys of a node belong to one.
pub async fn teams(caller: Caller) -> Outcome {
    let team = Team {
        team_id: "dormouse".to_owned(),
        name: "dormouse".to_owned(),
        api_key: caller.secret,
        is_default: true,
    };
    Ok(reply::json(200, &[team]))
}

pub async fn prometheus(app: Shared) -> Outcome {
    let text = exposition(&app.node.usage_summary().await?, &app.requests);
    Ok(reply::with_body(200, "text/plain; version=0.0.4", text))
}

/// Prometheus' text exposition format, version 0.0.4.
fn exposition(usage: &UsageSummary, requests: &Requests) -> String {
    let mut text = String::new();
    let mut metric = |name: &str, kind: &str, help: &str, values: &[(&str, u64)]| {
        // Writing into a String cannot fail.
        let _ = writeln!(text, "# HELP {name} {help}\n# TYPE {name} {kind}");
        for (labels, value) in values {
            let _ = writeln!(text, "{name}{labels} {value}");
        }
    };
    let states = [
        ("{state=\"running\"}", usage.running as u64),
        ("{state=\"frozen\"}", usage.frozen as u64),
        ("{state=\"paused\"}", usage.paused as u64),
        ("{state=\"failed\"}", usage.failed as u64),
        ("{state=\"busy\"}", usage.busy as u64),
    ];
    metric("dormouse_sandboxes", "gauge", "Sandboxes by state.", &states);
    metric("dormouse_snapshots", "gauge", "Snapshots on disk.", &[("", usage.snapshots as u64)]);
    metric("dormouse_snapshot_bytes", "gauge", "Bytes that snapshots hold.", &[("", usage.snapshot_bytes)]);
    metric("dormouse_templates", "gauge", "Templates.", &[("", usage.templates as u64)]);
    metric(
        "dormouse_disk_free_bytes",
        "gauge",
        "Free bytes on the data folder's disk.",
        &[("", usage.disk_free_bytes)],
    );
    let operations = [
        ("{operation=\"create\"}", usage.created_total),
        ("{operation=\"pause\"}", usage.paused_total),
        ("{operation=\"resume\"}", usage.resumed_total),
        ("{operation=\"fork\"}", usage.forked_total),
    ];
    metric("dormouse_operations_total", "counter", "Operations on sandboxes.", &operations);
    metric("dormouse_failures_total", "counter", "Sandboxes that failed.", &[("", usage.failed_total)]);
    let served = [
        ("{plane=\"control\"}", requests.control.load(Ordering::Relaxed)),
        ("{plane=\"data\"}", requests.data.load(Ordering::Relaxed)),
    ];
    metric("dormouse_requests_total", "counter", "Requests by plane.", &served);
    let failed = requests.failed.load(Ordering::Relaxed);
    metric("dormouse_requests_failed_total", "counter", "Requests answered with 5xx.", &[("", failed)]);
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    fn entry(second: i64, level: LogLevel, message: &str) -> SandboxLogEntry {
        let timestamp = Timestamp::from_second(second).expect("a time");
        SandboxLogEntry { timestamp, message: message.to_owned(), level, fields: BTreeMap::new() }
    }

    #[test]
    fn log_pages_are_filtered() {
        let entries = vec![
            entry(1, LogLevel::Info, "created"),
            entry(2, LogLevel::Debug, "created nothing"),
            entry(3, LogLevel::Error, "failed"),
            entry(4, LogLevel::Warn, "created again"),
        ];
        let check = |query: &str, expected: &[&str]| {
            let filter = LogFilter::parse(&Query::parse(Some(query)).expect("a query")).expect("a filter");
            let passing: Vec<String> =
                filter.apply(entries.clone()).into_iter().map(|entry| entry.message).collect();
            assert_eq!(passing, expected, "{query}");
        };
        check("", &["created", "created nothing", "failed", "created again"]);
        check("level=warn", &["failed", "created again"]);
        check("search=created&level=info", &["created", "created again"]);
        check("direction=backward&limit=2", &["created again", "failed"]);
        check("direction=backward&cursor=3000", &["created nothing", "created"]);
        assert!(LogFilter::parse(&Query::parse(Some("level=loud")).expect("a query")).is_err());
    }

    #[test]
    fn the_exposition_has_a_type_for_every_metric() {
        let text = exposition(&UsageSummary { running: 3, ..UsageSummary::default() }, &Requests::default());
        assert!(text.contains("dormouse_sandboxes{state=\"running\"} 3\n"));
        for line in text.lines().filter(|line| !line.starts_with('#')) {
            let name = line.split(['{', ' ']).next().expect("a name");
            assert!(text.contains(&format!("# TYPE {name} ")), "{name} has no type");
        }
    }
}
