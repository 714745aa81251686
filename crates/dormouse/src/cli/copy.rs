//! Files and folders in and out of a sandbox, with a progress bar.
//!
//! A file goes as it is. A folder goes as one tar through a temporary file inside; what comes out is unpacked below
//! the target only (an archive made by a hostile sandbox cannot write elsewhere).

use std::fs::File;
use std::path::{Path, PathBuf};

use dormouse_api::client::{Envd, ProcessOutput, StartSpec};
use dormouse_wire::envd::filesystem::FileType;
use indicatif::{ProgressBar, ProgressStyle};
use serde_json::json;

use super::args::CpArgs;
use super::context::Context;
use super::error::{CliError, ExitStatus};
use super::output::{bytes, show};

/// One end of a copy.
#[derive(Debug, PartialEq, Eq)]
enum Place {
    Local(PathBuf),
    Inside { sandbox: String, path: String },
}

/// `SANDBOX:/path` is inside; a path with a slash before its colon is local.
fn place(given: &str) -> Place {
    match given.split_once(':') {
        Some((sandbox, path))
            if !sandbox.is_empty() && !sandbox.contains('/') && !sandbox.starts_with('.') =>
        {
            Place::Inside { sandbox: sandbox.to_owned(), path: path.to_owned() }
        }
        _ => Place::Local(PathBuf::from(given)),
    }
}

pub async fn run(args: &CpArgs, context: &Context) -> Result<ExitStatus, CliError> {
    let (count, from, to) = match (place(&args.from), place(&args.to)) {
        (Place::Local(from), Place::Inside { sandbox, path }) => {
            let envd = context.envd(&sandbox, args.user.as_deref()).await?;
            (upload(&envd, &from, &path, context).await?, args.from.clone(), args.to.clone())
        }
        (Place::Inside { sandbox, path }, Place::Local(to)) => {
            let envd = context.envd(&sandbox, args.user.as_deref()).await?;
            (download(&envd, &path, &to, context).await?, args.from.clone(), args.to.clone())
        }
        _ => {
            return Err(CliError::usage(
                "cannot copy: exactly one side must be inside a sandbox, written SANDBOX:/path",
            ));
        }
    };
    let answer = json!({"from": from, "to": to, "bytes": count});
    show(context, &answer, |_| format!("{from} → {to}: {}", bytes(count)))
}

fn bar(context: &Context, length: Option<u64>) -> ProgressBar {
    if context.json {
        return ProgressBar::hidden();
    }
    let (bar, template) = match length {
        Some(length) => (ProgressBar::new(length), "{bar:32} {bytes}/{total_bytes} {bytes_per_sec} {eta}"),
        None => (ProgressBar::new_spinner(), "{spinner} {bytes} {bytes_per_sec}"),
    };
    // The template is a constant that parses; a bar without its style still counts.
    ProgressStyle::with_template(template).map_or(bar.clone(), |style| bar.with_style(style))
}

/// Whether `path` inside is a folder; `None`: nothing is there.
async fn folder_inside(envd: &Envd, path: &str) -> Result<Option<bool>, CliError> {
    match envd.stat(path).await {
        Ok(entry) => Ok(Some(entry.file_type == FileType::Directory)),
        Err(error) if error.status() == Some(404) => Ok(None),
        Err(error) => Err(error.into()),
    }
}

/// Where a file called `name` ends up if it is copied to `path`.
fn below(path: &str, name: &str, is_folder: bool) -> String {
    if path.is_empty() {
        name.to_owned()
    } else if is_folder || path.ends_with('/') {
        format!("{}/{name}", path.trim_end_matches('/'))
    } else {
        path.to_owned()
    }
}

