//! Sandboxes: create, list, look at, put to sleep, wake, copy, put back, end.

use std::collections::BTreeMap;

use dormouse_api::client::encode;
use dormouse_api::dormouse::{
    Checkpoint, CreateOptions, ForkResult, IdlePolicy, PauseResult, Receipt, Rollback, SandboxInfo,
    ShapeRequest, SnapshotInfo,
};
use dormouse_api::e2b::{
    AutoResume, ForkRequest, NewSandbox, OnTimeout, PauseRequest, ResumeRequest, Sandbox, TimeoutRequest,
};
use serde_json::json;

use super::answer;
use super::args::{CheckpointArgs, CreateArgs, ForkArgs, IdleArgs, LsArgs, PauseArgs};
use super::context::Context;
use super::error::{CliError, ExitStatus};
use super::output::{bytes, show, spinner};

type Outcome = Result<ExitStatus, CliError>;

fn path(sandbox: &str, rest: &str) -> String {
    format!("/dormouse/v1/sandboxes/{}{rest}", encode(sandbox))
}

pub async fn create(args: &CreateArgs, context: &Context) -> Outcome {
    let map = |pairs: &[(String, String)]| Some(pairs.iter().cloned().collect::<BTreeMap<_, _>>());
    let shape =
        ShapeRequest { cpus: args.cpus, memory_mb: args.memory, disk_mb: args.disk, processes_max: None };
    let idle = IdlePolicy { freeze_after: args.idle, disk_after: args.idle_disk };
    let options = CreateOptions {
        engine: args.engine.map(|engine| engine.to_string()),
        idle: (idle != IdlePolicy::default()).then_some(idle),
        shape: (shape != ShapeRequest::default()).then_some(shape),
        on_timeout: args.pause_on_timeout.then_some(OnTimeout::Pause),
    };
    let request = NewSandbox {
        template_id: args.template.clone(),
        timeout: Some(args.timeout),
        auto_pause: args.pause_on_timeout.then_some(true),
        auto_resume: args.auto_resume.then_some(AutoResume { enabled: true }),
        allow_internet_access: args.no_internet.then_some(false),
        metadata: map(&args.metadata),
        env_vars: map(&args.env),
        dormouse: Some(options),
        ..NewSandbox::default()
    };
    let what = format!("create a sandbox of {}", args.template);
    let waiting = spinner(context, format!("making a sandbox of {}", args.template));
    let made: Sandbox = context.client()?.post(&what, "/v2/sandboxes", &request).await?;
    let info = context.sandbox(&made.sandbox_id).await?;
    waiting.finish_and_clear();
    show(context, &info, |info| info.sandbox_id.clone())
}

pub async fn list(args: &LsArgs, context: &Context) -> Outcome {
    let mut found: Vec<SandboxInfo> = Vec::new();
    let mut query = String::new();
    if !args.state.is_empty() {
        query.push_str(&format!("&state={}", encode(&args.state.join(","))));
    }
    if !args.metadata.is_empty() {
        let form: Vec<String> =
            args.metadata.iter().map(|(name, value)| format!("{}={}", encode(name), encode(value))).collect();
        query.push_str(&format!("&metadata={}", encode(&form.join("&"))));
    }
    if let Some(template) = &args.template {
        query.push_str(&format!("&template={}", encode(template)));
    }
    let client = context.client()?;
    let mut token = None;
    loop {
        let next = token.map_or_else(String::new, |token: String| format!("&nextToken={}", encode(&token)));
        let path = format!("/dormouse/v1/sandboxes?limit=100{query}{next}");
        let (page, more): (Vec<SandboxInfo>, _) = client.get_page("list the sandboxes", &path).await?;
        found.extend(page);
        token = more;
        if token.is_none() {
            break;
        }
    }
    show(context, &found, |found| {
        if args.quiet {
            return found.iter().map(|info| info.sandbox_id.as_str()).collect::<Vec<_>>().join("\n");
        }
        answer::sandboxes(found)
    })
}

pub async fn info(sandbox: &str, context: &Context) -> Outcome {
    let info = context.sandbox_watched(sandbox).await?;
    show(context, &info, answer::sandbox)
}

pub async fn kill(sandboxes: &[String], context: &Context) -> Outcome {
    let client = context.client()?;
    for sandbox in sandboxes {
        let what = format!("kill sandbox {sandbox}");
        client.delete::<()>(&what, &format!("/sandboxes/{}", encode(sandbox))).await?;
    }
    show(context, &json!({"killed": sandboxes}), |_| sandboxes.join("\n"))
}

