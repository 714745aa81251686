//! virtio devices (VIRTIO 1.2) behind the MMIO transport, version 2.
//!
//! ```text
//!   vCPU thread                               device thread
//!   MmioTransport (registers) ─┐          ┌─ Endpoint: queue and backend events, save, quiesce
//!                              ├─ Shared ─┤
//!   ioeventfd, irqfd ──────────┘          └─ VirtioDevice + Rings (queues, guest memory, interrupt)
//! ```
//!
//! Invariants: queues are processed on the device thread only (a disk's on a thread of its own, [`Worker`]); one call handles a bounded number of requests
//! and asks to be called again; whatever the guest got wrong ends in `DeviceError`, by which the device goes to
//! NEEDS_RESET with a named reason; after `Endpoint::save` nothing is in flight that the state does not tell.
//! A forked child and a restore make everything anew from that state.

mod balloon;
mod blk;
mod device;
mod interrupt;
mod net;
mod poller;
mod queue;
mod rng;
#[cfg(any(test, feature = "test-support"))]
pub mod testing;
mod transport;
mod vsock;
mod worker;

pub use balloon::{Balloon, Discard, discard_pages};
pub use blk::{Block, BlockBackend, BlockError, FileDisk};
pub use device::{DeviceError, Progress, Rings, VirtioDevice};
pub use interrupt::Interrupt;
pub use net::Net;
pub use queue::{Chain, QueueError, VirtQueue};
pub use rng::Rng;
pub use transport::{Endpoint, MmioTransport, QUEUE_NOTIFY_OFFSET, RestoreError};
pub use vsock::{CARRIER_PORT, GUEST_CID, HOST_CID, Vsock, VsockHost};
pub use worker::Worker;
