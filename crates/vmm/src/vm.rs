//! The KVM virtual machine: memory slots, interrupt controllers, timer, and the wires to devices.
//!
//! A KVM file descriptor belongs to the memory of the process that made it: after `fork(2)` the child drops what it
//! has inherited and makes a new `Vm` over the same guest memory. `Kvm` itself (`/dev/kvm`) is bound to nothing and
//! may be used on.
#![allow(unsafe_code, reason = "handing memory to KVM has no safe form")]

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, IntoRawFd};

use kvm_bindings::{KVM_API_VERSION, KVM_PIT_SPEAKER_DUMMY, kvm_pit_config, kvm_userspace_memory_region};
use kvm_ioctls::{Cap, IoEventAddress, Kvm, VcpuFd, VmFd};
use vm_memory::{GuestMemoryBackend, GuestMemoryRegion};
use vmm_sys_util::eventfd::EventFd;

use crate::arch::x86_64::layout;
use crate::error::{VmError, kvm_error};
use crate::memory::GuestMemory;

const CAPABILITIES: &[(Cap, &str)] = &[
    (Cap::UserMemory, "memory slots"),
    (Cap::Irqchip, "interrupt controllers"),
    (Cap::Pit2, "timer (PIT)"),
    (Cap::SetTssAddr, "KVM_SET_TSS_ADDR"),
    (Cap::SetIdentityMapAddr, "KVM_SET_IDENTITY_MAP_ADDR"),
    (Cap::Irqfd, "irqfd"),
    (Cap::Ioeventfd, "ioeventfd"),
    (Cap::ImmediateExit, "immediate exit"),
    (Cap::ExtCpuid, "CPUID"),
    (Cap::MpState, "MP state"),
    (Cap::VcpuEvents, "vCPU events"),
    (Cap::Debugregs, "debug registers"),
    (Cap::Xsave, "XSAVE"),
    (Cap::AdjustClock, "clock"),
];

/// Opens `/dev/kvm` and checks that it can do what is needed.
pub fn open_kvm() -> Result<Kvm, VmError> {
    let kvm = Kvm::new().map_err(|error| VmError::Open(kvm_error(error)))?;
    let version = kvm.get_api_version();
    if u32::try_from(version) != Ok(KVM_API_VERSION) {
        return Err(VmError::ApiVersion(version));
    }
    match CAPABILITIES.iter().find(|(cap, _)| !kvm.check_extension(*cap)) {
        Some((_, name)) => Err(VmError::Capability(name)),
        None => Ok(kvm),
    }
}

/// A second handle of the same device.
pub fn share_kvm(kvm: &Kvm) -> io::Result<Kvm> {
    // SAFETY: the descriptor is open as long as `kvm` lives.
    let device = unsafe { BorrowedFd::borrow_raw(kvm.as_raw_fd()) };
    let own = device.try_clone_to_owned()?;
    // SAFETY: a descriptor of `/dev/kvm` that was just made and is nobody else's.
    Ok(unsafe { Kvm::from_raw_fd(own.into_raw_fd()) })
}

/// One virtual machine, with all of its memory and its interrupt controllers, and without vCPUs.
#[derive(Debug)]
pub struct Vm {
    fd: VmFd,
    memory: GuestMemory,
}

impl Vm {
    /// A machine over `memory`.
    pub fn new(kvm: &Kvm, memory: GuestMemory) -> Result<Self, VmError> {
        let fd = create(kvm)?;
        fd.set_identity_map_address(layout::IDENTITY_MAP_START)
            .map_err(VmError::kvm("set the identity map address"))?;
        let tss = usize::try_from(layout::TSS_START).map_err(|_| VmError::Capability("64-bit addresses"))?;
        fd.set_tss_address(tss).map_err(VmError::kvm("set the TSS address"))?;
        fd.create_irq_chip().map_err(VmError::kvm("make the interrupt controllers"))?;
        let pit = kvm_pit_config { flags: KVM_PIT_SPEAKER_DUMMY, ..Default::default() };
        fd.create_pit2(pit).map_err(VmError::kvm("make the timer (PIT)"))?;
        let vm = Self { fd, memory };
        vm.set_slots()?;
        Ok(vm)
    }

    #[must_use]
    pub fn memory(&self) -> &GuestMemory {
        &self.memory
    }

    #[must_use]
    pub fn fd(&self) -> &VmFd {
        &self.fd
    }

    /// vCPUs 0 to `count - 1`, as after a reset.
    pub fn create_vcpus(&self, count: usize) -> Result<Vec<VcpuFd>, VmError> {
        let create = |id: usize| {
            self.fd.create_vcpu(id as u64).map_err(|error| VmError::Vcpu { id, source: kvm_error(error) })
        };
        (0..count).map(create).collect()
    }

    /// Each write to `event` raises interrupt `gsi` once (edge-triggered).
    pub fn connect_interrupt(&self, event: &EventFd, gsi: u32) -> Result<(), VmError> {
        self.fd
            .register_irqfd(event, gsi)
            .map_err(|error| VmError::Interrupt { gsi, source: kvm_error(error) })
    }

    /// A 32-bit write of `queue` to the guest-physical `address` signals `event` and does not leave the kernel.
    pub fn connect_notify(&self, event: &EventFd, address: u64, queue: u32) -> Result<(), VmError> {
        self.fd
            .register_ioevent(event, &IoEventAddress::Mmio(address), queue)
            .map_err(|error| VmError::Notify { address, queue, source: kvm_error(error) })
    }

    fn set_slots(&self) -> Result<(), VmError> {
        for (slot, region) in (0_u32..).zip(self.memory.iter()) {
            let (base, bytes) = (region.start_addr().0, region.len());
            let region = kvm_userspace_memory_region {
                slot,
                flags: 0,
                guest_phys_addr: base,
                memory_size: bytes,
                userspace_addr: region.as_ptr() as u64,
            };
            // SAFETY: the region is mapped for as long as `self.memory` lives, which is as long as the VM; regions
            // do not overlap, as `GuestMemory` is sorted and disjoint.
            let result = unsafe { self.fd.set_user_memory_region(region) };
            result.map_err(|error| VmError::Slot { base, bytes, source: kvm_error(error) })?;
        }
        Ok(())
    }
}

/// Making a VM can be interrupted by a signal: then it is simply tried again, a bounded number of times.
fn create(kvm: &Kvm) -> Result<VmFd, VmError> {
    const TRIES_MAX: usize = 16;
    for _ in 0..TRIES_MAX {
        match kvm.create_vm() {
            Err(error) if error.errno() == libc::EINTR => {}
            result => return result.map_err(VmError::kvm("make a VM")),
        }
    }
    Err(VmError::Kvm { what: "make a VM", source: io::ErrorKind::Interrupted.into() })
}
