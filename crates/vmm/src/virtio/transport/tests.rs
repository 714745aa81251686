//! The transport as a guest sees it, with a device that echoes.

use dormouse_snapshot::devices::virtio::{DeviceKind, DeviceState, VirtioState};
use proptest::prelude::*;
use virtio_bindings::virtio_mmio as mmio;
use vm_memory::{Bytes, GuestAddress};

use super::*;
use crate::virtio::device::Progress;
use crate::virtio::rng::Rng;
use crate::virtio::testing::{Buffer, Driver, memory};

/// Answers each request with the bytes it got, reversed.
#[derive(Default)]
struct Echo {
    config: [u8; 8],
    activations: u32,
}

impl VirtioDevice for Echo {
    fn kind(&self) -> DeviceKind {
        DeviceKind::Rng
    }

    fn features(&self) -> u64 {
        1 << 3
    }

    fn queue_sizes(&self) -> &'static [u16] {
        &[16, 8]
    }

    fn config(&self) -> Vec<u8> {
        self.config.to_vec()
    }

    fn write_config(&mut self, offset: usize, data: &[u8]) {
        if let Some(part) = offset.checked_add(data.len()).and_then(|end| self.config.get_mut(offset..end)) {
            part.copy_from_slice(data);
        }
    }

    fn activate(&mut self, _rings: &mut Rings) {
        self.activations += 1;
    }

    fn queue_event(&mut self, rings: &mut Rings, index: usize) -> Result<Progress, DeviceError> {
        rings.serve(index, |memory, chain| {
            let mut bytes = vec![0; chain.readable_bytes.min(chain.writable_bytes) as usize];
            let broken = |source| DeviceError::Queue { index, source };
            chain.read(memory, 0, &mut bytes).map_err(broken)?;
            bytes.reverse();
            chain.write(memory, 0, &bytes).map_err(broken)?;
            Ok(u32::try_from(bytes.len()).unwrap())
        })
    }

    fn save(&self) -> DeviceState {
        DeviceState::Rng
    }
}

fn attached() -> Driver {
    let memory = memory();
    Driver::attach(Endpoint::new(Box::new(Echo::default()), memory.clone()).unwrap(), memory)
}

fn booted(features: u64) -> Driver {
    let mut driver = attached();
    driver.initialise(features);
    driver
}

fn echo(driver: &mut Driver, queue: usize, bytes: &[u8]) -> Vec<u8> {
    let request = [Buffer::Out(bytes.to_vec()), Buffer::In(bytes.len())];
    let (written, content) = driver.request(queue, &request);
    assert_eq!(written as usize, bytes.len());
    content
}

fn activations(driver: &Driver) -> u32 {
    driver.endpoint.with_device(|echo: &mut Echo, _| echo.activations).unwrap()
}

#[test]
fn identity_and_features() {
    let driver = attached();
    assert_eq!(driver.get(mmio::VIRTIO_MMIO_MAGIC_VALUE), 0x7472_6976);
    assert_eq!(driver.get(mmio::VIRTIO_MMIO_VERSION), 2);
    assert_eq!(driver.get(mmio::VIRTIO_MMIO_DEVICE_ID), 4);
    assert_eq!(driver.offered(), 1 << 3 | 1 << 28 | 1 << 29 | 1 << 32);
    assert_eq!(driver.get(mmio::VIRTIO_MMIO_SHM_LEN_LOW), u32::MAX);
    driver.set(mmio::VIRTIO_MMIO_DEVICE_FEATURES_SEL, 2);
    assert_eq!(driver.get(mmio::VIRTIO_MMIO_DEVICE_FEATURES), 0);
}

#[test]
fn requests_are_answered_with_and_without_event_idx() {
    for features in [u64::MAX, 1 << 32] {
        let mut driver = booted(features);
        for round in 0..100_u8 {
            assert_eq!(echo(&mut driver, usize::from(round % 2), &[1, 2, round]), [round, 2, 1]);
            assert!(driver.interrupted());
            assert_eq!(driver.get(mmio::VIRTIO_MMIO_INTERRUPT_STATUS), 1);
            driver.set(mmio::VIRTIO_MMIO_INTERRUPT_ACK, 1);
            assert_eq!(driver.get(mmio::VIRTIO_MMIO_INTERRUPT_STATUS), 0);
        }
        assert_eq!(driver.endpoint.failure(), None);
    }
}

#[test]
fn a_guest_that_wants_no_interrupt_gets_none() {
    let mut driver = booted(1 << 32);
    let no_interrupt = GuestAddress(0x10_8000);
    driver.memory.write_obj(1_u16, no_interrupt).unwrap();
    echo(&mut driver, 0, &[1]);
    assert!(!driver.interrupted());
    driver.memory.write_obj(0_u16, no_interrupt).unwrap();
    echo(&mut driver, 0, &[1]);
    assert!(driver.interrupted());
}

