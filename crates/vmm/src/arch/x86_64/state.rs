//! Capturing and restoring what KVM holds: vCPUs, interrupt controllers, timer, clock.
//!
//! Everything is read while all vCPUs are parked, and written to new ones over the same memory, in this process, in a
//! forked child or in another one long after. The order of writing is KVM's: CPUID before anything that it allows,
//! the APIC's base before the APIC, the TSC before the timers that run by it.
//!
//! Time in the guest stands still while it sleeps: its clock goes on from the captured instant. The wall clock is the
//! agent's business.
#![allow(unsafe_code, reason = "KVM_SET_XSAVE reads as much as the kernel thinks right")]

use dormouse_snapshot::devices::x86::{IRQCHIPS, VcpuState, VmState};
use kvm_bindings::{
    KVM_CLOCK_REALTIME, KVM_IRQCHIP_IOAPIC, KVM_IRQCHIP_PIC_MASTER, KVM_IRQCHIP_PIC_SLAVE,
    KVM_MAX_CPUID_ENTRIES, KVM_MAX_MSR_ENTRIES, KVM_VCPUEVENT_VALID_NMI_PENDING, KVM_VCPUEVENT_VALID_SHADOW,
    KVM_VCPUEVENT_VALID_SMM, Msrs, kvm_clock_data, kvm_debugregs, kvm_irqchip, kvm_lapic_state, kvm_mp_state,
    kvm_msr_entry, kvm_pit_state2, kvm_vcpu_events, kvm_xcr, kvm_xcrs, kvm_xsave,
};
use kvm_ioctls::{Kvm, VcpuFd, VmFd};
use vmm_sys_util::errno;
use zerocopy::{FromBytes, FromZeros, Immutable, IntoBytes};

use super::{cpuid, registers};
use crate::error::{StateError, kvm_error};

const MSR_TSC: u32 = 0x10;
const MSR_TSC_DEADLINE: u32 = 0x6e0;
/// Frequencies that differ by less are the same to a guest that disciplines its clock: 250 ppm, as KVM has it.
const TSC_TOLERANCE_PPM: u64 = 250;

const CHIPS: [u32; IRQCHIPS] = [KVM_IRQCHIP_PIC_MASTER, KVM_IRQCHIP_PIC_SLAVE, KVM_IRQCHIP_IOAPIC];

/// The MSRs to save of vCPUs like `fd`, whose CPUID is set: those that can be read. To be asked once and kept: one that
/// cannot be read costs a system call of its own at each capture.
pub fn probe_msrs(kvm: &Kvm, fd: &VcpuFd) -> Result<Vec<u32>, StateError> {
    let readable = capture_msrs(fd, 0, &msr_indices(kvm)?)?;
    Ok(readable.into_iter().map(|(index, _)| index).collect())
}

/// The MSRs that KVM says must be saved; some of them may not be there for a certain vCPU.
pub fn msr_indices(kvm: &Kvm) -> Result<Vec<u32>, StateError> {
    let list = kvm
        .get_msr_index_list()
        .map_err(|error| StateError::ReadVm { what: "list of MSRs", source: kvm_error(error) })?;
    Ok(list.as_slice().to_vec())
}

/// Reads vCPU `id`, which must be parked.
pub fn capture_vcpu(fd: &VcpuFd, id: usize, msr_indices: &[u32]) -> Result<VcpuState, StateError> {
    let read = |what| move |error: errno::Error| StateError::ReadVcpu { id, what, source: kvm_error(error) };
    // The MP state first: reading it makes KVM take in pending INIT and SIPI, which the events show.
    let mp_state = fd.get_mp_state().map_err(read("MP state"))?;
    let regs = fd.get_regs().map_err(read("registers"))?;
    let sregs = fd.get_sregs().map_err(read("segment registers"))?;
    let xsave = fd.get_xsave().map_err(read("FPU state"))?;
    let xcrs = fd.get_xcrs().map_err(read("XCRs"))?;
    let debugregs = fd.get_debug_regs().map_err(read("debug registers"))?;
    let lapic = fd.get_lapic().map_err(read("local APIC"))?;
    let tsc_khz = fd.get_tsc_khz().map_err(read("TSC frequency"))?;
    let msrs = capture_msrs(fd, id, msr_indices)?;
    let events = fd.get_vcpu_events().map_err(read("events"))?;
    let cpuid = fd.get_cpuid2(KVM_MAX_CPUID_ENTRIES).map_err(read("CPUID"))?;
    let xcrs = xcrs.xcrs.iter().take(xcrs.nr_xcrs as usize).map(|xcr| (xcr.xcr, xcr.value)).collect();
    Ok(VcpuState {
        id: u32::try_from(id).unwrap_or(u32::MAX),
        mp_state: mp_state.mp_state,
        tsc_khz,
        regs: registers::save_regs(&regs),
        sregs: registers::save_sregs(&sregs),
        xsave: xsave.region.as_bytes().to_vec().into(),
        xcrs,
        debugregs: debugregs.as_bytes().to_vec().into(),
        lapic: lapic.as_bytes().to_vec().into(),
        msrs,
        events: events.as_bytes().to_vec().into(),
        cpuid: cpuid::save(&cpuid),
    })
}

