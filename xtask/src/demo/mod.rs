//! `cargo xtask demo`: sets this machine up and runs the main job, checking every claim.
//!
//! A sandbox clones a repository, installs a package, serves HTTP, holds memory and counts. It is paused; the daemon
//! is killed with signal 9 and started again; the sandbox is resumed, forked four times and rolled back; its lineage
//! is printed. Each step says what it took and shows its receipt; the first thing that is not as claimed ends it.

mod report;
mod steps;

use std::path::PathBuf;

use anyhow::bail;

use crate::server::Server;
use crate::{run, tools};

#[derive(clap::Args)]
pub struct Args {
    /// Only say what is missing on this machine
    #[arg(long)]
    no_install: bool,
    /// The data folder (default: one below the target folder)
    #[arg(long)]
    data_dir: Option<PathBuf>,
}

pub fn run(args: &Args) -> anyhow::Result<()> {
    let binary = run::build_dormouse(false)?;
    let data_dir = tools::data_dir(args.data_dir.as_deref());
    if args.no_install {
        if !tools::setup(&binary, &data_dir, false)? {
            bail!("something is missing (named above); `cargo xtask demo` installs it");
        }
        return Ok(());
    }
    println!("== set-up");
    tools::setup(&binary, &data_dir, true)?;
    println!("== the main job");
    let server = Server::start(&binary, &data_dir)?;
    steps::Job::new(server).run()
}
