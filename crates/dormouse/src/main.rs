//! The one executable: command line, daemon (`serve`), and the hidden `keeper` and `monitor` that outlive the daemon.
//!
//! Invariant: holds nothing that a sandbox needs.

mod agent_binary;
mod cli;
mod doctor;
mod serve;
mod setup;

use std::process::ExitCode;

use clap::Parser;

use cli::{Cli, CliError, Command, Context, ExitStatus, KeeperArgs, MonitorArgs, ServeArgs};

fn main() -> ExitCode {
    let cli = Cli::parse();
    let context = Context::resolve(&cli);
    let result = match cli.command {
        Command::Serve(args) => run_daemon(args, &context),
        Command::Keeper(args) => run_keeper(args),
        Command::Monitor(args) => run_monitor(&args),
        command => run_command(command, &context),
    };
    match result {
        Ok(status) => ExitCode::from(status.0),
        Err(error) => {
            // A reader that has gone wanted no more words either.
            if error.status() != ExitStatus::BROKEN_PIPE {
                eprintln!("error: {}", error.chain());
            }
            ExitCode::from(error.status().0)
        }
    }
}

fn run_command(command: Command, context: &Context) -> Result<ExitStatus, CliError> {
    let runtime = runtime(tokio::runtime::Builder::new_multi_thread().worker_threads(2))?;
    let result = runtime.block_on(cli::run(command, context));
    // A read of stdin that waits for a key would hold the process: it is abandoned.
    runtime.shutdown_background();
    result
}

fn run_daemon(args: ServeArgs, context: &Context) -> Result<ExitStatus, CliError> {
    tracing_subscriber::fmt()
        .with_env_filter(
            tracing_subscriber::EnvFilter::try_from_env("DORMOUSE_LOG")
                .unwrap_or_else(|_| tracing_subscriber::EnvFilter::new("info")),
        )
        .with_writer(std::io::stderr)
        .with_ansi(std::io::IsTerminal::is_terminal(&std::io::stderr()))
        .init();
    let runtime = runtime(&mut tokio::runtime::Builder::new_multi_thread())?;
    let config = args.config(&context.data_dir);
    runtime.block_on(serve::serve(config)).map_err(|error| CliError::failed(chain(&error)))?;
    Ok(ExitStatus::OK)
}

/// The keeper is small: one thread.
fn run_keeper(args: KeeperArgs) -> Result<ExitStatus, CliError> {
    let KeeperArgs { dir, sandbox } = args;
    dormouse_keeper::run(dormouse_keeper::KeeperArgs { dir, sandbox })
        .map_err(|error| CliError::failed(chain(&error)))?;
    Ok(ExitStatus::OK)
}

/// No tokio: threads, and a process that forks.
fn run_monitor(args: &MonitorArgs) -> Result<ExitStatus, CliError> {
    tracing_subscriber::fmt().with_writer(std::io::stderr).with_ansi(false).init();
    let user = args.uid.zip(args.gid).map(|(uid, gid)| dormouse_vmm::jail::User { uid, gid });
    dormouse_vmm::monitor::run(&args.dir, &args.within, user)
        .map_err(|error| CliError::failed(chain(&error)))?;
    Ok(ExitStatus::OK)
}

fn runtime(builder: &mut tokio::runtime::Builder) -> Result<tokio::runtime::Runtime, CliError> {
    builder
        .enable_all()
        .build()
        .map_err(|error| CliError::failed(format!("cannot start the runtime's threads: {error}")))
}

/// An error and its causes, each once.
fn chain(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(cause) = source {
        let words = cause.to_string();
        if !text.contains(&words) {
            text.push_str(": ");
            text.push_str(&words);
        }
        source = cause.source();
    }
    text
}
