//! Linear, numbered; each runs once, in order, in its own transaction. Never edit one that was released.

use std::path::Path;

use rusqlite::Connection;

use crate::error::OpenError;

const MIGRATIONS: &[&str] = &[include_str!("migrations/0001_first.sql")];

pub fn run(connection: &Connection, path: &Path) -> Result<(), OpenError> {
    let failed =
        |error: rusqlite::Error| OpenError::Journal { path: path.to_owned(), why: error.to_string() };
    let found: i64 = connection.query_row("PRAGMA user_version", [], |row| row.get(0)).map_err(failed)?;
    let known = i64::try_from(MIGRATIONS.len()).unwrap_or(i64::MAX);
    if found > known {
        return Err(OpenError::Newer { path: path.to_owned(), found, known });
    }
    for (number, sql) in (1_i64..).zip(MIGRATIONS) {
        if number > found {
            let whole = format!("BEGIN IMMEDIATE;\n{sql}\nPRAGMA user_version = {number};\nCOMMIT;");
            connection.execute_batch(&whole).map_err(failed)?;
        }
    }
    Ok(())
}
