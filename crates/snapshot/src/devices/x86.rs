//! State of vCPUs, interrupt controllers, timers, clocks and the small legacy devices on x86-64.
//!
//! Registers are fields of their own. What only the kernel understands (the LAPIC's page, the XSAVE area, an irqchip,
//! pending events) is kept as the bytes of KVM's structures: their layout is the kernel's ABI and never changes. Of
//! such bytes only the length is checked here, everything else by KVM when it takes them.

use minicbor::bytes::ByteVec;
use minicbor::{Decode, Encode};

pub const VCPUS_MAX: usize = 64;
/// Real ones have around a hundred.
pub const MSRS_MAX: usize = 1024;
pub const CPUID_ENTRIES_MAX: usize = 256;
pub const XCRS_MAX: usize = 16;
/// The kinds of interrupt controllers of one machine: two PICs and the IOAPIC.
pub const IRQCHIPS: usize = 3;

/// Sizes of KVM's structures, in bytes.
pub const XSAVE_BYTES: usize = 4096;
pub const LAPIC_BYTES: usize = 1024;
pub const EVENTS_BYTES: usize = 64;
pub const DEBUGREGS_BYTES: usize = 128;
pub const IRQCHIP_BYTES: usize = 520;
pub const PIT_BYTES: usize = 112;
/// What a 16550's receiver holds.
pub const SERIAL_INPUT_MAX: usize = 64;

#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum X86StateError {
    #[error("the machine's state cannot be decoded: {0}")]
    Decode(String),
    #[error("the machine's state cannot be encoded: {0}")]
    Encode(String),
    #[error("{field} has {given} bytes, not {expected}")]
    Bytes { field: &'static str, given: usize, expected: usize },
    #[error("{field} has {given} entries, {max} are possible")]
    Entries { field: &'static str, given: usize, max: usize },
    #[error("vCPU {0} is not in its place")]
    VcpuOrder(u32),
    #[error("{field} cannot be {value:#x}")]
    Value { field: &'static str, value: u64 },
}

/// All of the machine but its memory and its virtio devices.
#[derive(Debug, Clone, PartialEq, Eq, Encode, Decode)]
#[cbor(map)]
pub struct MachineState {
    #[n(0)]
    pub vcpus: Vec<VcpuState>,
    #[n(1)]
    pub vm: VmState,
    #[n(2)]
    pub serial: SerialState,
    #[n(3)]
    pub power: PowerState,
}

#[derive(Debug, Clone, PartialEq, Eq, Encode, Decode)]
#[cbor(map)]
pub struct VcpuState {
    #[n(0)]
    pub id: u32,
    /// `KVM_MP_STATE_*`.
    #[n(1)]
    pub mp_state: u32,
    #[n(2)]
    pub tsc_khz: u32,
    #[n(3)]
    pub regs: Regs,
    #[n(4)]
    pub sregs: Sregs,
    /// `struct kvm_xsave`.
    #[n(5)]
    pub xsave: ByteVec,
    /// Register and value.
    #[n(6)]
    pub xcrs: Vec<(u32, u64)>,
    /// `struct kvm_debugregs`.
    #[n(7)]
    pub debugregs: ByteVec,
    /// `struct kvm_lapic_state`.
    #[n(8)]
    pub lapic: ByteVec,
    /// Index and value.
    #[n(9)]
    pub msrs: Vec<(u32, u64)>,
    /// `struct kvm_vcpu_events`.
    #[n(10)]
    pub events: ByteVec,
    #[n(11)]
    pub cpuid: Vec<CpuidEntry>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Encode, Decode)]
#[cbor(map)]
pub struct Regs {
    /// rax, rbx, rcx, rdx, rsi, rdi, rsp, rbp, r8 to r15.
    #[n(0)]
    pub general: [u64; 16],
    #[n(1)]
    pub rip: u64,
    #[n(2)]
    pub rflags: u64,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Encode, Decode)]
