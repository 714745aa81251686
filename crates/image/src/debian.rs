//! A Debian root file system from packages, by mmdebstrap.
//!
//! Mirrors and keys are the host's own: what apt trusts here, and through which proxy, is what the image
//! is made of. The same suite and packages give the same image; a second request does nothing.

use std::io::{self, BufRead, BufReader};
use std::path::Path;
use std::process::{Command, Stdio};

use crate::error::{DebianError, ImportError};
use crate::prepare;
use crate::record::{Image, ImageConfig, Source};
use crate::root::{ROOT_OWNER, Root};
use crate::{Draft, Images, Progress};

/// Counts the changes of what is done below: another number, another image.
const RECIPE: u32 = 1;
const PACKAGES_MAX: usize = 1000;
const OUTPUT_LINES_MAX: usize = 20;

/// What the image is to hold.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DebianSpec {
    /// `bookworm`, `trixie`, …
    pub suite: String,
    /// Beside the essential ones and apt.
    pub packages: Vec<String>,
}

/// What the template `base` has: enough to clone, build and run things without further ado.
#[must_use]
pub fn base_packages() -> Vec<String> {
    let names = "bash ca-certificates coreutils curl git iproute2 less nodejs npm procps python3 python3-pip \
                 python3-venv sudo unzip xz-utils";
    names.split_whitespace().map(str::to_owned).collect()
}

impl DebianSpec {
    /// Suite and packages of `debian:SUITE`, the rest by name.
    pub fn new(suite: &str, packages: &[String]) -> Result<Self, DebianError> {
        let word = |given: &str, extra: &[u8]| {
            given.len() >= 2
                && given.len() <= 100
                && given.as_bytes()[0].is_ascii_alphanumeric()
                && given
                    .bytes()
                    .all(|it| it.is_ascii_lowercase() || it.is_ascii_digit() || extra.contains(&it))
        };
        let invalid =
            |what, given: &str| DebianError::Invalid { what, given: given.chars().take(100).collect() };
        if !word(suite, b"-") {
            return Err(invalid("the name of a Debian suite, for example bookworm", suite));
        }
        if packages.len() > PACKAGES_MAX {
            return Err(invalid("a list of at most 1000 packages", &packages.len().to_string()));
        }
        if let Some(bad) = packages.iter().find(|name| !word(name, b"+-.")) {
            return Err(invalid("the name of a Debian package", bad));
        }
        let mut packages = packages.to_vec();
        packages.sort();
        packages.dedup();
        Ok(Self { suite: suite.to_owned(), packages })
    }

    /// The name its image has, and the digest of the inputs.
    #[must_use]
    pub fn image_id(&self) -> (String, String) {
        let mut hasher = blake3::Hasher::new();
        for part in [RECIPE.to_string().as_str(), &self.suite]
            .into_iter()
            .chain(self.packages.iter().map(String::as_str))
        {
            hasher.update(part.as_bytes()).update(b"\n");
        }
        let digest = hasher.finalize().to_hex();
        (format!("debian-{}-{}", self.suite, &digest[..16]), digest.to_string())
    }
}

impl Images {
    /// Builds the image, or finds the one that was built before.
    pub fn debian(&self, spec: &DebianSpec, progress: Progress<'_>) -> Result<Image, DebianError> {
        // The fields are public: whatever they hold becomes arguments of a command.
        let spec = &DebianSpec::new(&spec.suite, &spec.packages)?;
        let (id, digest) = spec.image_id();
        if let Ok(image) = self.load(&id) {
            return Ok(image);
        }
        if !rustix::process::geteuid().is_root() {
            return Err(DebianError::NotRoot);
        }
        let import = DebianError::Import;
        let draft = self.draft().map_err(|source| import(ImportError::Draft { source }))?;
        bootstrap(spec, &draft, progress)?;
        progress("preparing the root file system");
        let root = draft.root().map_err(|source| import(ImportError::Draft { source }))?;
        finish(&root).map_err(|(path, source)| {
            import(ImportError::Prepare { action: "finish", path: path.to_owned(), source })
        })?;
        prepare::prepare(&root).map_err(import)?;
        let config =
            ImageConfig { env: [("LANG".to_owned(), "C.UTF-8".to_owned())].into(), ..ImageConfig::default() };
        let source = Source::Debian { suite: spec.suite.clone(), packages: spec.packages.clone() };
        let image = Image::new(id, source, digest, config);
        self.publish(draft, image).map_err(|source| import(ImportError::Publish(source)))
    }
}

