//! Guests that lie.

use proptest::prelude::*;

use super::*;

#[test]
fn a_buffer_too_small_for_a_header_stops_the_device() {
    let mut bench = bench();
    bench.driver.submit(RECEIVE, &[Buffer::In(43)]);
    bench.send(Op::Request, PortPair { guest: 1, host: 1 }, 0, &[]);
    assert!(bench.driver.endpoint.failure().unwrap().contains("no room for a header"));

    let mut bench = super::bench();
    bench.driver.submit(TRANSMIT, &[Buffer::Out(vec![0; 43])]);
    bench.driver.kick(TRANSMIT);
    assert!(bench.driver.endpoint.failure().unwrap().contains("ends before"));
}

#[test]
fn packets_of_or_for_somebody_else_are_dropped() {
    let mut bench = bench();
    bench.refill(4);
    let header = Header { op: Op::Request as u16, ..from_guest(PortPair { guest: 9, host: CARRIER_PORT }) };
    bench.send_raw(&Header { src_cid: 4, ..header }, &[]);
    bench.send_raw(&Header { dst_cid: 3, ..header }, &[]);
    bench.nothing();
    bench.send_raw(&Header { kind: 2, ..header }, &[]);
    assert_eq!(bench.expect(Op::Reset).0.kind, 2);
}

#[test]
fn a_length_that_is_not_there_ends_the_stream() {
    let mut bench = bench();
    let (mut client, ports) = bench.connected(80);
    let header = Header { op: Op::Data as u16, len: 100, ..from_guest(ports) };
    bench.send_raw(&header, &[1; 99]);
    bench.expect(Op::Reset);
    assert!(at_end(&mut client));
    assert_eq!(bench.driver.endpoint.failure(), None);
}

#[test]
fn what_does_not_fit_the_streams_state_ends_it() {
    for (op, code) in [(Op::Request, 1), (Op::Response, 2), (Op::Data, 0), (Op::Data, 99)] {
        let mut bench = bench();
        let (mut client, ports) = bench.connected(80);
        bench.send_raw(&Header { op: code, ..from_guest(ports) }, &[]);
        bench.expect(Op::Reset);
        assert!(at_end(&mut client), "{op:?}");
    }
    let mut bench = bench();
    let mut client = bench.client();
    writeln!(client, "CONNECT 80").unwrap();
    bench.refill(4);
    let ports = PortPair { guest: 80, host: bench.expect(Op::Request).0.src_port };
    bench.send(Op::Data, ports, 0, b"before it accepted");
    bench.expect(Op::Reset);
}

#[test]
fn resets_that_nobody_takes_are_bounded_and_none_is_lost() {
    let mut bench = bench();
    for guest in 0..1000 {
        let header = Header { op: Op::Request as u16, ..from_guest(PortPair { guest, host: 7 }) };
        if bench.driver.room(TRANSMIT) == 0 {
            break;
        }
        bench.driver.submit(TRANSMIT, &[Buffer::Out(header.encode().to_vec())]);
        bench.driver.kick(TRANSMIT);
        while bench.driver.used(TRANSMIT).is_some() {}
    }
    let waiting = bench.driver.endpoint.with_device(|vsock: &mut Vsock, _| vsock.resets.len());
    assert_eq!(waiting, Some(RESETS_MAX));
    let mut expected = 0;
    while expected < u32::try_from(RESETS_MAX).unwrap() + 256 {
        bench.refill(10);
        while let Some((header, _)) = bench.receive() {
            assert_eq!(header.dst_port, expected);
            expected += 1;
        }
    }
}

fn any_header() -> impl Strategy<Value = Header> {
    (
        (prop_oneof![9 => Just(3_u64), 1 => any::<u64>()], prop_oneof![9 => Just(2_u64), 1 => any::<u64>()]),
        prop_oneof![Just(9_u32), Just(80), any::<u32>()],
        prop_oneof![Just(1024_u32), Just(1 << 30), Just((1 << 30) + 1), any::<u32>()],
        prop_oneof![0..300_u32, any::<u32>()],
        (prop_oneof![9 => Just(1_u16), 1 => any::<u16>()], 0..9_u16, 0..4_u32),
        (any::<u32>(), any::<u32>()),
    )
        .prop_map(
            |((src_cid, dst_cid), src_port, dst_port, len, (kind, op, flags), (buf_alloc, fwd_cnt))| Header {
                src_cid,
                dst_cid,
                src_port,
                dst_port,
                len,
                kind,
                op,
                flags,
                buf_alloc,
                fwd_cnt,
            },
        )
}

proptest! {
    #[test]
    fn no_packet_does_harm(
        packets in prop::collection::vec((any_header(), 0..300_usize, 0..8_u8), 1..60),
    ) {
        let mut bench = bench();
        let mut clients = Vec::new();
        for (header, bytes, action) in packets {
            match action {
                0 => {
                    let mut client = bench.client();
                    client.write_all(b"CONNECT 80\nhello").unwrap();
                    clients.push(client);
                }
                1 => drop(clients.pop()),
                2 => bench.refill(3),
                3 => {
                    bench.pipes.write(&[1; 5000]);
                    bench.pipes.read(5000);
                }
                4 => bench = bench.moved(),
                _ => {}
            }
            bench.driver.run();
            bench.send_raw(&header, &vec![7; bytes]);
            while bench.receive().is_some() {}
        }
        prop_assert_eq!(bench.driver.endpoint.failure(), None);
        // It still works.
        clients.clear();
        bench.driver.run();
        bench.driver.initialise(u64::MAX);
        bench.carry(9);
        while bench.receive().is_some() {}
        bench.connected(80);
    }
}
