//! Whether this host can run a microVM, and what its snapshots depend on.

use std::fs::File;
use std::io;
use std::path::Path;

use crate::error::Failure;

const DEVICE: &str = "/dev/kvm";

/// Hardware virtualisation that can be used from here.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Kvm {
    /// `vmx` or `svm`.
    pub flag: &'static str,
}

/// Why there is none.
#[derive(Debug, thiserror::Error)]
pub enum Unusable {
    #[error("{DEVICE} is not there")]
    NoDevice,
    #[error("{DEVICE} is there but cannot be opened: {0}")]
    Closed(io::Error),
    /// Some hosts offer the device all the same; a stock guest kernel hangs there without a word.
    #[error("the processor's flags have neither vmx nor svm: without hardware virtualisation a guest hangs")]
    NoHardware,
}

impl Kvm {
    pub fn probe() -> Result<Self, Unusable> {
        let cpuinfo = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
        if !Path::new(DEVICE).exists() {
            return Err(Unusable::NoDevice);
        }
        File::options().read(true).write(true).open(DEVICE).map_err(Unusable::Closed)?;
        let flag = flag_in(&cpuinfo).ok_or(Unusable::NoHardware)?;
        Ok(Self { flag })
    }
}

impl Unusable {
    /// What mends it.
    #[must_use]
    pub fn mend(&self) -> &'static str {
        match self {
            Self::NoDevice => {
                "load the module kvm_intel or kvm_amd, switch virtualisation on in the firmware"
            }
            Self::Closed(_) => "run the daemon as root, or as a member of the group kvm",
            Self::NoHardware => {
                "use a host with hardware virtualisation (or nested virtualisation switched on), or the engine gvisor"
            }
        }
    }

    pub(super) fn into_failure(self) -> Failure {
        let mend = self.mend().to_owned();
        Failure::Unfit { what: "KVM".to_owned(), why: self.to_string(), mend }
    }
}

fn flag_in(cpuinfo: &str) -> Option<&'static str> {
    let line = cpuinfo.lines().find(|line| line.starts_with("flags"))?;
    ["vmx", "svm"].into_iter().find(|flag| line.split_ascii_whitespace().any(|word| word == *flag))
}

/// A guest that ran on one maker's processors does not go on on another's.
pub(super) fn platform() -> String {
    let cpuinfo = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let vendor = cpuinfo.lines().find_map(|line| line.strip_prefix("vendor_id")?.split_once(':'));
    format!("kvm {}", vendor.map_or("unknown", |(_, vendor)| vendor.trim()))
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
}
