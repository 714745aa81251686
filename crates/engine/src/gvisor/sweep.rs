//! Removing what nobody owns: after a crash, and on demand.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::time::Duration;

use dormouse_types::{RuntimeId, SandboxId};

use super::Inner;
use crate::common::names;
use crate::error::Failure;
use crate::model::Swept;

/// A younger file may belong to a runtime that is being made.
const NAMED_FOR_MAX: Duration = Duration::from_secs(60);

/// What cannot be removed is logged and left for the next sweep.
pub(super) fn sweep(inner: &Inner, keep: &[(SandboxId, Option<RuntimeId>)]) -> Swept {
    let mut swept = Swept::default();
    let kept_runtimes: BTreeSet<&RuntimeId> =
        keep.iter().filter_map(|(_, runtime)| runtime.as_ref()).collect();
    for runtime in inner.layout.links() {
        if !kept_runtimes.contains(&runtime) && done(inner.end(&runtime), runtime.as_str()) {
            swept.runtimes.push(runtime.to_string());
        }
    }
    let linked: BTreeSet<RuntimeId> =
        inner.layout.links().iter().filter_map(|runtime| inner.layout.linked(runtime)).collect();
    let unowned = |id: &RuntimeId| !linked.contains(id) && !inner.pool.owns(id);
    for id in names::<RuntimeId>(&inner.layout.containers()) {
        if unowned(&id) && done(inner.container(&id).destroy(), id.as_str()) {
            swept.runtimes.push(id.to_string());
        }
    }
    let kept: BTreeSet<&SandboxId> = keep.iter().map(|(sandbox, _)| sandbox).collect();
    for sandbox in names::<SandboxId>(&inner.layout.keepers()) {
        if !kept.contains(&sandbox) && done(inner.keeper(&sandbox).destroy(), sandbox.as_str()) {
            swept.keepers.push(sandbox.to_string());
        }
    }
    for name in inner.hierarchies.children(&inner.layout.group_parent()) {
        let Ok(id) = name.parse::<RuntimeId>() else { continue };
        if unowned(&id) && done(inner.container(&id).destroy(), &name) {
            swept.leftovers.push(format!("cgroup {name}"));
        }
    }
    swept.leftovers.extend(leftover_files(&inner.layout.files()));
    swept
}

fn done(outcome: Result<(), Failure>, what: &str) -> bool {
    if let Err(error) = &outcome {
        tracing::warn!(what, %error, "a leftover was not removed");
    }
    outcome.is_ok()
}

/// runsc unlinks its files at once; one that still has a name was left by a crash in between.
fn leftover_files(dir: &Path) -> Vec<String> {
    let Ok(entries) = std::fs::read_dir(dir) else { return Vec::new() };
    let is_old = |path: &PathBuf| {
        let made = path.metadata().and_then(|metadata| metadata.modified());
        made.is_ok_and(|made| made.elapsed().is_ok_and(|age| age > NAMED_FOR_MAX))
    };
    let paths = entries.flatten().map(|entry| entry.path());
    paths
        .filter(is_old)
        .filter(|path| std::fs::remove_file(path).is_ok())
        .map(|path| format!("file {}", path.display()))
        .collect()
}
