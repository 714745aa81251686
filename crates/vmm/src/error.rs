//! Why making and running a VM fails: one enum per operation.

use std::io;

use vmm_sys_util::errno;

/// Turns a KVM error number into what `std` prints well.
#[must_use]
pub fn kvm_error(error: errno::Error) -> io::Error {
    io::Error::from_raw_os_error(error.errno())
}

#[derive(Debug, thiserror::Error)]
pub enum MemoryError {
    #[error("a guest with {mib} MiB of memory cannot be: {min} to {max} MiB are possible")]
    Size { mib: u64, min: u64, max: u64 },
    #[error("{bytes} bytes of guest memory cannot be mapped")]
    Map { bytes: usize, source: io::Error },
    #[error("the mapping for guest address {base:#x} is not valid: {why}")]
    Mapping { base: u64, why: String },
}

#[derive(Debug, thiserror::Error)]
pub enum VmError {
    #[error("/dev/kvm cannot be opened")]
    Open(#[source] io::Error),
    #[error("KVM speaks API version {0}, not 12")]
    ApiVersion(i32),
    #[error("this host's KVM has no {0}")]
    Capability(&'static str),
    #[error("this host cannot offer {template}: it lacks {lacking}")]
    Baseline { template: &'static str, lacking: String },
    #[error("KVM refuses to {what}")]
    Kvm { what: &'static str, source: io::Error },
    #[error("KVM refuses guest memory at {base:#x} with {bytes:#x} bytes")]
    Slot { base: u64, bytes: u64, source: io::Error },
    #[error("KVM refuses vCPU {id}")]
    Vcpu { id: usize, source: io::Error },
    #[error("interrupt {gsi} cannot be connected")]
    Interrupt { gsi: u32, source: io::Error },
    #[error("the notification at {address:#x} for queue {queue} cannot be connected")]
    Notify { address: u64, queue: u32, source: io::Error },
}

impl VmError {
    pub(crate) fn kvm(what: &'static str) -> impl FnOnce(errno::Error) -> Self {
        move |error| Self::Kvm { what, source: kvm_error(error) }
    }
}

#[derive(Debug, thiserror::Error)]
pub enum VcpuError {
    #[error("{0} vCPUs cannot be: 1 to {max} are possible", max = crate::arch::x86_64::layout::VCPUS_MAX)]
    Count(usize),
    #[error("the signal that stops vCPUs cannot be set up")]
    Signal(#[source] io::Error),
    #[error("the thread of vCPU {id} cannot be started")]
    Thread { id: usize, source: io::Error },
    #[error("vCPU {id} did not stop within {ms} ms")]
    NotStopped { id: usize, ms: u128 },
    #[error("vCPU {id} is not parked")]
    NotParked { id: usize },
}

#[derive(Debug, thiserror::Error)]
pub enum BootError {
    #[error("the kernel cannot be read")]
    ReadKernel(#[source] io::Error),
    #[error("the kernel is neither an ELF vmlinux nor a bzImage")]
    KernelFormat,
    #[error("the kernel cannot be loaded: {0}")]
    LoadKernel(String),
    #[error("the bzImage has no 64-bit entry (boot protocol {major}.{minor})")]
    Kernel32 { major: u8, minor: u8 },
    #[error("the kernel command line has {given} bytes, it may have {max}")]
    CmdlineLength { given: usize, max: usize },
    #[error("the kernel command line has a character that is no printable ASCII")]
    CmdlineCharacter,
    #[error("the initramfs cannot be read")]
    ReadInitramfs(#[source] io::Error),
    #[error("kernel and initramfs ({kernel} and {initramfs} bytes) do not fit into memory")]
    NoRoom { kernel: u64, initramfs: u64 },
    #[error("{what} cannot be written to guest memory at {address:#x}")]
    Write { what: &'static str, address: u64 },
    #[error("the ACPI tables have {0} bytes, more than there is room for")]
    AcpiSize(usize),
    #[error("vCPU {id}: KVM refuses its {what}")]
    Vcpu { id: usize, what: &'static str, source: io::Error },
}

#[derive(Debug, thiserror::Error)]
pub enum StateError {
    #[error("vCPU {id}: its {what} cannot be read")]
    ReadVcpu { id: usize, what: &'static str, source: io::Error },
    #[error("vCPU {id}: KVM refuses the saved {what}")]
    WriteVcpu { id: usize, what: &'static str, source: io::Error },
    #[error("vCPU {id}: KVM refuses the saved MSR {index:#x}")]
    WriteMsr { id: usize, index: u32 },
    #[error("vCPU {id}: its clock ran at {saved} kHz, this host can only do {here} kHz")]
    TscFrequency { id: usize, saved: u32, here: u32 },
    #[error("the VM's {what} cannot be read")]
    ReadVm { what: &'static str, source: io::Error },
    #[error("KVM refuses the VM's saved {what}")]
    WriteVm { what: &'static str, source: io::Error },
    #[error("the saved {what} is not of this architecture's size")]
    Size { what: &'static str },
    #[error("there are {given} vCPUs for the saved state of {saved}")]
    VcpuCount { given: usize, saved: usize },
}