fn bootstrap(spec: &DebianSpec, draft: &Draft, progress: Progress<'_>) -> Result<(), DebianError> {
    let mut command = Command::new("mmdebstrap");
    // `apt` and not `minbase`: priorities "required" and "important" are asked for by name.
    command.args(["--mode=root", "--variant=apt", "--format=directory"]);
    for option in ["Acquire::Languages \"none\"", "APT::Install-Recommends \"false\""] {
        command.arg(format!("--aptopt={option}"));
    }
    for option in proxy_options() {
        command.arg(format!("--aptopt={option}"));
    }
    for option in DPKG_OPTIONS {
        command.arg(format!("--dpkgopt={option}"));
    }
    if !spec.packages.is_empty() {
        command.arg(format!("--include={}", spec.packages.join(",")));
    }
    command.arg(&spec.suite).arg(draft.rootfs()).args(host_mirrors(&spec.suite));
    command.env("LC_ALL", "C.UTF-8").env("DEBIAN_FRONTEND", "noninteractive").env("TMPDIR", &draft.dir);
    command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::piped());
    let mut child = command.spawn().map_err(|source| match source.kind() {
        io::ErrorKind::NotFound => DebianError::Missing {
            what: "mmdebstrap".to_owned(),
            mend: "install it with `apt-get install mmdebstrap`, or run `dormouse setup`".to_owned(),
        },
        _ => DebianError::Spawn { source },
    })?;
    let mut last = std::collections::VecDeque::new();
    if let Some(stderr) = child.stderr.take() {
        for line in BufReader::new(stderr).split(b'\n').map_while(Result::ok) {
            let line = String::from_utf8_lossy(&line).trim_end().chars().take(500).collect::<String>();
            if let Some(step) = line.strip_prefix("I: ") {
                progress(step);
            }
            if last.len() == OUTPUT_LINES_MAX {
                last.pop_front();
            }
            last.push_back(line);
        }
    }
    let status = child.wait().map_err(|source| DebianError::Spawn { source })?;
    if status.success() {
        return Ok(());
    }
    let output = Vec::from(last).join("\n");
    Err(DebianError::Failed { status: status.to_string(), output })
}

/// Manuals, translations: nobody reads them in a sandbox. Licences stay. Nothing is synced singly: the
/// whole tree is, before it is published.
const DPKG_OPTIONS: &[&str] = &[
    "path-exclude=/usr/share/man/*",
    "path-exclude=/usr/share/info/*",
    "path-exclude=/usr/share/locale/*",
    "path-exclude=/usr/share/doc/*",
    "path-include=/usr/share/doc/*/copyright",
    "force-unsafe-io",
];

