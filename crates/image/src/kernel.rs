//! A guest kernel: Debian's cloud kernel, fetched by this host's own apt and unpacked, never installed.
//!
//! apt checks what it downloads against the archive's signatures; which version it was is recorded.

use std::io::{self, Read};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use serde::{Deserialize, Serialize};

use crate::Progress;
use crate::error::KernelError;

/// The package that depends on the current kernel for virtual machines.
const META_PACKAGE: &str = "linux-image-cloud-amd64";
const RECORD: &str = "kernel.json";
const RECORD_VERSION: u32 = 1;
const OUTPUT_LINES_MAX: usize = 12;
const RECORD_BYTES_MAX: u64 = 64 << 10;

/// Which kernel it is.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct KernelRecord {
    pub version: u32,
    pub package: String,
    pub package_version: String,
    /// What `uname -r` says, and what its modules' folder is called.
    pub release: String,
    /// BLAKE3 of the bzImage, hex.
    pub digest: String,
}

/// An unpacked kernel package.
#[derive(Debug, Clone)]
pub struct KernelPackage {
    dir: PathBuf,
    pub record: KernelRecord,
}

impl KernelPackage {
    /// Finds what [`fetch_kernel`] left in `dir`; `None`: there is nothing, or something else.
    #[must_use]
    pub fn find(dir: &Path) -> Option<Self> {
        let mut text = String::new();
        let file = std::fs::File::open(dir.join(RECORD)).ok()?;
        file.take(RECORD_BYTES_MAX).read_to_string(&mut text).ok()?;
        let record: KernelRecord = serde_json::from_str(&text).ok()?;
        let found = Self { dir: dir.to_owned(), record };
        let whole = found.record.version == RECORD_VERSION
            && is_release(&found.record.release)
            && found.bzimage().is_file()
            && found.modules_dir().is_dir();
        whole.then_some(found)
    }

    #[must_use]
    pub fn bzimage(&self) -> PathBuf {
        self.dir.join(format!("boot/vmlinuz-{}", self.record.release))
    }

    /// `…/lib/modules/RELEASE`.
    #[must_use]
    pub fn modules_dir(&self) -> PathBuf {
        self.dir.join("lib/modules").join(&self.record.release)
    }
}

/// Downloads and unpacks the kernel into `dir`, unless one is there already.
pub fn fetch_kernel(dir: &Path, progress: Progress<'_>) -> Result<KernelPackage, KernelError> {
    if let Some(found) = KernelPackage::find(dir) {
        return Ok(found);
    }
    let failed = |action, path: &Path| {
        let path = path.to_owned();
        move |source| KernelError::Io { action, path, source }
    };
    let draft = dir.with_extension(format!("tmp{}", std::process::id()));
    let _remove = RemoveOnDrop(draft.clone());
    std::fs::create_dir_all(&draft).map_err(failed("make", &draft))?;
    let (package, package_version) = match current() {
        Ok(found) => found,
        Err(_) => {
            // A fresh machine has no package lists yet.
            progress("fetching the package lists");
            run(Command::new("apt-get").args(["update", "-q"]))?;
            current()?
        }
    };
    progress(&format!("downloading {package} {package_version}"));
    let wanted = format!("{package}={package_version}");
    run(Command::new("apt-get")
        .args(["download", "-q", "-o", "APT::Sandbox::User=root", &wanted])
        .current_dir(&draft))?;
    let archive = only_archive(&draft).map_err(failed("list", &draft))?;
    run(Command::new("dpkg-deb").arg("-x").arg(&archive).arg(&draft))?;
    std::fs::remove_file(&archive).map_err(failed("delete", &archive))?;
    let release = release(&draft, &package)?;
    let bzimage = draft.join(format!("boot/vmlinuz-{release}"));
    let digest = digest(&bzimage).map_err(failed("read", &bzimage))?;
    let record = KernelRecord { version: RECORD_VERSION, package, package_version, release, digest };
    let text = serde_json::to_vec_pretty(&record).map_err(|error| KernelError::Io {
        action: "write",
        path: draft.join(RECORD),
        source: error.into(),
    })?;
    std::fs::write(draft.join(RECORD), text).map_err(failed("write", &draft.join(RECORD)))?;
    match std::fs::remove_dir_all(dir) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(failed("delete", dir)(error)),
        _ => {}
    }
    std::fs::rename(&draft, dir).map_err(failed("publish", dir))?;
    KernelPackage::find(dir).ok_or_else(|| unfit(dir, "it cannot be found again"))
}

/// An unfinished download goes with the value; after the rename there is nothing to remove.
struct RemoveOnDrop(PathBuf);

impl Drop for RemoveOnDrop {
    fn drop(&mut self) {
        if let Err(error) = std::fs::remove_dir_all(&self.0)
            && error.kind() != io::ErrorKind::NotFound
        {
            tracing::warn!(%error, path = %self.0.display(), "an unfinished download stays");
        }
    }
}

/// Name and version of the package with the current kernel.
fn current() -> Result<(String, String), KernelError> {
    let text = run(Command::new("apt-cache").args(["show", "--no-all-versions", META_PACKAGE]))?;
    depends(&text)
        .ok_or_else(|| unfit(Path::new(META_PACKAGE), "it names no kernel of an exact version to depend on"))
}

