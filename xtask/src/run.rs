//! Commands that are shown before they are run.

use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, bail};

/// A failure that was told already: the process ends with it and says no more.
#[derive(Debug)]
pub struct Told;

impl std::fmt::Display for Told {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("it failed, as told above")
    }
}

impl std::error::Error for Told {}

/// How many tests went how.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Counts {
    pub passed: u64,
    pub failed: u64,
    pub skipped: u64,
}

impl Counts {
    pub fn add(&mut self, other: Self) {
        self.passed += other.passed;
        self.failed += other.failed;
        self.skipped += other.skipped;
    }

    /// What a line such as `49 passed, 1 failed in 3 s` counts; nextest, libtest and pytest all write it so.
    fn of_line(line: &str) -> Self {
        let words: Vec<&str> = line.split(|c: char| c.is_whitespace() || c == ',' || c == ';').collect();
        let words: Vec<&str> = words.into_iter().filter(|word| !word.is_empty()).collect();
        let of = |names: &[&str]| {
            let count =
                |pair: &[&str]| names.contains(&pair[1]).then(|| pair[0].parse::<u64>().ok()).flatten();
            words.windows(2).filter_map(count).sum()
        };
        Self {
            passed: of(&["passed"]),
            failed: of(&["failed", "error", "errors"]),
            skipped: of(&["skipped", "ignored"]),
        }
    }
}

/// Runs a test runner, shows what it says and counts by its own summary (a line on which `is_summary`).
pub fn count(command: &mut Command, is_summary: fn(&str) -> bool) -> anyhow::Result<Counts> {
    let line = line(command);
    eprintln!("  $ {line}");
    // One pipe for both: nextest sums up on stderr, the others on stdout.
    let (reader, writer) = std::io::pipe().context("cannot make a pipe")?;
    let mut child = command
        .stdout(writer.try_clone()?)
        .stderr(writer)
        .spawn()
        .with_context(|| format!("cannot start `{line}`"))?;
    // This process's own copies would keep the pipe open.
    command.stdout(Stdio::null()).stderr(Stdio::null());
    let mut counts = Counts::default();
    for text in BufReader::new(reader).split(b'\n') {
        let text = String::from_utf8_lossy(&text?).into_owned();
        println!("{text}");
        if is_summary(&text) {
            counts.add(Counts::of_line(&text));
        }
    }
    let status = child.wait()?;
    if !status.success() && counts.failed == 0 {
        bail!("`{line}` ended with {status}");
    }
    if counts.passed + counts.failed == 0 {
        bail!("`{line}` ran no test");
    }
    Ok(counts)
}

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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_runners_summary_is_counted() {
        let check = |line: &str, passed, failed, skipped| {
            assert_eq!(Counts::of_line(line), Counts { passed, failed, skipped }, "{line}");
        };
        check("     Summary [   1.2s] 12 tests run: 11 passed (1 slow), 1 failed, 3 skipped", 11, 1, 3);
        check("test result: ok. 4 passed; 0 failed; 0 ignored; 0 measured; 0 filtered out", 4, 0, 0);
        check("1 failed, 49 passed, 2 skipped in 46.63s", 49, 1, 2);
    }
}
