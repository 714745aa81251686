//! A process's output: a bounded log that subscribers read at their own pace.
//!
//! ```text
//!  pump ── append ──> [chunk][chunk][chunk] ── next ──> subscriber (a cursor)
//!                      ^ oldest kept       ^ end
//! ```
//!
//! Bytes are numbered from 0. When the log is full the oldest chunk goes, unless a subscriber has not
//! read it yet: then `append` waits, and with it the process. Without subscribers nothing ever waits.

use std::collections::{BTreeMap, VecDeque};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use bytes::Bytes;
use dormouse_wire::envd::process::EndEvent;
use tokio::sync::Notify;

/// A data event holds at most this much.
pub const CHUNK_BYTES_MAX: usize = 32 << 10;
pub const PTY_CHUNK_BYTES_MAX: usize = 16 << 10;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    Stdout,
    Stderr,
    Pty,
}

impl Kind {
    #[must_use]
    pub fn chunk_bytes_max(self) -> usize {
        match self {
            Self::Stdout | Self::Stderr => CHUNK_BYTES_MAX,
            Self::Pty => PTY_CHUNK_BYTES_MAX,
        }
    }
}

/// What comes next for a subscriber.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Item {
    Data(Kind, Bytes),
    End(EndEvent),
}

#[derive(Debug)]
struct Chunk {
    /// Number of its first byte.
    start: u64,
    kind: Kind,
    data: Vec<u8>,
}

impl Chunk {
    fn end(&self) -> u64 {
        self.start + self.data.len() as u64
    }
}

#[derive(Debug, Default)]
struct Log {
    chunks: VecDeque<Chunk>,
    bytes: usize,
    /// Number of the next byte.
    end: u64,
    cursors: BTreeMap<u64, u64>,
    next_cursor: u64,
    ended: Option<EndEvent>,
}

impl Log {
    /// False: a subscriber must read first.
    fn try_append(&mut self, kind: Kind, data: &[u8], cap: usize) -> bool {
        let slowest = self.cursors.values().min().copied().unwrap_or(u64::MAX);
        while self.bytes + data.len() > cap {
            let Some(oldest) = self.chunks.front() else { break };
            if oldest.end() > slowest {
                return false;
            }
            self.bytes -= oldest.data.len();
            self.chunks.pop_front();
        }
        self.push(kind, data);
        true
    }

    fn push(&mut self, kind: Kind, data: &[u8]) {
        self.bytes += data.len();
        let start = self.end;
        self.end += data.len() as u64;
        // Small pieces are put together, so that a log of single bytes is not mostly bookkeeping.
        match self.chunks.back_mut() {
            Some(last) if last.kind == kind && last.data.len() + data.len() <= kind.chunk_bytes_max() => {
                last.data.extend_from_slice(data);
            }
            _ => self.chunks.push_back(Chunk { start, kind, data: data.to_vec() }),
        }
    }

    fn oldest(&self) -> u64 {
        self.chunks.front().map_or(self.end, |chunk| chunk.start)
    }

    /// What follows the byte `cursor`, and the cursor after it.
    fn after(&self, cursor: u64) -> Option<(Kind, Bytes, u64)> {
        let index = self.chunks.partition_point(|chunk| chunk.end() <= cursor);
        let chunk = self.chunks.get(index)?;
        let skip = usize::try_from(cursor.saturating_sub(chunk.start)).unwrap_or(0);
        Some((chunk.kind, Bytes::copy_from_slice(chunk.data.get(skip..)?), chunk.end()))
    }
}

#[derive(Debug)]
pub struct Output {
    log: Mutex<Log>,
    /// Bytes kept at most; shared, as it shrinks when there are many processes.
    cap: Arc<AtomicUsize>,
    /// Something was appended, or the process ended.
    changed: Notify,
    /// A subscriber read or left.
    room: Notify,
}

impl Output {
    #[must_use]
    pub fn new(cap: Arc<AtomicUsize>) -> Arc<Self> {
        Arc::new(Self { log: Mutex::default(), cap, changed: Notify::new(), room: Notify::new() })
    }

    /// Appends; waits while the slowest subscriber is a whole log behind.
    pub async fn append(&self, kind: Kind, data: &[u8]) {
        loop {
            let room = self.room.notified();
            tokio::pin!(room);
            room.as_mut().enable();
            if self.lock().try_append(kind, data, self.cap.load(Ordering::Relaxed)) {
                self.changed.notify_waiters();
                return;
            }
            room.await;
        }
    }

    /// No more output will come. The first call counts.
    pub fn finish(&self, end: EndEvent) {
        self.lock().ended.get_or_insert(end);
        self.changed.notify_waiters();
    }

    #[must_use]
    pub fn subscribers(&self) -> usize {
        self.lock().cursors.len()
    }

    /// Reads from byte `from` on, or from the oldest kept; `None`: only what comes from now on.
    #[must_use]
    pub fn subscribe(self: &Arc<Self>, from: Option<u64>) -> Subscription {
        let mut log = self.lock();
        let cursor = from.map_or(log.end, |from| from.clamp(log.oldest(), log.end));
        let id = log.next_cursor;
        log.next_cursor += 1;
        log.cursors.insert(id, cursor);
        drop(log);
        Subscription { output: self.clone(), id, start: cursor }
    }

