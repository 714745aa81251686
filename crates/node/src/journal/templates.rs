//! Templates, their aliases, and the cache of builds.

use dormouse_types::{KeyId, TemplateId, Timestamp};
use rusqlite::{Connection, OptionalExtension, params};

use super::{Journal, JournalError, json, to_json};
use crate::model::TemplateInfo;

/// Remembered builds; the oldest go first.
const CACHE_MAX: i64 = 500;

#[derive(Debug, Clone)]
pub struct TemplateRow {
    pub info: TemplateInfo,
}

fn read(connection: &Connection, id: &str) -> rusqlite::Result<Option<TemplateRow>> {
    let found: Option<String> = connection
        .query_row("SELECT info FROM templates WHERE id = ?1", [id], |row| row.get(0))
        .optional()?;
    let Some(info) = found else { return Ok(None) };
    let mut info: TemplateInfo = json(&info)?;
    let mut statement =
        connection.prepare("SELECT name FROM aliases WHERE template = ?1 ORDER BY created_ms, name")?;
    info.aliases = statement.query_map([id], |row| row.get(0))?.collect::<rusqlite::Result<_>>()?;
    Ok(Some(TemplateRow { info }))
}

impl Journal {
    /// The aliases point to it from now on, wherever they pointed before.
    pub async fn put_template(&self, info: TemplateInfo, owner: Option<KeyId>) -> Result<(), JournalError> {
        self.call(move |connection| {
            let now_ms = info.created_at.as_millisecond();
            connection.execute(
                "INSERT OR REPLACE INTO templates (id, info, owner, created_ms) VALUES (?1, ?2, ?3, ?4)",
                params![info.id.as_str(), to_json(&info)?, owner.as_ref().map(KeyId::as_str), now_ms],
            )?;
            for alias in &info.aliases {
                connection.execute(
                    "INSERT OR REPLACE INTO aliases (name, template, created_ms) VALUES (?1, ?2, ?3)",
                    params![alias, info.id.as_str(), now_ms],
                )?;
            }
            Ok(())
        })
        .await
    }

    /// By id or alias.
    pub async fn template(&self, name: String) -> Result<Option<TemplateRow>, JournalError> {
        self.call(move |connection| {
            let id: Option<String> = connection
                .query_row("SELECT template FROM aliases WHERE name = ?1", [&name], |row| row.get(0))
                .optional()?;
            read(connection, id.as_deref().unwrap_or(&name))
        })
        .await
    }

    /// Newest first.
    pub async fn templates(&self) -> Result<Vec<TemplateRow>, JournalError> {
        self.call(|connection| {
            let mut statement =
                connection.prepare("SELECT id FROM templates ORDER BY created_ms DESC, id")?;
            let ids = statement
                .query_map([], |row| row.get::<_, String>(0))?
                .collect::<rusqlite::Result<Vec<_>>>()?;
            ids.iter().filter_map(|id| read(connection, id).transpose()).collect()
        })
        .await
    }

    pub async fn drop_template(&self, id: TemplateId) -> Result<bool, JournalError> {
        self.call(move |connection| {
            Ok(connection.execute("DELETE FROM templates WHERE id = ?1", [id.as_str()])? > 0)
        })
        .await
    }

    pub async fn drop_alias(&self, name: String) -> Result<bool, JournalError> {
        self.call(
            move |connection| Ok(connection.execute("DELETE FROM aliases WHERE name = ?1", [name])? > 0),
        )
        .await
    }

    pub async fn put_alias(&self, name: String, id: TemplateId, now: Timestamp) -> Result<(), JournalError> {
        self.call(move |connection| {
            connection.execute(
                "INSERT OR REPLACE INTO aliases (name, template, created_ms) VALUES (?1, ?2, ?3)",
                params![name, id.as_str(), now.as_millisecond()],
            )?;
            Ok(())
        })
        .await
    }

    pub async fn cached_build(&self, digest: String) -> Result<Option<String>, JournalError> {
        self.call(move |connection| {
            connection
                .query_row("SELECT rootfs FROM build_cache WHERE digest = ?1", [digest], |row| row.get(0))
                .optional()
        })
        .await
    }

    pub async fn cache_build(
        &self,
        digest: String,
        rootfs: String,
        now: Timestamp,
    ) -> Result<(), JournalError> {
        self.call(move |connection| {
            connection.execute(
                "INSERT OR REPLACE INTO build_cache (digest, rootfs, created_ms) VALUES (?1, ?2, ?3)",
                params![digest, rootfs, now.as_millisecond()],
            )?;
            connection.execute(
                "DELETE FROM build_cache WHERE digest NOT IN
                 (SELECT digest FROM build_cache ORDER BY created_ms DESC LIMIT ?1)",
                [CACHE_MAX],
            )?;
            Ok(())
        })
        .await
    }

    pub async fn is_cached_rootfs(&self, rootfs: String) -> Result<bool, JournalError> {
        self.call(move |connection| {
            let sql = "SELECT EXISTS (SELECT 1 FROM build_cache WHERE rootfs = ?1)";
            connection.query_row(sql, [rootfs], |row| row.get(0))
        })
        .await
    }

    pub async fn uncache_rootfs(&self, rootfs: String) -> Result<(), JournalError> {
        self.call(move |connection| {
            connection.execute("DELETE FROM build_cache WHERE rootfs = ?1", [rootfs])?;
            Ok(())
        })
        .await
    }
}
