//! The registers (VIRTIO 1.2, 4.2.2). Accesses that the specification does not know read as zero and write nothing.

use dormouse_snapshot::devices::virtio::QueueState;
use virtio_bindings::virtio_config::VIRTIO_CONFIG_S_FEATURES_OK;
use virtio_bindings::virtio_mmio as mmio;

use super::status::{self, DRIVER, DRIVER_OK, FAILED, FEATURES_OK, NEEDS_RESET, Step};
use super::{Shared, VERSION_1, lock};

const MAGIC: u32 = u32::from_le_bytes(*b"virt");
const VERSION: u32 = 2;
const VENDOR: u32 = u32::from_le_bytes(*b"dorm");
/// `SHMLenLow` and `SHMLenHigh`: reads as -1 where there is no shared memory.
const NO_SHARED_MEMORY: u32 = u32::MAX;

const _: () = assert!(VIRTIO_CONFIG_S_FEATURES_OK == FEATURES_OK as u32);

/// What the guest wrote.
pub struct Registers {
    pub device_features_select: u32,
    pub driver_features_select: u32,
    pub queue_select: u32,
    pub driver_features: u64,
    pub status: u8,
    /// As set up by the guest; once they are live, `Rings` has them.
    pub queues: Vec<QueueState>,
}

impl Registers {
    pub fn new(queue_sizes: &[u16]) -> Self {
        Self {
            device_features_select: 0,
            driver_features_select: 0,
            queue_select: 0,
            driver_features: 0,
            status: 0,
            queues: queue_sizes.iter().copied().map(QueueState::fresh).collect(),
        }
    }

    pub fn reset(&mut self) {
        let sizes: Vec<u16> = self.queues.iter().map(|queue| queue.size_max).collect();
        *self = Self::new(&sizes);
    }

    fn queue(&self) -> Option<&QueueState> {
        self.queues.get(usize::try_from(self.queue_select).ok()?)
    }

    /// The selected queue, if this is the time to set it up.
    fn queue_mut(&mut self) -> Option<&mut QueueState> {
        let setup = self.status & (FEATURES_OK | DRIVER_OK | FAILED) == FEATURES_OK;
        let index = usize::try_from(self.queue_select).ok()?;
        self.queues.get_mut(index).filter(|_| setup)
    }

    fn write_driver_features(&mut self, value: u32) {
        let negotiating = self.status & (DRIVER | FEATURES_OK | FAILED) == DRIVER;
        if !negotiating {
            return;
        }
        match self.driver_features_select {
            0 => self.driver_features = self.driver_features & !0xffff_ffff | u64::from(value),
            1 => self.driver_features = self.driver_features & 0xffff_ffff | u64::from(value) << 32,
            _ => {}
        }
    }

    fn write_queue(&mut self, offset: u32, value: u32) {
        let Some(queue) = self.queue_mut() else { return };
        let low = |address: &mut u64, alignment: u32| {
            if value.is_multiple_of(alignment) {
                *address = *address & !0xffff_ffff | u64::from(value);
            }
        };
        let high = |address: &mut u64| *address = *address & 0xffff_ffff | u64::from(value) << 32;
        match offset {
            mmio::VIRTIO_MMIO_QUEUE_READY => queue.ready = value & 1 != 0,
            // What is live or ready keeps its size and place.
            _ if queue.ready => {}
            mmio::VIRTIO_MMIO_QUEUE_NUM => {
                let size = u16::try_from(value).ok();
                let fits = |size: &u16| size.is_power_of_two() && *size <= queue.size_max;
                queue.size = size.filter(fits).unwrap_or(queue.size);
            }
            mmio::VIRTIO_MMIO_QUEUE_DESC_LOW => low(&mut queue.desc_table, 16),
            mmio::VIRTIO_MMIO_QUEUE_DESC_HIGH => high(&mut queue.desc_table),
            mmio::VIRTIO_MMIO_QUEUE_AVAIL_LOW => low(&mut queue.avail_ring, 2),
            mmio::VIRTIO_MMIO_QUEUE_AVAIL_HIGH => high(&mut queue.avail_ring),
            mmio::VIRTIO_MMIO_QUEUE_USED_LOW => low(&mut queue.used_ring, 4),
            mmio::VIRTIO_MMIO_QUEUE_USED_HIGH => high(&mut queue.used_ring),
            _ => {}
        }
    }
}

/// The half of `value` that a select register asks for.
fn half(value: u64, select: u32) -> u32 {
    let half = match select {
        0 => value & 0xffff_ffff,
        1 => value >> 32,
        _ => 0,
    };
    u32::try_from(half).unwrap_or(0)
}

