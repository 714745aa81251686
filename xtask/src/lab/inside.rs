//! The second disk of the lab: what the command needs, and the command itself.

use std::path::{Path, PathBuf};

use anyhow::{Context, bail};
use dormouse_image::{DiskSpec, build_disk};

use super::{Job, image};
use crate::run;

/// Room beside the files for what is written next to them.
const FREE_BYTES: u64 = 16 << 30;
/// Of the workspace: what programs and tests look for.
const WORKSPACE: &[&str] = &["tests", "openapi.json", "Cargo.toml"];

/// Makes the disk in `dir`.
pub fn disk(job: &Job, dir: &Path) -> anyhow::Result<PathBuf> {
    let stage = dir.join("stage");
    std::fs::create_dir(&stage)?;
    let mut paths = executables(&run::target().join("debug"))?;
    paths.extend(executables(&run::target().join("release"))?);
    paths.extend(WORKSPACE.iter().map(|name| run::root().join(name)).filter(|path| path.exists()));
    for path in &job.with {
        let path = std::path::absolute(path)?;
        if !path.exists() {
            bail!("{} was asked for and is not there", path.display());
        }
        paths.push(path);
    }
    let mut binds = String::new();
    for (index, path) in paths.iter().enumerate() {
        let name = index.to_string();
        let to = stage.join(&name);
        // Links where they can be made; another file system's files are copied.
        if image::link(path, &to).is_err() {
            let _ = std::fs::remove_dir_all(&to);
            image::copy(&["-a"], path, &to)?;
        }
        let text = path.to_str().filter(|text| !text.contains('\n'));
        let text = text.with_context(|| format!("the path {} is no text", path.display()))?;
        binds.push_str(&format!("{name} {text}\n"));
    }
    std::fs::write(stage.join("binds"), binds)?;
    std::fs::write(stage.join("command"), script(job)?)?;
    let disk = dir.join("inside.img");
    let bytes = size(&stage)?;
    build_disk(
        &DiskSpec { rootfs: &stage, size_bytes: bytes + bytes / 8 + FREE_BYTES, seed: "inside" },
        &disk,
    )?;
    Ok(disk)
}

/// Programs that cargo built, without what belongs to cargo.
fn executables(dir: &Path) -> anyhow::Result<Vec<PathBuf>> {
    use std::os::unix::fs::PermissionsExt;
    let Ok(entries) = std::fs::read_dir(dir) else { return Ok(Vec::new()) };
    let mut found = Vec::new();
    for entry in entries {
        let entry = entry?;
        let metadata = entry.metadata()?;
        let built = metadata.is_file()
            && metadata.permissions().mode() & 0o111 != 0
            && !entry.file_name().to_string_lossy().contains('.');
        if built {
            found.push(entry.path());
        }
    }
    found.sort();
    Ok(found)
}

fn size(dir: &Path) -> anyhow::Result<u64> {
    let text = run::output(&mut run::command("du", &["-s", "--block-size=1", &dir.to_string_lossy()]))?;
    let bytes = text.split_whitespace().next().and_then(|word| word.parse().ok());
    bytes.with_context(|| format!("du says {text:?}"))
}

/// The command as a shell script.
fn script(job: &Job) -> anyhow::Result<String> {
    let mut text = String::new();
    for pair in &job.env {
        let Some((name, value)) = pair.split_once('=') else { bail!("--env {pair}: it has no `=`") };
        let plain = !name.is_empty() && name.bytes().all(|it| it.is_ascii_alphanumeric() || it == b'_');
        if !plain {
            bail!("--env {pair}: {name:?} is no name of a variable");
        }
        text.push_str(&format!("export {name}={}\n", quote(value)));
    }
    let root = run::root();
    let root = root.to_str().context("the workspace's path is no text")?;
    text.push_str(&format!("mkdir -p {0}\ncd {0}\nexec", quote(root)));
    for word in &job.command {
        text.push_str(&format!(" {}", quote(word)));
    }
    text.push('\n');
    Ok(text)
}

fn quote(word: &str) -> String {
    format!("'{}'", word.replace('\'', r"'\''"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    fn job(command: &[&str], env: &[&str]) -> Job {
        Job {
            command: command.iter().map(|&word| word.to_owned()).collect(),
            env: env.iter().map(|&word| word.to_owned()).collect(),
            with: Vec::new(),
            out: None,
            timeout: Duration::ZERO,
            memory_mib: 0,
            console: false,
        }
    }

    #[test]
    fn a_command_arrives_word_by_word() {
        let words = ["printf", "%s\n", "it's", "a  b", "$HOME"];
        let text = script(&job(&words, &["X=1 2"])).unwrap();
        let output = std::process::Command::new("sh").args(["-c", &text]).output().unwrap();
        assert_eq!(String::from_utf8(output.stdout).unwrap(), "it's\na  b\n$HOME\n");
        assert!(script(&job(&words, &["X"])).is_err());
        assert!(script(&job(&words, &["a-b=1"])).is_err());
    }
}
