//! Template files and what they ask for.
//!
//! ```text
//! TOML, Dockerfile ── parse ──> Template ── plan(context, base image) ──> BuildPlan: steps with cache keys
//! ```
//!
//! Parsing needs no file but the template's own. Planning knows the base image (its variables are
//! substituted) and reads the files that are copied, so that each step's key says all it depends on.

mod context;
mod dockerfile;
mod glob;
mod plan;
mod toml_file;
mod words;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use dormouse_types::Shape;
use serde::{Deserialize, Serialize};

pub use context::{CopyEntry, CopyKind};
pub use plan::{BuildPlan, Step, StepKind};

/// Longest template file that is read.
pub const FILE_BYTES_MAX: usize = 1 << 20;
pub const STEPS_MAX: usize = 1000;
const READY_TIMEOUT_S: u32 = 120;
const READY_TIMEOUT_S_MAX: u32 = 1800;

/// A template file was refused, or a file it copies.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{file}{}: {why}", .line.map(|line| format!(" line {line}")).unwrap_or_default())]
pub struct TemplateError {
    /// As the user knows it: `Dockerfile`, `dormouse.toml`.
    pub file: String,
    pub line: Option<u32>,
    /// What is wrong and what to do.
    pub why: String,
}

/// What a template is built upon.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "lowercase")]
pub enum Base {
    Debian {
        suite: String,
    },
    /// Folder or archive on the host; `PATH` or `PATH:NAME`, relative to the context.
    Oci {
        reference: String,
    },
    /// Another template, by name.
    Template {
        name: String,
    },
}

/// One instruction, as written.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Instruction {
    /// Counted from 1.
    pub line: u32,
    /// For progress and logs.
    pub text: String,
    pub action: Action,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Action {
    Run {
        command: RunCommand,
        /// For this command alone.
        user: Option<String>,
    },
    Copy {
        sources: Vec<String>,
        target: String,
        owner: Option<String>,
        mode: Option<u32>,
    },
    /// Pairs in order; values not yet substituted.
    Env(Vec<(String, String)>),
    Workdir(String),
    User(String),
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum RunCommand {
    Shell(String),
    Exec(Vec<String>),
}

/// When a started template counts as ready to be snapshotted.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Ready {
    pub probe: Probe,
    pub timeout_s: u32,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Probe {
    /// A shell command that ends with 0.
    Command(String),
    /// Something listens on it.
    Port(u16),
}

/// A template file that was parsed.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Template {
    /// The file's name, for errors.
    pub file: String,
    pub base: Base,
    /// Where the base was named.
    pub base_line: u32,
    /// Debian packages beside those of the base; only with a Debian base.
    pub packages: Vec<String>,
    pub instructions: Vec<Instruction>,
    pub start: Option<String>,
    pub ready: Option<Ready>,
    pub shape: Shape,
    /// Names that the template is found by.
    pub aliases: Vec<String>,
}

impl Template {
    /// Parses by the name of the file: `*.toml`, everything else is a Dockerfile.
    pub fn parse(file: &str, text: &str) -> Result<Self, TemplateError> {
        if text.len() > FILE_BYTES_MAX {
            let why = format!("it has {} bytes, {FILE_BYTES_MAX} are allowed", text.len());
            return Err(TemplateError { file: file.to_owned(), line: None, why });
        }
        let is_toml = Path::new(file).extension().is_some_and(|it| it.eq_ignore_ascii_case("toml"));
        if is_toml { toml_file::parse(file, text) } else { dockerfile::parse(file, text) }
    }

