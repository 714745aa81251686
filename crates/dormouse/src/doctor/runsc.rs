//! Which runsc this host has, and whether it is new enough.

use std::path::PathBuf;

use super::host;

/// The Debian package that is known good, as apt is asked for it.
pub const RUNSC_PACKAGE: &str = "runsc=0.0~20240729.0-4~bpo12+2";
/// Releases are named by date. Older ones lack `--overlay2=root:dir=` and uncompressed checkpoints.
const DATE_MIN: u32 = 20_240_701;
const FLAGS_NEEDED: [&str; 3] = ["-overlay2", "-network", "-platform"];

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Runsc {
    pub path: PathBuf,
    pub version: String,
    /// Options of its checkpoint command that matter, as far as it has them.
    pub checkpoint: Vec<String>,
}

#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum RunscError {
    #[error("runsc is not installed")]
    Missing,
    #[error("{path} cannot be run or does not say its version")]
    Broken { path: String },
    #[error("{path} is {version}, which is too old: releases from July 2024 on work")]
    TooOld { path: String, version: String },
    #[error("{path} ({version}) lacks the flag {flag}")]
    Lacks { path: String, version: String, flag: String },
}

pub fn find() -> Result<Runsc, RunscError> {
    let path = host::find_program("runsc").ok_or(RunscError::Missing)?;
    let shown = path.display().to_string();
    let broken = || RunscError::Broken { path: shown.clone() };
    let text = host::output(&path, &["--version"]).ok_or_else(broken)?;
    let version = version(&text).ok_or_else(broken)?;
    if date(&version).is_some_and(|date| date < DATE_MIN) {
        return Err(RunscError::TooOld { path: shown, version });
    }
    let flags = host::output(&path, &["flags"]).ok_or_else(broken)?;
    if let Some(flag) = FLAGS_NEEDED.into_iter().find(|flag| !has_flag(&flags, flag)) {
        return Err(RunscError::Lacks {
            path: shown,
            version,
            flag: flag.trim_start_matches('-').to_owned(),
        });
    }
    let help = host::output(&path, &["help", "checkpoint"]).unwrap_or_default();
    let wanted =
        ["-direct", "-compression", "-leave-running", "-background", "-exclude-committed-zero-pages"];
    let checkpoint = wanted.into_iter().filter(|flag| has_flag(&help, flag));
    Ok(Runsc { path, version, checkpoint: checkpoint.map(|flag| flag[1..].to_owned()).collect() })
}

/// The word after `runsc version`.
fn version(text: &str) -> Option<String> {
    text.lines().find_map(|line| line.strip_prefix("runsc version ")).map(|word| word.trim().to_owned())
}

/// The date in a release's name: `release-20240729.0`, `0.0~20240729.0`. `None`: it has none (built by hand).
fn date(version: &str) -> Option<u32> {
    version.split(|c: char| !c.is_ascii_digit()).find(|part| part.len() == 8)?.parse().ok()
}

fn has_flag(help: &str, flag: &str) -> bool {
    help.split_ascii_whitespace()
        .any(|word| word.trim_start_matches('-') == flag.trim_start_matches('-') && word.starts_with('-'))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn releases_are_told_apart_by_their_date() {
        assert_eq!(
            version("runsc version 0.0~20240729.0\nspec: 1.0.2-dev\n").as_deref(),
            Some("0.0~20240729.0")
        );
        assert_eq!(date("release-20240729.0-43-gabcdef"), Some(20_240_729));
        assert_eq!(date("0.0~20221219.0"), Some(20_221_219));
        assert_eq!(date("VERSION_MISSING"), None);
        assert!(has_flag("  -direct\n    use O_DIRECT", "-direct"));
        assert!(!has_flag("  -directfs\n", "-direct"));
    }
}
