//! `cargo xtask bench`: medians, and ratios to raw runsc doing the same in the same run.

use std::path::{Path, PathBuf};

use anyhow::bail;
use comfy_table::Table;
use dormouse_testkit::bench::{Figure, Options};

use crate::{run, tools};

#[derive(clap::Args)]
pub struct Args {
    /// Print a JSON list on stdout and nothing else
    #[arg(long)]
    json: bool,
    /// Repetitions that each median is taken of
    #[arg(long, default_value_t = 10)]
    runs: u32,
    /// Only figures with these names
    #[arg(long, value_delimiter = ',')]
    only: Vec<String>,
    /// The data folder (default: one below the target folder)
    #[arg(long)]
    data_dir: Option<PathBuf>,
    /// Measure this executable in place of one that is built first
    #[arg(long)]
    binary: Option<PathBuf>,
}

pub fn run(args: &Args) -> anyhow::Result<()> {
    let binary = args.binary.clone().map_or_else(|| run::build_dormouse(true), Ok)?;
    let data_dir = tools::data_dir(args.data_dir.as_deref());
    let data = data_dir.to_string_lossy();
    eprint!("{}", run::output(&mut run::command(&binary, &["setup", "--data-dir", &data]))?);
    let options = Options { binary, data_dir, runs: args.runs, only: args.only.clone() };
    let mut figures = dormouse_testkit::bench::run(&options, &mut tell)?;
    if Path::new("/dev/kvm").exists() && microvm_is_wanted(&args.only) {
        figures.extend(microvm()?);
    }
    if args.json {
        println!("{}", serde_json::to_string_pretty(&figures)?);
    } else {
        println!("{}", table(&figures));
    }
    let missed: Vec<&str> = figures.iter().filter(|f| !f.holds()).map(|f| f.name.as_str()).collect();
    if figures.is_empty() {
        bail!("nothing was measured");
    }
    if !missed.is_empty() {
        bail!("beyond the limit: {}", missed.join(", "));
    }
    Ok(())
}

fn tell(figure: &Figure) {
    eprintln!("  {}: {:.2} {}", figure.name, figure.ours, figure.unit);
}

fn microvm_is_wanted(only: &[String]) -> bool {
    only.is_empty() || only.iter().any(|name| name.starts_with("microvm"))
}

/// One line of what the monitor's own measurement says.
#[derive(serde::Deserialize)]
struct Measured {
    name: String,
    ms: f64,
    limit_ms: Option<f64>,
}

/// How long a fork and a checkpoint stop a small guest: any `/dev/kvm` will do.
fn microvm() -> anyhow::Result<Vec<Figure>> {
    let args =
        ["test", "-q", "--release", "-p", "dormouse-vmm", "--test", "monitor", "--", "measure", "--json"];
    let said = run::output(&mut run::cargo(&args))?;
    let measured: Vec<Measured> = serde_json::from_str(said.trim())?;
    let figures = measured.into_iter().map(|Measured { name, ms, limit_ms }| Figure {
        name,
        unit: "ms".to_owned(),
        ours: ms,
        raw: None,
        ratio: None,
        limit: limit_ms,
        runs: 10,
        note: "a real-mode guest, source stopped or answer there, by fork(2)".to_owned(),
    });
    Ok(figures.inspect(tell).collect())
}

fn table(figures: &[Figure]) -> Table {
    let cell = |value: Option<f64>| value.map_or_else(|| "–".to_owned(), |value| format!("{value:.2}"));
    let mut table = Table::new();
    table.load_preset(comfy_table::presets::NOTHING).set_header([
        "figure",
        "ours",
        "raw",
        "unit",
        "ratio",
        "limit",
        "holds",
        "runs",
        "what is compared",
    ]);
    for figure in figures {
        table.add_row([
            figure.name.clone(),
            format!("{:.2}", figure.ours),
            cell(figure.raw),
            figure.unit.clone(),
            cell(figure.ratio),
            cell(figure.limit),
            if figure.holds() { "yes" } else { "NO" }.to_owned(),
            figure.runs.to_string(),
            figure.note.clone(),
        ]);
    }
    table
}
