//! Which kernel modules a guest needs, and the order they are loaded in: each after those that its own
//! `.modinfo` says it depends on.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use crate::error::GuestError;
use crate::kernel::KernelPackage;

/// What a guest of ours needs; built in or as a module, as the kernel has it.
pub const WANTED: &[&str] = &[
    "virtio_mmio",
    "virtio_blk",
    "vmw_vsock_virtio_transport",
    "virtio_rng",
    "virtio_balloon",
    "virtio_net",
];
const MODULE_BYTES_MAX: u64 = 64 << 20;
const DEPTH_MAX: usize = 16;

/// A module, ready to be loaded.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Module {
    pub name: String,
    pub content: Vec<u8>,
}

/// All that `WANTED` stands for, in the order of loading.
pub fn load_order(kernel: &KernelPackage) -> Result<Vec<Module>, GuestError> {
    let dir = kernel.modules_dir();
    let mut files = BTreeMap::new();
    collect(&dir, &mut files, 0)?;
    let builtin = builtin(&dir)?;
    let mut order = Vec::new();
    let mut seen = BTreeSet::new();
    let release = &kernel.record.release;
    for name in WANTED {
        add(name, release, &files, &builtin, &mut seen, &mut order)?;
    }
    Ok(order)
}

/// Depth first; `seen` also ends a circle.
fn add(
    name: &str,
    release: &str,
    files: &BTreeMap<String, PathBuf>,
    builtin: &BTreeSet<String>,
    seen: &mut BTreeSet<String>,
    order: &mut Vec<Module>,
) -> Result<(), GuestError> {
    if builtin.contains(name) || !seen.insert(name.to_owned()) {
        return Ok(());
    }
    let missing = || GuestError::NoModule { name: name.to_owned(), release: release.to_owned() };
    let path = files.get(name).ok_or_else(missing)?;
    let content = read(path)?;
    let info = modinfo(&content).ok_or_else(|| GuestError::Module {
        path: path.clone(),
        why: "it is not an ELF module".to_owned(),
    })?;
    let needed = info.iter().find_map(|entry| entry.strip_prefix("depends=")).unwrap_or_default();
    for other in needed.split(',').filter(|other| !other.is_empty()) {
        add(&plain(other), release, files, builtin, seen, order)?;
    }
    order.push(Module { name: name.to_owned(), content });
    Ok(())
}

/// Names are the same with dashes and underscores.
fn plain(name: &str) -> String {
    name.replace('-', "_")
}

/// `virtio_blk` of `virtio_blk.ko`, also where it is packed.
fn module_name(file: &str) -> Option<String> {
    let (name, rest) = file.split_once(".ko")?;
    ["", ".xz", ".zst", ".gz"].contains(&rest).then(|| plain(name))
}

fn collect(dir: &Path, files: &mut BTreeMap<String, PathBuf>, depth: usize) -> Result<(), GuestError> {
    let failed = |source| GuestError::Io { action: "list", path: dir.to_owned(), source };
    if depth > DEPTH_MAX {
        return Ok(());
    }
    for entry in std::fs::read_dir(dir).map_err(failed)? {
        let entry = entry.map_err(failed)?;
        if entry.file_type().map_err(failed)?.is_dir() {
            collect(&entry.path(), files, depth + 1)?;
        } else if let Some(name) = entry.file_name().to_str().and_then(module_name) {
            files.insert(name, entry.path());
        }
    }
    Ok(())
}

fn builtin(dir: &Path) -> Result<BTreeSet<String>, GuestError> {
    let path = dir.join("modules.builtin");
    let text = std::fs::read_to_string(&path).map_err(|source| GuestError::Io {
        action: "read",
        path: path.clone(),
        source,
    })?;
    Ok(text.lines().filter_map(|line| module_name(line.rsplit('/').next()?)).collect())
}

fn read(path: &Path) -> Result<Vec<u8>, GuestError> {
    let io = |source| GuestError::Io { action: "read", path: path.to_owned(), source };
    let module = |why: String| GuestError::Module { path: path.to_owned(), why };
    let size = std::fs::metadata(path).map_err(io)?.len();
    if size > MODULE_BYTES_MAX {
        return Err(module(format!("it has {size} bytes")));
    }
    let bytes = std::fs::read(path).map_err(io)?;
    match path.extension().and_then(|ext| ext.to_str()) {
        Some("xz") => {
            let mut command = Command::new("xz");
            command.arg("-dc").arg(path).stdin(Stdio::null());
            let output = command.output().map_err(|error| module(format!("cannot run xz: {error}")))?;
            if !output.status.success() {
                return Err(module(format!("xz ended with {}", output.status)));
            }
            Ok(output.stdout)
        }
        Some("zst") => zstd::stream::decode_all(&bytes[..]).map_err(io),
        Some("gz") => {
            let mut content = Vec::new();
            let reader = flate2::read::GzDecoder::new(&bytes[..]);
            std::io::Read::read_to_end(&mut std::io::Read::take(reader, MODULE_BYTES_MAX), &mut content)
                .map_err(io)?;
            Ok(content)
        }
        _ => Ok(bytes),
    }
}

