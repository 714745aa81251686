//! QEMU as a yardstick: the same guest kernel, modules, root disk and workload, on the same host by the same KVM.
//!
//! Its initramfs is the guest's own with another `/init` behind it (a later archive's files win): a shell from this
//! host that loads the modules, mounts the disk and runs the workload there.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, Result, ensure};

/// What the shell in the initramfs needs of this host.
const PROGRAMS: [&str; 5] = ["/bin/bash", "/bin/mount", "/bin/mkdir", "/sbin/insmod", "/sbin/chroot"];
/// The last words of a guest; it resets then, which ends QEMU.
const INIT: &str = r#"#!/bin/bash
export PATH=/bin:/sbin
mount -t devtmpfs dev /dev
mount -t proc proc /proc
while read -r module; do insmod "/modules/$module"; done < /modules/order
until [ -b /dev/vda ]; do :; done
mkdir /newroot
mount -t ext4 -o noatime /dev/vda /newroot
mount --bind /dev /newroot/dev
mount -t proc proc /newroot/proc
chroot /newroot /bin/bash /workload.sh > /dev/ttyS0 2>&1
echo "the guest is done" > /dev/ttyS0
echo b > /proc/sysrq-trigger
"#;
const DONE: &str = "the guest is done";
/// Of a boot and a workload.
const SECONDS_MAX: &str = "600";

/// One guest.
pub struct Qemu {
    folder: PathBuf,
    kernel: PathBuf,
    disk: PathBuf,
}

impl Qemu {
    /// `guest`: the folder of kernel and initramfs. `disk` is copied.
    pub fn new(folder: &Path, guest: &Path, disk: &Path) -> Result<Self> {
        fs::create_dir_all(folder)?;
        let kernel = ["vmlinux", "bzImage"].iter().map(|name| guest.join(name)).find(|path| path.is_file());
        let kernel = kernel.with_context(|| format!("no kernel in {}", guest.display()))?;
        let copy = folder.join("disk");
        run(Command::new("cp").arg("--sparse=always").arg(disk).arg(&copy))?;
        let mut initramfs = fs::read(guest.join("initramfs.cpio"))?;
        initramfs.resize(initramfs.len().next_multiple_of(4), 0);
        initramfs.extend(archive()?);
        fs::write(folder.join("initramfs"), initramfs)?;
        Ok(Self { folder: folder.to_owned(), kernel, disk: copy })
    }

    /// Boots, runs the workload (a file of the disk, written there first) and gives what it printed.
    pub fn run(&self, workload: &str, memory_mib: u32, cpus: u32) -> Result<String> {
        let script = self.folder.join("workload.sh");
        fs::write(&script, workload)?;
        run(Command::new("debugfs").args(["-w", "-R", "rm /workload.sh"]).arg(&self.disk))?;
        let write = format!("write {} /workload.sh", script.display());
        run(Command::new("debugfs").args(["-w", "-R", &write]).arg(&self.disk))?;
        let output = Command::new("timeout")
            .args([SECONDS_MAX, "qemu-system-x86_64", "-enable-kvm", "-cpu", "host"])
            .args([
                "-M",
                "microvm,acpi=on",
                "-nodefaults",
                "-no-user-config",
                "-display",
                "none",
                "-no-reboot",
            ])
            .arg("-m")
            .arg(format!("{memory_mib}M"))
            .arg("-smp")
            .arg(cpus.to_string())
            .arg("-kernel")
            .arg(&self.kernel)
            .arg("-initrd")
            .arg(self.folder.join("initramfs"))
            .args(["-append", "console=ttyS0 quiet panic=-1 reboot=t random.trust_cpu=on"])
            .arg("-drive")
            .arg(format!("if=none,id=disk,format=raw,cache=writeback,file={}", self.disk.display()))
            // The version that ours speaks.
            .args(["-global", "virtio-mmio.force-legacy=false"])
            .args(["-device", "virtio-blk-device,drive=disk", "-serial", "stdio"])
            .stdin(Stdio::null())
            .output()
            .context("cannot run qemu-system-x86_64")?;
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        ensure!(
            text.contains(DONE),
            "QEMU's guest did not come to its end: {text}{}",
            String::from_utf8_lossy(&output.stderr)
        );
        Ok(text)
    }
}

/// The shell and its files, as a second archive.
fn archive() -> Result<Vec<u8>> {
    let mut files: BTreeSet<PathBuf> = BTreeSet::new();
    for program in PROGRAMS {
        let output = Command::new("ldd").arg(program).output().context("cannot run ldd")?;
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        files.extend(text.split_whitespace().filter(|word| word.starts_with('/')).map(PathBuf::from));
        files.insert(PathBuf::from(program));
    }
    let mut archive = Vec::new();
    let folders: BTreeSet<&Path> = files.iter().flat_map(|file| file.ancestors().skip(1)).collect();
    for folder in folders.into_iter().chain([Path::new("/proc")]).filter(|folder| folder.parent().is_some()) {
        entry(&mut archive, folder, 0o040_755, &[]);
    }
    for file in &files {
        let bytes = fs::read(file).with_context(|| format!("cannot read {}", file.display()))?;
        entry(&mut archive, file, 0o100_755, &bytes);
    }
    entry(&mut archive, Path::new("/init"), 0o100_755, INIT.as_bytes());
    entry(&mut archive, Path::new("/TRAILER!!!"), 0, &[]);
    Ok(archive)
}

/// As `Documentation/driver-api/early-userspace/buffer-format.rst` has it ("newc").
fn entry(archive: &mut Vec<u8>, path: &Path, mode: u32, content: &[u8]) {
    let name = path.strip_prefix("/").unwrap_or(path).to_string_lossy().into_owned();
    let fields = [0, mode as usize, 0, 0, 1, 0, content.len(), 0, 0, 0, 0, name.len() + 1, 0];
    archive.extend(b"070701");
    fields.iter().for_each(|field| archive.extend(format!("{field:08x}").bytes()));
    archive.extend(name.bytes());
    archive.push(0);
    archive.resize(archive.len().next_multiple_of(4), 0);
    archive.extend(content);
    archive.resize(archive.len().next_multiple_of(4), 0);
}

fn run(command: &mut Command) -> Result<()> {
    let output = command.output().with_context(|| format!("cannot run {command:?}"))?;
    ensure!(output.status.success(), "{command:?}: {}", String::from_utf8_lossy(&output.stderr));
    Ok(())
}
