//! Buffers that come back: a transfer uses the same few again and again instead of having the kernel
//! map and clear new memory for each piece.

use std::sync::{Arc, Mutex, PoisonError};

use bytes::Bytes;

/// Bytes of one piece of a transfer.
pub const PIECE_BYTES: usize = 512 << 10;
/// Buffers kept while none is in use.
const KEPT_MAX: usize = 6;

#[derive(Clone, Default)]
pub struct Pool(Arc<Mutex<Vec<Vec<u8>>>>);

struct Lent {
    buffer: Vec<u8>,
    pool: Pool,
}

impl AsRef<[u8]> for Lent {
    fn as_ref(&self) -> &[u8] {
        &self.buffer
    }
}

impl Drop for Lent {
    fn drop(&mut self) {
        let mut kept = self.pool.0.lock().unwrap_or_else(PoisonError::into_inner);
        if kept.len() < KEPT_MAX {
            kept.push(std::mem::take(&mut self.buffer));
        }
    }
}

impl Pool {
    /// An empty buffer with room for a piece.
    #[must_use]
    pub fn take(&self) -> Vec<u8> {
        let kept = self.0.lock().unwrap_or_else(PoisonError::into_inner).pop();
        let mut buffer = kept.unwrap_or_else(|| Vec::with_capacity(PIECE_BYTES));
        buffer.clear();
        buffer
    }

    /// The buffer as bytes; it returns to the pool when nobody needs them any more.
    #[must_use]
    pub fn lend(&self, buffer: Vec<u8>) -> Bytes {
        Bytes::from_owner(Lent { buffer, pool: self.clone() })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buffers_come_back() {
        let pool = Pool::default();
        let mut buffer = pool.take();
        buffer.extend_from_slice(b"abc");
        let bytes = pool.lend(buffer);
        let part = bytes.slice(1..);
        drop(bytes);
        assert_eq!(part, "bc");
        let kept = || pool.0.lock().unwrap().len();
        assert_eq!(kept(), 0, "it is still in use");
        drop(part);
        assert_eq!(kept(), 1);
        assert!(pool.take().is_empty());
        assert_eq!(kept(), 0);
    }
}
