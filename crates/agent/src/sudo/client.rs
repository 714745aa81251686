//! The caller's side: stands in for `sudo` on the path.

use std::ffi::OsString;
use std::os::fd::AsFd;
use std::os::unix::process::CommandExt as _;
use std::path::Path;
use std::process::{Command, ExitCode};

use dormouse_wire::local;
use tokio::net::UnixStream;
use tokio::signal::unix::{Signal, SignalKind, signal};

use super::args::{self, Args};
use super::{Call, Forward, Reply, SOCKET, SOCKET_DIR};

/// What `sudo` itself answers when it cannot run the command.
const FAILED: u8 = 1;
/// Passed on to the command; SIGKILL and SIGSTOP cannot be.
const FORWARDED: [SignalKind; 8] = [
    SignalKind::interrupt(),
    SignalKind::terminate(),
    SignalKind::hangup(),
    SignalKind::quit(),
    SignalKind::user_defined1(),
    SignalKind::user_defined2(),
    SignalKind::window_change(),
    SignalKind::alarm(),
];

/// Runs the command line of `sudo`; the exit code is the command's.
pub async fn run(given: &[OsString]) -> ExitCode {
    if super::real_works() {
        let error = Command::new(super::REAL).args(given).exec();
        eprintln!("sudo: cannot execute {}: {error}", super::REAL);
        return ExitCode::from(FAILED);
    }
    let words: Option<Vec<String>> = given.iter().map(|word| word.to_str().map(str::to_owned)).collect();
    let called = match words {
        Some(words) => call(&words).await,
        None => Err("an argument is not UTF-8".to_owned()),
    };
    match called {
        Ok(code) => ExitCode::from(code),
        Err(message) => {
            eprintln!("sudo: {message}");
            ExitCode::from(FAILED)
        }
    }
}

async fn call(given: &[String]) -> Result<u8, String> {
    let args = args::parse(given)?;
    if args.command.is_empty() && !args.login && !args.shell && !args.only_check {
        return Err("usage: sudo [-u USER] [-E] [-i | -s] [NAME=VALUE …] COMMAND [ARGUMENT …]".to_owned());
    }
    let socket = local::connect(Path::new(SOCKET_DIR), SOCKET)
        .await
        .map_err(|error| format!("cannot reach the sandbox's agent at {SOCKET_DIR}/{SOCKET}: {error}"))?;
    // Signals are caught before the command exists, so that none is lost.
    let signals =
        FORWARDED.into_iter().map(|kind| Ok((kind, signal(kind)?))).collect::<std::io::Result<Vec<_>>>();
    let signals = signals.map_err(|error| format!("cannot catch signals: {error}"))?;
    let call = request(args)?;
    let (stdin, stdout, stderr) = (std::io::stdin(), std::io::stdout(), std::io::stderr());
    local::send_frame(&socket, &call, &[stdin.as_fd(), stdout.as_fd(), stderr.as_fd()])
        .await
        .map_err(|error| format!("cannot ask the sandbox's agent: {error}"))?;
    match answer(&socket, signals).await? {
        Reply::Ended { code } => Ok(u8::try_from(code & 0xff).unwrap_or(FAILED)),
        Reply::Killed { signal } => Ok(u8::try_from(128 + signal).unwrap_or(FAILED)),
        Reply::Refused { message } => Err(message),
    }
}

fn request(args: Args) -> Result<Call, String> {
    let cwd = match args.folder {
        Some(folder) => folder,
        None => std::env::current_dir()
            .map_or_else(|_| "/".to_owned(), |path| path.to_string_lossy().into_owned()),
    };
    let mut env: std::collections::BTreeMap<String, String> = std::env::vars_os()
        .filter_map(|(name, value)| Some((name.into_string().ok()?, value.into_string().ok()?)))
        .collect();
    let keep_env = args.keep_env;
    if !keep_env {
        env.retain(|name, _| kept(name));
    }
    env.extend(args.set);
    let command = if args.only_check { vec!["true".to_owned()] } else { args.command };
    Ok(Call {
        user: args.user.unwrap_or_else(|| "root".to_owned()),
        command,
        login: args.login,
        cwd,
        env,
        keep_env,
    })
}

/// What goes along without `-E`: the terminal, the language, the way out of the sandbox and its trust.
fn kept(name: &str) -> bool {
    let lower = name.to_ascii_lowercase();
    ["TERM", "LANG", "COLORTERM", "DISPLAY", "TZ"].contains(&name)
        || name.starts_with("LC_")
        || lower.ends_with("_proxy")
        || [
            "SSL_CERT_FILE",
            "REQUESTS_CA_BUNDLE",
            "NODE_EXTRA_CA_CERTS",
            "CURL_CA_BUNDLE",
            "GIT_SSL_CAINFO",
            "PIP_CERT",
        ]
        .contains(&name)
}

async fn answer(socket: &UnixStream, signals: Vec<(SignalKind, Signal)>) -> Result<Reply, String> {
    let mut forwards: Vec<_> = signals
        .into_iter()
        .map(|(kind, mut caught)| {
            Box::pin(async move {
                loop {
                    if caught.recv().await.is_none() {
                        std::future::pending::<()>().await;
                    }
                    let forward = Forward { signal: kind.as_raw_value() };
                    // The command is ending if it cannot be told.
                    if local::send_frame(socket, &forward, &[]).await.is_err() {
                        std::future::pending::<()>().await;
                    }
                }
            })
        })
        .collect();
    let forwarding = futures_util::future::select_all(forwards.iter_mut());
    tokio::select! {
        reply = local::recv_frame::<Reply>(socket) => match reply {
            Ok(Some((reply, _))) => Ok(reply),
            Ok(None) => Err("the sandbox's agent closed the connection".to_owned()),
            Err(error) => Err(format!("the sandbox's agent sent no answer: {error}")),
        },
        ((), ..) = forwarding => Err("signals cannot be passed on".to_owned()),
    }
}
