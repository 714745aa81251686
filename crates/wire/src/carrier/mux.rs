//! The streams of one session: credit, limits, fairness. No I/O; packets in, packets out.
//!
//! ```text
//!            OPEN            DATA* under credit       FIN          FIN or RESET
//! (nothing) ─────> open ═══════════════════════> half closed ──────────────────> (nothing)
//! ```
//!
//! * Each side may have at most [`STREAM_WINDOW_BYTES_MAX`] bytes unread per stream, starting with
//!   [`STREAM_WINDOW_BYTES`]; windows grow only while the reader keeps up and only within
//!   [`GROWTH_BYTES_MAX`] for all streams together.
//! * A handle dropped before `shutdown` resets its stream; after `shutdown` what was written is still
//!   delivered, then the stream ends.
//! * Data for a stream that is no longer known is ignored: its reset is under way.

use std::collections::{HashMap, VecDeque};
use std::task::Waker;

use bytes::{Buf, BytesMut};

use super::packet::{Kind, PAYLOAD_BYTES_MAX, Packet, encode_packet, encode_with};

/// Streams that the keeper may have open towards the agent.
pub const HOST_STREAMS_MAX: usize = 1024;
/// Streams that the agent may have open towards the keeper (egress).
pub const GUEST_STREAMS_MAX: usize = 512;
pub const STREAM_WINDOW_BYTES: u32 = 64 << 10;
pub const STREAM_WINDOW_BYTES_MAX: u32 = 2 << 20;
/// All windows together may grow by this.
pub const GROWTH_BYTES_MAX: u32 = 32 << 20;
/// What a stream holds of written but unsent bytes.
pub const SEND_BYTES_MAX: usize = 256 << 10;
/// Streams that were opened by the other side and not yet accepted.
const BACKLOG_MAX: usize = 128;
/// Refusals that were not sent yet; beyond this the other side floods.
const REFUSALS_MAX: usize = 1024;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Role {
    Host,
    Guest,
}

/// Why no stream could be opened.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum OpenError {
    #[error("no stream can be opened: {max} are open already; close some")]
    TooMany { max: usize },
    #[error("no stream can be opened: the session with the sandbox has ended")]
    Ended,
}

/// The other side broke the rules of the session.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("packet {kind:?} for stream {stream} breaks the carrier's rules: {why}")]
pub struct Violation {
    pub kind: Kind,
    pub stream: u32,
    pub why: &'static str,
}

