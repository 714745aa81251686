//! CPUID: what the guest's processors say of themselves.
//!
//! It starts from what KVM supports here. Taken out is what this machine does not save (nested virtualisation,
//! performance counters) or what does not survive a fork (asynchronous page faults: one in flight would be lost).
//! A *template* narrows it to a named baseline, so that a snapshot runs on every host that has at least that: the
//! x86-64 psABI's microarchitecture levels and nothing beside them.

use dormouse_snapshot::devices::x86::CpuidEntry;
use kvm_bindings::{CpuId, KVM_CPUID_FLAG_SIGNIFCANT_INDEX, KVM_MAX_CPUID_ENTRIES, kvm_cpuid_entry2};
use kvm_ioctls::{Cap, Kvm};

use crate::error::VmError;

/// Which of the host's features a guest sees.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum CpuTemplate {
    /// All that can be saved and restored.
    #[default]
    Host,
    /// SSE4.2, POPCNT, CMPXCHG16B: any server since 2009.
    X86_64V2,
    /// And AVX2, BMI, FMA, MOVBE, XSAVE: any server since 2015 or so.
    X86_64V3,
}

impl CpuTemplate {
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Host => "host",
            Self::X86_64V2 => "x86-64-v2",
            Self::X86_64V3 => "x86-64-v3",
        }
    }

    /// What a host must have to offer it.
    fn required(self) -> &'static [&'static str] {
        match self {
            Self::Host => &[],
            Self::X86_64V2 => &V3_FEATURES[..V2_COUNT],
            Self::X86_64V3 => V3_FEATURES,
        }
    }

    #[must_use]
    pub fn from_name(name: &str) -> Option<Self> {
        [Self::Host, Self::X86_64V2, Self::X86_64V3].into_iter().find(|template| template.as_str() == name)
    }
}

/// Those of x86-64-v2 come first.
const V3_FEATURES: &[&str] = &[
    "cx16", "lahf_lm", "popcnt", "sse3", "sse4_1", "sse4_2", "ssse3", "avx", "avx2", "bmi1", "bmi2", "f16c",
    "fma", "lzcnt", "movbe", "xsave",
];
const V2_COUNT: usize = 7;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Reg {
    Eax,
    Ebx,
    Ecx,
    Edx,
}

fn bits(list: &[u32]) -> u32 {
    list.iter().fold(0, |mask, bit| mask | 1 << bit)
}

/// What the guests of `template` see on this host; every vCPU's own numbers are still to be put in.
pub fn supported(kvm: &Kvm, template: CpuTemplate) -> Result<CpuId, VmError> {
    let mut cpuid = kvm.get_supported_cpuid(KVM_MAX_CPUID_ENTRIES).map_err(VmError::kvm("tell its CPUID"))?;
    let lacking = lacking(template, &save(&cpuid));
    if !lacking.is_empty() {
        return Err(VmError::Baseline { template: template.as_str(), lacking: lacking.join(", ") });
    }
    let tsc_deadline = kvm.check_extension(Cap::TscDeadlineTimer);
    for entry in cpuid.as_mut_slice() {
        if entry.function == 1 && tsc_deadline {
            entry.ecx |= 1 << 24;
        }
        take_out(entry);
        if template != CpuTemplate::Host {
            narrow(entry, template);
        }
    }
    Ok(cpuid)
}

/// What a host with these features lacks for `template`.
fn lacking(template: CpuTemplate, host: &[CpuidEntry]) -> Vec<&'static str> {
    let names = feature_names(host);
    let is_there = |name: &str| names.iter().any(|there| there == name);
    template.required().iter().copied().filter(|name| !is_there(name)).collect()
}

/// What no guest gets.
fn take_out(entry: &mut kvm_cpuid_entry2) {
    const VMX: u32 = 5;
    const PDCM: u32 = 15;
    const SVM: u32 = 2;
    /// Performance counter extensions of AMD: core, NB, L2I.
    const AMD_COUNTERS: [u32; 3] = [23, 24, 28];
    /// KVM_FEATURE_ASYNC_PF, _VMEXIT, _INT.
    const ASYNC_FAULTS: [u32; 3] = [4, 10, 14];
    match entry.function {
        1 => {
            entry.ecx |= 1 << 31;
            entry.ecx &= !bits(&[VMX, PDCM]);
        }
        0xa | 0x8000_000a | 0x8000_0022 => clear(entry),
        0x4000_0001 => entry.eax &= !bits(&ASYNC_FAULTS),
        0x8000_0001 => entry.ecx &= !(bits(&AMD_COUNTERS) | 1 << SVM),
        _ => {}
    }
}