#[test]
fn without_version_1_and_with_unknown_features_there_is_no_features_ok() {
    for (low, high) in [(1 << 3, 0), (1 << 4, 1), (0, 3)] {
        let driver = attached();
        for status in [1, 3] {
            driver.set(mmio::VIRTIO_MMIO_STATUS, status);
        }
        for (select, half) in [(0, low), (1, high)] {
            driver.set(mmio::VIRTIO_MMIO_DRIVER_FEATURES_SEL, select);
            driver.set(mmio::VIRTIO_MMIO_DRIVER_FEATURES, half);
        }
        driver.set(mmio::VIRTIO_MMIO_STATUS, 11);
        assert_eq!(driver.get(mmio::VIRTIO_MMIO_STATUS), 3);
    }
}

#[test]
fn a_reset_forgets_everything_and_the_driver_may_come_again() {
    let mut driver = booted(u64::MAX);
    echo(&mut driver, 0, &[1]);
    driver.set(mmio::VIRTIO_MMIO_STATUS, 0);
    for register in
        [mmio::VIRTIO_MMIO_STATUS, mmio::VIRTIO_MMIO_QUEUE_READY, mmio::VIRTIO_MMIO_INTERRUPT_STATUS]
    {
        assert_eq!(driver.get(register), 0);
    }
    driver.kick(0);
    driver.initialise(u64::MAX);
    assert_eq!(echo(&mut driver, 0, &[1, 2]), [2, 1]);
    assert_eq!(activations(&driver), 2);
}

#[test]
fn a_live_queue_does_not_move() {
    let mut driver = booted(u64::MAX);
    driver.set(mmio::VIRTIO_MMIO_QUEUE_SEL, 0);
    driver.set(mmio::VIRTIO_MMIO_QUEUE_DESC_LOW, 0x50_0000);
    driver.set(mmio::VIRTIO_MMIO_QUEUE_NUM, 2);
    driver.set(mmio::VIRTIO_MMIO_QUEUE_READY, 0);
    assert_eq!(driver.get(mmio::VIRTIO_MMIO_QUEUE_READY), 1);
    assert_eq!(echo(&mut driver, 0, &[1, 2]), [2, 1]);
}

#[test]
fn the_configuration_space_has_an_end() {
    let driver = booted(u64::MAX);
    driver.write_bus(0x100, &[1, 2, 3, 4, 5, 6, 7, 8]);
    assert_eq!(driver.config::<2>(6), [7, 8]);
    assert_eq!(driver.config::<4>(6), [0; 4], "over the end");
    driver.write_bus(u64::MAX, &[9; 8]);
    driver.write_bus(0x106, &[9; 4]);
    assert_eq!(driver.config::<8>(0), [1, 2, 3, 4, 5, 6, 7, 8]);
}

/// What a lying guest does to queue 0, and the reason that is told.
fn check_lie(reason: &str, lie: impl Fn(&mut Driver)) {
    let mut driver = booted(u64::MAX);
    lie(&mut driver);
    driver.kick(0);
    let failure = driver.endpoint.failure().expect("the lie is found");
    assert!(failure.contains(reason), "{failure}");
    assert_eq!(driver.get(mmio::VIRTIO_MMIO_STATUS), 0x4f);
    assert_eq!(driver.get(mmio::VIRTIO_MMIO_INTERRUPT_STATUS) & 2, 2);
    driver.kick(1);
    driver.initialise(u64::MAX);
    assert_eq!(echo(&mut driver, 0, &[1, 2]), [2, 1], "usable after a reset");
}