/// What Debian's own packages leave in a way that does not suit a sandbox.
fn finish(root: &Root) -> Result<(), (&'static str, io::Error)> {
    let at = |path: &'static str| move |source| (path, source);
    // pip refuses to install beside apt's packages; in a sandbox that is what it is for.
    for name in root.names("/usr/lib").map_err(at("/usr/lib"))? {
        if let Some(name) = name.to_str().filter(|name| name.starts_with("python3")) {
            let path = format!("/usr/lib/{name}/EXTERNALLY-MANAGED");
            root.remove(&path).map_err(at("/usr/lib/python3*/EXTERNALLY-MANAGED"))?;
        }
    }
    for path in LEFTOVERS {
        root.remove(path).map_err(at(path))?;
    }
    for (path, mode) in
        [("/var/log", 0o755), ("/var/cache/apt/archives/partial", 0o755), ("/var/lib/apt/lists", 0o755)]
    {
        root.folder(path, mode, ROOT_OWNER).map_err(at(path))?;
    }
    // In place of mmdebstrap's, which names this host's proxies.
    let apt = "Acquire::Languages \"none\";\nAPT::Sandbox::User \"root\";\nDpkg::Use-Pty \"0\";\n";
    for (path, content) in
        [("/etc/apt/apt.conf.d/90dormouse", apt), ("/etc/default/locale", "LANG=C.UTF-8\n")]
    {
        root.write(path, content.as_bytes(), 0o644, ROOT_OWNER).map_err(at(path))?;
    }
    Ok(())
}

const LEFTOVERS: &[&str] = &[
    "/etc/apt/apt.conf.d/99mmdebstrap",
    "/var/lib/apt/lists",
    "/var/cache/apt",
    "/var/cache/debconf/templates.dat-old",
    "/var/cache/debconf/config.dat-old",
    "/var/log",
    "/var/lib/dbus/machine-id",
];

/// Proxies and certificates that this host's apt is told to use.
fn proxy_options() -> Vec<String> {
    let keys = ["Acquire::http::Proxy", "Acquire::https::Proxy", "Acquire::https::CaInfo"];
    let Ok(output) = Command::new("apt-config").arg("dump").stdin(Stdio::null()).output() else {
        return Vec::new();
    };
    let text = String::from_utf8_lossy(&output.stdout);
    let wanted = |line: &&str| {
        keys.iter().any(|key| line.split(' ').next() == Some(*key)) && !line.ends_with(" \"\";")
    };
    text.lines().filter(wanted).map(|line| line.trim_end_matches(';').to_owned()).collect()
}

/// This host's own sources for the suite; none: mmdebstrap's default.
fn host_mirrors(suite: &str) -> Vec<String> {
    let mut files = vec![std::path::PathBuf::from("/etc/apt/sources.list")];
    if let Ok(entries) = std::fs::read_dir("/etc/apt/sources.list.d") {
        files.extend(entries.flatten().map(|entry| entry.path()));
    }
    files.sort();
    let mut mirrors: Vec<String> = files.iter().flat_map(|path| mirrors_of(path, suite)).collect();
    mirrors.dedup();
    // Security updates alone are no system.
    if mirrors.iter().any(|line| line.contains(&format!(" {suite} "))) { mirrors } else { Vec::new() }
}

fn mirrors_of(path: &Path, suite: &str) -> Vec<String> {
    let Ok(text) = std::fs::read_to_string(path) else { return Vec::new() };
    match path.extension().and_then(|it| it.to_str()) {
        Some("sources") => text.split("\n\n").flat_map(|stanza| deb822_mirrors(stanza, suite)).collect(),
        Some("list") => text.lines().filter_map(|line| one_line_mirror(line, suite)).collect(),
        _ => Vec::new(),
    }
}

fn suite_fits(given: &str, suite: &str) -> bool {
    given.strip_prefix(suite).is_some_and(|rest| ["", "-updates", "-security", "/updates"].contains(&rest))
}

fn source_line(uri: &str, suite: &str, components: &str, signed_by: Option<&str>) -> Option<String> {
    let web = uri.starts_with("http://") || uri.starts_with("https://");
    if !web || !components.split_whitespace().any(|it| it == "main") {
        return None;
    }
    // Debian's own keys are trusted inside as well; another file of keys would not be there.
    let keys = signed_by.filter(|path| path.starts_with('/') && !path.contains("/debian-archive-"));
    let options = keys.map_or(String::new(), |path| format!("[signed-by={path}] "));
    Some(format!("deb {options}{uri} {suite} {components}"))
}

