//! The lineage as a tree: which snapshot and which sandbox came from which.

use std::collections::{BTreeMap, BTreeSet};

use dormouse_api::client::encode;
use dormouse_api::dormouse::{Lineage, LineageKind};

use super::context::Context;
use super::error::{CliError, ExitStatus};
use super::output::{relative, show};

pub async fn run(sandbox: Option<&str>, context: &Context) -> Result<ExitStatus, CliError> {
    let path = sandbox.map_or_else(
        || "/dormouse/v1/lineage".to_owned(),
        |id| format!("/dormouse/v1/sandboxes/{}/lineage", encode(id)),
    );
    let entries: Vec<Lineage> = context.client()?.get("read the lineage", &path).await?;
    show(context, &entries, |entries| {
        if entries.is_empty() { "nothing has a history yet".to_owned() } else { tree(entries, &age) }
    })
}

fn age(entry: &Lineage) -> String {
    relative(entry.at)
}

/// Draws the entries below their parents; an entry whose parent is not among them is a root.
fn tree(entries: &[Lineage], age: &dyn Fn(&Lineage) -> String) -> String {
    let known: BTreeSet<&str> = entries.iter().map(|entry| entry.id.as_str()).collect();
    let mut children: BTreeMap<Option<&str>, Vec<&Lineage>> = BTreeMap::new();
    for entry in entries {
        // One that names itself as its parent would never be drawn.
        let parent = entry.parent.as_deref().filter(|id| known.contains(id) && *id != entry.id);
        children.entry(parent).or_default().push(entry);
    }
    for list in children.values_mut() {
        list.sort_by(|a, b| a.at.cmp(&b.at).then_with(|| a.id.cmp(&b.id)));
    }
    let mut drawn = Drawn { children: &children, age, lines: Vec::new(), seen: BTreeSet::new() };
    for root in children.get(&None).into_iter().flatten() {
        drawn.entry(root, "", "");
    }
    drawn.lines.join("\n")
}

struct Drawn<'a> {
    children: &'a BTreeMap<Option<&'a str>, Vec<&'a Lineage>>,
    age: &'a dyn Fn(&Lineage) -> String,
    lines: Vec<String>,
    /// What came over the network may name its own child as its parent.
    seen: BTreeSet<&'a str>,
}

impl<'a> Drawn<'a> {
    fn entry(&mut self, entry: &'a Lineage, first: &str, rest: &str) {
        if !self.seen.insert(&entry.id) {
            return;
        }
        let mark = match entry.kind {
            LineageKind::Template => "◆",
            LineageKind::Snapshot => "●",
            LineageKind::Sandbox => "▶",
        };
        let here = if entry.current { "  ← here" } else { "" };
        let label = if entry.label.is_empty() { String::new() } else { format!("  {}", entry.label) };
        self.lines.push(format!("{first}{mark} {}{label}  {}{here}", entry.id, (self.age)(entry)));
        let below = self.children.get(&Some(entry.id.as_str())).map_or(&[] as &[_], Vec::as_slice);
        for (at, child) in below.iter().enumerate() {
            let last = at + 1 == below.len();
            let (joint, gap) = if last { ("└─ ", "   ") } else { ("├─ ", "│  ") };
            self.entry(child, &format!("{rest}{joint}"), &format!("{rest}{gap}"));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn entry(kind: LineageKind, id: &str, parent: Option<&str>, second: i64) -> Lineage {
        Lineage {
            kind,
            id: id.to_owned(),
            parent: parent.map(str::to_owned),
            label: String::new(),
            at: dormouse_types::Timestamp::from_second(second).expect("a time"),
            current: id == "s2",
        }
    }

    #[test]
    fn children_stand_below_their_parents() {
        let entries = [
            entry(LineageKind::Sandbox, "s2", Some("snap1"), 4),
            entry(LineageKind::Template, "snap0", None, 1),
            entry(LineageKind::Snapshot, "snap1", Some("snap0"), 2),
            entry(LineageKind::Sandbox, "s1", Some("snap0"), 3),
            entry(LineageKind::Snapshot, "orphan", Some("gone"), 5),
        ];
        let expected = "◆ snap0  t\n├─ ● snap1  t\n│  └─ ▶ s2  t  ← here\n└─ ▶ s1  t\n● orphan  t";
        assert_eq!(tree(&entries, &|_| "t".to_owned()), expected);
    }

    #[test]
    fn a_circle_ends() {
        let entries = [
            entry(LineageKind::Snapshot, "a", Some("a"), 1),
            entry(LineageKind::Snapshot, "b", Some("a"), 2),
        ];
        assert_eq!(tree(&entries, &|_| "t".to_owned()).lines().count(), 2);
    }
}
