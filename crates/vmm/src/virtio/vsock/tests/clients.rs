//! Streams that clients of the host begin.

use super::super::packet::{SHUTDOWN_RECEIVE, SHUTDOWN_SEND};
use super::*;

#[test]
fn a_client_connects_and_bytes_go_both_ways() {
    for features in [u64::MAX, 1 << 32] {
        let mut bench = bench_with(features);
        let (mut client, ports) = bench.connected(80);
        assert!(ports.host >= CLIENT_PORTS);
        client.write_all(b"question").unwrap();
        bench.driver.run();
        assert_eq!(bench.expect(Op::Data).1, b"question");
        bench.send(Op::Data, ports, 0, b"answer");
        assert_eq!(read(&mut client), b"answer");
        bench.nothing();
    }
}

#[test]
fn what_a_client_sends_right_behind_its_line_is_not_lost() {
    let mut bench = bench();
    let mut client = bench.client();
    bench.refill(10);
    client.write_all(b"CONNECT 80\nearly").unwrap();
    bench.driver.run();
    let (header, _) = bench.expect(Op::Request);
    bench.nothing();
    bench.send(Op::Response, PortPair { guest: 80, host: header.src_port }, 0, &[]);
    assert_eq!(bench.expect(Op::Data).1, b"early");
}

#[test]
fn a_client_may_come_before_the_guest_has_a_driver() {
    let mut bench = bench();
    bench.driver.set(virtio_bindings::virtio_mmio::VIRTIO_MMIO_STATUS, 0);
    let mut client = bench.client();
    writeln!(client, "CONNECT 80").unwrap();
    bench.driver.run();
    bench.driver.initialise(u64::MAX);
    bench.refill(10);
    bench.expect(Op::Request);
}

#[test]
fn a_line_that_says_something_else_is_closed() {
    for line in
        ["", "CONNECT\n", "CONNECT x\n", "CONNECT 4294967296\n", "GET / HTTP/1.1\r\n", &"x".repeat(100)]
    {
        let mut bench = bench();
        let mut client = bench.client();
        bench.refill(1);
        client.write_all(line.as_bytes()).unwrap();
        client.shutdown(std::net::Shutdown::Write).unwrap();
        bench.driver.run();
        assert!(!matches!(client.read(&mut [0]), Ok(1..)), "no answer");
        assert!(client.write(b"x").is_err(), "closed after {line:?}");
        bench.nothing();
    }
}

#[test]
fn a_line_may_come_in_pieces() {
    let mut bench = bench();
    bench.refill(1);
    let mut client = bench.client();
    for piece in ["CON", "NECT 8", "0\r", "\n"] {
        bench.nothing();
        client.write_all(piece.as_bytes()).unwrap();
        bench.driver.run();
    }
    assert_eq!(bench.expect(Op::Request).0.dst_port, 80);
}

#[test]
fn a_guest_that_refuses_closes_the_client() {
    let mut bench = bench();
    let mut client = bench.client();
    bench.refill(4);
    writeln!(client, "CONNECT 80").unwrap();
    bench.driver.run();
    let (header, _) = bench.expect(Op::Request);
    bench.send(Op::Reset, PortPair { guest: 80, host: header.src_port }, 0, &[]);
    assert!(at_end(&mut client));
    bench.nothing();
}

#[test]
fn a_client_that_has_gone_is_reset_in_the_guest() {
    let mut bench = bench();
    let (client, ports) = bench.connected(80);
    drop(client);
    bench.driver.run();
    assert_eq!(bench.expect(Op::Reset).0.dst_port, 80);
    bench.send(Op::Data, ports, 0, b"too late");
    bench.expect(Op::Reset);
    let client = bench.client();
    drop(client);
    let mut client = bench.client();
    writeln!(client, "CONNECT 81").unwrap();
    bench.driver.run();
    bench.expect(Op::Request);
    drop(client);
    bench.driver.run();
    bench.expect(Op::Reset);
}

#[test]
fn what_a_client_sent_before_it_went_arrives() {
    let mut bench = bench();
    let (mut client, _) = bench.connected(80);
    client.write_all(&[7; 10_000]).unwrap();
    drop(client);
    bench.driver.run();
    let mut got = 0;
    while got < 10_000 {
        got += bench.expect(Op::Data).1.len();
    }
    bench.expect(Op::Reset);
}

#[test]
fn half_closed_streams_go_on_in_the_other_direction() {
    let mut bench = bench();
    let (mut client, ports) = bench.connected(80);
    client.write_all(b"all").unwrap();
    client.shutdown(std::net::Shutdown::Write).unwrap();
    bench.driver.run();
    assert_eq!(bench.expect(Op::Data).1, b"all");
    assert_eq!(bench.expect(Op::Shutdown).0.flags, SHUTDOWN_SEND);
    bench.send(Op::Data, ports, 0, b"answer");
    assert_eq!(read(&mut client), b"answer");
    bench.send(Op::Shutdown, ports, SHUTDOWN_SEND | SHUTDOWN_RECEIVE, &[]);
    assert!(at_end(&mut client));
    bench.expect(Op::Reset);

    let (mut client, ports) = bench.connected(81);
    bench.send(Op::Data, ports, 0, b"all of it");
    bench.send(Op::Shutdown, ports, SHUTDOWN_SEND, &[]);
    assert_eq!(read(&mut client), b"all of it");
    assert!(at_end(&mut client));
    client.write_all(b"still").unwrap();
    bench.driver.run();
    assert_eq!(bench.expect(Op::Data).1, b"still");
}

