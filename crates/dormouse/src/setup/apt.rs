//! Packages, through the machine's own apt and its own mirror.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use crate::cli::{CliError, Context, spinner};

const BACKPORTS: &str = "/etc/apt/sources.list.d/dormouse-backports.sources";
const KEYRING: &str = "/usr/share/keyrings/debian-archive-keyring.gpg";
/// Lines of apt's that are shown when it fails.
const LINES_SHOWN: usize = 12;

#[derive(Debug, Clone, Copy)]
pub struct Package {
    pub name: &'static str,
    /// Installed at this version where the machine is Debian 12, from its backports.
    backport: Option<&'static str>,
}

/// Plain Debian 12 has a release of 2022, which is too old.
pub const RUNSC: Package = Package { name: "runsc", backport: Some("0.0~20240729.0-4~bpo12+2") };
pub const MMDEBSTRAP: Package = Package { name: "mmdebstrap", backport: None };
pub const E2FSPROGS: Package = Package { name: "e2fsprogs", backport: None };

impl Package {
    /// As apt-get is asked for it.
    pub fn wanted(&self) -> String {
        match self.backport.filter(|_| is_bookworm()) {
            Some(version) => format!("{}={version}", self.name),
            None => self.name.to_owned(),
        }
    }
}

fn is_bookworm() -> bool {
    let text = std::fs::read_to_string("/etc/os-release").unwrap_or_default();
    text.lines().any(|line| line.trim() == "VERSION_CODENAME=bookworm")
}

pub fn install(packages: &[Package], context: &Context) -> Result<(), CliError> {
    if crate::doctor::find_program("apt-get").is_none() {
        let names: Vec<&str> = packages.iter().map(|package| package.name).collect();
        return Err(CliError::missing(format!(
            "cannot install {}: this machine has no apt-get; install them by hand (runsc from a gVisor release of \
             July 2024 or later, mmdebstrap from your distribution) and run `dormouse setup` again",
            names.join(" and ")
        )));
    }
    let wanted: Vec<String> = packages.iter().map(Package::wanted).collect();
    if packages.iter().any(|package| package.backport.is_some()) && is_bookworm() {
        add_backports(context)?;
    }
    apt(context, "fetching the package lists", &["update", "-q"])?;
    let mut args = vec!["install", "-y", "-q", "--no-install-recommends"];
    args.extend(wanted.iter().map(String::as_str));
    apt(context, &format!("installing {}", wanted.join(" ")), &args)
}

/// Makes bookworm-backports known, on the mirror that the machine uses already.
fn add_backports(context: &Context) -> Result<(), CliError> {
    let texts = sources();
    if texts.iter().any(|(_, text)| has_suite(text, "bookworm-backports")) {
        return Ok(());
    }
    let mirror = texts.iter().find_map(|(_, text)| mirror(text)).ok_or_else(|| {
        CliError::failed(
            "cannot find the Debian mirror that this machine uses in /etc/apt: add the suite bookworm-backports \
             there yourself and run `dormouse setup` again",
        )
    })?;
    super::tell(context, &format!("adding {BACKPORTS}: bookworm-backports has the runsc that is needed"));
    let text = format!(
        "# Added by `dormouse setup`, for runsc.\nTypes: deb\nURIs: {mirror}\nSuites: bookworm-backports\nComponents: main\n\
         Signed-By: {KEYRING}\n"
    );
    std::fs::write(BACKPORTS, text).map_err(|source| CliError::file("write", Path::new(BACKPORTS), source))
}

/// Every list of sources, with its text.
fn sources() -> Vec<(PathBuf, String)> {
    let mut paths = vec![PathBuf::from("/etc/apt/sources.list")];
    if let Ok(entries) = std::fs::read_dir("/etc/apt/sources.list.d") {
        paths.extend(entries.flatten().map(|entry| entry.path()));
    }
    paths.retain(|path| path.extension().is_some_and(|ext| ext == "list" || ext == "sources"));
    paths.sort();
    paths.into_iter().filter_map(|path| Some((path.clone(), std::fs::read_to_string(path).ok()?))).collect()
}

