//! `cargo xtask`: the one entry for people and CI.
//!
//! Invariant: CI calls nothing that a person would not call. A command that needs something of the machine names it
//! and why before it installs it; with `--no-install` it only says what is missing.

mod bench;
mod demo;
mod floors;
mod lab;
mod microvm;
mod run;
mod scenarios;
mod sdk;
mod server;
mod test;
mod tidy;
mod tools;

use std::process::ExitCode;

use clap::{Parser, Subcommand};

#[derive(Parser)]
#[command(name = "cargo xtask", about = "Sets up, tests, measures and shows Dormouse", version)]
struct Args {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Set up this machine and run the main job: sleep, wake, fork, roll back, with everything verified
    Demo(demo::Args),
    /// Everything that must hold: formatting, lints, floors, unit, integration, SDK and scenario tests
    Test(test::Args),
    /// Figures, side by side with raw runsc in one run
    Bench(bench::Args),
    /// The correctness scenarios against a live daemon
    Scenarios(scenarios::Args),
    /// The E2B SDK's tests against a live daemon
    Sdk(sdk::Args),
    /// Run a command in an emulated machine with hardware virtualisation
    Lab(lab::Args),
    /// What `lab --test` runs where microVMs can run
    #[command(hide = true)]
    Suite(microvm::SuiteArgs),
    /// Check that crates only use crates of lower floors, and that ARCHITECTURE.md knows each
    Floors,
    /// Formatting, clippy with warnings denied, floors, tidiness
    Lint,
}

fn main() -> ExitCode {
    let done = match Args::parse().command {
        Command::Demo(args) => demo::run(&args),
        Command::Test(args) => test::run(&args),
        Command::Bench(args) => bench::run(&args),
        Command::Scenarios(args) => scenarios::run(&args),
        Command::Sdk(args) => sdk::run(&args),
        Command::Lab(args) => return end(lab::run(&args)),
        Command::Suite(args) => microvm::suite(&args),
        Command::Floors => floors::run(),
        Command::Lint => test::lint(),
    };
    end(done.map(|()| ExitCode::SUCCESS))
}

fn end(done: anyhow::Result<ExitCode>) -> ExitCode {
    match done {
        Ok(code) => code,
        Err(error) if error.is::<run::Told>() => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}