fn clear(entry: &mut kvm_cpuid_entry2) {
    (entry.eax, entry.ebx, entry.ecx, entry.edx) = (0, 0, 0, 0);
}

/// x87 to SSE2 and what every 64-bit processor has, in leaf 1 and (its first half) again in AMD's leaf.
const EDX_BASE: u32 = 0x078b_fbff;
/// HTT: several logical processors.
const EDX_HTT: u32 = 1 << 28;

fn narrow(entry: &mut kvm_cpuid_entry2, template: CpuTemplate) {
    let v3 = template == CpuTemplate::X86_64V3;
    let with_v3 = |base: &[u32], more: &[u32]| bits(base) | if v3 { bits(more) } else { 0 };
    match (entry.function, entry.index) {
        (0, _) => entry.eax = entry.eax.min(0xd),
        (1, _) => {
            // SSE3, SSSE3, CX16, SSE4.1, SSE4.2, x2APIC, POPCNT, TSC deadline, hypervisor; FMA, MOVBE, XSAVE, AVX, F16C.
            entry.ecx &= with_v3(&[0, 9, 13, 19, 20, 21, 23, 24, 31], &[12, 22, 26, 27, 28, 29]);
            entry.edx &= EDX_BASE | EDX_HTT;
        }
        (7, 0) => {
            // BMI1, AVX2, BMI2.
            entry.ebx &= with_v3(&[], &[3, 5, 8]);
            (entry.eax, entry.ecx, entry.edx) = (0, 0, 0);
        }
        (0xd, 0) if v3 => {
            // x87, SSE, AVX; the sizes follow from what the guest switches on.
            const AVX_AREA_BYTES: u32 = 832;
            entry.eax &= 0b111;
            entry.ecx = AVX_AREA_BYTES;
            entry.edx = 0;
        }
        (0xd, 2) if v3 => {}
        // Always running APIC timer.
        (6, _) => (entry.eax, entry.ebx, entry.ecx, entry.edx) = (entry.eax & 1 << 2, 0, 0, 0),
        (2, _) | (4, _) => {}
        (3 | 5..=0xff, _) => clear(entry),
        (0x8000_0000, _) => entry.eax = entry.eax.min(0x8000_0008),
        (0x8000_0001, _) => {
            // LAHF, CMP legacy (topology); LZCNT.
            entry.ecx &= with_v3(&[0, 1], &[5]);
            // Leaf 1's on AMD, SYSCALL, NX, long mode.
            entry.edx &= EDX_BASE & !bits(&[19, 25, 26]) | bits(&[11, 20, 29]);
        }
        (0x8000_0007, _) => clear(entry),
        (0x8000_0008, _) => (entry.ebx, entry.edx) = (0, 0),
        (0x8000_0009.., _) => clear(entry),
        _ => {}
    }
}

/// `cpuid` for vCPU `id` of `count`: its APIC id, and a topology of one package with `count` cores of one thread.
#[must_use]
pub fn for_vcpu(cpuid: &CpuId, id: usize, count: usize) -> CpuId {
    let mut own = cpuid.clone();
    let id = u32::try_from(id).unwrap_or(0);
    let count = u32::try_from(count).unwrap_or(1).max(1);
    // Bits of an APIC id that number the cores of a package.
    let core_bits = count.next_power_of_two().trailing_zeros();
    for entry in own.as_mut_slice() {
        place(entry, id, count, core_bits);
    }
    own
}

