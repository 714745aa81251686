//! What happens and what is used: events, top, gc.

use std::time::Duration;

use dormouse_api::client::encode;
use dormouse_api::dormouse::{Event, GcReport, NodeInfo, SandboxInfo, State};
use dormouse_api::e2b::SandboxMetric;
use serde::Serialize;

use super::answer;
use super::args::EventsArgs;
use super::context::Context;
use super::error::{CliError, ExitStatus};
use super::output::{bytes, json_line, raw, show, table};

const TOP_EVERY: Duration = Duration::from_secs(2);

pub async fn events(args: &EventsArgs, context: &Context) -> Result<ExitStatus, CliError> {
    let client = context.client()?;
    let mut query = format!("/dormouse/v1/events?since={}", args.since);
    if let Some(sandbox) = &args.sandbox {
        query.push_str(&format!("&sandboxID={}", encode(sandbox)));
    }
    if args.no_follow {
        let list: Vec<Event> = client.get("read the events", &format!("{query}&follow=false")).await?;
        return show(context, &list, |list| list.iter().map(line).collect::<Vec<_>>().join("\n"));
    }
    let mut stream = client.get_events("follow the events", &query).await?;
    while let Some(event) = stream.next::<Event>().await? {
        if context.json {
            json_line(&event)?;
        } else {
            raw(&(line(&event) + "\n"))?;
        }
    }
    Ok(ExitStatus::OK)
}

fn line(event: &Event) -> String {
    let sandbox = event.sandbox_id.as_deref().unwrap_or("–");
    format!("{:>6} {} {sandbox:<21} {:<17} {}", event.seq, event.at, event.kind, event.message)
}

#[derive(Serialize)]
struct Use {
    sandbox: SandboxInfo,
    metric: Option<SandboxMetric>,
}

/// One look at everything, or one every two seconds until it is interrupted.
pub async fn top(once: bool, context: &Context) -> Result<ExitStatus, CliError> {
    loop {
        let (node, uses) = look(context).await?;
        if context.json {
            json_line(&uses)?;
        } else {
            // Home and clear, as top(1) does; a pipe gets the tables one after the other.
            let clear = if once { "" } else { "\x1b[H\x1b[2J" };
            raw(&format!("{clear}{}\n", told(&node, &uses)))?;
        }
        if once {
            return Ok(ExitStatus::OK);
        }
        tokio::time::sleep(TOP_EVERY).await;
    }
}

async fn look(context: &Context) -> Result<(NodeInfo, Vec<Use>), CliError> {
    let client = context.client()?;
    let node: NodeInfo = client.get("ask the node", "/dormouse/v1/node").await?;
    let (sandboxes, _): (Vec<SandboxInfo>, _) =
        client.get_page("list the sandboxes", "/dormouse/v1/sandboxes?limit=100").await?;
    let mut uses = Vec::with_capacity(sandboxes.len());
    for sandbox in sandboxes {
        let path = format!("/sandboxes/{}/metrics", encode(&sandbox.sandbox_id));
        let running = sandbox.state == State::Running;
        // One that has just gone has no metric; that is no error of the list.
        let metrics: Vec<SandboxMetric> = if running {
            client.get("read its metrics", &path).await.unwrap_or_default()
        } else {
            Vec::new()
        };
        uses.push(Use { sandbox, metric: metrics.into_iter().next_back() });
    }
    Ok((node, uses))
}

fn told(node: &NodeInfo, uses: &[Use]) -> String {
    let usage = &node.usage;
    let head = format!(
        "{} running, {} frozen, {} paused, {} failed · {} snapshots of {} · {} free on disk",
        usage.running,
        usage.frozen,
        usage.paused,
        usage.failed,
        usage.snapshots,
        bytes(usage.snapshot_bytes),
        bytes(usage.disk_free_bytes)
    );
    let mut table = table(["SANDBOX", "STATE", "CPU", "MEMORY", "DISK"]);
    for one in uses {
        let cell = |made: &dyn Fn(&SandboxMetric) -> String| {
            one.metric.as_ref().map_or_else(|| "–".to_owned(), made)
        };
        table.add_row([
            one.sandbox.sandbox_id.clone(),
            answer::state(&one.sandbox),
            cell(&|metric| format!("{:.1} %", metric.cpu_used_pct)),
            cell(&|metric| of(metric.mem_used, metric.mem_total)),
            cell(&|metric| of(metric.disk_used, metric.disk_total)),
        ]);
    }
    format!("{head}\n{table}")
}

/// A file system that claims exbibytes has no limit.
fn of(used: u64, total: u64) -> String {
    if total >= 1 << 60 { bytes(used) } else { format!("{} / {}", bytes(used), bytes(total)) }
}

pub async fn gc(context: &Context) -> Result<ExitStatus, CliError> {
    let report: GcReport = context.client()?.post("collect garbage", "/dormouse/v1/gc", &()).await?;
    show(context, &report, |report| {
        let line = |(kind, names): (&String, &Vec<String>)| format!("{kind}: {}", names.join(", "));
        let mut lines: Vec<String> =
            report.removed.iter().filter(|(_, names)| !names.is_empty()).map(line).collect();
        if lines.is_empty() {
            lines.push("nothing was left over".to_owned());
        }
        lines.push(format!("{} freed", bytes(report.freed_bytes)));
        lines.join("\n")
    })
}
