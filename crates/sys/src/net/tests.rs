//! A second namespace plays the guest: its tap's frames are carried to and fro.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::os::fd::AsRawFd;
use std::sync::Arc;
use std::time::Duration;

use super::*;

const PATIENCE: Duration = Duration::from_secs(20);
const CARD: &str = "eth0";

/// What `guest` does within a namespace whose only way out is the network's tap.
fn with_guest<T: Send + 'static>(network: &Network, guest: impl FnOnce() -> T + Send + 'static) -> T {
    let host = network.tap.try_clone().unwrap();
    in_new_namespace(move || {
        let card = guest_tap(CARD).unwrap();
        Interface::open(LOOPBACK).unwrap().up().unwrap();
        set_up_card(CARD).unwrap();
        let (card, host) = (Arc::new(card), Arc::new(host));
        for (from, to) in [(card.clone(), host.clone()), (host, card)] {
            // They end with the process: a tap that nobody writes to is read for ever.
            thread::spawn(move || carry(&from, &to));
        }
        guest()
    })
    .unwrap()
}

fn carry(from: &OwnedFd, to: &OwnedFd) {
    let mut frame = vec![0_u8; 70_000];
    while let Ok(length) = rustix::io::read(from, &mut frame) {
        if rustix::io::write(to, &frame[..length]).is_err() {
            return;
        }
    }
}

fn listener(network: &Network) -> TcpListener {
    let listener = TcpListener::from(network.tcp.try_clone().unwrap());
    listener.set_nonblocking(false).unwrap();
    listener
}

fn connect(to: &str) -> io::Result<TcpStream> {
    let stream = TcpStream::connect_timeout(&to.parse().unwrap(), PATIENCE)?;
    stream.set_read_timeout(Some(PATIENCE))?;
    Ok(stream)
}

#[test]
fn every_connection_arrives_and_tells_where_it_was_to_go() {
    let network = Network::new().unwrap();
    let listener = listener(&network);
    let server = thread::spawn(move || {
        let mut seen = Vec::new();
        for _ in 0..3 {
            let (mut stream, from) = listener.accept().unwrap();
            assert_eq!(from.ip(), GUEST);
            seen.push(stream.local_addr().unwrap());
            stream.write_all(b"served").unwrap();
        }
        seen
    });
    let targets = ["93.184.216.34:443", "10.1.2.3:22", "198.18.0.1:1"];
    with_guest(&network, move || {
        for target in targets {
            let mut text = String::new();
            connect(target).unwrap().read_to_string(&mut text).unwrap();
            assert_eq!(text, "served");
        }
    });
    let wanted: Vec<SocketAddr> = targets.iter().map(|target| target.parse().unwrap()).collect();
    assert_eq!(server.join().unwrap(), wanted);
}

#[test]
fn much_data_passes_both_ways_whole() {
    const BYTES: usize = 3 << 20;
    let network = Network::new().unwrap();
    let listener = listener(&network);
    let server = thread::spawn(move || {
        let (mut stream, _) = listener.accept().unwrap();
        let mut got = Vec::new();
        stream.read_to_end(&mut got).unwrap();
        stream.write_all(&got).unwrap();
    });
    with_guest(&network, || {
        let mut stream = connect("203.0.113.9:80").unwrap();
        let sent: Vec<u8> = (0..BYTES).map(|at| u8::try_from(at % 251).unwrap()).collect();
        let writer = stream.try_clone().unwrap();
        let (mut to, bytes) = (writer, sent.clone());
        let writing = thread::spawn(move || {
            to.write_all(&bytes).unwrap();
            to.shutdown(std::net::Shutdown::Write).unwrap();
        });
        let mut got = Vec::new();
        stream.read_to_end(&mut got).unwrap();
        writing.join().unwrap();
        assert!(got == sent, "{} bytes of {BYTES} came back", got.len());
    });
    server.join().unwrap();
}

#[test]
fn a_datagram_is_refused_at_once_and_seen() {
    let network = Network::new().unwrap();
    with_guest(&network, || {
        let socket = UdpSocket::bind((Ipv4Addr::UNSPECIFIED, 0)).unwrap();
        socket.set_read_timeout(Some(PATIENCE)).unwrap();
        // More than once: the kernel is told not to hold answers back.
        for _ in 0..20 {
            socket.connect("8.8.8.8:443").unwrap();
            socket.send(b"hello").unwrap();
            let refused = socket.recv(&mut [0; 8]).unwrap_err();
            assert_eq!(refused.kind(), io::ErrorKind::ConnectionRefused);
        }
    });
    let seen = next_datagram(network.datagrams.as_fd()).unwrap();
    assert_eq!(seen, Some("8.8.8.8:443".parse().unwrap()));
}

