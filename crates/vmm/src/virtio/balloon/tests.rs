//! A balloon as a guest sees it.

use std::sync::{Arc, Mutex};

use dormouse_snapshot::devices::virtio::VirtioState;
use proptest::prelude::*;
use virtio_bindings::virtio_mmio as mmio;
use vm_memory::Bytes;

use super::*;
use crate::virtio::Endpoint;
use crate::virtio::testing::{Buffer, Driver, RAM_BYTES, memory};

const DEFLATE: usize = 1;
const PAGE: usize = 4096;
const FREE: u64 = 0x500_0000;

type Given = Arc<Mutex<Vec<(u64, u64)>>>;

fn bench() -> (Driver, Given) {
    let given = Given::default();
    let memory = memory();
    let endpoint = Endpoint::new(Box::new(Balloon::new(recording(&given))), memory.clone()).unwrap();
    (Driver::boot(endpoint, memory, u64::MAX), given)
}

fn recording(given: &Given) -> Discard {
    let given = Arc::clone(given);
    Box::new(move |_, address, bytes| {
        given.lock().unwrap().push((address.0, bytes));
        Ok(())
    })
}

fn pages(numbers: &[u32]) -> Buffer {
    Buffer::Out(numbers.iter().flat_map(|number| number.to_le_bytes()).collect())
}

#[test]
fn inflated_pages_go_back_in_runs_and_deflated_ones_cost_nothing() {
    let (mut driver, given) = bench();
    driver.request(INFLATE, &[pages(&[7, 5, 6, 100, 5])]);
    assert_eq!(*given.lock().unwrap(), [(5 * 4096, 3 * 4096), (100 * 4096, 4096)]);
    driver.request(DEFLATE, &[pages(&[5, 6, 7])]);
    assert_eq!(given.lock().unwrap().len(), 2);
    let discarded = driver.endpoint.with_device(|balloon: &mut Balloon, _| balloon.discarded_bytes());
    assert_eq!(discarded, Some(4 * 4096));
}

#[test]
fn pages_outside_ram_are_refused_and_stop_the_device() {
    for number in [u32::MAX, u32::try_from(RAM_BYTES / PAGE).unwrap()] {
        let (mut driver, given) = bench();
        driver.submit(INFLATE, &[pages(&[number])]);
        driver.kick(INFLATE);
        assert!(driver.endpoint.failure().unwrap().contains("not in RAM"));
        assert_eq!(*given.lock().unwrap(), []);
    }
    let (mut driver, given) = bench();
    driver.submit(INFLATE, &[pages(&[1; REQUEST_PAGES_MAX + 1])]);
    driver.kick(INFLATE);
    assert!(driver.endpoint.failure().unwrap().contains("too many pages"));
    assert_eq!(*given.lock().unwrap(), []);
}

#[test]
fn reported_ranges_go_back_by_whole_pages() {
    let (mut driver, given) = bench();
    for (at, address, bytes) in
        [(0, FREE, 0x20_0000), (1, FREE + 1, 0x3000), (2, FREE + 1, 0x1000), (3, FREE, 10)]
    {
        driver.write_descriptor(REPORTING, at, (address, bytes, if at == 3 { 2 } else { 3 }, at + 1));
    }
    driver.make_available(REPORTING, 0);
    driver.kick(REPORTING);
    assert_eq!(*given.lock().unwrap(), [(FREE, 0x20_0000), (FREE + 0x1000, 0x2000)]);
}

#[test]
fn discarded_pages_are_zero_and_their_neighbours_untouched() {
    let memory = memory();
    let around = GuestAddress(FREE - PAGE as u64);
    memory.write_slice(&vec![7; 5 * PAGE], around).unwrap();
    discard_pages(&memory, GuestAddress(FREE), 3 * PAGE as u64).unwrap();
    let mut content = vec![1; 5 * PAGE];
    memory.read_slice(&mut content, around).unwrap();
    let expected = [vec![7; PAGE], vec![0; 3 * PAGE], vec![7; PAGE]].concat();
    assert!(content == expected);
}

#[test]
fn a_target_is_told_and_the_answer_kept_across_a_restore() {
    let (driver, given) = bench();
    let generation = driver.get(mmio::VIRTIO_MMIO_CONFIG_GENERATION);
    driver.endpoint.with_device(|balloon: &mut Balloon, rings| balloon.set_target_pages(1000, rings));
    assert!(driver.interrupted());
    assert_eq!(driver.get(mmio::VIRTIO_MMIO_INTERRUPT_STATUS), 2);
    assert_ne!(driver.get(mmio::VIRTIO_MMIO_CONFIG_GENERATION), generation);
    assert_eq!(driver.config(0), 1000_u32.to_le_bytes());
    driver.write_bus(0x104, &700_u32.to_le_bytes());
    driver.write_bus(0x100, &1_u32.to_le_bytes());

    let state = driver.endpoint.save();
    let state = VirtioState::decode(&state.encode().unwrap()).unwrap();
    let DeviceState::Balloon(of_balloon) = &state.device else { panic!("a balloon's state") };
    let balloon = Balloon::restore(of_balloon, recording(&given));
    assert_eq!(balloon.actual_pages(), 700);
    let endpoint = Endpoint::restore(&state, Box::new(balloon), driver.memory.clone()).unwrap();
    endpoint.resume();
    let mut driver = driver.moved_to(endpoint);
    assert_eq!(driver.config(0), 1000_u32.to_le_bytes());
    driver.request(INFLATE, &[pages(&[9])]);
    assert_eq!(*given.lock().unwrap(), [(9 * 4096, 4096)]);
}

proptest! {
    #[test]
    fn only_ram_is_ever_given(
        numbers in prop::collection::vec(prop_oneof![0..30_000_u32, any::<u32>()], 0..300),
        ranges in prop::collection::vec((any::<u32>(), any::<u32>()), 1..5),
    ) {
        let (mut driver, given) = bench();
        driver.submit(INFLATE, &[pages(&numbers)]);
        driver.kick(INFLATE);
        let mut last = 0;
        for (at, (address, bytes)) in (0..).zip(&ranges) {
            driver.write_descriptor(REPORTING, at, (u64::from(*address), *bytes, 3, at + 1));
            last = at;
        }
        driver.write_descriptor(REPORTING, last, (FREE, 4096, 2, 0));
        driver.make_available(REPORTING, 0);
        driver.kick(REPORTING);
        for (address, bytes) in given.lock().unwrap().iter() {
            prop_assert!(address % 4096 == 0 && bytes % 4096 == 0);
            prop_assert!(address + bytes <= RAM_BYTES as u64);
        }
    }
}
