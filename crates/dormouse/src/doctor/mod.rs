//! `dormouse doctor`: what this host can do, which engine would be chosen and why, and what mends what is missing.
//!
//! Invariant: looks and changes nothing (the reflink probe writes two small files into the data folder and removes
//! them).

mod checks;
mod host;
mod runsc;

use std::path::Path;

use dormouse_api::dormouse::{Check, CheckOutcome, DoctorReport};

use crate::cli::{CliError, Context, ExitStatus};

pub use checks::{SPACE_WANTED_BYTES, free_bytes};
pub use host::find_program;
pub use runsc::{Runsc, RunscError, find as find_runsc};

/// Everything about this host that matters to a daemon on `data_dir`.
#[must_use]
pub fn report(data_dir: &Path) -> DoctorReport {
    let root = checks::root();
    let runsc = checks::runsc(&runsc::find());
    let cgroup = checks::cgroup();
    let able = [&root, &runsc].iter().all(|check| check.outcome != CheckOutcome::Fail);
    let virtualisation = checks::virtualisation();
    let (engine, why) = choice(able, virtualisation.outcome == CheckOutcome::Ok, &root, &runsc);
    let checks = vec![
        root,
        checks::platform(),
        virtualisation,
        checks::kvm(),
        runsc,
        checks::mmdebstrap(),
        cgroup,
        checks::reflink(data_dir),
        checks::userfaultfd(),
        checks::free_disk(data_dir),
        checks::memory(),
    ];
    DoctorReport { checks, engine, why }
}

fn choice(gvisor: bool, hardware: bool, root: &Check, runsc: &Check) -> (Option<String>, String) {
    if !gvisor {
        let broken = [root, runsc].into_iter().filter(|check| check.outcome == CheckOutcome::Fail);
        let reasons: Vec<&str> = broken.map(|check| check.detail.as_str()).collect();
        return (None, format!("no engine can run: {}", reasons.join("; ")));
    }
    let why = if hardware {
        "runsc is usable; the processor offers hardware virtualisation, but this release has no microvm engine"
    } else {
        "runsc is usable and needs no hardware virtualisation, which this host does not offer"
    };
    (Some("gvisor".to_owned()), why.to_owned())
}

/// The command. Ends with 7 only if no engine can run.
pub fn run(context: &Context) -> Result<ExitStatus, CliError> {
    let report = report(&context.data_dir);
    crate::cli::show(context, &report, told)?;
    Ok(if report.engine.is_some() { ExitStatus::OK } else { ExitStatus::MISSING })
}

fn told(report: &DoctorReport) -> String {
    let mut lines = Vec::new();
    for check in &report.checks {
        let mark = match check.outcome {
            CheckOutcome::Ok => "ok  ",
            CheckOutcome::Warn => "warn",
            CheckOutcome::Fail => "FAIL",
        };
        lines.push(format!("{mark}  {:<24} {}", check.name, check.detail));
        if let Some(mend) = check.mend.as_ref().filter(|_| check.outcome != CheckOutcome::Ok) {
            lines.push(format!("      {:<24} mend: {mend}", ""));
        }
    }
    lines.push(match &report.engine {
        Some(engine) => format!("engine: {engine} ({})", report.why),
        None => report.why.clone(),
    });
    lines.join("\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_host_without_runsc_has_no_engine() {
        let ok = Check { name: "root".into(), outcome: CheckOutcome::Ok, detail: "root".into(), mend: None };
        let missing = Check {
            name: "runsc".into(),
            outcome: CheckOutcome::Fail,
            detail: "runsc is missing".into(),
            mend: None,
        };
        let (engine, why) = choice(false, true, &ok, &missing);
        assert_eq!(engine, None);
        assert!(why.contains("runsc is missing"), "{why}");
        assert_eq!(choice(true, false, &ok, &ok).0.as_deref(), Some("gvisor"));
    }
}