/// How reading goes on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Read {
    Bytes(usize),
    End,
    Reset,
    Wait,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Write {
    Bytes(usize),
    /// Nobody will read it.
    Void,
    Wait,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Sending {
    Open,
    /// `shutdown` was called; FIN follows the last byte.
    Closing,
    Closed,
}

#[derive(Debug)]
struct Entry {
    unread: BytesMut,
    /// What the other side may still send.
    granted: u32,
    window: u32,
    /// Read by the application, not yet granted again.
    owed: u32,
    received_fin: bool,
    unsent: BytesMut,
    credit: u32,
    sending: Sending,
    open_due: bool,
    credit_due: u32,
    reset_due: bool,
    /// Void: reset by either side, or the session is over.
    void: bool,
    has_handle: bool,
    queued: bool,
    reader: Option<Waker>,
    writer: Option<Waker>,
    watcher: Option<Waker>,
}

impl Entry {
    fn new(open_due: bool) -> Self {
        Self {
            unread: BytesMut::new(),
            granted: STREAM_WINDOW_BYTES,
            window: STREAM_WINDOW_BYTES,
            owed: 0,
            received_fin: false,
            unsent: BytesMut::new(),
            credit: STREAM_WINDOW_BYTES,
            sending: Sending::Open,
            open_due,
            credit_due: 0,
            reset_due: false,
            void: false,
            has_handle: true,
            queued: false,
            reader: None,
            writer: None,
            watcher: None,
        }
    }

    fn wake(&mut self) {
        for waker in [self.reader.take(), self.writer.take(), self.watcher.take()].into_iter().flatten() {
            waker.wake();
        }
    }

    fn data_due(&self) -> bool {
        !self.unsent.is_empty() && self.credit > 0
    }

    fn fin_due(&self) -> bool {
        self.sending == Sending::Closing && self.unsent.is_empty()
    }

    fn has_work(&self) -> bool {
        if self.void {
            return self.reset_due;
        }
        self.open_due || self.credit_due > 0 || self.data_due() || self.fin_due()
    }

    fn void(&mut self, reset_due: bool) {
        self.void = true;
        self.reset_due = reset_due;
        self.unsent = BytesMut::new();
        self.wake();
    }

    fn is_over(&self) -> bool {
        let closed = self.received_fin && self.sending == Sending::Closed;
        !self.has_handle && ((self.void && !self.reset_due) || closed)
    }
}

/// All streams of one session.
#[derive(Debug)]
pub struct Mux {
    role: Role,
    session: u64,
    entries: HashMap<u32, Entry>,
    ready: VecDeque<u32>,
    incoming: VecDeque<u32>,
    refusals: VecDeque<u32>,
    next_id: u32,
    grown: u32,
    ended: bool,
    driver: Option<Waker>,
    acceptors: Vec<Waker>,
}

impl Mux {
    #[must_use]
    pub fn new(role: Role, session: u64) -> Self {
        Self {
            role,
            session,
            entries: HashMap::new(),
            ready: VecDeque::new(),
            incoming: VecDeque::new(),
            refusals: VecDeque::new(),
            next_id: if role == Role::Host { 1 } else { 2 },
            grown: 0,
            ended: false,
            driver: None,
            acceptors: Vec::new(),
        }
    }

    #[must_use]
    pub fn session(&self) -> u64 {
        self.session
    }

    #[must_use]
    pub fn has_ended(&self) -> bool {
        self.ended
    }

    /// Streams that this side opened, and that the other side opened.
    #[must_use]
    pub fn counts(&self) -> (usize, usize) {
        let own = self.entries.keys().filter(|id| self.is_own(**id)).count();
        (own, self.entries.len() - own)
    }

    /// No stream is open.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    fn is_own(&self, id: u32) -> bool {
        (id % 2 == 1) == (self.role == Role::Host)
    }

    /// Opens a stream; its first bytes follow in the same breath.
    pub fn open(&mut self) -> Result<u32, OpenError> {
        if self.ended {
            return Err(OpenError::Ended);
        }
        let max = if self.role == Role::Host { HOST_STREAMS_MAX } else { GUEST_STREAMS_MAX };
        if self.counts().0 >= max {
            return Err(OpenError::TooMany { max });
        }
        while self.entries.contains_key(&self.next_id) || self.next_id == 0 {
            self.next_id = self.next_id.wrapping_add(2);
        }
        let id = self.next_id;
        self.next_id = self.next_id.wrapping_add(2);
        self.entries.insert(id, Entry::new(true));
        self.schedule(id);
        Ok(id)
    }

    /// The next stream that the other side opened.
    pub fn accept(&mut self) -> Option<u32> {
        self.incoming.pop_front()
    }

    pub fn on_accept(&mut self, waker: &Waker) {
        if !self.acceptors.iter().any(|known| known.will_wake(waker)) {
            self.acceptors.push(waker.clone());
        }
    }

    pub fn on_work(&mut self, waker: &Waker) {
        self.driver = Some(waker.clone());
    }

    /// Takes the number of bytes that are there, up to `max`, through `take`.
    pub fn read(&mut self, id: u32, max: usize, waker: &Waker, take: impl FnOnce(&[u8])) -> Read {
        let ended = self.ended;
        let Some(entry) = self.entries.get_mut(&id) else { return Read::Reset };
        if entry.unread.is_empty() {
            if entry.received_fin {
                return Read::End;
            }
            if entry.void {
                return Read::Reset;
            }
            entry.unread = BytesMut::new();
            entry.reader = Some(waker.clone());
            return Read::Wait;
        }
        let n = max.min(entry.unread.len());
        take(&entry.unread[..n]);
        entry.unread.advance(n);
        if entry.received_fin || entry.void || ended {
            return Read::Bytes(n);
        }
        entry.owed = entry.owed.saturating_add(u32::try_from(n).unwrap_or(u32::MAX));
        if entry.owed >= entry.window / 2 {
            let room = GROWTH_BYTES_MAX.saturating_sub(self.grown);
            let growth = (STREAM_WINDOW_BYTES_MAX - entry.window).min(entry.window).min(room);
            entry.window += growth;
            self.grown += growth;
            let grant = entry.owed.saturating_add(growth);
            entry.owed = 0;
            entry.granted = entry.granted.saturating_add(grant);
            entry.credit_due = entry.credit_due.saturating_add(grant);
            self.schedule(id);
        }
        Read::Bytes(n)
    }

    /// Takes bytes to send, as many as fit.
    pub fn write(&mut self, id: u32, bytes: &[u8], waker: &Waker) -> Write {
        let Some(entry) = self.entries.get_mut(&id) else { return Write::Void };
        if entry.void || entry.sending != Sending::Open {
            return Write::Void;
        }
        let n = bytes.len().min(SEND_BYTES_MAX.saturating_sub(entry.unsent.len()));
        if n == 0 && !bytes.is_empty() {
            entry.writer = Some(waker.clone());
            return Write::Wait;
        }
        entry.unsent.extend_from_slice(&bytes[..n]);
        self.schedule(id);
        Write::Bytes(n)
    }

    /// No more bytes from this side; what was written still goes.
    pub fn shutdown(&mut self, id: u32) {
        if let Some(entry) = self.entries.get_mut(&id)
            && !entry.void
            && entry.sending == Sending::Open
        {
            entry.sending = Sending::Closing;
            self.schedule(id);
        }
    }

    /// Whether the stream is void in both directions; registers `waker` when it is not.
    pub fn is_void(&mut self, id: u32, waker: &Waker) -> bool {
        match self.entries.get_mut(&id) {
            Some(entry) if !entry.void => {
                entry.watcher = Some(waker.clone());
                false
            }
            _ => true,
        }
    }

    /// The application let go of the stream.
    pub fn release(&mut self, id: u32) {
        let ended = self.ended;
        let Some(entry) = self.entries.get_mut(&id) else { return };
        entry.has_handle = false;
        entry.unread = BytesMut::new();
        let unfinished =
            entry.sending == Sending::Open || (entry.sending == Sending::Closed && !entry.received_fin);
        if !entry.void && unfinished {
            entry.void(!ended);
        }
        self.schedule(id);
        self.settle(id);
    }

    /// The session is over: every stream ends with an error, except what was received whole.
    pub fn end(&mut self) {
        self.ended = true;
        self.ready.clear();
        self.refusals.clear();
        for entry in self.entries.values_mut() {
            entry.void(false);
        }
        self.entries.retain(|_, entry| entry.has_handle);
        for waker in self.acceptors.drain(..).chain(self.driver.take()) {
            waker.wake();
        }
    }

    fn schedule(&mut self, id: u32) {
        let Some(entry) = self.entries.get_mut(&id) else { return };
        if self.ended || entry.queued || !entry.has_work() {
            return;
        }
        entry.queued = true;
        self.ready.push_back(id);
        if let Some(waker) = self.driver.take() {
            waker.wake();
        }
    }

    fn settle(&mut self, id: u32) {
        if self.entries.get(&id).is_some_and(Entry::is_over)
            && let Some(entry) = self.entries.remove(&id)
        {
            self.grown -= entry.window - STREAM_WINDOW_BYTES;
        }
    }

    /// Takes one packet of this session. An error means that the other side is not to be believed
    /// any more.
    pub fn receive(&mut self, packet: Packet, payload: &[u8]) -> Result<(), Violation> {
        let id = packet.stream;
        let violation = |why| Violation { kind: packet.kind, stream: id, why };
        if packet.kind == Kind::Open {
            return self.receive_open(id).map_err(violation);
        }
        let Some(entry) = self.entries.get_mut(&id) else { return Ok(()) };
        match packet.kind {
            Kind::Data => {
                let len = u32::try_from(payload.len()).unwrap_or(u32::MAX);
                if entry.received_fin {
                    return Err(violation("data after the end"));
                }
                entry.granted =
                    entry.granted.checked_sub(len).ok_or_else(|| violation("more than was granted"))?;
                if entry.has_handle && !entry.void {
                    entry.unread.extend_from_slice(payload);
                    if let Some(waker) = entry.reader.take() {
                        waker.wake();
                    }
                }
            }
            Kind::Credit => {
                let more = payload.try_into().map(u32::from_le_bytes).unwrap_or(0);
                let credit = entry.credit.checked_add(more);
                entry.credit = credit
                    .filter(|credit| *credit <= STREAM_WINDOW_BYTES_MAX)
                    .ok_or_else(|| violation("more credit than a window holds"))?;
                self.schedule(id);
            }
            Kind::Fin => {
                entry.received_fin = true;
                if let Some(waker) = entry.reader.take() {
                    waker.wake();
                }
            }
            Kind::Reset => entry.void(false),
            Kind::Hello | Kind::Welcome | Kind::Lost | Kind::Open => {
                return Err(violation("not a packet of a stream"));
            }
        }
        self.settle(id);
        Ok(())
    }

    fn receive_open(&mut self, id: u32) -> Result<(), &'static str> {
        if id == 0 || self.is_own(id) {
            return Err("the number belongs to the other side");
        }
        if self.entries.contains_key(&id) {
            return Err("the stream is open already");
        }
        let max = if self.role == Role::Host { GUEST_STREAMS_MAX } else { HOST_STREAMS_MAX };
        if self.counts().1 >= max || self.incoming.len() >= BACKLOG_MAX {
            if self.refusals.len() >= REFUSALS_MAX {
                return Err("a flood of streams");
            }
            self.refusals.push_back(id);
            if let Some(waker) = self.driver.take() {
                waker.wake();
            }
            return Ok(());
        }
        self.entries.insert(id, Entry::new(false));
        self.incoming.push_back(id);
        for waker in self.acceptors.drain(..) {
            waker.wake();
        }
        Ok(())
    }

    /// Appends packets to `out` until it holds `len_max` bytes (exceeded by at most one packet) or
    /// nothing is due. Streams take turns, one packet each.
    pub fn produce(&mut self, out: &mut Vec<u8>, len_max: usize) {
        while out.len() < len_max {
            if let Some(id) = self.refusals.pop_front() {
                encode_packet(out, Kind::Reset, self.session, id, &[]);
                continue;
            }
            let Some(id) = self.ready.pop_front() else { return };
            if let Some(entry) = self.entries.get_mut(&id) {
                entry.queued = false;
                produce_entry(entry, self.session, id, out);
                // Shutdown, then dropped: nobody will read what may still come.
                if !entry.has_handle && !entry.void && entry.sending == Sending::Closed && !entry.received_fin
                {
                    entry.void(true);
                }
            }
            self.schedule(id);
            self.settle(id);
        }
    }
}

