//! The main job, a function per step.

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use anyhow::{Context, bail, ensure};
use serde_json::Value;

use super::report::{Report, held, receipt};
use crate::server::Server;

const PREPARE: &str = include_str!("prepare.sh");
const SLEEPER: &str = include_str!("sleeper.py");
/// SHA-256 of the 200 MiB that `sleeper.py` holds.
const HELD_SHA256: &str = "d59201369e39ff4ee9127a4f134764535c4e0d43717797f5d305f727499c91ac";
const WEB_PORT: u16 = 8000;
const STATE_PORT: u16 = 8001;
const FORKS: usize = 4;
const OFFSET: u64 = 17;
/// For what starts in a sandbox; not a figure, only the end of patience.
const PATIENCE: Duration = Duration::from_secs(120);
const POLL: Duration = Duration::from_millis(50);

pub struct Job {
    server: Server,
    report: Report,
    /// Ended with the job, however it goes.
    made: Vec<String>,
}

/// What the processes inside said of themselves.
struct Seen {
    web_pid: u64,
    sleeper_pid: u64,
    count: u64,
    hostname: String,
    random: String,
}

/// A sandbox, and the key that its own API wants.
struct Identity {
    id: String,
    token: String,
    machine_id: String,
    hostname: String,
    random: String,
}

impl Job {
    pub fn new(server: Server) -> Self {
        Self { server, report: Report::default(), made: Vec::new() }
    }

    pub fn run(mut self) -> anyhow::Result<()> {
        let done = self.steps();
        if done.is_err() {
            let sandboxes: Vec<&str> = self.made.iter().map(String::as_str).collect();
            // The error that counts is the one above.
            let _ = self.server.cli(&[&["kill"], sandboxes.as_slice()].concat());
        }
        done
    }

    fn steps(&mut self) -> anyhow::Result<()> {
        let began = Instant::now();
        let sandbox = self.create()?;
        self.prepare(&sandbox)?;
        let before = self.start(&sandbox)?;
        let snapshot = self.pause(&sandbox)?;
        self.kill_the_daemon(&sandbox)?;
        self.resume(&sandbox, &before)?;
        let forks = self.fork(&sandbox)?;
        self.rollback(&sandbox, &snapshot, &before)?;
        self.log(&sandbox, &snapshot, &forks)?;
        self.clean_up(&sandbox, &forks)?;
        let steps = self.report.steps();
        println!("all {steps} steps are as claimed ({:.1} s)", began.elapsed().as_secs_f64());
        Ok(())
    }

    fn create(&mut self) -> anyhow::Result<String> {
        let server = &self.server;
        let sandbox = self.report.step("create a sandbox of the template base", || {
            let answer = server.cli(&["create", "--template", "base", "--timeout", "3600"])?;
            for one in answer["receipts"].as_array().into_iter().flatten() {
                receipt(one);
            }
            text(&answer, "sandboxID")
        })?;
        self.made.push(sandbox.clone());
        Ok(sandbox)
    }

    fn prepare(&mut self, sandbox: &str) -> anyhow::Result<()> {
        let server = &self.server;
        self.report.step("make a repository with history in it, clone it", || {
            server.exec(sandbox, PREPARE)?;
            let commits = server.exec(sandbox, "git -C ~/work rev-list --count HEAD")?;
            ensure!(commits == "5", "the clone has {commits} commits, 5 were made");
            held("the clone has the 5 commits");
            Ok(())
        })?;
        self.report.step("install a package as root", || {
            let install = "dpkg -i /home/user/demo-hello.deb > /dev/null";
            server.text(&["exec", "--user", "root", sandbox, "--", "bash", "-c", install])?;
            let said = server.exec(sandbox, "demo-hello")?;
            ensure!(said == "hello from a package", "the package's program said {said:?}");
            held("the package's program runs");
            Ok(())
        })
    }

