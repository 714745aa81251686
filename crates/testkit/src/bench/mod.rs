//! Figures: gVisor's side by side with raw runsc doing the same in the same run, the microVM's with QEMU.

mod figures;
mod host_memory;
mod microvm;
mod qemu;
mod raw;
mod upload;

use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result};
use hyper::Method;
use serde::{Deserialize, Serialize};

use crate::daemon::Daemon;
use crate::host;
use crate::http::Http;
use crate::sandbox::Sandbox;

const MIB: f64 = 1_048_576.0;

#[derive(Debug, Clone)]
pub struct Options {
    /// The `dormouse` executable, built with optimisation.
    pub binary: PathBuf,
    /// The data folder, already set up.
    pub data_dir: PathBuf,
    /// Repetitions that a median is taken of; at least 10 for a claim.
    pub runs: u32,
    /// Names; empty: all.
    pub only: Vec<String>,
}

impl Options {
    /// Whether a figure of this name, or one whose name begins so, was asked for.
    fn wants(&self, name: &str) -> bool {
        self.only.is_empty() || self.only.iter().any(|one| one.starts_with(name) || name.starts_with(one))
    }
}

/// One figure: ours, the yardstick's, their ratio and what was promised.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Figure {
    pub name: String,
    pub unit: String,
    pub ours: f64,
    /// `None`: an absolute figure.
    pub raw: Option<f64>,
    pub ratio: Option<f64>,
    /// What the ratio (or, without one, the figure) must not exceed.
    pub limit: Option<f64>,
    pub runs: u32,
    /// What was compared with what.
    pub note: String,
}

impl Figure {
    /// An absolute figure without a limit.
    fn new(name: String, unit: &str, ours: f64, runs: u32) -> Self {
        let (raw, ratio, limit, note) = (None, None, None, String::new());
        Self { name, unit: unit.to_owned(), ours, raw, ratio, limit, runs, note }
    }

    fn within(self, limit: Option<f64>) -> Self {
        Self { limit, ..self }
    }

    /// Against the yardstick's.
    fn against(self, raw: f64) -> Self {
        Self { raw: Some(raw), ratio: Some(self.ours / raw), ..self }
    }

    fn noted(self, note: &str) -> Self {
        Self { note: note.to_owned(), ..self }
    }

    #[must_use]
    pub fn holds(&self) -> bool {
        self.limit.is_none_or(|limit| self.ratio.unwrap_or(self.ours) <= limit)
    }
}

/// Measures the engine gvisor, telling `done` of each figure as it is there.
pub fn run(options: &Options, done: &mut dyn FnMut(&Figure)) -> Result<Vec<Figure>> {
    runtime()?.block_on(figures::all(options, done))
}

/// The same of the engine microvm, on a host that can run it.
pub fn run_microvm(options: &Options, done: &mut dyn FnMut(&Figure)) -> Result<Vec<Figure>> {
    runtime()?.block_on(microvm::all(options, done))
}

fn runtime() -> Result<tokio::runtime::Runtime> {
    Ok(tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build()?)
}

/// Ends the sandboxes that were made here, and no others of the data folder.
async fn kill_all(http: &Http) -> Result<()> {
    let list = http.api(Method::GET, "/v2/sandboxes?metadata=of%3Dbench&limit=100", None).await?;
    for made in list.expect(200)?.json()?.as_array().into_iter().flatten() {
        Sandbox::of(http, made)?.kill().await?.expect(204)?;
    }
    Ok(())
}

/// Waits until no process of the data folder starts or ends any more.
async fn processes_are_settled(daemon: &Daemon) -> Result<()> {
    let mut last = host::holdings(&daemon.data_dir, daemon.pid())?.processes;
    for _ in 0..100 {
        tokio::time::sleep(Duration::from_millis(300)).await;
        let now = host::holdings(&daemon.data_dir, daemon.pid())?.processes;
        if now == last {
            return Ok(());
        }
        last = now;
    }
    Ok(())
}

/// Waits for the server inside.
async fn answers(sandbox: &Sandbox, port: u16) -> Result<()> {
    for _ in 0..100 {
        if sandbox.get(port, "/").await.is_ok_and(|answer| answer.expect(200).is_ok()) {
            return Ok(());
        }
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    anyhow::bail!("the process in {} does not answer", sandbox.id)
}

fn middle(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied().unwrap_or(f64::NAN)
}

fn median_ms(times: &[Duration]) -> f64 {
    middle(times.iter().map(|time| time.as_secs_f64() * 1000.0).collect())
}

fn least_ms(times: &[Duration]) -> f64 {
    times.iter().min().map_or(f64::NAN, |time| time.as_secs_f64() * 1000.0)
}

/// Processes of all monitors of a data folder.
fn monitors(data_dir: &Path) -> Result<Vec<u32>> {
    let dir = data_dir.join("microvm/runtimes");
    let runtimes = std::fs::read_dir(&dir).with_context(|| format!("cannot read {}", dir.display()))?;
    let names = runtimes.flatten().map(|entry| entry.file_name().to_string_lossy().into_owned());
    Ok(names.filter_map(|runtime| host::monitor_of(data_dir, &runtime)).collect())
}
