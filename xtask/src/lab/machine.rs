//! One run of the lab: QEMU, its channels, its end.

use std::fs::File;
use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use anyhow::{Context, bail};
use rustix::fs::FlockOperation;

use super::image::LabImage;
use super::{Job, image, inside};

/// A byte this often: long runs were seen to hang in a lost timer interrupt, and never with it.
const NUDGE: Duration = Duration::from_millis(100);
const POLL: Duration = Duration::from_millis(20);
/// After the command's end, powering off takes less.
const OFF_PATIENCE: Duration = Duration::from_secs(30);
const CONSOLE_LINES_SHOWN: usize = 30;
const RUN_PREFIX: &str = "run";
const LOCK: &str = "lock";
const LOCK_PATIENCE: Duration = Duration::from_secs(3600);
/// As `timeout(1)` has it.
const TIMED_OUT: u8 = 124;

/// Kernel command line: no log on the slow serial line, no reboot after a panic.
const CMDLINE: &str =
    "console=ttyS0 quiet root=/dev/nvme0n1 rw init=/lab-init panic=-1 mitigations=off noxsave";

/// QEMU and the threads that serve its channels.
struct Machine {
    qemu: Child,
    ended: Arc<AtomicBool>,
}

impl Drop for Machine {
    fn drop(&mut self) {
        self.ended.store(true, Ordering::Relaxed);
        // It may have ended by itself.
        let _ = self.qemu.kill();
        let _ = self.qemu.wait();
    }
}

/// Runs the job; its command's exit code.
pub fn run(image: &LabImage, job: &Job) -> anyhow::Result<u8> {
    sweep()?;
    let dir = tempfile::Builder::new().prefix(RUN_PREFIX).tempdir_in(image::dir())?;
    let lock = File::create(dir.path().join(LOCK))?;
    rustix::fs::flock(&lock, FlockOperation::LockExclusive)?;
    let disk = inside::disk(job, dir.path())?;
    let result = Arc::new(Mutex::new(None));
    let mut channels = Vec::new();
    let out = job.out.clone();
    let for_control = result.clone();
    channels.push(channel(dir.path(), "out", |stream| show(stream, std::io::stdout()))?);
    channels.push(channel(dir.path(), "err", |stream| show(stream, std::io::stderr()))?);
    channels.push(channel(dir.path(), "control", move |stream| listen(stream, &for_control))?);
    channels.push(channel(dir.path(), "files", move |stream| unpack(stream, out.as_deref()))?);
    let began = Instant::now();
    let mut machine = start(image, &disk, dir.path(), job)?;
    let timed_out = wait(&mut machine, &result, job, began)?;
    drop(machine);
    for name in CHANNELS {
        // One that QEMU never came to is waited for no longer.
        drop(UnixStream::connect(dir.path().join(name)));
    }
    for channel in channels {
        match channel.join() {
            Ok(done) => done?,
            Err(_) => bail!("a channel of the lab broke"),
        }
    }
    let code = *result.lock().unwrap_or_else(PoisonError::into_inner);
    match code {
        Some(code) => Ok(code),
        None if timed_out => {
            eprintln!("lab: ended after {} s, before the command did", job.timeout.as_secs());
            Ok(TIMED_OUT)
        }
        None => bail!(
            "the lab ended before the command did; the last of its console:\n{}",
            tail(&dir.path().join("console"))
        ),
    }
}

/// Removes what runs left that were killed: their locks went with them.
fn sweep() -> anyhow::Result<()> {
    for entry in std::fs::read_dir(image::dir())? {
        let entry = entry?;
        if !entry.file_name().to_string_lossy().starts_with(RUN_PREFIX) {
            continue;
        }
        let left = match File::open(entry.path().join(LOCK)) {
            Ok(lock) => rustix::fs::flock(&lock, FlockOperation::NonBlockingLockExclusive).is_ok(),
            // Another run may be making it at this moment.
            Err(_) => entry.metadata()?.modified()?.elapsed().unwrap_or_default() > LOCK_PATIENCE,
        };
        if left {
            std::fs::remove_dir_all(entry.path())
                .with_context(|| format!("cannot remove {}", entry.path().display()))?;
        }
    }
    Ok(())
}

/// True when the time was over before the machine was.
fn wait(
    machine: &mut Machine,
    result: &Mutex<Option<u8>>,
    job: &Job,
    began: Instant,
) -> anyhow::Result<bool> {
    let mut told: Option<Instant> = None;
    while machine.qemu.try_wait()?.is_none() {
        if told.is_none() && result.lock().unwrap_or_else(PoisonError::into_inner).is_some() {
            told = Some(Instant::now());
        }
        if told.is_some_and(|told| told.elapsed() > OFF_PATIENCE) {
            return Ok(false);
        }
        if told.is_none() && began.elapsed() > job.timeout {
            return Ok(true);
        }
        std::thread::sleep(POLL);
    }
    Ok(false)
}

