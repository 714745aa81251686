//! Where everything lies in the guest's physical address space.
//!
//! ```text
//! 0            9_fc00      10_0000        c000_0000            1_0000_0000
//! | low RAM     | ACPI, BIOS | RAM (kernel) | hole: devices, APIC | RAM above 4 GiB
//! ```

/// RAM below 4 GiB ends here at the latest; the rest of it lies above 4 GiB.
pub const HOLE_START: u64 = 0xc000_0000;
/// End of the hole: 4 GiB.
pub const HOLE_END: u64 = 0x1_0000_0000;

/// Registers of virtio-mmio device `n` start at `VIRTIO_MMIO_BASE + n * VIRTIO_MMIO_BYTES`.
pub const VIRTIO_MMIO_BASE: u64 = 0xd000_0000;
pub const VIRTIO_MMIO_BYTES: u64 = 0x1000;

/// Interrupts (GSIs) of the virtio-mmio slots: what neither the PIT (0), keyboard (1), cascade (2), COM1 (4),
/// RTC (8), SCI (9) nor the FPU (13) has taken.
pub const VIRTIO_IRQS: [u32; 16] = [5, 6, 7, 10, 11, 12, 14, 15, 16, 17, 18, 19, 20, 21, 22, 23];
/// As many virtio-mmio devices can there be.
pub const VIRTIO_SLOTS_MAX: usize = VIRTIO_IRQS.len();

/// Base address and interrupt of the virtio-mmio device in `slot`; `None`: there is no such slot.
#[must_use]
pub fn virtio_slot(slot: usize) -> Option<(u64, u32)> {
    let irq = *VIRTIO_IRQS.get(slot)?;
    Some((VIRTIO_MMIO_BASE + slot as u64 * VIRTIO_MMIO_BYTES, irq))
}

/// Boot structures, all in the first 640 KiB; nothing of them matters once the kernel runs.
pub const GDT_START: u64 = 0x500;
pub const ZERO_PAGE_START: u64 = 0x7000;
pub const BOOT_STACK: u64 = 0x8ff0;
/// One page for the fourth level, one for the third, then four with 2 MiB entries: 4 GiB one to one.
pub const PAGE_TABLES_START: u64 = 0x9000;
pub const CMDLINE_START: u64 = 0x2_0000;
/// The kernel command line with its final zero.
pub const CMDLINE_BYTES_MAX: usize = 0x1000;

/// End of the RAM that the memory map offers below 1 MiB.
pub const LOW_RAM_END: u64 = 0x9_fc00;
/// ACPI tables; the RSDP lies first, where a kernel looks for it by itself.
pub const ACPI_START: u64 = 0xe_0000;
pub const ACPI_BYTES_MAX: u64 = 0x2_0000;
/// Where RAM goes on, and the lowest address that a kernel is loaded to.
pub const HIGH_RAM_START: u64 = 0x10_0000;

pub const IOAPIC_BASE: u32 = 0xfec0_0000;
pub const LAPIC_BASE: u32 = 0xfee0_0000;
/// Three pages and one that VMX needs; no RAM and no device is there.
pub const TSS_START: u64 = 0xfffb_d000;
pub const IDENTITY_MAP_START: u64 = 0xfffb_c000;

pub const COM1_BASE: u16 = 0x3f8;
pub const COM1_IRQ: u32 = 4;
pub const SCI_IRQ: u16 = 9;
pub const I8042_BASE: u16 = 0x60;
pub const I8042_COMMAND: u16 = 0x64;
pub const RESET_PORT: u16 = 0xcf9;
/// ACPI's PM1a event block (status, enable) and behind it the control register.
pub const PM1A_EVENT: u16 = 0x600;
pub const PM1A_CONTROL: u16 = 0x604;
/// What the guest writes as sleep type to power off.
pub const SLEEP_TYPE_S5: u8 = 5;

/// As many vCPUs can there be.
pub const VCPUS_MAX: usize = 64;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slots_are_disjoint_and_lie_in_the_hole() {
        let mut seen = std::collections::BTreeSet::new();
        for slot in 0..VIRTIO_SLOTS_MAX {
            let (base, irq) = virtio_slot(slot).unwrap();
            assert!(base >= HOLE_START && base + VIRTIO_MMIO_BYTES <= u64::from(IOAPIC_BASE));
            assert!(seen.insert(irq) && irq < 24 && irq != u32::from(SCI_IRQ) && irq != COM1_IRQ);
        }
        assert_eq!(virtio_slot(VIRTIO_SLOTS_MAX), None);
        assert_eq!(virtio_slot(usize::MAX), None);
    }
}
