//! A network card as a guest sees it; a pair of packet sockets stands for the tap.

use std::cell::Cell;

use dormouse_snapshot::devices::virtio::VirtioState;
use proptest::prelude::*;
use rustix::net::{AddressFamily, SendFlags, SocketFlags, SocketType, send, socketpair};

use super::*;
use crate::virtio::Endpoint;
use crate::virtio::testing::{Buffer, Driver, memory};

const MAC: [u8; 6] = [2, 0, 0, 0, 0, 1];

struct Bench {
    driver: Driver,
    wire: OwnedFd,
}

fn tap() -> (OwnedFd, OwnedFd) {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None).unwrap()
}

/// A tap with bare frames, and a guest without mergeable buffers.
fn bench() -> Bench {
    let (tap, wire) = tap();
    bench_of(Net::new(tap, MAC).unwrap(), wire, !MERGEABLE)
}

fn bench_of(net: Net, wire: OwnedFd, features: u64) -> Bench {
    let memory = memory();
    let endpoint = Endpoint::new(Box::new(net), memory.clone()).unwrap();
    Bench { driver: Driver::boot(endpoint, memory, features), wire }
}

thread_local! {
    /// What the tap with headers was told last.
    static OFFLOADS_SET: Cell<Option<u32>> = const { Cell::new(None) };
}

/// A tap with headers, and a guest that takes `features`.
fn bench_with_headers(features: u64) -> Bench {
    let (tap, wire) = tap();
    let set: SetOffloads = |_, offloads| {
        OFFLOADS_SET.set(Some(offloads));
        Ok(())
    };
    let mut bench = bench_of(Net::with(tap, Some(set), MAC).unwrap(), wire, features);
    bench.driver.kick(TRANSMIT);
    bench
}

#[test]
fn with_headers_large_frames_pass_both_ways_and_the_tap_knows_what_the_guest_takes() {
    let mut bench = bench_with_headers(u64::MAX);
    assert_eq!(OFFLOADS_SET.get(), Some(tap::OFFLOAD_CSUM | tap::OFFLOAD_TSO4 | tap::OFFLOAD_TSO6));
    let frame: Vec<u8> = (0..60_000_u32).map(|at| u8::try_from(at % 251).unwrap()).collect();
    let header = [1, 1, 34, 0, 0x78, 5, 14, 0, 16, 0, 0, 0];
    bench.refill(60);
    bench.arrive(&[&header[..], &frame].concat());
    // One frame in many buffers: the first tells how many.
    let mut got = Vec::new();
    let mut buffers = 0_u16;
    while let Some((_, bytes, content)) = bench.driver.used(RECEIVE) {
        got.extend_from_slice(&content[..bytes as usize]);
        buffers += 1;
    }
    assert!(buffers > 30);
    assert_eq!(got[..NUM_BUFFERS_OFFSET], header[..NUM_BUFFERS_OFFSET]);
    assert_eq!(got[NUM_BUFFERS_OFFSET..HEADER_BYTES], buffers.to_le_bytes());
    assert!(got[HEADER_BYTES..] == frame);
    bench.driver.request(TRANSMIT, &[Buffer::Out(header.to_vec()), Buffer::Out(frame.clone())]);
    assert!(bench.on_wire().unwrap() == [&header[..], &frame].concat());
}

#[test]
fn a_frame_waits_whole_until_there_are_buffers_for_all_of_it() {
    for event_idx in [0, 1 << 29] {
        let mut bench = bench_with_headers(1 << 32 | MERGEABLE | event_idx);
        bench.arrive(&[9; HEADER_BYTES + 10_000]);
        for _ in 0..6 {
            bench.refill(1);
            assert!(bench.driver.used(RECEIVE).is_none());
        }
        bench.refill(1);
        assert!(bench.driver.interrupted());
        let buffers = std::iter::from_fn(|| bench.driver.used(RECEIVE)).count();
        assert_eq!(buffers, 7);
        bench.arrive(&[8; HEADER_BYTES + 60]);
        bench.refill(1);
        assert!(bench.driver.used(RECEIVE).is_some());
        assert_eq!(bench.dropped(), 0);
    }
}

