//! One stream between a port of the guest and one of the host.
//!
//! ```text
//!   Requested ── RESPONSE ──> Established ── SHUTDOWN both, host gone, RST, broken credit ──> over
//!   (by a client of the host)    ^
//!                                └── REQUEST of the guest to the carrier's port
//! ```

use std::collections::VecDeque;

use dormouse_snapshot::devices::virtio::{PortPair, StreamState};
use rustix::net::Shutdown;

use super::credit::Credit;
use super::host::{Host, Moved};
use super::packet::{Op, SHUTDOWN_RECEIVE, SHUTDOWN_SEND};

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Phase {
    /// The guest is, or will be, asked to accept.
    Requested,
    Established,
}

/// Packets that the guest is still to get, in this order.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Owed {
    pub request: bool,
    pub response: bool,
    pub credit_update: bool,
}

pub struct Stream {
    pub host: Host,
    pub phase: Phase,
    pub credit: Credit,
    pub owed: Owed,
    /// What the guest sent and the host has not taken: at most `credit.buf_alloc` bytes.
    pub unsent: VecDeque<u8>,
    guest_sent_all: bool,
    guest_reads_no_more: bool,
    /// The host's end will send no more, and the guest was told.
    host_sent_all: bool,
    /// The host's end knows that the guest has sent all.
    host_knows_end: bool,
    credit_asked: bool,
    /// One side broke the rules or its end: the guest gets a reset.
    broken: bool,
}

impl Stream {
    /// A client of the host wants to reach the guest.
    pub fn requested(host: Host, buf_alloc: u32) -> Self {
        let owed = Owed { request: true, ..Owed::default() };
        Self::with(host, Phase::Requested, Credit { buf_alloc, ..Credit::default() }, owed)
    }

    /// The guest wants to reach the host, and may.
    pub fn accepted(host: Host, buf_alloc: u32) -> Self {
        let owed = Owed { response: true, ..Owed::default() };
        Self::with(host, Phase::Established, Credit { buf_alloc, ..Credit::default() }, owed)
    }

    fn with(host: Host, phase: Phase, credit: Credit, owed: Owed) -> Self {
        Self {
            host,
            phase,
            credit,
            owed,
            unsent: VecDeque::new(),
            guest_sent_all: false,
            guest_reads_no_more: false,
            host_sent_all: false,
            host_knows_end: false,
            credit_asked: false,
            broken: false,
        }
    }

    pub fn restored(state: &StreamState, host: Host, buf_alloc: u32) -> Self {
        let credit = Credit {
            buf_alloc,
            fwd_cnt: state.fwd_cnt,
            told_fwd_cnt: state.told_fwd_cnt,
            tx_cnt: state.tx_cnt,
            peer_buf_alloc: state.peer_buf_alloc,
            peer_fwd_cnt: state.peer_fwd_cnt,
        };
        let owed = Owed {
            response: state.response_owed,
            credit_update: state.credit_update_owed,
            ..Owed::default()
        };
        Self {
            unsent: state.unsent.iter().copied().collect(),
            guest_sent_all: state.guest_sent_all,
            guest_reads_no_more: state.guest_reads_no_more,
            ..Self::with(host, Phase::Established, credit, owed)
        }
    }

    pub fn save(&self, ports: PortPair) -> StreamState {
        StreamState {
            ports,
            fwd_cnt: self.credit.fwd_cnt,
            told_fwd_cnt: self.credit.told_fwd_cnt,
            tx_cnt: self.credit.tx_cnt,
            peer_buf_alloc: self.credit.peer_buf_alloc,
            peer_fwd_cnt: self.credit.peer_fwd_cnt,
            response_owed: self.owed.response,
            credit_update_owed: self.owed.credit_update,
            guest_sent_all: self.guest_sent_all,
            guest_reads_no_more: self.guest_reads_no_more,
            unsent: self.unsent.iter().copied().collect(),
        }
    }

    /// Every packet of the guest tells its counters.
    pub fn guest_counters(&mut self, buf_alloc: u32, fwd_cnt: u32) {
        self.credit.update(buf_alloc, fwd_cnt);
        self.credit_asked &= self.credit.for_guest() == 0;
    }

    /// The guest accepted: the client is told, in the way it knows.
    pub fn established(&mut self, host_port: u32) {
        self.phase = Phase::Established;
        let line = format!("OK {host_port}\n");
        // A fresh socket takes that little at once.
        self.broken |= self.host.write(line.as_bytes()) != Moved::Bytes(line.len());
    }

    pub fn break_off(&mut self) {
        self.broken = true;
    }

