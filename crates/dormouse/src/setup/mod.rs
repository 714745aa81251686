//! `dormouse setup`: names what this machine lacks and why it is needed, then installs it and builds the default
//! template.
//!
//! ```text
//! root? → packages (apt) → guest kernel, where microVMs can run → room on the disk? → default template (through a
//! daemon, started for it if none runs)
//! ```
//!
//! Invariant: a second run finds everything in place and changes nothing.

mod apt;
mod base;
mod guest;

use std::path::Path;

use dormouse_types::EngineKind;
use serde::Serialize;

use crate::cli::{CliError, Context, ExitStatus};
use crate::doctor::{RunscError, SPACE_WANTED_BYTES, find_runsc, free_bytes};

#[derive(clap::Args)]
pub struct SetupArgs {
    /// Only say what is missing; ends with 7 if anything is
    #[arg(long)]
    no_install: bool,
    /// Install the packages, but build no template
    #[arg(long)]
    no_template: bool,
    /// Set up for this engine alone [default: gvisor, and microvm where this machine can run it]
    #[arg(long, value_name = "gvisor|microvm")]
    engine: Option<EngineKind>,
}

/// Something that is missing.
#[derive(Debug, Clone, Serialize)]
struct Missing {
    what: String,
    why: String,
    /// The command that installs it.
    mend: String,
    #[serde(skip)]
    package: Option<apt::Package>,
}

/// What a run did, for `--json`.
#[derive(Serialize)]
struct Report {
    missing: Vec<Missing>,
    installed: Vec<String>,
    /// The release of the kernel that microVMs boot, where they are wanted.
    guest: Option<String>,
    /// The default template's id, once it is there.
    template: Option<String>,
}

pub async fn run(args: &SetupArgs, context: &Context) -> Result<ExitStatus, CliError> {
    let tell = |line: &str| tell(context, line);
    let missing = missing_packages(args.engine);
    for one in &missing {
        tell(&format!("missing: {} ({})", one.what, one.why));
    }
    if args.no_install {
        return only_say(args, context, missing).await;
    }
    need_root()?;
    let mut report = Report { missing: missing.clone(), installed: Vec::new(), guest: None, template: None };
    if missing.is_empty() {
        tell("packages: everything is there");
    } else {
        let packages: Vec<apt::Package> = missing.iter().filter_map(|one| one.package).collect();
        apt::install(&packages, context)?;
        report.installed = packages.iter().map(|package| package.name.to_owned()).collect();
        if let Some(one) = missing_packages(args.engine).first() {
            let what = &one.what;
            return Err(CliError::missing(format!(
                "cannot use {what} after installing it ({}); see `dormouse doctor`",
                one.why
            )));
        }
    }
    if guest::is_wanted(args.engine) {
        report.guest = Some(guest::ensure(&context.data_dir, &tell)?);
    }
    if !args.no_template {
        need_space(&context.data_dir)?;
        report.template = Some(base::ensure(context, args.engine, &tell).await?);
    }
    tell("set-up is complete");
    if context.json {
        crate::cli::show(context, &report, |_| String::new())?;
    }
    Ok(ExitStatus::OK)
}

/// What is for people goes to stdout, unless that is for a program.
fn tell(context: &Context, line: &str) {
    if context.json {
        eprintln!("{line}");
    } else {
        println!("{line}");
    }
}

async fn only_say(
    args: &SetupArgs,
    context: &Context,
    mut missing: Vec<Missing>,
) -> Result<ExitStatus, CliError> {
    if let Some(one) = guest::missing(&context.data_dir).filter(|_| guest::is_wanted(args.engine)) {
        tell(context, &format!("missing: {} ({})", one.what, one.why));
        missing.push(one);
    }
    if !args.no_template && !base::is_there(context, args.engine).await? {
        let one = Missing {
            what: "the template base".to_owned(),
            why: "it is what `dormouse create` makes sandboxes of when nothing else is said".to_owned(),
            mend: "dormouse setup".to_owned(),
            package: None,
        };
        tell(context, &format!("missing: {} ({})", one.what, one.why));
        missing.push(one);
    }
    let complete = missing.is_empty();
    if context.json {
        let report = Report { missing, installed: Vec::new(), guest: None, template: None };
        crate::cli::show(context, &report, |_| String::new())?;
    } else if complete {
        println!("nothing is missing");
    }
    Ok(if complete { ExitStatus::OK } else { ExitStatus::MISSING })
}

fn missing_packages(engine: Option<EngineKind>) -> Vec<Missing> {
    let mut missing = Vec::new();
    if engine != Some(EngineKind::Microvm)
        && let Err(error) = find_runsc()
    {
        let reason = match &error {
            RunscError::Missing => "it isolates the sandboxes of the engine gvisor".to_owned(),
            other => format!("it isolates the sandboxes of the engine gvisor, and {other}"),
        };
        missing.push(Missing::package(apt::RUNSC, reason));
    }
    if guest::is_wanted(engine) && crate::doctor::find_program("mkfs.ext4").is_none() {
        let reason = "it makes the root disks of the engine microvm".to_owned();
        missing.push(Missing::package(apt::E2FSPROGS, reason));
    }
    if crate::doctor::find_program("mmdebstrap").is_none() {
        let reason = "it builds the default template's files from Debian packages".to_owned();
        missing.push(Missing::package(apt::MMDEBSTRAP, reason));
    }
    missing
}

impl Missing {
    fn package(package: apt::Package, why: String) -> Self {
        let mend = format!("apt-get install {}", package.wanted());
        Self { what: package.wanted(), why, mend, package: Some(package) }
    }
}

fn need_root() -> Result<(), CliError> {
    if rustix::process::geteuid().is_root() {
        return Ok(());
    }
    Err(CliError::failed(
        "cannot set up this machine: installing packages and running sandboxes need root, and this is not root; \
         run `sudo dormouse setup`",
    ))
}

fn need_space(data_dir: &Path) -> Result<(), CliError> {
    let free =
        free_bytes(data_dir).map_err(|source| CliError::file("look at the disk of", data_dir, source))?;
    // Half of what a comfortable machine has is enough for the template itself.
    let least = SPACE_WANTED_BYTES / 2;
    if free >= least {
        return Ok(());
    }
    Err(CliError::failed(format!(
        "cannot build the default template in {}: {} MiB are free there and {} MiB are needed; free some, or name \
         another disk with --data-dir",
        data_dir.display(),
        free >> 20,
        least >> 20
    )))
}
