//! Where the scenarios play: a daemon on the prepared folder, and clones of the folder for those that
//! break things.

use std::future::Future;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use hyper::Method;
use serde_json::{Value, json};

use super::Options;
use crate::daemon::Daemon;
use crate::host;
use crate::http::Http;
use crate::sandbox::Sandbox;

/// How long `eventually` waits for what must come.
const EVENTUALLY: Duration = Duration::from_secs(60);

pub(crate) struct Stage {
    options: Options,
    daemon: Option<Daemon>,
}

impl Stage {
    pub fn new(options: Options) -> Self {
        Self { options, daemon: None }
    }

    /// A running daemon, whatever the scenario before did to it.
    pub async fn ready(&mut self) -> Result<()> {
        if self.daemon.is_none() {
            let daemon =
                Daemon::start(&self.options.binary, &self.options.data_dir, &self.environment()).await?;
            self.daemon = Some(daemon);
        }
        Ok(())
    }

    pub fn daemon(&mut self) -> Result<&mut Daemon> {
        self.daemon.as_mut().context("no daemon runs")
    }

    pub fn http(&self) -> Result<Http> {
        Ok(self.daemon.as_ref().context("no daemon runs")?.http.clone())
    }

    pub fn data_dir(&self) -> &Path {
        &self.options.data_dir
    }

    pub fn engine(&self) -> String {
        self.options.engine.to_string()
    }

    /// The daemon's first engine is the one that is tested: templates that are built meanwhile are of it.
    fn environment(&self) -> [(String, String); 1] {
        [("DORMOUSE_ENGINE".to_owned(), self.engine())]
    }

    pub async fn sandbox(&self) -> Result<Sandbox> {
        self.sandbox_with(json!({})).await
    }

    /// A sandbox of `base` on the engine that is tested.
    pub async fn sandbox_with(&self, mut request: Value) -> Result<Sandbox> {
        request["dormouse"]["engine"] = json!(self.engine());
        Sandbox::create(&self.http()?, request).await
    }

    /// A daemon on a clone of the prepared folder: root file systems are shared (hard links to files
    /// that never change), the rest is copied. Its snapshots may be on a small file system of their own.
    pub async fn clone_daemon(&self, snapshots_mib: Option<u32>) -> Result<Clone> {
        let parent = self.options.data_dir.parent().context("the data folder has no parent")?;
        let folder = parent.join(format!("clone-{}", std::process::id()));
        let clone = Clone { folder: folder.clone(), mounted: None, daemon: None };
        let mut clone = clone.fill(&self.options.data_dir, snapshots_mib)?;
        clone.daemon = Some(Daemon::start(&self.options.binary, &folder, &self.environment()).await?);
        Ok(clone)
    }

    /// Kills what a scenario left and removes its snapshots; a daemon that does not answer is replaced.
    pub async fn tidy(&mut self) {
        let Ok(http) = self.http() else { return };
        if let Err(error) = clear(&http).await {
            eprintln!("the daemon is replaced, it could not be tidied: {error:#}");
            self.daemon = None;
        }
    }

    pub async fn close(&mut self) {
        self.tidy().await;
        self.daemon = None;
    }
}

/// Kills every sandbox and removes every snapshot that is not a template's.
async fn clear(http: &Http) -> Result<()> {
    let list = http.api(Method::GET, "/v2/sandboxes?limit=100", None).await?.expect(200)?.json()?;
    for one in list.as_array().into_iter().flatten() {
        let path = format!("/sandboxes/{}", one["sandboxID"].as_str().unwrap_or_default());
        http.api(Method::DELETE, &path, None).await?;
    }
    let list = http.api(Method::GET, "/dormouse/v1/sandboxes?limit=100", None).await?.expect(200)?.json()?;
    for one in list.as_array().into_iter().flatten() {
        let path = format!("/sandboxes/{}", one["sandboxID"].as_str().unwrap_or_default());
        http.api(Method::DELETE, &path, None).await?;
    }
    let list = http.api(Method::GET, "/dormouse/v1/snapshots?limit=100", None).await?.expect(200)?.json()?;
    for one in list.as_array().into_iter().flatten() {
        if one["reason"] != "template" {
            let path = format!("/dormouse/v1/snapshots/{}", one["snapshotID"].as_str().unwrap_or_default());
            http.api(Method::DELETE, &path, None).await?;
        }
    }
    Ok(())
}

/// A clone of the data folder; unmounted and removed when dropped.
pub(crate) struct Clone {
    pub folder: PathBuf,
    mounted: Option<PathBuf>,
    daemon: Option<Daemon>,
}

impl Clone {
    fn fill(mut self, from: &Path, snapshots_mib: Option<u32>) -> Result<Self> {
        std::fs::create_dir_all(&self.folder).context("cannot make the clone's folder")?;
        let target = self.folder.clone();
        shell(&format!(
            // Links where they can be made: the folder may be another file system's.
            "share() {{ cp -al $1 $2 2>/dev/null || cp -a $1 $2; }}
             cd {from}
             share images {to}/
             cp -a agent {to}/
             cp -a node.db* {to}/
             mkdir -p {to}/snapshots
             for shared in guest microvm/disks; do
                 if [ -e $shared ]; then mkdir -p {to}/$(dirname $shared) && share $shared {to}/$(dirname $shared)/; fi
             done",
            from = from.display(),
            to = target.display()
        ))?;
        let snapshots = target.join("snapshots");
        if let Some(mib) = snapshots_mib {
            shell(&format!("mount -t tmpfs -o size={mib}m,mode=700 tmpfs {}", snapshots.display()))?;
            self.mounted = Some(snapshots.clone());
        }
        shell(&format!("cp -a {}/snapshots/. {}/", from.display(), snapshots.display()))?;
        Ok(self)
    }

