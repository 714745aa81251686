//! Each figure of the microVM engine, through the public API: forks, starts, what they take of disk and memory.
//!
//! Times are the host's clock. In the emulated lab they are not what a processor would need: where a limit makes
//! sense there all the same, it is one that was promised for the lab.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use futures_util::future::try_join_all;
use hyper::Method;
use serde_json::{Value, json};

use super::qemu::Qemu;
use super::{Figure, MIB, Options, host_memory, median_ms, middle, monitors};
use crate::daemon::Daemon;
use crate::sandbox::Sandbox;

/// Forks at once.
const COUNTS: [u32; 3] = [1, 10, 100];
/// What a fork takes at most of the host, its keeper and what it writes by running on included.
const FORK_MIB: u64 = 24;
/// Of the host, for everything else.
const SPARE_MIB: u64 = 1024;
const IDLE_FORKS: u32 = 10;
/// How long a fork is left alone before its memory is looked at.
const IDLE: Duration = Duration::from_secs(5);
/// Written anew by a process inside between two checkpoints.
const DIRTY_MIB: u32 = 64;
/// Checkpoints of one sandbox, the first one aside: more would make one layer of many.
const CHECKPOINTS_IN_A_ROW: u32 = 5;
/// Holds memory and, asked for it, writes to each of its pages.
const DIRTY: &str = r#"import socket, sys
held = memoryview(bytearray(int(sys.argv[1]) << 20))
server = socket.create_server(("127.0.0.1", 8000))
turn = 0
while True:
    client, _ = server.accept()
    client.recv(65536)
    turn += 1
    for page in range(0, len(held), 4096):
        held[page:page + 8] = (turn << 32 | page + 1).to_bytes(8, "little")
    client.sendall(b"HTTP/1.1 200 OK\r\ncontent-length: 3\r\nconnection: close\r\n\r\nhi\n")
    client.close()
"#;

struct Bench<'a> {
    options: &'a Options,
    daemon: Daemon,
    figures: Vec<Figure>,
    done: &'a mut dyn FnMut(&Figure),
}

pub async fn all(options: &Options, done: &mut dyn FnMut(&Figure)) -> Result<Vec<Figure>> {
    let engine = [("DORMOUSE_ENGINE".to_owned(), "microvm".to_owned())];
    let daemon = Daemon::start(&options.binary, &options.data_dir, &engine).await?;
    let mut bench = Bench { options, daemon, figures: Vec::new(), done };
    let measured = bench.measure().await;
    let Bench { daemon, figures, .. } = bench;
    let killed = super::kill_all(&daemon.http).await;
    let stopped = daemon.stop().await;
    measured.and(killed).and(stopped)?;
    Ok(figures)
}