/// Those that can be read: an MSR may be on the list and still not be there for this vCPU's CPUID.
fn capture_msrs(fd: &VcpuFd, id: usize, indices: &[u32]) -> Result<Vec<(u32, u64)>, StateError> {
    let failed = |error: errno::Error| StateError::ReadVcpu { id, what: "MSRs", source: kvm_error(error) };
    let mut found = Vec::with_capacity(indices.len());
    let mut rest = indices;
    // KVM stops at the first that it cannot read and tells how far it came: go on behind it.
    while !rest.is_empty() {
        let part = &rest[..rest.len().min(KVM_MAX_MSR_ENTRIES)];
        let entries: Vec<_> =
            part.iter().map(|index| kvm_msr_entry { index: *index, ..Default::default() }).collect();
        let mut msrs = Msrs::from_entries(&entries).map_err(|_| failed(errno::Error::new(libc::E2BIG)))?;
        let count = fd.get_msrs(&mut msrs).map_err(failed)?.min(part.len());
        found.extend(msrs.as_slice().iter().take(count).map(|msr| (msr.index, msr.data)));
        let skip = usize::from(count < part.len());
        rest = &rest[count + skip..];
    }
    Ok(found)
}

/// Writes a saved vCPU to a new one.
pub fn restore_vcpu(fd: &VcpuFd, id: usize, saved: &VcpuState) -> Result<(), StateError> {
    let write =
        |what| move |error: errno::Error| StateError::WriteVcpu { id, what, source: kvm_error(error) };
    let cpuid = cpuid::load(&saved.cpuid).ok_or(StateError::Size { what: "CPUID" })?;
    fd.set_cpuid2(&cpuid).map_err(write("CPUID"))?;
    restore_tsc_frequency(fd, id, saved.tsc_khz)?;
    fd.set_sregs(&registers::load_sregs(&saved.sregs)).map_err(write("segment registers"))?;
    fd.set_regs(&registers::load_regs(&saved.regs)).map_err(write("registers"))?;
    restore_fpu(fd, id, saved)?;
    let debugregs: kvm_debugregs = structure(&saved.debugregs, "debug registers")?;
    fd.set_debug_regs(&debugregs).map_err(write("debug registers"))?;
    let lapic: kvm_lapic_state = structure(&saved.lapic, "local APIC")?;
    fd.set_lapic(&lapic).map_err(write("local APIC"))?;
    restore_msrs(fd, id, &saved.msrs)?;
    let mut events: kvm_vcpu_events = structure(&saved.events, "events")?;
    // The flags tell KVM which parts to take. Not the SIPI vector: KVM never reports it.
    events.flags &= KVM_VCPUEVENT_VALID_NMI_PENDING | KVM_VCPUEVENT_VALID_SHADOW | KVM_VCPUEVENT_VALID_SMM;
    fd.set_vcpu_events(&events).map_err(write("events"))?;
    fd.set_mp_state(kvm_mp_state { mp_state: saved.mp_state }).map_err(write("MP state"))
}

fn restore_fpu(fd: &VcpuFd, id: usize, saved: &VcpuState) -> Result<(), StateError> {
    let write =
        |what| move |error: errno::Error| StateError::WriteVcpu { id, what, source: kvm_error(error) };
    let mut xcrs = kvm_xcrs::default();
    for (to, (xcr, value)) in xcrs.xcrs.iter_mut().zip(&saved.xcrs) {
        *to = kvm_xcr { xcr: *xcr, value: *value, ..Default::default() };
        xcrs.nr_xcrs += 1;
    }
    // A host without XSAVE has none, and refuses to be given none.
    if xcrs.nr_xcrs > 0 {
        fd.set_xcrs(&xcrs).map_err(write("XCRs"))?;
    }
    let mut xsave = kvm_xsave::new_zeroed();
    xsave.region = structure(&saved.xsave, "FPU state")?;
    // SAFETY: the kernel reads more than `region` only for features that a process must ask for by arch_prctl(2)
    // before it makes vCPUs (AMX); this one never does.
    unsafe { fd.set_xsave(&xsave) }.map_err(write("FPU state"))
}