#[test]
fn a_guest_that_lies_stops_its_device_with_a_reason() {
    let good = 0x100_0000;
    check_lie("loops", |driver| {
        driver.write_descriptor(0, 0, (good, 8, 1, 1));
        driver.write_descriptor(0, 1, (good, 8, 1, 0));
        driver.make_available(0, 0);
    });
    check_lie("leaves its table", |driver| {
        driver.write_descriptor(0, 0, (good, 8, 1, 16));
        driver.make_available(0, 0);
    });
    check_lie("leaves its table", |driver| driver.make_available(0, 0xffff));
    check_lie("more chains than", |driver| driver.set_avail_index(0, 17));
    check_lie("not in RAM", |driver| {
        driver.write_descriptor(0, 0, (u64::MAX - 4, 8, 0, 0));
        driver.make_available(0, 0);
    });
    check_lie("not in RAM", |driver| {
        driver.write_descriptor(0, 0, (good, u32::MAX, 2, 0));
        driver.make_available(0, 0);
    });
    check_lie("over 4 GiB", |driver| {
        driver.write_descriptor(0, 0, (0, 64 << 20, 1, 0));
        for index in 0..15 {
            driver.write_descriptor(0, index, (0, 64 << 20, 1, index + 1));
        }
        driver.write_descriptor(0, 15, (0, u32::MAX, 2, 0));
        driver.make_available(0, 0);
    });
    check_lie("behind one to write", |driver| {
        driver.write_descriptor(0, 0, (good, 8, 3, 1));
        driver.write_descriptor(0, 1, (good, 8, 0, 0));
        driver.make_available(0, 0);
    });
    // An indirect table within an indirect table, and one with half an entry.
    for len in [16, 17] {
        check_lie("empty", |driver| {
            let table: Vec<u8> =
                [&good.to_le_bytes()[..], &16_u32.to_le_bytes(), &4_u16.to_le_bytes(), &[0; 2]].concat();
            driver.memory.write_slice(&table, GuestAddress(good)).unwrap();
            driver.write_descriptor(0, 0, (good, len, 4, 0));
            driver.make_available(0, 0);
        });
    }
    check_lie("over 1024 descriptors", |driver| {
        for index in 0..2000_u16 {
            let entry: Vec<u8> = [
                &good.to_le_bytes()[..],
                &1_u32.to_le_bytes(),
                &1_u16.to_le_bytes(),
                &(index + 1).to_le_bytes(),
            ]
            .concat();
            driver.memory.write_slice(&entry, GuestAddress(good + u64::from(index) * 16)).unwrap();
        }
        driver.write_descriptor(0, 0, (good, 2000 * 16, 4, 0));
        driver.make_available(0, 0);
    });
}

#[test]
fn rings_outside_ram_stop_the_device_at_once() {
    let driver = attached();
    for status in [1, 3] {
        driver.set(mmio::VIRTIO_MMIO_STATUS, status);
    }
    driver.set(mmio::VIRTIO_MMIO_DRIVER_FEATURES_SEL, 1);
    driver.set(mmio::VIRTIO_MMIO_DRIVER_FEATURES, 1);
    driver.set(mmio::VIRTIO_MMIO_STATUS, 11);
    driver.set(mmio::VIRTIO_MMIO_QUEUE_DESC_HIGH, 0xffff_ffff);
    driver.set(mmio::VIRTIO_MMIO_QUEUE_AVAIL_LOW, 0x1000);
    driver.set(mmio::VIRTIO_MMIO_QUEUE_READY, 1);
    driver.set(mmio::VIRTIO_MMIO_STATUS, 15);
    assert_eq!(driver.get(mmio::VIRTIO_MMIO_STATUS), 0x4f);
    assert!(driver.endpoint.failure().unwrap().contains("not in RAM"));
}

fn moved(driver: Driver) -> Driver {
    let state = driver.endpoint.save();
    let bytes = state.encode().unwrap();
    let state = VirtioState::decode(&bytes).unwrap();
    let endpoint = Endpoint::restore(&state, Box::new(Echo::default()), driver.memory.clone()).unwrap();
    assert_eq!(endpoint.save(), state, "what is saved again is the same");
    endpoint.resume();
    driver.moved_to(endpoint)
}

#[test]
fn a_restored_device_goes_on_where_it_stopped() {
    for features in [u64::MAX, 1 << 32] {
        let mut driver = booted(features);
        for round in 0..50_u8 {
            assert_eq!(echo(&mut driver, 1, &[1, round]), [round, 1]);
            // A request that was made available, and whose notification is lost.
            driver.submit(0, &[Buffer::Out(vec![5, 6]), Buffer::In(2)]);
            driver = moved(driver);
            driver.run();
            assert_eq!(driver.used(0).unwrap().2, [6, 5]);
        }
        assert!(driver.interrupted());
    }
}

#[test]
fn an_interrupt_that_was_not_acknowledged_fires_again_after_a_restore() {
    let mut driver = booted(u64::MAX);
    echo(&mut driver, 0, &[1]);
    assert!(driver.interrupted());
    let driver = moved(driver);
    assert!(driver.interrupted());
    driver.set(mmio::VIRTIO_MMIO_INTERRUPT_ACK, 1);
    assert!(!moved(driver).interrupted());
}

#[test]
fn every_step_of_the_initialisation_can_be_saved() {
    let driver = moved(attached());
    driver.set(mmio::VIRTIO_MMIO_STATUS, 1);
    let driver = moved(driver);
    driver.set(mmio::VIRTIO_MMIO_STATUS, 3);
    driver.set(mmio::VIRTIO_MMIO_DRIVER_FEATURES_SEL, 1);
    driver.set(mmio::VIRTIO_MMIO_DRIVER_FEATURES, 1);
    let driver = moved(driver);
    driver.set(mmio::VIRTIO_MMIO_STATUS, 11);
    driver.set(mmio::VIRTIO_MMIO_QUEUE_NUM, 4);
    let driver = moved(driver);
    assert_eq!(driver.get(mmio::VIRTIO_MMIO_STATUS), 11);
    driver.set(mmio::VIRTIO_MMIO_STATUS, 15);
    assert_eq!(activations(&moved(driver)), 1);
}

