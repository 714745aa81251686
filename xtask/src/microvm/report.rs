//! What was tested and how it went: written inside the lab, counted outside.

use std::path::{Path, PathBuf};

use anyhow::Context;
use comfy_table::Table;
use dormouse_testkit::scenarios::Verdict;
use serde::{Deserialize, Serialize};

use crate::run::Counts;

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Tested {
    pub part: String,
    pub name: String,
    pub outcome: Verdict,
    /// Why it was skipped or failed; empty after a pass.
    pub reason: String,
    pub ms: u64,
}

/// The list, on the disk after each test: what was tested is known whatever comes next.
pub struct Report {
    path: PathBuf,
    pub tested: Vec<Tested>,
}

impl Report {
    pub fn new(path: &Path) -> Self {
        Self { path: path.to_owned(), tested: Vec::new() }
    }

    pub fn add(&mut self, tested: Tested) -> anyhow::Result<()> {
        println!("  {}", line(&tested));
        self.tested.push(tested);
        let text = serde_json::to_string_pretty(&self.tested)?;
        std::fs::write(&self.path, text).with_context(|| format!("cannot write {}", self.path.display()))
    }
}

pub fn read(path: &Path) -> anyhow::Result<Vec<Tested>> {
    let text = std::fs::read_to_string(path).with_context(|| format!("cannot read {}", path.display()))?;
    serde_json::from_str(&text).with_context(|| format!("{} is no list of tests", path.display()))
}

pub fn counts(tested: &[Tested]) -> Counts {
    let of = |verdict| tested.iter().filter(|one| one.outcome == verdict).count() as u64;
    Counts { passed: of(Verdict::Pass), failed: of(Verdict::Fail), skipped: of(Verdict::Skip) }
}

fn word(verdict: Verdict) -> &'static str {
    match verdict {
        Verdict::Pass => "pass",
        Verdict::Skip => "skip",
        Verdict::Fail => "FAIL",
    }
}

fn line(tested: &Tested) -> String {
    let Tested { part, name, outcome, reason, ms } = tested;
    format!("{part} {name} {} {ms} ms {reason}", word(*outcome)).trim_end().to_owned()
}

pub fn print(tested: &[Tested]) {
    let mut table = Table::new();
    table.load_preset(comfy_table::presets::NOTHING).set_header(["part", "test", "outcome", "ms", "reason"]);
    for one in tested {
        let cells = [&one.part, &one.name, word(one.outcome), &one.ms.to_string(), &one.reason];
        table.add_row(cells.map(str::to_owned));
    }
    println!("{table}");
}
