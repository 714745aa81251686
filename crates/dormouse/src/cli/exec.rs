//! One command in a sandbox: its stdin, stdout, stderr and exit code are ours.

use std::io::{IsTerminal, Write};
use std::time::{Duration, Instant};

use dormouse_api::client::{ClientError, Envd, ProcessEvents, ProcessOutput, StartSpec};
use serde_json::json;
use tokio::io::AsyncReadExt;

use super::args::{ExecArgs, ProcessArgs};
use super::context::Context;
use super::error::{CliError, ExitStatus};
use super::output::show;

/// Bytes of stdin in one message.
const INPUT_BYTES: usize = 128 << 10;
/// How long a daemon may be away (replaced, crashed and started again) before a command gives up.
const REATTACH_PATIENCE: Duration = Duration::from_secs(60);
const REATTACH_EVERY: Duration = Duration::from_millis(200);

pub async fn run(args: &ExecArgs, context: &Context) -> Result<ExitStatus, CliError> {
    let result = inside(args, context).await;
    result.map_err(|error| match error {
        // What ran inside has the low codes: a failure of ours must not look like one of its.
        CliError::Said { message, status: ExitStatus::FAILED } => {
            CliError::Said { message, status: ExitStatus::EXEC_FAILED }
        }
        CliError::Client(error) => {
            let status = if deadline(&error) { ExitStatus::DEADLINE } else { ExitStatus::EXEC_FAILED };
            CliError::Said { message: CliError::Client(error).chain(), status }
        }
        other => other,
    })
}

fn deadline(error: &ClientError) -> bool {
    matches!(error, ClientError::Refused { error_code: Some(code), .. } if code == "deadline_exceeded")
}

/// The command as envd starts it.
pub fn spec(command: &[String], how: &ProcessArgs) -> StartSpec {
    let (program, args) = command.split_first().map_or_else(
        || ("/bin/bash".to_owned(), vec!["-i".to_owned(), "-l".to_owned()]),
        |(program, args)| (program.clone(), args.to_vec()),
    );
    StartSpec {
        command: program,
        args,
        env: how.env.iter().cloned().collect(),
        cwd: how.cwd.clone(),
        ..StartSpec::default()
    }
}

async fn inside(args: &ExecArgs, context: &Context) -> Result<ExitStatus, CliError> {
    let envd = context.envd(&args.sandbox, args.how.user.as_deref()).await?;
    let stdin = !args.detach && !args.no_stdin && !std::io::stdin().is_terminal();
    let deadline_ms = args.timeout.map(|seconds| seconds.saturating_mul(1000));
    let spec = StartSpec { stdin, deadline_ms, ..spec(&args.command, &args.how) };
    let mut events = envd.start(&spec).await?;
    let pid = started(&mut events).await?;
    if args.detach {
        return show(context, &json!({"pid": pid, "sandboxID": envd.sandbox()}), |_| pid.to_string());
    }
    let input = stdin.then(|| tokio::spawn(feed(envd.clone(), pid)));
    let status = follow(&mut events).await;
    if let Some(input) = input {
        input.abort();
    }
    status
}

/// Waits for the first event, which names the process.
pub async fn started(events: &mut ProcessEvents) -> Result<u32, CliError> {
    match events.next().await? {
        Some(ProcessOutput::Started { pid }) => Ok(pid),
        _ => Err(CliError::failed("the sandbox did not say which process it started")),
    }
}

/// Passes stdin on until its end. A process that reads no more ends it too.
async fn feed(envd: Envd, pid: u32) {
    let mut stdin = tokio::io::stdin();
    let mut buffer = vec![0; INPUT_BYTES];
    loop {
        match stdin.read(&mut buffer).await {
            Ok(0) | Err(_) => break,
            Ok(count) => {
                if send(&envd, pid, &buffer[..count]).await.is_err() {
                    return;
                }
            }
        }
    }
    // It may have ended already: then there is nothing to close.
    let _ = envd.close_stdin(pid).await;
}

