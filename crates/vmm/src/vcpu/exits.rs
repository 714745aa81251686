//! The KVM_RUN loop: every exit of a vCPU, and what is done about it.
#![allow(unsafe_code, reason = "the page that KVM shares with us has unions and data behind its structure")]

use std::slice;
use std::sync::atomic::{AtomicU8, AtomicU64, Ordering};

use kvm_bindings::{KVM_EXIT_IO, KVM_EXIT_IO_IN, kvm_run};
use kvm_ioctls::{VcpuExit, VcpuFd};

use super::{Machine, wants_run};
use crate::bus::Bus;
use crate::ending::EndReason;

/// More exits than this between the wish to stop and the stop: the guest does it on purpose (one instruction makes at
/// most about a thousand).
const EXITS_WHILE_STOPPING_MAX: u32 = 1 << 16;

/// `immediate_exit` of a vCPU's shared page, for the thread that wants it to stop.
///
/// Whoever holds one must not use it after the vCPU's descriptor was closed.
pub struct ExitFlag(*const AtomicU8);

// SAFETY: the byte lies in memory that is shared with the kernel and is only accessed atomically.
unsafe impl Send for ExitFlag {}

impl ExitFlag {
    pub fn of(fd: &mut VcpuFd) -> Self {
        let byte: *mut u8 = &raw mut fd.get_kvm_run().immediate_exit;
        Self(byte.cast::<AtomicU8>())
    }

    pub fn set(&self) {
        self.store(1);
    }

    fn clear(&self) {
        self.store(0);
    }

    fn store(&self, value: u8) {
        // SAFETY: the page is mapped as long as the descriptor is open: the slot's lock is held by whoever sets it
        // from another thread, and the running thread takes it out before it gives the descriptor away.
        unsafe { &*self.0 }.store(value, Ordering::SeqCst);
    }
}

/// What the loop does after an exit.
enum Next {
    Run,
    /// A port access: its details are in the shared page.
    Port,
    /// KVM's own error: its number is in the shared page.
    Internal,
    End(EndReason),
}

/// Runs one vCPU on its thread.
pub struct Runner {
    pub id: usize,
    pub machine: Machine,
}

impl Runner {
    /// Until it is to stop (`None`: everything pending is complete), or it ends the VM.
    pub fn run(&self, fd: &mut VcpuFd, wish: &AtomicU8, exits: &AtomicU64) -> Option<EndReason> {
        let flag = ExitFlag::of(fd);
        let mut stopping = 0;
        loop {
            let next = match fd.run() {
                Ok(exit) => self.on_exit(exit),
                Err(error) if matches!(error.errno(), libc::EINTR | libc::EAGAIN) => {
                    flag.clear();
                    if wants_run(wish) {
                        continue;
                    }
                    if error.errno() == libc::EINTR {
                        return None;
                    }
                    // EAGAIN says nothing of pending I/O: once more, to be interrupted.
                    flag.set();
                    Next::Run
                }
                Err(error) => Next::End(EndReason::RunFailed { vcpu: self.id, errno: error.errno() }),
            };
            exits.fetch_add(1, Ordering::Relaxed);
            match next {
                Next::Run => {}
                Next::Port => port_access(fd.get_kvm_run(), &self.machine.ports),
                Next::Internal => {
                    let suberror = internal_error(fd.get_kvm_run());
                    return Some(EndReason::KvmInternal { vcpu: self.id, suberror });
                }
                Next::End(reason) => return Some(reason),
            }
            if let Some(reason) = self.machine.ending.reason() {
                return Some(reason.clone());
            }
            if !wants_run(wish) {
                stopping += 1;
                if stopping > EXITS_WHILE_STOPPING_MAX {
                    return Some(EndReason::EndlessExits { vcpu: self.id });
                }
            }
        }
    }

    fn on_exit(&self, exit: VcpuExit<'_>) -> Next {
        let vcpu = self.id;
        match exit {
            VcpuExit::IoIn(..) | VcpuExit::IoOut(..) => Next::Port,
            VcpuExit::MmioRead(address, data) => {
                self.machine.mmio.read(address, data);
                Next::Run
            }
            VcpuExit::MmioWrite(address, data) => {
                self.machine.mmio.write(address, data);
                Next::Run
            }
            VcpuExit::Intr | VcpuExit::IrqWindowOpen | VcpuExit::IoapicEoi(_) => Next::Run,
            VcpuExit::Shutdown => Next::End(EndReason::TripleFault { vcpu }),
            VcpuExit::FailEntry(reason, _) => Next::End(EndReason::EntryFailed { vcpu, reason }),
            VcpuExit::InternalError => Next::Internal,
            VcpuExit::SystemEvent(kvm_bindings::KVM_SYSTEM_EVENT_SHUTDOWN, _) => {
                Next::End(EndReason::PowerOff)
            }
            VcpuExit::SystemEvent(kvm_bindings::KVM_SYSTEM_EVENT_RESET, _) => Next::End(EndReason::Reset),
            VcpuExit::MemoryFault { gpa, .. } => {
                Next::End(EndReason::MemoryFault { vcpu, guest_address: gpa })
            }
            other => Next::End(EndReason::UnknownExit { vcpu, exit: format!("{other:?}") }),
        }
    }
}

/// A string instruction makes one exit for many accesses to the same port: each is an access of its own.
fn port_access(run: &mut kvm_run, ports: &Bus) {
    if run.exit_reason != KVM_EXIT_IO {
        return;
    }
    let start: *mut u8 = (&raw mut *run).cast();
    // SAFETY: the exit reason says that this is the field that the kernel has filled.
    let io = unsafe { run.__bindgen_anon_1.io };
    let (size, count) = (usize::from(io.size), io.count as usize);
    let Some(bytes) = size.checked_mul(count).filter(|bytes| *bytes > 0) else {
        return;
    };
    let Ok(offset) = usize::try_from(io.data_offset) else {
        return;
    };
    let data = start.wrapping_add(offset);
    // SAFETY: the kernel put the data there: a page of the mapping of which `run` is the start, and no other
    // reference to it exists while `run` is borrowed.
    let data = unsafe { slice::from_raw_parts_mut(data, bytes) };
    for access in data.chunks_exact_mut(size) {
        if u32::from(io.direction) == KVM_EXIT_IO_IN {
            ports.read(u64::from(io.port), access);
        } else {
            ports.write(u64::from(io.port), access);
        }
    }
}

fn internal_error(run: &kvm_run) -> u32 {
    // SAFETY: called right after an exit for an internal error, for which the kernel fills this field; it is a plain
    // number, so any content is valid.
    unsafe { run.__bindgen_anon_1.internal.suberror }
}
