//! What is left on the host: processes, mounts, cgroups, namespaces, sockets, files of one data folder.

use std::collections::BTreeSet;
use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use anyhow::{Context, Result};

/// Everything that a data folder's daemon, keepers and engines hold on this host. Two of these are
/// compared: what is in the later one only was leaked.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Holdings {
    pub processes: BTreeSet<String>,
    pub mounts: BTreeSet<String>,
    pub cgroups: BTreeSet<String>,
    pub runtime_files: BTreeSet<String>,
}

/// Reads what there is now. The daemon itself (`daemon`) is not counted.
pub fn holdings(data_dir: &Path, daemon: u32) -> Result<Holdings> {
    let folder = data_dir.to_string_lossy().into_owned();
    Ok(Holdings {
        processes: processes_naming(&folder, daemon)?,
        mounts: lines_naming("/proc/self/mountinfo", &folder)?,
        cgroups: cgroups_of(data_dir)?,
        runtime_files: [
            "run",
            "gvisor/run",
            "gvisor/runtimes",
            "microvm/run",
            "microvm/runtimes",
            "microvm/zygotes",
        ]
        .iter()
        .flat_map(|sub| names_in(&data_dir.join(sub)))
        .collect(),
    })
}

impl Holdings {
    /// What is here and was not in `before`, in words.
    #[must_use]
    pub fn beyond(&self, before: &Self) -> Vec<String> {
        let beyond = |what: &str, now: &BTreeSet<String>, then: &BTreeSet<String>| -> Vec<String> {
            now.difference(then).map(|name| format!("{what} {name}")).collect()
        };
        [
            beyond("process", &self.processes, &before.processes),
            beyond("mount", &self.mounts, &before.mounts),
            beyond("cgroup", &self.cgroups, &before.cgroups),
            beyond("file", &self.runtime_files, &before.runtime_files),
        ]
        .concat()
    }
}

/// Processes whose command line or working folder names the data folder.
fn processes_naming(folder: &str, daemon: u32) -> Result<BTreeSet<String>> {
    let mut found = BTreeSet::new();
    for entry in fs::read_dir("/proc").context("cannot read /proc")? {
        let name = entry?.file_name().to_string_lossy().into_owned();
        let Ok(pid) = name.parse::<u32>() else { continue };
        if pid == daemon || pid == std::process::id() {
            continue;
        }
        let Ok(line) = fs::read(format!("/proc/{pid}/cmdline")) else { continue };
        let line = String::from_utf8_lossy(&line).replace('\0', " ");
        // Whoever runs the scenarios names the folder too.
        let ours = ["runsc", "dormouse", "exe"].iter().any(|name| program(&line).contains(name));
        if line.contains(folder) && ours {
            found.insert(format!("{pid} {line}"));
        }
    }
    Ok(found)
}

/// The file name of a command line's program.
fn program(line: &str) -> &str {
    let path = line.split_whitespace().next().unwrap_or_default();
    path.rsplit('/').next().unwrap_or(path)
}

fn lines_naming(file: &str, folder: &str) -> Result<BTreeSet<String>> {
    let text = fs::read_to_string(file).with_context(|| format!("cannot read {file}"))?;
    Ok(text.lines().filter(|line| line.contains(folder)).map(str::to_owned).collect())
}

fn names_in(folder: &Path) -> Vec<String> {
    let entries = fs::read_dir(folder).into_iter().flatten().flatten();
    entries.map(|entry| entry.path().display().to_string()).collect()
}

/// Cgroups that the engine made for this data folder, in every hierarchy.
fn cgroups_of(data_dir: &Path) -> Result<BTreeSet<String>> {
    let tag = cgroup_tag(data_dir)?;
    let mut found = BTreeSet::new();
    let mut waiting = vec![(Path::new("/sys/fs/cgroup").to_owned(), 0)];
    while let Some((folder, depth)) = waiting.pop() {
        for entry in fs::read_dir(&folder).into_iter().flatten().flatten() {
            if !entry.file_type().is_ok_and(|kind| kind.is_dir()) {
                continue;
            }
            let path = entry.path();
            // Each engine's begins with it.
            if path.components().any(|part| part.as_os_str().to_string_lossy().starts_with(&tag)) {
                found.insert(path.display().to_string());
            }
            if depth < 5 {
                waiting.push((path, depth + 1));
            }
        }
    }
    Ok(found)
}

/// The name of the cgroup that all sandboxes of a data folder are in, as the engine derives it: FNV-1a
/// of the folder's absolute path.
fn cgroup_tag(data_dir: &Path) -> Result<String> {
    let folder = fs::canonicalize(data_dir).with_context(|| format!("cannot find {}", data_dir.display()))?;
    let mut hash = 0xcbf2_9ce4_8422_2325_u64;
    for byte in folder.as_os_str().as_encoded_bytes() {
        hash = (hash ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3);
    }
    Ok(format!("dormouse-{hash:016x}"))
}

