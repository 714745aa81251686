//! The correctness scenarios, each against a live daemon through the public API.
//!
//! Numbers are stable. A scenario is one function in the file of its kind: it passes, fails with what
//! was seen, or is skipped with the reason why this engine or release cannot do it.

mod clock;
mod crashes;
mod identity;
mod idle;
mod network;
mod races;
mod stage;
mod state;

use std::path::PathBuf;
use std::time::Instant;

use anyhow::Result;
use dormouse_types::EngineKind;
use serde::{Deserialize, Serialize};

pub(crate) use stage::Stage;

/// What is run, and against what.
#[derive(Debug, Clone)]
pub struct Options {
    /// The `dormouse` executable: daemons are started (and killed) from it.
    pub binary: PathBuf,
    /// The data folder, already set up (`dormouse setup`): holds the template `base`.
    pub data_dir: PathBuf,
    pub engine: EngineKind,
    /// Ids such as `S07`; empty: all.
    pub only: Vec<String>,
}

/// One scenario's result; `cargo xtask scenarios --json` prints a list of these and nothing else.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Outcome {
    pub id: String,
    pub engine: EngineKind,
    pub outcome: Verdict,
    /// Why it was skipped or failed; empty after a pass.
    pub reason: String,
    pub ms: u64,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Verdict {
    Pass,
    Skip,
    Fail,
}

/// Every scenario there is: those without a driver say why.
const ALL: &[(&str, Option<&str>)] = &[
    ("S01", None),
    ("S02", None),
    ("S03", None),
    ("S04", None),
    ("S05", None),
    ("S06", None),
    ("S07", None),
    ("S08", None),
    ("S09", Some("a property of the store alone: tests of crate store, `nearly_equal_snapshots_stay_apart`")),
    ("S10", None),
    ("S11", None),
    ("S12", None),
    ("S13", None),
    ("S14", None),
    ("S15", None),
    ("S16", None),
    ("S17", Some("no secrets and no egress header injection yet")),
    ("S18", None),
    ("S19", None),
    ("S20", None),
    ("S21", None),
    ("S22", None),
    ("S23", None),
    ("S24", None),
    ("S25", None),
    ("S26", Some("no archive yet")),
    ("S27", None),
    ("S28", None),
    ("S29", None),
    ("S30", Some("one release so far: nothing to upgrade from")),
    ("S31", None),
    ("S32", None),
    ("S33", None),
    (
        "S34",
        Some(
            "no scenario kills the pager of a live daemon's sandbox yet: test of crate vmm, `without_its_pager_a_monitor_ends_with_the_reason`",
        ),
    ),
    ("S35", Some("one release so far: no older snapshot")),
    ("S36", None),
    ("S37", Some("one release so far: no older agent")),
    ("S38", Some("no archive yet")),
    ("S39", None),
    ("S40", None),
    ("S41", None),
];

/// Runs the chosen scenarios one after the other and tells `done` of each as it ends.
pub fn run(options: &Options, done: &mut dyn FnMut(&Outcome)) -> Vec<Outcome> {
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build();
    let runtime = match runtime {
        Ok(runtime) => runtime,
        Err(error) => return vec![outcome("setup", options, Verdict::Fail, error.to_string(), 0)],
    };
    let mut stage = Stage::new(options.clone());
    let mut outcomes = Vec::new();
    for (id, skipped) in ALL {
        if !options.only.is_empty() && !options.only.iter().any(|wanted| wanted == id) {
            continue;
        }
        let started = Instant::now();
        let of_engine = (*id == "S14" && options.engine == EngineKind::Gvisor)
            .then_some("the guest kernel of gVisor logs no lock-ups");
        let (verdict, reason) = match skipped.or(of_engine) {
            Some(reason) => (Verdict::Skip, reason.to_owned()),
            None => match runtime.block_on(one(id, &mut stage)) {
                Ok(()) => (Verdict::Pass, String::new()),
                Err(error) => (Verdict::Fail, format!("{error:#}")),
            },
        };
        let ms = u64::try_from(started.elapsed().as_millis()).unwrap_or(u64::MAX);
        let told = outcome(id, options, verdict, reason, ms);
        done(&told);
        outcomes.push(told);
    }
    runtime.block_on(stage.close());
    outcomes
}

fn outcome(id: &str, options: &Options, outcome: Verdict, reason: String, ms: u64) -> Outcome {
    Outcome { id: id.to_owned(), engine: options.engine, outcome, reason, ms }
}

async fn one(id: &str, stage: &mut Stage) -> Result<()> {
    stage.ready().await?;
    let result = match id {
        "S01" => state::s01(stage).await,
        "S02" => state::s02(stage).await,
        "S03" => state::s03(stage).await,
        "S04" => state::s04(stage).await,
        "S05" => state::s05(stage).await,
        "S06" => state::s06(stage).await,
        "S07" => state::s07(stage).await,
        "S08" => crashes::s08(stage).await,
        "S10" => state::s10(stage).await,
        "S11" => state::s11(stage).await,
        "S12" => clock::s12(stage).await,
        "S13" => clock::s13(stage).await,
        "S14" => clock::s14(stage).await,
        "S15" => identity::s15(stage).await,
        "S16" => identity::s16(stage).await,
        "S18" => identity::s18(stage).await,
        "S19" => network::s19(stage).await,
        "S20" => network::s20(stage).await,
        "S21" => network::s21(stage).await,
        "S22" => network::s22(stage).await,
        "S23" => network::s23(stage).await,
        "S24" => races::s24(stage).await,
        "S25" => crashes::s25(stage).await,
        "S27" => races::s27(stage).await,
        "S28" => races::s28(stage).await,
        "S29" => crashes::s29(stage).await,
        "S31" => crashes::s31(stage).await,
        "S32" => crashes::s32(stage).await,
        "S33" => crashes::s33(stage).await,
        "S36" => state::s36(stage).await,
        "S39" => idle::s39(stage).await,
        "S40" => idle::s40(stage).await,
        "S41" => identity::s41(stage).await,
        other => anyhow::bail!("there is no driver for {other}"),
    };
    stage.tidy().await;
    result
}