#[test]
fn a_device_that_gives_up_ends_the_machine_it_is_part_of() {
    let (mut driver, ending) = (booted(u64::MAX), Arc::new(Ending::new().unwrap()));
    driver.endpoint.end_with(&ending);
    assert_eq!(echo(&mut driver, 0, &[1, 2]), [2, 1]);
    assert_eq!(ending.reason(), None);
    driver.set_avail_index(0, 300);
    driver.kick(0);
    let Some(EndReason::Device { why }) = ending.reason() else { panic!("{:?}", ending.reason()) };
    assert!(why.starts_with("rng: the guest broke queue 0"), "{why}");
    // One that had given up before it got into this machine.
    let late = Arc::new(Ending::new().unwrap());
    let copy = Endpoint::restore(&driver.endpoint.save(), Box::new(Echo::default()), driver.memory.clone());
    copy.unwrap().end_with(&late);
    assert!(matches!(late.reason(), Some(EndReason::Device { .. })), "{:?}", late.reason());
}

#[test]
fn a_device_that_gave_up_stays_so_until_it_is_reset() {
    let mut driver = booted(u64::MAX);
    driver.set_avail_index(0, 17);
    driver.kick(0);
    let mut driver = moved(driver);
    assert_eq!(driver.get(mmio::VIRTIO_MMIO_STATUS), 0x4f);
    driver.initialise(u64::MAX);
    assert_eq!(echo(&mut driver, 0, &[1, 2]), [2, 1]);
}

#[test]
fn a_state_of_something_else_is_refused() {
    let driver = booted(u64::MAX);
    let good = driver.endpoint.save();
    let refused = |change: &dyn Fn(&mut VirtioState)| {
        let mut state = good.clone();
        change(&mut state);
        Endpoint::restore(&state, Box::new(Echo::default()), driver.memory.clone()).is_err()
    };
    assert!(!refused(&|_| {}));
    assert!(refused(&|state| state.queues[0].desc_table = 1 << 40));
    assert!(refused(&|state| state.queues[0].desc_table = 1));
    assert!(refused(&|state| state.queues[0].size = 3));
    assert!(refused(&|state| state.queues[0].size_max = 32));
    assert!(refused(&|state| state.queues.truncate(1)));
    assert!(refused(&|state| state.driver_features |= 1 << 40));
    assert!(refused(&|state| state.status = 0x10));
    assert!(refused(&|state| state.status = 4));
    let other = Endpoint::restore(&good, Box::new(Rng), driver.memory.clone());
    assert!(matches!(other, Err(RestoreError::Device("queue sizes"))));
}

proptest! {
    #[test]
    fn no_access_to_registers_does_harm(
        accesses in prop::collection::vec((0..0x120_u64, any::<[u8; 8]>(), 0..9_usize, any::<bool>()), 0..200),
    ) {
        let mut driver = attached();
        for (offset, data, len, write) in accesses {
            let mut data = data;
            if write {
                driver.write_bus(offset, &data[..len]);
            } else {
                driver.read_bus(offset, &mut data[..len]);
            }
            driver.run();
        }
        let state = driver.endpoint.save();
        prop_assert_eq!(VirtioState::decode(&state.encode().unwrap()), Ok(state));
        driver.initialise(u64::MAX);
        prop_assert_eq!(echo(&mut driver, 0, &[1, 2]), [2, 1]);
    }

    #[test]
    fn no_descriptor_does_harm(
        descriptors in prop::collection::vec(
            (prop_oneof![0..0x700_0000_u64, any::<u64>()], prop_oneof![0..64_u32, any::<u32>()], 0..8_u16, 0..18_u16),
            16,
        ),
        heads in prop::collection::vec(0..18_u16, 0..32),
        index in prop::option::of(any::<u16>()),
    ) {
        let mut driver = booted(u64::MAX);
        for (at, descriptor) in (0..).zip(descriptors) {
            driver.write_descriptor(0, at, descriptor);
        }
        for head in heads {
            driver.make_available(0, head);
        }
        if let Some(index) = index {
            driver.set_avail_index(0, index);
        }
        driver.kick(0);
        let failed = driver.endpoint.failure().is_some();
        prop_assert_eq!(failed, driver.get(mmio::VIRTIO_MMIO_STATUS) == 0x4f);
    }
}
