//! API keys without a node: for a command line on a data folder that no daemon runs on (or does: the database takes
//! both).

use std::fs::DirBuilder;
use std::os::unix::fs::DirBuilderExt;
use std::path::Path;

use dormouse_types::{KeyId, Timestamp, random_hex};

use crate::error::{NodeError, OpenError};
use crate::journal::{Journal, hash_secret};
use crate::model::KeyInfo;

/// Random bytes of a secret: 40 hex digits, which E2B's clients check.
const SECRET_BYTES: usize = 20;
const HINT_CHARS: usize = 8;

pub struct KeyStore {
    journal: Journal,
}

impl KeyStore {
    /// Opens the keys of a data folder, which is made if it is not there.
    pub fn open(data_dir: &Path) -> Result<Self, OpenError> {
        DirBuilder::new().recursive(true).mode(0o700).create(data_dir).map_err(|source| OpenError::Io {
            action: "make",
            path: data_dir.to_owned(),
            source,
        })?;
        Ok(Self { journal: Journal::open_beside(data_dir)? })
    }

    /// The secret is told once; only its hash is kept.
    pub async fn create(&self, name: &str) -> Result<(KeyInfo, String), NodeError> {
        let secret = format!("e2b_{}", random_hex(SECRET_BYTES));
        let info = KeyInfo {
            id: KeyId::generate(),
            name: name.to_owned(),
            hint: secret.chars().take(HINT_CHARS).collect(),
            created_at: Timestamp::now(),
        };
        self.journal.put_key(info.clone(), hash_secret(&secret)).await?;
        Ok((info, secret))
    }

    pub async fn list(&self) -> Result<Vec<KeyInfo>, NodeError> {
        Ok(self.journal.keys().await?)
    }

    /// False: there is no such key.
    pub async fn remove(&self, id: KeyId) -> Result<bool, NodeError> {
        Ok(self.journal.drop_key(id).await?)
    }
}