    /// Reads a template file, or the one in a folder: `dormouse.toml`, else `Dockerfile`. The second
    /// value is the context: the folder that copied files are found in.
    pub fn read(path: &Path) -> Result<(Self, PathBuf), TemplateError> {
        let path = if path.is_dir() {
            let toml = path.join("dormouse.toml");
            if toml.is_file() { toml } else { path.join("Dockerfile") }
        } else {
            path.to_owned()
        };
        let file = path.file_name().map_or_else(String::new, |name| name.to_string_lossy().into_owned());
        let failed = |why: String| TemplateError { file: path.display().to_string(), line: None, why };
        let bytes =
            std::fs::metadata(&path).map_err(|error| failed(format!("cannot be read: {error}")))?.len();
        if bytes > FILE_BYTES_MAX as u64 {
            return Err(failed(format!("it has {bytes} bytes, {FILE_BYTES_MAX} are allowed")));
        }
        let text =
            std::fs::read_to_string(&path).map_err(|error| failed(format!("cannot be read: {error}")))?;
        let context = match path.parent() {
            Some(parent) if !parent.as_os_str().is_empty() => parent.to_owned(),
            _ => PathBuf::from("."),
        };
        Ok((Self::parse(&file, &text)?, context))
    }

    pub(crate) fn error(&self, line: u32, why: String) -> TemplateError {
        TemplateError { file: self.file.clone(), line: Some(line), why }
    }
}

/// A name that templates are found by: it is part of URLs and of command lines.
pub fn check_alias(given: &str) -> Result<(), String> {
    let plain = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || b"-_".contains(&byte);
    let fits = (1..=63).contains(&given.len())
        && given.bytes().all(plain)
        && given.as_bytes()[0].is_ascii_alphanumeric();
    if fits {
        return Ok(());
    }
    let shown: String = given.chars().take(80).collect();
    Err(format!(
        "{shown:?} cannot be a template's name: lower-case letters, digits, '-' and '_', at most 63, a letter or \
         digit first"
    ))
}

/// What `FROM` and `from =` understand.
fn parse_base(given: &str) -> Result<Base, String> {
    if let Some(reference) = given.strip_prefix("oci:") {
        return if reference.is_empty() {
            Err("oci: needs a path, for example oci:./image.tar".to_owned())
        } else {
            Ok(Base::Oci { reference: reference.to_owned() })
        };
    }
    if let Some(name) = given.strip_prefix("template:") {
        check_alias(name)?;
        return Ok(Base::Template { name: name.to_owned() });
    }
    if let Some(suite) = given.strip_prefix("debian:") {
        let suite = match suite.strip_suffix("-slim").unwrap_or(suite) {
            "12" => "bookworm",
            "13" => "trixie",
            other => other,
        };
        let fits = suite.bytes().all(|byte| byte.is_ascii_lowercase() || byte == b'-')
            && suite.len() > 1
            && !suite.starts_with('-');
        if fits {
            return Ok(Base::Debian { suite: suite.to_owned() });
        }
        return Err(format!("{given:?} names no Debian suite; write for example debian:bookworm"));
    }
    if given == "debian" {
        return Ok(Base::Debian { suite: "bookworm".to_owned() });
    }
    if given == "scratch" {
        return Err("an empty base cannot run commands; start from debian:bookworm".to_owned());
    }
    if given.contains(['/', ':', '@', '.']) {
        return Err(format!(
            "{given:?} would have to come from a registry, which is not supported; use debian:SUITE, the name of a \
             template, or save the image as an OCI layout or archive and write oci:PATH"
        ));
    }
    check_alias(given)?;
    Ok(Base::Template { name: given.to_owned() })
}

/// Names of variables: what every shell takes.
fn check_variable(name: &str) -> Result<(), String> {
    let fits = !name.is_empty()
        && !name.as_bytes()[0].is_ascii_digit()
        && name.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'_');
    let shown: String = name.chars().take(80).collect();
    if fits { Ok(()) } else { Err(format!("{shown:?} cannot be the name of a variable")) }
}

fn check_user(name: &str) -> Result<(), String> {
    if name.contains(':') {
        return Err(format!("{name:?}: a group cannot be chosen; write the user alone"));
    }
    let fits = (1..=32).contains(&name.len())
        && name.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"._-".contains(&byte))
        && !name.starts_with('-');
    if fits { Ok(()) } else { Err(format!("{name:?} cannot be the name of a user")) }
}

/// `PATH` of a sandbox whose base sets none.
pub const DEFAULT_PATH: &str = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";

type Variables = BTreeMap<String, String>;