#[cbor(map)]
pub struct Segment {
    #[n(0)]
    pub base: u64,
    #[n(1)]
    pub limit: u32,
    #[n(2)]
    pub selector: u16,
    /// type, present, dpl, db, s, l, g, avl, unusable: as KVM has them.
    #[n(3)]
    pub attributes: [u8; 9],
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Encode, Decode)]
#[cbor(map)]
pub struct Sregs {
    /// cs, ds, es, fs, gs, ss, tr, ldt.
    #[n(0)]
    pub segments: [Segment; 8],
    /// Base and limit.
    #[n(1)]
    pub gdt: (u64, u16),
    #[n(2)]
    pub idt: (u64, u16),
    /// cr0, cr2, cr3, cr4, cr8.
    #[n(3)]
    pub control: [u64; 5],
    #[n(4)]
    pub efer: u64,
    #[n(5)]
    pub apic_base: u64,
    #[n(6)]
    pub interrupt_bitmap: [u64; 4],
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Encode, Decode)]
#[cbor(map)]
pub struct CpuidEntry {
    #[n(0)]
    pub function: u32,
    #[n(1)]
    pub index: u32,
    #[n(2)]
    pub flags: u32,
    #[n(3)]
    pub eax: u32,
    #[n(4)]
    pub ebx: u32,
    #[n(5)]
    pub ecx: u32,
    #[n(6)]
    pub edx: u32,
}

#[derive(Debug, Clone, PartialEq, Eq, Encode, Decode)]
#[cbor(map)]
pub struct VmState {
    /// `struct kvm_irqchip` of PIC 1, PIC 2 and IOAPIC.
    #[n(0)]
    pub irqchips: Vec<ByteVec>,
    /// `struct kvm_pit_state2`.
    #[n(1)]
    pub pit: ByteVec,
    /// The guest's clock (kvm-clock), nanoseconds since it booted.
    #[n(2)]
    pub clock_ns: u64,
    /// The host's wall clock at that instant, nanoseconds since 1970; 0: not known.
    #[n(3)]
    pub realtime_ns: u64,
}

#[derive(Debug, Clone, PartialEq, Eq, Encode, Decode)]
#[cbor(map)]
pub struct SerialState {
    /// Divisor low and high, IER, IIR, LCR, LSR, MCR, MSR, SCR.
    #[n(0)]
    pub registers: [u8; 9],
    #[n(1)]
    pub input: ByteVec,
}

/// The power and reset registers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Encode, Decode)]
#[cbor(map)]
pub struct PowerState {
    #[n(0)]
    pub pm1_enable: u16,
    #[n(1)]
    pub pm1_control: u16,
}

impl MachineState {
    pub fn encode(&self) -> Result<Vec<u8>, X86StateError> {
        minicbor::to_vec(self).map_err(|error| X86StateError::Encode(error.to_string()))
    }

    /// Reads and validates.
    pub fn decode(bytes: &[u8]) -> Result<Self, X86StateError> {
        let state: Self =
            minicbor::decode(bytes).map_err(|error| X86StateError::Decode(error.to_string()))?;
        state.validate()?;
        Ok(state)
    }

    /// What must hold before anything is handed to KVM.
    pub fn validate(&self) -> Result<(), X86StateError> {
        entries("vcpus", self.vcpus.len(), VCPUS_MAX)?;
        if self.vcpus.is_empty() {
            return Err(X86StateError::Value { field: "vcpus", value: 0 });
        }
        for (place, vcpu) in (0_u32..).zip(&self.vcpus) {
            if vcpu.id != place {
                return Err(X86StateError::VcpuOrder(vcpu.id));
            }
            vcpu.validate()?;
        }
        self.vm.validate()?;
        entries("serial.input", self.serial.input.len(), SERIAL_INPUT_MAX)
    }
}

impl VcpuState {
    fn validate(&self) -> Result<(), X86StateError> {
        /// Beyond `KVM_MP_STATE_SIPI_RECEIVED` there is nothing on x86.
        const MP_STATE_MAX: u32 = 4;
        const TSC_KHZ_MAX: u32 = 100_000_000;
        exactly("xsave", self.xsave.len(), XSAVE_BYTES)?;
        exactly("debugregs", self.debugregs.len(), DEBUGREGS_BYTES)?;
        exactly("lapic", self.lapic.len(), LAPIC_BYTES)?;
        exactly("events", self.events.len(), EVENTS_BYTES)?;
        entries("xcrs", self.xcrs.len(), XCRS_MAX)?;
        entries("msrs", self.msrs.len(), MSRS_MAX)?;
        entries("cpuid", self.cpuid.len(), CPUID_ENTRIES_MAX)?;
        at_most("mp_state", self.mp_state, MP_STATE_MAX)?;
        at_most("tsc_khz", self.tsc_khz, TSC_KHZ_MAX)
    }
}

