//! Events and readings: bounded histories.

use dormouse_types::{SandboxId, Timestamp};
use rusqlite::{Row, params};

use super::{Journal, JournalError, json, to_json};
use crate::model::{Event, Metric};

/// Events kept on the node; the oldest go first.
const EVENTS_MAX: u64 = 50_000;
/// Readings kept per sandbox.
const METRICS_MAX: i64 = 1000;
pub const PAGE_MAX: usize = 1000;

fn event(row: &Row<'_>) -> rusqlite::Result<Event> {
    let sandbox: Option<String> = row.get(2)?;
    Ok(Event {
        seq: row.get::<_, i64>(0)?.unsigned_abs(),
        at: Timestamp::from_millisecond(row.get(1)?).unwrap_or_default(),
        sandbox: sandbox.and_then(|id| id.parse().ok()),
        kind: row.get(3)?,
        message: row.get(4)?,
    })
}

fn signed(number: u64) -> i64 {
    i64::try_from(number).unwrap_or(i64::MAX)
}

impl Journal {
    pub fn post_event(&self, event: Event) {
        self.post(move |connection| {
            connection.execute(
                "INSERT OR REPLACE INTO events (seq, at_ms, sandbox, kind, message) VALUES (?1, ?2, ?3, ?4, ?5)",
                params![
                    signed(event.seq),
                    event.at.as_millisecond(),
                    event.sandbox.as_ref().map(SandboxId::as_str),
                    event.kind,
                    event.message
                ],
            )?;
            if event.seq.is_multiple_of(256) {
                connection.execute(
                    "DELETE FROM events WHERE seq <= ?1",
                    [signed(event.seq.saturating_sub(EVENTS_MAX))],
                )?;
            }
            Ok(())
        });
    }

    pub async fn last_event(&self) -> Result<u64, JournalError> {
        self.call(|connection| {
            let last: i64 =
                connection.query_row("SELECT coalesce(max(seq), 0) FROM events", [], |row| row.get(0))?;
            Ok(last.unsigned_abs())
        })
        .await
    }

    pub async fn events(&self, since: u64, limit: usize) -> Result<Vec<Event>, JournalError> {
        self.call(move |connection| {
            let mut statement = connection.prepare(
                "SELECT seq, at_ms, sandbox, kind, message FROM events WHERE seq > ?1 ORDER BY seq LIMIT ?2",
            )?;
            let limit = signed(limit.min(PAGE_MAX) as u64);
            statement.query_map(params![signed(since), limit], event)?.collect()
        })
        .await
    }

    pub async fn events_of(&self, sandbox: SandboxId, limit: usize) -> Result<Vec<Event>, JournalError> {
        self.call(move |connection| {
            let mut statement = connection.prepare(
                "SELECT * FROM (SELECT seq, at_ms, sandbox, kind, message FROM events WHERE sandbox = ?1
                 ORDER BY seq DESC LIMIT ?2) ORDER BY seq",
            )?;
            let limit = signed(limit.min(PAGE_MAX) as u64);
            statement.query_map(params![sandbox.as_str(), limit], event)?.collect()
        })
        .await
    }

    pub fn post_metric(&self, sandbox: SandboxId, metric: Metric) {
        self.post(move |connection| {
            connection.execute(
                "INSERT OR REPLACE INTO metrics (sandbox, at_ms, metric) VALUES (?1, ?2, ?3)",
                params![sandbox.as_str(), metric.at.as_millisecond(), to_json(&metric)?],
            )?;
            connection.execute(
                "DELETE FROM metrics WHERE sandbox = ?1 AND at_ms <= (SELECT at_ms FROM metrics
                 WHERE sandbox = ?1 ORDER BY at_ms DESC LIMIT 1 OFFSET ?2)",
                params![sandbox.as_str(), METRICS_MAX],
            )?;
            Ok(())
        });
    }

    pub async fn metrics(
        &self,
        sandbox: SandboxId,
        from_ms: i64,
        to_ms: i64,
    ) -> Result<Vec<Metric>, JournalError> {
        self.call(move |connection| {
            let mut statement = connection.prepare(
                "SELECT metric FROM metrics WHERE sandbox = ?1 AND at_ms BETWEEN ?2 AND ?3 ORDER BY at_ms LIMIT ?4",
            )?;
            statement
                .query_map(params![sandbox.as_str(), from_ms, to_ms, METRICS_MAX], |row| {
                    json(&row.get::<_, String>(0)?)
                })?
                .collect()
        })
        .await
    }
}
