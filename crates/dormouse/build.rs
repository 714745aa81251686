//! Builds the agent as a static executable and leaves it in `OUT_DIR` for `agent_binary.rs`.
//!
//! The agent runs in sandboxes of any image, so it is linked statically, with its own flags, in a
//! target folder of its own (the outer build holds the lock of the usual one).
//! `DORMOUSE_AGENT_BINARY` names a finished executable instead.

use std::env;
use std::error::Error;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

/// What the agent is made of.
const CRATES: [&str; 4] = ["agent", "wire", "types", "sys"];
const GIVEN: &str = "DORMOUSE_AGENT_BINARY";
/// Static; and poll(2) in place of epoll(7): after a restore gVisor's epoll tells of descriptors that
/// were taken out of it before (seen: 2 such events in 25 restores of a busy process, none in 3 million events without a restore), and the runtime
/// takes the number in such an event for the address of a record that is long gone.
const FLAGS: &str = "-C target-feature=+crt-static --cfg mio_unsupported_force_poll_poll";
/// What the outer cargo sets for this build and the inner one must not take over.
const NOT_INHERITED: [&str; 7] = [
    "CARGO_ENCODED_RUSTFLAGS",
    "CARGO_BUILD_RUSTFLAGS",
    "CARGO_TARGET_DIR",
    "CARGO_BUILD_TARGET",
    "RUSTC_WORKSPACE_WRAPPER",
    "CARGO_MAKEFLAGS",
    "LLVM_PROFILE_FILE",
];

fn main() -> Result<(), Box<dyn Error>> {
    println!("cargo::rerun-if-env-changed={GIVEN}");
    let out = PathBuf::from(env::var_os("OUT_DIR").ok_or("OUT_DIR is not set")?).join("agent");
    if let Some(given) = env::var_os(GIVEN) {
        println!("cargo::rerun-if-changed={}", Path::new(&given).display());
        fs::copy(&given, &out)?;
        return Ok(());
    }
    let manifest = PathBuf::from(env::var_os("CARGO_MANIFEST_DIR").ok_or("CARGO_MANIFEST_DIR is not set")?);
    let root = manifest.ancestors().nth(2).ok_or("the crate is not in its workspace")?;
    for name in CRATES {
        println!("cargo::rerun-if-changed={}", root.join("crates").join(name).join("src").display());
        println!("cargo::rerun-if-changed={}", root.join("crates").join(name).join("Cargo.toml").display());
    }
    fs::copy(build(root)?, &out)?;
    Ok(())
}

/// Path of the executable.
fn build(root: &Path) -> Result<PathBuf, Box<dyn Error>> {
    let target = env::var("TARGET")?;
    let folder =
        env::var_os("CARGO_TARGET_DIR").map_or_else(|| root.join("target"), PathBuf::from).join("agent");
    let mut cargo = Command::new(env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    cargo.args(["build", "--package", "dormouse-agent", "--profile", "agent", "--target", &target]);
    cargo.arg("--target-dir").arg(&folder).current_dir(root);
    for name in NOT_INHERITED {
        cargo.env_remove(name);
    }
    cargo.env("RUSTFLAGS", FLAGS);
    let status = cargo.status().map_err(|why| format!("cannot run {cargo:?}: {why}"))?;
    if !status.success() {
        return Err(format!("building the agent failed ({status}): {cargo:?}").into());
    }
    Ok(folder.join(target).join("agent").join("dormouse-agent"))
}
