//! Removing what nobody owns: after a crash, and on demand.

use std::collections::BTreeSet;

use dormouse_types::{RuntimeId, SandboxId};

use super::Inner;
use crate::common::names;
use crate::error::Failure;
use crate::model::Swept;

/// What cannot be removed is logged and left for the next sweep.
pub(super) fn sweep(inner: &Inner, keep: &[(SandboxId, Option<RuntimeId>)]) -> Swept {
    let mut swept = Swept::default();
    let kept: BTreeSet<&RuntimeId> = keep.iter().filter_map(|(_, runtime)| runtime.as_ref()).collect();
    let unowned = |id: &RuntimeId| !kept.contains(id) && !inner.zygotes.owns(id);
    for id in names::<RuntimeId>(&inner.layout.runtimes()) {
        if unowned(&id) && done(inner.runtime(&id).destroy(), id.as_str()) {
            swept.runtimes.push(id.to_string());
        }
    }
    for id in names::<RuntimeId>(&inner.layout.zygotes()) {
        if !inner.zygotes.owns(&id) && done(inner.zygote(&id).destroy(), id.as_str()) {
            swept.runtimes.push(id.to_string());
        }
    }
    let sandboxes: BTreeSet<&SandboxId> = keep.iter().map(|(sandbox, _)| sandbox).collect();
    for sandbox in names::<SandboxId>(&inner.layout.keepers()) {
        if !sandboxes.contains(&sandbox) && done(inner.keeper(&sandbox).destroy(), sandbox.as_str()) {
            swept.keepers.push(sandbox.to_string());
        }
    }
    for name in inner.hierarchies.children(&inner.layout.group_parent()) {
        let Ok(id) = name.parse::<RuntimeId>() else { continue };
        if unowned(&id) && done(inner.runtime(&id).destroy(), &name) {
            swept.leftovers.push(format!("cgroup {name}"));
        }
    }
    swept.leftovers.extend(inner.disks.sweep(&inner.layout).into_iter().map(|name| format!("disk {name}")));
    swept
}

fn done(outcome: Result<(), Failure>, what: &str) -> bool {
    if let Err(error) = &outcome {
        tracing::warn!(what, %error, "a leftover was not removed");
    }
    outcome.is_ok()
}
