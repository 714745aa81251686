//! The lineage as a list of entries: whose parents they are, the caller draws the tree. `select` is pure.

use std::collections::{BTreeMap, BTreeSet};

use dormouse_types::{SandboxId, SnapshotId, Timestamp};

use crate::error::{ErrorCode, NodeError};
use crate::hub::Hub;
use crate::journal::SnapshotRow;
use crate::model::{LineageEntry, LineageKind, SandboxInfo};

/// Snapshots that belong to the story of one sandbox: what it came from, what it and its children left.
fn select(rows: &[SnapshotRow], sandbox: &SandboxId, head: Option<&SnapshotId>) -> BTreeSet<SnapshotId> {
    let parents: BTreeMap<&SnapshotId, Option<&SnapshotId>> =
        rows.iter().map(|row| (&row.id, row.parent.as_ref())).collect();
    let mut chosen: BTreeSet<SnapshotId> =
        rows.iter().filter(|row| row.sandbox == *sandbox).map(|row| row.id.clone()).collect();
    // Descendants of its own: to the fixed point, one generation a round.
    loop {
        let before = chosen.len();
        for row in rows {
            if row.parent.as_ref().is_some_and(|parent| chosen.contains(parent)) {
                chosen.insert(row.id.clone());
            }
        }
        if chosen.len() == before {
            break;
        }
    }
    let mut up: Vec<SnapshotId> = chosen.iter().cloned().chain(head.cloned()).collect();
    while let Some(id) = up.pop() {
        if let Some(Some(parent)) = parents.get(&id)
            && !chosen.contains(*parent)
        {
            up.push((*parent).clone());
        }
        if parents.contains_key(&id) {
            chosen.insert(id);
        }
    }
    chosen
}

/// True when `target` is a state that `sandbox` was in, or came from.
pub fn is_of(
    rows: &[SnapshotRow],
    sandbox: &SandboxId,
    head: Option<&SnapshotId>,
    target: &SnapshotId,
) -> bool {
    if rows.iter().any(|row| row.id == *target && row.sandbox == *sandbox) {
        return true;
    }
    let own = rows.iter().filter(|row| row.sandbox == *sandbox).map(|row| &row.id);
    own.chain(head).any(|start| ancestors(rows, start).contains(target))
}

/// Itself first.
fn ancestors(rows: &[SnapshotRow], start: &SnapshotId) -> Vec<SnapshotId> {
    let mut line = vec![start.clone()];
    // A tree has no longer line than it has rows; damage must not loop.
    for _ in 0..rows.len() {
        let Some(last) = line.last() else { break };
        match rows.iter().find(|row| row.id == *last).and_then(|row| row.parent.clone()) {
            Some(parent) => line.push(parent),
            None => break,
        }
    }
    line
}

pub async fn lineage(hub: &Hub, id: Option<&SandboxId>) -> Result<Vec<LineageEntry>, NodeError> {
    let rows = hub.journal.snapshots().await?;
    let sandboxes: Vec<SandboxInfo> = hub.actors().into_iter().map(|actor| actor.info()).collect();
    let asked = match id {
        None => None,
        Some(id) => {
            let found = sandboxes.iter().find(|info| info.id == *id);
            Some(found.ok_or_else(|| NodeError::no_sandbox(id))?)
        }
    };
    let templates = hub.journal.templates().await?;
    let chosen = match asked {
        None => rows.iter().map(|row| row.id.clone()).collect(),
        Some(info) => select(&rows, &info.id, info.parent.as_ref()),
    };
    let mut entries = Vec::new();
    for row in rows.iter().filter(|row| chosen.contains(&row.id)) {
        let template = templates.iter().find(|template| template.info.snapshot.as_ref() == Some(&row.id));
        let label = match template {
            Some(template) => {
                format!("template {}", template.info.aliases.first().unwrap_or(&template.info.build))
            }
            // One that is being removed at this moment is left out.
            None => match label(hub, row).await {
                Some(label) => label,
                None => continue,
            },
        };
        entries.push(LineageEntry {
            kind: if template.is_some() { LineageKind::Template } else { LineageKind::Snapshot },
            id: row.id.to_string(),
            parent: row.parent.as_ref().filter(|parent| chosen.contains(*parent)).map(ToString::to_string),
            label,
            at: Timestamp::from_millisecond(row.created_ms).unwrap_or_default(),
            current: asked.is_some_and(|info| info.parent.as_ref() == Some(&row.id)),
        });
    }
    for info in sandboxes.iter().filter(|info| belongs(info, asked, &rows, &chosen)) {
        entries.push(LineageEntry {
            kind: LineageKind::Sandbox,
            id: info.id.to_string(),
            parent: info.parent.as_ref().filter(|parent| chosen.contains(*parent)).map(ToString::to_string),
            label: state_word(info),
            at: info.started_at,
            current: asked.is_some_and(|asked| asked.id == info.id),
        });
    }
    entries.sort_by_key(|entry| entry.at);
    Ok(entries)
}

