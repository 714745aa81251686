//! The `runsc` program: which one, what it can do, and how it is run.
//!
//! Each container has a `--root` of its own, so that nothing is shared but the program. `delete` and
//! `state` are never called: they wait for whoever reaps the processes, and hang on a frozen sandbox.

use std::ffi::{OsStr, OsString};
use std::fs::File;
use std::os::fd::{AsRawFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::process::{ExitStatus, Stdio};
use std::time::Duration;

use serde_json::Value;
use tokio::process::Command;

use crate::common::io_failure;
use crate::error::Failure;

/// The first release whose checkpoints keep memory and pages apart and take `--direct`.
const DATE_MIN: u32 = 20_240_401;
const OUTPUT_BYTES_MAX: usize = 4096;
const INSTALL: &str = "`dormouse setup` installs it (Debian: package runsc of bookworm-backports)";

#[derive(Debug, Clone)]
pub struct Runsc {
    path: PathBuf,
    /// As it names itself, for example `0.0~20240729.0`.
    version: String,
    allow_suid: bool,
}

/// The ends of the pipes that become the init process's standard input and output.
pub(super) struct GuestEnds<'a> {
    pub stdin: &'a OwnedFd,
    pub stdout: &'a OwnedFd,
}

impl Runsc {
    /// Finds the program (`None`: on `PATH`) and asks it what it is.
    pub async fn probe(path: Option<&Path>) -> Result<Self, Failure> {
        let path = match path {
            Some(path) => path.to_owned(),
            None => find("runsc").ok_or_else(|| Failure::Missing {
                what: "runsc (gVisor), looked for on PATH,".to_owned(),
                mend: INSTALL.to_owned(),
            })?,
        };
        let text = ask(&path, &["--version"]).await?;
        let version = text
            .lines()
            .find_map(|line| line.strip_prefix("runsc version "))
            .map(|version| version.trim().to_owned())
            .ok_or_else(|| unfit(&path, format!("it does not say its version but {:?}", clip(&text))))?;
        if date(&version).is_some_and(|date| date < DATE_MIN) {
            return Err(unfit(
                &path,
                format!("version {version} is too old, {DATE_MIN} is the oldest that will do"),
            ));
        }
        let checkpoint = ask(&path, &["help", "checkpoint"]).await?;
        for flag in ["-direct", "-compression", "-leave-running"] {
            if !checkpoint.contains(flag) {
                return Err(unfit(&path, format!("version {version} has no `checkpoint -{flag}`")));
            }
        }
        let flags = ask(&path, &["flags"]).await?;
        Ok(Self { path, version, allow_suid: flags.contains("-allow-suid") })
    }

    #[must_use]
    pub fn version(&self) -> &str {
        &self.version
    }

    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Flags that checkpoint and restore must agree on come first.
    fn command(&self, container: &Path, files: &Path, groups: bool) -> Command {
        let mut command = Command::new(&self.path);
        let mut overlay = OsString::from("--overlay2=root:dir=");
        overlay.push(files);
        command
            .arg(joined("--root=", &container.join("root")))
            .args(["--platform=systrap", "--network=none"])
            .arg(overlay)
            .arg(joined("--log=", &container.join("runsc.log")))
            .arg(joined("--panic-log=", &container.join("panic.log")));
        if groups {
            command.arg("--cpu-num-from-quota");
        } else {
            command.arg("--ignore-cgroups");
        }
        if self.allow_suid {
            command.arg("--allow-suid");
        }
        command
    }
}

/// One container, as runsc is told of it.
#[derive(Debug, Clone, Copy)]
pub(super) struct Target<'a> {
    pub runsc: &'a Runsc,
    pub id: &'a str,
    pub dir: &'a Path,
    pub files: &'a Path,
    pub groups: bool,
}

impl Target<'_> {
    pub async fn create(&self, ends: GuestEnds<'_>) -> Result<(), Failure> {
        let mut command = self.runsc.command(self.dir, self.files, self.groups);
        command.args([OsStr::new("create"), &joined("--bundle=", self.dir), OsStr::new(self.id)]);
        let clone = |end: &OwnedFd| both_ways(end).map_err(io_failure("hand a pipe to", self.dir));
        // Standard error becomes the init process's: nobody would read it, and a full pipe would stop it.
        command.stdin(clone(ends.stdin)?).stdout(clone(ends.stdout)?).stderr(Stdio::null());
        self.run(command, "create", Duration::from_secs(60)).await
    }

    pub async fn start(&self) -> Result<(), Failure> {
        self.plain("start", &[], Duration::from_secs(60)).await
    }

    /// The sandbox runs on, also after a failure.
    pub async fn checkpoint(&self, into: &Path, direct: bool) -> Result<(), Failure> {
        let mut flags =
            vec![joined("--image-path=", into), "--compression=none".into(), "--leave-running".into()];
        if direct {
            flags.push("--direct".into());
        }
        self.plain("checkpoint", &flags, Duration::from_secs(600)).await
    }

    pub async fn restore(&self, from: &Path, direct: bool) -> Result<(), Failure> {
        let mut flags =
            vec![joined("--image-path=", from), joined("--bundle=", self.dir), OsString::from("--detach")];
        if direct {
            flags.push("--direct".into());
        }
        self.plain("restore", &flags, Duration::from_secs(600)).await
    }

    async fn plain(&self, verb: &'static str, flags: &[OsString], limit: Duration) -> Result<(), Failure> {
        let mut command = self.runsc.command(self.dir, self.files, self.groups);
        command.arg(verb).args(flags).arg(self.id);
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
        self.run(command, verb, limit).await
    }

    async fn run(&self, mut command: Command, verb: &'static str, limit: Duration) -> Result<(), Failure> {
        let log = self.dir.join("runsc.log");
        let _ = tokio::fs::remove_file(&log).await;
        let root = self.dir.join("root");
        std::fs::create_dir_all(&root).map_err(io_failure("make the folder", &root))?;
        command.kill_on_drop(true);
        let mut child = command.spawn().map_err(io_failure("start", &self.runsc.path))?;
        let ended = tokio::time::timeout(limit, child.wait()).await;
        let status = match ended {
            Ok(status) => status.map_err(io_failure("wait for", &self.runsc.path))?,
            Err(_) => {
                let _ = child.kill().await;
                return Err(self.failed(verb, format!("no end within {} s", limit.as_secs()), &log));
            }
        };
        if status.success() { Ok(()) } else { Err(self.failed(verb, told(status), &log)) }
    }

    fn failed(&self, verb: &str, status: String, log: &Path) -> Failure {
        let output = messages(&std::fs::read(log).unwrap_or_default());
        if output.contains("no space left on device") {
            return Failure::NoSpace { path: self.dir.to_owned() };
        }
        Failure::Command { command: format!("runsc {verb}"), status, output }
    }
}

