//! Reading `/proc` and the program path.

use std::path::{Path, PathBuf};

/// The first executable of this name in PATH, or where an administrator's programs lie.
pub fn find_program(name: &str) -> Option<PathBuf> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let mut folders: Vec<PathBuf> = std::env::split_paths(&path).collect();
    folders.extend(["/usr/local/sbin", "/usr/sbin", "/sbin"].map(PathBuf::from));
    folders.into_iter().map(|folder| folder.join(name)).find(|path| is_program(path))
}

fn is_program(path: &Path) -> bool {
    use std::os::unix::fs::PermissionsExt;
    std::fs::metadata(path).is_ok_and(|data| data.is_file() && data.permissions().mode() & 0o111 != 0)
}

/// What `program args…` printed, both streams; `None` if it cannot be run.
pub fn output(program: &Path, args: &[&str]) -> Option<String> {
    let output =
        std::process::Command::new(program).args(args).stdin(std::process::Stdio::null()).output().ok()?;
    let mut text = String::from_utf8_lossy(&output.stdout).into_owned();
    text.push_str(&String::from_utf8_lossy(&output.stderr));
    Some(text)
}

/// `vmx` or `svm`, where the processor says so.
pub fn virtualisation_flag() -> Option<&'static str> {
    let text = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    flag_in(&text)
}

fn flag_in(cpuinfo: &str) -> Option<&'static str> {
    let line = cpuinfo.lines().find(|line| line.starts_with("flags"))?;
    ["vmx", "svm"].into_iter().find(|flag| line.split_ascii_whitespace().any(|word| word == *flag))
}

/// A value of `/proc/meminfo`, bytes.
pub fn memory_bytes(name: &str) -> Option<u64> {
    let text = std::fs::read_to_string("/proc/meminfo").ok()?;
    let line = text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'))?;
    line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok().map(|kib| kib * 1024)
}

/// The folder itself, or the nearest one above it that is there.
pub fn existing(path: &Path) -> &Path {
    path.ancestors().find(|ancestor| ancestor.is_dir()).unwrap_or_else(|| Path::new("/"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn flags_are_whole_words() {
        assert_eq!(flag_in("processor: 0\nflags\t\t: fpu svm_lock\n"), None);
        assert_eq!(flag_in("flags\t\t: fpu svm de\n"), Some("svm"));
        assert_eq!(flag_in("flags\t\t: vmx\n"), Some("vmx"));
    }

    #[test]
    fn programs_are_found() {
        assert!(find_program("sh").is_some());
        assert!(find_program("no-such-program-here").is_none());
    }
}
