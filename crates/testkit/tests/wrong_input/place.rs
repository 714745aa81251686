//! A clone of the prepared data folder: what a test breaks is its own.

use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

use dormouse_testkit::daemon::Daemon;
use dormouse_testkit::host;

fn prepared(variable: &str) -> PathBuf {
    let Some(path) = std::env::var_os(variable) else {
        panic!("{variable} is not set: `cargo xtask test` sets it and prepares what it names");
    };
    PathBuf::from(path)
}

pub fn binary() -> PathBuf {
    prepared("DORMOUSE_TEST_BINARY")
}

/// Removed when dropped, with all processes that name it.
pub struct Place {
    pub dir: PathBuf,
}

impl Place {
    pub fn new(name: &str) -> Self {
        let from = prepared("DORMOUSE_TEST_DATA").canonicalize().unwrap();
        let dir = from.parent().unwrap().join(format!("wrong-{name}-{}", std::process::id()));
        std::fs::create_dir_all(&dir).unwrap();
        let place = Self { dir };
        // Root file systems and snapshots never change: links do.
        let script = "cp -al \"$1/images\" \"$1/snapshots\" \"$2/\" && cp -a \"$1/agent\" \"$2/\" && cp -a \"$1\"/node.db* \"$2/\"";
        let copied =
            Command::new("bash").args(["-euc", script, "-"]).arg(&from).arg(&place.dir).output().unwrap();
        assert!(copied.status.success(), "{}", text(&copied.stderr));
        place
    }

    pub async fn daemon(&self) -> Daemon {
        Daemon::start(&binary(), &self.dir, &[]).await.unwrap()
    }

    pub fn log(&self) -> String {
        std::fs::read_to_string(self.dir.join("testkit-daemon.log")).unwrap_or_default()
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        for _ in 0..500 {
            let left = host::holdings(&self.dir, 0).unwrap_or_default();
            // What is frozen dies once it is thawed; a group goes once it is empty. The deepest first.
            for group in left.cgroups.iter().rev() {
                for (file, thawed) in [("freezer.state", "THAWED"), ("cgroup.freeze", "0")] {
                    let file = Path::new(group).join(file);
                    if file.exists() {
                        drop(std::fs::write(file, thawed));
                    }
                }
                drop(std::fs::remove_dir(group));
            }
            let pids: Vec<&str> = left.processes.iter().filter_map(|line| line.split(' ').next()).collect();
            if pids.is_empty() && left.cgroups.is_empty() {
                break;
            }
            drop(Command::new("kill").arg("-9").args(pids).stderr(Stdio::null()).status());
            std::thread::sleep(std::time::Duration::from_millis(10));
        }
        if let Err(error) = std::fs::remove_dir_all(&self.dir) {
            eprintln!("cannot remove {}: {error}", self.dir.display());
        }
    }
}

/// Runs it to its end on a data folder.
pub fn dormouse(dir: &Path, arguments: &[&str], change: impl FnOnce(&mut Command)) -> Output {
    let mut command = Command::new(binary());
    command.args(arguments).env("DORMOUSE_DATA_DIR", dir).stdin(Stdio::null());
    for variable in ["DORMOUSE_URL", "DORMOUSE_API_KEY", "E2B_API_KEY", "E2B_API_URL"] {
        command.env_remove(variable);
    }
    change(&mut command);
    command.output().unwrap()
}

pub fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

/// It failed, by itself, and its error has all these words.
pub fn assert_refused(output: &Output, words: &[&str]) {
    let said = text(&output.stderr);
    assert!(output.status.code().is_some_and(|code| code != 0), "{}: {said}", output.status);
    assert!(!said.contains("panicked"), "{said}");
    for word in words {
        assert!(said.contains(word), "{word:?} is not said: {said}");
    }
}