fn place(entry: &mut kvm_cpuid_entry2, id: u32, count: u32, core_bits: u32) {
    match entry.function {
        1 => {
            entry.ebx = entry.ebx & 0x0000_ffff | id << 24 | count.next_power_of_two() << 16;
            entry.edx = entry.edx & !EDX_HTT | if count > 1 { EDX_HTT } else { 0 };
        }
        // Intel's caches: the first two levels belong to one core, the third to all.
        4 if entry.eax & 0x1f != 0 => {
            let level = entry.eax >> 5 & 7;
            let sharing = if level < 3 { 0 } else { count - 1 };
            entry.eax = entry.eax & 0x3fff | sharing << 14 | ((1 << core_bits) - 1) << 26;
        }
        0xb | 0x1f => topology_level(entry, id, count, core_bits),
        0x8000_0008 => entry.ecx = entry.ecx & !0xf0ff | core_bits << 12 | (count - 1),
        // AMD's caches.
        0x8000_001d if entry.eax & 0x1f != 0 => {
            let level = entry.eax >> 5 & 7;
            let sharing = if level < 3 { 0 } else { count - 1 };
            entry.eax = entry.eax & 0x3fff | sharing << 14;
        }
        0x8000_001e => (entry.eax, entry.ebx, entry.ecx) = (id, id & 0xff, 0),
        _ => {}
    }
}

fn topology_level(entry: &mut kvm_cpuid_entry2, id: u32, count: u32, core_bits: u32) {
    const THREAD: u32 = 1;
    const CORE: u32 = 2;
    let (shift, processors, kind) = match entry.index {
        0 => (0, 1, THREAD),
        1 => (core_bits, count, CORE),
        _ => (0, 0, 0),
    };
    (entry.eax, entry.ebx) = (shift, processors);
    (entry.ecx, entry.edx) = (entry.index | kind << 8, id);
}

/// For the snapshot.
#[must_use]
pub fn save(cpuid: &CpuId) -> Vec<CpuidEntry> {
    let save = |entry: &kvm_cpuid_entry2| CpuidEntry {
        function: entry.function,
        index: entry.index,
        flags: entry.flags,
        eax: entry.eax,
        ebx: entry.ebx,
        ecx: entry.ecx,
        edx: entry.edx,
    };
    cpuid.as_slice().iter().map(save).collect()
}

/// From the snapshot; `None`: more entries than KVM takes.
#[must_use]
pub fn load(saved: &[CpuidEntry]) -> Option<CpuId> {
    let load = |entry: &CpuidEntry| kvm_cpuid_entry2 {
        function: entry.function,
        index: entry.index,
        flags: entry.flags,
        eax: entry.eax,
        ebx: entry.ebx,
        ecx: entry.ecx,
        edx: entry.edx,
        ..Default::default()
    };
    CpuId::from_entries(&saved.iter().map(load).collect::<Vec<_>>()).ok()
}

/// Registers whose bits are features, one each.
const FEATURES: &[(u32, u32, Reg)] = &[
    (1, 0, Reg::Ecx),
    (1, 0, Reg::Edx),
    (7, 0, Reg::Ebx),
    (7, 0, Reg::Ecx),
    (7, 0, Reg::Edx),
    (7, 1, Reg::Eax),
    (7, 1, Reg::Edx),
    (0xd, 0, Reg::Eax),
    (0xd, 1, Reg::Eax),
    (0x8000_0001, 0, Reg::Ecx),
    (0x8000_0001, 0, Reg::Edx),
    (0x8000_0007, 0, Reg::Edx),
    (0x8000_0008, 0, Reg::Ebx),
];

/// Bits that tell of state or topology and not of what the processor can do: OSXSAVE, hypervisor; HTT; OSPKE.
const NO_FEATURES: &[(u32, Reg, u32)] = &[
    (1, Reg::Ecx, 1 << 27 | 1 << 31),
    (1, Reg::Edx, EDX_HTT),
    (7, Reg::Ecx, 1 << 4),
    (0x8000_0001, Reg::Ecx, 1 << 1),
];