fn restore_tsc_frequency(fd: &VcpuFd, id: usize, saved: u32) -> Result<(), StateError> {
    let here = fd.get_tsc_khz().map_err(|error| StateError::ReadVcpu {
        id,
        what: "TSC frequency",
        source: kvm_error(error),
    })?;
    let difference = u64::from(here.abs_diff(saved)) * 1_000_000;
    if saved == 0 || difference <= u64::from(here) * TSC_TOLERANCE_PPM {
        return Ok(());
    }
    fd.set_tsc_khz(saved).map_err(|_| StateError::TscFrequency { id, saved, here })
}

/// The TSC and then its deadline last: the timer is set by the time that holds then.
fn restore_msrs(fd: &VcpuFd, id: usize, saved: &[(u32, u64)]) -> Result<(), StateError> {
    let late = |index: u32| match index {
        MSR_TSC => 1,
        MSR_TSC_DEADLINE => 2,
        _ => 0,
    };
    let mut ordered = saved.to_vec();
    ordered.sort_by_key(|(index, _)| late(*index));
    let mut rest = ordered.as_slice();
    while !rest.is_empty() {
        let part = &rest[..rest.len().min(KVM_MAX_MSR_ENTRIES)];
        let entries: Vec<_> = part
            .iter()
            .map(|(index, data)| kvm_msr_entry { index: *index, data: *data, ..Default::default() })
            .collect();
        let failed =
            |error: errno::Error| StateError::WriteVcpu { id, what: "MSRs", source: kvm_error(error) };
        let msrs = Msrs::from_entries(&entries).map_err(|_| failed(errno::Error::new(libc::E2BIG)))?;
        let count = fd.set_msrs(&msrs).map_err(failed)?;
        if count < part.len() {
            let (index, data) = part[count];
            // Some can be read and never written; one that is zero here as well needs no writing.
            if data != 0 && !is_read_only(fd, index, data) {
                return Err(StateError::WriteMsr { id, index });
            }
            rest = &rest[count + 1..];
        } else {
            rest = &rest[count..];
        }
    }
    Ok(())
}

/// It has the saved value already, or cannot be read back: nothing is lost by not writing it.
fn is_read_only(fd: &VcpuFd, index: u32, data: u64) -> bool {
    let entry = [kvm_msr_entry { index, ..Default::default() }];
    let Ok(mut msrs) = Msrs::from_entries(&entry) else { return false };
    match fd.get_msrs(&mut msrs) {
        Ok(1) => msrs.as_slice().first().is_some_and(|msr| msr.data == data),
        _ => false,
    }
}

/// Reads interrupt controllers, timer and clock; all vCPUs must be parked.
pub fn capture_vm(fd: &VmFd) -> Result<VmState, StateError> {
    let read = |what| move |error: errno::Error| StateError::ReadVm { what, source: kvm_error(error) };
    let mut irqchips = Vec::with_capacity(CHIPS.len());
    for chip_id in CHIPS {
        let mut chip = kvm_irqchip { chip_id, ..Default::default() };
        fd.get_irqchip(&mut chip).map_err(read("interrupt controllers"))?;
        irqchips.push(chip.as_bytes().to_vec().into());
    }
    let pit = fd.get_pit2().map_err(read("timer (PIT)"))?;
    let clock = fd.get_clock().map_err(read("clock"))?;
    let realtime_ns = if clock.flags & KVM_CLOCK_REALTIME != 0 { clock.realtime } else { 0 };
    Ok(VmState { irqchips, pit: pit.as_bytes().to_vec().into(), clock_ns: clock.clock, realtime_ns })
}

/// Writes them to a new VM that has its vCPUs.
pub fn restore_vm(fd: &VmFd, saved: &VmState) -> Result<(), StateError> {
    let write = |what| move |error: errno::Error| StateError::WriteVm { what, source: kvm_error(error) };
    for (chip_id, bytes) in CHIPS.iter().zip(&saved.irqchips) {
        let mut chip: kvm_irqchip = structure(bytes, "interrupt controller")?;
        chip.chip_id = *chip_id;
        fd.set_irqchip(&chip).map_err(write("interrupt controllers"))?;
    }
    let pit: kvm_pit_state2 = structure(&saved.pit, "timer (PIT)")?;
    fd.set_pit2(&pit).map_err(write("timer (PIT)"))?;
    // Without KVM_CLOCK_REALTIME: else KVM would add the time that has gone by since the capture.
    let clock = kvm_clock_data { clock: saved.clock_ns, ..Default::default() };
    fd.set_clock(&clock).map_err(write("clock"))
}

