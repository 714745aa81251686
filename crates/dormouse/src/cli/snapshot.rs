//! Snapshots: list and remove.

use dormouse_api::client::encode;
use dormouse_api::dormouse::{Removed, SnapshotInfo};

use super::answer;
use super::args::SnapshotCommand;
use super::context::Context;
use super::error::{CliError, ExitStatus};
use super::output::{bytes, show};

pub async fn run(command: SnapshotCommand, context: &Context) -> Result<ExitStatus, CliError> {
    match command {
        SnapshotCommand::Ls { sandbox, all } => list(sandbox.as_deref(), all, context).await,
        SnapshotCommand::Rm { snapshots } => remove(&snapshots, context).await,
    }
}

async fn list(sandbox: Option<&str>, all: bool, context: &Context) -> Result<ExitStatus, CliError> {
    let client = context.client()?;
    let mut found: Vec<SnapshotInfo> = Vec::new();
    let mut query = format!("/dormouse/v1/snapshots?limit=100&all={all}");
    if let Some(sandbox) = sandbox {
        query.push_str(&format!("&sandboxID={}", encode(sandbox)));
    }
    let mut token: Option<String> = None;
    loop {
        let next = token.map_or_else(String::new, |token| format!("&nextToken={}", encode(&token)));
        let (page, more): (Vec<SnapshotInfo>, _) =
            client.get_page("list the snapshots", &format!("{query}{next}")).await?;
        found.extend(page);
        token = more;
        if token.is_none() {
            break;
        }
    }
    show(context, &found, |found| answer::snapshots(found))
}

async fn remove(snapshots: &[String], context: &Context) -> Result<ExitStatus, CliError> {
    let client = context.client()?;
    let mut removed = Vec::new();
    for snapshot in snapshots {
        let what = format!("remove snapshot {snapshot}");
        let one: Removed =
            client.delete(&what, &format!("/dormouse/v1/snapshots/{}", encode(snapshot))).await?;
        removed.push(one);
    }
    show(context, &removed, |removed| removed.iter().map(told).collect::<Vec<_>>().join("\n"))
}

/// What a removal gave back.
pub fn told(removed: &Removed) -> String {
    let mut text = format!("{} removed, {} freed", removed.id, bytes(removed.freed_bytes));
    if !removed.kept.is_empty() {
        text.push_str(&format!("; kept: {}", removed.kept.join(", ")));
    }
    if !removed.children.is_empty() {
        text.push_str(&format!("; made of it and unharmed: {}", removed.children.join(", ")));
    }
    text
}