impl Bench<'_> {
    async fn measure(&mut self) -> Result<()> {
        if self.options.wants("microvm-fork") {
            self.forks().await?;
        }
        if self.options.wants("microvm-create") {
            self.create().await?;
        }
        if self.options.wants("microvm-resume") {
            self.resume().await?;
        }
        if self.options.wants("microvm-incremental") {
            self.incremental().await?;
        }
        if self.options.wants("microvm-memory") {
            self.memory().await?;
        }
        if self.options.wants("microvm-disk") {
            self.disk().await?;
        }
        Ok(())
    }

    fn tell(&mut self, figure: Figure) {
        (self.done)(&figure);
        self.figures.push(figure);
    }

    async fn sandbox(&self) -> Result<Sandbox> {
        let request =
            json!({"timeout": 3600, "metadata": {"of": "bench"}, "dormouse": {"engine": "microvm"}});
        Sandbox::create(&self.daemon.http, request).await
    }

    async fn ready(&self) -> Result<()> {
        super::processes_are_settled(&self.daemon).await
    }

    /// From the call to the answer: each child's agent has then taken its new identity and randomness.
    async fn forks(&mut self) -> Result<()> {
        let source = self.sandbox().await?;
        source.sh("echo hi").await?;
        let (mut stopped, room) = (Vec::new(), host_memory::available_mib()?);
        for count in COUNTS {
            let name = format!("microvm-fork-{count}");
            if self.options.only.iter().any(|one| one.starts_with("microvm-fork-"))
                && !self.options.only.contains(&name)
            {
                continue;
            }
            let needed = u64::from(count) * FORK_MIB + SPARE_MIB;
            if room < needed {
                eprintln!("  {name} is left out: it needs {needed} MiB, {room} are there");
                continue;
            }
            let mut times = Vec::new();
            // The first of each count finds everything cold.
            for _ in 0..=self.options.runs {
                self.ready().await?;
                let started = Instant::now();
                let forks = source.fork(count).await?;
                times.push(started.elapsed());
                stopped.push(stopped_ms(&forks[0]).await?);
                for killed in try_join_all(forks.iter().map(Sandbox::kill)).await? {
                    killed.expect(204)?;
                }
            }
            let note =
                "fork by the API → all answers: every child's agent has its new identity and randomness";
            let figure = Figure::new(name, "ms", median_ms(&times), self.options.runs);
            let limit = (count == 1).then_some(60.0);
            self.tell(figure.within(limit).noted(&format!("{note}; least {:.1}", super::least_ms(&times))));
        }
        let note =
            "the source stood still for a fork of a guest that runs a whole Linux, as its receipt says";
        let figure = Figure::new("microvm-fork-stopped".to_owned(), "ms", middle(stopped), self.options.runs);
        self.tell(figure.noted(note));
        source.kill().await?.expect(204)?;
        Ok(())
    }

    async fn create(&mut self) -> Result<()> {
        // The first one asks for the zygote.
        self.sandbox().await?.kill().await?.expect(204)?;
        let mut times = Vec::new();
        for _ in 0..=self.options.runs {
            self.ready().await?;
            let started = Instant::now();
            let sandbox = self.sandbox().await?;
            ensure!(sandbox.sh("echo hi").await? == "hi\n", "the command's output is wrong");
            times.push(started.elapsed());
            sandbox.kill().await?.expect(204)?;
        }
        let note = "create from the template's zygote → first command's output; no limit was set";
        let figure = Figure::new("microvm-create".to_owned(), "ms", median_ms(&times), self.options.runs);
        self.tell(figure.noted(note));
        Ok(())
    }

    async fn resume(&mut self) -> Result<()> {
        let sandbox = self.sandbox().await?;
        let mut times = Vec::new();
        for _ in 0..=self.options.runs {
            sandbox.pause().await?;
            self.ready().await?;
            let started = Instant::now();
            sandbox.resume().await?;
            ensure!(sandbox.sh("echo hi").await? == "hi\n", "the command's output is wrong");
            times.push(started.elapsed());
        }
        sandbox.kill().await?.expect(204)?;
        let note = "resume from disk → first command's output; no limit was set";
        let figure = Figure::new("microvm-resume".to_owned(), "ms", median_ms(&times), self.options.runs);
        self.tell(figure.noted(note));
        Ok(())
    }

    /// What a checkpoint writes, of what a process inside wrote since the one before.
    async fn incremental(&mut self) -> Result<()> {
        let mut ratios = Vec::new();
        while ratios.len() < self.options.runs as usize {
            let sandbox = self.sandbox().await?;
            sandbox.spawn(&format!("exec python3 -c '{DIRTY}' {DIRTY_MIB}")).await?;
            super::answers(&sandbox, 8000).await?;
            sandbox.snapshot().await?;
            for _ in 0..CHECKPOINTS_IN_A_ROW {
                sandbox.get(8000, "/").await?.expect(200)?;
                let snapshot = sandbox.snapshot().await?;
                let written = written_bytes(&self.options.data_dir.join("snapshots").join(&snapshot))?;
                ratios.push(written / (f64::from(DIRTY_MIB) * MIB));
                let path = format!("/dormouse/v1/snapshots/{snapshot}");
                // The last one is what the next lies on: it may be kept.
                drop(self.daemon.http.api(Method::DELETE, &path, None).await?);
            }
            sandbox.kill().await?.expect(204)?;
        }
        let note = format!(
            "bytes of the new memory layer and the state ÷ {DIRTY_MIB} MiB that a process inside wrote page by page; \
             what the rest of the guest wrote counts against us"
        );
        let figure = Figure::new(
            "microvm-incremental".to_owned(),
            "written ÷ dirty",
            middle(ratios),
            self.options.runs,
        );
        self.tell(figure.within(Some(1.1)).noted(&note));
        Ok(())
    }

    async fn memory(&mut self) -> Result<()> {
        let source = self.sandbox().await?;
        source.sh("echo hi").await?;
        self.ready().await?;
        let before: BTreeSet<u32> = monitors(&self.options.data_dir)?.into_iter().collect();
        let forks = source.fork(IDLE_FORKS).await?;
        tokio::time::sleep(IDLE).await;
        let (mut unique, mut own) = (Vec::new(), Vec::new());
        for pid in monitors(&self.options.data_dir)?.into_iter().filter(|pid| !before.contains(pid)) {
            let private = host_memory::private(pid)?;
            unique.push(private.guest_bytes as f64 / MIB);
            own.push(private.other_bytes as f64 / MIB);
        }
        ensure!(unique.len() == IDLE_FORKS as usize, "{} monitors of {IDLE_FORKS} forks", unique.len());
        for killed in try_join_all(forks.iter().map(Sandbox::kill)).await? {
            killed.expect(204)?;
        }
        source.kill().await?.expect(204)?;
        let note = format!(
            "memory of the guest that no other process has, {} s after a fork of {IDLE_FORKS}",
            IDLE.as_secs()
        );
        let figure = Figure::new("microvm-memory-unique".to_owned(), "MiB", middle(unique), IDLE_FORKS);
        self.tell(figure.within(Some(5.0)).noted(&note));
        let note = "the rest of what no other process has: the monitor's own";
        let figure = Figure::new("microvm-memory-own".to_owned(), "MiB", middle(own), IDLE_FORKS);
        self.tell(figure.within(Some(6.0)).noted(note));
        Ok(())
    }
}

