//! Lineage and names of snapshots.

use dormouse_types::{KeyId, SandboxId, SnapshotId, Timestamp};
use rusqlite::{Connection, OptionalExtension, Row, params};

use super::{Journal, JournalError};

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SnapshotRow {
    pub id: SnapshotId,
    /// As it is now: removed ancestors are skipped.
    pub parent: Option<SnapshotId>,
    pub sandbox: SandboxId,
    pub automatic: bool,
    pub owner: Option<KeyId>,
    pub created_ms: i64,
    pub names: Vec<String>,
}

fn id<T: std::str::FromStr<Err: std::error::Error + Send + Sync + 'static>>(
    text: &str,
) -> rusqlite::Result<T> {
    text.parse().map_err(|error| {
        rusqlite::Error::FromSqlConversionFailure(0, rusqlite::types::Type::Text, Box::new(error))
    })
}

fn row(row: &Row<'_>) -> rusqlite::Result<SnapshotRow> {
    let names: Option<String> = row.get(6)?;
    Ok(SnapshotRow {
        id: id(&row.get::<_, String>(0)?)?,
        parent: row.get::<_, Option<String>>(1)?.as_deref().map(id).transpose()?,
        sandbox: id(&row.get::<_, String>(2)?)?,
        automatic: row.get(3)?,
        owner: row.get::<_, Option<String>>(4)?.as_deref().map(id).transpose()?,
        created_ms: row.get(5)?,
        // No name holds a line feed: checked when it is given.
        names: names.map_or_else(Vec::new, |names| names.split('\n').map(str::to_owned).collect()),
    })
}

const SELECT: &str = "SELECT id, parent, sandbox, automatic, owner, created_ms,
    (SELECT group_concat(name, char(10)) FROM (SELECT name FROM snapshot_names n WHERE n.snapshot = s.id
     ORDER BY created_ms DESC, name)) FROM snapshots s";

fn set_name(connection: &Connection, snapshot: &SnapshotId, name: &str, now_ms: i64) -> rusqlite::Result<()> {
    connection.execute(
        "INSERT OR REPLACE INTO snapshot_names (name, snapshot, created_ms) VALUES (?1, ?2, ?3)",
        params![name, snapshot.as_str(), now_ms],
    )?;
    Ok(())
}

impl Journal {
    pub async fn put_snapshot(&self, snapshot: SnapshotRow) -> Result<(), JournalError> {
        self.call(move |connection| {
            connection.execute(
                "INSERT INTO snapshots (id, parent, sandbox, automatic, owner, created_ms)
                 VALUES (?1, ?2, ?3, ?4, ?5, ?6)
                 ON CONFLICT (id) DO UPDATE SET automatic = min(automatic, ?4)",
                params![
                    snapshot.id.as_str(),
                    snapshot.parent.as_ref().map(SnapshotId::as_str),
                    snapshot.sandbox.as_str(),
                    snapshot.automatic,
                    snapshot.owner.as_ref().map(KeyId::as_str),
                    snapshot.created_ms,
                ],
            )?;
            for name in &snapshot.names {
                set_name(connection, &snapshot.id, name, snapshot.created_ms)?;
            }
            Ok(())
        })
        .await
    }

    /// From now on somebody wants it: it stays when the next pause comes.
    pub async fn claim_snapshot(
        &self,
        snapshot: SnapshotId,
        name: Option<String>,
        now: Timestamp,
    ) -> Result<(), JournalError> {
        self.call(move |connection| {
            connection.execute("UPDATE snapshots SET automatic = 0 WHERE id = ?1", [snapshot.as_str()])?;
            name.map_or(Ok(()), |name| set_name(connection, &snapshot, &name, now.as_millisecond()))
        })
        .await
    }

    /// Takes it out of the lineage; its children hang on its parent from now on.
    pub async fn drop_snapshot(&self, snapshot: SnapshotId) -> Result<(), JournalError> {
        self.call(move |connection| {
            connection.execute(
                "UPDATE snapshots SET parent = (SELECT parent FROM snapshots WHERE id = ?1) WHERE parent = ?1",
                [snapshot.as_str()],
            )?;
            connection.execute("DELETE FROM snapshots WHERE id = ?1", [snapshot.as_str()])?;
            Ok(())
        })
        .await
    }

    pub async fn snapshot(&self, snapshot: SnapshotId) -> Result<Option<SnapshotRow>, JournalError> {
        self.call(move |connection| {
            connection.query_row(&format!("{SELECT} WHERE id = ?1"), [snapshot.as_str()], row).optional()
        })
        .await
    }

    pub async fn snapshot_by_name(&self, name: String) -> Result<Option<SnapshotRow>, JournalError> {
        self.call(move |connection| {
            let sql = format!("{SELECT} WHERE id = (SELECT snapshot FROM snapshot_names WHERE name = ?1)");
            connection.query_row(&sql, [name], row).optional()
        })
        .await
    }

    /// Newest first.
    pub async fn snapshots(&self) -> Result<Vec<SnapshotRow>, JournalError> {
        self.call(|connection| {
            let mut statement = connection.prepare(&format!("{SELECT} ORDER BY created_ms DESC, id DESC"))?;
            statement.query_map([], row)?.collect()
        })
        .await
    }

    pub async fn snapshots_of(&self, sandbox: SandboxId) -> Result<Vec<SnapshotRow>, JournalError> {
        self.call(move |connection| {
            let sql = format!("{SELECT} WHERE sandbox = ?1 ORDER BY created_ms DESC, id DESC");
            let mut statement = connection.prepare(&sql)?;
            statement.query_map([sandbox.as_str()], row)?.collect()
        })
        .await
    }

    pub async fn children(&self, snapshot: SnapshotId) -> Result<Vec<SnapshotId>, JournalError> {
        self.call(move |connection| {
            let mut statement =
                connection.prepare("SELECT id FROM snapshots WHERE parent = ?1 ORDER BY id")?;
            statement.query_map([snapshot.as_str()], |row| id(&row.get::<_, String>(0)?))?.collect()
        })
        .await
    }
}
