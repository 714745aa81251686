//! API keys.

use dormouse_api::client::encode;
use dormouse_api::dormouse::{KeyInfo, NewKey};
use serde_json::json;

use super::args::KeyCommand;
use super::context::Context;
use super::error::{CliError, ExitStatus};
use super::output::{relative, show, table};

const PATH: &str = "/dormouse/v1/keys";

pub async fn run(command: KeyCommand, context: &Context) -> Result<ExitStatus, CliError> {
    let client = context.client()?;
    match command {
        KeyCommand::Create { name, named } => {
            let request = NewKey { name: Some(named.unwrap_or(name)) };
            let key: KeyInfo = client.post("create an API key", PATH, &request).await?;
            show(context, &key, |key| key.key.clone().unwrap_or_default())
        }
        KeyCommand::Ls => {
            let keys: Vec<KeyInfo> = client.get("list the API keys", PATH).await?;
            show(context, &keys, |keys| listed(keys))
        }
        KeyCommand::Rm { id } => {
            client.delete::<()>(&format!("remove API key {id}"), &format!("{PATH}/{}", encode(&id))).await?;
            show(context, &json!({"removed": id}), |_| id.clone())
        }
    }
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
