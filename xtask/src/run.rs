//! Commands that are shown before they are run.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, bail};

/// The workspace's root.
pub fn root() -> PathBuf {
    let here = Path::new(env!("CARGO_MANIFEST_DIR"));
    here.parent().unwrap_or(here).to_owned()
}

/// Where cargo puts what it builds.
pub fn target() -> PathBuf {
    std::env::var_os("CARGO_TARGET_DIR").map_or_else(|| root().join("target"), PathBuf::from)
}

/// `program` in the workspace's root, printed as one line first (on stderr: stdout is the result's).
pub fn command(program: impl AsRef<Path>, args: &[&str]) -> Command {
    let mut command = Command::new(program.as_ref());
    command.args(args).current_dir(root());
    command
}

pub fn cargo(args: &[&str]) -> Command {
    command(std::env::var_os("CARGO").map_or_else(|| PathBuf::from("cargo"), PathBuf::from), args)
}

fn line(command: &Command) -> String {
    let name = Path::new(command.get_program()).file_name().unwrap_or(command.get_program());
    let args = command.get_args().map(|arg| arg.to_string_lossy().into_owned());
    std::iter::once(name.to_string_lossy().into_owned()).chain(args).collect::<Vec<_>>().join(" ")
}

/// Runs it with this process's output; an exit code other than 0 is an error.
pub fn run(command: &mut Command) -> anyhow::Result<()> {
    let line = line(command);
    eprintln!("  $ {line}");
    let status = command.status().with_context(|| format!("cannot start `{line}`"))?;
    if !status.success() {
        bail!("`{line}` ended with {status}");
    }
    Ok(())
}

/// Runs it and gives back its stdout; stderr stays this process's.
pub fn output(command: &mut Command) -> anyhow::Result<String> {
    let line = line(command);
    let output =
        command.stderr(Stdio::inherit()).output().with_context(|| format!("cannot start `{line}`"))?;
    if !output.status.success() {
        bail!("`{line}` ended with {}", output.status);
    }
    String::from_utf8(output.stdout).with_context(|| format!("`{line}` wrote something that is not text"))
}

/// Builds the `dormouse` executable and says where it is.
pub fn build_dormouse(release: bool) -> anyhow::Result<PathBuf> {
    let mut args = vec!["build", "--package", "dormouse", "--bin", "dormouse"];
    if release {
        args.push("--release");
    }
    run(&mut cargo(&args))?;
    let binary = target().join(if release { "release" } else { "debug" }).join("dormouse");
    if !binary.is_file() {
        bail!("cargo built no {}", binary.display());
    }
    Ok(binary)
}
