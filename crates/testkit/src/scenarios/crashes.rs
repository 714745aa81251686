//! Crashes and leaks: S08, S25, S29, S31, S32, S33.

use std::time::Duration;

use anyhow::{Context, Result, ensure};
use serde_json::json;

use super::stage::{Stage, ask_witness, eventually, shell, start_witness};
use super::state::nothing_left;
use crate::host;
use crate::sandbox::Sandbox;

/// Crash between "new snapshot published" and "old one deleted": either is complete and restorable.
pub async fn s08(stage: &mut Stage) -> Result<()> {
    let sandbox = stage.sandbox().await?;
    let mut before = start_witness(&sandbox, 8108, 32).await?;
    // The pause takes some 200 ms: the kills fall before, into and after each of its steps.
    for delay_ms in [5, 20, 40, 60, 80, 100, 130, 160, 200, 260] {
        let pausing = sandbox.clone();
        let pause = tokio::spawn(async move { pausing.pause_answer().await });
        tokio::time::sleep(Duration::from_millis(delay_ms)).await;
        stage.daemon()?.kill()?;
        // Answered or cut off: both are true.
        drop(pause.await?);
        stage.daemon()?.restart().await?;
        let state = sandbox.state().await?;
        ensure!(state == "paused" || state == "running", "after a crash at {delay_ms} ms it says {state}");
        sandbox.connect_answer().await.and_then(|answer| {
            ensure!(answer.status.is_success(), "not restorable after {delay_ms} ms: {}", answer.text());
            Ok(())
        })?;
        let now = ask_witness(&sandbox, 8108).await.with_context(|| format!("after {delay_ms} ms"))?;
        now.goes_on_from(&before)?;
        before = now;
    }
    Ok(())
}

/// Pause fails half-way (store full): the sandbox runs on, says so, and the error says why.
pub async fn s25(stage: &mut Stage) -> Result<()> {
    let full = stage.clone_daemon(Some(template_mib(stage)? + 24)).await?;
    let sandbox = Sandbox::create(&full.http()?, json!({})).await?;
    let before = start_witness(&sandbox, 8125, 80).await?;
    let refused = sandbox.pause_answer().await?;
    ensure!(refused.status.as_u16() >= 400, "a pause into a full store succeeded");
    ensure!(refused.text().contains("full") || refused.text().contains("space"), "why? {}", refused.text());
    ensure!(sandbox.state().await? == "running", "it says {}", sandbox.state().await?);
    ask_witness(&sandbox, 8125).await?.goes_on_from(&before)?;
    sandbox.sh("echo runs on").await?;
    nothing_left(full.end().await?)
}

/// Disk full at each step of a checkpoint: refused cleanly, source runs, space is returned.
pub async fn s33(stage: &mut Stage) -> Result<()> {
    let base = template_mib(stage)?;
    for room in [1, 8, 40, 70] {
        let full = stage.clone_daemon(Some(base + room)).await?;
        let sandbox = Sandbox::create(&full.http()?, json!({})).await?;
        let before = start_witness(&sandbox, 8133, 80).await?;
        let snapshots = full.folder.join("snapshots");
        let used = host::disk_use(&snapshots);
        for _ in 0..2 {
            ensure!(sandbox.snapshot().await.is_err(), "a checkpoint of 80 MiB went into {room} MiB");
            ensure!(sandbox.fork(1).await.is_err(), "a fork of 80 MiB went through {room} MiB");
        }
        ask_witness(&sandbox, 8133).await?.goes_on_from(&before)?;
        let now = host::disk_use(&snapshots);
        ensure!(now <= used + (1 << 20), "{} bytes were not returned", now.saturating_sub(used));
        nothing_left(full.end().await?)?;
    }
    Ok(())
}

/// The size of what the prepared folder has in its store, MiB.
fn template_mib(stage: &Stage) -> Result<u32> {
    let bytes = host::disk_use(&stage.data_dir().join("snapshots"));
    Ok(u32::try_from(bytes.div_ceil(1 << 20))? + 1)
}

