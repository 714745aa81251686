//! The ACPI tables: how the guest learns of its vCPUs, interrupt controllers and devices.
//!
//! RSDP → XSDT → FADT (→ DSDT, FACS), MADT. It is a full ACPI machine, not a "hardware-reduced" one: PICs, PIT and
//! IOAPIC are there. The DSDT describes COM1 and one virtio-mmio device (`LNRO0005`) for each slot in use.
//! Specification: ACPI 6.5.

use acpi_tables::aml::{
    Device, EISAName, IO, Interrupt, Memory32Fixed, Name, ONE, Package, Path, ResourceTemplate, Scope, ZERO,
};
use acpi_tables::facs::FACS;
use acpi_tables::fadt::{FADTBuilder, Flags, PmProfile};
use acpi_tables::gas::{AccessSize, AddressSpace, GAS};
use acpi_tables::madt::{EnabledStatus, IoApic, LocalInterruptController, MADT, ProcessorLocalApic};
use acpi_tables::rsdp::Rsdp;
use acpi_tables::sdt::Sdt;
use acpi_tables::xsdt::XSDT;
use acpi_tables::{Aml, AmlSink, aml_as_bytes};
use vm_memory::{Bytes, GuestAddress};
use zerocopy::{Immutable, IntoBytes};

use super::layout;
use crate::error::BootError;
use crate::memory::GuestMemory;

const OEM: [u8; 6] = *b"DORMSE";
const OEM_TABLE: [u8; 8] = *b"DORMOUSE";
const REVISION: u32 = 1;
/// Tables start on this boundary (the FACS needs it).
const ALIGN: usize = 64;
/// IA-PC boot flags of the FADT: no VGA, no CMOS clock; and by their absence no keyboard controller.
const BOOT_NO_VGA: u16 = 1 << 2;
const BOOT_NO_CMOS: u16 = 1 << 5;
const RESET_VALUE: u8 = 6;

/// Writes all tables for `vcpus` vCPUs and the first `slots` virtio slots; answers the RSDP's address.
pub fn write(memory: &GuestMemory, vcpus: usize, slots: usize) -> Result<u64, BootError> {
    let bytes = tables(vcpus, slots)?;
    if bytes.len() as u64 > layout::ACPI_BYTES_MAX {
        return Err(BootError::AcpiSize(bytes.len()));
    }
    memory
        .write_slice(&bytes, GuestAddress(layout::ACPI_START))
        .map_err(|_| BootError::Write { what: "an ACPI table", address: layout::ACPI_START })?;
    Ok(layout::ACPI_START)
}

/// All tables as they lie from `ACPI_START` on, the RSDP first.
fn tables(vcpus: usize, slots: usize) -> Result<Vec<u8>, BootError> {
    let mut area = Area { bytes: vec![0; Rsdp::len()] };
    let facs = area.add(&FACS::new())?;
    let dsdt = area.add(&dsdt(slots))?;
    let fadt = area.add(&fadt(dsdt, facs).finalize())?;
    let madt = area.add(&madt(vcpus)?)?;
    let mut xsdt = XSDT::new(OEM, OEM_TABLE, REVISION);
    xsdt.add_entry(fadt.into());
    xsdt.add_entry(madt.into());
    let xsdt = area.add(&xsdt)?;
    let mut rsdp = Vec::new();
    Rsdp::new(OEM, xsdt.into()).to_aml_bytes(&mut rsdp);
    area.bytes[..rsdp.len()].copy_from_slice(&rsdp);
    Ok(area.bytes)
}

struct Area {
    bytes: Vec<u8>,
}

impl Area {
    /// Appends a table; answers its guest-physical address.
    fn add(&mut self, table: &dyn Aml) -> Result<u32, BootError> {
        self.bytes.resize(self.bytes.len().next_multiple_of(ALIGN), 0);
        let address = layout::ACPI_START + self.bytes.len() as u64;
        table.to_aml_bytes(&mut self.bytes);
        u32::try_from(address).map_err(|_| BootError::AcpiSize(self.bytes.len()))
    }
}

