//! The carrier: one stream that survives what the device does not.

use proptest::prelude::*;

use super::super::packet::{SHUTDOWN_RECEIVE, SHUTDOWN_SEND};
use super::*;

#[test]
fn only_one_is_accepted_until_it_has_ended() {
    let mut bench = bench();
    let ports = bench.carry(9);
    let second = PortPair { guest: 10, ..ports };
    bench.send(Op::Request, second, 0, &[]);
    assert_eq!(bench.expect(Op::Reset).0.dst_port, 10);
    for other in [1023, 1025, 0, u32::MAX] {
        bench.send(Op::Request, PortPair { guest: 10, host: other }, 0, &[]);
        assert_eq!(bench.expect(Op::Reset).0.src_port, other);
    }
    bench.send(Op::Data, ports, 0, b"last words");
    bench.send(Op::Shutdown, ports, SHUTDOWN_SEND | SHUTDOWN_RECEIVE, &[]);
    bench.expect(Op::Reset);
    assert_eq!(bench.pipes.read(100), b"last words");
    bench.carry(10);
    bench.pipes.write(b"to the second");
    bench.driver.run();
    assert_eq!(bench.expect(Op::Data).1, b"to the second");
}

#[test]
fn nothing_is_read_that_the_guest_has_no_buffer_for() {
    let mut bench = bench();
    bench.carry(9);
    while bench.driver.room(RECEIVE) < 256 {
        bench.pipes.write(&[1; 4096]);
        bench.driver.run();
        while bench.receive().is_some() {}
    }
    bench.pipes.write(b"waits");
    bench.driver.run();
    let mut waiting = [0; 100];
    let waits = rustix::io::read(&bench.pipes.device_in, &mut waiting[..]).unwrap();
    assert_eq!(&waiting[..waits], b"waits", "it is still in the pipe");
}

#[test]
fn what_its_keeper_does_not_take_is_the_states() {
    let mut bench = bench();
    let ports = bench.carry(9);
    let mut sent = 0_u32;
    // Until the pipe is full and half of the credit is used.
    while sent < (64 << 10) + (128 << 10) {
        bench.send(Op::Data, ports, 0, &vec![u8::try_from(sent % 251).unwrap(); 3000]);
        sent += 3000;
    }
    let state = bench.driver.endpoint.save();
    let DeviceState::Vsock(vsock) = &state.device else { panic!() };
    let carrier = vsock.carrier.as_ref().unwrap();
    assert_eq!(carrier.unsent.len() + carrier.fwd_cnt as usize, sent as usize);
    let mut bench = bench.moved();
    let mut got = Vec::new();
    while got.len() < sent as usize {
        let part = bench.pipes.read(10_000);
        got.extend(part);
        bench.driver.run();
    }
    for (at, byte) in got.iter().enumerate() {
        assert_eq!(usize::from(*byte), at / 3000 * 3000 % 251);
    }
}

#[test]
fn another_keeper_takes_over_and_nothing_is_lost() {
    let mut bench = bench();
    let ports = bench.carry(9);
    let former = std::mem::replace(&mut bench.pipes, pipes());
    drop(former);
    bench.driver.run();
    bench.send(Op::Data, ports, 0, b"while nobody listens");
    let side = bench.pipes.side(None);
    let set = bench.driver.endpoint.with_device(|vsock: &mut Vsock, _| {
        assert!(vsock.has_carrier());
        vsock.set_carrier(side.carrier_in, side.carrier_out)
    });
    set.unwrap().unwrap();
    bench.driver.run();
    assert_eq!(bench.pipes.read(100), b"while nobody listens");
    bench.pipes.write(b"hello again");
    bench.driver.run();
    assert_eq!(bench.expect(Op::Data).1, b"hello again");
}

#[test]
fn a_fork_has_a_carrier_of_its_own_that_goes_on_in_the_middle() {
    let mut bench = bench();
    let ports = bench.carry(9);
    bench.send(Op::Data, ports, 0, b"before");
    let (mut client, _) = bench.connected(80);
    let state = bench.driver.endpoint.save();
    let child_pipes = pipes();
    let dir = tempfile::tempdir().unwrap();
    let listener = UnixListener::bind(dir.path().join("vsock.sock")).unwrap();
    let host = child_pipes.side(Some(&listener));
    let driver = bench.driver.forked(|memory| restored(&state, host, memory));
    let mut child = Bench { driver, pipes: child_pipes, dir, listener };
    child.driver.run();
    child.expect(Op::Reset);

    bench.send(Op::Data, ports, 0, b" and after");
    assert_eq!(bench.pipes.read(100), b"before and after");
    client.write_all(b"still there").unwrap();
    bench.driver.run();
    assert_eq!(bench.expect(Op::Data).1, b"still there");

    child.send(Op::Data, ports, 0, b"in the child");
    assert_eq!(child.pipes.read(100), b"in the child");
    child.pipes.write(b"welcome");
    child.driver.run();
    assert_eq!(child.expect(Op::Data).1, b"welcome");
    child.connected(80);
    child.nothing();
}

#[test]
fn a_response_that_is_owed_comes_after_the_restore() {
    let mut bench = bench();
    let ports = PortPair { guest: 9, host: CARRIER_PORT };
    bench.send(Op::Request, ports, 0, &[]);
    let mut bench = bench.moved();
    bench.pipes.write(b"data");
    bench.refill(4);
    bench.expect(Op::Response);
    assert_eq!(bench.expect(Op::Data).1, b"data");
}

