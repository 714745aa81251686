//! A daemon of our own: started, killed without mercy, started again.

use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};

use crate::http::{Call, Http};

const READY_TIMEOUT: Duration = Duration::from_secs(120);

#[derive(Debug)]
pub struct Daemon {
    child: Child,
    binary: PathBuf,
    pub data_dir: PathBuf,
    pub http: Http,
    environment: Vec<(String, String)>,
}

impl Daemon {
    /// Starts `dormouse serve` on a free port of the loopback and waits until it is ready.
    pub async fn start(binary: &Path, data_dir: &Path, environment: &[(String, String)]) -> Result<Self> {
        let address = free_address()?;
        let child = spawn(binary, data_dir, &address, environment)?;
        let http = Http { address, key: String::new() };
        let mut daemon = Self {
            child,
            binary: binary.to_owned(),
            data_dir: data_dir.to_owned(),
            http,
            environment: environment.to_vec(),
        };
        daemon.ready().await?;
        daemon.http.key = daemon.key("testkit")?;
        Ok(daemon)
    }

    /// A new API key, made by the command line.
    pub fn key(&self, name: &str) -> Result<String> {
        let output = self.cli(&["key", "create", "--name", name, "--json"])?;
        let answer: serde_json::Value = serde_json::from_slice(&output)?;
        Ok(answer["key"].as_str().context("`dormouse key create --json` printed no key")?.to_owned())
    }

    /// Runs a command of the command line against this daemon; its standard output when it succeeds.
    pub fn cli(&self, arguments: &[&str]) -> Result<Vec<u8>> {
        let output = Command::new(&self.binary)
            .args(arguments)
            .env("DORMOUSE_DATA_DIR", &self.data_dir)
            .env("DORMOUSE_URL", format!("http://{}", self.http.address))
            .env("DORMOUSE_API_KEY", &self.http.key)
            .stdin(Stdio::null())
            .output()
            .with_context(|| format!("cannot run {}", self.binary.display()))?;
        ensure!(
            output.status.success(),
            "`dormouse {}` ended with {}: {}",
            arguments.join(" "),
            output.status,
            String::from_utf8_lossy(&output.stderr)
        );
        Ok(output.stdout)
    }

    #[must_use]
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// kill -9.
    pub fn kill(&mut self) -> Result<()> {
        self.child.kill().context("cannot kill the daemon")?;
        self.child.wait().context("cannot wait for the daemon")?;
        Ok(())
    }

    /// SIGTERM, and waits for the end: the runtimes it kept ready go with it.
    pub async fn stop(mut self) -> Result<()> {
        let signal = Command::new("kill").arg(self.pid().to_string()).status().context("cannot run kill")?;
        ensure!(signal.success(), "the daemon cannot be told to go: {signal}");
        let end = Instant::now() + READY_TIMEOUT;
        while self.child.try_wait()?.is_none() {
            ensure!(Instant::now() < end, "the daemon did not end in {} s", READY_TIMEOUT.as_secs());
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        Ok(())
    }

    /// Starts it again on the same folder and address.
    pub async fn restart(&mut self) -> Result<()> {
        self.child = spawn(&self.binary, &self.data_dir, &self.http.address, &self.environment)?;
        self.ready().await
    }

    async fn ready(&mut self) -> Result<()> {
        let end = Instant::now() + READY_TIMEOUT;
        loop {
            if let Some(status) = self.child.try_wait()? {
                bail!(
                    "the daemon ended with {status} before it was ready; see {}",
                    self.log_path().display()
                );
            }
            let call = Call { path: "/health", ..Call::default() };
            if let Ok(answer) = self.http.send(call).await
                && answer.status.is_success()
            {
                return Ok(());
            }
            ensure!(Instant::now() < end, "the daemon is not ready after {} s", READY_TIMEOUT.as_secs());
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }

    fn log_path(&self) -> PathBuf {
        log_path(&self.data_dir)
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        // Already gone is what is wanted.
        drop(self.kill());
    }
}

fn log_path(data_dir: &Path) -> PathBuf {
    data_dir.join("testkit-daemon.log")
}

fn free_address() -> Result<String> {
    let listener = std::net::TcpListener::bind("127.0.0.1:0").context("no free port on 127.0.0.1")?;
    Ok(listener.local_addr()?.to_string())
}

fn spawn(binary: &Path, data_dir: &Path, address: &str, environment: &[(String, String)]) -> Result<Child> {
    let path = log_path(data_dir);
    let log = std::fs::File::options()
        .create(true)
        .append(true)
        .open(&path)
        .with_context(|| format!("cannot open {}", path.display()))?;
    Command::new(binary)
        .arg("serve")
        .arg("--data-dir")
        .arg(data_dir)
        .args(["--listen", address])
        .envs(environment.iter().map(|(name, value)| (name, value)))
        .stdin(Stdio::null())
        .stdout(log.try_clone()?)
        .stderr(log)
        .spawn()
        .with_context(|| format!("cannot start {} serve", binary.display()))
}