    fn start(&mut self, sandbox: &str) -> anyhow::Result<Seen> {
        let server = &self.server;
        self.report.step("start an HTTP server, and a process that holds 200 MiB and counts", || {
            let port = WEB_PORT.to_string();
            let web = ["python3", "-m", "http.server", &port, "--directory", "/home/user/work"];
            let web = server.cli(&[&["exec", "-d", sandbox, "--"], web.as_slice()].concat())?;
            let sleeper = ["python3", "-c", SLEEPER, "/home/user/work/README"];
            let sleeper = server.cli(&[&["exec", "-d", sandbox, "--"], sleeper.as_slice()].concat())?;
            let (web, sleeper) = (number(&web, "pid")?, number(&sleeper, "pid")?);
            wait_for_port(server, sandbox, WEB_PORT)?;
            wait_for_port(server, sandbox, STATE_PORT)?;
            let seen = look(server, sandbox, web)?;
            ensure!(seen.sleeper_pid == sleeper, "the process says pid {}, envd {sleeper}", seen.sleeper_pid);
            held("both answer through their exposed ports");
            held("the 200 MiB have the known hash");
            Ok(seen)
        })
    }

    fn pause(&mut self, sandbox: &str) -> anyhow::Result<String> {
        let server = &self.server;
        self.report.step("pause it to disk", || {
            let answer = server.cli(&["pause", sandbox])?;
            receipt(&answer["receipt"]);
            let snapshot = text(&answer["snapshot"], "snapshotID")?;
            let info = server.cli(&["info", sandbox])?;
            ensure!(info["state"] == "paused", "its state is {}", info["state"]);
            let mib = number(&answer["snapshot"], "bytes")? >> 20;
            held(&format!("it is paused, as snapshot {snapshot} ({mib} MiB)"));
            Ok(snapshot)
        })
    }

    fn kill_the_daemon(&mut self, sandbox: &str) -> anyhow::Result<()> {
        let server = &mut self.server;
        self.report.step("kill -9 the daemon, start it again", || {
            let pid = server.pid().context("no daemon runs")?;
            server.kill_9()?;
            let ready = server.spawn()?;
            let info = server.cli(&["info", sandbox])?;
            ensure!(info["state"] == "paused", "after the restart its state is {}", info["state"]);
            held(&format!("daemon {pid} is gone, the new one was ready after {} ms", ready.as_millis()));
            held("the sandbox is still paused");
            Ok(())
        })
    }

    fn resume(&mut self, sandbox: &str, before: &Seen) -> anyhow::Result<()> {
        let server = &self.server;
        self.report.step("resume it", || {
            let answer = server.cli(&["resume", sandbox, "--timeout", "3600"])?;
            receipt(&answer);
            let after = look(server, sandbox, before.web_pid)?;
            same_processes(before, &after)?;
            ensure!(after.count >= before.count, "the counter was {}, is {}", before.count, after.count);
            let later = counts_on(server, sandbox, after.count)?;
            held(&format!("same process ids ({} and {})", after.web_pid, after.sleeper_pid));
            held(&format!("the counter went on: {} → {} → {later}", before.count, after.count));
            held("the hash is equal, the open file has its offset, the HTTP server answers");
            Ok(())
        })
    }

    fn fork(&mut self, sandbox: &str) -> anyhow::Result<Vec<String>> {
        let server = &self.server;
        let forks = self.report.step(&format!("fork it into {FORKS}"), || {
            let count = FORKS.to_string();
            let answer = server.cli(&["fork", sandbox, "-n", &count, "--timeout", "3600"])?;
            let answers = answer.as_array().context("fork gave no list")?;
            ensure!(answers.len() == FORKS, "fork gave {} sandboxes", answers.len());
            if let Some(first) = answers.first() {
                receipt(&first["receipt"]);
            }
            answers.iter().map(|one| text(&one["sandbox"], "sandboxID")).collect::<anyhow::Result<Vec<_>>>()
        })?;
        self.made.extend(forks.iter().cloned());
        self.report.step("look at each of them", || {
            let all: Vec<&str> = std::iter::once(sandbox).chain(forks.iter().map(String::as_str)).collect();
            all_differ(server, &all)?;
            for fork in &forks {
                let state = state(server, fork, "/")?;
                let (count, pid) = (number(&state, "count")?, number(&state, "pid")?);
                let later = counts_on(server, fork, count)?;
                println!("      {fork}: process {pid} counts on, {count} → {later}");
            }
            held("each goes on by itself");
            none_sees_anothers_writes(server, &all)?;
            held("none sees another's writes");
            Ok(())
        })?;
        Ok(forks)
    }