/// The entries of `.modinfo`, `key=value` each; `None`: this is no 64-bit little-endian ELF file that has it.
fn modinfo(elf: &[u8]) -> Option<Vec<String>> {
    if elf.get(..6)? != [0x7f, b'E', b'L', b'F', 2, 1] {
        return None;
    }
    let headers = usize::try_from(number(elf, 0x28, 8)?).ok()?;
    let size = usize::try_from(number(elf, 0x3a, 2)?).ok()?;
    let count = usize::try_from(number(elf, 0x3c, 2)?).ok()?;
    let names = usize::try_from(number(elf, 0x3e, 2)?).ok()?;
    let header = |index: usize| elf.get(headers.checked_add(index.checked_mul(size)?)?..);
    let content = |header: &[u8]| {
        let start = usize::try_from(number(header, 0x18, 8)?).ok()?;
        let length = usize::try_from(number(header, 0x20, 8)?).ok()?;
        elf.get(start..start.checked_add(length)?)
    };
    let names = content(header(names)?)?;
    for index in 0..count {
        let header = header(index)?;
        let name = names.get(usize::try_from(number(header, 0, 4)?).ok()?..)?;
        if name.starts_with(b".modinfo\0") {
            let entries = content(header)?.split(|&byte| byte == 0).filter(|entry| !entry.is_empty());
            return Some(entries.map(|entry| String::from_utf8_lossy(entry).into_owned()).collect());
        }
    }
    None
}

fn number(bytes: &[u8], at: usize, width: usize) -> Option<u64> {
    let field = bytes.get(at..at.checked_add(width)?)?;
    Some(field.iter().rev().fold(0, |value, &byte| value << 8 | u64::from(byte)))
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use proptest::prelude::*;

    /// The smallest module: an ELF header, three section headers, their names, the information.
    pub fn module(depends: &str) -> Vec<u8> {
        let names = b"\0.modinfo\0.shstrtab\0";
        let info = format!("license=GPL\0depends={depends}\0name=x\0");
        let mut elf = vec![0_u8; 64];
        elf[..6].copy_from_slice(&[0x7f, b'E', b'L', b'F', 2, 1]);
        let (names_at, info_at) = (64, 64 + names.len());
        elf.extend(names);
        elf.extend(info.as_bytes());
        let headers = elf.len() as u64;
        elf[0x28..0x30].copy_from_slice(&headers.to_le_bytes());
        for (at, value) in [(0x3a, 64_u16), (0x3c, 3), (0x3e, 2)] {
            elf[at..at + 2].copy_from_slice(&value.to_le_bytes());
        }
        for (name, start, length) in [(0_u32, 0, 0), (1, info_at, info.len()), (10, names_at, names.len())] {
            let mut header = vec![0_u8; 64];
            header[..4].copy_from_slice(&name.to_le_bytes());
            header[0x18..0x20].copy_from_slice(&(start as u64).to_le_bytes());
            header[0x20..0x28].copy_from_slice(&(length as u64).to_le_bytes());
            elf.extend(header);
        }
        elf
    }

    #[test]
    fn information_is_found() {
        assert_eq!(modinfo(&module("a,b")).unwrap(), ["license=GPL", "depends=a,b", "name=x"]);
        assert_eq!(modinfo(b"#!/bin/sh"), None);
    }

    #[test]
    fn names_are_taken_from_files() {
        assert_eq!(module_name("virtio-rng.ko.xz").as_deref(), Some("virtio_rng"));
        assert_eq!(module_name("virtio.ko").as_deref(), Some("virtio"));
        assert_eq!(module_name("modules.dep"), None);
        assert_eq!(module_name("x.koala"), None);
    }

    proptest! {
        #[test]
        fn damaged_modules_never_panic(at in 0_usize..400, byte: u8, cut in 0_usize..400) {
            let mut elf = module("virtio");
            if let Some(place) = elf.get_mut(at) {
                *place = byte;
            }
            let _ = modinfo(&elf[..cut.min(elf.len())]);
            let _ = modinfo(&elf);
        }
    }
}
