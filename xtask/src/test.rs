//! `cargo xtask test`: everything that must hold, in the order of how quickly it fails.

use std::path::PathBuf;
use std::time::Instant;

use anyhow::{Context, bail};
use dormouse_types::EngineKind;

use crate::{floors, run, scenarios, sdk, tidy, tools};

#[derive(clap::Args)]
pub struct Args {
    /// Only say what is missing on this machine
    #[arg(long)]
    no_install: bool,
    /// The data folder (default: one below the target folder)
    #[arg(long)]
    data_dir: Option<PathBuf>,
}

/// What was run, and how it went.
struct Report {
    lines: Vec<(String, bool, f64)>,
}

impl Report {
    /// Runs one part; a failure is kept, the other parts still run.
    fn part(&mut self, name: &str, work: impl FnOnce() -> anyhow::Result<()>) {
        println!("== {name}");
        let began = Instant::now();
        let result = work();
        if let Err(error) = &result {
            eprintln!("error: {name}: {error:#}");
        }
        self.lines.push((name.to_owned(), result.is_ok(), began.elapsed().as_secs_f64()));
    }

    fn finish(&self) -> anyhow::Result<()> {
        println!("== summary");
        for (name, passed, seconds) in &self.lines {
            println!("{} {name} ({seconds:.1} s)", if *passed { "pass" } else { "FAIL" });
        }
        let passed = self.lines.iter().filter(|(_, passed, _)| *passed).count();
        let failed = self.lines.len() - passed;
        println!("{passed} passed, {failed} failed");
        if failed > 0 {
            bail!("{failed} of {} parts failed", self.lines.len());
        }
        Ok(())
    }
}

pub fn run(args: &Args) -> anyhow::Result<()> {
    let data_dir = tools::data_dir(args.data_dir.as_deref());
    if args.no_install {
        let tools = tools::test_needs(false)?;
        let binary = run::build_dormouse(false)?;
        let set_up = tools::setup(&binary, &data_dir, false)?;
        if !(tools && set_up) {
            bail!("something is missing (named above); `cargo xtask test` installs it");
        }
        println!("nothing is missing");
        return Ok(());
    }
    let mut report = Report { lines: Vec::new() };
    tools::test_needs(true)?;
    report.part("formatting", format);
    report.part("clippy, warnings denied", clippy);
    report.part("floors", floors::run);
    report.part("tidiness", tidy::run);
    let binary = run::build_dormouse(false)?;
    report.part("openapi.json is current", || openapi(&binary));
    report.part("set-up", || tools::setup(&binary, &data_dir, true).map(drop));
    report.part("unit, property and integration tests", unit);
    report.part("the E2B SDK", || sdk::all(&binary, &data_dir, sdk::every_version(), &[]));
    report.part("scenarios on gvisor", || {
        let outcomes = scenarios::all(&binary, &data_dir, EngineKind::Gvisor, &[]);
        scenarios::print_table(&outcomes);
        scenarios::verdict(&outcomes)
    });
    report.finish()
}

pub fn lint() -> anyhow::Result<()> {
    let mut report = Report { lines: Vec::new() };
    report.part("formatting", format);
    report.part("clippy, warnings denied", clippy);
    report.part("floors", floors::run);
    report.part("tidiness", tidy::run);
    report.finish()
}

fn format() -> anyhow::Result<()> {
    run::run(&mut run::cargo(&["fmt", "--all", "--check"]))
}

fn clippy() -> anyhow::Result<()> {
    run::run(&mut run::cargo(&["clippy", "--workspace", "--all-targets", "--quiet", "--", "-D", "warnings"]))
}

fn unit() -> anyhow::Result<()> {
    if tools::nextest() {
        run::run(&mut run::cargo(&[
            "nextest",
            "run",
            "--workspace",
            "--no-fail-fast",
            "--status-level",
            "fail",
        ]))
    } else {
        run::run(&mut run::cargo(&["test", "--workspace", "--no-fail-fast", "--quiet"]))
    }
}

/// The committed document is what the code generates.
fn openapi(binary: &std::path::Path) -> anyhow::Result<()> {
    let path = run::root().join("openapi.json");
    let committed =
        std::fs::read_to_string(&path).with_context(|| format!("cannot read {}", path.display()))?;
    let generated = run::output(&mut run::command(binary, &["openapi"]))?;
    if committed.trim() != generated.trim() {
        bail!("openapi.json is not what the code says; `dormouse openapi > openapi.json` renews it");
    }
    Ok(())
}