/// kill -9 the daemon with 20 sandboxes in every state: all adopted or accounted for, nothing leaked.
pub async fn s29(stage: &mut Stage) -> Result<()> {
    let data_dir = stage.data_dir().to_owned();
    stage.tidy().await;
    let clean = host::holdings(&data_dir, stage.daemon()?.pid())?;
    let mut sandboxes = Vec::new();
    for _ in 0..16 {
        sandboxes.push(stage.sandbox().await?);
    }
    for (index, sandbox) in sandboxes.iter().enumerate() {
        sandbox.sh(&format!("echo {index} > mine.txt")).await?;
        if index % 4 == 1 {
            sandbox.pause().await?;
        }
    }
    // In transition at the very moment: pausing, resuming, forking, being created, being killed.
    let mut moving = Vec::new();
    for (index, sandbox) in sandboxes.iter().cloned().enumerate() {
        moving.push(tokio::spawn(async move {
            match index % 4 {
                0 => drop(sandbox.pause_answer().await),
                1 => drop(sandbox.connect_answer().await),
                2 if index > 8 => drop(sandbox.fork(2).await),
                3 if index > 12 => drop(sandbox.kill().await),
                _ => {}
            }
        }));
    }
    tokio::time::sleep(Duration::from_millis(150)).await;
    stage.daemon()?.kill()?;
    for task in moving {
        task.await?;
    }
    stage.daemon()?.restart().await?;
    for (index, sandbox) in sandboxes.iter().enumerate() {
        let killed = index % 4 == 3 && index > 12;
        let path = format!("/sandboxes/{}", sandbox.id);
        let answer = sandbox.http.api(hyper::Method::GET, &path, None).await?;
        if killed && answer.status == 404 {
            continue;
        }
        let state =
            answer.expect(200).with_context(|| format!("sandbox {index} was lost"))?.json()?["state"].clone();
        ensure!(state == "running" || state == "paused", "sandbox {index} says {state}");
        let connected = sandbox.connect_answer().await?;
        ensure!(connected.status.is_success(), "sandbox {index} ({state}): {}", connected.text());
        let mine = sandbox.sh("cat mine.txt").await.with_context(|| format!("sandbox {index}"))?;
        ensure!(mine.trim() == index.to_string(), "sandbox {index} has the files of {mine}");
    }
    stage.tidy().await;
    let daemon = stage.daemon()?.pid();
    let leaked = || leaked(&data_dir, daemon, &clean);
    eventually("a clean host", || async { Ok(leaked()?.is_empty()) })
        .await
        .with_context(|| format!("leaked: {:?}", leaked().unwrap_or_default()))
}

/// Prepared runtimes: created ones, and those already at a template's base snapshot.
const POOL_MAX: usize = 8;

/// What is on the host and belongs to no sandbox, now that there is none. The pool's prepared runtimes
/// come and go: each process must belong to one that is there.
fn leaked(data_dir: &std::path::Path, daemon: u32, clean: &host::Holdings) -> Result<Vec<String>> {
    let now = host::holdings(data_dir, daemon)?;
    let of_sandboxes =
        |path: &&String| !["/gvisor/run/", "/microvm/zygotes/"].iter().any(|pool| path.contains(pool));
    let prepared: Vec<&str> = now.runtime_files.iter().filter_map(|path| path.rsplit('/').next()).collect();
    let of_the_pool = |name: &str| prepared.iter().any(|id| name.contains(id));
    // The group that all of the pool's are in comes with the first of them.
    let above_the_pool = |name: &str| {
        let below = format!("{name}/");
        now.cgroups.iter().any(|group| group.starts_with(&below) && of_the_pool(group))
    };
    let of_none = |name: &&String| !of_the_pool(name) && !above_the_pool(name);
    let mut leaked: Vec<String> = now.processes.iter().chain(&now.cgroups).filter(of_none).cloned().collect();
    leaked.retain(|name| !clean.cgroups.contains(name));
    leaked.extend(now.mounts.difference(&clean.mounts).cloned());
    leaked.extend(now.runtime_files.iter().filter(of_sandboxes).cloned());
    if now.runtime_files.len() > POOL_MAX {
        leaked.push(format!("{} runtimes, more than a pool has", now.runtime_files.len()));
    }
    Ok(leaked)
}

