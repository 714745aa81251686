//! API keys: only a hash is kept.

use dormouse_types::{KeyId, Timestamp};
use rusqlite::{OptionalExtension, Row, params};

use super::{Journal, JournalError};
use crate::model::KeyInfo;

/// BLAKE3 of the whole secret. It has 160 random bits, so that a slow hash would protect nothing.
#[must_use]
pub fn hash_secret(secret: &str) -> [u8; 32] {
    *blake3::hash(secret.as_bytes()).as_bytes()
}

fn row(row: &Row<'_>) -> rusqlite::Result<KeyInfo> {
    let id: String = row.get(0)?;
    let id = id.parse::<KeyId>().map_err(|error| {
        rusqlite::Error::FromSqlConversionFailure(0, rusqlite::types::Type::Text, Box::new(error))
    })?;
    let created_at = Timestamp::from_millisecond(row.get(3)?).unwrap_or_default();
    Ok(KeyInfo { id, name: row.get(1)?, hint: row.get(2)?, created_at })
}

impl Journal {
    pub async fn put_key(&self, info: KeyInfo, hash: [u8; 32]) -> Result<(), JournalError> {
        self.call(move |connection| {
            connection.execute(
                "INSERT INTO keys (id, name, hint, hash, created_ms) VALUES (?1, ?2, ?3, ?4, ?5)",
                params![info.id.as_str(), info.name, info.hint, hash, info.created_at.as_millisecond()],
            )?;
            Ok(())
        })
        .await
    }

    pub async fn keys(&self) -> Result<Vec<KeyInfo>, JournalError> {
        self.call(|connection| {
            let mut statement =
                connection.prepare("SELECT id, name, hint, created_ms FROM keys ORDER BY created_ms, id")?;
            statement.query_map([], row)?.collect()
        })
        .await
    }

    pub async fn drop_key(&self, id: KeyId) -> Result<bool, JournalError> {
        self.call(move |connection| {
            Ok(connection.execute("DELETE FROM keys WHERE id = ?1", [id.as_str()])? > 0)
        })
        .await
    }

    pub async fn key_by_hash(&self, hash: [u8; 32]) -> Result<Option<KeyInfo>, JournalError> {
        self.call(move |connection| {
            connection
                .query_row("SELECT id, name, hint, created_ms FROM keys WHERE hash = ?1", [hash], row)
                .optional()
        })
        .await
    }
}