    fn lock(&self) -> MutexGuard<'_, Log> {
        self.log.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// One subscriber's place in the log; while it exists, nothing that it has not read is dropped.
#[derive(Debug)]
pub struct Subscription {
    output: Arc<Output>,
    id: u64,
    start: u64,
}

impl Subscription {
    /// Number of the first byte that it reads.
    #[must_use]
    pub fn start(&self) -> u64 {
        self.start
    }

    /// Waits for what comes next; after the end it is the end again. Cancel-safe.
    pub async fn next(&mut self) -> Item {
        loop {
            let changed = self.output.changed.notified();
            tokio::pin!(changed);
            changed.as_mut().enable();
            if let Some(item) = self.take() {
                return item;
            }
            changed.await;
        }
    }

    fn take(&self) -> Option<Item> {
        let mut log = self.output.lock();
        let cursor = log.cursors.get(&self.id).copied()?;
        if let Some((kind, bytes, next)) = log.after(cursor) {
            log.cursors.insert(self.id, next);
            drop(log);
            self.output.room.notify_waiters();
            return Some(Item::Data(kind, bytes));
        }
        log.ended.clone().map(Item::End)
    }
}

impl Drop for Subscription {
    fn drop(&mut self) {
        self.output.lock().cursors.remove(&self.id);
        self.output.room.notify_waiters();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use futures_util::FutureExt as _;
    use proptest::prelude::*;

    fn output(cap: usize) -> Arc<Output> {
        Output::new(Arc::new(AtomicUsize::new(cap)))
    }

    fn drain(subscription: &mut Subscription) -> Vec<u8> {
        let mut all = Vec::new();
        while let Some(Item::Data(_, bytes)) = subscription.next().now_or_never() {
            all.extend_from_slice(&bytes);
        }
        all
    }

    #[test]
    fn without_subscribers_the_oldest_goes() {
        let output = output(CHUNK_BYTES_MAX);
        for byte in 0..10_u8 {
            output.append(Kind::Stdout, &[byte; 10_000]).now_or_never().unwrap();
        }
        let mut late = output.subscribe(Some(0));
        assert!(late.start() >= 100_000 - CHUNK_BYTES_MAX as u64);
        let read = drain(&mut late);
        assert_eq!(read.len() as u64, 100_000 - late.start());
        assert_eq!(read.last(), Some(&9));
    }

    #[test]
    fn a_slow_subscriber_makes_the_process_wait() {
        let output = output(20_000);
        let mut slow = output.subscribe(None);
        output.append(Kind::Stdout, &[1; 15_000]).now_or_never().unwrap();
        let mut waiting = Box::pin(output.append(Kind::Stdout, &[2; 15_000]));
        assert!(waiting.as_mut().now_or_never().is_none());
        assert_eq!(drain(&mut slow), vec![1; 15_000]);
        waiting.now_or_never().unwrap();
        let mut waiting = Box::pin(output.append(Kind::Stdout, &[3; 15_000]));
        assert!(waiting.as_mut().now_or_never().is_none());
        drop(slow);
        waiting.now_or_never().unwrap();
    }

    #[test]
    fn the_end_comes_after_all_output() {
        let output = output(1000);
        let mut reader = output.subscribe(None);
        output.append(Kind::Stderr, b"last").now_or_never().unwrap();
        output.finish(EndEvent { exit_code: 3, ..EndEvent::default() });
        assert_eq!(reader.next().now_or_never(), Some(Item::Data(Kind::Stderr, Bytes::from_static(b"last"))));
        for _ in 0..2 {
            assert!(matches!(reader.next().now_or_never(), Some(Item::End(EndEvent { exit_code: 3, .. }))));
        }
    }

    proptest! {
        /// A reader that breaks off anywhere and comes back with its count of bytes reads everything
        /// once, as long as it is not a whole log behind.
        #[test]
        fn a_reader_that_comes_back_misses_nothing(
            pieces in prop::collection::vec((0..3_usize, 1..200_usize), 1..60),
            breaks in prop::collection::vec(any::<bool>(), 60),
        ) {
            let output = output(1 << 20);
            let (mut written, mut read) = (Vec::new(), Vec::new());
            let mut reader = output.subscribe(Some(0));
            for (index, (kind, size)) in pieces.into_iter().enumerate() {
                let kind = [Kind::Stdout, Kind::Stderr, Kind::Pty][kind];
                let data = vec![u8::try_from(index).unwrap(); size];
                output.append(kind, &data).now_or_never().unwrap();
                written.extend_from_slice(&data);
                if breaks[index] {
                    read.extend(drain(&mut reader));
                    reader = output.subscribe(Some(read.len() as u64));
                    prop_assert_eq!(reader.start(), read.len() as u64);
                }
            }
            read.extend(drain(&mut reader));
            prop_assert_eq!(read, written);
        }
    }
}