fn fadt(dsdt: u32, facs: u32) -> FADTBuilder {
    let io = |bits: u8, access: AccessSize, port: u16| {
        GAS::new(AddressSpace::SystemIo, bits, 0, access, port.into())
    };
    let mut fadt = FADTBuilder::new(OEM, OEM_TABLE, REVISION)
        .dsdt_64(dsdt.into())
        .firmware_ctrl_32(facs)
        .preferred_pm_profile(PmProfile::EnterpriseServer)
        .flag(Flags::Wbinvd)
        .flag(Flags::ProcC1)
        .flag(Flags::PwrButton)
        .flag(Flags::SlpButton)
        .flag(Flags::FixRtc)
        .flag(Flags::ResetRegSup)
        .flag(Flags::Headless);
    fadt.dsdt = dsdt.into();
    fadt.sci_int = layout::SCI_IRQ.into();
    fadt.pm1a_evt_blk = u32::from(layout::PM1A_EVENT).into();
    fadt.pm1a_cnt_blk = u32::from(layout::PM1A_CONTROL).into();
    fadt.pm1_evt_len = 4;
    fadt.pm1_cnt_len = 2;
    fadt.x_pm1a_evt_blk = io(32, AccessSize::WordAccess, layout::PM1A_EVENT);
    fadt.x_pm1a_cnt_blk = io(16, AccessSize::WordAccess, layout::PM1A_CONTROL);
    // Latencies above 100 and 1000 say that there is neither C2 nor C3.
    fadt.p_lvl2_lat = 0xfff.into();
    fadt.p_lvl3_lat = 0xfff.into();
    fadt.iapc_boot_arch = (BOOT_NO_VGA | BOOT_NO_CMOS).into();
    fadt.reset_reg = io(8, AccessSize::ByteAccess, layout::RESET_PORT);
    fadt.reset_value = RESET_VALUE;
    fadt
}

/// ISA interrupt `source` arrives at pin `gsi`, in another way than ISA's.
#[repr(C, packed)]
#[derive(Clone, Copy, IntoBytes, Immutable)]
struct SourceOverride {
    kind: u8,
    length: u8,
    bus: u8,
    source: u8,
    gsi: u32,
    flags: u16,
}
aml_as_bytes!(SourceOverride);

/// The non-maskable interrupt is LINT1 of each local APIC.
#[repr(C, packed)]
#[derive(Clone, Copy, IntoBytes, Immutable)]
struct LocalNmi {
    kind: u8,
    length: u8,
    processor: u8,
    flags: u16,
    lint: u8,
}
aml_as_bytes!(LocalNmi);

fn madt(vcpus: usize) -> Result<MADT, BootError> {
    const KIND_OVERRIDE: u8 = 2;
    const KIND_LOCAL_NMI: u8 = 4;
    const ALL_PROCESSORS: u8 = 0xff;
    /// Polarity and trigger mode: active high, edge; active high, level.
    const HIGH_LEVEL: u16 = 0b1101;
    const PIT_GSI: u32 = 2;
    let lapic = LocalInterruptController::Address(layout::LAPIC_BASE);
    let mut madt = MADT::new(OEM, OEM_TABLE, REVISION, lapic);
    for id in 0..vcpus {
        let id = u8::try_from(id).map_err(|_| BootError::AcpiSize(vcpus))?;
        madt.add_structure(ProcessorLocalApic::new(id, id, EnabledStatus::Enabled));
    }
    madt.add_structure(IoApic::new(0, layout::IOAPIC_BASE, 0));
    let pin = |source: u8, gsi: u32, flags: u16| SourceOverride {
        kind: KIND_OVERRIDE,
        length: 10,
        bus: 0,
        source,
        gsi,
        flags,
    };
    // KVM routes the PIT's interrupt 0 to pin 2, as PCs do.
    madt.add_structure(pin(0, PIT_GSI, 0));
    madt.add_structure(pin(9, layout::SCI_IRQ.into(), HIGH_LEVEL));
    madt.add_structure(LocalNmi {
        kind: KIND_LOCAL_NMI,
        length: 6,
        processor: ALL_PROCESSORS,
        flags: 0,
        lint: 1,
    });
    Ok(madt)
}

fn dsdt(slots: usize) -> Sdt {
    let mut aml = Vec::new();
    let sleep_type: u8 = layout::SLEEP_TYPE_S5;
    Name::new("\\_S5_".into(), &Package::new(vec![&sleep_type, &sleep_type, &ZERO, &ZERO]))
        .to_aml_bytes(&mut aml);
    com1(&mut aml);
    for slot in 0..slots {
        virtio(slot, &mut aml);
    }
    const HEADER_BYTES: u32 = 36;
    let mut dsdt = Sdt::new(*b"DSDT", HEADER_BYTES, 2, OEM, OEM_TABLE, REVISION);
    dsdt.append_slice(&aml);
    dsdt
}