/// The sandbox holds both directions of its pipes: a keeper's death is then no end of file and no
/// broken pipe inside, and another keeper can take over.
fn both_ways(end: &OwnedFd) -> std::io::Result<File> {
    File::options().read(true).write(true).open(format!("/proc/self/fd/{}", end.as_raw_fd()))
}

fn told(status: ExitStatus) -> String {
    status.code().map_or_else(|| status.to_string(), |code| format!("exit code {code}"))
}

fn joined(flag: &str, path: &Path) -> OsString {
    let mut text = OsString::from(flag);
    text.push(path);
    text
}

/// runsc's log of a command: JSON objects, one after the other.
fn messages(log: &[u8]) -> String {
    let values = serde_json::Deserializer::from_slice(log).into_iter::<Value>();
    let found: Vec<String> = values
        .map_while(Result::ok)
        .filter_map(|value| Some(value.get("msg")?.as_str()?.to_owned()))
        .collect();
    let text = if found.is_empty() { String::from_utf8_lossy(log).into_owned() } else { found.join("; ") };
    if text.trim().is_empty() { "it said nothing".to_owned() } else { clip(&text) }
}

fn clip(text: &str) -> String {
    text.trim().chars().take(OUTPUT_BYTES_MAX).collect()
}

async fn ask(path: &Path, args: &[&str]) -> Result<String, Failure> {
    let mut command = Command::new(path);
    command.args(args).stdin(Stdio::null()).kill_on_drop(true);
    let ran = tokio::time::timeout(Duration::from_secs(20), command.output()).await;
    let output = match ran {
        Ok(Ok(output)) => output,
        Ok(Err(error)) if error.kind() == std::io::ErrorKind::NotFound => {
            return Err(Failure::Missing { what: path.display().to_string(), mend: INSTALL.to_owned() });
        }
        Ok(Err(error)) => return Err(unfit(path, format!("it cannot be run: {error}"))),
        Err(_) => return Err(unfit(path, "it does not answer within 20 s".to_owned())),
    };
    // `runsc flags` prints to standard error.
    Ok(format!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr)))
}

fn unfit(path: &Path, why: String) -> Failure {
    Failure::Unfit { what: path.display().to_string(), why, mend: INSTALL.to_owned() }
}

fn find(name: &str) -> Option<PathBuf> {
    let path = std::env::var_os("PATH")?;
    std::env::split_paths(&path).map(|dir| dir.join(name)).find(|file| file.is_file())
}

/// `0.0~20240729.0` (Debian) or `release-20240729.0`: the day it was made.
fn date(version: &str) -> Option<u32> {
    version
        .split(|c: char| !c.is_ascii_digit())
        .find(|part| part.len() == 8)
        .and_then(|part| part.parse().ok())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_of_both_kinds_are_read() {
        assert_eq!(date("0.0~20240729.0"), Some(20_240_729));
        assert_eq!(date("release-20221219.0"), Some(20_221_219));
        assert_eq!(date("VERSION_MISSING"), None);
    }

    #[test]
    fn the_log_of_a_failed_command_becomes_words() {
        let log = br#"{"msg":"a","level":"error"}{"msg":"b","level":"error"}"#;
        assert_eq!(messages(log), "a; b");
        assert_eq!(messages(b"plain"), "plain");
        assert_eq!(messages(b""), "it said nothing");
    }

    #[tokio::test]
    async fn a_program_that_is_not_there_is_named() {
        let error = Runsc::probe(Some(Path::new("/nonexistent/runsc"))).await.unwrap_err();
        assert!(matches!(error, Failure::Missing { .. }), "{error}");
        let error = Runsc::probe(Some(Path::new("/bin/true"))).await.unwrap_err();
        assert!(matches!(error, Failure::Unfit { .. }), "{error}");
    }
}
