//! State is kept: S01–S07, S10, S11, S36.

use std::fs;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use hyper::Method;
use serde_json::json;

use super::stage::{Stage, ask_witness, eventually, start_witness};
use crate::host;
use crate::sandbox::Sandbox;

/// Five pauses with edits in between: every edit is there, the id is the same.
pub async fn s01(stage: &Stage) -> Result<()> {
    let sandbox = stage.sandbox().await?;
    let mut witness = start_witness(&sandbox, 8100, 8).await?;
    for round in 0..5 {
        sandbox.sh(&format!("echo {round} >> edits.txt; mkdir -p d{round}; echo x > d{round}/f")).await?;
        sandbox.sh_root(&format!("echo {round} >> /etc/edits; rm -rf /home/user/d{}", round - 1)).await?;
        sandbox.pause().await?;
        ensure!(sandbox.state().await? == "paused", "it says {} after a pause", sandbox.state().await?);
        sandbox.resume().await?;
        let now = ask_witness(&sandbox, 8100).await?;
        now.goes_on_from(&witness)?;
        witness = now;
    }
    let edits = sandbox.sh("cat edits.txt /etc/edits; ls -d d*").await?;
    let expected = "0\n1\n2\n3\n4\n0\n1\n2\n3\n4\nd4\n";
    ensure!(edits == expected, "edits were lost: {edits:?}");
    Ok(())
}

/// An automatic pause keeps exactly what a manual pause keeps.
pub async fn s02(stage: &Stage) -> Result<()> {
    let manual = stage.sandbox().await?;
    let automatic = stage.sandbox_with(json!({"autoPause": true})).await?;
    let mut before = Vec::new();
    for sandbox in [&manual, &automatic] {
        sandbox.sh("echo kept > kept.txt; echo tmp > /tmp/kept; echo shm > /dev/shm/kept").await?;
        before.push(start_witness(sandbox, 8101, 4).await?);
    }
    manual.pause().await?;
    let path = format!("/sandboxes/{}/timeout", automatic.id);
    automatic.http.api(Method::POST, &path, Some(json!({"timeout": 1}))).await?.expect(204)?;
    eventually("the automatic pause", || async { Ok(automatic.state().await? == "paused") }).await?;
    for (sandbox, before) in [&manual, &automatic].into_iter().zip(&before) {
        sandbox.resume().await?;
        ask_witness(sandbox, 8101).await?.goes_on_from(before)?;
        let files = sandbox.sh("cat kept.txt /tmp/kept /dev/shm/kept").await?;
        ensure!(files == "kept\ntmp\nshm\n", "files were lost: {files:?}");
    }
    Ok(())
}

const STEPPER: &str = r#"
import os, sys
step, answered = 0, 0
f = open("/home/user/step", "w")
while True:
    step += 1
    f.seek(0); f.write(f"{step:012d}"); f.flush(); os.fsync(f.fileno())
    if os.path.exists("/home/user/ask"):
        open("/home/user/answer", "w").write(str(step))
        os.remove("/home/user/ask")
        break
"#;