fn com1(aml: &mut Vec<u8>) {
    let ports = IO::new(layout::COM1_BASE, layout::COM1_BASE, 1, 8);
    let interrupt = Interrupt::new(true, true, false, false, layout::COM1_IRQ);
    let resources = ResourceTemplate::new(vec![&ports, &interrupt]);
    let hid = Name::new("_HID".into(), &EISAName::new("PNP0501"));
    let uid = Name::new("_UID".into(), &ZERO);
    let crs = Name::new("_CRS".into(), &resources);
    let device = Device::new("COM1".into(), vec![&hid, &uid, &crs]);
    Scope::new("\\_SB_".into(), vec![&device]).to_aml_bytes(aml);
}

/// One virtio-mmio device; the kernel's driver matches the name `LNRO0005`.
fn virtio(slot: usize, aml: &mut Vec<u8>) {
    let Some((base, gsi)) = layout::virtio_slot(slot) else { return };
    let (Ok(base), Ok(bytes), Ok(uid)) =
        (u32::try_from(base), u32::try_from(layout::VIRTIO_MMIO_BYTES), u8::try_from(slot))
    else {
        return;
    };
    let registers = Memory32Fixed::new(true, base, bytes);
    let interrupt = Interrupt::new(true, true, false, false, gsi);
    let resources = ResourceTemplate::new(vec![&registers, &interrupt]);
    let hid = Name::new("_HID".into(), &"LNRO0005");
    let uid = Name::new("_UID".into(), &uid);
    let coherent = Name::new("_CCA".into(), &ONE);
    let crs = Name::new("_CRS".into(), &resources);
    let device = Device::new(Path::new(&format!("VR{slot:02}")), vec![&hid, &uid, &coherent, &crs]);
    Scope::new("\\_SB_".into(), vec![&device]).to_aml_bytes(aml);
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Signature and bytes of the table at a guest-physical address.
    fn table(bytes: &[u8], address: u64) -> (&[u8], &[u8]) {
        let start = usize::try_from(address - layout::ACPI_START).unwrap();
        let length = u32::from_le_bytes(bytes[start + 4..start + 8].try_into().unwrap()) as usize;
        (&bytes[start..start + 4], &bytes[start..start + length])
    }

    fn sum(bytes: &[u8]) -> u8 {
        bytes.iter().fold(0, |sum, byte| sum.wrapping_add(*byte))
    }

    fn word(bytes: &[u8], at: usize) -> u64 {
        u64::from_le_bytes(bytes[at..at + 8].try_into().unwrap())
    }

    #[test]
    fn every_table_is_found_and_its_checksum_is_right() {
        let bytes = tables(4, 5).unwrap();
        assert_eq!(&bytes[..8], b"RSD PTR ");
        assert_eq!(sum(&bytes[..20]), 0);
        assert_eq!(sum(&bytes[..36]), 0);
        let (signature, xsdt) = table(&bytes, word(&bytes, 24));
        assert_eq!(signature, b"XSDT");
        assert_eq!(sum(xsdt), 0);
        assert_eq!(xsdt.len(), 36 + 2 * 8);
        let (signature, fadt) = table(&bytes, word(xsdt, 36));
        assert_eq!((signature, sum(fadt)), (&b"FACP"[..], 0));
        let (signature, madt) = table(&bytes, word(xsdt, 44));
        assert_eq!((signature, sum(madt)), (&b"APIC"[..], 0));
        assert_eq!(madt.len(), 44 + 4 * 8 + 12 + 2 * 10 + 6);
        let (signature, dsdt) = table(&bytes, word(fadt, 140));
        assert_eq!((signature, sum(dsdt)), (&b"DSDT"[..], 0));
        let devices = dsdt.windows(8).filter(|window| window == b"LNRO0005").count();
        assert_eq!(devices, 5);
        let facs = u32::from_le_bytes(fadt[36..40].try_into().unwrap());
        assert_eq!(table(&bytes, facs.into()).0, b"FACS");
        assert_eq!(facs % 64, 0);
    }

    #[test]
    fn the_largest_machine_fits() {
        let bytes = tables(layout::VCPUS_MAX, layout::VIRTIO_SLOTS_MAX).unwrap();
        assert!((bytes.len() as u64) < layout::ACPI_BYTES_MAX);
        assert!(tables(300, 1).is_err());
    }
}
