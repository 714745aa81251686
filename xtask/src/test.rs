//! `cargo xtask test`: everything that must hold, in the order of how quickly it fails.

use std::path::{Path, PathBuf};
use std::time::Instant;

use anyhow::{Context, bail};
use dormouse_types::EngineKind;

use crate::run::{Counts, Told};
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
#[derive(Default)]
struct Report {
    lines: Vec<String>,
    counts: Counts,
    failed: bool,
}

impl Report {
    /// Runs one part that counts as one test.
    fn part(&mut self, name: &str, work: impl FnOnce() -> anyhow::Result<()>) {
        self.tests(name, || work().map(|()| Counts { passed: 1, ..Counts::default() }));
    }

    /// Runs one part with tests of its own; after a failure the other parts still run.
    fn tests(&mut self, name: &str, work: impl FnOnce() -> anyhow::Result<Counts>) {
        println!("== {name}");
        let began = Instant::now();
        let counts = work().unwrap_or_else(|error| {
            eprintln!("error: {name}: {error:#}");
            Counts { failed: 1, ..Counts::default() }
        });
        self.counts.add(counts);
        self.failed |= counts.failed > 0;
        let mark = if counts.failed == 0 { "pass" } else { "FAIL" };
        let Counts { passed, failed, skipped } = counts;
        let seconds = began.elapsed().as_secs_f64();
        self.lines.push(format!(
            "{mark} {name}: {passed} passed, {failed} failed, {skipped} skipped ({seconds:.1} s)"
        ));
    }

    /// The last line is the sum of all.
    fn finish(&self) -> anyhow::Result<()> {
        println!("== summary");
        for line in &self.lines {
            println!("{line}");
        }
        let Counts { passed, failed, skipped } = self.counts;
        println!("{passed} passed, {failed} failed, {skipped} skipped");
        if self.failed { Err(Told.into()) } else { Ok(()) }
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
    let mut report = Report::default();
    tools::test_needs(true)?;
    report.part("formatting", format);
    report.part("clippy, warnings denied", clippy);
    report.part("floors", floors::run);
    report.part("tidiness", tidy::run);
    let binary = run::build_dormouse(false)?;
    report.part("openapi.json is current", || openapi(&binary));
    report.part("set-up", || tools::setup(&binary, &data_dir, true).map(drop));
    report.tests("unit, property and integration tests", || unit(&binary, &data_dir));
    report.tests("the E2B SDK", || sdk::all(&binary, &data_dir, sdk::every_version(), &[]));
    report.tests("scenarios on gvisor", || {
        let outcomes = scenarios::all(&binary, &data_dir, EngineKind::Gvisor, &[]);
        scenarios::print_table(&outcomes);
        scenarios::counts(&outcomes)
    });
    report.finish()
}

pub fn lint() -> anyhow::Result<()> {
    let mut report = Report::default();
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
    let clippy = |targets: &[&str]| {
        let args = [&["clippy"], targets, &["--quiet", "--", "-D", "warnings"]].concat();
        run::run(&mut run::cargo(&args))
    };
    clippy(&["--workspace", "--all-targets"])?;
    // `cargo test` is not to run it here, so it is none of all the targets.
    clippy(&["--package", "dormouse-engine", "--test", "microvm"])
}

/// Tests of the whole program find the executable and the data folder by these two variables.
fn unit(binary: &Path, data_dir: &Path) -> anyhow::Result<Counts> {
    let tests = |args: &[&str]| {
        let mut command = run::cargo(args);
        command.env("DORMOUSE_TEST_BINARY", binary).env("DORMOUSE_TEST_DATA", data_dir);
        command
    };
    if tools::nextest() {
        let args = ["nextest", "run", "--workspace", "--no-fail-fast", "--status-level", "fail"];
        run::count(&mut tests(&args), |line| line.trim_start().starts_with("Summary ["))
    } else {
        let args = ["test", "--workspace", "--no-fail-fast", "--quiet"];
        run::count(&mut tests(&args), |line| line.starts_with("test result:"))
    }
}

/// The committed document is what the code generates.
fn openapi(binary: &Path) -> anyhow::Result<()> {
    let path = run::root().join("openapi.json");
    let committed =
        std::fs::read_to_string(&path).with_context(|| format!("cannot read {}", path.display()))?;
    let generated = run::output(&mut run::command(binary, &["openapi"]))?;
    if committed.trim() != generated.trim() {
        bail!("openapi.json is not what the code says; `dormouse openapi > openapi.json` renews it");
    }
    Ok(())
}
