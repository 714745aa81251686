//! Awake locks: `dormouse-awake COMMAND…` keeps the sandbox awake while the command runs.
//!
//! The command line connects to a Unix socket of the agent, writes its command as one line and reads
//! `OK`; the lock is held until the connection closes, so it is released however the holder ends.

use std::ffi::OsString;
use std::io;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use tokio::io::{AsyncBufReadExt as _, AsyncReadExt as _, AsyncWriteExt as _, BufReader};
use tokio::net::{UnixListener, UnixStream};
use tokio::signal::unix::{Signal, SignalKind, signal};

use crate::context::Ctx;

/// The folder of the agent's own sockets in a sandbox.
pub const RUN_DIR: &str = "/run/dormouse";
const SOCKET: &str = "awake.sock";
/// Where the socket is when it is not in [`RUN_DIR`].
const SOCKET_VARIABLE: &str = "DORMOUSE_AWAKE_SOCKET";
const COMMAND_BYTES_MAX: usize = 1024;
/// Exit code where the lock cannot be had, or the command not started (as env(1) has it).
const FAILED: u8 = 125;
const NOT_STARTED: u8 = 127;

/// Accepts locks until the runtime ends.
pub fn listen(ctx: Ctx, run_dir: &Path) -> io::Result<()> {
    use std::os::unix::fs::PermissionsExt as _;
    std::fs::create_dir_all(run_dir)?;
    let path = run_dir.join(SOCKET);
    match std::fs::remove_file(&path) {
        Err(why) if why.kind() != io::ErrorKind::NotFound => return Err(why),
        _ => {}
    }
    let listener = UnixListener::bind(&path)?;
    // Every user's jobs may hold the sandbox awake.
    std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o666))?;
    tokio::spawn(async move {
        loop {
            match listener.accept().await {
                Ok((stream, _)) => drop(tokio::spawn(hold(ctx.clone(), stream))),
                Err(error) => {
                    tracing::warn!(%error, "an awake lock cannot be accepted");
                    // Out of descriptors, most likely: let some be closed.
                    tokio::time::sleep(std::time::Duration::from_millis(200)).await;
                }
            }
        }
    });
    Ok(())
}

async fn hold(ctx: Ctx, stream: UnixStream) {
    let mut stream = BufReader::new(stream);
    let mut line = Vec::new();
    let mut limited = (&mut stream).take(COMMAND_BYTES_MAX as u64);
    if limited.read_until(b'\n', &mut line).await.is_err() {
        return;
    }
    let command = String::from_utf8_lossy(&line);
    let Some(_lock) = ctx.lock_awake(command.trim().to_owned()) else {
        let _ = stream.write_all(b"ERR too many awake locks are held\n").await;
        return;
    };
    if stream.write_all(b"OK\n").await.is_err() {
        return;
    }
    let mut rest = [0_u8; 256];
    while stream.read(&mut rest).await.is_ok_and(|count| count > 0) {}
}

/// `dormouse-awake COMMAND…`: runs the command under a lock; its exit code is the command's.
pub async fn run(command: Vec<OsString>) -> ExitCode {
    let Some((program, args)) = command.split_first() else {
        eprintln!("usage: dormouse-awake COMMAND [ARGUMENT]…\nKeeps the sandbox awake while COMMAND runs.");
        return ExitCode::from(FAILED);
    };
    let shown: Vec<_> = command.iter().map(|word| word.to_string_lossy()).collect();
    let path =
        std::env::var_os(SOCKET_VARIABLE).map_or_else(|| Path::new(RUN_DIR).join(SOCKET), PathBuf::from);
    let _lock = match acquire(&path, &shown.join(" ")).await {
        Ok(stream) => stream,
        Err(why) => {
            eprintln!("dormouse-awake: no lock from the agent at {}: {why}", path.display());
            return ExitCode::from(FAILED);
        }
    };
    match tokio::process::Command::new(program).args(args).spawn() {
        Ok(child) => wait(child).await,
        Err(why) => {
            eprintln!("dormouse-awake: cannot start {}: {why}", program.to_string_lossy());
            ExitCode::from(NOT_STARTED)
        }
    }
}

async fn acquire(path: &Path, command: &str) -> io::Result<BufReader<UnixStream>> {
    let mut stream = BufReader::new(UnixStream::connect(path).await?);
    let line: String = command.chars().map(|c| if c.is_control() { ' ' } else { c }).take(200).collect();
    stream.write_all(format!("{line}\n").as_bytes()).await?;
    let mut answer = String::new();
    (&mut stream).take(COMMAND_BYTES_MAX as u64).read_line(&mut answer).await?;
    match answer.trim().strip_prefix("ERR ") {
        None if answer.trim() == "OK" => Ok(stream),
        why => Err(io::Error::other(why.unwrap_or("it did not answer").to_owned())),
    }
}

/// Hands signals on, so that the command ends when its holder is asked to.
async fn wait(mut child: tokio::process::Child) -> ExitCode {
    use std::os::unix::process::ExitStatusExt as _;
    let pid = child.id().and_then(|pid| i32::try_from(pid).ok()).and_then(rustix::process::Pid::from_raw);
    let (mut terminate, mut hang_up) =
        (signal(SignalKind::terminate()).ok(), signal(SignalKind::hangup()).ok());
    // The terminal sends these to the command as well: the holder only has to stay.
    let _kept = signal(SignalKind::interrupt());
    loop {
        let signal = tokio::select! {
            status = child.wait() => return match status {
                Ok(status) => {
                    let code = status.code().unwrap_or_else(|| 128 + status.signal().unwrap_or(0));
                    ExitCode::from(u8::try_from(code).unwrap_or(FAILED))
                }
                Err(why) => {
                    eprintln!("dormouse-awake: cannot wait for the command: {why}");
                    ExitCode::from(FAILED)
                }
            },
            () = received(&mut terminate) => rustix::process::Signal::TERM,
            () = received(&mut hang_up) => rustix::process::Signal::HUP,
        };
        if let Some(pid) = pid {
            let _ = rustix::process::kill_process(pid, signal);
        }
    }
}

async fn received(signal: &mut Option<Signal>) {
    let came = match signal {
        Some(signal) => signal.recv().await.is_some(),
        None => false,
    };
    if !came {
        std::future::pending::<()>().await;
    }
}