fn deb822_mirrors(stanza: &str, suite: &str) -> Vec<String> {
    let lines = stanza.lines().filter(|line| !line.starts_with('#'));
    let field = |name: &str| {
        lines.clone().find_map(|line| {
            let (key, value) = line.split_once(':')?;
            key.eq_ignore_ascii_case(name).then(|| value.trim())
        })
    };
    let (Some(types), Some(uris), Some(suites)) = (field("Types"), field("URIs"), field("Suites")) else {
        return Vec::new();
    };
    if !types.split_whitespace().any(|it| it == "deb") || field("Enabled").is_some_and(|it| it == "no") {
        return Vec::new();
    }
    let components = field("Components").unwrap_or_default();
    let mut found = Vec::new();
    for uri in uris.split_whitespace() {
        for name in suites.split_whitespace().filter(|name| suite_fits(name, suite)) {
            found.extend(source_line(uri, name, components, field("Signed-By")));
        }
    }
    found
}

fn one_line_mirror(line: &str, suite: &str) -> Option<String> {
    let rest = line.split('#').next()?.trim().strip_prefix("deb ")?.trim_start();
    let (options, rest) = match rest.strip_prefix('[') {
        Some(rest) => rest.split_once(']')?,
        None => ("", rest),
    };
    let signed_by = options.split_whitespace().find_map(|option| option.strip_prefix("signed-by="));
    let mut words = rest.split_whitespace();
    let (uri, name) = (words.next()?, words.next()?);
    let components = words.collect::<Vec<_>>().join(" ");
    suite_fits(name, suite).then(|| source_line(uri, name, &components, signed_by))?
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_that_are_no_packages_are_refused() {
        for bad in ["", "a", "-x", "a b", "../x", "A", "x;y", "--include=y", "x=1"] {
            assert!(DebianSpec::new("bookworm", &[bad.to_owned()]).is_err(), "{bad:?}");
            assert!(DebianSpec::new(bad, &[]).is_err(), "{bad:?}");
        }
        let good = ["g++".to_owned(), "python3.11".to_owned(), "libc6-dev".to_owned()];
        assert!(DebianSpec::new("bookworm-backports", &good).is_ok());
    }

    #[test]
    fn one_image_whatever_the_order() {
        let spec = |names: &[&str]| {
            let names: Vec<String> = names.iter().map(|&name| name.to_owned()).collect();
            DebianSpec::new("bookworm", &names).unwrap().image_id()
        };
        assert_eq!(spec(&["git", "curl", "git"]), spec(&["curl", "git"]));
        assert_ne!(spec(&["git"]), spec(&["curl"]));
        crate::check_name(&spec(&["git"]).0).unwrap();
    }

    #[test]
    fn sources_of_both_formats() {
        let stanza = "Types: deb\n# comment\nURIs: http://mirror.example/debian\nSuites: bookworm bookworm-updates \
                      bookworm-backports\nComponents: main contrib\nSigned-By: /usr/share/keyrings/debian-archive-keyring.gpg";
        let expected = [
            "deb http://mirror.example/debian bookworm main contrib",
            "deb http://mirror.example/debian bookworm-updates main contrib",
        ];
        assert_eq!(deb822_mirrors(stanza, "bookworm"), expected);
        assert_eq!(deb822_mirrors("Types: deb-src\nURIs: http://x\nSuites: bookworm", "bookworm"), [""; 0]);
        let line = |text| one_line_mirror(text, "bookworm");
        assert_eq!(
            line("deb [arch=amd64 signed-by=/k.gpg] http://m.example/d bookworm-security main # x")
                .as_deref(),
            Some("deb [signed-by=/k.gpg] http://m.example/d bookworm-security main")
        );
        for other in [
            "deb http://m.example/d bookworm stable",
            "deb-src http://m/d bookworm main",
            "# deb http://m bookworm main",
            "",
        ] {
            assert_eq!(line(other), None, "{other}");
        }
    }
}
