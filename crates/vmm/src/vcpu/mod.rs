//! vCPUs: one thread each, and how they are stopped and started together.
//!
//! ```text
//!            start               resume                    park
//!   (made) ─────────▶ parked ───────────────▶ running ─────────────▶ parked        stop ─▶ (joined)
//!                       ▲                        │ end: the VM's `Ending` is set
//!                       └────────────────────────┘
//! ```
//!
//! A parked vCPU is out of `KVM_RUN`, its last I/O instruction is complete, its thread waits on a condition and holds
//! no lock, and its descriptor lies in the slot: the device thread reads and writes registers through it. After
//! `fork(2)` the child has the slots but not the threads: it calls [`VcpuSet::abandon`] and makes new vCPUs.
//!
//! How one is stopped: the wish is stored first, then `immediate_exit` is set in the shared page of KVM, then the
//! thread gets a signal. The thread clears `immediate_exit` before it looks at the wish, so whichever comes first, the
//! wish is seen. KVM completes a pending I/O instruction *before* it looks at `immediate_exit`; so a thread that
//! leaves only on EINTR leaves nothing half done (otherwise a restored guest would repeat an OUT).

mod exits;

use std::sync::atomic::{AtomicU8, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, Once, PoisonError};
use std::thread::{Builder, JoinHandle};
use std::time::{Duration, Instant};

use kvm_ioctls::VcpuFd;
use vmm_sys_util::signal::{Killable, SIGRTMIN, register_signal_handler};

use crate::arch::x86_64::layout::VCPUS_MAX;
use crate::bus::Bus;
use crate::ending::{EndReason, Ending};
use crate::error::{VcpuError, kvm_error};
use exits::{ExitFlag, Runner};

/// How long a vCPU may take to stop; it takes microseconds unless the host is stuck.
const PARK_TIMEOUT: Duration = Duration::from_secs(10);
/// A stop is asked for again after so long.
const KICK_AGAIN: Duration = Duration::from_millis(20);

/// What vCPU threads need of the machine.
#[derive(Clone)]
pub struct Machine {
    pub mmio: Arc<Bus>,
    pub ports: Arc<Bus>,
    pub ending: Arc<Ending>,
}

const WISH_PARK: u8 = 0;
const WISH_RUN: u8 = 1;
const WISH_QUIT: u8 = 2;

/// What thread and controller share.
struct Shared {
    /// One of `WISH_*`.
    wish: AtomicU8,
    slot: Mutex<Slot>,
    changed: Condvar,
    /// Exits to user space, since the vCPU was made.
    exits: AtomicU64,
}

struct Slot {
    /// There while parked.
    fd: Option<VcpuFd>,
    /// There while running: how to make KVM_RUN return.
    flag: Option<ExitFlag>,
    /// It ended the VM and will not run again.
    ended: bool,
}

struct Vcpu {
    shared: Arc<Shared>,
    thread: JoinHandle<()>,
}

/// All vCPUs of one VM.
pub struct VcpuSet {
    vcpus: Vec<Vcpu>,
}

impl VcpuSet {
    /// A thread for each; all are parked.
    pub fn start(fds: Vec<VcpuFd>, machine: &Machine) -> Result<Self, VcpuError> {
        if fds.is_empty() || fds.len() > VCPUS_MAX {
            return Err(VcpuError::Count(fds.len()));
        }
        set_up_signal()?;
        let mut set = Self { vcpus: Vec::with_capacity(fds.len()) };
        for (id, fd) in fds.into_iter().enumerate() {
            let shared = Arc::new(Shared {
                wish: AtomicU8::new(WISH_PARK),
                slot: Mutex::new(Slot { fd: Some(fd), flag: None, ended: false }),
                changed: Condvar::new(),
                exits: AtomicU64::new(0),
            });
            let (theirs, machine) = (Arc::clone(&shared), machine.clone());
            let thread = Builder::new()
                .name(format!("vcpu{id}"))
                .spawn(move || thread_main(&theirs, Runner { id, machine }))
                .map_err(|source| VcpuError::Thread { id, source })?;
            set.vcpus.push(Vcpu { shared, thread });
        }
        Ok(set)
    }

