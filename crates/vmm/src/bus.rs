//! A bus: ranges of addresses, each answered by one device.
//!
//! There are two: MMIO (guest-physical addresses) and port I/O. Both are filled before the first vCPU runs and
//! never change afterwards, so that vCPU threads look devices up without a lock. An address that nobody
//! answers reads as all ones and swallows writes, as on real hardware.

use std::sync::{Arc, Mutex, PoisonError};

/// What answers a range of addresses. Called on vCPU threads: must return soon and never wait for the guest.
pub trait BusDevice: Send {
    /// Fills `data` with what the guest reads at `offset` of the device's range.
    fn read(&mut self, offset: u64, data: &mut [u8]);
    /// Takes what the guest writes at `offset` of the device's range.
    fn write(&mut self, offset: u64, data: &[u8]);
}

/// A device on a bus; the device thread and vCPU threads share it.
pub type SharedDevice = Arc<Mutex<dyn BusDevice>>;

#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum BusError {
    #[error("the range at {base:#x} with {len:#x} bytes is empty or ends beyond the last address")]
    Range { base: u64, len: u64 },
    #[error("the range at {base:#x} with {len:#x} bytes overlaps the device at {other:#x}")]
    Overlap { base: u64, len: u64, other: u64 },
}

struct Entry {
    base: u64,
    /// The last address that belongs to it.
    last: u64,
    device: SharedDevice,
}

/// Devices by address.
#[derive(Default)]
pub struct Bus {
    /// Sorted by base, disjoint.
    entries: Vec<Entry>,
}

impl Bus {
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Lets `device` answer `len` addresses from `base` on.
    pub fn insert(&mut self, base: u64, len: u64, device: SharedDevice) -> Result<(), BusError> {
        let last = len
            .checked_sub(1)
            .and_then(|rest| base.checked_add(rest))
            .ok_or(BusError::Range { base, len })?;
        if let Some(other) = self.entries.iter().find(|entry| entry.base <= last && base <= entry.last) {
            return Err(BusError::Overlap { base, len, other: other.base });
        }
        let at = self.entries.partition_point(|entry| entry.base < base);
        self.entries.insert(at, Entry { base, last, device });
        Ok(())
    }

    /// False: nobody answers there, and `data` is all ones.
    pub fn read(&self, address: u64, data: &mut [u8]) -> bool {
        let Some((device, offset)) = self.find(address, data.len()) else {
            data.fill(0xff);
            return false;
        };
        device.lock().unwrap_or_else(PoisonError::into_inner).read(offset, data);
        true
    }

    /// False: nobody answers there.
    pub fn write(&self, address: u64, data: &[u8]) -> bool {
        let Some((device, offset)) = self.find(address, data.len()) else {
            return false;
        };
        device.lock().unwrap_or_else(PoisonError::into_inner).write(offset, data);
        true
    }

    /// The device that answers all `len` addresses from `address` on, and the offset in its range.
    fn find(&self, address: u64, len: usize) -> Option<(&SharedDevice, u64)> {
        let at = self.entries.partition_point(|entry| entry.base <= address).checked_sub(1)?;
        let entry = self.entries.get(at)?;
        let last = address.checked_add((len as u64).checked_sub(1)?)?;
        (last <= entry.last).then(|| (&entry.device, address - entry.base))
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[derive(Default)]
    struct Recorder {
        written: Vec<(u64, Vec<u8>)>,
    }

    impl BusDevice for Recorder {
        fn read(&mut self, offset: u64, data: &mut [u8]) {
            data.fill(u8::try_from(offset & 0x7f).unwrap());
        }

        fn write(&mut self, offset: u64, data: &[u8]) {
            self.written.push((offset, data.to_vec()));
        }
    }

    fn recorder() -> Arc<Mutex<Recorder>> {
        Arc::new(Mutex::new(Recorder::default()))
    }

    #[test]
    fn each_address_has_one_device() {
        let mut bus = Bus::new();
        let (low, high) = (recorder(), recorder());
        bus.insert(0x2000, 0x10, high.clone()).unwrap();
        bus.insert(0x1000, 0x10, low.clone()).unwrap();
        assert!(bus.write(0x100f, &[1]));
        assert!(bus.write(0x2004, &[1, 2, 3, 4]));
        assert!(!bus.write(0x1010, &[1]), "behind the first");
        assert!(!bus.write(0x200e, &[1, 2, 3, 4]), "over the end");
        assert_eq!(low.lock().unwrap().written, [(0xf, vec![1])]);
        assert_eq!(high.lock().unwrap().written, [(4, vec![1, 2, 3, 4])]);
        let mut data = [0; 2];
        assert!(!bus.read(0x3000, &mut data));
        assert_eq!(data, [0xff; 2]);
    }

    #[test]
    fn overlaps_and_wrapping_ranges_are_refused() {
        let mut bus = Bus::new();
        bus.insert(0x1000, 0x1000, recorder()).unwrap();
        for (base, len) in [(0x1000, 1), (0xfff, 2), (0x1fff, 1), (0, u64::MAX)] {
            let overlap = Err(BusError::Overlap { base, len, other: 0x1000 });
            assert_eq!(bus.insert(base, len, recorder()), overlap);
        }
        assert!(matches!(bus.insert(1, 0, recorder()), Err(BusError::Range { .. })));
        assert!(matches!(bus.insert(u64::MAX, 2, recorder()), Err(BusError::Range { .. })));
        bus.insert(u64::MAX, 1, recorder()).unwrap();
        assert!(bus.write(u64::MAX, &[1]));
        assert!(!bus.write(u64::MAX, &[1, 2]), "wraps around");
    }

    proptest! {
        #[test]
        fn an_access_reaches_a_device_exactly_if_it_lies_within(
            base in any::<u64>(), len in 1..0x2000_u64, address in any::<u64>(), near in 0..0x3000_u64,
            bytes in 1..16_usize, close in any::<bool>(),
        ) {
            prop_assume!(base.checked_add(len - 1).is_some());
            let address = if close { base.wrapping_add(near).wrapping_sub(0x800) } else { address };
            let mut bus = Bus::new();
            bus.insert(base, len, recorder()).unwrap();
            let end = u128::from(address) + bytes as u128;
            let within = address >= base && end <= u128::from(base) + u128::from(len);
            prop_assert_eq!(bus.write(address, &vec![0; bytes]), within);
        }
    }
}
