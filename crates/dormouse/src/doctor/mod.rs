//! `dormouse doctor`: what this host can do, which engine would be chosen and why, and what mends what is missing.
//!
//! Invariant: looks and changes nothing (the reflink probe writes two small files into the data folder and removes
//! them; the network's probe makes a namespace that is gone with it).

mod checks;
mod host;
mod runsc;

use std::path::Path;

use dormouse_api::dormouse::{Check, CheckOutcome, DoctorReport};

use crate::cli::{CliError, Context, ExitStatus};

pub use checks::{SPACE_WANTED_BYTES, free_bytes};
pub use host::find_program;
pub use runsc::{RunscError, find as find_runsc};

/// Everything about this host that matters to a daemon on `data_dir`.
#[must_use]
pub fn report(data_dir: &Path) -> DoctorReport {
    let root = checks::root();
    let runsc = checks::runsc(&runsc::find());
    let cgroup = checks::cgroup();
    let able = [&root, &runsc].iter().all(|check| check.outcome != CheckOutcome::Fail);
    let (virtualisation, kvm, guest) = (checks::virtualisation(), checks::kvm(), checks::guest(data_dir));
    let (engine, why) = choice(able, &root, &runsc, &[&virtualisation, &kvm, &guest]);
    let checks = vec![
        root,
        checks::platform(),
        virtualisation,
        kvm,
        guest,
        checks::network(),
        checks::mkfs(),
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

/// `microvm`: what it needs beside root.
fn choice(gvisor: bool, root: &Check, runsc: &Check, microvm: &[&Check]) -> (Option<String>, String) {
    let lacks = |check: &&&Check| check.outcome != CheckOutcome::Ok;
    let reasons = |checks: &[&Check]| {
        let details: Vec<&str> = checks.iter().filter(lacks).map(|check| check.detail.as_str()).collect();
        details.join("; ")
    };
    if root.outcome == CheckOutcome::Ok && !microvm.iter().any(|check| lacks(&check)) {
        let why = "this host has hardware virtualisation that can be used, and a guest kernel is there";
        return (Some("microvm".to_owned()), why.to_owned());
    }
    let no_microvm = reasons(microvm);
    if gvisor {
        return (Some("gvisor".to_owned()), format!("runsc is usable; microvm is not: {no_microvm}"));
    }
    let why = format!("no engine can run: {}; {no_microvm}", reasons(&[root, runsc]));
    (None, why)
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

    fn check(name: &str, outcome: CheckOutcome) -> Check {
        Check { name: name.into(), outcome, detail: format!("about {name}"), mend: None }
    }

    #[test]
    fn the_engine_is_chosen_by_what_is_there() {
        use CheckOutcome::{Fail, Ok, Warn};
        let (root, kvm) = (check("root", Ok), check("kvm", Ok));
        let (none, no_kvm) = (check("runsc", Fail), check("kvm", Warn));
        let runsc = check("runsc", Ok);
        let engine = |gvisor, runsc, microvm: &[&Check]| choice(gvisor, &root, runsc, microvm).0;
        assert_eq!(engine(true, &runsc, &[&kvm]).as_deref(), Some("microvm"));
        assert_eq!(engine(false, &none, &[&kvm]).as_deref(), Some("microvm"));
        let (chosen, why) = choice(true, &root, &runsc, &[&no_kvm, &kvm]);
        assert_eq!(chosen.as_deref(), Some("gvisor"));
        assert!(why.contains("about kvm"), "{why}");
        let (chosen, why) = choice(false, &root, &none, &[&no_kvm]);
        assert_eq!(chosen, None);
        assert!(why.contains("about runsc") && why.contains("about kvm"), "{why}");
    }
}
