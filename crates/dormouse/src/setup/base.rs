//! The default template, built through a daemon: the one that runs, or one that is started for it and ended after.

use std::fs::File;
use std::net::TcpListener;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use dormouse_api::client::{Client, encode};
use dormouse_api::dormouse::{BuildQuery, SnapshotInfo, TemplateInfo};
use dormouse_node::AgentBinary;
use dormouse_types::EngineKind;

use crate::agent_binary::AGENT;
use crate::cli::{CliError, Context, build_template, spinner};

/// The default template's name.
const NAME: &str = "base";
const TEMPLATE: &str = include_str!("base.toml");
/// In the data folder: which agent the template was made with. One that an older agent runs in is built again.
const STAMP_FILE: &str = "base.agent";
const READY_PATIENCE: Duration = Duration::from_secs(120);
const STOP_PATIENCE: Duration = Duration::from_secs(30);
const POLL: Duration = Duration::from_millis(50);

/// A daemon that is asked; `Ours` ends with it.
enum Daemon {
    Running(Context),
    Ours { context: Context, child: Child },
}

impl Daemon {
    fn context(&self) -> &Context {
        match self {
            Self::Running(context) | Self::Ours { context, .. } => context,
        }
    }

    async fn find_or_start(context: &Context, engine: Option<EngineKind>) -> Result<Self, CliError> {
        let asked = context.again();
        if asked.client()?.healthy().await {
            return Ok(Self::Running(asked));
        }
        let failed = |error: std::io::Error| {
            CliError::failed(format!("cannot start a daemon for the set-up: {error}"))
        };
        std::fs::create_dir_all(&context.data_dir)
            .map_err(|source| CliError::file("make the data folder", &context.data_dir, source))?;
        let listen = TcpListener::bind("127.0.0.1:0").and_then(|probe| probe.local_addr()).map_err(failed)?;
        let log_path = context.data_dir.join("setup-serve.log");
        let log = File::create(&log_path).map_err(|source| CliError::file("write", &log_path, source))?;
        let mut child = Command::new(std::env::current_exe().map_err(failed)?)
            .args(["serve", "--listen", &listen.to_string(), "--data-dir"])
            .arg(&context.data_dir)
            .args(engine.into_iter().flat_map(|engine| ["--engine".to_owned(), engine.to_string()]))
            .stdin(Stdio::null())
            .stdout(log.try_clone().map_err(failed)?)
            .stderr(log)
            .spawn()
            .map_err(failed)?;
        let url = format!("http://{listen}");
        let client = Client::new(&url, None)?;
        let began = Instant::now();
        while !client.healthy().await {
            if let Some(status) = child.try_wait().map_err(failed)? {
                let said = last_lines(&log_path);
                return Err(CliError::failed(format!(
                    "the daemon that the set-up needs ended with {status}:\n{said}"
                )));
            }
            if began.elapsed() > READY_PATIENCE {
                let _ = child.kill();
                let _ = child.wait();
                let said = last_lines(&log_path);
                return Err(CliError::failed(format!(
                    "the daemon that the set-up needs is not ready:\n{said}"
                )));
            }
            tokio::time::sleep(POLL).await;
        }
        Ok(Self::Ours { context: context.at(url), child })
    }

    async fn end(self) -> Result<(), CliError> {
        let Self::Ours { mut child, .. } = self else { return Ok(()) };
        let failed =
            |error: std::io::Error| CliError::failed(format!("cannot end the set-up's daemon: {error}"));
        let pid = i32::try_from(child.id()).ok().and_then(rustix::process::Pid::from_raw);
        if let Some(pid) = pid {
            rustix::process::kill_process(pid, rustix::process::Signal::TERM)
                .map_err(|error| failed(error.into()))?;
        }
        let began = Instant::now();
        while child.try_wait().map_err(failed)?.is_none() {
            if began.elapsed() > STOP_PATIENCE {
                child.kill().map_err(failed)?;
                child.wait().map_err(failed)?;
                break;
            }
            tokio::time::sleep(POLL).await;
        }
        Ok(())
    }
}

fn last_lines(path: &std::path::Path) -> String {
    let text = std::fs::read_to_string(path).unwrap_or_default();
    let lines: Vec<&str> = text.lines().collect();
    lines[lines.len().saturating_sub(8)..].join("\n")
}