/// Names of the features that people know; the others are called by their place.
const NAMES: &[(u32, u32, Reg, u32, &str)] = &[
    (1, 0, Reg::Ecx, 0, "sse3"),
    (1, 0, Reg::Ecx, 1, "pclmulqdq"),
    (1, 0, Reg::Ecx, 9, "ssse3"),
    (1, 0, Reg::Ecx, 12, "fma"),
    (1, 0, Reg::Ecx, 13, "cx16"),
    (1, 0, Reg::Ecx, 19, "sse4_1"),
    (1, 0, Reg::Ecx, 20, "sse4_2"),
    (1, 0, Reg::Ecx, 22, "movbe"),
    (1, 0, Reg::Ecx, 23, "popcnt"),
    (1, 0, Reg::Ecx, 25, "aes"),
    (1, 0, Reg::Ecx, 26, "xsave"),
    (1, 0, Reg::Ecx, 28, "avx"),
    (1, 0, Reg::Ecx, 29, "f16c"),
    (1, 0, Reg::Ecx, 30, "rdrand"),
    (7, 0, Reg::Ebx, 0, "fsgsbase"),
    (7, 0, Reg::Ebx, 3, "bmi1"),
    (7, 0, Reg::Ebx, 5, "avx2"),
    (7, 0, Reg::Ebx, 7, "smep"),
    (7, 0, Reg::Ebx, 8, "bmi2"),
    (7, 0, Reg::Ebx, 9, "erms"),
    (7, 0, Reg::Ebx, 16, "avx512f"),
    (7, 0, Reg::Ebx, 17, "avx512dq"),
    (7, 0, Reg::Ebx, 18, "rdseed"),
    (7, 0, Reg::Ebx, 19, "adx"),
    (7, 0, Reg::Ebx, 20, "smap"),
    (7, 0, Reg::Ebx, 29, "sha_ni"),
    (7, 0, Reg::Ebx, 30, "avx512bw"),
    (7, 0, Reg::Ebx, 31, "avx512vl"),
    (7, 0, Reg::Ecx, 3, "pku"),
    (7, 0, Reg::Ecx, 9, "vaes"),
    (0x8000_0001, 0, Reg::Ecx, 0, "lahf_lm"),
    (0x8000_0001, 0, Reg::Ecx, 5, "lzcnt"),
    (0x8000_0001, 0, Reg::Edx, 11, "syscall"),
    (0x8000_0001, 0, Reg::Edx, 20, "nx"),
    (0x8000_0001, 0, Reg::Edx, 26, "pdpe1gb"),
    (0x8000_0001, 0, Reg::Edx, 27, "rdtscp"),
    (0x8000_0001, 0, Reg::Edx, 29, "lm"),
    (0x8000_0007, 0, Reg::Edx, 8, "invariant_tsc"),
];

/// The features that a guest with this CPUID sees, by name, sorted.
#[must_use]
pub fn feature_names(entries: &[CpuidEntry]) -> Vec<String> {
    let mut names: Vec<String> = FEATURES
        .iter()
        .flat_map(|(function, index, reg)| {
            let value = feature_bits(entries, *function, *index, *reg);
            (0..u32::BITS)
                .filter(move |bit| value & 1 << bit != 0)
                .map(|bit| name(*function, *index, *reg, bit))
        })
        .collect();
    names.sort();
    names
}

/// What of `wanted` is not in `offered`, by name: a guest that saw it must not be restored there.
#[must_use]
pub fn missing(wanted: &[CpuidEntry], offered: &[CpuidEntry]) -> Vec<String> {
    let offered = feature_names(offered);
    feature_names(wanted).into_iter().filter(|name| !offered.contains(name)).collect()
}

fn feature_bits(entries: &[CpuidEntry], function: u32, index: u32, reg: Reg) -> u32 {
    let Some(entry) = entries.iter().find(|entry| {
        entry.function == function
            && (entry.flags & KVM_CPUID_FLAG_SIGNIFCANT_INDEX == 0 || entry.index == index)
    }) else {
        return 0;
    };
    let value = match reg {
        Reg::Eax => entry.eax,
        Reg::Ebx => entry.ebx,
        Reg::Ecx => entry.ecx,
        Reg::Edx => entry.edx,
    };
    let ignored = NO_FEATURES.iter().find(|(of, in_reg, _)| *of == function && *in_reg == reg);
    value & !ignored.map_or(0, |(_, _, mask)| *mask)
}