    fn rollback(&mut self, sandbox: &str, snapshot: &str, before: &Seen) -> anyhow::Result<()> {
        let server = &self.server;
        self.report.step("write a file, roll the source back to the earlier snapshot", || {
            server.exec(sandbox, "echo later > ~/later && sync")?;
            let ahead = number(&state(server, sandbox, "/")?, "count")?;
            let answer = server.cli(&["rollback", sandbox, snapshot])?;
            receipt(&answer);
            let after = look(server, sandbox, before.web_pid)?;
            same_processes(before, &after)?;
            let there = server.exec(sandbox, "test -e ~/later && echo yes || echo no")?;
            ensure!(there == "no", "the file that was written after the snapshot is still there");
            ensure!(
                after.count >= before.count && after.count < ahead,
                "the counter is {}; it was {} at the snapshot and {ahead} before the rollback",
                after.count,
                before.count
            );
            held("what was written after the snapshot is gone");
            held(&format!("the counter went back from {ahead} to {}, and the hash is equal", after.count));
            Ok(())
        })
    }

    fn log(&mut self, sandbox: &str, snapshot: &str, forks: &[String]) -> anyhow::Result<()> {
        let server = &self.server;
        self.report.step("print the lineage", || {
            let tree = server.text(&["log"])?;
            let ours: Vec<&str> = std::iter::once(sandbox)
                .chain(std::iter::once(snapshot))
                .chain(forks.iter().map(String::as_str))
                .collect();
            for line in tree.lines() {
                println!("      {line}");
            }
            if let Some(missing) = ours.iter().find(|id| !tree.contains(**id)) {
                bail!("{missing} is not in the lineage");
            }
            held("the source, its snapshot and the forks are in it");
            Ok(())
        })
    }

    fn clean_up(&mut self, sandbox: &str, forks: &[String]) -> anyhow::Result<()> {
        let server = &mut self.server;
        self.report.step("end all of them, and the daemon", || {
            let mut args = vec!["kill", sandbox];
            args.extend(forks.iter().map(String::as_str));
            server.cli(&args)?;
            let list = server.cli(&["ls"])?;
            let left: Vec<&str> = list
                .as_array()
                .into_iter()
                .flatten()
                .filter_map(|one| one["sandboxID"].as_str())
                .filter(|id| args.contains(id))
                .collect();
            ensure!(left.is_empty(), "still listed after kill: {}", left.join(", "));
            server.stop()
        })
    }
}

fn text(value: &Value, field: &str) -> anyhow::Result<String> {
    value[field].as_str().map(str::to_owned).with_context(|| format!("the answer has no {field}: {value}"))
}

fn number(value: &Value, field: &str) -> anyhow::Result<u64> {
    value[field].as_u64().with_context(|| format!("the answer has no {field}: {value}"))
}

/// What the sleeper says of itself.
fn state(server: &Server, sandbox: &str, path: &str) -> anyhow::Result<Value> {
    let answer = server.get_port(sandbox, STATE_PORT, path)?;
    ensure!(answer.status == 200, "port {STATE_PORT} of {sandbox} answered {}", answer.status);
    serde_json::from_slice(&answer.body).context("the process inside did not answer JSON")
}

fn wait_for_port(server: &Server, sandbox: &str, port: u16) -> anyhow::Result<()> {
    let began = Instant::now();
    loop {
        if server.get_port(sandbox, port, "/").is_ok_and(|answer| answer.status == 200) {
            return Ok(());
        }
        ensure!(began.elapsed() < PATIENCE, "port {port} of {sandbox} does not answer after {PATIENCE:?}");
        std::thread::sleep(POLL);
    }
}