pub async fn pause(args: &PauseArgs, context: &Context) -> Outcome {
    let request = PauseRequest { memory: args.disk_only.then_some(false), require_healthy_guest: None };
    let what = format!("pause sandbox {}", args.sandbox);
    let waiting = spinner(context, format!("pausing {}", args.sandbox));
    let result: PauseResult = context.client()?.post(&what, &path(&args.sandbox, "/pause"), &request).await?;
    waiting.finish_and_clear();
    show(context, &result, |result| {
        let size = bytes(result.snapshot.bytes);
        format!("{}  {size}\n{}", result.snapshot.snapshot_id, answer::receipt(&result.receipt))
    })
}

pub async fn resume(sandbox: &str, timeout: Option<i64>, context: &Context) -> Outcome {
    let request = ResumeRequest { timeout, ..ResumeRequest::default() };
    let what = format!("resume sandbox {sandbox}");
    let waiting = spinner(context, format!("waking {sandbox}"));
    let receipt: Receipt = context.client()?.post(&what, &path(sandbox, "/resume"), &request).await?;
    waiting.finish_and_clear();
    show(context, &receipt, |receipt| format!("{sandbox}\n{}", answer::receipt(receipt)))
}

pub async fn checkpoint(args: &CheckpointArgs, context: &Context) -> Outcome {
    let labels: BTreeMap<_, _> = args.label.iter().cloned().collect();
    let request =
        Checkpoint { name: args.name.clone(), labels: (!labels.is_empty()).then_some(labels), ttl: args.ttl };
    let what = format!("take a snapshot of sandbox {}", args.sandbox);
    let waiting = spinner(context, format!("taking a snapshot of {}", args.sandbox));
    let snapshot: SnapshotInfo =
        context.client()?.post(&what, &path(&args.sandbox, "/checkpoint"), &request).await?;
    waiting.finish_and_clear();
    show(context, &snapshot, |snapshot| format!("{}  {}", snapshot.snapshot_id, bytes(snapshot.bytes)))
}

pub async fn fork(args: &ForkArgs, context: &Context) -> Outcome {
    let request = ForkRequest { timeout: Some(args.timeout), count: Some(args.count) };
    let what = format!("fork sandbox {}", args.sandbox);
    let waiting = spinner(context, format!("forking {} into {}", args.sandbox, args.count));
    let forks: Vec<ForkResult> =
        context.client()?.post(&what, &path(&args.sandbox, "/fork"), &request).await?;
    waiting.finish_and_clear();
    let failed = forks.iter().filter(|fork| fork.error.is_some()).count();
    let status = show(context, &forks, |forks| forks.iter().map(told).collect::<Vec<_>>().join("\n"))?;
    if failed > 0 {
        return Err(CliError::failed(format!("{failed} of {} forks failed", forks.len())));
    }
    Ok(status)
}

fn told(fork: &ForkResult) -> String {
    match (&fork.sandbox, &fork.receipt, &fork.error) {
        (_, _, Some(error)) => format!("failed: {}", error.message),
        (Some(info), Some(receipt), None) => format!("{}\n{}", info.sandbox_id, answer::receipt(receipt)),
        (Some(info), None, None) => info.sandbox_id.clone(),
        (None, _, None) => String::new(),
    }
}

pub async fn rollback(sandbox: &str, snapshot: &str, context: &Context) -> Outcome {
    let request = Rollback { snapshot_id: snapshot.to_owned() };
    let what = format!("roll sandbox {sandbox} back to {snapshot}");
    let waiting = spinner(context, format!("putting {sandbox} back to {snapshot}"));
    let receipt: Receipt = context.client()?.post(&what, &path(sandbox, "/rollback"), &request).await?;
    waiting.finish_and_clear();
    show(context, &receipt, |receipt| format!("{sandbox}\n{}", answer::receipt(receipt)))
}

pub async fn timeout(sandbox: &str, seconds: i64, context: &Context) -> Outcome {
    let what = format!("set the deadline of sandbox {sandbox}");
    let request = TimeoutRequest { timeout: seconds };
    let path = format!("/sandboxes/{}/timeout", encode(sandbox));
    context.client()?.post::<()>(&what, &path, &request).await?;
    show(context, &json!({"sandboxID": sandbox, "timeout": seconds}), |_| {
        format!("{sandbox} times out in {seconds} s")
    })
}

pub async fn idle(args: &IdleArgs, context: &Context) -> Outcome {
    let policy = IdlePolicy { freeze_after: args.freeze, disk_after: args.disk };
    let what = format!("set the idle policy of sandbox {}", args.sandbox);
    context.client()?.post::<()>(&what, &path(&args.sandbox, "/idle"), &policy).await?;
    info(&args.sandbox, context).await
}