/// The mirror of the suite `bookworm` in one file: `deb URI bookworm …`, or a deb822 stanza.
fn mirror(text: &str) -> Option<String> {
    entries(text)
        .into_iter()
        .find(|(_, suites)| suites.iter().any(|suite| suite == "bookworm"))
        .map(|(uri, _)| uri)
}

fn has_suite(text: &str, wanted: &str) -> bool {
    entries(text).iter().any(|(_, suites)| suites.iter().any(|suite| suite == wanted))
}

/// URI and suites of each entry of binary packages, in either format (sources.list(5)).
fn entries(text: &str) -> Vec<(String, Vec<String>)> {
    let mut found = Vec::new();
    for line in text.lines().filter_map(|line| line.trim().strip_prefix("deb ")) {
        let line = line.trim_start();
        let rest =
            if line.starts_with('[') { line.split_once(']').map_or("", |(_, rest)| rest) } else { line };
        let mut words = rest.split_ascii_whitespace();
        if let (Some(uri), Some(suite)) = (words.next(), words.next()) {
            found.push((uri.to_owned(), vec![suite.to_owned()]));
        }
    }
    for stanza in text.split("\n\n") {
        let field = |name: &str| {
            stanza.lines().filter(|line| !line.starts_with('#')).find_map(|line| {
                let (key, value) = line.split_once(':')?;
                key.eq_ignore_ascii_case(name).then(|| value.trim().to_owned())
            })
        };
        let off = field("Enabled").is_some_and(|value| value == "no");
        let (Some(uris), Some(suites), false) = (field("URIs"), field("Suites"), off) else { continue };
        if let Some(uri) = uris.split_ascii_whitespace().next() {
            found.push((uri.to_owned(), suites.split_ascii_whitespace().map(str::to_owned).collect()));
        }
    }
    found
}

fn apt(context: &Context, message: &str, args: &[&str]) -> Result<(), CliError> {
    super::tell(context, message);
    let waiting = spinner(context, message);
    let output = Command::new("apt-get")
        .args(args)
        .env("DEBIAN_FRONTEND", "noninteractive")
        .stdin(Stdio::null())
        .output()
        .map_err(|error| CliError::failed(format!("cannot run apt-get: {error}")))?;
    waiting.finish_and_clear();
    if output.status.success() {
        return Ok(());
    }
    let text = [output.stdout, output.stderr].concat();
    let text = String::from_utf8_lossy(&text);
    let lines: Vec<&str> = text.lines().collect();
    let last = lines[lines.len().saturating_sub(LINES_SHOWN)..].join("\n  ");
    Err(CliError::failed(format!(
        "`apt-get {}` ended with {}:\n  {last}\nIs the package mirror reachable, is there room on the disk, and does \
         nothing else hold apt's lock?",
        args.join(" "),
        output.status
    )))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_formats_of_sources_are_read() {
        let list = "# deb http://no/debian bookworm main\ndeb [signed-by=/k] http://m/debian bookworm main\n";
        assert_eq!(mirror(list).as_deref(), Some("http://m/debian"));
        let stanzas = "Types: deb\n# a comment: x\nURIs: http://m/debian\nSuites: bookworm bookworm-updates\n\n\
                       Types: deb\nURIs: http://s/debian-security\nSuites: bookworm-security\n";
        assert_eq!(mirror(stanzas).as_deref(), Some("http://m/debian"));
        assert!(has_suite(stanzas, "bookworm-security"));
        assert!(!has_suite(stanzas, "bookworm-backports"));
        assert_eq!(mirror("Types: deb\nEnabled: no\nURIs: http://m/debian\nSuites: bookworm\n"), None);
    }
}
