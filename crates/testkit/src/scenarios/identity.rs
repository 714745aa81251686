//! Uniqueness and what a fork shares: S15, S16, S18, S41.

use std::collections::BTreeSet;

use anyhow::{Result, ensure};
use serde_json::Value;

use super::stage::{Stage, start_witness};
use crate::sandbox::Sandbox;

/// As many as fit beside everything else on a small host.
const FORKS: u32 = 10;

const PROBES: &[&str] = &[
    "head -c 16 /dev/urandom | od -An -tx1",
    "cat /proc/sys/kernel/random/uuid || python3 -c 'import uuid; print(uuid.uuid4())'",
    "cat /etc/machine-id",
    "hostname",
    "cat /etc/hostname",
    "python3 -c 'import random; print(random.random())'",
    "python3 -c 'import secrets; print(secrets.token_hex(16))'",
    "python3 -c 'import ssl; print(ssl.RAND_bytes(16).hex())'",
];

/// Forks differ in everything that must be unique.
pub async fn s15(stage: &Stage) -> Result<()> {
    let source = stage.sandbox().await?;
    start_witness(&source, 8115, 4).await?;
    let forks = source.fork(FORKS).await?;
    let everyone: Vec<&Sandbox> = std::iter::once(&source).chain(&forks).collect();
    for probe in PROBES {
        let mut answers = BTreeSet::new();
        for one in &everyone {
            answers.insert(one.sh(probe).await?.trim().to_owned());
        }
        ensure!(answers.len() == everyone.len(), "{probe:?} gave the same answer twice: {answers:?}");
        ensure!(!answers.contains(""), "{probe:?} gave an empty answer");
    }
    let ids: BTreeSet<&str> = everyone.iter().map(|one| one.id.as_str()).collect();
    let tokens: BTreeSet<&Option<String>> = everyone.iter().map(|one| &one.token).collect();
    ensure!(ids.len() == everyone.len() && tokens.len() == everyone.len(), "ids or tokens are shared");
    ensure!(!tokens.contains(&None), "a sandbox has no access token");
    for fork in &forks {
        let hosts = fork.sh("getent hosts $(hostname)").await?;
        ensure!(hosts.contains("127."), "a fork does not resolve its own name: {hosts}");
        let own = fork.own_info().await?;
        ensure!(own["forkedFrom"] == source.id.as_str(), "a fork does not know its source: {own}");
    }
    // The machine identity stays over pause and resume: it belongs to the sandbox.
    let before = forks[0].sh("cat /etc/machine-id /etc/hostname").await?;
    forks[0].pause().await?;
    forks[0].resume().await?;
    ensure!(forks[0].sh("cat /etc/machine-id /etc/hostname").await? == before, "the identity changed");
    Ok(())
}

/// getrandom never blocks after restore.
pub async fn s16(stage: &Stage) -> Result<()> {
    let sandbox = stage.sandbox().await?;
    // The first would fail where the second blocks; the limit is about them, not about the start of Python.
    let probe = "python3 -c 'import os, signal; signal.alarm(5); \
                 print(len(os.getrandom(32, os.GRND_NONBLOCK)), len(os.getrandom(32)))'";
    sandbox.pause().await?;
    sandbox.resume().await?;
    let fork = sandbox.fork(1).await?.remove(0);
    for one in [&sandbox, &fork] {
        ensure!(one.sh(probe).await? == "32 32\n", "getrandom blocked");
    }
    Ok(())
}

/// The source's tokens do not open the fork, and the other way round.
pub async fn s18(stage: &Stage) -> Result<()> {
    let source = stage.sandbox().await?;
    let fork = source.fork(1).await?.remove(0);
    for (one, other) in [(&source, &fork), (&fork, &source)] {
        one.list_with_token(one.token.as_deref()).await?.expect(200)?;
        one.list_with_token(other.token.as_deref()).await?.expect(401)?;
        one.list_with_token(None).await?.expect(401)?;
    }
    let snapshot = source.snapshot().await?;
    source.rollback(&snapshot).await?;
    source.list_with_token(fork.token.as_deref()).await?.expect(401)?;
    source.list_with_token(source.token.as_deref()).await?.expect(200).map(drop)
}

/// A fork's receipt says of each thing: shared, copied, fresh or dropped.
pub async fn s41(stage: &Stage) -> Result<()> {
    let source = stage.sandbox().await?;
    start_witness(&source, 8141, 1).await?;
    let fork = source.fork(1).await?.remove(0);
    let receipts = fork.own_info().await?["receipts"].clone();
    let receipt = receipts.get(0).cloned().unwrap_or_default();
    ensure!(receipt["operation"] == "fork", "no receipt of the fork: {receipts}");
    let words = |field: &str| {
        let list = receipt[field].as_array().cloned().unwrap_or_default();
        list.iter().filter_map(Value::as_str).collect::<Vec<_>>().join(" | ")
    };
    for (field, wanted) in [
        ("kept", &["memory", "processes", "files"][..]),
        ("refreshed", &["hostname", "machine id", "token", "random"][..]),
        ("dropped", &["stream", "connection"][..]),
    ] {
        for word in wanted {
            ensure!(words(field).contains(word), "`{field}` does not speak of {word}: {receipt}");
        }
    }
    Ok(())
}
