//! `cargo xtask bench`: medians, and ratios to what others do in the same run: raw runsc, QEMU.
//!
//! ```text
//! --engine gvisor   here
//! --engine microvm  here: a real-mode guest, which any /dev/kvm runs, and all the rest where the processor can;
//!                   else the rest in the lab (one boot), by this program, which finds itself there with --inside
//! ```

use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, bail};
use comfy_table::Table;
use dormouse_testkit::bench::{Figure, Options};
use dormouse_types::EngineKind;

use crate::{lab, run, tools};

/// Of a whole bench in the lab.
const LAB_PATIENCE: Duration = Duration::from_secs(3600);
const LAB_MEMORY_MIB: u32 = 6144;
const LAB_FIGURES: &str = "figures.json";

#[derive(clap::Args)]
pub struct Args {
    /// The engine that is measured
    #[arg(long, default_value = "gvisor")]
    engine: EngineKind,
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
    /// This is the lab: write the figures into this folder
    #[arg(long, hide = true)]
    inside: Option<PathBuf>,
}

pub fn run(args: &Args) -> anyhow::Result<()> {
    if let Some(out) = &args.inside {
        return inside(args, out);
    }
    let figures = match args.engine {
        EngineKind::Gvisor => gvisor(args)?,
        EngineKind::Microvm => microvm(args)?,
    };
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

fn gvisor(args: &Args) -> anyhow::Result<Vec<Figure>> {
    let options = options(args)?;
    set_up(&options, EngineKind::Gvisor, &[])?;
    let mut figures = dormouse_testkit::bench::run(&options, &mut tell)?;
    if Path::new("/dev/kvm").exists() && args.only.is_empty() {
        figures.extend(real_mode()?);
    }
    Ok(figures)
}

fn options(args: &Args) -> anyhow::Result<Options> {
    let binary = args.binary.clone().map_or_else(|| run::build_dormouse(true), Ok)?;
    let mut data_dir = tools::data_dir(args.data_dir.as_deref());
    // A template belongs to one engine, and a folder has one of the name `base`.
    if args.data_dir.is_none() && args.engine != EngineKind::Gvisor {
        data_dir.set_file_name(format!("data-{}", args.engine));
    }
    Ok(Options { binary, data_dir, runs: args.runs, only: args.only.clone() })
}

fn set_up(options: &Options, engine: EngineKind, more: &[&str]) -> anyhow::Result<()> {
    let data = options.data_dir.to_string_lossy();
    let engine = engine.to_string();
    let args = [&["setup", "--data-dir", &data, "--engine", &engine], more].concat();
    // The set-up talks on stdout, which is the list's alone.
    eprint!("{}", run::output(&mut run::command(&options.binary, &args))?);
    Ok(())
}

fn microvm(args: &Args) -> anyhow::Result<Vec<Figure>> {
    let options = options(args)?;
    let mut figures = Vec::new();
    if Path::new("/dev/kvm").exists() && wanted(&args.only, REAL_MODE) {
        figures.extend(real_mode()?);
    }
    if !args.only.is_empty() && args.only.iter().all(|name| name.starts_with(REAL_MODE)) {
        return Ok(figures);
    }
    if can_run_microvms() {
        set_up(&options, EngineKind::Microvm, &[])?;
        figures.extend(dormouse_testkit::bench::run_microvm(&options, &mut tell)?);
    } else {
        eprintln!(
            "  no hardware virtualisation here: the rest is measured in the lab, whose times are an emulation's"
        );
        figures.extend(in_lab(&options)?);
    }
    Ok(figures)
}

/// As the engine asks before it boots a guest.
fn can_run_microvms() -> bool {
    let cpuinfo = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let flags = cpuinfo.lines().find(|line| line.starts_with("flags")).unwrap_or_default();
    Path::new("/dev/kvm").exists() && flags.split_whitespace().any(|flag| ["vmx", "svm"].contains(&flag))
}

/// This program again, in the lab, with the data folder that was set up here as far as it could be.
fn in_lab(options: &Options) -> anyhow::Result<Vec<Figure>> {
    set_up(options, EngineKind::Microvm, &["--no-template"])?;
    // The figures' clock is this program's: it should not be slower than what it measures.
    run::run(&mut run::cargo(&["build", "-q", "--release", "--package", "xtask"]))?;
    let program = run::target().join("release").join("xtask");
    let text = |path: &Path| {
        path.to_str().map(str::to_owned).with_context(|| format!("{} is no text", path.display()))
    };
    let mut command = vec![text(&program)?];
    command.extend(["bench", "--engine", "microvm", "--inside", "/out"].map(str::to_owned));
    command.extend([
        "--binary".to_owned(),
        text(&options.binary)?,
        "--data-dir".to_owned(),
        text(&options.data_dir)?,
    ]);
    command.extend(["--runs".to_owned(), options.runs.to_string()]);
    if !options.only.is_empty() {
        command.extend(["--only".to_owned(), options.only.join(",")]);
    }
    let out = tempfile::tempdir()?;
    let job = lab::Job {
        command,
        env: Vec::new(),
        with: vec![options.data_dir.clone()],
        out: Some(out.path().to_owned()),
        timeout: LAB_PATIENCE,
        memory_mib: LAB_MEMORY_MIB,
        console: false,
    };
    let code = lab::run_job(&job)?;
    if code != 0 {
        bail!("the bench in the lab ended with exit code {code}");
    }
    let path = out.path().join(LAB_FIGURES);
    let bytes = std::fs::read(&path).with_context(|| format!("the lab left no {LAB_FIGURES}"))?;
    Ok(serde_json::from_slice(&bytes)?)
}

/// In the lab.
fn inside(args: &Args, out: &Path) -> anyhow::Result<()> {
    let options = options(args)?;
    set_up(&options, args.engine, &[])?;
    let figures = dormouse_testkit::bench::run_microvm(&options, &mut tell)?;
    std::fs::write(out.join(LAB_FIGURES), serde_json::to_vec(&figures)?)?;
    Ok(())
}

fn tell(figure: &Figure) {
    eprintln!("  {}: {:.2} {}", figure.name, figure.ours, figure.unit);
}

/// How the names of the real-mode guest's figures begin.
const REAL_MODE: &str = "microvm_";

fn wanted(only: &[String], prefix: &str) -> bool {
    only.is_empty() || only.iter().any(|name| name.starts_with(prefix))
}

/// One line of what the monitor's own measurement says.
#[derive(serde::Deserialize)]
struct Measured {
    name: String,
    ms: f64,
    limit_ms: Option<f64>,
}

/// How long a fork and a checkpoint stop a small guest: any `/dev/kvm` will do.
fn real_mode() -> anyhow::Result<Vec<Figure>> {
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
