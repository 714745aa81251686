//! The floor test: crates use only crates of lower floors, and ARCHITECTURE.md says what each is for.
//!
//! ```text
//! 5 dormouse   4 node api   3 engine keeper agent   2 vmm store image policy   1 sys snapshot wire   0 types
//! ```
//!
//! `xtask`, `testkit` and `fuzz` stand beside the floors and may use any. On one floor, nobody uses a neighbour.

use std::collections::BTreeMap;
use std::fs;

use anyhow::{Context, bail};
use serde::Deserialize;

use crate::run;

const FLOORS: &[(&str, u8)] = &[
    ("dormouse", 5),
    ("dormouse-node", 4),
    ("dormouse-api", 4),
    ("dormouse-engine", 3),
    ("dormouse-keeper", 3),
    ("dormouse-agent", 3),
    ("dormouse-vmm", 2),
    ("dormouse-store", 2),
    ("dormouse-image", 2),
    ("dormouse-policy", 2),
    ("dormouse-sys", 1),
    ("dormouse-snapshot", 1),
    ("dormouse-wire", 1),
    ("dormouse-types", 0),
];
const BESIDE: &[&str] = &["xtask", "dormouse-testkit", "dormouse-fuzz"];
/// These never see tokio: they are threads and files (DESIGN §3).
const WITHOUT_TOKIO: &[&str] = &["dormouse-vmm", "dormouse-sys", "dormouse-snapshot", "dormouse-policy"];

#[derive(Deserialize)]
pub struct Metadata {
    pub packages: Vec<Package>,
}

#[derive(Deserialize)]
pub struct Package {
    pub name: String,
    pub dependencies: Vec<Dependency>,
}

#[derive(Deserialize)]
pub struct Dependency {
    pub name: String,
    /// `null`, `dev` or `build`.
    pub kind: Option<String>,
}

/// What is wrong, a line each.
fn violations(metadata: &Metadata, architecture: &str) -> Vec<String> {
    let floors: BTreeMap<&str, u8> = FLOORS.iter().copied().collect();
    let mut found = Vec::new();
    for package in &metadata.packages {
        let name = package.name.as_str();
        if BESIDE.contains(&name) {
            continue;
        }
        let Some(floor) = floors.get(name) else {
            found.push(format!("{name} stands on no floor: give it one in xtask/src/floors.rs"));
            continue;
        };
        let short = name.strip_prefix("dormouse-").unwrap_or(name);
        if !architecture.contains(&format!("| `{short}` |")) {
            found.push(format!("{name} owes ARCHITECTURE.md its line in the table of crates"));
        }
        for dependency in &package.dependencies {
            found.extend(arrow(name, *floor, dependency, &floors));
        }
    }
    found
}

fn arrow(name: &str, floor: u8, dependency: &Dependency, floors: &BTreeMap<&str, u8>) -> Option<String> {
    let other = dependency.name.as_str();
    if other == "tokio" && WITHOUT_TOKIO.contains(&name) && dependency.kind.is_none() {
        return Some(format!("{name} never sees tokio (DESIGN §3)"));
    }
    // Tests may look down from anywhere, and a test may drive its own crate through the testkit.
    if BESIDE.contains(&other) {
        return (dependency.kind.as_deref() != Some("dev"))
            .then(|| format!("{name} uses {other}, which stands beside the floors"));
    }
    let below = *floors.get(other)?;
    (below >= floor)
        .then(|| format!("{name} (floor {floor}) uses {other} (floor {below}): arrows only point down"))
}

pub fn run() -> anyhow::Result<()> {
    let text = run::output(&mut run::cargo(&["metadata", "--format-version", "1", "--no-deps"]))?;
    let metadata: Metadata = serde_json::from_str(&text).context("cannot read `cargo metadata`")?;
    let path = run::root().join("ARCHITECTURE.md");
    let architecture =
        fs::read_to_string(&path).with_context(|| format!("cannot read {}", path.display()))?;
    let found = violations(&metadata, &architecture);
    if found.is_empty() {
        println!("floors: {} crates, every arrow points down", metadata.packages.len());
        return Ok(());
    }
    bail!("the floors do not hold:\n  {}", found.join("\n  "))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(name: &str, dependency: &str, kind: Option<&str>, expected: Option<&str>) {
        let metadata = Metadata {
            packages: vec![Package {
                name: name.to_owned(),
                dependencies: vec![Dependency { name: dependency.to_owned(), kind: kind.map(str::to_owned) }],
            }],
        };
        let short = name.strip_prefix("dormouse-").unwrap_or(name);
        let found = violations(&metadata, &format!("| `{short}` | x | y |"));
        match expected {
            None => assert!(found.is_empty(), "{name} → {dependency}: {found:?}"),
            Some(words) => {
                assert!(found.iter().any(|line| line.contains(words)), "{name} → {dependency}: {found:?}")
            }
        }
    }

    #[test]
    fn arrows_point_down() {
        check("dormouse-node", "dormouse-engine", None, None);
        check("dormouse-engine", "dormouse-node", None, Some("only point down"));
        check("dormouse-api", "dormouse-node", None, Some("only point down"));
        check("dormouse-types", "dormouse-sys", Some("dev"), Some("only point down"));
        check("dormouse-sys", "tokio", None, Some("never sees tokio"));
        check("dormouse-node", "dormouse-testkit", None, Some("beside the floors"));
        check("dormouse-node", "dormouse-testkit", Some("dev"), None);
        check("dormouse-new", "serde", None, Some("no floor"));
    }

    #[test]
    fn a_crate_owes_the_architecture_a_line() {
        let metadata =
            Metadata { packages: vec![Package { name: "dormouse-node".into(), dependencies: vec![] }] };
        assert_eq!(violations(&metadata, "").len(), 1);
    }
}
