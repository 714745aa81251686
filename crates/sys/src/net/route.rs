//! Routes that only netlink can set (rtnetlink(7)).
//!
//! Both are of the table "local", which is asked before every other: the guest's own address is an exception from
//! "all is local", and only there does the kernel take any address for one that it may answer from.

use std::io;
use std::net::Ipv4Addr;

use rustix::net::{AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType, recv, send, socket_with};

const NEW_ROUTE: u16 = 24;
const ERROR: u16 = 2;
/// `NLM_F_REQUEST`, `_ACK`, `_EXCL`, `_CREATE`.
const FLAGS: u16 = 0x0001 | 0x0004 | 0x0200 | 0x0400;
const TABLE_LOCAL: u8 = 255;
const PROTOCOL_STATIC: u8 = 4;
const SCOPE_HOST: u8 = 254;
const SCOPE_LINK: u8 = 253;
const TYPE_UNICAST: u8 = 1;
const TYPE_LOCAL: u8 = 2;
const FAMILY_INET: u8 = 2;
const ATTRIBUTE_DESTINATION: u16 = 1;
const ATTRIBUTE_INTERFACE: u16 = 4;
const ATTRIBUTE_SOURCE: u16 = 7;
const LOOPBACK_INDEX: u32 = 1;
const HEADER_BYTES: usize = 16;

/// Whatever arrives is for this namespace.
pub fn all_is_local() -> io::Result<()> {
    add(TYPE_LOCAL, SCOPE_HOST, None, LOOPBACK_INDEX, None)
}

/// The same, and whoever goes out has this address.
pub fn all_is_local_from(source: Ipv4Addr) -> io::Result<()> {
    add(TYPE_LOCAL, SCOPE_HOST, None, LOOPBACK_INDEX, Some(source))
}

/// But for what goes to the guest.
pub fn to_guest(guest: Ipv4Addr, interface: u32) -> io::Result<()> {
    add(TYPE_UNICAST, SCOPE_LINK, Some(guest), interface, None)
}

/// `to`: one address; `None`: all.
fn add(
    kind: u8,
    scope: u8,
    to: Option<Ipv4Addr>,
    interface: u32,
    source: Option<Ipv4Addr>,
) -> io::Result<()> {
    let prefix = if to.is_some() { 32 } else { 0 };
    let mut body = vec![FAMILY_INET, prefix, 0, 0, TABLE_LOCAL, PROTOCOL_STATIC, scope, kind, 0, 0, 0, 0];
    if let Some(to) = to {
        attribute(&mut body, ATTRIBUTE_DESTINATION, to.octets());
    }
    attribute(&mut body, ATTRIBUTE_INTERFACE, interface.to_ne_bytes());
    if let Some(source) = source {
        attribute(&mut body, ATTRIBUTE_SOURCE, source.octets());
    }
    let length = u32::try_from(HEADER_BYTES + body.len()).map_err(io::Error::other)?;
    let mut message = length.to_ne_bytes().to_vec();
    message.extend(NEW_ROUTE.to_ne_bytes());
    message.extend(FLAGS.to_ne_bytes());
    // Number of the message, and of the sender: the kernel fills that in.
    message.extend([0; 8]);
    message.extend(body);
    // Its protocol 0 is NETLINK_ROUTE.
    let flags = SocketFlags::CLOEXEC;
    let socket = socket_with(AddressFamily::NETLINK, SocketType::RAW, flags, None)?;
    send(&socket, &message, SendFlags::empty())?;
    let mut answer = [0_u8; 1024];
    let (_, length) = recv(&socket, &mut answer, RecvFlags::empty())?;
    outcome(&answer[..length.min(answer.len())])
}

fn attribute(body: &mut Vec<u8>, kind: u16, value: [u8; 4]) {
    const LENGTH: u16 = 8;
    body.extend(LENGTH.to_ne_bytes());
    body.extend(kind.to_ne_bytes());
    body.extend(value);
}

/// An answer is an error, whose number is 0 where all is well.
fn outcome(answer: &[u8]) -> io::Result<()> {
    let kind = answer.get(4..6).and_then(|bytes| Some(u16::from_ne_bytes(bytes.try_into().ok()?)));
    let code = answer.get(16..20).and_then(|bytes| Some(i32::from_ne_bytes(bytes.try_into().ok()?)));
    match (kind, code) {
        (Some(ERROR), Some(0)) => Ok(()),
        (Some(ERROR), Some(code)) => Err(io::Error::from_raw_os_error(code.wrapping_neg())),
        _ => Err(io::Error::new(io::ErrorKind::InvalidData, "the kernel did not acknowledge a route")),
    }
}