/// Open descriptors of a process.
pub fn descriptors(pid: u32) -> Result<usize> {
    Ok(fs::read_dir(format!("/proc/{pid}/fd")).context("cannot list descriptors")?.count())
}

/// Resident memory of a process, bytes.
pub fn resident(pid: u32) -> Result<u64> {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).context("cannot read the status")?;
    let line = status.lines().find(|line| line.starts_with("VmRSS:")).context("no VmRSS line")?;
    let kib: u64 = line.split_whitespace().nth(1).context("no figure")?.parse()?;
    Ok(kib << 10)
}

/// Bytes that a folder's files take on disk.
#[must_use]
pub fn disk_use(folder: &Path) -> u64 {
    let mut total = 0;
    let mut waiting = vec![folder.to_owned()];
    while let Some(folder) = waiting.pop() {
        for entry in fs::read_dir(&folder).into_iter().flatten().flatten() {
            let Ok(about) = entry.metadata() else { continue };
            total += about.blocks() * 512;
            if about.is_dir() {
                waiting.push(entry.path());
            }
        }
    }
    total
}

/// Host processes of a sandbox's runtime and all their descendants; the keeper is not one of them.
pub fn processes_of_runtime(data_dir: &Path, daemon: u32, sandbox: &str) -> Result<Vec<u32>> {
    let runtime = runtime_of(data_dir, sandbox)?;
    if data_dir.join("microvm/runtimes").join(&runtime).is_dir() {
        // Its command line is its source's where it was forked, and its children may be other sandboxes.
        return Ok(vec![monitor_of(data_dir, &runtime).context("the monitor's process is not known")?]);
    }
    let runtime = container_of(data_dir, &runtime)?;
    let mut found: Vec<u32> = holdings(data_dir, daemon)?
        .processes
        .iter()
        .filter(|process| process.contains(&runtime) && !process.contains(" keeper "))
        .filter_map(|process| process.split_whitespace().next()?.parse().ok())
        .collect();
    anyhow::ensure!(!found.is_empty(), "no process of the runtime of {sandbox} was found");
    let mut next = 0;
    while next < found.len() {
        let children = fs::read_to_string(format!("/proc/{0}/task/{0}/children", found[next]));
        for child in children.unwrap_or_default().split_whitespace().filter_map(|pid| pid.parse().ok()) {
            if !found.contains(&child) {
                found.push(child);
            }
        }
        next += 1;
    }
    Ok(found)
}

/// The process of a microVM's monitor; `None`: it is being made or removed.
pub fn monitor_of(data_dir: &Path, runtime: &str) -> Option<u32> {
    let meta = fs::read(data_dir.join("microvm/meta").join(format!("{runtime}.json"))).ok()?;
    let meta: serde_json::Value = serde_json::from_slice(&meta).ok()?;
    meta["process"][0].as_u64().and_then(|pid| u32::try_from(pid).ok())
}

/// The sandbox's runtime, as the journal knows it.
fn runtime_of(data_dir: &Path, sandbox: &str) -> Result<String> {
    let script = "import sqlite3, sys\n\
        db = sqlite3.connect(f'file:{sys.argv[1]}/node.db?mode=ro', uri=True)\n\
        query = \"select json_extract(info, '$.runtime') from sandboxes where id = ?\"\n\
        print(db.execute(query, (sys.argv[2],)).fetchone()[0])";
    let output = std::process::Command::new("python3")
        .arg("-c")
        .arg(script)
        .arg(data_dir)
        .arg(sandbox)
        .output()
        .context("cannot run python3")?;
    let runtime = String::from_utf8_lossy(&output.stdout).trim().to_owned();
    anyhow::ensure!(
        output.status.success() && !runtime.is_empty() && runtime != "None",
        "the journal knows no runtime of {sandbox}: {}",
        String::from_utf8_lossy(&output.stderr)
    );
    Ok(runtime)
}

/// One from the pool was made under another name, which its processes carry.
fn container_of(data_dir: &Path, runtime: &str) -> Result<String> {
    let link = data_dir.join("gvisor/runtimes").join(runtime);
    let container = fs::read_link(&link).with_context(|| format!("cannot read {}", link.display()))?;
    let name = container.file_name().context("the runtime's link names no container")?;
    Ok(name.to_string_lossy().into_owned())
}

/// CPU time of processes since their start, in ticks of 10 ms.
#[must_use]
pub fn cpu_ticks(pids: &[u32]) -> u64 {
    let ticks = |pid: &u32| -> Option<u64> {
        let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
        let fields: Vec<&str> = stat.rsplit_once(") ")?.1.split_whitespace().collect();
        Some(fields.get(11)?.parse::<u64>().ok()? + fields.get(12)?.parse::<u64>().ok()?)
    };
    pids.iter().filter_map(ticks).sum()
}
