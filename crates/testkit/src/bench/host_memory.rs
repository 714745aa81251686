//! Memory as the host's kernel counts it.

use std::fs;

use anyhow::{Context, Result};

/// What a monitor has that no other process has.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Private {
    /// Of the guest's memory.
    pub guest_bytes: u64,
    pub other_bytes: u64,
}

pub fn private(pid: u32) -> Result<Private> {
    let path = format!("/proc/{pid}/smaps");
    Ok(private_in(&fs::read_to_string(&path).with_context(|| format!("cannot read {path}"))?))
}

/// The guest's mappings are those that no core dump holds (`dd`), and the layers of a snapshot.
fn private_in(smaps: &str) -> Private {
    let (mut private, mut bytes, mut of_layer) = (Private::default(), 0, false);
    for line in smaps.lines() {
        let mut words = line.split_ascii_whitespace();
        let Some(first) = words.next() else { continue };
        match first {
            "Private_Clean:" | "Private_Dirty:" | "Private_Hugetlb:" => {
                bytes += words.next().and_then(|kib| kib.parse::<u64>().ok()).unwrap_or(0) << 10;
            }
            // The last line of each mapping.
            "VmFlags:" => {
                let is_guest = of_layer || words.any(|flag| flag == "dd");
                *(if is_guest { &mut private.guest_bytes } else { &mut private.other_bytes }) += bytes;
                bytes = 0;
            }
            _ if !first.ends_with(':') => {
                of_layer = words.nth(4).is_some_and(|path| path.contains("/memory."));
            }
            _ => {}
        }
    }
    private
}

/// What the host could give without taking it from somebody.
pub fn available_mib() -> Result<u64> {
    let text = fs::read_to_string("/proc/meminfo").context("cannot read /proc/meminfo")?;
    let line = text.lines().find_map(|line| line.strip_prefix("MemAvailable:"));
    let kib: u64 = line.and_then(|line| line.split_whitespace().next()?.parse().ok()).context("no figure")?;
    Ok(kib >> 10)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn guest_memory_is_told_from_the_rest() {
        let mapping = |name: &str, flags: &str| {
            format!(
                "7f0000000000-7f0000200000 rw-p 00000000 08:01 12 {name}\nSize: 2048 kB\nShared_Dirty: 9 kB\n\
                 Private_Clean: 4 kB\nPrivate_Dirty: 8 kB\nVmFlags: rd wr {flags}\n"
            )
        };
        let smaps = [
            mapping("", "mr dd"),
            mapping("/data/snapshots/a/memory.0", "mr"),
            mapping("[heap]", "mr"),
            mapping("/usr/bin/dormouse", "mr"),
            mapping("", "mr"),
        ];
        let private = private_in(&smaps.concat());
        assert_eq!(private, Private { guest_bytes: 24 << 10, other_bytes: 36 << 10 });
    }
}
