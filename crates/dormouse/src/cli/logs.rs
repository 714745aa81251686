//! What a sandbox logged.

use dormouse_api::client::encode;
use serde_json::Value;

use super::args::LogsArgs;
use super::context::Context;
use super::error::{CliError, ExitStatus};
use super::output::show;

pub async fn run(args: &LogsArgs, context: &Context) -> Result<ExitStatus, CliError> {
    let what = format!("read the log of sandbox {}", args.sandbox);
    let path = format!("/sandboxes/{}/logs?limit={}", encode(&args.sandbox), args.lines);
    let logs: Value = context.client()?.get(&what, &path).await?;
    show(context, &logs, |logs| {
        let entries = logs["logEntries"].as_array().map_or(&[] as &[Value], Vec::as_slice);
        let line = |entry: &Value| {
            let word = |name: &str| entry[name].as_str().unwrap_or_default().to_owned();
            format!("{} {:<5} {}", word("timestamp"), word("level"), word("message"))
        };
        entries.iter().map(line).collect::<Vec<_>>().join("\n")
    })
}