async fn upload(envd: &Envd, from: &Path, path: &str, context: &Context) -> Result<u64, CliError> {
    let metadata = std::fs::metadata(from).map_err(|source| CliError::file("read", from, source))?;
    let absolute = Context::absolute(from)?;
    let name =
        absolute.file_name().map_or_else(|| "root".to_owned(), |name| name.to_string_lossy().into_owned());
    let is_folder = !path.is_empty() && folder_inside(envd, path).await? == Some(true);
    let target = below(path, &name, is_folder);
    if !metadata.is_dir() {
        return send(envd, from, &target, context).await;
    }
    let archive = tempfile::NamedTempFile::new().map_err(|source| CliError::file("pack", from, source))?;
    pack(from, archive.path()).map_err(|source| CliError::file("pack", from, source))?;
    let inside = format!("/tmp/.dormouse-cp-{}.tar", dormouse_types::random_hex(8));
    let count = send(envd, archive.path(), &inside, context).await?;
    let unpacked = shell(envd, r#"mkdir -p -- "$2" && tar -x -f "$1" -C "$2""#, &[&inside, &target]).await;
    envd.remove(&inside).await?;
    unpacked.map(|()| count)
}

async fn send(envd: &Envd, from: &Path, path: &str, context: &Context) -> Result<u64, CliError> {
    let length = std::fs::metadata(from).ok().filter(std::fs::Metadata::is_file).map(|data| data.len());
    let bar = bar(context, length);
    let told = bar.clone();
    envd.upload(from, path, move |count| told.inc(count)).await?;
    let count = bar.position();
    bar.finish_and_clear();
    Ok(count)
}

fn pack(folder: &Path, archive: &Path) -> std::io::Result<()> {
    let mut builder = tar::Builder::new(std::io::BufWriter::new(File::create(archive)?));
    builder.follow_symlinks(false);
    builder.append_dir_all(".", folder)?;
    std::io::Write::flush(&mut builder.into_inner()?)
}

async fn download(envd: &Envd, path: &str, to: &Path, context: &Context) -> Result<u64, CliError> {
    let name = path.trim_end_matches('/').rsplit('/').next().filter(|name| !name.is_empty() && *name != "..");
    let target = if to.is_dir() { to.join(name.unwrap_or("root")) } else { to.to_owned() };
    if folder_inside(envd, path).await? != Some(true) {
        return fetch(envd, path, &target, context).await;
    }
    let inside = format!("/tmp/.dormouse-cp-{}.tar", dormouse_types::random_hex(8));
    let archive =
        tempfile::NamedTempFile::new().map_err(|source| CliError::file("unpack into", to, source))?;
    let packed = shell(envd, r#"tar -c -f "$1" -C "$2" ."#, &[&inside, path]).await;
    let fetched = match packed {
        Ok(()) => fetch(envd, &inside, archive.path(), context).await,
        Err(error) => Err(error),
    };
    envd.remove(&inside).await?;
    let count = fetched?;
    unpack(archive.path(), &target).map_err(|source| CliError::file("unpack into", &target, source))?;
    Ok(count)
}

async fn fetch(envd: &Envd, path: &str, to: &Path, context: &Context) -> Result<u64, CliError> {
    let mut download = envd.download(path).await?;
    let bar = bar(context, download.length);
    let count = download.save(to, |count| bar.inc(count)).await?;
    bar.finish_and_clear();
    Ok(count)
}

/// Owners are this user's, special files are refused, nothing is written outside `target`.
fn unpack(archive: &Path, target: &Path) -> std::io::Result<()> {
    std::fs::create_dir_all(target)?;
    let mut archive = tar::Archive::new(std::io::BufReader::new(File::open(archive)?));
    for entry in archive.entries()? {
        let mut entry = entry?;
        let kind = entry.header().entry_type();
        if kind.is_file() || kind.is_dir() || kind.is_symlink() || kind.is_hard_link() {
            entry.unpack_in(target)?;
        }
    }
    Ok(())
}

/// A line of shell inside; its stderr is the error.
async fn shell(envd: &Envd, script: &str, args: &[&str]) -> Result<(), CliError> {
    let mut words = vec!["-c".to_owned(), script.to_owned(), "sh".to_owned()];
    words.extend(args.iter().map(|arg| (*arg).to_owned()));
    let spec = StartSpec { command: "/bin/sh".to_owned(), args: words, ..StartSpec::default() };
    let mut events = envd.start(&spec).await?;
    let mut said = Vec::new();
    while let Some(output) = events.next().await? {
        match output {
            ProcessOutput::Stderr(bytes) if said.len() < 4096 => said.extend_from_slice(&bytes),
            ProcessOutput::Ended { exit_code: 0, .. } => return Ok(()),
            ProcessOutput::Ended { .. } => break,
            _ => {}
        }
    }
    let words = String::from_utf8_lossy(&said).trim().to_owned();
    Err(CliError::failed(format!("cannot copy the folder: tar inside the sandbox said: {words}")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn places_are_told_apart() {
        assert_eq!(place("s1:/a"), Place::Inside { sandbox: "s1".into(), path: "/a".into() });
        for local in ["a", "./a:b", "/tmp/x:y", "../s1:/a"] {
            assert_eq!(place(local), Place::Local(local.into()), "{local}");
        }
    }

    #[test]
    fn targets_are_like_cp() {
        assert_eq!(below("/a", "f", false), "/a");
        assert_eq!(below("/a/", "f", false), "/a/f");
        assert_eq!(below("/a", "f", true), "/a/f");
        assert_eq!(below("", "f", true), "f");
    }

    #[test]
    fn a_folder_goes_through_an_archive() {
        let folder = tempfile::tempdir().expect("a folder");
        std::fs::create_dir(folder.path().join("d")).expect("a folder in it");
        std::fs::write(folder.path().join("d/f"), "text").expect("a file");
        let archive = tempfile::NamedTempFile::new().expect("a file");
        pack(folder.path(), archive.path()).expect("it is packed");
        let target = tempfile::tempdir().expect("a folder");
        unpack(archive.path(), target.path()).expect("it is unpacked");
        assert_eq!(std::fs::read_to_string(target.path().join("d/f")).expect("it is there"), "text");
    }
}
