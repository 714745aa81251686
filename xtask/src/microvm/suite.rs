//! The suite itself, on a machine that runs microVMs.

use std::path::Path;
use std::time::Instant;

use anyhow::Context;
use dormouse_testkit::scenarios::{Options, Outcome, Verdict};
use dormouse_types::EngineKind;
use serde::Deserialize;

use super::report::{Report, Tested};
use super::{Chosen, Part, Prepared, programs};
use crate::sdk;
use crate::server::Server;

/// Of the template that scenarios and SDK use: small, for an emulated processor.
const CPUS: &str = "1";
const MEMORY_MIB: &str = "256";

pub fn run(prepared: &Prepared, chosen: &Chosen, out: &Path) -> anyhow::Result<Vec<Tested>> {
    let mut report = Report::new(out);
    let parts = chosen.parts();
    if parts.contains(&Part::Scenarios) || parts.contains(&Part::Sdk) {
        once("set-up", "the template base", &mut report, || base(prepared))?;
    }
    for part in parts {
        let done = match part {
            Part::Engine => program("engine", prepared.engine.as_deref(), prepared, chosen, &mut report),
            Part::Monitor => program("monitor", prepared.monitor.as_deref(), prepared, chosen, &mut report),
            Part::Scenarios => scenarios(prepared, chosen, &mut report),
            Part::Sdk => the_sdk(prepared, chosen, &mut report),
        };
        if let Err(error) = done {
            once(&format!("{part:?}").to_lowercase(), "its runner", &mut report, || Err(error))?;
        }
    }
    Ok(report.tested)
}

/// A step that counts as one test.
fn once(
    part: &str,
    name: &str,
    report: &mut Report,
    work: impl FnOnce() -> anyhow::Result<()>,
) -> anyhow::Result<()> {
    let began = Instant::now();
    let done = work();
    report.add(Tested {
        part: part.to_owned(),
        name: name.to_owned(),
        outcome: if done.is_ok() { Verdict::Pass } else { Verdict::Fail },
        reason: done.err().map(|error| format!("{error:#}")).unwrap_or_default(),
        ms: u64::try_from(began.elapsed().as_millis())?,
    })
}

fn program(
    part: &str,
    program: Option<&Path>,
    prepared: &Prepared,
    chosen: &Chosen,
    report: &mut Report,
) -> anyhow::Result<()> {
    let program = program.with_context(|| format!("the tests of {part} were not built"))?;
    programs::run_each(part, program, prepared, chosen, report)
}

/// Builds the template `base` of a small shape: a whole boot to a served agent.
fn base(prepared: &Prepared) -> anyhow::Result<()> {
    let environment = [("DORMOUSE_ENGINE".to_owned(), EngineKind::Microvm.to_string())];
    let mut server = Server::start_with(&prepared.binary, &prepared.data_dir, &environment)?;
    let folder = tempfile::tempdir()?;
    std::fs::write(folder.path().join("template.toml"), super::prepare::BASE)?;
    let context = folder.path().to_string_lossy();
    let args = ["template", "build", "--name", "base", "--cpus", CPUS, "--memory", MEMORY_MIB, &context];
    server.text(&args)?;
    server.stop()
}

fn scenarios(prepared: &Prepared, chosen: &Chosen, report: &mut Report) -> anyhow::Result<()> {
    let options = Options {
        binary: prepared.binary.clone(),
        data_dir: prepared.data_dir.clone(),
        engine: EngineKind::Microvm,
        only: chosen.only.clone(),
    };
    let mut told = Ok(());
    dormouse_testkit::scenarios::run(&options, &mut |outcome: &Outcome| {
        let Outcome { id, outcome, reason, ms, .. } = outcome.clone();
        let tested = Tested { part: "scenarios".to_owned(), name: id, outcome, reason, ms };
        if told.is_ok() {
            told = report.add(tested);
        }
    });
    told
}

/// A line of what `tests/sdk/conftest.py` writes.
#[derive(Deserialize)]
struct Line {
    name: String,
    outcome: Verdict,
    reason: String,
    ms: u64,
}

fn the_sdk(prepared: &Prepared, chosen: &Chosen, report: &mut Report) -> anyhow::Result<()> {
    let python = prepared.python.as_deref().context("the SDK was not installed")?;
    let lines = tempfile::NamedTempFile::new()?;
    let mut pytest = Vec::new();
    if !chosen.only.is_empty() {
        pytest = vec!["-k".to_owned(), chosen.only.join(" or ")];
    }
    let environment = [("DORMOUSE_ENGINE".to_owned(), EngineKind::Microvm.to_string())];
    let mut server = Server::start_with(&prepared.binary, &prepared.data_dir, &environment)?;
    let (interpreter, packages) = sdk::interpreter(python)?;
    let mut command = sdk::pytest(&interpreter, &server, &pytest);
    command.envs(packages.map(|packages| ("PYTHONPATH", packages)));
    command.env("DORMOUSE_TEST_REPORT", lines.path());
    let status = command.status().context("cannot start pytest")?;
    let text = std::fs::read_to_string(lines.path())?;
    let mut failed = false;
    for line in text.lines() {
        let Line { name, outcome, reason, ms } = serde_json::from_str(line)?;
        failed |= outcome == Verdict::Fail;
        report.add(Tested { part: "sdk".to_owned(), name, outcome, reason, ms })?;
    }
    server.stop()?;
    anyhow::ensure!(status.success() || failed, "pytest ended with {status}");
    Ok(())
}
