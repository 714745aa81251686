//! What the commands need of the machine: named, with the reason, before anything is installed.

use std::path::{Path, PathBuf};
use std::process::Stdio;

use anyhow::bail;

use crate::run;

/// One thing that is needed beside what `dormouse setup` installs.
pub struct Need {
    pub what: &'static str,
    pub why: &'static str,
    /// Succeeds when it is there.
    pub probe: &'static [&'static str],
    /// Installs it.
    pub mend: &'static [&'static str],
}

const TEST_NEEDS: &[Need] = &[
    Need {
        what: "python3-venv",
        why: "the tests with the unmodified E2B SDK run in a virtual environment of their own",
        probe: &["python3", "-c", "import venv, ensurepip"],
        mend: &["apt-get", "install", "-y", "-q", "--no-install-recommends", "python3-venv"],
    },
    Need {
        what: "rustfmt",
        why: "formatting is checked",
        probe: &["cargo", "fmt", "--version"],
        mend: &["rustup", "component", "add", "rustfmt"],
    },
    Need {
        what: "clippy",
        why: "lints are checked, warnings denied",
        probe: &["cargo", "clippy", "--version"],
        mend: &["rustup", "component", "add", "clippy"],
    },
];

fn there(probe: &[&str]) -> bool {
    run::command(probe[0], &probe[1..])
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .status()
        .is_ok_and(|status| status.success())
}

/// Whether `cargo nextest` can be called; plain `cargo test` does where it cannot.
pub fn nextest() -> bool {
    there(&["cargo", "nextest", "--version"])
}

/// What the tests need beside the set-up. True: all is there. Without `install` it only tells.
pub fn test_needs(install: bool) -> anyhow::Result<bool> {
    meet(TEST_NEEDS, install)
}

/// True: all of `needs` are met. Without `install` it only tells.
pub fn meet(needs: &[Need], install: bool) -> anyhow::Result<bool> {
    let missing: Vec<&Need> = needs.iter().filter(|need| !there(need.probe)).collect();
    for need in &missing {
        println!("missing: {} ({}); `{}` installs it", need.what, need.why, need.mend.join(" "));
    }
    if !install {
        return Ok(missing.is_empty());
    }
    for need in missing {
        println!("installing {}: {}", need.what, need.why);
        let once = run::run(&mut run::command(need.mend[0], &need.mend[1..]));
        if once.is_err() && need.mend.iter().any(|word| word.contains("apt-get")) {
            // A fresh machine has no package lists yet.
            run::run(&mut run::command("apt-get", &["update", "-q"]))?;
            run::run(&mut run::command(need.mend[0], &need.mend[1..]))?;
        } else {
            once?;
        }
        if !there(need.probe) {
            bail!("{} was installed and still does not answer: `{}` fails", need.what, need.probe.join(" "));
        }
    }
    Ok(true)
}

/// The data folder that demo, tests and benches share, so that the default template is built once.
pub fn data_dir(given: Option<&Path>) -> PathBuf {
    given.map_or_else(|| run::target().join("xtask").join("data"), Path::to_owned)
}

/// Calls `dormouse setup`; without `install` it only says what is missing. True: nothing is.
pub fn setup(binary: &Path, data_dir: &Path, install: bool) -> anyhow::Result<bool> {
    let data = data_dir.to_string_lossy();
    let mut args = vec!["setup", "--data-dir", &data];
    if !install {
        args.push("--no-install");
        return Ok(run::command(binary, &args).status()?.success());
    }
    run::run(&mut run::command(binary, &args))?;
    Ok(true)
}
