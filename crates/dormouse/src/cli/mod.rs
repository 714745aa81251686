//! The command line: what is asked, of which daemon, and how the answer is shown.
//!
//! Flags are parsed first ([`Cli`]), then resolved into one [`context::Context`] (address, key, data folder, form of
//! the output); commands see only that. Every command but `serve`, `setup` and `doctor` talks HTTP to the daemon.
//!
//! Invariant: with `--json`, stdout holds JSON and nothing else; what is for people goes to stderr.

mod answer;
mod args;
mod context;
mod copy;
mod env;
mod error;
mod exec;
mod key;
mod lineage;
mod logs;
mod output;
mod sandbox;
mod shell;
mod snapshot;
mod template;
mod watch;

pub use args::{Cli, Command, EngineChoice, KeeperArgs, MonitorArgs, ServeArgs};
pub use context::Context;
pub use error::{CliError, ExitStatus};
pub use output::{show, spinner};
pub use template::build as build_template;

use crate::{doctor, setup};

/// Runs one command that talks to a daemon (or to the data folder).
pub async fn run(command: Command, context: &Context) -> Result<ExitStatus, CliError> {
    match command {
        Command::Create(args) => sandbox::create(&args, context).await,
        Command::Ls(args) => sandbox::list(&args, context).await,
        Command::Info { sandbox } => sandbox::info(&sandbox, context).await,
        Command::Exec(args) => exec::run(&args, context).await,
        Command::Shell(args) => shell::run(&args, context).await,
        Command::Cp(args) => copy::run(&args, context).await,
        Command::Logs(args) => logs::run(&args, context).await,
        Command::Kill { sandboxes } => sandbox::kill(&sandboxes, context).await,
        Command::Pause(args) => sandbox::pause(&args, context).await,
        Command::Resume { sandbox, timeout } => sandbox::resume(&sandbox, timeout, context).await,
        Command::Checkpoint(args) => sandbox::checkpoint(&args, context).await,
        Command::Fork(args) => sandbox::fork(&args, context).await,
        Command::Rollback { sandbox, snapshot } => sandbox::rollback(&sandbox, &snapshot, context).await,
        Command::Timeout { sandbox, seconds } => sandbox::timeout(&sandbox, seconds, context).await,
        Command::Idle(args) => sandbox::idle(&args, context).await,
        Command::Snapshot(command) => snapshot::run(command, context).await,
        Command::Template(command) => template::run(command, context).await,
        Command::Key(command) => key::run(command, context).await,
        Command::Env { shell } => env::run(shell, context),
        Command::Log { sandbox } => lineage::run(sandbox.as_deref(), context).await,
        Command::Port { sandbox, port } => env::port(&sandbox, port, context).await,
        Command::Url { sandbox, port } => env::url(&sandbox, port, context).await,
        Command::Events(args) => watch::events(&args, context).await,
        Command::Top { once } => watch::top(once, context).await,
        Command::Gc => watch::gc(context).await,
        Command::Doctor => doctor::run(context),
        Command::Setup(args) => setup::run(&args, context).await,
        Command::Openapi => output::raw(&dormouse_api::openapi::text()),
        Command::Serve(_) | Command::Keeper(_) | Command::Monitor(_) => {
            Err(CliError::usage("this command is run by main itself"))
        }
    }
}
