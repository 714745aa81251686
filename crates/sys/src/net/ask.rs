//! Within a guest: asks the network after every connection, so that one that the network does not know ends now.
//!
//! A fork or a rollback has a network that knows nothing of what the guest believes to be open. Who writes is answered
//! by a reset; who only reads would wait for ever. So a SYN goes out in the name of each connection:
//!
//! ```text
//! unknown: SYN ─> SYN-ACK of a listener ─> the connection's challenge (RFC 5961 §4) ─> reset, with its very number
//! known:   SYN ─> the other end's challenge: an acknowledgement that changes nothing
//! ```

use std::fs;
use std::io;
use std::net::{Ipv4Addr, SocketAddrV4};

use rustix::net::{AddressFamily, SendFlags, SocketFlags, SocketType, ipproto, sendto, socket_with};

use super::GUEST;

/// Connections that are asked after at once.
const CONNECTIONS_MAX: usize = 1000;
/// Of the kernel's list: established, and closed on one side only.
const STATES: [&str; 4] = ["01", "04", "05", "08"];
const PROTOCOL_TCP: u8 = 6;
const SYN: u8 = 0x02;

/// Returns how many were asked after. Needs root.
pub fn ask_after_connections() -> io::Result<usize> {
    let mut open = Vec::new();
    for list in ["/proc/thread-self/net/tcp", "/proc/thread-self/net/tcp6"] {
        // A kernel without IPv6 has only one list.
        let text = fs::read_to_string(list).unwrap_or_default();
        open.extend(text.lines().skip(1).filter_map(connection));
    }
    open.retain(|(own, _)| *own.ip() == GUEST);
    open.truncate(CONNECTIONS_MAX);
    if open.is_empty() {
        return Ok(0);
    }
    let socket = socket_with(AddressFamily::INET, SocketType::RAW, SocketFlags::CLOEXEC, Some(ipproto::RAW))?;
    for (own, other) in &open {
        sendto(&socket, &syn(*own, *other), SendFlags::empty(), other)?;
    }
    Ok(open.len())
}

/// Both ends of what a line of the kernel's list (proc_net_tcp) tells of.
fn connection(line: &str) -> Option<(SocketAddrV4, SocketAddrV4)> {
    let mut words = line.split_ascii_whitespace().skip(1);
    let (own, other, state) = (words.next()?, words.next()?, words.next()?);
    if STATES.contains(&state) { Some((address(own)?, address(other)?)) } else { None }
}

/// `0202C612:1F90`, or the same behind the prefix of an address that is IPv4's.
fn address(word: &str) -> Option<SocketAddrV4> {
    let (ip, port) = word.split_once(':')?;
    let ip = match ip.len() {
        8 => ip,
        32 => ip.strip_prefix("0000000000000000FFFF0000")?,
        _ => return None,
    };
    // As it lies in memory, printed as a number.
    let ip = Ipv4Addr::from(u32::from_str_radix(ip, 16).ok()?.to_ne_bytes());
    Some(SocketAddrV4::new(ip, u16::from_str_radix(port, 16).ok()?))
}

/// A packet with its IP header (RFC 791), whose length and checksum the kernel fills in, and its TCP header (RFC 9293).
fn syn(from: SocketAddrV4, to: SocketAddrV4) -> Vec<u8> {
    let mut tcp = Vec::with_capacity(20);
    tcp.extend(from.port().to_be_bytes());
    tcp.extend(to.port().to_be_bytes());
    // No number is known: an acknowledgement tells the right one.
    tcp.extend([0; 8]);
    tcp.extend([0x50, SYN, 0xff, 0xff, 0, 0, 0, 0]);
    let (source, destination) = (from.ip().octets(), to.ip().octets());
    let length = u16::try_from(tcp.len()).unwrap_or_default();
    let pseudo = [&source[..], &destination, &[0, PROTOCOL_TCP], &length.to_be_bytes()].concat();
    let checksum = checksum(pseudo.iter().chain(&tcp));
    tcp[16..18].copy_from_slice(&checksum.to_be_bytes());
    let mut packet = vec![0x45, 0, 0, 0, 0, 0, 0x40, 0, 64, PROTOCOL_TCP, 0, 0];
    packet.extend(source);
    packet.extend(destination);
    packet.extend(tcp);
    packet
}

/// Of an even number of bytes (RFC 1071).
fn checksum<'a>(bytes: impl Iterator<Item = &'a u8>) -> u16 {
    let weights = [256, 1].into_iter().cycle();
    let sum: u32 = bytes.zip(weights).map(|(byte, weight)| u32::from(*byte) * weight).sum();
    let folded = (sum & 0xffff) + (sum >> 16);
    !u16::try_from((folded & 0xffff) + (folded >> 16)).unwrap_or(u16::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_kernels_list_is_read() {
        let line = "   1: 020012C6:D2F0 22D8B85D:0050 01 00000000:00000000 00:00000000 00000000 0 0 1";
        let (own, other) = connection(line).unwrap();
        assert_eq!((own, other), ("198.18.0.2:54000".parse().unwrap(), "93.184.216.34:80".parse().unwrap()));
        let mapped = "0: 0000000000000000FFFF0000020012C6:D2F0 0000000000000000FFFF000022D8B85D:0050 08 0:0";
        assert_eq!(connection(mapped), Some((own, other)));
        for line in
            ["", "x", "0: 0200A8C0 1 01", &line.replace(" 01 ", " 0A "), &line.replace("0200", "02000")]
        {
            assert_eq!(connection(line), None, "{line}");
        }
    }

    #[test]
    fn the_checksum_is_the_published_one() {
        assert_eq!(checksum([0x00, 0x01, 0xf2, 0x03, 0xf4, 0xf5, 0xf6, 0xf7].iter()), !0xddf2);
    }
}