/// The throughput of the root disk, against QEMU's.
impl Bench<'_> {
    async fn disk(&mut self) -> Result<()> {
        let (workload, turns) = (workload(), self.options.runs.div_ceil(TURNS_IN_A_ROW));
        let sandbox = self.sandbox().await?;
        let info = sandbox.own_info().await?;
        let shape = |name: &str| info["shape"][name].as_u64().and_then(|value| u32::try_from(value).ok());
        let (cpus, memory) = (shape("cpus").unwrap_or(2), shape("memoryMB").unwrap_or(1024));
        let folder = self.options.data_dir.with_extension("bench");
        let qemu =
            Qemu::new(&folder, &self.options.data_dir.join("guest"), &newest_disk(&self.options.data_dir)?)?;
        let (mut ours, mut raw) = (Timings::new(), Timings::new());
        for _ in 0..turns {
            take(&sandbox.sh_root(&workload).await?, &mut ours)?;
            take(&qemu.run(&workload, memory, cpus)?, &mut raw)?;
        }
        sandbox.kill().await?.expect(204)?;
        std::fs::remove_dir_all(&folder)?;
        for (name, ours) in ours {
            let (ours, raw) = (middle(ours), middle(raw.remove(&name).unwrap_or_default()));
            let figure =
                Figure::new(format!("microvm-disk-{name}"), "s", ours, self.options.runs).against(raw);
            let note = "seconds of dd, direct, on the root disk ÷ the same guest and disk in QEMU; 1.25 is a throughput of 0.8";
            self.tell(figure.within(Some(1.25)).noted(note));
        }
        Ok(())
    }
}