fn name(function: u32, index: u32, reg: Reg, bit: u32) -> String {
    let known = NAMES
        .iter()
        .find(|(of, sub, in_reg, at, _)| (*of, *sub, *in_reg, *at) == (function, index, reg, bit));
    match known {
        Some((.., name)) => (*name).to_owned(),
        None => format!("cpuid-{function:x}-{index}-{reg:?}-{bit}").to_lowercase(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::vm::open_kvm;

    fn entry(function: u32, index: u32, registers: [u32; 4]) -> kvm_cpuid_entry2 {
        let [eax, ebx, ecx, edx] = registers;
        kvm_cpuid_entry2 { function, index, eax, ebx, ecx, edx, ..Default::default() }
    }

    #[test]
    fn templates_have_names() {
        for template in [CpuTemplate::Host, CpuTemplate::X86_64V2, CpuTemplate::X86_64V3] {
            assert_eq!(CpuTemplate::from_name(template.as_str()), Some(template));
        }
        assert_eq!(CpuTemplate::from_name("x86-64-v9"), None);
    }

    /// A processor with everything.
    fn everything(template: CpuTemplate) -> Vec<CpuidEntry> {
        let mut functions: Vec<(u32, u32)> = FEATURES.iter().map(|(of, index, _)| (*of, *index)).collect();
        functions.dedup();
        let narrowed = |(function, index)| {
            let mut all = entry(function, index, [u32::MAX; 4]);
            all.flags = KVM_CPUID_FLAG_SIGNIFCANT_INDEX;
            if template != CpuTemplate::Host {
                narrow(&mut all, template);
            }
            all
        };
        save(&CpuId::from_entries(&functions.into_iter().map(narrowed).collect::<Vec<_>>()).unwrap())
    }

    #[test]
    fn a_baseline_is_a_part_of_the_next() {
        let [v2, v3, host] =
            [CpuTemplate::X86_64V2, CpuTemplate::X86_64V3, CpuTemplate::Host].map(everything);
        assert_eq!(missing(&v2, &v3), Vec::<String>::new());
        assert_eq!(missing(&v3, &host), Vec::<String>::new());
        assert_eq!(lacking(CpuTemplate::X86_64V2, &v2), Vec::<&str>::new());
        assert_eq!(lacking(CpuTemplate::X86_64V3, &v3), Vec::<&str>::new());
        assert_eq!(lacking(CpuTemplate::X86_64V3, &v2), V3_FEATURES[V2_COUNT..]);
        let names = feature_names(&v3);
        for name in ["aes", "avx512f", "rdrand", "invariant_tsc", "pdpe1gb"] {
            assert!(!names.contains(&name.to_owned()), "{name}");
            assert!(feature_names(&host).contains(&name.to_owned()), "{name}");
        }
        assert_eq!(missing(&feature_entry(1 << 28), &feature_entry(0)), ["avx"]);
    }

    #[test]
    fn this_host_offers_what_it_has() {
        let kvm = open_kvm().unwrap();
        let names = feature_names(&save(&supported(&kvm, CpuTemplate::Host).unwrap()));
        for name in ["lm", "nx", "syscall"] {
            assert!(names.contains(&name.to_owned()), "{name} is not in {names:?}");
        }
    }

    fn feature_entry(ecx: u32) -> Vec<CpuidEntry> {
        vec![CpuidEntry { function: 1, ecx, ..Default::default() }]
    }

    #[test]
    fn what_is_not_saved_is_not_offered() {
        let mut leaf = entry(1, 0, [0, 0, u32::MAX, 0]);
        take_out(&mut leaf);
        assert_eq!(leaf.ecx, !(1 << 5 | 1 << 15));
        let mut leaf = entry(0x8000_0001, 0, [0, 0, u32::MAX, 0]);
        take_out(&mut leaf);
        assert_eq!(leaf.ecx & 1 << 2, 0, "SVM");
    }

    #[test]
    fn each_vcpu_has_its_place() {
        let base = CpuId::from_entries(&[
            entry(1, 0, [0, 0xffff_ffff, 0, 0]),
            entry(0xb, 0, [9; 4]),
            entry(0xb, 1, [9; 4]),
            entry(0x8000_0008, 0, [0x3030, 0, 0xf0ff, 0]),
        ])
        .unwrap();
        let own = for_vcpu(&base, 2, 3);
        let [leaf, threads, cores, sizes] = own.as_slice() else { panic!("{own:?}") };
        assert_eq!(leaf.ebx, 0x0204_ffff);
        assert_eq!(leaf.edx, EDX_HTT);
        assert_eq!((threads.eax, threads.ebx, threads.ecx, threads.edx), (0, 1, 0x100, 2));
        assert_eq!((cores.eax, cores.ebx, cores.ecx, cores.edx), (2, 3, 0x201, 2));
        assert_eq!(sizes.ecx, 0x2002);
        assert_eq!(for_vcpu(&base, 0, 1).as_slice()[0].edx, 0);
        assert_eq!(load(&save(&own)).unwrap().as_slice(), own.as_slice());
    }
}
