//! virtio-rng: the host kernel's random bytes for the guest.

use std::io;

use dormouse_snapshot::devices::virtio::{DeviceKind, DeviceState};

use super::device::{DeviceError, Progress, Rings, VirtioDevice};

/// One request gets at most this: the guest asks again if it wants more.
const REQUEST_BYTES_MAX: usize = 4096;

/// Keeps nothing: two guests restored from one snapshot get different bytes.
#[derive(Debug, Default)]
pub struct Rng;

impl VirtioDevice for Rng {
    fn kind(&self) -> DeviceKind {
        DeviceKind::Rng
    }

    fn features(&self) -> u64 {
        0
    }

    fn queue_sizes(&self) -> &'static [u16] {
        &[64]
    }

    fn config(&self) -> Vec<u8> {
        Vec::new()
    }

    fn queue_event(&mut self, rings: &mut Rings, index: usize) -> Result<Progress, DeviceError> {
        rings.serve(index, |memory, chain| {
            let mut bytes = [0; REQUEST_BYTES_MAX];
            let wanted = REQUEST_BYTES_MAX.min(chain.writable_bytes as usize);
            let bytes = &mut bytes[..wanted];
            getrandom::fill(bytes).map_err(|error| DeviceError::Host {
                doing: "getting random bytes",
                source: io::Error::other(error.to_string()),
            })?;
            chain.write(memory, 0, bytes).map_err(|source| DeviceError::Queue { index, source })?;
            Ok(u32::try_from(wanted).unwrap_or(0))
        })
    }

    fn save(&self) -> DeviceState {
        DeviceState::Rng
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::virtio::Endpoint;
    use crate::virtio::testing::{Buffer, Driver, memory};

    fn driver() -> Driver {
        let memory = memory();
        let endpoint = Endpoint::new(Box::new(Rng), memory.clone()).unwrap();
        Driver::boot(endpoint, memory, u64::MAX)
    }

    #[test]
    fn buffers_are_filled_with_different_bytes() {
        let mut driver = driver();
        let (bytes, first) = driver.request(0, &[Buffer::In(64), Buffer::In(100)]);
        assert_eq!((bytes, first.len()), (164, 164));
        let (_, second) = driver.request(0, &[Buffer::In(164)]);
        assert_ne!(first, second);
        assert!(first.iter().any(|byte| *byte != first[0]));
        assert!(driver.interrupted());
    }

    #[test]
    fn one_request_is_bounded_and_one_without_a_buffer_gets_nothing() {
        let mut driver = driver();
        assert_eq!(driver.request(0, &[Buffer::In(0x1_0000)]).0, 4096);
        assert_eq!(driver.request(0, &[Buffer::Out(vec![1; 8])]).0, 0);
    }
}