    #[must_use]
    pub fn len(&self) -> usize {
        self.vcpus.len()
    }

    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.vcpus.is_empty()
    }

    /// Exits to user space so far, of all together.
    #[must_use]
    pub fn exits(&self) -> u64 {
        self.vcpus.iter().map(|vcpu| vcpu.shared.exits.load(Ordering::Relaxed)).sum()
    }

    /// Lets all run (those that have not ended).
    pub fn resume(&self) {
        for vcpu in &self.vcpus {
            let slot = vcpu.shared.lock();
            vcpu.shared.wish.store(WISH_RUN, Ordering::SeqCst);
            drop(slot);
            vcpu.shared.changed.notify_all();
        }
    }

    /// Stops all; when this returns, every one is parked.
    pub fn park(&self) -> Result<(), VcpuError> {
        for vcpu in &self.vcpus {
            vcpu.wish(WISH_PARK);
        }
        self.vcpus.iter().enumerate().try_for_each(|(id, vcpu)| vcpu.wait_parked(id))
    }

    /// Reads or writes the registers of each, in order. All must be parked.
    pub fn with_parked<T, E: From<VcpuError>>(
        &self,
        mut each: impl FnMut(usize, &VcpuFd) -> Result<T, E>,
    ) -> Result<Vec<T>, E> {
        let visit = |(id, vcpu): (usize, &Vcpu)| {
            let slot = vcpu.shared.lock();
            each(id, slot.fd.as_ref().ok_or(VcpuError::NotParked { id })?)
        };
        self.vcpus.iter().enumerate().map(visit).collect()
    }

    /// Ends the threads and waits for them.
    pub fn stop(mut self) -> Result<(), VcpuError> {
        for vcpu in &self.vcpus {
            vcpu.wish(WISH_QUIT);
        }
        for (id, vcpu) in std::mem::take(&mut self.vcpus).into_iter().enumerate() {
            vcpu.wait_parked(id)?;
            vcpu.shared.changed.notify_all();
            // A thread that panicked is gone as well.
            let _ = vcpu.thread.join();
        }
        Ok(())
    }

    /// In a forked child: closes the parent's vCPUs here and forgets the threads, which exist in the parent only.
    pub fn abandon(mut self) {
        for vcpu in std::mem::take(&mut self.vcpus) {
            drop(vcpu.shared.lock().fd.take());
            // Neither joined nor detached: there is no such thread in this process.
            std::mem::forget(vcpu.thread);
        }
    }
}

/// Without [`VcpuSet::stop`] the threads end as well, but nobody waits for them.
impl Drop for VcpuSet {
    fn drop(&mut self) {
        for vcpu in &self.vcpus {
            vcpu.wish(WISH_QUIT);
        }
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, Slot> {
        self.slot.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Vcpu {
    fn wish(&self, wish: u8) {
        self.shared.wish.store(wish, Ordering::SeqCst);
        self.kick();
        self.shared.changed.notify_all();
    }

    /// Makes KVM_RUN return, if the thread is in it or about to be.
    fn kick(&self) {
        let slot = self.shared.lock();
        if let Some(flag) = &slot.flag {
            flag.set();
            // The thread lives: it removes the flag before it ends.
            let _ = self.thread.kill(SIGRTMIN());
        }
    }

    fn wait_parked(&self, id: usize) -> Result<(), VcpuError> {
        let since = Instant::now();
        let mut slot = self.shared.lock();
        while slot.fd.is_none() {
            if since.elapsed() > PARK_TIMEOUT || self.thread.is_finished() {
                return Err(VcpuError::NotStopped { id, ms: since.elapsed().as_millis() });
            }
            let waited = self.shared.changed.wait_timeout(slot, KICK_AGAIN);
            let (guard, timeout) = waited.unwrap_or_else(PoisonError::into_inner);
            slot = guard;
            if timeout.timed_out() && slot.fd.is_none() {
                drop(slot);
                self.kick();
                slot = self.shared.lock();
            }
        }
        Ok(())
    }
}

fn thread_main(shared: &Shared, runner: Runner) {
    if let Err(error) = crate::jail::enter_vcpu() {
        runner.machine.ending.set(EndReason::Monitor { why: error.to_string() });
        return;
    }
    while let Some(mut fd) = wait_for_run(shared) {
        let end = runner.run(&mut fd, &shared.wish, &shared.exits);
        let mut slot = shared.lock();
        // From here on nobody sets the flag: the page may go with the descriptor.
        slot.flag = None;
        slot.fd = Some(fd);
        slot.ended |= end.is_some();
        drop(slot);
        shared.changed.notify_all();
        if let Some(reason) = end {
            runner.machine.ending.set(reason);
        }
    }
}

/// `None`: the thread is to end.
fn wait_for_run(shared: &Shared) -> Option<VcpuFd> {
    let mut slot = shared.lock();
    loop {
        match shared.wish.load(Ordering::SeqCst) {
            WISH_QUIT => return None,
            WISH_RUN if !slot.ended => {
                if let Some(mut fd) = slot.fd.take() {
                    fd.set_kvm_immediate_exit(0);
                    slot.flag = Some(ExitFlag::of(&mut fd));
                    return Some(fd);
                }
            }
            _ => {}
        }
        slot = shared.changed.wait(slot).unwrap_or_else(PoisonError::into_inner);
    }
}

extern "C" fn on_signal(_: libc::c_int, _: *mut libc::siginfo_t, _: *mut libc::c_void) {
    // That it arrives is enough: KVM_RUN returns.
}

fn set_up_signal() -> Result<(), VcpuError> {
    static ONCE: Once = Once::new();
    let mut result = Ok(());
    ONCE.call_once(|| result = register_signal_handler(SIGRTMIN(), on_signal));
    result.map_err(|error| VcpuError::Signal(kvm_error(error)))
}

/// The wish that a running vCPU goes by.
fn wants_run(wish: &AtomicU8) -> bool {
    wish.load(Ordering::SeqCst) == WISH_RUN
}

#[cfg(test)]
mod tests;
