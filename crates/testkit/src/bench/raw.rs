//! Raw runsc doing the same as we do: the yardstick. Same root file system, platform and overlay.

use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use serde_json::json;

/// Raw containers under one folder; what is left is removed when dropped.
pub struct Raw {
    folder: PathBuf,
    rootfs: PathBuf,
    made: Vec<String>,
}

/// A container whose init process answers each line with the same line.
pub struct Echo {
    pub id: String,
    stdin: ChildStdin,
    stdout: BufReader<ChildStdout>,
    child: Child,
}

const ECHO: &str = "import os, sys\nheld = os.urandom(1 << 20) * int(sys.argv[1])\nprint('ready', flush=True)\nfor line in sys.stdin:\n    print(line, end='', flush=True)\n";

impl Raw {
    /// `folder` is made; `rootfs` is the template's, which is never written to.
    pub fn new(folder: &Path, rootfs: &Path) -> Result<Self> {
        for sub in ["root", "overlay", "bundles", "images"] {
            fs::create_dir_all(folder.join(sub))
                .with_context(|| format!("cannot make {}", folder.display()))?;
        }
        Ok(Self { folder: folder.to_owned(), rootfs: rootfs.to_owned(), made: Vec::new() })
    }

    fn runsc(&self) -> Command {
        let mut command = Command::new("runsc");
        command
            .arg(format!("--root={}", self.folder.join("root").display()))
            .args(["--platform=systrap", "--network=none", "--ignore-cgroups"])
            .arg(format!("--overlay2=root:dir={}", self.folder.join("overlay").display()))
            .stdin(Stdio::null())
            .stderr(Stdio::null());
        command
    }

    fn bundle(&mut self, id: &str, arguments: &[&str]) -> Result<PathBuf> {
        let bundle = self.folder.join("bundles").join(id);
        fs::create_dir_all(&bundle)?;
        let capabilities = ["CAP_CHOWN", "CAP_SETUID", "CAP_SETGID", "CAP_KILL", "CAP_SYS_ADMIN"];
        let config = json!({
            "ociVersion": "1.0.0",
            "process": {
                "cwd": "/", "args": arguments, "user": {"uid": 0, "gid": 0},
                "env": ["PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"],
                "capabilities": {"bounding": capabilities, "effective": capabilities, "permitted": capabilities},
            },
            "root": {"path": self.rootfs, "readonly": false},
            "hostname": "raw",
            "mounts": [{"destination": "/proc", "type": "proc", "source": "proc"}],
            "linux": {"namespaces": [{"type": "pid"}, {"type": "ipc"}, {"type": "uts"}, {"type": "mount"}, {"type": "network"}]},
        });
        fs::write(bundle.join("config.json"), config.to_string())?;
        self.made.push(id.to_owned());
        Ok(bundle)
    }

    fn succeed(mut command: Command) -> Result<()> {
        let status = command.stdout(Stdio::null()).status().context("cannot run runsc")?;
        ensure!(status.success(), "{command:?} ended with {status}");
        Ok(())
    }

    /// `runsc run` of a command, from the start to the first line of its output.
    pub fn cold_start(&mut self, id: &str, arguments: &[&str]) -> Result<Duration> {
        let bundle = self.bundle(id, arguments)?;
        let started = Instant::now();
        let mut command = self.runsc();
        command.arg("run").arg("--bundle").arg(bundle).arg(id).stdout(Stdio::piped());
        let mut child = command.spawn().context("cannot run runsc")?;
        let mut line = String::new();
        BufReader::new(child.stdout.take().context("no pipe")?).read_line(&mut line)?;
        let took = started.elapsed();
        ensure!(line == "hi\n", "runsc run printed {line:?}");
        child.wait()?;
        self.delete(id);
        Ok(took)
    }

    /// `runsc exec` of a command, from the start to the end of its output.
    pub fn exec(&self, id: &str, arguments: &[&str]) -> Result<Duration> {
        let started = Instant::now();
        let mut command = self.runsc();
        let output = command.arg("exec").arg(id).args(arguments).output().context("cannot run runsc")?;
        let took = started.elapsed();
        ensure!(output.stdout == b"hi\n", "runsc exec printed {:?}", String::from_utf8_lossy(&output.stdout));
        Ok(took)
    }

    /// A created container, its init process not started.
    pub fn create_echo(&mut self, id: &str, mib: u32) -> Result<Echo> {
        let bundle = self.bundle(id, &["/usr/bin/python3", "-c", ECHO, &mib.to_string()])?;
        let mut command = self.runsc();
        command.arg("create").arg("--bundle").arg(bundle).arg(id);
        let mut child =
            command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().context("cannot run runsc")?;
        let stdin = child.stdin.take().context("no pipe")?;
        let stdout = BufReader::new(child.stdout.take().context("no pipe")?);
        ensure!(child.wait()?.success(), "runsc create {id} failed");
        Ok(Echo { id: id.to_owned(), stdin, stdout, child })
    }

    pub fn start(&self, echo: &mut Echo) -> Result<()> {
        let mut command = self.runsc();
        command.arg("start").arg(&echo.id);
        Self::succeed(command)?;
        ensure!(echo.line()? == "ready\n", "the init process is not ready");
        Ok(())
    }

    pub fn image(&self, name: &str) -> PathBuf {
        self.folder.join("images").join(name)
    }

    /// Uncompressed and direct, the fastest there is, and on the disk: what is lost with the power is no
    /// checkpoint.
    pub fn checkpoint(&self, id: &str, image: &Path) -> Result<Duration> {
        fs::create_dir_all(image)?;
        let started = Instant::now();
        let mut command = self.runsc();
        command.arg("checkpoint").arg("--image-path").arg(image).args(["--compression=none", "--direct", id]);
        Self::succeed(command)?;
        for entry in fs::read_dir(image)? {
            fs::File::open(entry?.path())?.sync_all()?;
        }
        fs::File::open(image)?.sync_all()?;
        Ok(started.elapsed())
    }

    /// Into a container created beforehand, up to the first reply.
    pub fn restore(&self, echo: &mut Echo, image: &Path) -> Result<Duration> {
        let started = Instant::now();
        let mut command = self.runsc();
        command.args(["restore", "--detach", "--direct", "--image-path"]).arg(image).arg(&echo.id);
        Self::succeed(command)?;
        echo.ask()?;
        Ok(started.elapsed())
    }

    pub fn delete(&self, id: &str) {
        let states = fs::read_dir(self.folder.join("root")).into_iter().flatten().flatten();
        if !states.into_iter().any(|state| state.file_name().to_string_lossy().starts_with(&format!("{id}_")))
        {
            return;
        }
        let mut command = self.runsc();
        command.args(["delete", "--force", id]).stdout(Stdio::null());
        // One that is already gone is what is wanted.
        drop(command.status());
    }
}

impl Drop for Raw {
    fn drop(&mut self) {
        for id in &self.made {
            self.delete(id);
        }
        if let Err(error) = fs::remove_dir_all(&self.folder) {
            eprintln!("cannot remove {}: {error}", self.folder.display());
        }
    }
}

impl Echo {
    fn line(&mut self) -> Result<String> {
        let mut line = String::new();
        self.stdout.read_line(&mut line)?;
        Ok(line)
    }

    pub fn ask(&mut self) -> Result<()> {
        self.stdin.write_all(b"are you there\n")?;
        let answer = self.line()?;
        ensure!(answer == "are you there\n", "the container answered {answer:?}");
        Ok(())
    }
}

impl Drop for Echo {
    fn drop(&mut self) {
        // `runsc create` itself has ended long ago.
        drop(self.child.try_wait());
    }
}
