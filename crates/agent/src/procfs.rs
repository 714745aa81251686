//! What `/proc` tells of the sandbox: processes, CPU time, memory.

use std::fs;

/// Processes that are looked at; more than a sandbox may have.
const PROCESSES_MAX: usize = 65_536;

/// CPU time and number of the sandbox's processes.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Processes {
    /// The agent not counted.
    pub count: u32,
    /// Used by all but the agent since boot, those that ended included.
    pub cpu_ms: u64,
}

/// Fields of `/proc/<pid>/stat` (proc(5)), in clock ticks.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
struct Ticks {
    own: u64,
    /// Of the children that were collected, and of theirs.
    children: u64,
}

#[must_use]
pub fn processes() -> Processes {
    let agent = std::process::id();
    let mut found = Processes::default();
    let mut ticks = 0_u64;
    let Ok(entries) = fs::read_dir("/proc") else { return found };
    for entry in entries.flatten().take(PROCESSES_MAX) {
        let Some(pid) = entry.file_name().to_str().and_then(|name| name.parse::<u32>().ok()) else {
            continue;
        };
        // It may have ended in the meantime.
        let Some(of) = fs::read_to_string(entry.path().join("stat")).ok().as_deref().and_then(parse_stat)
        else {
            continue;
        };
        ticks = ticks.saturating_add(of.children);
        if pid != agent {
            found.count += 1;
            ticks = ticks.saturating_add(of.own);
        }
    }
    let per_second = rustix::param::clock_ticks_per_second().max(1);
    found.cpu_ms = ticks.saturating_mul(1000) / per_second;
    found
}

/// Processes of a session.
#[must_use]
pub fn session(leader: u32) -> Vec<u32> {
    let Ok(entries) = fs::read_dir("/proc") else { return Vec::new() };
    let pids =
        entries.flatten().take(PROCESSES_MAX).filter_map(|entry| entry.file_name().to_str()?.parse().ok());
    let is_member = |pid: &u32| {
        let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok();
        stat.as_deref().and_then(parse_session) == Some(leader)
    };
    pids.filter(is_member).collect()
}

/// What follows the name, which is in brackets and may hold anything.
fn after_name(line: &str) -> Option<std::str::SplitAsciiWhitespace<'_>> {
    Some(line.get(line.rfind(')')? + 1..)?.split_ascii_whitespace())
}

fn parse_session(line: &str) -> Option<u32> {
    after_name(line)?.nth(3)?.parse().ok()
}

fn parse_stat(line: &str) -> Option<Ticks> {
    let mut fields = after_name(line)?.skip(11);
    let mut next = || fields.next()?.parse::<u64>().ok();
    let (user, system) = (next()?, next()?);
    // Some kernels print negative numbers there.
    let children = next().unwrap_or(0).saturating_add(next().unwrap_or(0));
    Some(Ticks { own: user.saturating_add(system), children })
}

/// Bytes.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Memory {
    pub total: u64,
    pub used: u64,
    pub cache: u64,
}

#[must_use]
pub fn memory() -> Memory {
    parse_memory(&fs::read_to_string("/proc/meminfo").unwrap_or_default())
}

fn parse_memory(text: &str) -> Memory {
    let bytes = |wanted: &str| -> Option<u64> {
        let line = text.lines().find_map(|line| line.strip_prefix(wanted)?.strip_prefix(':'))?;
        line.split_ascii_whitespace().next()?.parse::<u64>().ok()?.checked_mul(1024)
    };
    let total = bytes("MemTotal").unwrap_or(0);
    let cache = bytes("Cached").unwrap_or(0);
    let available =
        bytes("MemAvailable").unwrap_or_else(|| bytes("MemFree").unwrap_or(0).saturating_add(cache));
    Memory { total, used: total.saturating_sub(available), cache }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_with_brackets_does_not_shift_the_fields() {
        let line = "7 (a) b (c)) S 1 7 7 0 -1 4194560 100 0 0 0 31 11 5 2 20 0 1 0 100 0 0";
        assert_eq!(parse_stat(line), Some(Ticks { own: 42, children: 7 }));
        assert_eq!(parse_session(line), Some(7));
        assert_eq!((parse_session("7 (a) S 1 7"), parse_session("7 (a")), (None, None));
        assert_eq!(parse_stat("7 (a"), None);
        assert_eq!(parse_stat(""), None);
    }

    #[test]
    fn memory_is_what_is_not_available() {
        let memory =
            parse_memory("MemTotal: 1000 kB\nMemFree: 10 kB\nMemAvailable: 600 kB\nCached: 300 kB\n");
        assert_eq!(memory, Memory { total: 1_024_000, used: 409_600, cache: 307_200 });
        assert_eq!(parse_memory("garbage"), Memory::default());
    }

    #[test]
    fn this_host_has_processes() {
        assert!(processes().cpu_ms > 0);
        assert!(memory().total > memory().used);
    }
}
