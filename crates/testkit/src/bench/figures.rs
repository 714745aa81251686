//! Each figure of the gVisor engine: what is measured, against what.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use dormouse_snapshot::Manifest;
use dormouse_wire::stream::ENVD_PORT;
use hyper::Method;
use serde_json::json;

use super::raw::Raw;
use super::{Figure, MIB, Options, answers, kill_all, median_ms, processes_are_settled, upload};
use crate::daemon::Daemon;
use crate::host;
use crate::sandbox::Sandbox;

/// Memory that a paused sandbox holds, beside its processes.
const HELD_MIB: u32 = 200;
const IDLE_SANDBOXES: u32 = 10;
/// Commands of one kind before the other's turn.
const IN_A_ROW: usize = 3;
/// The same as raw runsc is given, a process that holds memory and answers, here on a port.
const HOLD: &str = r#"import os, socket, sys
held = os.urandom(1 << 20) * int(sys.argv[1])
server = socket.create_server(("127.0.0.1", 8000))
while True:
    client, _ = server.accept()
    client.recv(65536)
    client.sendall(b"HTTP/1.1 200 OK\r\ncontent-length: 3\r\nconnection: close\r\n\r\nhi\n")
    client.close()
"#;
const HELLO: [&str; 4] = ["/bin/bash", "-l", "-c", "echo hi"];

struct Bench<'a> {
    options: &'a Options,
    daemon: Daemon,
    raw: Raw,
    scratch: PathBuf,
    figures: Vec<Figure>,
    done: &'a mut dyn FnMut(&Figure),
}

pub async fn all(options: &Options, done: &mut dyn FnMut(&Figure)) -> Result<Vec<Figure>> {
    let daemon = Daemon::start(&options.binary, &options.data_dir, &[]).await?;
    let scratch = options.data_dir.with_extension("bench");
    let raw = match rootfs_of_base(&daemon).await {
        Ok(rootfs) => Raw::new(&scratch.join("raw"), &rootfs)?,
        Err(error) => return daemon.stop().await.and(Err(error)),
    };
    let mut bench = Bench { options, daemon, raw, scratch: scratch.clone(), figures: Vec::new(), done };
    let measured = bench.measure().await;
    let figures = std::mem::take(&mut bench.figures);
    // Whatever became of the figures, nothing is left of what they were taken with.
    let tidied = bench.tidy().await;
    measured.and(tidied)?;
    Ok(figures)
}

async fn rootfs_of_base(daemon: &Daemon) -> Result<PathBuf> {
    let told =
        daemon.http.api(Method::GET, "/dormouse/v1/templates/base", None).await?.expect(200)?.json()?;
    let snapshot = told["snapshotID"].as_str().context("the template base has no snapshot")?;
    let path = daemon.data_dir.join("snapshots").join(snapshot).join("manifest");
    let manifest = std::fs::read(&path).with_context(|| format!("cannot read {}", path.display()))?;
    Ok(daemon.data_dir.join("images").join(Manifest::decode(&manifest)?.rootfs).join("rootfs"))
}

async fn hello(sandbox: &Sandbox) -> Result<Duration> {
    let started = Instant::now();
    ensure!(sandbox.sh("echo hi").await? == "hi\n", "the command's output is wrong");
    Ok(started.elapsed())
}