fn start(image: &LabImage, disk: &Path, dir: &Path, job: &Job) -> anyhow::Result<Machine> {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs();
    // It goes when this process does.
    let mut command = Command::new("setpriv");
    command.args(["--pdeathsig", "KILL", "qemu-system-x86_64"]);
    command.args([
        "-M",
        "q35",
        "-accel",
        "tcg,thread=multi,tb-size=1024",
        "-cpu",
        "EPYC,+svm,+npt",
        "-smp",
        "2",
    ]);
    command.arg("-m").arg(format!("{}M", job.memory_mib));
    command.args(["-nodefaults", "-no-user-config", "-display", "none", "-no-reboot"]);
    command.arg("-kernel").arg(&image.bzimage);
    command.arg("-append").arg(format!("{CMDLINE} lab.time={now}"));
    for (name, path) in [("root", image.disk.as_path()), ("inside", disk)] {
        let path = path.to_string_lossy().replace(',', ",,");
        command
            .arg("-drive")
            .arg(format!("if=none,id={name},file={path},format=raw,snapshot=on,cache=unsafe,discard=unmap"));
        command.arg("-device").arg(format!("nvme,drive={name},serial={name}"));
    }
    command.args(["-netdev", "user,id=net", "-device", "virtio-net-pci,netdev=net,romfile="]);
    command.args(["-device", "virtio-serial-pci"]);
    for name in CHANNELS {
        let path = dir.join(name).to_string_lossy().replace(',', ",,");
        command.arg("-chardev").arg(format!("socket,id={name},path={path}"));
        command.arg("-device").arg(format!("virtserialport,chardev={name},name=lab.{name}"));
    }
    command.args(["-chardev", "stdio,id=console,signal=off", "-serial", "chardev:console"]);
    // Snapshots of the disks are files without a name there.
    command.env("TMPDIR", dir);
    let warnings = File::create(dir.join("qemu"))?;
    command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(warnings);
    let mut qemu = command.spawn().context("cannot start QEMU")?;
    let ended = Arc::new(AtomicBool::new(false));
    if let (Some(input), Some(output)) = (qemu.stdin.take(), qemu.stdout.take()) {
        let nudging = ended.clone();
        std::thread::spawn(move || nudge(input, &nudging));
        let (log, shown) = (File::create(dir.join("console"))?, job.console);
        std::thread::spawn(move || keep_console(output, log, shown));
    }
    Ok(Machine { qemu, ended })
}

fn nudge(mut serial: impl Write, ended: &AtomicBool) {
    while !ended.load(Ordering::Relaxed) && serial.write_all(b"\n").is_ok() && serial.flush().is_ok() {
        std::thread::sleep(NUDGE);
    }
}

fn keep_console(serial: impl Read, mut log: File, shown: bool) {
    for line in BufReader::new(serial).split(b'\n').map_while(Result::ok) {
        let text = String::from_utf8_lossy(&line);
        let text = text.trim();
        if text.is_empty() {
            continue;
        }
        // The log is of use only when something went wrong, and then what is there is shown.
        let _ = writeln!(log, "{text}");
        if shown {
            eprintln!("console: {text}");
        }
    }
}

fn tail(path: &Path) -> String {
    let text = std::fs::read_to_string(path).unwrap_or_default();
    let lines: Vec<&str> = text.lines().collect();
    let panic = lines.iter().position(|line| line.contains("Kernel panic"));
    let from = panic.unwrap_or(lines.len().saturating_sub(CONSOLE_LINES_SHOWN));
    lines[from..].iter().take(CONSOLE_LINES_SHOWN).copied().collect::<Vec<_>>().join("\n")
}

const CHANNELS: [&str; 4] = ["out", "err", "control", "files"];

type Served = JoinHandle<anyhow::Result<()>>;

/// A socket that QEMU connects to, and what is done with it.
fn channel(
    dir: &Path,
    name: &str,
    serve: impl FnOnce(UnixStream) -> anyhow::Result<()> + Send + 'static,
) -> anyhow::Result<Served> {
    let listener = UnixListener::bind(dir.join(name))?;
    Ok(std::thread::spawn(move || serve(listener.accept()?.0)))
}

/// Line by line or not: as it comes.
fn show(mut from: UnixStream, mut to: impl Write) -> anyhow::Result<()> {
    let mut buffer = [0; 16 << 10];
    loop {
        let count = match from.read(&mut buffer) {
            Ok(0) | Err(_) => return Ok(()),
            Ok(count) => count,
        };
        to.write_all(&buffer[..count])?;
        to.flush()?;
    }
}

fn listen(from: UnixStream, result: &Mutex<Option<u8>>) -> anyhow::Result<()> {
    for line in BufReader::new(from).lines().map_while(Result::ok) {
        match line.split_once(' ') {
            Some(("up", seconds)) => eprintln!("lab: up, {seconds} s after its kernel"),
            Some(("exit", code)) => {
                let code = code.parse().with_context(|| format!("the lab says {line:?}"))?;
                *result.lock().unwrap_or_else(PoisonError::into_inner) = Some(code);
            }
            _ => bail!("the lab says {line:?}"),
        }
    }
    Ok(())
}

/// A tar archive, or nothing.
fn unpack(mut from: UnixStream, out: Option<&Path>) -> anyhow::Result<()> {
    let Some(out) = out else {
        std::io::copy(&mut from, &mut std::io::sink()).ok();
        return Ok(());
    };
    std::fs::create_dir_all(out).with_context(|| format!("cannot make {}", out.display()))?;
    let mut first = [0; 1];
    if from.read(&mut first).unwrap_or(0) == 0 {
        return Ok(());
    }
    let mut tar =
        Command::new("tar").args(["-x", "--no-same-owner", "-C"]).arg(out).stdin(Stdio::piped()).spawn()?;
    if let Some(mut input) = tar.stdin.take() {
        input.write_all(&first)?;
        // A socket that QEMU left behind ends by an error; tar tells whether the archive was whole.
        std::io::copy(&mut from, &mut input).ok();
    }
    if !tar.wait()?.success() {
        bail!("what the lab left in /out did not arrive whole");
    }
    Ok(())
}