/// Memory and disk are captured at one instant.
pub async fn s03(stage: &Stage) -> Result<()> {
    let sandbox = stage.sandbox().await?;
    let make = "mkdir tree && cd tree && for d in $(seq 100); do mkdir $d; for f in $(seq 100); do echo $d/$f > $d/$f; done; done";
    sandbox.sh(make).await?;
    let sum = "cd tree && find . -type f | sort | xargs sha256sum | sha256sum; find . -type f | wc -l";
    let before = sandbox.sh(sum).await?;
    ensure!(before.ends_with("10000\n"), "not 10,000 files: {before}");
    sandbox.write("/home/user/stepper.py", STEPPER).await?;
    sandbox.spawn("exec python3 stepper.py").await?;
    eventually("the stepper", || async { Ok(sandbox.sh("cat step").await.is_ok_and(|s| !s.is_empty())) })
        .await?;
    let snapshot = sandbox.snapshot().await?;
    let copy = stage.sandbox_with(json!({"templateID": snapshot})).await?;
    let at_capture = |text: String| text.trim().parse::<u64>().context("no step in the file");
    // The file is read first: from then on the process only goes forward.
    let file = at_capture(copy.sh("cat step").await?)?;
    copy.sh("touch ask; while [ ! -s answer ]; do sleep 0.05; done").await?;
    let memory = at_capture(copy.sh("cat answer").await?)?;
    let last = at_capture(copy.sh("cat step").await?)?;
    ensure!(memory >= file, "memory ({memory}) is behind the file ({file})");
    ensure!(last.abs_diff(memory) <= 1, "the file says {last}, memory {memory}");
    ensure!(copy.sh(sum).await? == before, "the checksum over 10,000 files changed");
    ensure!(sandbox.sh(sum).await? == before, "the source's files changed");
    Ok(())
}

/// kill -9 of a sandbox's processes on the host right after a write: the next restore is clean.
pub async fn s04(stage: &mut Stage) -> Result<()> {
    let sandbox = stage.sandbox().await?;
    sandbox.sh("echo checkpointed > state.txt").await?;
    let snapshot = sandbox.snapshot().await?;
    sandbox.sh("head -c 50000000 /dev/urandom > big.bin; sync; echo later > state.txt").await?;
    let data_dir = stage.data_dir().to_owned();
    let daemon = stage.daemon()?.pid();
    let killed = kill_runtime(&data_dir, daemon, &sandbox)?;
    ensure!(killed > 0, "no host process of the sandbox was found");
    eventually("the failed state", || async { Ok(sandbox.own_info().await?["state"] == "failed") }).await?;
    let why = sandbox.own_info().await?["why"].to_string();
    ensure!(why.contains(&snapshot), "the reason does not offer the last snapshot: {why}");
    sandbox.rollback(&snapshot).await?;
    ensure!(sandbox.sh("cat state.txt").await? == "checkpointed\n", "not the state of the snapshot");
    ensure!(sandbox.run("ls big.bin").await?.exit != 0, "a file of after the snapshot is there");
    sandbox.sh("echo again > state.txt && sync && cat state.txt").await.map(drop)
}

/// kill -9 of everything on the host that runs the sandbox, its keeper excepted.
fn kill_runtime(data_dir: &Path, daemon: u32, sandbox: &Sandbox) -> Result<usize> {
    let processes = host::processes_of_runtime(data_dir, daemon, &sandbox.id)?;
    for pid in &processes {
        // Children die with their parent: one that is already gone is no error.
        drop(super::stage::shell(&format!("kill -9 {pid}")));
    }
    Ok(processes.len())
}

/// Delete the source, its parent snapshots, its template: children and grandchildren live on.
pub async fn s05(stage: &mut Stage) -> Result<()> {
    let mut clone = stage.clone_daemon(None).await?;
    let http = clone.http()?;
    let source = Sandbox::create(&http, json!({})).await?;
    let before = start_witness(&source, 8105, 8).await?;
    source.sh("echo of-the-source > inherited.txt").await?;
    let snapshot = source.snapshot().await?;
    let child = Sandbox::create(&http, json!({"templateID": snapshot})).await?;
    let grandchild = child.fork(1).await?.remove(0);
    child.pause().await?;
    source.kill().await?.expect(204)?;
    let removed = http.api(Method::DELETE, &format!("/dormouse/v1/snapshots/{snapshot}"), None).await?;
    removed.expect(200)?;
    http.api(Method::DELETE, "/dormouse/v1/templates/base", None).await?.expect(200)?;
    http.api(Method::POST, "/dormouse/v1/gc", None).await?.expect(200)?;
    clone.daemon()?.kill()?;
    clone.daemon()?.restart().await?;
    child.resume().await?;
    grandchild.pause().await?;
    grandchild.resume().await?;
    for sandbox in [&child, &grandchild] {
        ask_witness(sandbox, 8105).await?.goes_on_from(&before)?;
        ensure!(sandbox.sh("cat inherited.txt").await? == "of-the-source\n", "a file was lost");
        sandbox.sh("python3 -c 'import json, ssl'").await?;
    }
    ensure!(child.fork(1).await?.len() == 1, "the child cannot be forked any more");
    nothing_left(clone.end().await?)
}