    pub fn daemon(&mut self) -> Result<&mut Daemon> {
        self.daemon.as_mut().context("the clone's daemon does not run")
    }

    pub fn http(&self) -> Result<Http> {
        Ok(self.daemon.as_ref().context("the clone's daemon does not run")?.http.clone())
    }

    /// Kills its sandboxes and its daemon, and says what is left on the host.
    pub async fn end(mut self) -> Result<Vec<String>> {
        clear(&self.http()?).await?;
        if let Some(daemon) = self.daemon.take() {
            daemon.stop().await?;
        }
        let left = host::holdings(&self.folder, 0)?;
        let mounts = usize::from(self.mounted.is_some());
        ensure!(left.mounts.len() <= mounts, "mounts are left: {:?}", left.mounts);
        Ok(left.processes.into_iter().chain(left.cgroups).collect())
    }
}

impl Drop for Clone {
    fn drop(&mut self) {
        self.daemon = None;
        if let Some(mounted) = &self.mounted
            && let Err(error) = shell(&format!("umount -l {}", mounted.display()))
        {
            eprintln!("{error:#}");
            return;
        }
        if let Err(error) = std::fs::remove_dir_all(&self.folder) {
            eprintln!("cannot remove {}: {error}", self.folder.display());
        }
    }
}

pub(crate) fn shell(command: &str) -> Result<String> {
    let output = Command::new("bash").args(["-euc", command]).output().context("cannot run bash")?;
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    ensure!(output.status.success(), "{command} failed: {}", String::from_utf8_lossy(&output.stderr));
    Ok(text)
}

/// Asks again until the answer is true; fails with `what` after a minute.
pub(crate) async fn eventually<F, Fut>(what: &str, mut check: F) -> Result<()>
where
    F: FnMut() -> Fut,
    Fut: Future<Output = Result<bool>>,
{
    let end = Instant::now() + EVENTUALLY;
    loop {
        let last = check().await;
        if matches!(last, Ok(true)) {
            return Ok(());
        }
        if Instant::now() > end {
            bail!("{what} did not come within {} s (last: {last:?})", EVENTUALLY.as_secs());
        }
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}

/// A process that holds `mib` MiB of random bytes, counts, and answers on a port of the loopback:
/// `<pid> <count> <sha256 of what it holds> <offset of its open file>`.
pub(crate) async fn start_witness(sandbox: &Sandbox, port: u16, mib: u32) -> Result<Witness> {
    sandbox.write("/home/user/witness.py", WITNESS).await?;
    sandbox.spawn(&format!("exec python3 /home/user/witness.py {port} {mib}")).await?;
    let ask = || async { Ok(ask_witness(sandbox, port).await.is_ok()) };
    eventually("the witness", ask).await?;
    ask_witness(sandbox, port).await
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Witness {
    pub pid: u64,
    pub count: u64,
    pub hash: String,
    pub offset: u64,
}

impl Witness {
    /// The same process, further on: nothing was lost and nothing started anew.
    pub fn goes_on_from(&self, before: &Self) -> Result<()> {
        ensure!(self.pid == before.pid, "another process answers: {self:?} after {before:?}");
        ensure!(self.hash == before.hash, "its memory changed: {self:?} after {before:?}");
        ensure!(self.count >= before.count, "it went back: {self:?} after {before:?}");
        ensure!(self.offset >= before.offset, "its file went back: {self:?} after {before:?}");
        Ok(())
    }
}

pub(crate) async fn ask_witness(sandbox: &Sandbox, port: u16) -> Result<Witness> {
    let text = sandbox.get(port, "/").await?.expect(200)?.text();
    let parts: Vec<&str> = text.split_whitespace().collect();
    let [pid, count, hash, offset] = parts[..] else { bail!("the witness answered {text:?}") };
    Ok(Witness { pid: pid.parse()?, count: count.parse()?, hash: hash.to_owned(), offset: offset.parse()? })
}

const WITNESS: &str = r#"
import hashlib, http.server, os, sys, threading, time
port, mib = int(sys.argv[1]), int(sys.argv[2])
held = os.urandom(1 << 20) * mib if mib else b""
log = open(f"/tmp/witness-{port}.log", "w")
count = 0
def work():
    global count
    while True:
        count += 1
        log.write("x"); log.flush()
        time.sleep(0.02)
class Answer(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        text = f"{os.getpid()} {count} {hashlib.sha256(held).hexdigest()} {log.tell()}\n".encode()
        self.send_response(200)
        self.send_header("content-length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)
    def log_message(self, *_): pass
threading.Thread(target=work, daemon=True).start()
http.server.ThreadingHTTPServer(("127.0.0.1", port), Answer).serve_forever()
"#;
