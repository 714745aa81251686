//! A real `dormouse serve` child, and the command line used against it as a user would.

use std::fs::File;
use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;

/// A start after kill -9 with many sandboxes takes a while; it is no figure, only the end of patience.
const READY_PATIENCE: Duration = Duration::from_secs(120);
const STOP_PATIENCE: Duration = Duration::from_secs(60);
const POLL: Duration = Duration::from_millis(20);

pub struct Server {
    pub binary: PathBuf,
    pub data_dir: PathBuf,
    pub listen: String,
    pub key: String,
    log: PathBuf,
    environment: Vec<(String, String)>,
    child: Option<Child>,
}

/// An HTTP answer, body whole.
pub struct Answer {
    pub status: u16,
    pub body: Vec<u8>,
}

impl Server {
    /// Starts a daemon on a free loopback port and waits until it is ready.
    pub fn start(binary: &Path, data_dir: &Path) -> anyhow::Result<Self> {
        Self::start_with(binary, data_dir, &[])
    }

    /// The same with variables of its own.
    pub fn start_with(
        binary: &Path,
        data_dir: &Path,
        environment: &[(String, String)],
    ) -> anyhow::Result<Self> {
        std::fs::create_dir_all(data_dir).with_context(|| format!("cannot make {}", data_dir.display()))?;
        let probe = TcpListener::bind("127.0.0.1:0").context("cannot find a free loopback port")?;
        let listen = probe.local_addr()?.to_string();
        drop(probe);
        let mut server = Self {
            binary: binary.to_owned(),
            data_dir: data_dir.to_owned(),
            listen,
            key: String::new(),
            log: data_dir.join("serve.log"),
            environment: environment.to_vec(),
            child: None,
        };
        server.spawn()?;
        let key = server.cli(&["key", "create", "xtask"])?;
        server.key = key["key"].as_str().context("`dormouse key create --json` printed no key")?.to_owned();
        Ok(server)
    }

    /// Starts it (again) on the same address.
    pub fn spawn(&mut self) -> anyhow::Result<Duration> {
        let began = Instant::now();
        let log = File::options()
            .create(true)
            .append(true)
            .open(&self.log)
            .with_context(|| format!("cannot open {}", self.log.display()))?;
        let child = Command::new(&self.binary)
            .args(["serve", "--listen", &self.listen, "--data-dir"])
            .arg(&self.data_dir)
            .envs(self.environment.iter().map(|(name, value)| (name, value)))
            .stdin(Stdio::null())
            .stdout(log.try_clone()?)
            .stderr(log)
            .spawn()
            .with_context(|| format!("cannot start {}", self.binary.display()))?;
        self.child = Some(child);
        while self.get("/health", &[]).map_or(true, |answer| !(200..300).contains(&answer.status)) {
            let child = self.child.as_mut().context("the daemon is gone")?;
            if let Some(status) = child.try_wait()? {
                bail!("`dormouse serve` ended with {status}:\n{}", self.log_tail());
            }
            if began.elapsed() > READY_PATIENCE {
                bail!("`dormouse serve` is not ready after {READY_PATIENCE:?}:\n{}", self.log_tail());
            }
            std::thread::sleep(POLL);
        }
        Ok(began.elapsed())
    }

    /// Another daemon on the same address, whatever became of this one.
    pub fn replace(&mut self) -> anyhow::Result<()> {
        self.kill_9()?;
        self.spawn().map(drop)
    }

    pub fn pid(&self) -> Option<u32> {
        self.child.as_ref().map(Child::id)
    }

    /// kill -9, by its process id, and waits until the kernel has it no more.
    pub fn kill_9(&mut self) -> anyhow::Result<()> {
        let mut child = self.child.take().context("no daemon runs")?;
        child.kill().context("cannot kill the daemon")?;
        child.wait().context("cannot wait for the daemon")?;
        Ok(())
    }

    /// SIGTERM, and waits for the end.
    pub fn stop(&mut self) -> anyhow::Result<()> {
        let mut child = self.child.take().context("no daemon runs")?;
        if let Some(pid) = i32::try_from(child.id()).ok().and_then(Pid::from_raw) {
            kill_process(pid, Signal::TERM).context("cannot stop the daemon")?;
        }
        let began = Instant::now();
        while child.try_wait()?.is_none() {
            if began.elapsed() > STOP_PATIENCE {
                child.kill()?;
                child.wait()?;
                bail!("the daemon did not end within {STOP_PATIENCE:?} of SIGTERM:\n{}", self.log_tail());
            }
            std::thread::sleep(POLL);
        }
        Ok(())
    }

