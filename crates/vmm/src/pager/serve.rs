//! The pager's process: brings pages when somebody waits for them, and what is likely to be waited for before.

use std::fs::File;
use std::io::{self, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use dormouse_snapshot::{PageRange, WorkingSet};
use rustix::event::{PollFd, PollFlags, Timespec};

use super::uffd::Userfault;
use super::{CHUNK_BYTES, FILL, Region, WORKING_SET};
use crate::layers::memory::Base;
use crate::layers::{LayerError, PAGE_BYTES};

/// What is touched first is noted for so long.
const RECORD: Duration = Duration::from_secs(10);

#[derive(Debug, thiserror::Error)]
pub enum ServeError {
    #[error("it cannot wait")]
    Wait(#[source] io::Error),
    #[error("its orders cannot be read")]
    Orders(#[source] io::Error),
    #[error("a page at {offset:#x} cannot be read")]
    Read { offset: u64, source: LayerError },
    #[error("a page at {offset:#x} cannot be put where it is waited for")]
    Put { offset: u64, source: io::Error },
    #[error("somebody waits for memory at {0:#x} that is not the guest's")]
    Stray(usize),
}

/// How serving ended.
#[derive(Debug, PartialEq, Eq)]
pub enum End {
    /// All memory is there.
    Complete,
    /// Nobody needs it any more.
    Unneeded,
}

pub struct Server {
    pub userfault: Userfault,
    pub base: Base,
    pub regions: Vec<Region>,
    pub orders: OwnedFd,
    /// Chunks to be brought ahead, the next one last.
    pub ahead: Vec<u64>,
    pub record: Option<Record>,
    /// By chunk: it was brought.
    pub brought: Vec<bool>,
}

/// What is noted of the first touches.
pub struct Record {
    /// The folder that it is written to.
    pub dir: PathBuf,
    pub until: Instant,
    pub touched: Vec<u64>,
}

impl Record {
    pub fn new(dir: PathBuf) -> Self {
        Self { dir, until: Instant::now() + RECORD, touched: Vec::new() }
    }
}

impl Server {
    pub fn serve(&mut self) -> Result<End, ServeError> {
        let mut buffer = vec![0; usize::try_from(CHUNK_BYTES).unwrap_or(0)];
        let mut filling = None;
        loop {
            let busy = filling.is_some() || !self.ahead.is_empty();
            let (faults, orders) = self.wait(busy)?;
            if faults {
                for address in self.userfault.faults().map_err(ServeError::Wait)? {
                    self.on_fault(address, &mut buffer)?;
                }
                continue;
            }
            if orders {
                match self.order()? {
                    Some(FILL) => filling = filling.or(Some(0)),
                    Some(_) => {}
                    None => return Ok(End::Unneeded),
                }
            }
            self.write_record(false);
            if let Some(chunk) = self.ahead.pop() {
                self.bring_once(chunk, &mut buffer)?;
            } else if let Some(next) = filling {
                if next == self.brought.len() as u64 {
                    self.write_record(true);
                    return Ok(End::Complete);
                }
                self.bring_once(next, &mut buffer)?;
                filling = Some(next + 1);
            }
        }
    }

    /// Whether somebody waits for a page, and whether there is an order. `busy`: does not wait for either.
    fn wait(&self, busy: bool) -> Result<(bool, bool), ServeError> {
        let left = self.record.as_ref().map(|record| record.until.saturating_duration_since(Instant::now()));
        let limit = if busy { Some(Duration::ZERO) } else { left };
        let limit = limit.map(|limit| Timespec {
            tv_sec: i64::try_from(limit.as_secs()).unwrap_or(i64::MAX),
            tv_nsec: limit.subsec_nanos().into(),
        });
        let mut fds = [
            PollFd::from_borrowed_fd(self.userfault.as_fd(), PollFlags::IN),
            PollFd::from_borrowed_fd(self.orders.as_fd(), PollFlags::IN),
        ];
        match rustix::event::poll(&mut fds, limit.as_ref()) {
            Ok(_) => Ok((!fds[0].revents().is_empty(), !fds[1].revents().is_empty())),
            Err(rustix::io::Errno::INTR) => Ok((false, false)),
            Err(error) => Err(ServeError::Wait(error.into())),
        }
    }

    /// `None`: the monitor needs it no more.
    fn order(&self) -> Result<Option<u8>, ServeError> {
        let mut order = [0];
        let got = rustix::io::read(&self.orders, &mut order);
        let got = got.map_err(|error| ServeError::Orders(error.into()))?;
        Ok((got > 0).then_some(order[0]))
    }

    fn on_fault(&mut self, address: usize, buffer: &mut [u8]) -> Result<(), ServeError> {
        let region = self.regions.iter().find(|region| region.holds(address));
        let region = region.ok_or(ServeError::Stray(address))?;
        let chunk = (region.offset + (address - region.start) as u64) / CHUNK_BYTES;
        if let Some(record) = &mut self.record
            && !self.brought.get(usize::try_from(chunk).unwrap_or(0)).is_some_and(|brought| *brought)
        {
            record.touched.push(chunk);
        }
        // It may have been brought and given back since: what is there then is the snapshot's again.
        self.bring(chunk, buffer)
    }

    fn bring_once(&mut self, chunk: u64, buffer: &mut [u8]) -> Result<(), ServeError> {
        match self.brought.get(usize::try_from(chunk).unwrap_or(usize::MAX)) {
            Some(false) => self.bring(chunk, buffer),
            _ => Ok(()),
        }
    }

    /// Puts a whole chunk where it belongs. Regions begin and end on its borders.
    fn bring(&mut self, chunk: u64, buffer: &mut [u8]) -> Result<(), ServeError> {
        let (mut at, end) = (chunk * CHUNK_BYTES, (chunk + 1) * CHUNK_BYTES);
        while at < end {
            let Some(region) = self.regions.iter().find(|region| region.has(at)) else { break };
            let end = end.min(region.offset + region.bytes);
            let (layer, until) = self.base.find(at, end);
            let to = region.start + usize::try_from(at - region.offset).unwrap_or(usize::MAX);
            let len = usize::try_from(until - at).unwrap_or(0).min(buffer.len());
            let put = match layer {
                Some(layer) => {
                    let part = &mut buffer[..len];
                    layer.file.read_exact_at(part, at).map_err(|source| {
                        let name = layer.name.to_string();
                        ServeError::Read {
                            offset: at,
                            source: LayerError::Io { doing: "read", name, source },
                        }
                    })?;
                    self.userfault.copy(to, part)
                }
                None => self.userfault.zero(to, len),
            };
            put.map_err(|source| ServeError::Put { offset: at, source })?;
            at += len as u64;
        }
        if let Some(brought) = self.brought.get_mut(usize::try_from(chunk).unwrap_or(usize::MAX)) {
            *brought = true;
        }
        Ok(())
    }

    /// Once its time is over, or at once. Best effort: the next restore is slower without it.
    fn write_record(&mut self, now: bool) {
        let over = self.record.as_ref().is_some_and(|record| now || Instant::now() >= record.until);
        let Some(record) = self.record.take_if(|_| over) else { return };
        let bytes = self.regions.iter().map(|region| region.bytes).sum();
        let pages = CHUNK_BYTES / PAGE_BYTES;
        let ranges = record.touched.iter().filter_map(|chunk| {
            Some(PageRange { first: u32::try_from(chunk * pages).ok()?, count: u32::try_from(pages).ok()? })
        });
        let set = WorkingSet::new(bytes, ranges);
        let temporary = record.dir.join("working-set.tmp");
        let written = set.encode().map_err(io::Error::other).and_then(|bytes| {
            File::create(&temporary)?.write_all(&bytes)?;
            std::fs::rename(&temporary, record.dir.join(WORKING_SET))
        });
        if let Err(error) = written {
            tracing::warn!(%error, "what the guest touched first is not kept");
        }
    }
}