#[test]
fn names_are_asked_for_at_the_gateway() {
    let network = Network::new().unwrap();
    let dns = UdpSocket::from(network.dns.try_clone().unwrap());
    dns.set_nonblocking(false).unwrap();
    let server = thread::spawn(move || {
        let mut question = [0; 16];
        let (length, from) = dns.recv_from(&mut question).unwrap();
        dns.send_to(&question[..length], from).unwrap();
    });
    with_guest(&network, || {
        let socket = UdpSocket::bind((Ipv4Addr::UNSPECIFIED, 0)).unwrap();
        socket.set_read_timeout(Some(PATIENCE)).unwrap();
        socket.send_to(b"name?", (GATEWAY, DNS_PORT)).unwrap();
        let mut answer = [0; 16];
        let (length, from) = socket.recv_from(&mut answer).unwrap();
        assert_eq!((&answer[..length], from.ip()), (&b"name?"[..], GATEWAY.into()));
    });
    server.join().unwrap();
}

/// A guest with one connection, that then has another network: as after a fork.
fn with_guest_moved(then: impl FnOnce(TcpStream) + Send + 'static) {
    let (first, second) = (Network::new().unwrap(), Network::new().unwrap());
    let listener = listener(&first);
    let server = thread::spawn(move || listener.accept().unwrap());
    let (before, after) = (first.tap.try_clone().unwrap(), second.tap.try_clone().unwrap());
    in_new_namespace(move || {
        let (card, before) = (Arc::new(guest_tap(CARD).unwrap()), Arc::new(before));
        set_up_card(CARD).unwrap();
        let (from, to) = (before.clone(), card.clone());
        thread::spawn(move || carry(&from, &to));
        let plugged = Arc::new(std::sync::Mutex::new(before));
        let (from, to) = (card.clone(), plugged.clone());
        thread::spawn(move || {
            let mut frame = vec![0_u8; 70_000];
            while let Ok(length) = rustix::io::read(&from, &mut frame) {
                let to = to.lock().unwrap().clone();
                rustix::io::write(&*to, &frame[..length]).unwrap();
            }
        });
        let stream = connect("203.0.113.9:80").unwrap();
        let (mut other_end, _) = server.join().unwrap();
        // In the network that knows it, a connection that is asked after goes on.
        assert_eq!(ask_after_connections().unwrap(), 1);
        other_end.write_all(b"x").unwrap();
        (&stream).read_exact(&mut [0]).unwrap();
        let after = Arc::new(after);
        let (from, to) = (after.clone(), card);
        thread::spawn(move || carry(&from, &to));
        *plugged.lock().unwrap() = after;
        then(stream);
    })
    .unwrap();
    drop(second);
}

#[test]
fn a_flow_that_is_unknown_is_reset() {
    with_guest_moved(|mut stream| {
        stream.write_all(b"still there?").unwrap();
        let reset = stream.read(&mut [0; 8]).unwrap_err();
        assert_eq!(reset.kind(), io::ErrorKind::ConnectionReset);
    });
}

#[test]
fn who_only_reads_learns_of_it_when_it_is_asked_after() {
    with_guest_moved(|mut stream| {
        assert_eq!(ask_after_connections().unwrap(), 1);
        let reset = stream.read(&mut [0; 8]).unwrap_err();
        assert_eq!(reset.kind(), io::ErrorKind::ConnectionReset);
        assert_eq!(ask_after_connections().unwrap(), 0);
    });
}

#[test]
fn nothing_is_forwarded_and_nothing_is_in_the_hosts_namespace() {
    let before = interfaces();
    let network = Network::new().unwrap();
    assert_eq!(interfaces(), before);
    // The tap names the namespace: what is set there is asked from within.
    let namespace = namespace_of(&network.tap);
    let forwarding = thread::spawn(move || {
        rustix::thread::move_into_thread_name_spaces(
            namespace.as_fd(),
            rustix::thread::ThreadNameSpaceType::NETWORK,
        )
        .unwrap();
        fs::read_to_string("/proc/sys/net/ipv4/ip_forward").unwrap()
    });
    assert_eq!(forwarding.join().unwrap().trim(), "0");
}

fn interfaces() -> Vec<String> {
    let text = fs::read_to_string("/proc/net/dev").unwrap();
    text.lines().filter_map(|line| Some(line.split_once(':')?.0.trim().to_owned())).collect()
}

#[allow(unsafe_code, reason = "a tap's own ioctl has no safe form")]
fn namespace_of(tap: &OwnedFd) -> OwnedFd {
    use std::os::fd::FromRawFd;
    /// `TUNGETDEVNETNS` of linux/if_tun.h.
    const GET_NAMESPACE: libc::c_ulong = 0x54e3;
    // SAFETY: takes no argument.
    let fd = unsafe { libc::ioctl(tap.as_raw_fd(), GET_NAMESPACE) };
    assert!(fd >= 0, "{}", io::Error::last_os_error());
    // SAFETY: the kernel made it just now, and nobody else has it.
    unsafe { OwnedFd::from_raw_fd(fd) }
}

#[test]
fn a_packet_that_is_none_has_no_destination() {
    assert_eq!(destination(&[]), None);
    assert_eq!(destination(&[0x45; 20]), None);
    assert_eq!(destination(&[0x4f; 62]), None);
}
