//! The scribe: a forked child that writes a snapshot while its parent's guest runs on.
//!
//! It has a copy of the guest's memory by copy-on-write, the frozen layers of the disks, and the saved state. It
//! writes, syncs, reports and is gone; whatever happens to it, the parent only sees no report.

use std::fs::File;
use std::io::{self, Write};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use dormouse_snapshot::devices::{DiskRecord, Inventory};
use serde::{Deserialize, Serialize};

use super::disks::layer_prefix;
use super::guest::memory_name;
use super::process::{close_all_but, leave};
use super::saved::{Saved, SavedError};
use crate::control::{Checkpointed, ErrorCode, Machine, SnapshotFile};
use crate::layers::memory::{self, Base};
use crate::layers::{Frozen, LayerError, link_or_copy};
use crate::memory::GuestMemory;

const DEVICES: &str = "devices";

/// What is to be written.
pub struct Order<'a> {
    pub into: &'a Path,
    pub machine: &'a Machine,
    pub memory: &'a GuestMemory,
    pub base: &'a Base,
    /// The memory of the last snapshot; empty: there is none.
    pub last: &'a [Arc<File>],
    pub disks: &'a [Frozen],
    pub records: Vec<DiskRecord>,
    pub saved: &'a Saved,
}

#[derive(Debug, thiserror::Error)]
pub enum ScribeError {
    #[error("a layer cannot be written")]
    Layer(#[source] LayerError),
    #[error("the state cannot be encoded")]
    Saved(#[source] SavedError),
    #[error("cannot write {}", path.display())]
    Write { path: PathBuf, source: io::Error },
    #[error("there are too many layers")]
    Layers,
}

/// What the scribe says at its end.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Report {
    Written(Checkpointed),
    Failed { code: ErrorCode, message: String },
}

/// The life of the child: never returns.
pub fn live(order: &Order<'_>, report: OwnedFd) -> ! {
    // Hosts without control groups have nobody else to end it when the monitor is killed.
    let _ = rustix::process::set_parent_process_death_signal(Some(rustix::process::Signal::KILL));
    let mut keep: Vec<BorrowedFd<'_>> = vec![report.as_fd()];
    keep.extend(order.base.layers().iter().map(|layer| layer.file.as_fd()));
    keep.extend(order.last.iter().map(AsFd::as_fd));
    keep.extend(order.disks.iter().flat_map(|disk| &disk.layers).map(|layer| layer.file.as_fd()));
    // The carrier's pipes and the control socket among them: their other ends must see the monitor's end alone.
    close_all_but(&keep);
    let said = match write(order) {
        Ok(done) => Report::Written(done),
        Err(error) => Report::Failed { code: ErrorCode::Host, message: super::chain(&error) },
    };
    let told = serde_json::to_vec(&said).map(|bytes| File::from(report).write_all(&bytes));
    leave(i32::from(!matches!(told, Ok(Ok(())))))
}

/// Writes the snapshot's files, all synced.
fn write(order: &Order<'_>) -> Result<Checkpointed, ScribeError> {
    let mut files = Vec::new();
    let (memory_bytes, memory_layers) = write_memory(order, &mut files)?;
    let mut records = order.records.clone();
    for (number, disk) in order.disks.iter().enumerate() {
        let published = disk.publish(order.into, &layer_prefix(number)).map_err(ScribeError::Layer)?;
        if let Some(record) = records.get_mut(number) {
            record.layers = count(published.len())?;
        }
        let bytes = disk.bytes;
        let file =
            |layer: crate::layers::Published| SnapshotFile { name: layer.name, bytes, shared: layer.shared };
        files.extend(published.into_iter().map(file));
    }
    let inventory = Inventory {
        vcpus: order.machine.vcpus,
        memory_mib: order.machine.memory_mib,
        memory_layers: count(memory_layers)?,
        disks: records,
        net: order.machine.net,
        cpu_template: order.machine.cpu_template.clone().unwrap_or_else(|| "host".to_owned()),
    };
    let bytes = order.saved.encode(&inventory).map_err(ScribeError::Saved)?;
    write_synced(&order.into.join(DEVICES), &bytes)?;
    files.insert(0, SnapshotFile { name: DEVICES.to_owned(), bytes: bytes.len() as u64, shared: false });
    sync_dir(order.into)?;
    Ok(Checkpointed { stopped_us: 0, memory_bytes, files })
}

/// Answers how many bytes are new, and how many layers there are.
fn write_memory(order: &Order<'_>, files: &mut Vec<SnapshotFile>) -> Result<(u64, usize), ScribeError> {
    let bytes = memory::size(order.memory);
    // The new one is written under a name of its own first: only then it is known whether it stands alone.
    let temporary = order.into.join("memory.new");
    // A chain that cannot be read any more costs space, not the snapshot.
    let last = Some(order.last)
        .filter(|files| !files.is_empty())
        .and_then(|files| Base::of_files(files, bytes).ok());
    let written =
        memory::write(order.memory, order.base, last.as_ref(), &temporary).map_err(ScribeError::Layer)?;
    written.layer.sync(bytes).map_err(ScribeError::Layer)?;
    let below = &last.as_ref().unwrap_or(order.base).layers()[..written.on];
    for (number, layer) in below.iter().enumerate() {
        let name = memory_name(number);
        let shared = link_or_copy(layer, bytes, &order.into.join(&name)).map_err(ScribeError::Layer)?;
        files.push(SnapshotFile { name, bytes, shared });
    }
    let name = memory_name(below.len());
    let path = order.into.join(&name);
    std::fs::rename(&temporary, &path).map_err(|source| ScribeError::Write { path, source })?;
    files.push(SnapshotFile { name, bytes, shared: false });
    Ok((written.layer.extents.bytes(), below.len() + 1))
}

fn count(layers: usize) -> Result<u8, ScribeError> {
    u8::try_from(layers).map_err(|_| ScribeError::Layers)
}

fn write_synced(path: &Path, bytes: &[u8]) -> Result<(), ScribeError> {
    let failed = |source| ScribeError::Write { path: path.to_owned(), source };
    let mut file = File::create_new(path).map_err(failed)?;
    file.write_all(bytes).and_then(|()| file.sync_all()).map_err(failed)
}

fn sync_dir(dir: &Path) -> Result<(), ScribeError> {
    let failed = |source| ScribeError::Write { path: dir.to_owned(), source };
    File::open(dir).and_then(|dir| dir.sync_all()).map_err(failed)
}

/// Reads the file of devices of a snapshot.
pub fn read_devices(from: &Path) -> Result<(Inventory, Saved), ReadError> {
    use std::io::Read;
    let path = from.join(DEVICES);
    let failed = |source| ReadError::Read { path: path.clone(), source };
    let max = dormouse_snapshot::devices::DEVICES_BYTES_MAX as u64;
    let mut bytes = Vec::new();
    File::open(&path).and_then(|file| file.take(max + 1).read_to_end(&mut bytes)).map_err(failed)?;
    Saved::decode(&bytes).map_err(ReadError::Saved)
}

#[derive(Debug, thiserror::Error)]
pub enum ReadError {
    #[error("cannot read {}", path.display())]
    Read { path: PathBuf, source: io::Error },
    #[error("the snapshot's state is damaged")]
    Saved(#[source] SavedError),
}
