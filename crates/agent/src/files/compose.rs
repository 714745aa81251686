//! `POST /files/compose`: several files become one, in their order; they are removed when it is there.

use std::collections::HashSet;
use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::{MetadataExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};

use rustix::fs::OFlags;
use serde::Deserialize;

use super::error::Refusal;
use super::target::Target;
use super::upload::Written;
use crate::filesystem::metadata::Tags;
use crate::filesystem::{Caller, transfer};

const SOURCES_MAX: usize = 10_000;

#[derive(Debug, Deserialize)]
pub struct ComposeRequest {
    pub source_paths: Vec<String>,
    pub destination: String,
    pub username: Option<String>,
}

/// Blocking.
pub fn compose(caller: &Caller, request: &ComposeRequest) -> Result<Written, Refusal> {
    let sources = sources(caller, &request.source_paths)?;
    if request.destination.is_empty() {
        return Err(Refusal::bad_request("destination is empty: it says where the composed file goes"));
    }
    let path = caller.resolve(&request.destination)?;
    let target = Target { path, user: caller.user.clone(), tags: Tags::new() };
    // Existence and kind of all of them, before anything is written.
    let mut bytes = 0;
    for source in &sources {
        let (_, meta) = open(source)?;
        bytes += meta.len();
        let same =
            std::fs::metadata(&target.path).is_ok_and(|to| (to.dev(), to.ino()) == (meta.dev(), meta.ino()));
        if same {
            return Err(Refusal::bad_request(format!(
                "'{}' is both source and destination",
                source.display()
            )));
        }
    }
    target.check(Some(bytes))?;
    let unfinished = target.begin()?;
    for source in &sources {
        let (file, _) = open(source)?;
        transfer::append(&file, &unfinished.file).map_err(|why| Refusal::io("copying", source, &why))?;
    }
    target.publish(unfinished)?;
    for source in &sources {
        transfer::remove(source).map_err(|why| Refusal::io("removing the composed", source, &why))?;
    }
    Ok(Written::file(&target))
}

fn sources(caller: &Caller, given: &[String]) -> Result<Vec<PathBuf>, Refusal> {
    if given.is_empty() || given.len() > SOURCES_MAX {
        let message = format!("source_paths has {} entries: 1 to {SOURCES_MAX} are possible", given.len());
        return Err(Refusal::bad_request(message));
    }
    let mut seen = HashSet::new();
    given
        .iter()
        .map(|path| {
            let path = caller.resolve(path)?;
            let twice = || Refusal::bad_request(format!("'{}' is a source twice", path.display()));
            if seen.insert(path.clone()) { Ok(path) } else { Err(twice()) }
        })
        .collect()
}

fn open(source: &Path) -> Result<(File, std::fs::Metadata), Refusal> {
    let nonblock = i32::try_from(OFlags::NONBLOCK.bits()).unwrap_or(0);
    let opened = OpenOptions::new().read(true).custom_flags(nonblock).open(source);
    let failed = |why: io::Error| Refusal::io("reading", source, &why);
    let file = opened.map_err(failed)?;
    let meta = file.metadata().map_err(failed)?;
    if meta.is_dir() {
        return Err(Refusal::is_directory(source));
    }
    if !meta.is_file() {
        return Err(Refusal::bad_request(format!("path '{}' is not a regular file", source.display())));
    }
    Ok((file, meta))
}
