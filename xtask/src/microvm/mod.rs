//! The microVM engine's tests: here where this machine can run it, in one boot of the lab where it cannot.
//!
//! ```text
//! prepare (this machine, with its network) ── suite ── engine, monitor, scenarios, SDK ──> a list of tests
//!                                               └ in the lab or here; it needs no network
//! ```
//! Invariant: a run without hardware virtualisation, real or emulated, is an error and no pass.

mod prepare;
mod programs;
mod report;
mod suite;

use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context, bail};
use clap::ValueEnum;
use dormouse_engine::microvm::Kvm;

use crate::lab::{self, Job};
use crate::run::{self, Counts};
use prepare::Prepared;
pub use report::Tested;

/// Of the lab: enough for the sandboxes of a scenario with twenty of them.
const LAB_MEMORY_MIB: u32 = 4096;
/// A lab that hangs is ended; figures are the benches'.
const LAB_PATIENCE: Duration = Duration::from_secs(3600);
const REPORT: &str = "tests.json";

/// What is tested.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Part {
    /// The engine's own tests, against real KVM
    Engine,
    /// The monitor's own tests, with small guests
    Monitor,
    Scenarios,
    Sdk,
}

pub const PARTS: [Part; 4] = [Part::Monitor, Part::Engine, Part::Scenarios, Part::Sdk];

#[derive(Debug, Clone, clap::Args)]
pub struct Chosen {
    /// Only these parts
    #[arg(long = "part", value_enum, value_delimiter = ',')]
    pub parts: Vec<Part>,
    /// Only tests with one of these in their names; of the scenarios the ids
    #[arg(long, value_delimiter = ',')]
    pub only: Vec<String>,
}

impl Chosen {
    pub fn parts(&self) -> Vec<Part> {
        if self.parts.is_empty() { PARTS.to_vec() } else { self.parts.clone() }
    }

    pub fn wants(&self, name: &str) -> bool {
        self.only.is_empty() || self.only.iter().any(|only| name.contains(only.as_str()))
    }
}

/// The hidden command that runs inside.
#[derive(clap::Args)]
pub struct SuiteArgs {
    #[command(flatten)]
    chosen: Chosen,
    #[command(flatten)]
    prepared: Prepared,
    /// Where the list of tests goes
    #[arg(long)]
    out: PathBuf,
}

pub fn suite(args: &SuiteArgs) -> anyhow::Result<()> {
    Kvm::probe().context("microVMs cannot run here")?;
    suite::run(&args.prepared, &args.chosen, &args.out).map(drop)
}

/// Runs them where they can be run.
pub fn test(chosen: &Chosen) -> anyhow::Result<Vec<Tested>> {
    let prepared = prepare::all(chosen)?;
    match Kvm::probe() {
        Ok(kvm) => {
            println!("microVMs run on this machine ({})", kvm.flag);
            let out = run::target().join("xtask").join("microvm-tests.json");
            suite::run(&prepared, chosen, &out)
        }
        Err(why) => {
            println!("microVMs run in the lab: {why}");
            in_the_lab(&prepared, chosen)
        }
    }
}

fn in_the_lab(prepared: &Prepared, chosen: &Chosen) -> anyhow::Result<Vec<Tested>> {
    let out = tempfile::tempdir()?;
    let mut command = vec![text(std::env::current_exe()?)?, "suite".to_owned()];
    command.extend(prepared.arguments()?);
    command.extend(["--out".to_owned(), format!("/out/{REPORT}")]);
    for part in &chosen.parts {
        let name = part.to_possible_value().context("a part without a name")?;
        command.extend(["--part".to_owned(), name.get_name().to_owned()]);
    }
    for only in &chosen.only {
        command.extend(["--only".to_owned(), only.clone()]);
    }
    let mut env = Vec::new();
    if let Some(target) = std::env::var_os("CARGO_TARGET_DIR") {
        env.push(format!("CARGO_TARGET_DIR={}", text(target.into())?));
    }
    let job = Job {
        command,
        env,
        with: prepared.paths(),
        out: Some(out.path().to_owned()),
        timeout: LAB_PATIENCE,
        memory_mib: LAB_MEMORY_MIB,
        console: false,
    };
    let code = lab::run_job(&job)?;
    let path = out.path().join(REPORT);
    if !path.is_file() {
        bail!("the lab ended with {code} and without a list of tests");
    }
    report::read(&path)
}

/// How many went how; none at all is an error.
pub fn counts(tested: &[Tested]) -> anyhow::Result<Counts> {
    let counts = report::counts(tested);
    if counts.passed + counts.failed == 0 {
        bail!("no test of microVMs was run");
    }
    Ok(counts)
}

pub fn print(tested: &[Tested]) {
    report::print(tested);
}

fn text(path: PathBuf) -> anyhow::Result<String> {
    path.into_os_string().into_string().ok().context("a path is no text")
}