impl Bench<'_> {
    async fn measure(&mut self) -> Result<()> {
        let only = &self.options.only;
        let wanted = |names: &[&str]| only.is_empty() || only.iter().any(|one| names.contains(&one.as_str()));
        if wanted(&["command"]) {
            self.command().await?;
        }
        if wanted(&["create"]) {
            self.create().await?;
        }
        if wanted(&["pause", "resume", "thaw"]) {
            self.pause_and_resume().await?;
        }
        if wanted(&["idle-memory", "frozen-cpu"]) {
            self.idle().await?;
        }
        if wanted(&["upload"]) {
            self.upload().await?;
        }
        Ok(())
    }

    async fn tidy(self) -> Result<()> {
        let Self { daemon, raw, scratch, .. } = self;
        let killed = kill_all(&daemon.http).await;
        drop(raw);
        let removed =
            std::fs::remove_dir_all(&scratch).with_context(|| format!("cannot remove {}", scratch.display()));
        daemon.stop().await.and(killed).and(removed)
    }

    fn tell(
        &mut self,
        name: &str,
        unit: &str,
        ours: f64,
        raw: Option<f64>,
        limit: impl Into<Option<f64>>,
        note: &str,
    ) {
        let figure = Figure {
            name: name.to_owned(),
            unit: unit.to_owned(),
            ours,
            raw,
            ratio: raw.map(|raw| ours / raw),
            limit: limit.into(),
            runs: self.options.runs,
            note: note.to_owned(),
        };
        (self.done)(&figure);
        self.figures.push(figure);
    }

    async fn sandbox(&self) -> Result<Sandbox> {
        Sandbox::create(&self.daemon.http, json!({"timeout": 3600, "metadata": {"of": "bench"}})).await
    }

    async fn command(&mut self) -> Result<()> {
        let sandbox = self.sandbox().await?;
        let mut echo = self.raw.create_echo("exec", 0)?;
        self.raw.start(&mut echo)?;
        let (mut ours, mut raw) = (Vec::new(), Vec::new());
        let mut alternating = Vec::new();
        for _ in 0..=self.options.runs {
            for _ in 0..IN_A_ROW {
                ours.push(hello(&sandbox).await?);
            }
            for _ in 0..IN_A_ROW {
                raw.push(self.raw.exec("exec", &HELLO)?);
            }
            // The first after what somebody else did: caches and processors are cold.
            alternating.push(hello(&sandbox).await?);
        }
        self.raw.delete("exec");
        sandbox.kill().await?.expect(204)?;
        let (ours, raw, alternating) = (median_ms(&ours), median_ms(&raw), median_ms(&alternating));
        let note = "`echo hi` through the API ÷ runsc exec of the same, each several times in a row";
        self.tell("command", "ms", ours, Some(raw), 0.35, note);
        let note = "the first `echo hi` after a pause of some 100 ms ÷ runsc exec in a row";
        self.tell("command-after-rest", "ms", alternating, Some(raw), None, note);
        Ok(())
    }

    async fn create(&mut self) -> Result<()> {
        let (mut ours, mut raw) = (Vec::new(), Vec::new());
        for run in 0..=self.options.runs {
            // The pool fills again between two creates, as it does between two requests of a day.
            processes_are_settled(&self.daemon).await?;
            let started = Instant::now();
            let sandbox = self.sandbox().await?;
            ensure!(sandbox.sh("echo hi").await? == "hi\n", "the command's output is wrong");
            ours.push(started.elapsed());
            sandbox.kill().await?.expect(204)?;
            raw.push(self.raw.cold_start(&format!("cold{run}"), &HELLO)?);
        }
        let (ours, raw) = (median_ms(&ours), median_ms(&raw));
        self.tell(
            "create",
            "ms",
            ours,
            Some(raw),
            0.5,
            "create → first command's output ÷ runsc run of the same",
        );
        Ok(())
    }

    /// Waits for the end of what the one side began and did not wait for (processes that end, pages that
    /// are written, blocks that are freed): it would be measured as the other side's.
    async fn settle(&self) -> Result<()> {
        processes_are_settled(&self.daemon).await?;
        tokio::task::spawn_blocking(rustix::fs::sync).await.context("the sync panicked")
    }

    async fn pause_and_resume(&mut self) -> Result<()> {
        let sandbox = self.sandbox().await?;
        sandbox.spawn(&format!("exec python3 -c '{HOLD}' {HELD_MIB}")).await?;
        answers(&sandbox, 8000).await?;
        let mut echo = self.raw.create_echo("echo0", HELD_MIB)?;
        self.raw.start(&mut echo)?;
        let (mut pauses, mut checkpoints) = (Vec::new(), Vec::new());
        let (mut resumes, mut restores, mut thaws) = (Vec::new(), Vec::new(), Vec::new());
        for run in 0..=self.options.runs {
            let image = self.raw.image(&format!("image{run}"));
            self.settle().await?;
            checkpoints.push(self.raw.checkpoint(&echo.id, &image)?);
            self.raw.delete(&echo.id);
            echo = self.raw.create_echo(&format!("echo{}", run + 1), HELD_MIB)?;
            restores.push(self.raw.restore(&mut echo, &image)?);
            std::fs::remove_dir_all(&image)?;
            self.settle().await?;
            let started = Instant::now();
            sandbox.pause().await?;
            pauses.push(started.elapsed());
            self.settle().await?;
            let started = Instant::now();
            sandbox.resume().await?;
            sandbox.get(8000, "/").await?.expect(200)?;
            resumes.push(started.elapsed());
            thaws.push(self.thaw(&sandbox).await?);
        }
        self.raw.delete(&echo.id);
        sandbox.kill().await?.expect(204)?;
        let (pause, checkpoint) = (median_ms(&pauses), median_ms(&checkpoints));
        let (resume, restore, thaw) = (median_ms(&resumes), median_ms(&restores), median_ms(&thaws));
        let note = format!("pause to disk ÷ runsc checkpoint (uncompressed, direct), {HELD_MIB} MiB held");
        self.tell("pause", "ms", pause, Some(checkpoint), 1.25, &note);
        let note = "resume from disk → first reply ÷ runsc restore into a created container → first reply";
        self.tell("resume", "ms", resume, Some(restore), 1.25, note);
        self.tell(
            "thaw",
            "ms",
            thaw,
            Some(resume),
            0.1,
            "frozen → first reply ÷ resume from disk → first reply",
        );
        Ok(())
    }

    async fn thaw(&self, sandbox: &Sandbox) -> Result<Duration> {
        let path = format!("/dormouse/v1/sandboxes/{}/freeze", sandbox.id);
        sandbox.http.api(Method::POST, &path, None).await?.expect(204)?;
        let started = Instant::now();
        sandbox.get(8000, "/").await?.expect(200)?;
        Ok(started.elapsed())
    }

    async fn idle(&mut self) -> Result<()> {
        processes_are_settled(&self.daemon).await?;
        let pid = self.daemon.pid();
        let before = proportional(pid)?;
        let mut sandboxes = Vec::new();
        for _ in 0..IDLE_SANDBOXES {
            sandboxes.push(self.sandbox().await?);
        }
        processes_are_settled(&self.daemon).await?;
        let keepers: f64 =
            keepers(&self.daemon.data_dir, pid)?.into_iter().map(proportional).sum::<Result<f64>>()?;
        let each = (keepers + proportional(pid)? - before) / f64::from(IDLE_SANDBOXES) / MIB;
        let note = "proportional memory of keeper and daemon per idle sandbox, beyond runsc's own";
        self.tell("idle-memory", "MiB", each, None, 3.0, note);
        let path = format!("/dormouse/v1/sandboxes/{}/freeze", sandboxes[0].id);
        self.daemon.http.api(Method::POST, &path, None).await?.expect(204)?;
        let used = self.cpu_over(&sandboxes[0], Duration::from_secs(5)).await?;
        self.tell(
            "frozen-cpu",
            "ms",
            used,
            None,
            0.0,
            "CPU time of all host processes of a frozen sandbox in 5 s",
        );
        for sandbox in sandboxes {
            sandbox.kill().await?.expect(204)?;
        }
        Ok(())
    }

    /// CPU time of the sandbox's host processes (keeper excepted) over a while, milliseconds.
    async fn cpu_over(&self, sandbox: &Sandbox, time: Duration) -> Result<f64> {
        let processes = host::processes_of_runtime(&self.daemon.data_dir, self.daemon.pid(), &sandbox.id)?;
        ensure!(!processes.is_empty(), "no host process of {} was found", sandbox.id);
        let before = host::cpu_ticks(&processes);
        tokio::time::sleep(time).await;
        let ticks = host::cpu_ticks(&processes) - before;
        Ok(f64::from(u32::try_from(ticks)?) * 10.0)
    }

    async fn upload(&mut self) -> Result<()> {
        let sandbox = self.sandbox().await?;
        let plain = upload::plain_server(self.scratch.join("upload.bin")).await?;
        let headers = [
            ("e2b-sandbox-id", sandbox.id.clone()),
            ("e2b-sandbox-port", ENVD_PORT.to_string()),
            ("x-access-token", sandbox.token.clone().unwrap_or_default()),
            ("content-type", "application/octet-stream".to_owned()),
        ];
        let (mut ours, mut raw) = (Vec::new(), Vec::new());
        for _ in 0..self.options.runs {
            raw.push(upload::send(&plain, "/", &[]).await?);
            let address = &self.daemon.http.address;
            ours.push(upload::send(address, "/files?path=/home/user/upload.bin", &headers).await?);
        }
        let size = sandbox.sh("stat -c %s upload.bin").await?;
        ensure!(size.trim() == upload::BYTES.to_string(), "{size} bytes arrived");
        sandbox.kill().await?.expect(204)?;
        let (ours, raw) = (median_ms(&ours), median_ms(&raw));
        self.tell(
            "upload",
            "ms",
            ours,
            Some(raw),
            2.0,
            "1 GiB into a sandbox's file ÷ plain HTTP upload into a file",
        );
        Ok(())
    }
}

fn keepers(data_dir: &Path, daemon: u32) -> Result<Vec<u32>> {
    let processes = host::holdings(data_dir, daemon)?.processes;
    let keepers = processes.iter().filter(|process| process.contains(" keeper "));
    Ok(keepers.filter_map(|process| process.split_whitespace().next()?.parse().ok()).collect())
}

/// Proportional set size of a process, bytes.
fn proportional(pid: u32) -> Result<f64> {
    let text =
        std::fs::read_to_string(format!("/proc/{pid}/smaps_rollup")).context("cannot read the memory map")?;
    let line = text.lines().find(|line| line.starts_with("Pss:")).context("no Pss line")?;
    let kib: f64 = line.split_whitespace().nth(1).context("no figure")?.parse()?;
    Ok(kib * 1024.0)
}
