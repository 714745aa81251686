//! `cargo xtask sdk`: the unmodified E2B SDK, of two versions, against a live daemon.

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, bail};

use crate::run::Counts;
use crate::server::Server;
use crate::{run, tools};

/// The versions of PyPI's `e2b` that must work: current and the oldest that is still in use.
const VERSIONS: &[&str] = &["2.63.0", "2.45.1"];
/// What the tests themselves need, pinned.
const REQUIREMENTS: &str = "tests/sdk/requirements.txt";

#[derive(clap::Args)]
pub struct Args {
    /// Only this version of the SDK
    #[arg(long)]
    version: Option<String>,
    /// The data folder (default: one below the target folder)
    #[arg(long)]
    data_dir: Option<PathBuf>,
    /// Given to pytest, after `--`
    #[arg(last = true)]
    pytest: Vec<String>,
}

pub fn run(args: &Args) -> anyhow::Result<()> {
    let binary = run::build_dormouse(false)?;
    let data_dir = tools::data_dir(args.data_dir.as_deref());
    tools::test_needs(true)?;
    tools::setup(&binary, &data_dir, true)?;
    let versions: Vec<&str> = args.version.as_deref().map_or_else(|| VERSIONS.to_vec(), |one| vec![one]);
    let counts = all(&binary, &data_dir, &versions, &args.pytest)?;
    if counts.failed > 0 {
        bail!("{} of the SDK's tests failed", counts.failed);
    }
    Ok(())
}

pub fn every_version() -> &'static [&'static str] {
    VERSIONS
}

/// Runs `tests/sdk` once per version against one daemon of its own.
pub fn all(binary: &Path, data_dir: &Path, versions: &[&str], pytest: &[String]) -> anyhow::Result<Counts> {
    let folder = run::root().join("tests").join("sdk");
    if !folder.is_dir() {
        bail!("the SDK's tests are not there: {} is missing", folder.display());
    }
    let mut server = Server::start(binary, data_dir)?;
    let mut counts = Counts::default();
    for version in versions {
        let python = environment(version)?;
        println!("sdk: e2b {version}");
        if counts != Counts::default() {
            // The last of the tests ended it.
            server.replace()?;
        }
        counts.add(run::count(&mut self::pytest(&python, &server, pytest), is_summary)?);
    }
    server.stop()?;
    Ok(counts)
}

/// The environment's interpreter; where that is not (it was made on another machine), this machine's own with the
/// environment's packages.
pub fn interpreter(python: &Path) -> anyhow::Result<(PathBuf, Option<PathBuf>)> {
    if python.exists() {
        return Ok((python.to_owned(), None));
    }
    let folder = environment_of(python).context("the environment has no folder")?.join("lib");
    let version = std::fs::read_dir(&folder)?.next().context("the environment has no packages")??;
    Ok((PathBuf::from("python3"), Some(version.path().join("site-packages"))))
}

/// The tests against this daemon, ready to be run.
pub fn pytest(python: &Path, server: &Server, more: &[String]) -> Command {
    let mut command = run::command(python, &["-m", "pytest", "-q", "--color=no", "tests/sdk"]);
    command
        .args(more)
        .env("E2B_API_URL", format!("http://{}", server.listen))
        .env("E2B_SANDBOX_URL", format!("http://{}", server.listen))
        .env("E2B_API_KEY", &server.key)
        .env("DORMOUSE_URL", format!("http://{}", server.listen))
        .env("DORMOUSE_API_KEY", &server.key)
        .env("DORMOUSE_PID", server.pid().unwrap_or_default().to_string())
        .env("DORMOUSE_BIN", &server.binary)
        .env("DORMOUSE_DATA_DIR", &server.data_dir)
        // Nothing of the machine's own settings may reach the SDK.
        .env_remove("E2B_DOMAIN")
        .env_remove("E2B_DEBUG");
    command
}

/// The folder of an environment, by its Python.
pub fn environment_of(python: &Path) -> Option<PathBuf> {
    python.parent()?.parent().map(Path::to_owned)
}

/// A virtual environment with this version of the SDK; made once.
pub fn environment(version: &str) -> anyhow::Result<PathBuf> {
    let folder = run::target().join("xtask").join(format!("e2b-{version}"));
    let python = folder.join("bin").join("python");
    let stamp = folder.join("ready");
    let path = run::root().join(REQUIREMENTS);
    let requirements =
        std::fs::read_to_string(&path).with_context(|| format!("cannot read {}", path.display()))?;
    let wanted = format!("{version}\n{requirements}");
    if std::fs::read_to_string(&stamp).is_ok_and(|text| text == wanted) {
        return Ok(python);
    }
    println!("installing e2b {version} and pytest into {} (for the SDK's tests)", folder.display());
    let path = folder.to_string_lossy();
    run::run(&mut run::command("python3", &["-m", "venv", "--clear", &path]))?;
    let pin = format!("e2b=={version}");
    let args = ["-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-input"];
    run::run(run::command(&python, &args).args([pin.as_str(), "-r", REQUIREMENTS]))?;
    std::fs::write(&stamp, wanted).with_context(|| format!("cannot write {}", stamp.display()))?;
    Ok(python)
}

/// `49 passed, 1 failed in 46.63s`, with or without a frame of `=`.
fn is_summary(line: &str) -> bool {
    let line = line.trim_matches(|c: char| c == '=' || c.is_whitespace());
    line.starts_with(|c: char| c.is_ascii_digit()) && line.contains(" in ")
}
