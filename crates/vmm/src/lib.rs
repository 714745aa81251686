//! One microVM: KVM, guest memory, vCPU threads, virtio devices, and the monitor process around them.
//!
//! ```text
//!   monitor (device thread: control socket, epoll)          vcpu (one thread each: KVM_RUN)
//!      │  owns                                                 │  exits
//!      ▼                                                       ▼
//!   virtio devices ── queues ── memory (vm-memory)   bus: port I/O and MMIO → devices' registers
//!      │ irqfd, ioeventfd                                      │
//!      └───────────────────────────  vm (KVM)  ────────────────┘
//! ```
//!
//! Invariants: knows no tokio, no sandbox and no API; guest memory is touched only through `vm-memory`;
//! everything that the guest writes is hostile: lengths and indices are checked, loops are bounded, nothing
//! panics. `fork(2)` is the snapshot: everything here can be made anew over the same memory in a forked child.

pub mod arch;
pub mod bus;
pub mod control;
pub mod ending;
pub mod error;
pub mod jail;
pub mod layers;
pub mod memory;
pub mod monitor;
mod pager;
pub mod serial;
pub mod vcpu;
pub mod virtio;
pub mod vm;

pub use bus::{Bus, BusDevice};
pub use memory::GuestMemory;
