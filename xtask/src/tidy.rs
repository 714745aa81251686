//! Sizes of files: a report, and a limit where a file has grown out of hand.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, bail};

use crate::run;

/// STYLE: near or under 600.
const LINES_WANTED: usize = 600;
const LINES_MAX: usize = 800;

pub fn run() -> anyhow::Result<()> {
    let mut files = Vec::new();
    for folder in ["crates", "xtask"] {
        collect(&run::root().join(folder), &mut files)?;
    }
    let mut long = Vec::new();
    for path in &files {
        let text = fs::read_to_string(path).with_context(|| format!("cannot read {}", path.display()))?;
        let lines = text.lines().count();
        if lines > LINES_WANTED {
            long.push((lines, path.strip_prefix(run::root()).unwrap_or(path).to_owned()));
        }
    }
    long.sort();
    for (lines, path) in &long {
        println!("tidy: {} has {lines} lines (wanted: {LINES_WANTED})", path.display());
    }
    if let Some((lines, path)) = long.last().filter(|(lines, _)| *lines > LINES_MAX) {
        bail!("{} has {lines} lines; split it (at most {LINES_MAX})", path.display());
    }
    println!("tidy: {} source files looked at", files.len());
    Ok(())
}

fn collect(folder: &Path, files: &mut Vec<PathBuf>) -> anyhow::Result<()> {
    for entry in fs::read_dir(folder).with_context(|| format!("cannot list {}", folder.display()))? {
        let path = entry?.path();
        if path.is_dir() && !path.ends_with("target") {
            collect(&path, files)?;
        } else if path.extension().is_some_and(|ext| ext == "rs") {
            files.push(path);
        }
    }
    Ok(())
}