/// Host reboot (everything killed): paused sandboxes resume; running ones say what became of them.
pub async fn s31(stage: &mut Stage) -> Result<()> {
    let paused = stage.sandbox().await?;
    let before = start_witness(&paused, 8131, 8).await?;
    paused.pause().await?;
    let running = stage.sandbox().await?;
    running.sh("echo at-checkpoint > state.txt").await?;
    let snapshot = running.snapshot().await?;
    running.sh("echo lost > state.txt").await?;
    stage.daemon()?.kill()?;
    let data_dir = stage.data_dir().to_owned();
    for process in host::holdings(&data_dir, 0)?.processes {
        let pid = process.split_whitespace().next().unwrap_or_default().to_owned();
        // One that died with its parent is no error.
        drop(shell(&format!("kill -9 {pid}")));
    }
    stage.daemon()?.restart().await?;
    ensure!(paused.state().await? == "paused", "the paused one says {}", paused.state().await?);
    paused.resume().await?;
    ask_witness(&paused, 8131).await?.goes_on_from(&before)?;
    let told = running.own_info().await?;
    ensure!(told["state"] == "failed", "the running one says {}", told["state"]);
    ensure!(told["why"].to_string().contains(&snapshot), "its last snapshot is not offered: {told}");
    running.rollback(&snapshot).await?;
    ensure!(running.sh("cat state.txt").await? == "at-checkpoint\n", "not the checkpoint's state");
    Ok(())
}

/// 100 pause/resume cycles: disk, memory, descriptors and processes are bounded.
pub async fn s32(stage: &mut Stage) -> Result<()> {
    let sandbox = stage.sandbox().await?;
    let before = start_witness(&sandbox, 8132, 4).await?;
    let data_dir = stage.data_dir().to_owned();
    let daemon = stage.daemon()?.pid();
    let cycle = || async {
        sandbox.pause().await?;
        sandbox.resume().await
    };
    // The first ten fill what may be filled once: caches, pools, buffers.
    for _ in 0..10 {
        cycle().await?;
    }
    let then = Sizes::read(&data_dir, daemon)?;
    for round in 10..100 {
        cycle().await.with_context(|| format!("cycle {round}"))?;
    }
    ask_witness(&sandbox, 8132).await?.goes_on_from(&before)?;
    let now = Sizes::read(&data_dir, daemon)?;
    ensure!(now.disk < then.disk + (64 << 20), "disk grew from {} to {}", then.disk, now.disk);
    ensure!(now.memory < then.memory + (32 << 20), "memory grew from {} to {}", then.memory, now.memory);
    ensure!(
        now.descriptors < then.descriptors + 20,
        "descriptors grew: {} to {}",
        then.descriptors,
        now.descriptors
    );
    ensure!(now.processes < then.processes + 10, "processes grew: {} to {}", then.processes, now.processes);
    Ok(())
}

struct Sizes {
    disk: u64,
    memory: u64,
    descriptors: usize,
    processes: usize,
}

impl Sizes {
    fn read(data_dir: &std::path::Path, daemon: u32) -> Result<Self> {
        let keepers: Vec<u32> = host::holdings(data_dir, daemon)?
            .processes
            .iter()
            .filter(|process| process.contains(" keeper "))
            .filter_map(|process| process.split_whitespace().next()?.parse().ok())
            .collect();
        let mut sizes = Self {
            disk: host::disk_use(data_dir),
            memory: host::resident(daemon)?,
            descriptors: host::descriptors(daemon)?,
            processes: host::holdings(data_dir, daemon)?.processes.len(),
        };
        for keeper in keepers {
            sizes.memory += host::resident(keeper)?;
            sizes.descriptors += host::descriptors(keeper)?;
        }
        Ok(sizes)
    }
}