impl VmState {
    fn validate(&self) -> Result<(), X86StateError> {
        exactly("irqchips", self.irqchips.len(), IRQCHIPS)?;
        for chip in &self.irqchips {
            exactly("irqchip", chip.len(), IRQCHIP_BYTES)?;
        }
        exactly("pit", self.pit.len(), PIT_BYTES)
    }
}

fn exactly(field: &'static str, given: usize, expected: usize) -> Result<(), X86StateError> {
    if given == expected { Ok(()) } else { Err(X86StateError::Bytes { field, given, expected }) }
}

fn entries(field: &'static str, given: usize, max: usize) -> Result<(), X86StateError> {
    if given <= max { Ok(()) } else { Err(X86StateError::Entries { field, given, max }) }
}

fn at_most(field: &'static str, value: u32, max: u32) -> Result<(), X86StateError> {
    if value <= max { Ok(()) } else { Err(X86StateError::Value { field, value: value.into() }) }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn vcpu(id: u32) -> VcpuState {
        VcpuState {
            id,
            mp_state: 0,
            tsc_khz: 2_000_000,
            regs: Regs { rip: 0x1000, rflags: 2, ..Default::default() },
            sregs: Sregs { efer: 0x500, gdt: (0x500, 31), ..Default::default() },
            xsave: vec![1; XSAVE_BYTES].into(),
            xcrs: vec![(0, 7)],
            debugregs: vec![2; DEBUGREGS_BYTES].into(),
            lapic: vec![3; LAPIC_BYTES].into(),
            msrs: vec![(0x10, 77), (0x174, 1)],
            events: vec![4; EVENTS_BYTES].into(),
            cpuid: vec![CpuidEntry { function: 1, ecx: 9, ..Default::default() }],
        }
    }

    fn machine() -> MachineState {
        MachineState {
            vcpus: vec![vcpu(0), vcpu(1)],
            vm: VmState {
                irqchips: vec![vec![5; IRQCHIP_BYTES].into(); IRQCHIPS],
                pit: vec![6; PIT_BYTES].into(),
                clock_ns: 1 << 40,
                realtime_ns: 1 << 60,
            },
            serial: SerialState { registers: [1; 9], input: vec![b'x'].into() },
            power: PowerState { pm1_enable: 1, pm1_control: 2 },
        }
    }

    #[test]
    fn what_was_encoded_is_decoded() {
        let state = machine();
        assert_eq!(MachineState::decode(&state.encode().unwrap()).unwrap(), state);
    }

    #[test]
    fn what_cannot_be_is_refused() {
        let check = |change: &dyn Fn(&mut MachineState), expected: X86StateError| {
            let mut state = machine();
            change(&mut state);
            assert_eq!(MachineState::decode(&state.encode().unwrap()), Err(expected));
        };
        check(&|state| state.vcpus.clear(), X86StateError::Value { field: "vcpus", value: 0 });
        check(&|state| state.vcpus.swap(0, 1), X86StateError::VcpuOrder(1));
        let short = X86StateError::Bytes { field: "lapic", given: 1, expected: LAPIC_BYTES };
        check(&|state| state.vcpus[1].lapic = vec![0].into(), short);
        let chips = X86StateError::Bytes { field: "irqchips", given: 2, expected: IRQCHIPS };
        check(&|state| drop(state.vm.irqchips.pop()), chips);
        let many = X86StateError::Entries { field: "msrs", given: MSRS_MAX + 1, max: MSRS_MAX };
        check(&|state| state.vcpus[0].msrs = vec![(1, 1); MSRS_MAX + 1], many);
        check(&|state| state.vcpus[0].mp_state = 99, X86StateError::Value { field: "mp_state", value: 99 });
    }

    proptest! {
        #[test]
        fn damaged_bytes_never_panic(at in any::<prop::sample::Index>(), byte in any::<u8>(), cut in any::<bool>()) {
            let mut bytes = machine().encode().unwrap();
            let at = at.index(bytes.len());
            bytes[at] = byte;
            if cut {
                bytes.truncate(at);
            }
            if let Ok(state) = MachineState::decode(&bytes) {
                prop_assert!(state.validate().is_ok());
            }
        }
    }
}
