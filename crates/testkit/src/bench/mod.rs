//! Figures, side by side with raw runsc doing the same in the same run.

mod figures;
mod raw;
mod upload;

use std::path::PathBuf;

use anyhow::Result;
use serde::{Deserialize, Serialize};

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
    #[must_use]
    pub fn holds(&self) -> bool {
        self.limit.is_none_or(|limit| self.ratio.unwrap_or(self.ours) <= limit)
    }
}

/// Measures, telling `done` of each figure as it is there.
pub fn run(options: &Options, done: &mut dyn FnMut(&Figure)) -> Result<Vec<Figure>> {
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build()?;
    runtime.block_on(figures::all(options, done))
}
