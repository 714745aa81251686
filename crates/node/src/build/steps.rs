//! The steps of a plan, in a builder; and waiting for a start command to be ready.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use dormouse_image::template::{BuildPlan, Probe, Ready, StepKind};
use futures_util::TryStreamExt;
use http_body_util::{BodyExt, StreamBody};
use hyper::body::Frame;
use tokio_util::io::ReaderStream;

use super::exec::{Command, Exit, Shell};
use super::{Log, step_failed};
use crate::error::NodeError;
use crate::hub::Hub;
use crate::model::Level;

/// Lines of output that an error repeats.
const TAIL_LINES: usize = 20;
const LINE_BYTES_MAX: usize = 4096;
/// Folders that are there keep mode and owner, where tar can do that.
const UNPACK: &str = r#"
keep=; tar --version 2>/dev/null | grep -q GNU && keep=--no-overwrite-dir
tar -x -p $keep -f "$1" -C / && rm -f -- "$1""#;
const ARCHIVE: &str = "/var/tmp/.dormouse-copy.tar";

/// Cuts output into lines, logs each, and keeps the last ones for an error.
struct Lines<'a> {
    log: &'a Log,
    step: String,
    open: Vec<u8>,
    tail: VecDeque<String>,
}

impl<'a> Lines<'a> {
    fn new(log: &'a Log, step: String) -> Self {
        Self { log, step, open: Vec::new(), tail: VecDeque::new() }
    }

    fn push(&mut self, bytes: &[u8]) {
        for byte in bytes {
            if *byte == b'\n' || self.open.len() >= LINE_BYTES_MAX {
                self.end();
            }
            if *byte != b'\n' {
                self.open.push(*byte);
            }
        }
    }

    fn end(&mut self) {
        let line = String::from_utf8_lossy(&std::mem::take(&mut self.open)).trim_end().to_owned();
        if line.is_empty() {
            return;
        }
        self.log.line(Level::Debug, &self.step, line.clone());
        if self.tail.len() == TAIL_LINES {
            self.tail.pop_front();
        }
        self.tail.push_back(line);
    }

    fn tail(mut self) -> String {
        self.end();
        Vec::from(self.tail).join("\n")
    }
}

pub async fn run(
    hub: &Hub,
    log: &Log,
    shell: &Shell,
    plan: &BuildPlan,
    index: usize,
) -> Result<(), NodeError> {
    let mut lines = Lines::new(log, index.to_string());
    let exit = match &plan.steps[index].kind {
        StepKind::Run { argv, env, user, cwd } => {
            let command = Command {
                argv: argv.clone(),
                env: env.clone(),
                user: user.clone(),
                cwd: cwd.clone(),
                tag: None,
            };
            shell.run(command, |part| lines.push(part)).await
        }
        StepKind::Workdir { path, user } => {
            let script = r#"[ -d "$1" ] || { mkdir -p -- "$1" && chown -- "$2" "$1"; }"#;
            let command = Command::root(&["/bin/sh", "-c", script, "sh", path, user]);
            shell.run(command, |part| lines.push(part)).await
        }
        StepKind::Copy { .. } => {
            copy(hub, shell, plan, index).await?;
            let command = Command::root(&["/bin/sh", "-c", UNPACK, "sh", ARCHIVE]);
            shell.run(command, |part| lines.push(part)).await
        }
    };
    let exit = exit.map_err(|error| step_failed(plan, index, &error.message))?;
    if exit.code == 0 {
        return Ok(());
    }
    Err(step_failed(plan, index, &failure(&exit, &lines.tail())))
}

fn failure(exit: &Exit, tail: &str) -> String {
    let status =
        if exit.status.is_empty() { format!("exit status {}", exit.code) } else { exit.status.clone() };
    if tail.is_empty() { status } else { format!("{status}\n{tail}") }
}

/// The step's files as an archive, through a file of the host: neither side holds it in memory.
async fn copy(hub: &Hub, shell: &Shell, plan: &BuildPlan, index: usize) -> Result<(), NodeError> {
    let (plan_, kind, dir) = (plan.clone(), plan.steps[index].kind.clone(), hub.config.data_dir.clone());
    let write = move || {
        let mut file = tempfile(&dir)?;
        plan_.write_tar(&kind, &mut file)?;
        std::io::Seek::rewind(&mut file)?;
        Ok::<_, std::io::Error>(file)
    };
    let written = hub.blocking("the archive of a copy step", write).await?;
    let file = written.map_err(|error| step_failed(plan, index, &error.to_string()))?;
    let stream = ReaderStream::with_capacity(tokio::fs::File::from_std(file), 64 << 10);
    let body = BodyExt::boxed(StreamBody::new(stream.map_ok(Frame::data)));
    shell.upload(ARCHIVE, body).await.map_err(|error| step_failed(plan, index, &error.message))
}

/// A file without a name: gone when it is closed.
fn tempfile(dir: &std::path::Path) -> std::io::Result<std::fs::File> {
    use std::os::unix::fs::OpenOptionsExt;
    let path = dir.join(format!("copy.{}.tmp", dormouse_types::random_hex(8)));
    let file = std::fs::OpenOptions::new().read(true).write(true).create_new(true).mode(0o600).open(&path)?;
    std::fs::remove_file(&path)?;
    Ok(file)
}

pub async fn wait_ready(log: &Log, shell: &Shell, plan: &BuildPlan, ready: &Ready) -> Result<(), NodeError> {
    let started = Instant::now();
    let limit = Duration::from_secs(u64::from(ready.timeout_s));
    let script = match &ready.probe {
        Probe::Command(command) => command.clone(),
        Probe::Port(port) => format!("exec 3<>/dev/tcp/127.0.0.1/{port}"),
    };
    log.line(Level::Info, "finalize", format!("waiting for: {script}"));
    let mut last = String::new();
    while started.elapsed() < limit {
        let command = Command {
            argv: vec!["/bin/bash".to_owned(), "-l".to_owned(), "-c".to_owned(), script.clone()],
            env: std::collections::BTreeMap::new(),
            user: plan.config.user.clone(),
            cwd: plan.config.workdir.clone(),
            tag: None,
        };
        let mut lines = Lines::new(log, "finalize".to_owned());
        let exit = tokio::time::timeout(limit, shell.run(command, |part| lines.push(part))).await;
        match exit {
            Ok(Ok(exit)) if exit.code == 0 => return Ok(()),
            Ok(Ok(exit)) => last = failure(&exit, &lines.tail()),
            Ok(Err(error)) => return Err(error),
            Err(_) => break,
        }
        tokio::time::sleep(Duration::from_millis(200)).await;
    }
    let message = format!(
        "the template was not ready within {} s: `{script}` kept failing ({last}); see what the start command does",
        ready.timeout_s
    );
    Err(NodeError::failed(message))
}
