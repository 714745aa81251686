//! The pager: brings a restored guest's memory page by page, when the guest touches it (userfaultfd).
//!
//! ```text
//!   monitor                                                   pager, a process of its own
//!   vCPU or device touches a page that is not there ─ waits ─▶ reads it from the layers, puts it there ─▶ goes on
//!   fork, checkpoint: FILL ──────────────────────────────────▶ brings all the rest
//!   watcher (thread) ◀── COMPLETE ───────────────────────────┘ and is gone
//!        └──────────────◀── anything else: the sandbox ends, with that reason
//! ```
//! A fork and a snapshot need all of the memory: a child of fork(2) would have a hole wherever nobody had looked yet,
//! and a pager per child that it does not know. So the rest is brought first, while the guest runs, and the guest is
//! one like any other from then on.
//!
//! Invariants: no page is ever another one than the layers'. A page that cannot be read ends the pager, and the pager's
//! end ends the monitor: by a thread that touches no guest memory (all others may be waiting for a page), without any
//! destructor, and with the userfault still open, so that nobody goes on with zeros in between.

mod serve;
mod uffd;

use std::fs::File;
use std::io::{self, Read};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{Builder, JoinHandle};

use dormouse_snapshot::WorkingSet;
use dormouse_sys::fds::Pipe;
use rustix::process::{Pid, WaitOptions};
use vm_memory::{GuestMemoryBackend as _, GuestMemoryRegion as _};
use vmm_sys_util::eventfd::{EFD_CLOEXEC, EFD_NONBLOCK, EventFd};

use self::serve::{End, Record, Server};
use self::uffd::Userfault;
pub use self::uffd::open_device;
use crate::control::WORKING_SET;
use crate::layers::PAGE_BYTES;
use crate::layers::memory::{Base, size};
use crate::memory::GuestMemory;
use crate::monitor::process::{close_all_but, leave, split};

/// Brought at once.
const CHUNK_BYTES: u64 = 64 << 10;
/// The order to bring all.
const FILL: u8 = b'f';
/// What it says at its end when all memory is there.
const COMPLETE: &[u8] = b"complete";