fn agent_digest() -> String {
    AgentBinary { version: String::new(), bytes: AGENT.into() }.digest()
}

/// `engine`: one that was made by another engine is not what is looked for.
async fn find(context: &Context, engine: Option<EngineKind>) -> Result<Option<TemplateInfo>, CliError> {
    let templates: Vec<TemplateInfo> =
        context.client()?.get("list the templates", "/dormouse/v1/templates").await?;
    // An alias may carry its tag.
    let is_base = |alias: &String| alias.split(':').next() == Some(NAME);
    let stamp = std::fs::read_to_string(context.data_dir.join(STAMP_FILE)).unwrap_or_default();
    if stamp.trim() != agent_digest() {
        return Ok(None);
    }
    let fits = |template: &TemplateInfo| {
        template.aliases.iter().any(is_base)
            && engine.is_none_or(|engine| template.engine == engine.to_string())
    };
    let Some(template) = templates.into_iter().find(fits) else {
        return Ok(None);
    };
    // One whose snapshot is gone or was found damaged is of no use: it is built again.
    let Some(snapshot) = &template.snapshot_id else { return Ok(Some(template)) };
    let path = format!("/dormouse/v1/snapshots/{}", encode(snapshot));
    match context.client()?.get::<SnapshotInfo>("look up the template's snapshot", &path).await {
        Ok(_) => Ok(Some(template)),
        Err(error) if error.status() == Some(404) => Ok(None),
        Err(error) => Err(error.into()),
    }
}

/// Whether the default template is there, without starting anything: a folder that no daemon was ever on has none.
pub async fn is_there(context: &Context, engine: Option<EngineKind>) -> Result<bool, CliError> {
    let asked = context.again();
    if asked.client()?.healthy().await {
        return Ok(find(&asked, engine).await?.is_some());
    }
    let needs_runsc = engine != Some(EngineKind::Microvm);
    if !context.data_dir.join("node.db").is_file() || (needs_runsc && crate::doctor::find_runsc().is_err()) {
        return Ok(false);
    }
    let daemon = Daemon::find_or_start(context, engine).await?;
    let found = find(daemon.context(), engine).await;
    daemon.end().await?;
    Ok(found?.is_some())
}

/// Builds the default template unless it is there, and gives its id.
pub async fn ensure(
    context: &Context,
    engine: Option<EngineKind>,
    tell: &dyn Fn(&str),
) -> Result<String, CliError> {
    let daemon = Daemon::find_or_start(context, engine).await?;
    let made = build(daemon.context(), engine, tell).await;
    daemon.end().await?;
    made
}

async fn build(
    context: &Context,
    engine: Option<EngineKind>,
    tell: &dyn Fn(&str),
) -> Result<String, CliError> {
    if let Some(template) = find(context, engine).await? {
        tell(&format!("template {NAME}: it is there ({})", template.template_id));
        return Ok(template.template_id);
    }
    tell(&format!(
        "building the template {NAME}: Debian with what agents usually need; this takes a few minutes"
    ));
    let failed = |source| CliError::file("write the template's folder below", &context.data_dir, source);
    let folder = tempfile::tempdir().map_err(failed)?;
    std::fs::write(folder.path().join("template.toml"), TEMPLATE).map_err(failed)?;
    let query = BuildQuery {
        names: vec![NAME.to_owned()],
        engine: engine.map(|engine| engine.to_string()),
        file: "template.toml".to_owned(),
        ..BuildQuery::default()
    };
    let waiting = spinner(context, "waiting for the first step");
    let began = Instant::now();
    let template = build_template(context, &query, folder.path(), |line| {
        waiting.set_message(line.to_owned());
        waiting.suspend(|| tell(&format!("  {line}")));
    })
    .await?;
    waiting.finish_and_clear();
    let stamp = context.data_dir.join(STAMP_FILE);
    std::fs::write(&stamp, agent_digest()).map_err(|source| CliError::file("write", &stamp, source))?;
    tell(&format!("template {NAME}: built in {} s ({})", began.elapsed().as_secs(), template.template_id));
    Ok(template.template_id)
}