/// Siblings that only share the template do not belong to the story.
fn belongs(
    info: &SandboxInfo,
    asked: Option<&SandboxInfo>,
    rows: &[SnapshotRow],
    chosen: &BTreeSet<SnapshotId>,
) -> bool {
    let Some(asked) = asked else { return true };
    if info.id == asked.id || info.forked_from.as_ref() == Some(&asked.id) {
        return true;
    }
    let head = info.parent.as_ref().and_then(|parent| rows.iter().find(|row| row.id == *parent));
    head.is_some_and(|head| {
        chosen.contains(&head.id) && (head.sandbox == asked.id || head.sandbox == info.id)
    })
}

async fn label(hub: &Hub, row: &SnapshotRow) -> Option<String> {
    let reason = match crate::retention::load(hub, &row.id).await {
        Ok(manifest) => manifest.reason.as_str().to_owned(),
        Err(error) if error.code == ErrorCode::NotFound => return None,
        Err(_) => "unreadable".to_owned(),
    };
    let names = if row.names.is_empty() { String::new() } else { format!(" {}", row.names.join(", ")) };
    Some(format!("{reason}{names} of {}", row.sandbox))
}

fn state_word(info: &SandboxInfo) -> String {
    use crate::model::{State, Tier};
    match &info.state {
        State::Creating => "creating".to_owned(),
        State::Running => "running".to_owned(),
        State::Pausing => "pausing".to_owned(),
        State::Paused { tier: Tier::Frozen } => "frozen".to_owned(),
        State::Paused { .. } => "paused".to_owned(),
        State::Resuming => "resuming".to_owned(),
        State::RollingBack => "rolling back".to_owned(),
        State::Killed => "killed".to_owned(),
        State::Failed { why } => format!("failed: {why}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row(id: &str, parent: Option<&str>, sandbox: &str) -> SnapshotRow {
        SnapshotRow {
            id: id.parse().unwrap(),
            parent: parent.map(|id| id.parse().unwrap()),
            sandbox: sandbox.parse().unwrap(),
            automatic: false,
            owner: None,
            created_ms: 0,
            names: Vec::new(),
        }
    }

    fn rows() -> Vec<SnapshotRow> {
        vec![
            row("t", None, "build"),
            row("a", Some("t"), "s1"),
            row("b", Some("a"), "s1"),
            row("c", Some("b"), "s2"),
            row("x", Some("t"), "s9"),
        ]
    }

    fn check(sandbox: &str, head: Option<&str>, expected: &[&str]) {
        let head = head.map(|id| id.parse().unwrap());
        let chosen = select(&rows(), &sandbox.parse().unwrap(), head.as_ref());
        let chosen: Vec<&str> = chosen.iter().map(SnapshotId::as_str).collect();
        assert_eq!(chosen, expected, "of {sandbox}");
    }

    #[test]
    fn a_story_has_ancestors_and_descendants_and_no_strangers() {
        check("s1", Some("b"), &["a", "b", "c", "t"]);
        check("s2", Some("c"), &["a", "b", "c", "t"]);
        check("s3", Some("a"), &["a", "t"]);
        check("s4", None, &[]);
    }

    #[test]
    fn a_rollback_stays_in_the_lineage() {
        let of = |sandbox: &str, head: &str, target: &str| {
            is_of(&rows(), &sandbox.parse().unwrap(), Some(&head.parse().unwrap()), &target.parse().unwrap())
        };
        assert!(of("s1", "a", "b"), "forward to one of its own");
        assert!(of("s1", "b", "t"), "back to the template");
        assert!(of("s2", "c", "a"), "back to the source's");
        assert!(!of("s1", "b", "x"), "a stranger's");
        assert!(!of("s1", "b", "c"), "a child's");
    }
}