fn produce_entry(entry: &mut Entry, session: u64, id: u32, out: &mut Vec<u8>) {
    let is_news = std::mem::take(&mut entry.open_due);
    if entry.void {
        // What the other side never heard of needs no reset.
        if std::mem::take(&mut entry.reset_due) && !is_news {
            encode_packet(out, Kind::Reset, session, id, &[]);
        }
        return;
    }
    if is_news {
        encode_packet(out, Kind::Open, session, id, &[]);
    }
    if entry.credit_due > 0 {
        let grant = std::mem::take(&mut entry.credit_due);
        encode_packet(out, Kind::Credit, session, id, &grant.to_le_bytes());
    }
    if entry.data_due() {
        let credit = usize::try_from(entry.credit).unwrap_or(usize::MAX);
        let n = entry.unsent.len().min(credit).min(PAYLOAD_BYTES_MAX);
        encode_with(out, Kind::Data, session, id, |out| out.extend_from_slice(&entry.unsent[..n]));
        entry.unsent.advance(n);
        entry.credit -= u32::try_from(n).unwrap_or(entry.credit);
        if entry.unsent.is_empty() {
            entry.unsent = BytesMut::new();
        }
        if let Some(waker) = entry.writer.take() {
            waker.wake();
        }
    }
    if entry.fin_due() {
        entry.sending = Sending::Closed;
        encode_packet(out, Kind::Fin, session, id, &[]);
    }
}