#[derive(Debug, thiserror::Error)]
pub enum PagerError {
    #[error("this monitor may not use /dev/userfaultfd; restore without a pager")]
    NoDevice,
    #[error("no userfault can be made")]
    Userfault(#[source] io::Error),
    #[error("the pager cannot be started")]
    Start(#[source] io::Error),
}

/// One region of guest memory, and where it begins in a layer.
#[derive(Debug, Clone, Copy)]
struct Region {
    start: usize,
    offset: u64,
    bytes: u64,
}

impl Region {
    fn holds(&self, address: usize) -> bool {
        address.checked_sub(self.start).is_some_and(|within| (within as u64) < self.bytes)
    }

    fn has(&self, offset: u64) -> bool {
        offset.checked_sub(self.offset).is_some_and(|within| within < self.bytes)
    }
}

struct Shared {
    /// Its end is no misfortune.
    over: AtomicBool,
    complete: EventFd,
}

/// The monitor's side of a pager.
pub struct Pager {
    shared: Arc<Shared>,
    userfault: Option<Userfault>,
    regions: Vec<Region>,
    orders: Option<OwnedFd>,
    watcher: Option<JoinHandle<()>>,
}

impl Pager {
    /// Starts a pager for `memory`, which nobody has touched yet, with the content of `base`. Forks: this is the
    /// process's only thread. `working_set`: pages to be brought ahead; without it they are noted, in `dir`.
    /// `on_death` is called, on a thread of its own, with the reason when the pager ended too early, and must not
    /// come back.
    pub fn start(
        device: &File,
        memory: &GuestMemory,
        base: &Base,
        working_set: Option<&WorkingSet>,
        dir: &Path,
        on_death: impl FnOnce(String) + Send + 'static,
    ) -> Result<Self, PagerError> {
        let regions = regions(memory);
        let userfault = Userfault::new(device).map_err(PagerError::Userfault)?;
        for region in &regions {
            userfault.register(region.start, region.bytes).map_err(PagerError::Userfault)?;
        }
        let (orders, report) =
            (Pipe::new().map_err(PagerError::Start)?, Pipe::new().map_err(PagerError::Start)?);
        let Some(pid) = split().map_err(PagerError::Start)? else {
            let chunks = usize::try_from(size(memory).div_ceil(CHUNK_BYTES)).unwrap_or(usize::MAX);
            let server = Server {
                userfault,
                base: base.clone(),
                regions,
                orders: orders.read,
                ahead: working_set.map_or_else(Vec::new, chunks_of),
                record: working_set.is_none().then(|| Record::new(dir.to_owned())),
                brought: vec![false; chunks],
            };
            live(server, report.write)
        };
        drop((orders.read, report.write));
        let complete = EventFd::new(EFD_NONBLOCK | EFD_CLOEXEC).map_err(PagerError::Start)?;
        let shared = Arc::new(Shared { over: AtomicBool::new(false), complete });
        let watched = Arc::clone(&shared);
        let watch = move || watch(&watched, pid, report.read, on_death);
        let watcher =
            Builder::new().name("pager-watch".to_owned()).spawn(watch).map_err(PagerError::Start)?;
        let (orders, watcher) = (Some(orders.write), Some(watcher));
        Ok(Self { shared, userfault: Some(userfault), regions, orders, watcher })
    }

    /// Readable when all memory is there.
    #[must_use]
    pub fn complete(&self) -> &EventFd {
        &self.shared.complete
    }

    /// All memory is to be brought.
    pub fn fill(&self) -> io::Result<()> {
        let orders = self.orders.as_ref().ok_or(io::ErrorKind::NotConnected)?;
        Ok(rustix::io::write(orders, &[FILL]).map(drop)?)
    }

    /// All memory is there: from now on it is memory like any other.
    pub fn finish(mut self) -> io::Result<()> {
        if let Some(watcher) = self.watcher.take() {
            watcher.join().map_err(|_| io::Error::other("the pager's watcher panicked"))?;
        }
        let Some(userfault) = self.userfault.take() else { return Ok(()) };
        for region in &self.regions {
            userfault.unregister(region.start, region.bytes)?;
        }
        userfault.close();
        Ok(())
    }
}

/// Its guest has ended, or never came to life.
impl Drop for Pager {
    fn drop(&mut self) {
        // Before its orders end, by which it goes.
        self.shared.over.store(true, Ordering::SeqCst);
    }
}

fn regions(memory: &GuestMemory) -> Vec<Region> {
    let mut offset = 0;
    let region = |region: &vm_memory::GuestRegionMmap| {
        let found = Region { start: region.as_ptr() as usize, offset, bytes: region.len() };
        offset += found.bytes;
        found
    };
    memory.iter().map(region).collect()
}

/// The next one last.
fn chunks_of(set: &WorkingSet) -> Vec<u64> {
    let mut chunks = Vec::new();
    for range in set.ranges() {
        let first = u64::from(range.first) * PAGE_BYTES / CHUNK_BYTES;
        let end = (u64::from(range.first) + u64::from(range.count)) * PAGE_BYTES;
        chunks.extend(first..end.div_ceil(CHUNK_BYTES));
    }
    chunks.reverse();
    chunks
}

/// The life of the process: never returns.
fn live(mut server: Server, report: OwnedFd) -> ! {
    // Where there is no control group, nobody else ends it when the monitor is killed.
    let _ = rustix::process::set_parent_process_death_signal(Some(rustix::process::Signal::KILL));
    let _ = rustix::thread::set_name(c"pager");
    let mut keep: Vec<BorrowedFd<'_>> = vec![report.as_fd(), server.userfault.as_fd(), server.orders.as_fd()];
    keep.extend(server.base.layers().iter().map(|layer| layer.file.as_fd()));
    close_all_but(&keep);
    let (said, code) = match server.serve() {
        Ok(End::Complete) => (COMPLETE.to_vec(), 0),
        Ok(End::Unneeded) => (Vec::new(), 0),
        Err(error) => (crate::monitor::chain(&error).into_bytes(), 1),
    };
    // If nobody listens any more, nobody misses it.
    let _ = io::Write::write_all(&mut File::from(report), &said);
    leave(code)
}

fn watch(shared: &Shared, pid: Pid, report: OwnedFd, on_death: impl FnOnce(String)) {
    let mut said = Vec::new();
    // An error leaves what was said so far, which is then not what it should be.
    let _ = File::from(report).read_to_end(&mut said);
    if said == COMPLETE {
        // Only fails when the counter is full.
        let _ = shared.complete.write(1);
    } else if !shared.over.load(Ordering::SeqCst) {
        let why = String::from_utf8_lossy(&said).into_owned();
        on_death(if said.is_empty() { "it was killed or crashed".to_owned() } else { why });
    }
    // So that no zombie stays.
    let _ = rustix::process::waitpid(Some(pid), WaitOptions::empty());
}