    /// Whether the guest may send `bytes` now: it was given credit and has not ended its direction.
    pub fn admits(&self, bytes: u32) -> bool {
        let held = u32::try_from(self.unsent.len()).unwrap_or(u32::MAX);
        self.phase == Phase::Established
            && !self.guest_sent_all
            && bytes <= self.credit.buf_alloc.saturating_sub(held)
    }

    /// Bytes of the guest, admitted before.
    pub fn take(&mut self, data: &[u8]) {
        let mut rest = data;
        while self.unsent.is_empty() && !rest.is_empty() {
            match self.host.write(rest) {
                Moved::Bytes(bytes) => {
                    self.forwarded(bytes);
                    rest = &rest[bytes..];
                }
                Moved::Blocked => break,
                Moved::End => {
                    self.broken = true;
                    return;
                }
            }
        }
        self.unsent.extend(rest);
    }

    /// Brings to the host what it had not taken.
    pub fn flush(&mut self) {
        while !self.unsent.is_empty() && !self.broken {
            match self.host.write(self.unsent.as_slices().0) {
                Moved::Bytes(bytes) => {
                    self.unsent.drain(..bytes);
                    self.forwarded(bytes);
                }
                Moved::Blocked => return,
                Moved::End => self.broken = true,
            }
        }
        // What one burst needed is not kept for good.
        self.unsent.shrink_to(0);
        if self.guest_sent_all && !self.host_knows_end && !self.broken {
            self.host_knows_end = true;
            self.host.shutdown(Shutdown::Write);
        }
    }

    fn forwarded(&mut self, bytes: usize) {
        let bytes = u32::try_from(bytes).unwrap_or(u32::MAX);
        self.owed.credit_update |= self.credit.forwarded(bytes);
    }

    /// The guest ends one direction or both.
    pub fn guest_shutdown(&mut self, flags: u32) {
        self.guest_sent_all |= flags & SHUTDOWN_SEND != 0;
        if flags & SHUTDOWN_RECEIVE != 0 && !self.guest_reads_no_more {
            self.guest_reads_no_more = true;
            self.host.shutdown(Shutdown::Read);
        }
    }

    /// Nothing more can come of it.
    pub fn is_over(&self) -> bool {
        let guest_done = self.guest_sent_all && self.guest_reads_no_more && self.unsent.is_empty();
        let host_read = self.host_sent_all || self.guest_reads_no_more || self.phase == Phase::Requested;
        self.broken || guest_done || (self.host.gone && !self.host.is_carrier() && host_read)
    }

    /// Whether it can have anything for the guest.
    pub fn has_outgoing(&self) -> bool {
        self.owed != Owed::default()
            || (self.wants_data() && (self.credit.for_guest() > 0 || !self.credit_asked))
    }

    fn wants_data(&self) -> bool {
        self.phase == Phase::Established
            && self.host.readable
            && self.host.input().is_some()
            && !self.host_sent_all
            && !self.guest_reads_no_more
    }

    /// The next packet for the guest, with its data at the beginning of `buffer`.
    pub fn next_packet(&mut self, buffer: &mut [u8]) -> Option<(Op, u32, usize)> {
        if let Some((op, flags)) = self.next_control() {
            return Some((op, flags, 0));
        }
        if !self.wants_data() {
            return None;
        }
        let credit = self.credit.for_guest() as usize;
        if credit == 0 {
            let ask = !self.credit_asked;
            self.credit_asked = true;
            return ask.then_some((Op::CreditRequest, 0, 0));
        }
        let room = credit.min(buffer.len());
        if room == 0 {
            return None;
        }
        match self.host.read(&mut buffer[..room]) {
            Moved::Bytes(bytes) => {
                self.credit.sent(u32::try_from(bytes).unwrap_or(u32::MAX));
                Some((Op::Data, 0, bytes))
            }
            Moved::Blocked => None,
            Moved::End => {
                self.host_sent_all = true;
                // One that is gone altogether is over: it gets a reset instead.
                (!self.host.gone).then_some((Op::Shutdown, SHUTDOWN_SEND, 0))
            }
        }
    }

    fn next_control(&mut self) -> Option<(Op, u32)> {
        let owed = &mut self.owed;
        if std::mem::take(&mut owed.request) {
            return Some((Op::Request, 0));
        }
        if std::mem::take(&mut owed.response) {
            return Some((Op::Response, 0));
        }
        if std::mem::take(&mut owed.credit_update) {
            return Some((Op::CreditUpdate, 0));
        }
        None
    }
}