#[test]
fn a_guest_without_offloads_sends_and_gets_plain_frames() {
    let mut bench = bench_with_headers(1 << 32);
    assert_eq!(OFFLOADS_SET.get(), Some(0));
    let packet = [vec![0xff; HEADER_BYTES], vec![1; 60]].concat();
    bench.driver.request(TRANSMIT, &[Buffer::Out(packet)]);
    assert_eq!(bench.on_wire(), Some([vec![0; HEADER_BYTES], vec![1; 60]].concat()));
    // Segmentation without checksums is not asked of the tap.
    bench_with_headers(1 << 32 | GUEST_TSO4);
    assert_eq!(OFFLOADS_SET.get(), Some(0));
}

#[test]
fn a_guest_with_offloads_does_not_move_to_a_tap_without() {
    let bench = bench_with_headers(u64::MAX);
    let state = bench.driver.endpoint.save();
    let net = Net::new(tap().0, MAC).unwrap();
    let moved = Endpoint::restore(&state, Box::new(net), bench.driver.memory.clone());
    assert!(moved.is_err());
}

impl Bench {
    fn arrive(&mut self, frame: &[u8]) {
        send(&self.wire, frame, SendFlags::empty()).unwrap();
        self.driver.run();
    }

    fn refill(&mut self, buffers: usize) {
        for _ in 0..buffers {
            self.driver.submit(RECEIVE, &[Buffer::In(HEADER_BYTES), Buffer::In(1518)]);
        }
        self.driver.kick(RECEIVE);
    }

    fn received(&mut self) -> Option<Vec<u8>> {
        let (_, bytes, content) = self.driver.used(RECEIVE)?;
        assert_eq!(content[..HEADER_BYTES], [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 0]);
        Some(content[HEADER_BYTES..bytes as usize].to_vec())
    }

    fn transmit(&mut self, frame: &[u8]) {
        self.driver.request(TRANSMIT, &[Buffer::Out(vec![0; HEADER_BYTES]), Buffer::Out(frame.to_vec())]);
    }

    fn on_wire(&mut self) -> Option<Vec<u8>> {
        let mut frame = vec![0; 100_000];
        let bytes = rustix::io::read(&self.wire, &mut frame[..]).ok()?;
        frame.truncate(bytes);
        Some(frame)
    }

    fn dropped(&self) -> u64 {
        self.driver.endpoint.with_device(|net: &mut Net, _| net.dropped_frames()).unwrap()
    }
}

#[test]
fn frames_go_both_ways_in_order() {
    let mut bench = bench();
    assert_eq!(bench.driver.config(0), MAC);
    bench.refill(100);
    for round in 0..100_u8 {
        bench.arrive(&vec![round; 14 + usize::from(round) * 15]);
        bench.transmit(&vec![round; 1514]);
        assert_eq!(bench.on_wire(), Some(vec![round; 1514]));
    }
    for round in 0..100_u8 {
        assert_eq!(bench.received(), Some(vec![round; 14 + usize::from(round) * 15]));
    }
    assert_eq!(bench.dropped(), 0);
    assert!(bench.driver.interrupted());
}

#[test]
fn frames_wait_in_the_tap_until_the_guest_has_buffers() {
    let mut bench = bench();
    for round in 0..5 {
        bench.arrive(&[round; 60]);
    }
    for round in 0..5 {
        assert_eq!(bench.received(), None);
        bench.refill(1);
        assert_eq!(bench.received(), Some(vec![round; 60]));
    }
}

#[test]
fn frames_that_fit_nowhere_are_lost_and_the_next_ones_are_not() {
    let mut bench = bench();
    bench.refill(2);
    bench.arrive(&[1; 2000]);
    bench.arrive(&[1; 5]);
    bench.arrive(&[2; 60]);
    assert_eq!(bench.received(), Some(vec![2; 60]));
    bench.transmit(&[1; 13]);
    bench.transmit(&[3; 14]);
    assert_eq!(bench.on_wire(), Some(vec![3; 14]));
    assert_eq!(bench.dropped(), 3);
    let mut sent = 0;
    while bench.dropped() == 3 {
        bench.transmit(&[4; 1514]);
        sent += 1;
        assert!(sent < 10_000, "the wire takes for ever");
    }
    assert!(bench.driver.endpoint.failure().is_none());
}