    /// `dormouse …` against this daemon, ready to be changed and run.
    pub fn command(&self, args: &[&str]) -> Command {
        let mut command = Command::new(&self.binary);
        command
            .args(args)
            .env("DORMOUSE_URL", format!("http://{}", self.listen))
            .env("DORMOUSE_DATA_DIR", &self.data_dir)
            .env_remove("E2B_API_KEY");
        if self.key.is_empty() {
            command.env_remove("DORMOUSE_API_KEY");
        } else {
            command.env("DORMOUSE_API_KEY", &self.key);
        }
        command
    }

    /// `dormouse --json …`, and what it printed.
    pub fn cli(&self, args: &[&str]) -> anyhow::Result<Value> {
        // Before the command: after a `--` it would be the command's own.
        let text = self.text(&[&["--json"], args].concat())?;
        if text.trim().is_empty() {
            return Ok(Value::Null);
        }
        serde_json::from_str(&text).with_context(|| {
            format!("`dormouse {}` printed something that is not JSON: {text}", args.join(" "))
        })
    }

    /// `dormouse …`, and what it printed.
    pub fn text(&self, args: &[&str]) -> anyhow::Result<String> {
        let output = self.command(args).stdin(Stdio::null()).output().context("cannot start dormouse")?;
        if !output.status.success() {
            bail!(
                "`dormouse {}` ended with {}: {}{}",
                args.join(" "),
                output.status,
                String::from_utf8_lossy(&output.stderr),
                String::from_utf8_lossy(&output.stdout)
            );
        }
        Ok(String::from_utf8_lossy(&output.stdout).into_owned())
    }

    /// A shell command in a sandbox, its stdout without the newline at the end.
    pub fn exec(&self, sandbox: &str, shell: &str) -> anyhow::Result<String> {
        Ok(self.text(&["exec", sandbox, "--", "bash", "-c", shell])?.trim_end().to_owned())
    }

    /// GET from a port of a sandbox, through the daemon's data plane.
    pub fn get_port(&self, sandbox: &str, port: u16, path: &str) -> anyhow::Result<Answer> {
        let port = port.to_string();
        self.get(path, &[("E2b-Sandbox-Id", sandbox), ("E2b-Sandbox-Port", &port)])
    }

    fn get(&self, path: &str, headers: &[(&str, &str)]) -> anyhow::Result<Answer> {
        let mut stream = TcpStream::connect(&self.listen)?;
        stream.set_read_timeout(Some(Duration::from_secs(60)))?;
        let mut request = format!("GET {path} HTTP/1.1\r\nHost: {}\r\nConnection: close\r\n", self.listen);
        for (name, value) in headers {
            request.push_str(&format!("{name}: {value}\r\n"));
        }
        request.push_str("\r\n");
        stream.write_all(request.as_bytes())?;
        let mut bytes = Vec::new();
        stream.read_to_end(&mut bytes)?;
        parse(&bytes)
    }

    fn log_tail(&self) -> String {
        let text = std::fs::read_to_string(&self.log).unwrap_or_default();
        let lines: Vec<&str> = text.lines().collect();
        lines[lines.len().saturating_sub(20)..].join("\n")
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        // After a failure: the daemon must not outlive the command. Its sandboxes are found again by the next one.
        if let Some(mut child) = self.child.take() {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

fn parse(bytes: &[u8]) -> anyhow::Result<Answer> {
    let end = bytes.windows(4).position(|w| w == b"\r\n\r\n").context("the answer has no end of headers")?;
    let head = String::from_utf8_lossy(&bytes[..end]).into_owned();
    let status = head.split(' ').nth(1).and_then(|s| s.parse().ok()).context("the answer has no status")?;
    let chunked = head.to_ascii_lowercase().contains("transfer-encoding: chunked");
    let body = &bytes[end + 4..];
    Ok(Answer { status, body: if chunked { dechunk(body)? } else { body.to_vec() } })
}

fn dechunk(mut rest: &[u8]) -> anyhow::Result<Vec<u8>> {
    let mut body = Vec::new();
    loop {
        let at = rest.windows(2).position(|w| w == b"\r\n").context("a chunk has no size")?;
        let size = std::str::from_utf8(&rest[..at])?.split(';').next().unwrap_or_default();
        let size = usize::from_str_radix(size.trim(), 16).context("a chunk's size is not hexadecimal")?;
        let chunk = rest.get(at + 2..at + 2 + size).context("a chunk is cut short")?;
        if size == 0 {
            return Ok(body);
        }
        body.extend_from_slice(chunk);
        rest = rest.get(at + 4 + size..).context("a chunk has no end")?;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn chunked_answers_are_joined() {
        let answer = parse(
            b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n2;x=1\r\nde\r\n0\r\n\r\n",
        );
        let answer = answer.expect("it is well formed");
        assert_eq!((answer.status, answer.body.as_slice()), (200, b"abcde".as_slice()));
        assert!(parse(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nab").is_err());
    }
}