/// Seconds of each kind of work.
type Timings = BTreeMap<String, Vec<f64>>;

/// Times of one boot or one command.
const TURNS_IN_A_ROW: u32 = 5;

/// A shell script that prints `took NAME SECONDS` for each kind of work, several times.
fn workload() -> String {
    let time = |name: &str, dd: &str| {
        format!("begun=$EPOCHREALTIME; dd {dd} 2>/dev/null; took {name} \"$begun\" \"$EPOCHREALTIME\"\n")
    };
    let work = [
        time("write", "if=/dev/zero of=/var/tmp/bench bs=1M count=64 oflag=direct conv=fsync,notrunc"),
        time("read", "if=/var/tmp/bench of=/dev/null bs=1M count=64 iflag=direct"),
        time("read-4k", "if=/var/tmp/bench of=/dev/null bs=4k count=2048 iflag=direct"),
    ];
    format!(
        "took() {{ local a=${{2/./}} b=${{3/./}}; echo \"took $1 $(((b - a) / 1000))\"; }}\n\
         dd if=/dev/zero of=/var/tmp/bench bs=1M count=64 conv=fsync 2>/dev/null\n\
         for turn in {}; do\n{}done\n",
        (1..=TURNS_IN_A_ROW).map(|turn| turn.to_string()).collect::<Vec<_>>().join(" "),
        work.concat()
    )
}

fn take(said: &str, timings: &mut Timings) -> Result<()> {
    let mut taken = 0;
    for line in said.lines().filter_map(|line| line.trim().strip_prefix("took ")) {
        let (name, ms) = line.split_once(' ').with_context(|| format!("{line:?} is no time"))?;
        timings.entry(name.to_owned()).or_default().push(ms.trim().parse::<f64>()? / 1e3);
        taken += 1;
    }
    ensure!(taken == 3 * TURNS_IN_A_ROW, "{taken} times in {said:?}");
    Ok(())
}

/// The root disk that was made last.
fn newest_disk(data_dir: &Path) -> Result<PathBuf> {
    let dir = data_dir.join("microvm/disks");
    let entries =
        std::fs::read_dir(&dir).with_context(|| format!("cannot read {}", dir.display()))?.flatten();
    let newest = entries.max_by_key(|entry| entry.metadata().and_then(|meta| meta.modified()).ok());
    newest.map(|entry| entry.path()).with_context(|| format!("no disk in {}", dir.display()))
}

/// How long the source stood still, as the first receipt says.
async fn stopped_ms(fork: &Sandbox) -> Result<f64> {
    let receipts: Value = fork.own_info().await?["receipts"].clone();
    receipts[0]["stoppedMs"].as_f64().with_context(|| format!("no time in {receipts}"))
}

/// What a checkpoint wrote: its newest layer of memory, and all that is no layer. Layers of disks are the guest's own
/// writes, and older layers are other checkpoints'.
fn written_bytes(snapshot: &Path) -> Result<f64> {
    use std::os::unix::fs::MetadataExt;
    let (mut newest, mut rest) = ((0, 0), 0);
    for entry in std::fs::read_dir(snapshot).with_context(|| format!("cannot read {}", snapshot.display()))? {
        let entry = entry?;
        let (name, bytes) =
            (entry.file_name().to_string_lossy().into_owned(), entry.metadata()?.blocks() * 512);
        match name.strip_prefix("memory.").and_then(|number| number.parse::<u32>().ok()) {
            Some(number) => newest = newest.max((number, bytes)),
            None if name.starts_with("disk") => {}
            None => rest += bytes,
        }
    }
    ensure!(newest.0 > 0, "the checkpoint {} was not incremental", snapshot.display());
    Ok((newest.1 + rest) as f64)
}
