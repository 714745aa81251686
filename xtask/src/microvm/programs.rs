//! Test executables: built here, their tests run one by one wherever they are taken to.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Instant;

use anyhow::{Context, bail};
use dormouse_testkit::scenarios::Verdict;
use serde_json::Value;

use super::report::{Report, Tested};
use super::{Chosen, Prepared};
use crate::run;

/// Lines of a failed test's that are its reason.
const LINES_TOLD: usize = 12;

/// The executable of an integration test.
pub fn build(package: &str, test: &str) -> anyhow::Result<PathBuf> {
    let args = ["test", "--no-run", "--package", package, "--test", test, "--message-format=json"];
    let said = run::output(&mut run::cargo(&args))?;
    let messages = said.lines().filter_map(|line| serde_json::from_str::<Value>(line).ok());
    let is_it = |message: &Value| {
        message["reason"] == "compiler-artifact"
            && message["target"]["name"] == test
            && message["target"]["kind"][0] == "test"
    };
    let found =
        messages.filter(is_it).find_map(|message| Some(PathBuf::from(message["executable"].as_str()?)));
    found.with_context(|| format!("cargo names no executable of {package}'s test {test}"))
}

/// Runs each test of the executable in a process of its own.
pub fn run_each(
    part: &str,
    program: &Path,
    prepared: &Prepared,
    chosen: &Chosen,
    report: &mut Report,
) -> anyhow::Result<()> {
    let listed = run::output(&mut run::command(program, &["--list"]))?;
    let names: Vec<&str> = listed.lines().filter_map(|line| line.strip_suffix(": test")).collect();
    if names.is_empty() {
        bail!("{} lists no test", program.display());
    }
    for name in names.into_iter().filter(|name| chosen.wants(name)) {
        let began = Instant::now();
        let output = Command::new(program)
            .args(["--exact", name, "--nocapture"])
            .env("DORMOUSE_TEST_BINARY", &prepared.binary)
            .env("DORMOUSE_TEST_DATA", &prepared.data_dir)
            .stdin(Stdio::null())
            .output()
            .with_context(|| format!("cannot start {}", program.display()))?;
        let passed = output.status.success();
        let said = [output.stdout, output.stderr].concat();
        report.add(Tested {
            part: part.to_owned(),
            name: name.to_owned(),
            outcome: if passed { Verdict::Pass } else { Verdict::Fail },
            reason: if passed { String::new() } else { last_lines(&String::from_utf8_lossy(&said)) },
            ms: u64::try_from(began.elapsed().as_millis())?,
        })?;
    }
    Ok(())
}

fn last_lines(said: &str) -> String {
    let lines: Vec<&str> = said.lines().collect();
    lines[lines.len().saturating_sub(LINES_TOLD)..].join("\n")
}