/// Both processes, looked at through their ports and from beside.
fn look(server: &Server, sandbox: &str, web_pid: u64) -> anyhow::Result<Seen> {
    let page = server.get_port(sandbox, WEB_PORT, "/README")?;
    let page = String::from_utf8_lossy(&page.body).into_owned();
    ensure!(page.starts_with("line 1 of a file"), "the HTTP server sent {page:?}");
    let command = server.exec(sandbox, &format!("tr '\\0' ' ' < /proc/{web_pid}/cmdline"))?;
    ensure!(command.contains("http.server"), "process {web_pid} is {command:?}, not the HTTP server");
    let state = state(server, sandbox, "/whole")?;
    let sha256 = text(&state, "sha256")?;
    ensure!(sha256 == HELD_SHA256, "the memory's hash is {sha256}, it was {HELD_SHA256}");
    let offset = number(&state, "offset")?;
    ensure!(offset == OFFSET, "the open file's offset is {offset}, it was {OFFSET}");
    Ok(Seen {
        web_pid,
        sleeper_pid: number(&state, "pid")?,
        count: number(&state, "count")?,
        hostname: text(&state, "hostname")?,
        random: text(&state, "random")?,
    })
}

fn same_processes(before: &Seen, after: &Seen) -> anyhow::Result<()> {
    ensure!(
        before.sleeper_pid == after.sleeper_pid,
        "the process id was {}, is {}",
        before.sleeper_pid,
        after.sleeper_pid
    );
    ensure!(
        before.hostname == after.hostname,
        "the host name was {}, is {}",
        before.hostname,
        after.hostname
    );
    ensure!(before.random != after.random, "the random numbers of before came again after the resume");
    Ok(())
}

/// Waits until the counter is past `from`.
fn counts_on(server: &Server, sandbox: &str, from: u64) -> anyhow::Result<u64> {
    let began = Instant::now();
    loop {
        let count = number(&state(server, sandbox, "/")?, "count")?;
        if count > from {
            return Ok(count);
        }
        ensure!(began.elapsed() < PATIENCE, "the counter of {sandbox} stands still at {count}");
        std::thread::sleep(POLL);
    }
}

fn identity(server: &Server, sandbox: &str) -> anyhow::Result<Identity> {
    let info = server.cli(&["info", sandbox])?;
    let state = state(server, sandbox, "/")?;
    let machine_id = server.exec(sandbox, "cat /etc/machine-id")?;
    let hostname = text(&state, "hostname")?;
    let random = text(&state, "random")?;
    Ok(Identity {
        id: text(&info, "sandboxID")?,
        token: text(&info, "envdAccessToken")?,
        machine_id,
        hostname,
        random,
    })
}

/// Identity and random numbers, of processes that ran already at the fork too.
fn all_differ(server: &Server, all: &[&str]) -> anyhow::Result<()> {
    let identities = all.iter().map(|id| identity(server, id)).collect::<anyhow::Result<Vec<_>>>()?;
    let distinct = |what: &str, of: &dyn Fn(&Identity) -> String| {
        let values: BTreeSet<String> = identities.iter().map(of).collect();
        ensure!(values.len() == all.len(), "{what} is not different in each: {values:?}");
        Ok(())
    };
    distinct("the sandbox id", &|one| one.id.clone())?;
    distinct("the access token", &|one| one.token.clone())?;
    distinct("the machine id", &|one| one.machine_id.clone())?;
    distinct("the host name", &|one| one.hostname.clone())?;
    distinct("the kernel's random number", &|one| one.random.clone())?;
    held("they differ in id, access token, machine id, host name and random numbers");
    Ok(())
}

fn none_sees_anothers_writes(server: &Server, all: &[&str]) -> anyhow::Result<()> {
    for id in all {
        server.exec(id, &format!("echo {id} > ~/mine && mkdir ~/of-{id}"))?;
    }
    for id in all {
        let seen = server.exec(id, "cat ~/mine; cd ~ && ls -d of-*")?;
        ensure!(seen == format!("{id}\nof-{id}"), "{id} sees {seen:?}");
    }
    Ok(())
}
