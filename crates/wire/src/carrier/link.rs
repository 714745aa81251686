//! Bytes between one pair of pipes and one session: buffers that outlive the pipes.
//!
//! Invariant: `out` holds whole packets from its start except for what is already in the pipe, so when
//! it is empty the pipe is at a packet's boundary.

use super::packet::{Decoded, FILLER, HEADER_BYTES, PACKET_BYTES_MAX, Packet, decode_packet};

/// One read call's worth; holds at least one whole packet.
const READ_BYTES: usize = 256 << 10;
/// Packets are produced until this much waits for one write call.
pub(super) const WRITE_BYTES: usize = 256 << 10;

/// What an idle end keeps.
const KEPT_BYTES: usize = 32 << 10;

const _: () = assert!(READ_BYTES >= 2 * PACKET_BYTES_MAX);

#[derive(Debug, Default)]
pub(super) struct Inbound {
    bytes: Vec<u8>,
    start: usize,
    end: usize,
    /// How much of `bytes` was ever written.
    used: usize,
}

impl Inbound {
    /// Room for the next read, never empty.
    pub(super) fn room(&mut self) -> &mut [u8] {
        if self.bytes.is_empty() {
            // Fresh zero pages: only what is read into them costs memory.
            self.bytes = vec![0; READ_BYTES];
        }
        if self.start > 0 {
            self.bytes.copy_within(self.start..self.end, 0);
            (self.start, self.end) = (0, self.end - self.start);
        }
        &mut self.bytes[self.end..]
    }

    pub(super) fn filled(&mut self, n: usize) {
        self.end += n;
        self.used = self.used.max(self.end);
    }

    /// Gives memory back after a large transfer.
    pub(super) fn trim(&mut self) {
        if self.start == self.end && self.used > KEPT_BYTES {
            *self = Self::default();
        }
    }

    pub(super) fn unread(&self) -> &[u8] {
        &self.bytes[self.start..self.end]
    }

    pub(super) fn skip(&mut self, n: usize) {
        self.start = (self.start + n).min(self.end);
        if self.start == self.end {
            (self.start, self.end) = (0, 0);
        }
    }

    /// The next packet in sync; `damaged` is set when bytes had to be skipped that were not filler.
    pub(super) fn next_packet(&mut self, damaged: &mut bool) -> Option<(Packet, &[u8])> {
        loop {
            match decode_packet(self.unread()) {
                Decoded::Filler(n) => self.skip(n),
                Decoded::Cut(n) | Decoded::Garbage(n) => {
                    *damaged = true;
                    self.skip(n);
                    return None;
                }
                Decoded::Incomplete => return None,
                Decoded::Packet(packet) => {
                    let at = self.start;
                    self.start += packet.total();
                    return Some((packet, &self.bytes[at + HEADER_BYTES..at + packet.total()]));
                }
            }
        }
    }
}

#[derive(Debug, Default)]
pub(super) struct Outbound {
    pub(super) bytes: Vec<u8>,
    start: usize,
}

impl Outbound {
    pub(super) fn unsent(&self) -> &[u8] {
        &self.bytes[self.start..]
    }

    pub(super) fn is_empty(&self) -> bool {
        self.start == self.bytes.len()
    }

    pub(super) fn sent(&mut self, n: usize) {
        self.start += n;
        if self.is_empty() {
            self.clear();
        }
    }

    /// Gives memory back after a large transfer.
    pub(super) fn trim(&mut self) {
        if self.is_empty() && self.bytes.capacity() > KEPT_BYTES {
            *self = Self::default();
        }
    }

    pub(super) fn clear(&mut self) {
        self.start = 0;
        if self.bytes.capacity() > 2 * (WRITE_BYTES + PACKET_BYTES_MAX) {
            self.bytes = Vec::new();
        } else {
            self.bytes.clear();
        }
    }

    /// Puts bytes that were in a former pipe in front of what is still to be written.
    pub(super) fn put_in_front(&mut self, mut former: Vec<u8>) {
        former.extend_from_slice(self.unsent());
        (self.bytes, self.start) = (former, 0);
    }

    pub(super) fn push_filler(&mut self, n: usize) {
        self.bytes.resize(self.bytes.len() + n, FILLER);
    }
}
