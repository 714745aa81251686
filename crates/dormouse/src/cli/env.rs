//! How other programs reach the daemon and what listens inside a sandbox.

use dormouse_api::client::encode;
use dormouse_api::dormouse::NodeInfo;
use serde_json::json;

use super::args::EnvForm;
use super::context::Context;
use super::error::{CliError, ExitStatus};
use super::output::show;

/// The variables that point E2B's clients and this one here.
pub fn run(form: EnvForm, context: &Context) -> Result<ExitStatus, CliError> {
    let key = context.key.clone().ok_or_else(|| {
        CliError::missing(
            "cannot tell which API key to use: none was given, and the data folder's own cannot be read; \
             make one with `dormouse key create` and set DORMOUSE_API_KEY",
        )
    })?;
    let variables = [
        ("E2B_API_URL", context.url.clone()),
        ("E2B_SANDBOX_URL", context.url.clone()),
        ("E2B_API_KEY", key.clone()),
        ("DORMOUSE_URL", context.url.clone()),
        ("DORMOUSE_API_KEY", key),
    ];
    let object: serde_json::Map<String, serde_json::Value> =
        variables.iter().map(|(name, value)| ((*name).to_owned(), json!(value))).collect();
    show(context, &object, |_| {
        let line = |(name, value): &(&str, String)| match form {
            EnvForm::Export => format!("export {name}='{}'", value.replace('\'', r"'\''")),
            EnvForm::Plain => format!("{name}={value}"),
        };
        variables.iter().map(line).collect::<Vec<_>>().join("\n")
    })
}

async fn host(sandbox: &str, port: u16, context: &Context) -> Result<(String, String), CliError> {
    let info = context.sandbox(sandbox).await?;
    let node: NodeInfo = context.client()?.get("ask the node", "/dormouse/v1/node").await?;
    let own_port = context.url.rsplit_once(':').map_or("", |(_, port)| port.trim_end_matches('/'));
    let name = format!("{port}-{}.{}", encode(&info.sandbox_id), node.domain);
    // The domain may carry a port of its own (a proxy's).
    let host = if node.domain.contains(':') { name } else { format!("{name}:{own_port}") };
    Ok((host, info.sandbox_id))
}

pub async fn port(sandbox: &str, port: u16, context: &Context) -> Result<ExitStatus, CliError> {
    let (host, id) = host(sandbox, port, context).await?;
    show(context, &json!({"host": host, "sandboxID": id, "port": port}), |_| host.clone())
}

pub async fn url(sandbox: &str, port: u16, context: &Context) -> Result<ExitStatus, CliError> {
    let (host, id) = host(sandbox, port, context).await?;
    let by_name = format!("http://{host}/");
    let by_header = format!("curl -H 'E2b-Sandbox-Id: {id}' -H 'E2b-Sandbox-Port: {port}' {}/", context.url);
    let answer = json!({
        "url": by_name,
        "base": context.url,
        "headers": {"E2b-Sandbox-Id": id, "E2b-Sandbox-Port": port.to_string()},
    });
    show(context, &answer, |_| {
        format!("{by_name}\n  where that name does not resolve to the daemon:\n  {by_header}")
    })
}
