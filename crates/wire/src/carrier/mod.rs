//! The carrier: many byte streams between keeper and agent over two pipes that may be cut anywhere.
//!
//! ```text
//! Stream ─┐                                                     ┌─ Stream
//! Stream ─┤ mux ── packets ── link ══ pipe ══> link ── packets ── mux ├─ Stream
//! Stream ─┘ (credit)          <══════ pipe ═══                  └─ Stream
//! ```
//!
//! * [`packet`]: the framing, pure. A packet names its session and carries a CRC; zero bytes between
//!   packets mean nothing.
//! * [`mux`]: streams, credit and limits of one session, pure.
//! * [`host`]: the keeper's end: pipes come and go, the session goes on or is replaced.
//! * [`guest`]: the agent's end: its pipes never change, what is behind them does.
//!
//! **Sessions.** A new one (boot, fork, rollback, replaced keeper) starts with filler of one maximum
//! packet and `HELLO{session}`. A guest that holds the first part of a stale packet completes it with
//! filler, finds the CRC wrong and skips exactly that packet, so no byte of a stale payload is ever
//! read as framing. `HELLO` ends the streams of the former session with an error; the guest answers
//! `WELCOME{session}`, and until that arrives the keeper drops all that it reads: the tail of a stale
//! packet cannot contain the random session number. After a pause the bytes simply go on.
//!
//! **Why not yamux:** its crate reports a reset stream to the reader as a clean end (`Ok(0)`), so a
//! transfer that was cut, by an abort or by a rollback, could not be told from a complete one; and its
//! frames would need this session layer below them anyway. Here a packet is both.
//!
//! Invariants: what the other side sends is bounded before it is believed and never panics; a reader
//! that stalls holds back only its own stream; nothing is sent while nothing happens.

pub mod fd;
pub mod guest;
pub mod host;
mod link;
pub mod mux;
pub mod packet;
mod relay;
mod stream;

pub use guest::Guest;
pub use host::{AttachError, Host, HostPipes};
pub use mux::OpenError;
pub use relay::{Direction, relay};
pub use stream::{Stream, read_line, write_line};
