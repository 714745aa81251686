//! An interactive terminal in a sandbox: raw mode here, a PTY there, sizes and keys passed on.
//!
//! Invariant: this terminal is put back as it was, however the command ends ([`Raw`]'s drop).

use std::io::IsTerminal;
use std::os::fd::{AsFd, BorrowedFd};

use dormouse_api::client::{Envd, ProcessEvents, ProcessOutput, StartSpec};
use rustix::termios::{OptionalActions, Termios, tcgetattr, tcgetwinsize, tcsetattr};
use tokio::io::AsyncReadExt;
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::mpsc;

use super::args::ShellArgs;
use super::context::Context;
use super::error::{CliError, ExitStatus};
use super::exec;

/// Keys that wait to be sent at most; typing faster than the network waits.
const KEYS_QUEUED: usize = 64;
const KEYS_BYTES: usize = 4 << 10;

/// Raw mode while it lives.
struct Raw<'a> {
    terminal: BorrowedFd<'a>,
    before: Termios,
}

impl<'a> Raw<'a> {
    fn enter(terminal: BorrowedFd<'a>) -> Result<Self, CliError> {
        let failed =
            |error: rustix::io::Errno| CliError::failed(format!("cannot set up this terminal: {error}"));
        let before = tcgetattr(terminal).map_err(failed)?;
        let mut raw = before.clone();
        raw.make_raw();
        tcsetattr(terminal, OptionalActions::Flush, &raw).map_err(failed)?;
        Ok(Self { terminal, before })
    }
}

impl Drop for Raw<'_> {
    fn drop(&mut self) {
        // Nothing can be done about a terminal that is gone.
        let _ = tcsetattr(self.terminal, OptionalActions::Drain, &self.before);
    }
}

pub async fn run(args: &ShellArgs, context: &Context) -> Result<ExitStatus, CliError> {
    let stdin = std::io::stdin();
    if !stdin.is_terminal() || !std::io::stdout().is_terminal() {
        return Err(CliError::usage(
            "cannot open a shell: this is no terminal; `dormouse exec` runs commands without one",
        ));
    }
    let envd = context.envd(&args.sandbox, args.how.user.as_deref()).await?;
    let mut spec = StartSpec {
        terminal: Some(size(stdin.as_fd())),
        stdin: true,
        ..exec::spec(&args.command, &args.how)
    };
    let term = std::env::var("TERM").unwrap_or_else(|_| "xterm-256color".to_owned());
    spec.env.entry("TERM".to_owned()).or_insert(term);
    spec.env.entry("LANG".to_owned()).or_insert_with(|| "C.UTF-8".to_owned());
    let mut events = envd.start(&spec).await?;
    let pid = exec::started(&mut events).await?;
    let status = {
        let _raw = Raw::enter(stdin.as_fd())?;
        talk(&envd, pid, &mut events).await
    };
    if let Ok(status) = &status {
        eprintln!("the shell ended with {}", status.0);
    }
    status
}

fn size(terminal: BorrowedFd<'_>) -> (u16, u16) {
    match tcgetwinsize(terminal) {
        Ok(size) if size.ws_col > 0 && size.ws_row > 0 => (size.ws_col, size.ws_row),
        _ => (80, 24),
    }
}

/// Keys and sizes there, output here, until one side ends.
async fn talk(envd: &Envd, pid: u32, events: &mut ProcessEvents) -> Result<ExitStatus, CliError> {
    let failed = |error: std::io::Error| CliError::failed(format!("cannot watch this terminal: {error}"));
    let mut resized = signal(SignalKind::window_change()).map_err(failed)?;
    let mut ended = signal(SignalKind::terminate()).map_err(failed)?;
    let mut hung_up = signal(SignalKind::hangup()).map_err(failed)?;
    let (keys, queue) = mpsc::channel(KEYS_QUEUED);
    let reader = tokio::spawn(read_keys(keys));
    let sender = tokio::spawn(send_keys(envd.clone(), pid, queue));
    let status = loop {
        tokio::select! {
            output = exec::next(events) => match output {
                Ok(Some(ProcessOutput::Ended { exit_code, exited, status })) => {
                    break Ok(exec::exit(exit_code, exited, &status));
                }
                Ok(Some(ProcessOutput::Stdout(bytes) | ProcessOutput::Stderr(bytes) | ProcessOutput::Terminal(bytes))) => {
                    if let Err(error) = super::output::bytes_out(&bytes) {
                        break Err(error);
                    }
                }
                Ok(Some(ProcessOutput::Started { .. })) => {}
                Ok(None) => break Err(CliError::failed("the shell's stream ended; the sandbox may have been killed")),
                Err(error) => break Err(error),
            },
            _ = resized.recv() => {
                let (cols, rows) = size(std::io::stdin().as_fd());
                // A resize that fails is repeated by the next one.
                let _ = envd.resize(pid, cols, rows).await;
            }
            _ = ended.recv() => break Err(CliError::failed("this terminal was told to end; the shell inside goes on")),
            _ = hung_up.recv() => break Err(CliError::failed("this terminal hung up; the shell inside goes on")),
        }
    };
    reader.abort();
    sender.abort();
    status
}

async fn read_keys(keys: mpsc::Sender<Vec<u8>>) {
    let mut stdin = tokio::io::stdin();
    let mut buffer = vec![0; KEYS_BYTES];
    while let Ok(count) = stdin.read(&mut buffer).await {
        if count == 0 || keys.send(buffer[..count].to_vec()).await.is_err() {
            return;
        }
    }
}

/// One message at a time, so that keys stay in order; what was typed meanwhile goes along.
async fn send_keys(envd: Envd, pid: u32, mut queue: mpsc::Receiver<Vec<u8>>) {
    while let Some(mut keys) = queue.recv().await {
        while let Ok(more) = queue.try_recv() {
            keys.extend_from_slice(&more);
        }
        if envd.send_terminal(pid, &keys).await.is_err() {
            return;
        }
    }
}