/// After a pause: tells the guest that it was stopped, so that its watchdogs do not bark.
pub fn tell_paused(fd: &VcpuFd) {
    // A guest that has not set up kvm-clock needs no telling.
    let _ = fd.kvmclock_ctrl();
}

fn structure<T: FromBytes + Immutable>(bytes: &[u8], what: &'static str) -> Result<T, StateError> {
    T::read_from_bytes(bytes).map_err(|_| StateError::Size { what })
}

#[cfg(test)]
mod tests {
    use dormouse_snapshot::devices::x86::CpuidEntry;

    use super::*;
    use crate::arch::x86_64::boot::set_up_vcpus;
    use crate::arch::x86_64::cpuid::{CpuTemplate, supported};
    use crate::memory::anonymous;
    use crate::vm::{Vm, open_kvm};

    /// The MSRs that tell the time: they go on.
    const TIME: [u32; 3] = [MSR_TSC, 0xe7, 0xe8];

    fn capture(kvm: &Kvm, vm: &Vm, fds: &[VcpuFd]) -> (Vec<VcpuState>, VmState) {
        let msrs = probe_msrs(kvm, &fds[0]).unwrap();
        let capture = |(id, fd)| {
            let mut state = capture_vcpu(fd, id, &msrs).unwrap();
            state.msrs.retain(|(index, _)| !TIME.contains(index));
            state
        };
        (fds.iter().enumerate().map(capture).collect(), capture_vm(vm.fd()).unwrap())
    }

    #[test]
    fn what_was_restored_reads_the_same() {
        let kvm = open_kvm().unwrap();
        let vm = Vm::new(&kvm, anonymous(2).unwrap()).unwrap();
        let fds = vm.create_vcpus(3).unwrap();
        set_up_vcpus(&fds, &supported(&kvm, CpuTemplate::Host).unwrap(), 0x10_0000).unwrap();
        let (vcpus, mut machine) = capture(&kvm, &vm, &fds);
        assert_eq!(vcpus[0].regs.rip, 0x10_0000);
        assert_eq!(vcpus[1].mp_state, kvm_bindings::KVM_MP_STATE_UNINITIALIZED);
        machine.clock_ns = 3_600_000_000_000;

        let again = Vm::new(&kvm, anonymous(2).unwrap()).unwrap();
        let fds = again.create_vcpus(3).unwrap();
        for (id, (fd, saved)) in fds.iter().zip(&vcpus).enumerate() {
            restore_vcpu(fd, id, saved).unwrap();
        }
        restore_vm(again.fd(), &machine).unwrap();
        let (vcpus_again, machine_again) = capture(&kvm, &again, &fds);
        assert_eq!(vcpus_again, vcpus);
        assert_eq!(machine_again.irqchips, machine.irqchips);
        let gone = machine_again.clock_ns - machine.clock_ns;
        assert!(gone < 600_000_000_000, "the clock goes on from where it was, not from when it was");
    }

    #[test]
    fn what_kvm_cannot_take_is_refused_by_name() {
        let kvm = open_kvm().unwrap();
        let vm = Vm::new(&kvm, anonymous(2).unwrap()).unwrap();
        let fds = vm.create_vcpus(2).unwrap();
        let saved = capture_vcpu(&fds[0], 0, &[MSR_TSC]).unwrap();
        let refused = |change: &dyn Fn(&mut VcpuState)| {
            let mut saved = saved.clone();
            change(&mut saved);
            restore_vcpu(&fds[1], 1, &saved).unwrap_err().to_string()
        };
        let message = refused(&|saved| saved.sregs.control[3] = u64::MAX);
        assert_eq!(message, "vCPU 1: KVM refuses the saved segment registers");
        let message = refused(&|saved| saved.lapic = vec![0; 7].into());
        assert_eq!(message, "the saved local APIC is not of this architecture's size");
        let message = refused(&|saved| saved.msrs = vec![(0x1234_5678, 1)]);
        assert_eq!(message, "vCPU 1: KVM refuses the saved MSR 0x12345678");
        let message = refused(&|saved| saved.cpuid = vec![CpuidEntry::default(); 1000]);
        assert!(message.contains("CPUID"), "{message}");
    }
}