#[test]
fn a_packet_without_a_header_stops_the_device() {
    let mut bench = bench();
    bench.driver.submit(TRANSMIT, &[Buffer::Out(vec![0; 11])]);
    bench.driver.kick(TRANSMIT);
    assert!(bench.driver.endpoint.failure().unwrap().contains("no room for a header"));
    bench.arrive(&[1; 60]);
}

#[test]
fn a_tap_that_is_gone_is_no_failure() {
    let mut bench = bench();
    bench.refill(4);
    bench.wire = tap().0;
    bench.driver.run();
    bench.transmit(&[1; 60]);
    assert!(bench.driver.endpoint.failure().is_none());
}

#[test]
fn a_restored_card_goes_on_over_another_tap() {
    let mut bench = bench();
    bench.refill(10);
    bench.arrive(&[1; 60]);
    let state = bench.driver.endpoint.save();
    let state = VirtioState::decode(&state.encode().unwrap()).unwrap();
    let DeviceState::Net(of_net) = &state.device else { panic!("a card's state") };
    let (tap, wire) = tap();
    let net = Net::restore(of_net, tap).unwrap();
    let endpoint = Endpoint::restore(&state, Box::new(net), bench.driver.memory.clone()).unwrap();
    endpoint.resume();
    let mut bench = Bench { driver: bench.driver.moved_to(endpoint), wire };
    bench.arrive(&[2; 60]);
    assert_eq!(bench.received(), Some(vec![1; 60]));
    assert_eq!(bench.received(), Some(vec![2; 60]));
    bench.transmit(&[3; 60]);
    assert_eq!(bench.on_wire(), Some(vec![3; 60]));
    assert_eq!(bench.driver.config(0), MAC);
}

/// As when the keeper was replaced under a running guest.
#[test]
fn another_tap_takes_the_place_of_the_former_one() {
    let mut bench = bench();
    bench.arrive(&[1; 60]);
    let (tap, wire) = tap();
    bench.driver.endpoint.with_device(|net: &mut Net, _| net.set_tap(tap).unwrap()).unwrap();
    bench.wire = wire;
    bench.refill(10);
    bench.arrive(&[2; 60]);
    assert_eq!(bench.received(), Some(vec![2; 60]), "what came of the former one is lost");
    bench.transmit(&[3; 60]);
    assert_eq!(bench.on_wire(), Some(vec![3; 60]));
    // A guest that counts on headers cannot go on without.
    let bench = bench_with_headers(u64::MAX);
    let refused = bench.driver.endpoint.with_device(|net: &mut Net, _| net.set_tap(super::tests::tap().0));
    assert!(refused.unwrap().is_err());
}

proptest! {
    #[test]
    fn every_frame_that_fits_arrives_once_and_in_order(
        steps in prop::collection::vec((0..3_u8, 14..1518_usize, any::<u8>()), 1..80),
    ) {
        let mut bench = bench();
        let mut in_tap = std::collections::VecDeque::new();
        for (kind, bytes, byte) in steps {
            match kind {
                0 => {
                    bench.arrive(&vec![byte; bytes]);
                    in_tap.push_back(vec![byte; bytes]);
                }
                1 => bench.refill(1),
                _ => {
                    bench.transmit(&vec![byte; bytes]);
                    prop_assert_eq!(bench.on_wire(), Some(vec![byte; bytes]));
                }
            }
            while let Some(frame) = bench.received() {
                prop_assert_eq!(Some(frame), in_tap.pop_front());
            }
        }
        prop_assert_eq!(bench.on_wire(), None);
        prop_assert_eq!(bench.dropped(), 0);
    }
}
