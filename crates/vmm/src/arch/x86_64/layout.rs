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
