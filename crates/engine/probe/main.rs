//! Stands in for the agent (`init`) and for the keeper (`keeper --dir DIR --sandbox ID`) in this
//! crate's integration tests: real processes that speak the real protocols, without multiplexing.

mod init;
mod keeper;

fn main() -> std::process::ExitCode {
    let arguments: Vec<String> = std::env::args().collect();
    match arguments.get(1).map(String::as_str) {
        Some("init") => init::run(),
        Some("keeper") => keeper::run(&arguments[2..]),
        other => panic!("the probe has the modes init and keeper, not {other:?}"),
    }
}
