//! API keys: through the daemon where one answers, else in the data folder itself.

use std::path::Path;

use dormouse_api::client::encode;
use dormouse_api::dormouse::{KeyInfo, NewKey};
use dormouse_node::{KeyStore, NodeError, OpenError, model};
use dormouse_types::KeyId;
use serde_json::json;

use super::args::KeyCommand;
use super::context::Context;
use super::error::{CliError, ExitStatus};
use super::output::{relative, show, table};

const PATH: &str = "/dormouse/v1/keys";

pub async fn run(command: KeyCommand, context: &Context) -> Result<ExitStatus, CliError> {
    // A daemon that was named, or has written down where it is, is asked; else nobody else can be meant.
    let daemon = context.client()?.healthy().await;
    match command {
        KeyCommand::Create { name, named } => {
            let name = named.unwrap_or(name);
            let key = if daemon {
                let request = NewKey { name: Some(name) };
                context.client()?.post("create an API key", PATH, &request).await?
            } else {
                create_here(&context.data_dir, &name).await?
            };
            show(context, &key, |key| key.key.clone().unwrap_or_default())
        }
        KeyCommand::Ls => {
            let keys: Vec<KeyInfo> = if daemon {
                context.client()?.get("list the API keys", PATH).await?
            } else {
                let keys = store(&context.data_dir)?.list().await.map_err(failed)?;
                keys.into_iter().map(|info| told(info, None)).collect()
            };
            show(context, &keys, |keys| listed(keys))
        }
        KeyCommand::Rm { id } => {
            if daemon {
                let path = format!("{PATH}/{}", encode(&id));
                context.client()?.delete::<()>(&format!("remove API key {id}"), &path).await?;
            } else {
                remove_here(&context.data_dir, &id).await?;
            }
            show(context, &json!({"removed": id}), |_| id.clone())
        }
    }
}

fn store(data_dir: &Path) -> Result<KeyStore, CliError> {
    KeyStore::open(data_dir).map_err(|error: OpenError| {
        let hint = "no daemon answers, so the data folder itself was tried; is this its owner, and the right --data-dir?";
        CliError::failed(format!("cannot open the keys in {}: {}; {hint}", data_dir.display(), crate::chain(&error)))
    })
}

fn failed(error: NodeError) -> CliError {
    CliError::failed(error.to_string())
}

fn told(info: model::KeyInfo, key: Option<String>) -> KeyInfo {
    let model::KeyInfo { id, name, hint, created_at } = info;
    KeyInfo { key_id: id.to_string(), name, hint, created_at, key }
}

async fn create_here(data_dir: &Path, name: &str) -> Result<KeyInfo, CliError> {
    let (info, secret) = store(data_dir)?.create(name).await.map_err(failed)?;
    Ok(told(info, Some(secret)))
}

async fn remove_here(data_dir: &Path, id: &str) -> Result<(), CliError> {
    let key = id.parse::<KeyId>().map_err(|error| CliError::usage(error.to_string()))?;
    if store(data_dir)?.remove(key).await.map_err(failed)? {
        return Ok(());
    }
    let message = format!("there is no API key {id}; `dormouse key ls` lists them");
    Err(CliError::Said { message, status: ExitStatus::NOT_FOUND })
}

fn listed(keys: &[KeyInfo]) -> String {
    if keys.is_empty() {
        return "there is no API key; `dormouse key create` makes one".to_owned();
    }
    let mut table = table(["KEY ID", "NAME", "BEGINS WITH", "MADE"]);
    for key in keys {
        table.add_row([key.key_id.clone(), key.name.clone(), key.hint.clone(), relative(key.created_at)]);
    }
    table.to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn keys_are_made_without_a_daemon() {
        let folder = tempfile::tempdir().expect("a folder");
        let key = create_here(folder.path(), "first").await.expect("a key");
        let secret = key.key.expect("its secret");
        assert!(secret.strip_prefix("e2b_").is_some_and(|hex| hex.len() == 40), "{secret}");
        let keys = store(folder.path()).expect("it opens").list().await.expect("a list");
        assert_eq!(keys.len(), 1);
        assert!(!keys[0].hint.contains(&secret), "the hint tells the secret");
        remove_here(folder.path(), &key.key_id).await.expect("it goes");
        let gone = remove_here(folder.path(), &key.key_id).await.expect_err("it is gone");
        assert_eq!(gone.status(), ExitStatus::NOT_FOUND);
    }
}
