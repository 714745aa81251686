//! What is counted, for `Status`.

use std::sync::atomic::{AtomicI64, AtomicU32, AtomicU64, Ordering};
use std::time::{SystemTime, UNIX_EPOCH};

use dormouse_wire::carrier::Direction;

#[derive(Debug, Default)]
pub(crate) struct Meter {
    pub ingress_open: AtomicU32,
    pub egress_open: AtomicU32,
    pub last_activity_ms: AtomicI64,
    /// Bytes into the sandbox, of clients and of the outside alike.
    pub bytes_in: AtomicU64,
    pub bytes_out: AtomicU64,
    pub egress_denied: AtomicU64,
}

/// Counts as one while it exists.
pub(crate) struct Counted<'a>(&'a AtomicU32);

impl<'a> Counted<'a> {
    pub fn new(counter: &'a AtomicU32) -> Self {
        counter.fetch_add(1, Ordering::Relaxed);
        Self(counter)
    }
}

impl Drop for Counted<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

impl Meter {
    pub fn moved(&self, direction: Direction, bytes: usize) {
        let counter = match direction {
            Direction::ToCarrier => &self.bytes_in,
            Direction::FromCarrier => &self.bytes_out,
        };
        counter.fetch_add(u64::try_from(bytes).unwrap_or(u64::MAX), Ordering::Relaxed);
    }

    /// A client's byte moved.
    pub fn touch(&self) {
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        self.last_activity_ms.store(i64::try_from(now.as_millis()).unwrap_or(i64::MAX), Ordering::Relaxed);
    }
}