/// The guest's end as Linux has it: keeps to its credit, tells what it took.
struct Guest {
    ports: PortPair,
    buf_alloc: u32,
    fwd_cnt: u32,
    tx_cnt: u32,
    device_buf_alloc: u32,
    device_fwd_cnt: u32,
    held: Vec<u8>,
    taken: Vec<u8>,
}

impl Guest {
    fn header(&self, op: Op, len: usize) -> Header {
        Header {
            op: op as u16,
            len: u32::try_from(len).unwrap(),
            buf_alloc: self.buf_alloc,
            fwd_cnt: self.fwd_cnt,
            ..from_guest(self.ports)
        }
    }

    fn collect(&mut self, bench: &mut Bench) {
        while let Some((header, data)) = bench.receive() {
            self.device_buf_alloc = header.buf_alloc;
            self.device_fwd_cnt = header.fwd_cnt;
            match Op::from_code(header.op).unwrap() {
                Op::Data => {
                    self.held.extend(data);
                    assert!(self.held.len() <= self.buf_alloc as usize, "more than the credit");
                }
                Op::CreditRequest => bench.send_raw(&self.header(Op::CreditUpdate, 0), &[]),
                Op::CreditUpdate | Op::Response => {}
                other => panic!("{other:?} on the carrier"),
            }
        }
    }

    fn take(&mut self, bench: &mut Bench, bytes: usize) {
        let bytes = bytes.min(self.held.len());
        self.taken.extend(self.held.drain(..bytes));
        self.fwd_cnt = self.fwd_cnt.wrapping_add(u32::try_from(bytes).unwrap());
        bench.send_raw(&self.header(Op::CreditUpdate, 0), &[]);
    }

    /// Sends what the credit allows.
    fn send(&mut self, bench: &mut Bench, data: &[u8]) -> usize {
        let used = self.tx_cnt.wrapping_sub(self.device_fwd_cnt);
        let room = (self.device_buf_alloc - used) as usize;
        let bytes = data.len().min(room).min(0x1_0000);
        bench.send_raw(&self.header(Op::Data, bytes), &data[..bytes]);
        self.tx_cnt = self.tx_cnt.wrapping_add(u32::try_from(bytes).unwrap());
        bytes
    }
}

#[derive(Debug, Clone)]
enum Step {
    HostWrites(usize),
    HostReads(usize),
    GuestSends(usize),
    GuestTakes(usize),
    GuestGivesBuffers(usize),
    Restore,
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        (1..100_000_usize).prop_map(Step::HostWrites),
        (1..100_000_usize).prop_map(Step::HostReads),
        (1..80_000_usize).prop_map(Step::GuestSends),
        (1..80_000_usize).prop_map(Step::GuestTakes),
        (1..64_usize).prop_map(Step::GuestGivesBuffers),
        Just(Step::Restore),
    ]
}

/// Byte `at` of an endless stream.
fn stream(at: usize, bytes: usize) -> Vec<u8> {
    (at..at + bytes).map(|at| u8::try_from((at * 31 + at / 257) % 256).unwrap()).collect()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]
    #[test]
    fn no_byte_is_lost_repeated_or_reordered(
        steps in prop::collection::vec(step(), 1..60), buf_alloc in 1..300_000_u32, features in any::<bool>(),
    ) {
        let mut bench = bench_with(if features { u64::MAX } else { 1 << 32 });
        let mut guest = Guest {
            ports: PortPair { guest: 9, host: CARRIER_PORT },
            buf_alloc, fwd_cnt: 0, tx_cnt: 0, device_buf_alloc: 0, device_fwd_cnt: 0,
            held: Vec::new(), taken: Vec::new(),
        };
        let (mut host_wrote, mut guest_sent, mut host_got) = (0, 0, Vec::new());
        bench.send_raw(&guest.header(Op::Request, 0), &[]);
        bench.refill(4);
        guest.collect(&mut bench);
        for step in steps {
            match step {
                Step::HostWrites(bytes) => host_wrote += bench.pipes.write(&stream(host_wrote, bytes)),
                Step::HostReads(bytes) => host_got.extend(bench.pipes.read(bytes)),
                Step::GuestSends(bytes) => guest_sent += guest.send(&mut bench, &stream(guest_sent, bytes)),
                Step::GuestTakes(bytes) => guest.take(&mut bench, bytes),
                Step::GuestGivesBuffers(buffers) => bench.refill(buffers),
                Step::Restore => bench = bench.moved(),
            }
            bench.driver.run();
            guest.collect(&mut bench);
        }
        // Everything comes to its end, also across one more restore.
        bench = bench.moved();
        for _ in 0..100_000 {
            if guest.taken.len() == host_wrote && host_got.len() == guest_sent {
                break;
            }
            host_got.extend(bench.pipes.read(100_000));
            bench.driver.run();
            bench.refill(16);
            guest.collect(&mut bench);
            guest.take(&mut bench, 100_000);
        }
        prop_assert!(guest.taken == stream(0, host_wrote));
        prop_assert!(host_got == stream(0, guest_sent));
        prop_assert_eq!(bench.driver.endpoint.failure(), None);
    }
}
