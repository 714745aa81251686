//! `cargo xtask scenarios`: SCENARIOS.md against a live daemon.

use std::path::{Path, PathBuf};

use anyhow::bail;
use comfy_table::Table;
use dormouse_testkit::scenarios::{Options, Outcome, Verdict};
use dormouse_types::EngineKind;

use crate::run::Counts;
use crate::{run, tools};

#[derive(clap::Args)]
pub struct Args {
    /// The engine that is put to the test
    #[arg(long, default_value = "gvisor")]
    engine: EngineKind,
    /// Print a JSON list on stdout and nothing else
    #[arg(long)]
    json: bool,
    /// Only these, such as S01,S07
    #[arg(long, value_delimiter = ',')]
    only: Vec<String>,
    /// The data folder (default: one below the target folder)
    #[arg(long)]
    data_dir: Option<PathBuf>,
}

pub fn run(args: &Args) -> anyhow::Result<()> {
    let binary = run::build_dormouse(false)?;
    let mut data_dir = tools::data_dir(args.data_dir.as_deref());
    // A template belongs to one engine, and a folder has one of the name `base`.
    if args.data_dir.is_none() && args.engine != EngineKind::Gvisor {
        data_dir.set_file_name(format!("data-{}", args.engine));
    }
    // The set-up talks on stdout, which is the list's alone.
    let data = data_dir.to_string_lossy();
    let setup = ["setup", "--data-dir", &data, "--engine", &args.engine.to_string()];
    eprint!("{}", run::output(&mut run::command(&binary, &setup))?);
    let outcomes = all(&binary, &data_dir, args.engine, &args.only);
    if args.json {
        println!("{}", serde_json::to_string_pretty(&outcomes)?);
    } else {
        print_table(&outcomes);
    }
    verdict(&outcomes)
}

/// Runs them, telling each on stderr as it ends.
pub fn all(binary: &Path, data_dir: &Path, engine: EngineKind, only: &[String]) -> Vec<Outcome> {
    let options =
        Options { binary: binary.to_owned(), data_dir: data_dir.to_owned(), engine, only: only.to_vec() };
    dormouse_testkit::scenarios::run(&options, &mut |outcome| {
        eprintln!("  {} {} {} ms {}", outcome.id, word(outcome.outcome), outcome.ms, outcome.reason);
    })
}

fn word(verdict: Verdict) -> &'static str {
    match verdict {
        Verdict::Pass => "pass",
        Verdict::Skip => "skip",
        Verdict::Fail => "FAIL",
    }
}

pub fn print_table(outcomes: &[Outcome]) {
    let mut table = Table::new();
    table.load_preset(comfy_table::presets::NOTHING).set_header(["id", "engine", "outcome", "ms", "reason"]);
    for outcome in outcomes {
        table.add_row([
            outcome.id.clone(),
            outcome.engine.to_string(),
            word(outcome.outcome).to_owned(),
            outcome.ms.to_string(),
            outcome.reason.clone(),
        ]);
    }
    println!("{table}");
}

/// How many went how; none at all is an error.
pub fn counts(outcomes: &[Outcome]) -> anyhow::Result<Counts> {
    let of = |verdict| outcomes.iter().filter(|one| one.outcome == verdict).count() as u64;
    let counts = Counts { passed: of(Verdict::Pass), failed: of(Verdict::Fail), skipped: of(Verdict::Skip) };
    if counts.passed + counts.failed == 0 {
        bail!("no scenario was run");
    }
    Ok(counts)
}

/// One failed, or none at all: an error.
pub fn verdict(outcomes: &[Outcome]) -> anyhow::Result<()> {
    if outcomes.is_empty() {
        bail!("no scenario was run: is the id right?");
    }
    let failed: Vec<&str> =
        outcomes.iter().filter(|o| o.outcome == Verdict::Fail).map(|o| o.id.as_str()).collect();
    if !failed.is_empty() {
        bail!("{} of {} scenarios failed: {}", failed.len(), outcomes.len(), failed.join(", "));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn outcomes_have_the_agreed_form() {
        let outcome = Outcome {
            id: "S01".into(),
            engine: EngineKind::Gvisor,
            outcome: Verdict::Pass,
            reason: String::new(),
            ms: 12,
        };
        let json = serde_json::to_string(&outcome).expect("it serialises");
        assert_eq!(json, r#"{"id":"S01","engine":"gvisor","outcome":"pass","reason":"","ms":12}"#);
        assert!(verdict(&[]).is_err());
        assert!(verdict(std::slice::from_ref(&outcome)).is_ok());
        assert!(verdict(&[Outcome { outcome: Verdict::Fail, ..outcome }]).is_err());
    }
}