/// Sent again only where nothing was sent: no daemon answered.
async fn send(envd: &Envd, pid: u32, bytes: &[u8]) -> Result<(), ClientError> {
    let began = Instant::now();
    loop {
        match envd.send_stdin(pid, bytes).await {
            Err(ClientError::Unreachable { .. }) if began.elapsed() < REATTACH_PATIENCE => {
                tokio::time::sleep(REATTACH_EVERY).await;
            }
            done => return done,
        }
    }
}

/// What the process did next. A stream that broke is taken up again once a daemon answers, without a gap.
pub async fn next(events: &mut ProcessEvents) -> Result<Option<ProcessOutput>, CliError> {
    loop {
        match events.next().await {
            Ok(output) => return Ok(output),
            Err(ClientError::Broken { what, why }) => {
                let lost = reattach(events).await.map_err(|error| {
                    let status = error.status();
                    CliError::Said {
                        message: format!("{what}: the stream broke ({why}); {}", error.chain()),
                        status,
                    }
                })?;
                if lost > 0 {
                    eprintln!("dormouse: the stream broke, and {lost} bytes of output were no longer kept");
                }
            }
            Err(error) => return Err(error.into()),
        }
    }
}

async fn reattach(events: &mut ProcessEvents) -> Result<u64, CliError> {
    let began = Instant::now();
    loop {
        match events.reattach().await {
            Ok(lost) => return Ok(lost),
            Err(error) if began.elapsed() < REATTACH_PATIENCE && transient(&error) => {
                tokio::time::sleep(REATTACH_EVERY).await;
            }
            Err(error) => return Err(error.into()),
        }
    }
}

/// No daemon, or one that is just starting.
fn transient(error: &ClientError) -> bool {
    matches!(error, ClientError::Unreachable { .. } | ClientError::Refused { status: 503, .. })
}

/// Copies output until the end and gives the exit code.
async fn follow(events: &mut ProcessEvents) -> Result<ExitStatus, CliError> {
    let failed = |error: std::io::Error| CliError::failed(format!("cannot write the output: {error}"));
    while let Some(output) = next(events).await? {
        match output {
            ProcessOutput::Started { .. } => {}
            ProcessOutput::Stdout(bytes) | ProcessOutput::Terminal(bytes) => {
                super::output::bytes_out(&bytes)?;
            }
            ProcessOutput::Stderr(bytes) => {
                let mut stderr = std::io::stderr().lock();
                stderr.write_all(&bytes).and_then(|()| stderr.flush()).map_err(failed)?;
            }
            ProcessOutput::Ended { exit_code, exited, status } => {
                return Ok(exit(exit_code, exited, &status));
            }
        }
    }
    Err(CliError::failed(
        "the command's stream ended without its exit code; the sandbox may have been killed",
    ))
}

/// The shell's convention: 128 + signal for a process that a signal ended.
pub fn exit(code: i32, exited: bool, status: &str) -> ExitStatus {
    if exited || code >= 0 {
        return ExitStatus(u8::try_from(code & 0xff).unwrap_or(u8::MAX));
    }
    let signal = match status.strip_prefix("signal: ").unwrap_or_default() {
        "hangup" => 1,
        "interrupt" => 2,
        "quit" => 3,
        "illegal instruction" => 4,
        "aborted" => 6,
        "bus error" => 7,
        "floating point exception" => 8,
        "segmentation fault" => 11,
        "broken pipe" => 13,
        "terminated" => 15,
        _ => 9,
    };
    ExitStatus(128 + signal)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exit_codes_follow_the_shell() {
        assert_eq!(exit(0, true, ""), ExitStatus(0));
        assert_eq!(exit(7, true, "exit status 7"), ExitStatus(7));
        assert_eq!(exit(-1, false, "signal: killed"), ExitStatus(137));
        assert_eq!(exit(-1, false, "signal: terminated"), ExitStatus(143));
    }
}