impl Shared {
    pub(super) fn read(&self, offset: u64, data: &mut [u8]) {
        data.fill(0);
        if let Some(offset) = config_offset(offset) {
            self.read_config(offset, data);
        } else if let (Ok(offset), 4) = (u32::try_from(offset), data.len()) {
            data.copy_from_slice(&self.read_register(offset).to_le_bytes());
        }
    }

    fn read_register(&self, offset: u32) -> u32 {
        // The guest reads this one at every interrupt: no lock.
        if offset == mmio::VIRTIO_MMIO_INTERRUPT_STATUS {
            return self.interrupt.status();
        }
        let registers = lock(&self.registers);
        match offset {
            mmio::VIRTIO_MMIO_MAGIC_VALUE => MAGIC,
            mmio::VIRTIO_MMIO_VERSION => VERSION,
            mmio::VIRTIO_MMIO_DEVICE_ID => self.kind.number(),
            mmio::VIRTIO_MMIO_VENDOR_ID => VENDOR,
            mmio::VIRTIO_MMIO_DEVICE_FEATURES => {
                half(Self::offered(&*lock(&self.cell).device), registers.device_features_select)
            }
            mmio::VIRTIO_MMIO_QUEUE_NUM_MAX => registers.queue().map_or(0, |queue| u32::from(queue.size_max)),
            mmio::VIRTIO_MMIO_QUEUE_READY => registers.queue().map_or(0, |queue| u32::from(queue.ready)),
            mmio::VIRTIO_MMIO_STATUS => {
                let needs_reset = if self.interrupt.needs_reset() { NEEDS_RESET } else { 0 };
                u32::from(registers.status | needs_reset)
            }
            mmio::VIRTIO_MMIO_SHM_LEN_LOW | mmio::VIRTIO_MMIO_SHM_LEN_HIGH => NO_SHARED_MEMORY,
            mmio::VIRTIO_MMIO_CONFIG_GENERATION => self.interrupt.generation(),
            _ => 0,
        }
    }

    fn read_config(&self, offset: usize, data: &mut [u8]) {
        let config = lock(&self.cell).device.config();
        if let Some(end) = offset.checked_add(data.len())
            && let Some(part) = config.get(offset..end)
        {
            data.copy_from_slice(part);
        }
    }

    pub(super) fn write(&self, offset: u64, data: &[u8]) {
        if let Some(offset) = config_offset(offset) {
            let configurable = lock(&self.registers).status & (DRIVER | FAILED) == DRIVER;
            if configurable {
                lock(&self.cell).device.write_config(offset, data);
            }
        } else if let (Ok(offset), Ok(value)) = (u32::try_from(offset), <[u8; 4]>::try_from(data)) {
            self.write_register(offset, u32::from_le_bytes(value));
        }
    }

    fn write_register(&self, offset: u32, value: u32) {
        match offset {
            mmio::VIRTIO_MMIO_INTERRUPT_ACK => return self.interrupt.acknowledge(value),
            // Only reached where no ioeventfd listens.
            mmio::VIRTIO_MMIO_QUEUE_NOTIFY => {
                return self.notify(usize::try_from(value).unwrap_or(usize::MAX));
            }
            _ => {}
        }
        let registers = &mut *lock(&self.registers);
        match offset {
            mmio::VIRTIO_MMIO_DEVICE_FEATURES_SEL => registers.device_features_select = value,
            mmio::VIRTIO_MMIO_DRIVER_FEATURES => registers.write_driver_features(value),
            mmio::VIRTIO_MMIO_DRIVER_FEATURES_SEL => registers.driver_features_select = value,
            mmio::VIRTIO_MMIO_QUEUE_SEL => registers.queue_select = value,
            mmio::VIRTIO_MMIO_STATUS => self.write_status(registers, value),
            _ => registers.write_queue(offset, value),
        }
    }

    fn write_status(&self, registers: &mut Registers, value: u32) {
        // Upper bits do not exist; of the lower, NEEDS_RESET is not the guest's.
        let Ok(written) = u8::try_from(value) else { return };
        let offered = Self::offered(&*lock(&self.cell).device);
        let features = registers.driver_features;
        let fit = features & !offered == 0 && features & VERSION_1 != 0;
        match status::step(registers.status, written & !NEEDS_RESET, fit) {
            // Writing back only NEEDS_RESET is no reset.
            Step::Reset if written != 0 => {}
            Step::Reset => self.reset(registers),
            Step::Status { status, activate } => {
                registers.status = status;
                if activate {
                    self.activate(registers);
                }
            }
        }
    }
}

fn config_offset(offset: u64) -> Option<usize> {
    usize::try_from(offset.checked_sub(u64::from(mmio::VIRTIO_MMIO_CONFIG))?).ok()
}