pub(super) fn nothing_left(left: Vec<String>) -> Result<()> {
    ensure!(left.is_empty(), "left on the host: {}", left.join("; "));
    Ok(())
}

/// The snapshot's files of a paused sandbox, the largest first.
pub(super) async fn files_of_pause(stage: &Stage, sandbox: &Sandbox) -> Result<Vec<PathBuf>> {
    let parent = sandbox.own_info().await?["parentSnapshotID"].as_str().context("no snapshot")?.to_owned();
    let folder = stage.data_dir().join("snapshots").join(parent);
    is_hashed(&folder).await?;
    let mut files = Vec::new();
    for entry in fs::read_dir(&folder).with_context(|| format!("cannot list {}", folder.display()))? {
        let entry = entry?;
        if entry.file_name() != "manifest" {
            files.push((entry.metadata()?.len(), entry.path()));
        }
    }
    files.sort();
    Ok(files.into_iter().rev().map(|(_, path)| path).collect())
}

/// Large files are hashed after the pause: before that, damage cannot be told from what was written.
async fn is_hashed(folder: &Path) -> Result<()> {
    for _ in 0..300 {
        let manifest = dormouse_snapshot::Manifest::decode(&fs::read(folder.join("manifest"))?)?;
        if manifest.files.iter().all(|file| file.digest.is_some()) {
            return Ok(());
        }
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    anyhow::bail!("{} still lacks digests after 30 s", folder.display())
}

/// A copy in a file's place, to be damaged: the file itself may be a template's as well.
struct Damaged {
    path: PathBuf,
    aside: PathBuf,
    name: String,
    file: fs::File,
    bytes: u64,
}

impl Damaged {
    fn replace(path: &Path) -> Result<Self> {
        let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        let aside = path.with_file_name(format!("{name}.aside"));
        fs::rename(path, &aside)?;
        super::stage::shell(&format!("cp -a --sparse=auto {} {}", aside.display(), path.display()))?;
        let file = fs::File::options().read(true).write(true).open(path)?;
        let bytes = file.metadata()?.len();
        Ok(Self { path: path.to_owned(), aside, name, file, bytes })
    }

    fn undo(self) -> Result<()> {
        fs::rename(&self.aside, &self.path).context("the damaged file's original is gone")
    }
}

async fn resume_is_refused(sandbox: &Sandbox, named: &str) -> Result<()> {
    let refused = sandbox.connect_answer().await?;
    ensure!(refused.status.as_u16() >= 400, "a damaged snapshot was resumed: {}", refused.text());
    ensure!(refused.text().contains(named), "the error does not name {named}: {}", refused.text());
    let state = sandbox.state().await?;
    ensure!(state == "paused", "after a failed resume it says {state}");
    Ok(())
}

/// A failed restore never becomes a fresh sandbox that says it is ready.
pub async fn s06(stage: &Stage) -> Result<()> {
    let sandbox = stage.sandbox().await?;
    let before = start_witness(&sandbox, 8106, 8).await?;
    sandbox.pause().await?;
    for path in files_of_pause(stage, &sandbox).await? {
        let damaged = Damaged::replace(&path)?;
        damaged.file.set_len(damaged.bytes / 2)?;
        resume_is_refused(&sandbox, &damaged.name).await?;
        damaged.undo()?;
    }
    sandbox.resume().await?;
    ask_witness(&sandbox, 8106).await?.goes_on_from(&before)
}

/// A transient error on resume deletes nothing; the retry succeeds.
pub async fn s07(stage: &Stage) -> Result<()> {
    let sandbox = stage.sandbox().await?;
    let before = start_witness(&sandbox, 8107, 8).await?;
    sandbox.pause().await?;
    let folder = files_of_pause(stage, &sandbox).await?[0].parent().context("no folder")?.to_owned();
    let aside = folder.with_extension("aside");
    for _ in 0..3 {
        fs::rename(&folder, &aside)?;
        let refused = sandbox.connect_answer().await?;
        fs::rename(&aside, &folder)?;
        ensure!(refused.status.as_u16() >= 400, "it resumed from nothing: {}", refused.text());
        ensure!(sandbox.state().await? == "paused", "it says {}", sandbox.state().await?);
    }
    sandbox.resume().await?;
    ask_witness(&sandbox, 8107).await?.goes_on_from(&before)
}

/// A page damaged on disk is noticed on read, named, and never served.
pub async fn s10(stage: &Stage) -> Result<()> {
    let sandbox = stage.sandbox().await?;
    let before = start_witness(&sandbox, 8110, 16).await?;
    sandbox.pause().await?;
    let path = files_of_pause(stage, &sandbox).await?.remove(0);
    let bytes = fs::metadata(&path)?.len();
    for position in [0, bytes / 3, bytes / 2, bytes - 1] {
        let damaged = Damaged::replace(&path)?;
        let mut byte = [0];
        damaged.file.read_exact_at(&mut byte, position)?;
        damaged.file.write_all_at(&[byte[0] ^ 0x10], position)?;
        resume_is_refused(&sandbox, &damaged.name).await?;
        damaged.undo()?;
    }
    sandbox.resume().await?;
    ask_witness(&sandbox, 8110).await?.goes_on_from(&before)
}

/// A checkpoint of a sandbox that was itself just restored and has touched little is complete.
pub async fn s11(stage: &Stage) -> Result<()> {
    let sandbox = stage.sandbox().await?;
    let before = start_witness(&sandbox, 8111, 64).await?;
    sandbox.sh("head -c 3000000 /dev/urandom > bytes; sha256sum bytes > sum").await?;
    let mut current = sandbox;
    for _ in 0..3 {
        current.pause().await?;
        current.resume().await?;
        let snapshot = current.snapshot().await?;
        current.kill().await?.expect(204)?;
        current = stage.sandbox_with(json!({"templateID": snapshot})).await?;
    }
    ask_witness(&current, 8111).await?.goes_on_from(&before)?;
    current.sh("sha256sum -c sum").await.map(drop)
}

/// A snapshot that needs what this host lacks is refused before anything is loaded.
pub async fn s36(stage: &mut Stage) -> Result<()> {
    let sandbox = stage.sandbox().await?;
    let snapshot = sandbox.snapshot().await?;
    let path = stage.data_dir().join("snapshots").join(&snapshot).join("manifest");
    let bytes = fs::read(&path)?;
    let mut manifest = dormouse_snapshot::Manifest::decode(&bytes)?;
    manifest.compat.cpu_features.push("a-feature-that-no-cpu-has".to_owned());
    fs::write(&path, manifest.encode()?)?;
    // A daemon that starts anew has nothing of the manifest in memory.
    stage.daemon()?.kill()?;
    stage.daemon()?.restart().await?;
    let request = json!({"templateID": snapshot, "timeout": 60});
    let refused = stage.http()?.api(Method::POST, "/v2/sandboxes", Some(request)).await?;
    fs::write(&path, bytes)?;
    if refused.status.is_success() {
        bail!("a snapshot that needs a feature no CPU has was restored");
    }
    ensure!(
        refused.text().contains("a-feature-that-no-cpu-has"),
        "the reason is not told: {}",
        refused.text()
    );
    sandbox.sh("true").await.map(drop)
}
