//! `cargo xtask lab`: a machine with hardware virtualisation, emulated, for hosts that have none.
//!
//! ```text
//! this host ── QEMU, its software CPU with AMD-V (DESIGN.md 6.2) ── Debian, kvm_amd ── microVMs
//! ```
//!
//! The command runs inside as root, with the workspace's built programs at the paths they have here. What it
//! writes is shown as it is written; its exit code becomes this command's. Nothing of a run stays.

mod image;
mod inside;
mod machine;
mod needs;

pub use image::link;

use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::bail;

use crate::microvm::{self, Chosen};

#[derive(clap::Args)]
pub struct Args {
    /// Only say what is missing on this machine
    #[arg(long)]
    no_install: bool,
    /// End the lab after this many seconds
    #[arg(long, default_value_t = 1800)]
    timeout: u64,
    /// Memory of the lab
    #[arg(long, default_value_t = 6144)]
    memory_mib: u32,
    /// A file or folder that is needed inside, at the path it has here; may be given several times
    #[arg(long = "with", value_name = "PATH")]
    with: Vec<PathBuf>,
    /// Copy what the command leaves in /out into this folder
    #[arg(long, value_name = "FOLDER")]
    out: Option<PathBuf>,
    /// A variable for the command; may be given several times
    #[arg(long = "env", value_name = "NAME=VALUE")]
    env: Vec<String>,
    /// Run the tests of the engine microvm: here where it can, in the lab where it cannot
    #[arg(long, conflicts_with_all = ["command", "with", "env"])]
    test: bool,
    #[command(flatten)]
    chosen: Chosen,
    /// Show what the lab's kernel says
    #[arg(long)]
    console: bool,
    /// Runs inside, in the workspace's root; none: the lab is only set up
    #[arg(last = true)]
    command: Vec<String>,
}

/// What of the machine a caller wants.
pub struct Job {
    pub command: Vec<String>,
    pub env: Vec<String>,
    pub with: Vec<PathBuf>,
    pub out: Option<PathBuf>,
    pub timeout: Duration,
    pub memory_mib: u32,
    pub console: bool,
}

/// Installs what is missing, makes the image unless it is there, and runs the job; its command's exit code.
pub fn run_job(job: &Job) -> anyhow::Result<u8> {
    needs::all(true)?;
    machine::run(&image::ensure()?, job)
}

/// Installs the programs that make file systems and disks.
pub fn host_needs() -> anyhow::Result<()> {
    needs::files(true).map(drop)
}

fn test(args: &Args) -> anyhow::Result<ExitCode> {
    let tested = microvm::test(&args.chosen)?;
    microvm::print(&tested);
    if let Some(out) = &args.out {
        std::fs::create_dir_all(out)?;
        std::fs::write(out.join("tests.json"), serde_json::to_string_pretty(&tested)?)?;
    }
    let counts = microvm::counts(&tested)?;
    println!("{} passed, {} failed, {} skipped", counts.passed, counts.failed, counts.skipped);
    Ok(if counts.failed == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

pub fn run(args: &Args) -> anyhow::Result<ExitCode> {
    if args.no_install {
        if !(needs::all(false)? && image::is_there()) {
            bail!("something is missing (named above); `cargo xtask lab` installs it");
        }
        println!("nothing is missing");
        return Ok(ExitCode::SUCCESS);
    }
    if args.test {
        return test(args);
    }
    needs::all(true)?;
    let image = image::ensure()?;
    if args.command.is_empty() {
        println!("the lab is set up; `cargo xtask lab -- COMMAND` runs a command in it");
        return Ok(ExitCode::SUCCESS);
    }
    let job = Job {
        command: args.command.clone(),
        env: args.env.clone(),
        with: args.with.clone(),
        out: args.out.clone(),
        timeout: Duration::from_secs(args.timeout),
        memory_mib: args.memory_mib,
        console: args.console,
    };
    let code = machine::run(&image, &job)?;
    Ok(ExitCode::from(code))
}