/// `Depends: linux-image-6.1.0-57-cloud-amd64 (= 6.1.192-3)`.
fn depends(text: &str) -> Option<(String, String)> {
    let line = text.lines().find_map(|line| line.strip_prefix("Depends: "))?;
    let mut alternatives = line.split(',').map(str::trim);
    let (name, version) = alternatives.find_map(|one| one.strip_suffix(')')?.split_once(" (= "))?;
    let plain = |text: &str, extra: &[u8]| {
        !text.is_empty()
            && !text.starts_with('-')
            && text.bytes().all(|it| it.is_ascii_alphanumeric() || extra.contains(&it))
    };
    (name.starts_with("linux-image-") && plain(name, b"-.+") && plain(version, b"-.+~:"))
        .then(|| (name.to_owned(), version.to_owned()))
}

fn release(draft: &Path, package: &str) -> Result<String, KernelError> {
    let release = package.trim_start_matches("linux-image-").to_owned();
    let whole = draft.join(format!("boot/vmlinuz-{release}")).is_file()
        && draft.join("lib/modules").join(&release).is_dir();
    if whole && is_release(&release) {
        Ok(release)
    } else {
        Err(unfit(Path::new(package), "it does not hold a kernel and modules of the name it bears"))
    }
}

fn is_release(text: &str) -> bool {
    !text.is_empty()
        && !text.starts_with('.')
        && text.bytes().all(|it| it.is_ascii_alphanumeric() || b"-.+~".contains(&it))
}

fn unfit(what: &Path, why: &str) -> KernelError {
    KernelError::Unfit { what: what.display().to_string(), why: why.to_owned() }
}

fn only_archive(dir: &Path) -> io::Result<PathBuf> {
    let mut archives = Vec::new();
    for entry in std::fs::read_dir(dir)? {
        let path = entry?.path();
        if path.extension().is_some_and(|ext| ext == "deb") {
            archives.push(path);
        }
    }
    match archives.pop() {
        Some(one) if archives.is_empty() => Ok(one),
        _ => Err(io::Error::other("apt-get left not exactly one package")),
    }
}

pub(crate) fn digest(path: &Path) -> io::Result<String> {
    let mut hasher = blake3::Hasher::new();
    hasher.update_reader(std::fs::File::open(path)?)?;
    Ok(hasher.finalize().to_hex().to_string())
}

/// Runs it and gives back what it wrote.
pub(crate) fn run(command: &mut Command) -> Result<String, KernelError> {
    let program = command.get_program().to_string_lossy().into_owned();
    let output = command
        .env("LC_ALL", "C.UTF-8")
        .env("DEBIAN_FRONTEND", "noninteractive")
        .stdin(Stdio::null())
        .output()
        .map_err(|source| match source.kind() {
            io::ErrorKind::NotFound => KernelError::Missing { program: program.clone() },
            _ => KernelError::Spawn { program: program.clone(), source },
        })?;
    if output.status.success() {
        return Ok(String::from_utf8_lossy(&output.stdout).into_owned());
    }
    let text = [output.stdout, output.stderr].concat();
    let text = String::from_utf8_lossy(&text);
    let lines: Vec<&str> = text.lines().collect();
    Err(KernelError::Failed {
        command: command_line(command),
        status: output.status.to_string(),
        output: lines[lines.len().saturating_sub(OUTPUT_LINES_MAX)..].join("\n"),
    })
}

fn command_line(command: &Command) -> String {
    let args = command.get_args().map(|arg| arg.to_string_lossy().into_owned());
    std::iter::once(command.get_program().to_string_lossy().into_owned())
        .chain(args)
        .collect::<Vec<_>>()
        .join(" ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_kernel_is_named_by_what_the_meta_package_depends_on() {
        let text =
            "Package: linux-image-cloud-amd64\nDepends: linux-image-6.1.0-57-cloud-amd64 (= 6.1.192-3)\n";
        let expected = ("linux-image-6.1.0-57-cloud-amd64".to_owned(), "6.1.192-3".to_owned());
        assert_eq!(depends(text), Some(expected));
        for bad in [
            "Depends: linux-image-6.1.0-57-cloud-amd64\n",
            "Depends: other (= 1)\n",
            "Depends: linux-image-a/b (= 1)\n",
            "Depends: linux-image-a (= -1)\n",
            "",
        ] {
            assert_eq!(depends(bad), None, "{bad}");
        }
    }

    #[test]
    fn what_is_not_whole_is_not_found() {
        let dir = tempfile::tempdir().unwrap();
        assert!(KernelPackage::find(dir.path()).is_none());
        let record = KernelRecord {
            version: RECORD_VERSION,
            package: "p".to_owned(),
            package_version: "1".to_owned(),
            release: "6.1.0".to_owned(),
            digest: String::new(),
        };
        std::fs::write(dir.path().join(RECORD), serde_json::to_vec(&record).unwrap()).unwrap();
        assert!(KernelPackage::find(dir.path()).is_none());
        std::fs::create_dir_all(dir.path().join("lib/modules/6.1.0")).unwrap();
        std::fs::create_dir(dir.path().join("boot")).unwrap();
        std::fs::write(dir.path().join("boot/vmlinuz-6.1.0"), "").unwrap();
        assert_eq!(KernelPackage::find(dir.path()).unwrap().record, record);
    }
}
