//! A keeper as an executable of its own: for the tests, and to run one by hand. `dormouse keeper` is
//! what the daemon starts.

use std::process::ExitCode;

use dormouse_keeper::{KeeperArgs, run};

fn main() -> ExitCode {
    let mut args = std::env::args().skip(1);
    let (Some(dir), Some(sandbox), None) = (args.next(), args.next(), args.next()) else {
        eprintln!("usage: dormouse-keeper DIR SANDBOX");
        return ExitCode::from(2);
    };
    let sandbox = match sandbox.parse() {
        Ok(sandbox) => sandbox,
        Err(error) => {
            eprintln!("dormouse-keeper: {error}");
            return ExitCode::from(2);
        }
    };
    match run(KeeperArgs { dir: dir.into(), sandbox }) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("dormouse-keeper: {error}");
            ExitCode::FAILURE
        }
    }
}
