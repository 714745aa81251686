//! The agent: the ancestor of every process in a sandbox. It serves envd (E2B's protocol) to clients
//! and a control service to the host.
//!
//! ```text
//! agent init [--machine]                       process 1; the carrier on standard input and output
//! agent vm-init                                process 1 of a virtual machine, also called as /init: becomes the one above
//! agent serve [--listen ADDRESS] [--control ADDRESS] [--root FOLDER]     without a sandbox, on TCP
//! agent awake COMMAND…                         also called as dormouse-awake
//! agent sudo …                                 also called as sudo
//! ```

mod auth;
mod awake;
mod carrier;
mod clock;
mod context;
mod control;
mod egress;
mod files;
mod filesystem;
mod http;
mod limits;
mod metrics;
mod process;
mod procfs;
mod rpc;
mod serve;
mod sudo;
mod users;
mod vm_init;

use std::ffi::OsString;
use std::path::PathBuf;
use std::process::ExitCode;

use serve::{Host, Serve, init, serve};

/// Threads for calls that block (files, `/proc`): few, as each holds memory in every sandbox.
const BLOCKING_THREADS_MAX: usize = 8;

const USAGE: &str = "usage: agent init [--machine] | agent vm-init | agent serve [--listen ADDRESS] [--control ADDRESS] [--root FOLDER] | agent awake COMMAND… | agent sudo …";

enum Mode {
    Init(Host),
    VmInit,
    Serve(Serve),
    Awake(Vec<OsString>),
    Sudo(Vec<OsString>),
}

fn main() -> ExitCode {
    let mode = match parse(std::env::args_os().collect()) {
        Ok(mode) => mode,
        Err(why) => {
            eprintln!("agent: {why}\n{USAGE}");
            return ExitCode::from(2);
        }
    };
    if matches!(mode, Mode::VmInit) {
        return vm_init::run();
    }
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .max_blocking_threads(BLOCKING_THREADS_MAX)
        .build();
    let runtime = match runtime {
        Ok(runtime) => runtime,
        Err(why) => {
            eprintln!("agent: the event loop cannot be made: {why}");
            return ExitCode::FAILURE;
        }
    };
    let code = runtime.block_on(run(mode));
    // What still blocks (a read of a dead mount) must not keep the end waiting.
    runtime.shutdown_background();
    code
}

async fn run(mode: Mode) -> ExitCode {
    let done = match mode {
        Mode::Awake(command) => return awake::run(command).await,
        Mode::Sudo(arguments) => return sudo::client::run(&arguments).await,
        Mode::Init(host) => init(host).await,
        Mode::VmInit => return vm_init::run(),
        Mode::Serve(options) => serve(options).await,
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(why) => {
            eprintln!("agent: {why}");
            ExitCode::FAILURE
        }
    }
}

fn parse(args: Vec<OsString>) -> Result<Mode, String> {
    let mut args = args.into_iter();
    let name = PathBuf::from(args.next().unwrap_or_default());
    match name.file_name().and_then(|name| name.to_str()) {
        Some("dormouse-awake") => return Ok(Mode::Awake(args.collect())),
        Some(sudo::NAME) => return Ok(Mode::Sudo(args.collect())),
        // The kernel starts an initramfs so, with words of its own command line behind.
        Some("init") if std::process::id() == 1 => return Ok(Mode::VmInit),
        _ => {}
    }
    match args.next().as_deref().and_then(|mode| mode.to_str()) {
        Some("init") => match args.next() {
            None => Ok(Mode::Init(Host::Sandbox)),
            Some(option) if option == "--machine" => Ok(Mode::Init(Host::Machine)),
            Some(option) => Err(format!("there is no option {}", option.display())),
        },
        Some("vm-init") => Ok(Mode::VmInit),
        Some("awake") => Ok(Mode::Awake(args.collect())),
        Some(sudo::NAME) => Ok(Mode::Sudo(args.collect())),
        Some("serve") => parse_serve(args).map(Mode::Serve),
        Some(other) => Err(format!("there is no mode {other:?}")),
        None => Err("no mode is given".to_owned()),
    }
}

fn parse_serve(mut args: impl Iterator<Item = OsString>) -> Result<Serve, String> {
    let mut options = Serve::default();
    while let Some(option) = args.next() {
        let option = option.to_string_lossy().into_owned();
        let value = args.next().ok_or_else(|| format!("{option} needs a value"))?;
        let address = || value.to_string_lossy().parse().map_err(|why| format!("{option} {value:?}: {why}"));
        match option.as_str() {
            "--listen" => options.listen = address()?,
            "--control" => options.control = address()?,
            "--root" => options.root = Some(PathBuf::from(&value)),
            _ => return Err(format!("there is no option {option}")),
        }
    }
    Ok(options)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parsed(args: &[&str]) -> Result<Mode, String> {
        parse(args.iter().map(OsString::from).collect())
    }

    #[test]
    fn modes_are_told_apart() {
        assert!(matches!(parsed(&["agent", "init"]), Ok(Mode::Init(Host::Sandbox))));
        assert!(matches!(parsed(&["agent", "init", "--machine"]), Ok(Mode::Init(Host::Machine))));
        assert!(matches!(parsed(&["agent", "vm-init"]), Ok(Mode::VmInit)));
        assert!(matches!(parsed(&["/usr/bin/dormouse-awake", "init"]), Ok(Mode::Awake(c)) if c == ["init"]));
        assert!(matches!(parsed(&["agent", "awake", "make", "-j"]), Ok(Mode::Awake(c)) if c.len() == 2));
        assert!(matches!(parsed(&["sudo", "-n", "id"]), Ok(Mode::Sudo(c)) if c.len() == 2));
        let Ok(Mode::Serve(options)) = parsed(&["agent", "serve", "--listen", "127.0.0.1:7"]) else {
            panic!("serve was not understood");
        };
        assert_eq!(options.listen.port(), 7);
        for bad in [
            &["agent"][..],
            &["agent", "x"],
            &["agent", "init", "--else"],
            &["agent", "serve", "--listen", "x"],
            &["agent", "serve", "-x", "1"],
        ] {
            assert!(parsed(bad).is_err(), "{bad:?}");
        }
    }
}
