//! Wake hooks: what the image wants to do when its sandbox has become another one.
//!
//! Executables in `/etc/dormouse/wake.d`, by name, one after the other, as root, with a time limit.

use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use dormouse_sys::child::{Setup, prepare};
use rustix::process::Signal;

use crate::clock::sleep_awake;
use crate::process::{Exit, Reaper};

const FOLDER: &str = "etc/dormouse/wake.d";
const HOOKS_MAX: usize = 32;
/// Each; a wake answers within a minute even if all of the first ones hang.
const HOOK_TIME_MAX: Duration = Duration::from_secs(10);
const ALL_TIME_MAX: Duration = Duration::from_secs(40);

/// Runs all; what failed is a note each.
pub async fn run(reaper: &Reaper, root: &Path, variables: &[(&str, String)], notes: &mut Vec<String>) {
    let hooks = find(&root.join(FOLDER));
    if hooks.len() > HOOKS_MAX {
        notes.push(format!("only {HOOKS_MAX} of {} wake hooks were run", hooks.len()));
    }
    let all = async {
        for hook in hooks.iter().take(HOOKS_MAX) {
            if let Err(why) = run_one(reaper, hook, variables).await {
                notes.push(format!("the wake hook {} {why}", hook.display()));
            }
        }
    };
    let overdue = tokio::select! {
        () = all => false,
        () = sleep_awake(ALL_TIME_MAX) => true,
    };
    if overdue {
        notes.push(format!("the wake hooks took more than {ALL_TIME_MAX:?}: the rest was left out"));
    }
}

fn find(folder: &Path) -> Vec<PathBuf> {
    let Ok(entries) = std::fs::read_dir(folder) else { return Vec::new() };
    let mut hooks: Vec<PathBuf> = entries
        .flatten()
        .map(|entry| entry.path())
        .filter(|path| {
            std::fs::metadata(path).is_ok_and(|meta| meta.is_file() && meta.permissions().mode() & 0o111 != 0)
        })
        .collect();
    hooks.sort();
    hooks
}

async fn run_one(reaper: &Reaper, hook: &Path, variables: &[(&str, String)]) -> Result<(), String> {
    let mut command = Command::new(hook);
    command.stdin(Stdio::null()).stdout(Stdio::null());
    command.envs(variables.iter().map(|(name, value)| (*name, value.as_str())));
    prepare(
        &mut command,
        Setup { cwd: Some(c"/".into()), session: true, umask: Some(0o022), ..Setup::default() },
    );
    let mut started = reaper.spawn(&mut command).map_err(|why| format!("cannot be started: {why}"))?;
    let group = KillOnDrop { reaper, pid: started.pid };
    tokio::select! {
        exit = &mut started.exit => {
            // What it left running in the background is meant to stay.
            std::mem::forget(group);
            match exit {
                Ok(Exit::Code(0)) => Ok(()),
                Ok(Exit::Code(code)) => Err(format!("failed with exit code {code}")),
                Ok(Exit::Signal(signal)) => Err(format!("was ended by signal {signal}")),
                Err(_) => Err("was lost".to_owned()),
            }
        }
        () = sleep_awake(HOOK_TIME_MAX) => Err(format!("was killed after {HOOK_TIME_MAX:?}")),
    }
}

struct KillOnDrop<'a> {
    reaper: &'a Reaper,
    pid: u32,
}

impl Drop for KillOnDrop<'_> {
    fn drop(&mut self) {
        // Nothing left is what was wanted.
        let _ = self.reaper.signal_group(self.pid, Signal::KILL);
    }
}