#[test]
fn what_the_guest_sent_before_it_closed_reaches_a_slow_client() {
    let mut bench = bench();
    let (mut client, ports) = bench.connected(80);
    let mut sent = Vec::new();
    let mut expected = 0;
    // More than the socket takes, less than the credit.
    while expected < 60_000 {
        bench.send(Op::Data, ports, 0, &[3; 4000]);
        expected += 4000;
    }
    bench.send(Op::Shutdown, ports, SHUTDOWN_SEND | SHUTDOWN_RECEIVE, &[]);
    while sent.len() < expected {
        sent.extend(read(&mut client));
        bench.driver.run();
    }
    assert!(at_end(&mut client));
}

#[test]
fn a_guest_without_credit_gets_no_data_and_one_question() {
    let mut bench = bench();
    let (mut client, ports) = bench.connected(80);
    let none = Header { op: Op::CreditUpdate as u16, buf_alloc: 0, ..from_guest(ports) };
    bench.send_raw(&none, &[]);
    for _ in 0..3 {
        client.write_all(b"data").unwrap();
        bench.driver.run();
    }
    bench.expect(Op::CreditRequest);
    bench.nothing();
    bench.send_raw(&Header { buf_alloc: 5, ..none }, &[]);
    assert_eq!(bench.expect(Op::Data).1, b"datad");
    bench.expect(Op::CreditRequest);
    bench.nothing();
    bench.send_raw(&Header { buf_alloc: 100, fwd_cnt: 5, ..none }, &[]);
    assert_eq!(bench.expect(Op::Data).1, b"atadata");
}

#[test]
fn a_guest_that_sends_beyond_its_credit_loses_the_stream() {
    let mut bench = bench();
    let (_client, ports) = bench.connected(80);
    let mut packets = 0;
    let lost = loop {
        bench.send(Op::Data, ports, 0, &[1; 8192]);
        bench.refill(4);
        packets += 1;
        assert!(packets < 1000, "the device holds what nobody reads");
        if let Some((header, _)) = bench.receive()
            && Op::from_code(header.op) == Some(Op::Reset)
        {
            break header;
        }
    };
    assert_eq!(lost.src_port, ports.host);
}

#[test]
fn a_question_for_credit_is_answered() {
    let mut bench = bench();
    let (_client, ports) = bench.connected(80);
    bench.send(Op::Data, ports, 0, b"12345");
    bench.send(Op::CreditRequest, ports, 0, &[]);
    let (header, _) = bench.expect(Op::CreditUpdate);
    assert_eq!((header.fwd_cnt, header.buf_alloc), (5, CLIENT_BUF_ALLOC));
}

#[test]
fn streams_share_the_guests_buffers() {
    let mut bench = bench();
    let (mut first, _) = bench.connected(80);
    let (mut second, other) = bench.connected(81);
    while bench.receive().is_some() {}
    first.write_all(&[1; 100_000]).unwrap();
    second.write_all(&[2; 10_000]).unwrap();
    bench.driver.run();
    let mut after = 0;
    loop {
        bench.refill(1);
        let Some((header, _)) = bench.receive() else { continue };
        after += 1;
        assert!(after < 60, "the second stream starves");
        if header.src_port == other.host {
            break;
        }
    }
}

#[test]
fn clients_beyond_the_limit_are_turned_away() {
    let mut bench = bench();
    let mut kept = Vec::new();
    for _ in 0..STREAMS_MAX + 1 {
        let mut client = bench.client();
        writeln!(client, "CONNECT 80").unwrap();
        bench.refill(2);
        while bench.receive().is_some() {}
        kept.push(client);
    }
    assert!(at_end(kept.last_mut().unwrap()));
    kept.remove(0);
    bench.driver.run();
    let mut client = bench.client();
    writeln!(client, "CONNECT 80").unwrap();
    bench.refill(4);
    let ops: Vec<_> = std::iter::from_fn(|| bench.receive()).map(|(header, _)| header.op).collect();
    assert!(ops.contains(&(Op::Request as u16)));
}

#[test]
fn silent_clients_push_each_other_out() {
    let mut bench = bench();
    let mut clients: Vec<_> = (0..HANDSHAKES_MAX + 10)
        .map(|_| {
            let client = bench.client();
            bench.driver.run();
            client
        })
        .collect();
    let closed = clients.iter_mut().filter_map(|client| at_end(client).then_some(())).count();
    assert_eq!(closed, 10);
    writeln!(clients.last_mut().unwrap(), "CONNECT 80").unwrap();
    bench.refill(1);
    bench.expect(Op::Request);
}

#[test]
fn clients_streams_end_with_a_restore_and_their_guest_is_told() {
    let mut bench = bench();
    let (mut client, ports) = bench.connected(80);
    let mut waiting = bench.client();
    writeln!(waiting, "CONNECT 81").unwrap();
    bench.driver.run();
    let asked = bench.expect(Op::Request).0.src_port;
    let mut bench = bench.moved();
    let mut told: Vec<u32> =
        std::iter::from_fn(|| bench.receive()).map(|(header, _)| header.src_port).collect();
    told.sort_unstable();
    assert_eq!(told, [ports.host, asked]);
    assert!(at_end(&mut client) && at_end(&mut waiting));
    let (_, new) = bench.connected(80);
    assert!(new.host > asked, "ports are not used again while the guest may remember them");
}

#[test]
fn a_guest_that_resets_its_driver_loses_its_streams() {
    let mut bench = bench();
    bench.carry(9);
    let (mut client, _) = bench.connected(80);
    bench.driver.initialise(u64::MAX);
    assert!(at_end(&mut client));
    bench.carry(10);
    bench.connected(80);
}
