//! How a VM ends by itself, and the notice that it did.

use std::fmt;
use std::io;
use std::sync::OnceLock;

use vmm_sys_util::eventfd::{EFD_CLOEXEC, EFD_NONBLOCK, EventFd};

/// Why a VM ended by itself. The first reason counts.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum EndReason {
    /// The guest powered itself off (ACPI).
    PowerOff,
    /// The guest reset itself (keyboard controller or reset port).
    Reset,
    /// A fault in the handling of a fault in the handling of a fault: a crash.
    TripleFault { vcpu: usize },
    /// The processor refused to enter the guest.
    EntryFailed { vcpu: usize, reason: u64 },
    /// KVM gave up, for example on an instruction that it cannot emulate.
    KvmInternal { vcpu: usize, suberror: u32 },
    /// An exit that this machine has no use for.
    UnknownExit { vcpu: usize, exit: String },
    /// KVM_RUN itself failed.
    RunFailed { vcpu: usize, errno: i32 },
    /// The guest's memory was not there: its file or its pager failed.
    MemoryFault { vcpu: usize, guest_address: u64 },
    /// A vCPU was told to stop and made exit after exit instead.
    EndlessExits { vcpu: usize },
    /// A device gave up: the guest broke its queues or sent what makes no sense, or its host's side failed.
    Device { why: String },
    /// The pager ended before all memory was there.
    Pager { why: String },
    /// A part of the monitor cannot go on.
    Monitor { why: String },
}

impl EndReason {
    /// Stable and short: for files and events.
    #[must_use]
    pub fn code(&self) -> &'static str {
        match self {
            Self::PowerOff => "power_off",
            Self::Reset => "reset",
            Self::TripleFault { .. } => "triple_fault",
            Self::EntryFailed { .. } => "entry_failed",
            Self::KvmInternal { .. } => "kvm_internal",
            Self::UnknownExit { .. } => "unknown_exit",
            Self::RunFailed { .. } => "run_failed",
            Self::MemoryFault { .. } => "memory_fault",
            Self::EndlessExits { .. } => "endless_exits",
            Self::Device { .. } => "device",
            Self::Pager { .. } => "pager",
            Self::Monitor { .. } => "monitor",
        }
    }
}

impl fmt::Display for EndReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::PowerOff => write!(f, "the guest powered off"),
            Self::Reset => write!(f, "the guest reset itself (a reboot or a kernel panic)"),
            Self::TripleFault { vcpu } => write!(f, "vCPU {vcpu} crashed with a triple fault"),
            Self::EntryFailed { vcpu, reason } => {
                write!(f, "the processor refused to run vCPU {vcpu} (reason {reason:#x})")
            }
            Self::KvmInternal { vcpu, suberror } => {
                write!(f, "KVM could not go on with vCPU {vcpu} (internal error {suberror})")
            }
            Self::UnknownExit { vcpu, exit } => write!(f, "vCPU {vcpu} made an unexpected exit ({exit})"),
            Self::RunFailed { vcpu, errno } => {
                write!(f, "vCPU {vcpu} cannot be run: {}", io::Error::from_raw_os_error(*errno))
            }
            Self::MemoryFault { vcpu, guest_address } => {
                write!(f, "vCPU {vcpu} could not get its memory at {guest_address:#x}")
            }
            Self::EndlessExits { vcpu } => write!(f, "vCPU {vcpu} would not stop between its exits"),
            Self::Device { why } => write!(f, "a device gave up: {why}"),
            Self::Pager { why } => write!(f, "the pager ended before all memory was there: {why}"),
            Self::Monitor { why } => write!(f, "the monitor cannot go on: {why}"),
        }
    }
}

/// Where a reason is left, and by which the device thread is woken. Set once; every thread may set it.
#[derive(Debug)]
pub struct Ending {
    reason: OnceLock<EndReason>,
    event: EventFd,
}

impl Ending {
    pub fn new() -> io::Result<Self> {
        Ok(Self { reason: OnceLock::new(), event: EventFd::new(EFD_NONBLOCK | EFD_CLOEXEC)? })
    }

    /// Notes why; a later reason changes nothing.
    pub fn set(&self, reason: EndReason) {
        if self.reason.set(reason).is_ok() {
            // The counter is far from full: this cannot fail, and if it did, the reason is there to be seen.
            let _ = self.event.write(1);
        }
    }

    #[must_use]
    pub fn reason(&self) -> Option<&EndReason> {
        self.reason.get()
    }

    /// Readable once a reason is there.
    #[must_use]
    pub fn event(&self) -> &EventFd {
        &self.event
    }
}
