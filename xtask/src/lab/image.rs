//! The lab's kernel and root disk, made once.

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, bail};
use dormouse_image::{DebianSpec, DiskSpec, Images, KernelPackage, build_disk, fetch_kernel};

use crate::run;

const PACKAGES: &[&str] = &[
    "bash",
    "ca-certificates",
    "curl",
    "e2fsprogs",
    "git",
    "iproute2",
    "kmod",
    "mount",
    "nftables",
    "procps",
    "python3",
    "python3-venv",
    // Another monitor to compare with, in the same lab.
    "qemu-system-x86",
    "strace",
    "util-linux",
];
const SUITE: &str = "bookworm";
/// Of the root disk; it is sparse, and what a run writes is dropped at its end.
const DISK_BYTES: u64 = 32 << 30;
const INIT: &str = include_str!("init.sh");

/// What a machine is booted from.
pub struct LabImage {
    pub bzimage: PathBuf,
    pub disk: PathBuf,
}

/// All of the lab that stays between runs.
pub fn dir() -> PathBuf {
    run::target().join("xtask").join("lab")
}

fn stamp_file() -> PathBuf {
    dir().join("root.stamp")
}

fn find() -> Option<LabImage> {
    let kernel = KernelPackage::find(&dir().join("kernel"))?;
    let disk = dir().join("root.img");
    let stamp = std::fs::read_to_string(stamp_file()).ok()?;
    (disk.is_file() && stamp == wanted(&kernel)).then(|| LabImage { bzimage: kernel.bzimage(), disk })
}

/// What the disk was made of.
fn wanted(kernel: &KernelPackage) -> String {
    format!(
        "{} {}\n{SUITE} {}\n{DISK_BYTES}\n{INIT}",
        kernel.record.release,
        kernel.record.digest,
        PACKAGES.join(" ")
    )
}

pub fn is_there() -> bool {
    let there = find().is_some();
    if !there {
        println!(
            "missing: the lab's kernel and disk (a Debian that boots in QEMU); `cargo xtask lab` makes them"
        );
    }
    there
}

/// Makes what is missing.
pub fn ensure() -> anyhow::Result<LabImage> {
    if let Some(found) = find() {
        return Ok(found);
    }
    std::fs::create_dir_all(dir()).with_context(|| format!("cannot make {}", dir().display()))?;
    // Two commands at a time would sweep each other's unfinished files.
    let lock = std::fs::File::create(dir().join("lock"))?;
    rustix::fs::flock(&lock, rustix::fs::FlockOperation::LockExclusive)?;
    if let Some(found) = find() {
        return Ok(found);
    }
    let mut tell = |line: &str| eprintln!("  lab: {line}");
    let kernel = fetch_kernel(&dir().join("kernel"), &mut tell).context("cannot get the lab's kernel")?;
    let (images, _) = Images::open(&dir().join("images"))?;
    let packages: Vec<String> = PACKAGES.iter().map(|&name| name.to_owned()).collect();
    let image = images
        .debian(&DebianSpec::new(SUITE, &packages)?, &mut tell)
        .context("cannot build the lab's file system")?;
    tell("making the root disk");
    let stage = tempfile::Builder::new().prefix("stage").tempdir_in(dir())?;
    let root = stage.path().join("root");
    // Hard links: nothing is copied but into the disk.
    copy(&["-al"], &images.rootfs(&image.id), &root)?;
    let modules = root.join("usr/lib/modules");
    std::fs::create_dir_all(&modules)?;
    copy(&["-al"], &kernel.modules_dir(), &modules)?;
    let init = root.join("lab-init");
    std::fs::write(&init, INIT)?;
    run::run(&mut run::command("chmod", &["755", &init.to_string_lossy()]))?;
    run::run(&mut run::command("chroot", &[&root.to_string_lossy(), "depmod", &kernel.record.release]))?;
    let disk = dir().join("root.img");
    build_disk(&DiskSpec { rootfs: &root, size_bytes: DISK_BYTES, seed: "lab" }, &disk)?;
    std::fs::write(stamp_file(), wanted(&kernel))?;
    for old in images.list()?.into_iter().filter(|old| old.id != image.id) {
        images.remove(&old.id, &[])?;
    }
    find().context("the lab was made and cannot be found")
}

/// `cp`, which keeps owners, modes, links and attributes.
pub fn copy(options: &[&str], from: &Path, to: &Path) -> anyhow::Result<()> {
    let status = Command::new("cp").args(options).arg("--").arg(from).arg(to).status()?;
    if !status.success() {
        bail!("cannot copy {} to {}: cp ended with {status}", from.display(), to.display());
    }
    Ok(())
}

/// The same by hard links, where both are on one file system.
pub fn link(from: &Path, to: &Path) -> anyhow::Result<()> {
    let output = Command::new("cp").args(["-al", "--"]).arg(from).arg(to).output()?;
    if !output.status.success() {
        bail!("cannot link {} to {}", from.display(), to.display());
    }
    Ok(())
}
