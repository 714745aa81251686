//! Sandboxes, the operations on them, their receipts, and idempotency keys.

use dormouse_types::{RuntimeId, SandboxId, SnapshotId, Timestamp};
use rusqlite::{Connection, OptionalExtension, params};
use serde::{Deserialize, Serialize};

use super::{Journal, JournalError, json, to_json};
use crate::lifecycle::{Machine, Work};
use crate::model::{Receipt, SandboxInfo};

/// Receipts kept per sandbox; the oldest go first.
const RECEIPTS_MAX: i64 = 200;
/// An idempotency key is remembered for a day.
const KEY_AGE_MS: i64 = 24 * 3600 * 1000;

#[derive(Debug, Clone)]
pub struct SandboxRow {
    pub info: SandboxInfo,
    pub machine: Machine,
    pub op: Option<PendingOp>,
}

/// What is being done, with the ids that were drawn for it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct PendingOp {
    pub op: u64,
    pub work: Work,
    /// The runtime that it starts.
    pub runtime: RuntimeId,
    /// The snapshot that it takes.
    pub snapshot: SnapshotId,
}

/// What an idempotency key was answered with.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Idempotent {
    pub sandboxes: Vec<SandboxId>,
    /// Of the request: the same key with another request is refused.
    pub digest: String,
}

pub fn put(connection: &Connection, info: &SandboxInfo, machine: &Machine) -> rusqlite::Result<()> {
    connection.execute(
        "INSERT INTO sandboxes (id, info, machine) VALUES (?1, ?2, ?3)
         ON CONFLICT (id) DO UPDATE SET info = ?2, machine = ?3",
        params![info.id.as_str(), to_json(info)?, to_json(machine)?],
    )?;
    Ok(())
}

fn put_op(
    connection: &Connection,
    sandbox: &SandboxId,
    op: &PendingOp,
    now: Timestamp,
) -> rusqlite::Result<()> {
    connection.execute(
        "INSERT OR REPLACE INTO operations (sandbox, op, started_ms) VALUES (?1, ?2, ?3)",
        params![sandbox.as_str(), to_json(op)?, now.as_millisecond()],
    )?;
    Ok(())
}

fn clear_op(connection: &Connection, sandbox: &SandboxId) -> rusqlite::Result<()> {
    connection.execute("DELETE FROM operations WHERE sandbox = ?1", [sandbox.as_str()])?;
    Ok(())
}

impl Journal {
    /// The intention and the sandbox as it is while that is carried out, in one commit.
    pub async fn begin(
        &self,
        info: SandboxInfo,
        machine: Machine,
        op: PendingOp,
        now: Timestamp,
    ) -> Result<(), JournalError> {
        self.call(move |connection| {
            put(connection, &info, &machine)?;
            put_op(connection, &info.id, &op, now)
        })
        .await
    }

    /// The state reached and, where work ended, the end of its operation, in one commit.
    pub async fn commit(
        &self,
        info: SandboxInfo,
        machine: Machine,
        ended: bool,
        receipt: Option<Receipt>,
    ) -> Result<(), JournalError> {
        self.call(move |connection| {
            put(connection, &info, &machine)?;
            if ended {
                clear_op(connection, &info.id)?;
            }
            if let Some(receipt) = receipt {
                connection.execute(
                    "INSERT INTO receipts (sandbox, receipt) VALUES (?1, ?2)",
                    params![info.id.as_str(), to_json(&receipt)?],
                )?;
                connection.execute(
                    "DELETE FROM receipts WHERE sandbox = ?1 AND seq <= (SELECT seq FROM receipts
                     WHERE sandbox = ?1 ORDER BY seq DESC LIMIT 1 OFFSET ?2)",
                    params![info.id.as_str(), RECEIPTS_MAX],
                )?;
            }
            Ok(())
        })
        .await
    }

    /// All that is known of a sandbox that is gone, but its events.
    pub async fn forget(&self, sandbox: SandboxId) -> Result<(), JournalError> {
        self.call(move |connection| {
            for sql in [
                "DELETE FROM sandboxes WHERE id = ?1",
                "DELETE FROM operations WHERE sandbox = ?1",
                "DELETE FROM receipts WHERE sandbox = ?1",
                "DELETE FROM metrics WHERE sandbox = ?1",
            ] {
                connection.execute(sql, [sandbox.as_str()])?;
            }
            Ok(())
        })
        .await
    }

    pub async fn sandboxes(&self) -> Result<Vec<SandboxRow>, JournalError> {
        self.call(|connection| {
            let mut statement = connection.prepare(
                "SELECT s.info, s.machine, o.op FROM sandboxes s LEFT JOIN operations o ON o.sandbox = s.id",
            )?;
            let rows = statement.query_map([], |row| {
                let (info, machine): (String, String) = (row.get(0)?, row.get(1)?);
                let op: Option<String> = row.get(2)?;
                Ok(SandboxRow {
                    info: json(&info)?,
                    machine: json(&machine)?,
                    op: op.as_deref().map(json).transpose()?,
                })
            })?;
            rows.collect()
        })
        .await
    }

    pub async fn receipts(&self, sandbox: SandboxId) -> Result<Vec<Receipt>, JournalError> {
        self.call(move |connection| {
            let mut statement =
                connection.prepare("SELECT receipt FROM receipts WHERE sandbox = ?1 ORDER BY seq")?;
            let rows = statement.query_map([sandbox.as_str()], |row| json(&row.get::<_, String>(0)?))?;
            rows.collect()
        })
        .await
    }

    pub async fn idempotent(&self, owner: String, key: String) -> Result<Option<Idempotent>, JournalError> {
        self.call(move |connection| {
            let found: Option<String> = connection
                .query_row(
                    "SELECT result FROM idempotency WHERE owner = ?1 AND key = ?2",
                    params![owner, key],
                    |row| row.get(0),
                )
                .optional()?;
            found.as_deref().map(json).transpose()
        })
        .await
    }

    pub async fn remember(
        &self,
        owner: String,
        key: String,
        result: Idempotent,
        now: Timestamp,
    ) -> Result<(), JournalError> {
        self.call(move |connection| {
            let now_ms = now.as_millisecond();
            connection.execute("DELETE FROM idempotency WHERE created_ms < ?1", [now_ms - KEY_AGE_MS])?;
            connection.execute(
                "INSERT OR REPLACE INTO idempotency (owner, key, result, created_ms) VALUES (?1, ?2, ?3, ?4)",
                params![owner, key, to_json(&result)?, now_ms],
            )?;
            Ok(())
        })
        .await
    }

    pub async fn unremember(&self, owner: String, key: String) -> Result<(), JournalError> {
        self.call(move |connection| {
            connection
                .execute("DELETE FROM idempotency WHERE owner = ?1 AND key = ?2", params![owner, key])?;
            Ok(())
        })
        .await
    }
}
