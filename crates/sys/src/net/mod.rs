//! A network of a sandbox's own: a namespace that nobody but descriptors holds.
//!
//! ```text
//!            ┌──────────────── namespace, without a name ────────────────┐
//! guest ═════╪═ tap 198.18.0.1/30 ─ every address is this namespace's own │
//! 198.18.0.2 │        ├─ TCP, any address, any port ──> one listener       │
//!            │        ├─ UDP 198.18.0.1:53 ───────────> one socket         │
//!            │        └─ other UDP ─> the kernel's "port unreachable"      │
//!            └─────────────────────────────────────────────────────────────┘
//! ```
//! A connection's own address in here is what the guest wanted to reach, so nothing is rewritten and nothing is
//! tracked: an unknown flow's packet is answered by a reset, as on any host. A listener for all ports is what the
//! kernel's socket lookup gives to a program of ten instructions ([`steer`]).
//!
//! Invariants: nothing is forwarded; nothing exists in the caller's own namespace, nor after the last descriptor is
//! closed. The block 198.18.0.0/15 (RFC 2544) is nobody's: what a guest may reach never lies in it.

mod ask;
mod interface;
mod route;
mod steer;
mod tap;

use std::fs;
use std::io;
use std::net::{Ipv4Addr, SocketAddrV4, TcpListener, UdpSocket};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;
use std::thread;

use rustix::net::{AddressFamily, RecvFlags, SocketFlags, SocketType, ipproto};

pub use ask::ask_after_connections;
use interface::Interface;

/// The same for all guests: a fork must find the same network.
pub const GUEST: Ipv4Addr = Ipv4Addr::new(198, 18, 0, 2);
pub const GATEWAY: Ipv4Addr = Ipv4Addr::new(198, 18, 0, 1);
const NETMASK: Ipv4Addr = Ipv4Addr::new(255, 255, 255, 252);
pub const GUEST_MAC: [u8; 6] = [0x02, 0, 0, 0, 0, 0x01];
const GATEWAY_MAC: [u8; 6] = [0x02, 0, 0, 0, 0, 0x02];
pub const DNS_PORT: u16 = 53;
const LOOPBACK: &str = "lo";
const TAP: &str = "tap";
/// Whatever it is: no lookup of a program's asks for it.
const LISTENER_PORT: u16 = 1;
/// Datagrams that are looked at before they are refused wait in here; more are refused unseen.
const SEEN_BYTES_MAX: usize = 32 << 10;

/// What the namespace's kernel is told: file below `/proc/sys/net`, value, whether it must be so.
const SETTINGS: &[(&str, &str, bool)] = &[
    // Inherited from the host's own, where a container engine may have switched it on.
    ("ipv4/ip_forward", "0", true),
    // Every address is its own here: an echo would say that all the world answers.
    ("ipv4/icmp_echo_ignore_all", "1", false),
    // A refused datagram is told each time.
    ("ipv4/icmp_ratelimit", "0", false),
    // A guest that sleeps does not acknowledge: hours, not minutes, before a connection to it is given up.
    ("ipv4/tcp_retries2", "255", false),
    ("ipv6/conf/all/disable_ipv6", "1", false),
    ("ipv6/conf/default/disable_ipv6", "1", false),
];

#[derive(Debug, thiserror::Error)]
pub enum NetworkError {
    #[error("no network namespace can be made")]
    Namespace(#[source] io::Error),
    #[error("the namespace's setting {name} cannot be made")]
    Setting { name: &'static str, source: io::Error },
    #[error("no tap device can be made of /dev/net/tun")]
    Tap(#[source] io::Error),
    #[error("the namespace's interface {name} cannot be set up")]
    Interface { name: &'static str, source: io::Error },
    #[error("the namespace's routes cannot be set")]
    Route(#[source] io::Error),
    #[error("the namespace's sockets cannot be opened")]
    Socket(#[source] io::Error),
    #[error("the kernel takes no program for its socket lookup (BPF_SK_LOOKUP, Linux 5.9)")]
    Steer(#[source] io::Error),
}

impl NetworkError {
    /// What mends it.
    #[must_use]
    pub fn mend(&self) -> &'static str {
        match self {
            Self::Tap(_) => "load the module tun (`modprobe tun`)",
            Self::Steer(_) => "use a kernel of 5.9 or later with CONFIG_BPF_SYSCALL",
            _ => "run it as root, outside of a container that takes network administration away",
        }
    }
}

/// One namespace. It lives as long as any of these descriptors, or duplicates of them, do.
#[derive(Debug)]
pub struct Network {
    /// One frame at a time, each behind a virtio header (`IFF_VNET_HDR`).
    pub tap: OwnedFd,
    /// Takes every connection; an accepted socket's own address is what the guest asked for.
    pub tcp: OwnedFd,
    /// Bound to [`GATEWAY`], [`DNS_PORT`].
    pub dns: OwnedFd,
    /// Copies of all datagrams that come in (raw(7)): to tell what the kernel refuses.
    pub datagrams: OwnedFd,
    /// Steers connections to `tcp`, as long as it is open.
    pub steering: OwnedFd,
}

impl Network {
    /// Needs root. Blocks for some milliseconds.
    pub fn new() -> Result<Self, NetworkError> {
        in_new_namespace(Self::fill)?
    }

    fn fill() -> Result<Self, NetworkError> {
        for (name, value, needed) in SETTINGS {
            match set(name, value) {
                Err(source) if *needed => return Err(NetworkError::Setting { name, source }),
                // A kernel without IPv6 has nothing to switch off; the others are no worse than slower answers.
                _ => {}
            }
        }
        let tap = tap::open(TAP).map_err(NetworkError::Tap)?;
        let configured = |name| move |source| NetworkError::Interface { name, source };
        Interface::open(LOOPBACK).and_then(|it| it.up()).map_err(configured(LOOPBACK))?;
        let index = set_up_tap().map_err(configured(TAP))?;
        route::all_is_local().and_then(|()| route::to_guest(GUEST, index)).map_err(NetworkError::Route)?;
        let sockets = || -> io::Result<_> {
            let tcp = TcpListener::bind(SocketAddrV4::new(Ipv4Addr::UNSPECIFIED, LISTENER_PORT))?;
            let dns = UdpSocket::bind(SocketAddrV4::new(GATEWAY, DNS_PORT))?;
            tcp.set_nonblocking(true)?;
            dns.set_nonblocking(true)?;
            Ok((OwnedFd::from(tcp), OwnedFd::from(dns), datagrams()?))
        };
        let (tcp, dns, datagrams) = sockets().map_err(NetworkError::Socket)?;
        let namespace = fs::File::open("/proc/thread-self/ns/net").map_err(NetworkError::Namespace)?;
        let steering = steer::tcp_to(tcp.as_fd(), namespace.as_fd()).map_err(NetworkError::Steer)?;
        Ok(Self { tap, tcp, dns, datagrams, steering })
    }

    /// What serves it, without what the guest has of it.
    #[must_use]
    pub fn sockets(&self) -> [BorrowedFd<'_>; 4] {
        [&self.tcp, &self.dns, &self.datagrams, &self.steering].map(AsFd::as_fd)
    }
}

/// Does `work` in a network namespace that is new and that nothing but what `work` gives back holds.
pub fn in_new_namespace<T: Send + 'static>(
    work: impl FnOnce() -> T + Send + 'static,
) -> Result<T, NetworkError> {
    // A thread's namespace is its own; this one ends with its work.
    let thread = thread::Builder::new().name("namespace".to_owned()).spawn(move || {
        tap::leave_namespace().map_err(NetworkError::Namespace)?;
        Ok(work())
    });
    let thread = thread.map_err(NetworkError::Namespace)?;
    thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
}

/// Within the guest: gives the network card its address and the way to everything. False: there is no card.
pub fn set_up_guest(name: &str) -> io::Result<bool> {
    if !Path::new("/sys/class/net").join(name).exists() {
        return Ok(false);
    }
    set_up_card(name)?;
    Ok(true)
}

/// The same, for a card that is known to be there.
pub fn set_up_card(name: &str) -> io::Result<()> {
    let card = Interface::open(name)?;
    card.set_address(GUEST, NETMASK)?;
    card.up()?;
    card.neighbour(GATEWAY, GATEWAY_MAC)?;
    card.default_route(GATEWAY)
}

/// A tap in the calling thread's namespace, for whoever plays the guest's part without a guest.
pub fn guest_tap(name: &str) -> io::Result<OwnedFd> {
    let tap = tap::open(name)?;
    Interface::open(name)?.set_mac(GUEST_MAC)?;
    Ok(tap)
}

/// In the calling thread's namespace, for tests: whoever listens on a port answers for all the world's addresses, and
/// none of them counts as the host's own.
pub fn pretend_world() -> io::Result<()> {
    Interface::open(LOOPBACK)?.up()?;
    route::all_is_local_from(Ipv4Addr::LOCALHOST)
}

/// Gives the index.
fn set_up_tap() -> io::Result<u32> {
    let tap = Interface::open(TAP)?;
    tap.set_mac(GATEWAY_MAC)?;
    tap.set_address(GATEWAY, NETMASK)?;
    tap.up()?;
    // A guest that sleeps answers no question for its address.
    tap.neighbour(GUEST, GUEST_MAC)?;
    tap.index()
}

fn set(name: &str, value: &str) -> io::Result<()> {
    let path = Path::new("/proc/sys/net").join(name);
    if fs::read_to_string(&path)?.trim() == value { Ok(()) } else { fs::write(&path, value) }
}

fn datagrams() -> io::Result<OwnedFd> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = rustix::net::socket_with(AddressFamily::INET, SocketType::RAW, flags, Some(ipproto::UDP))?;
    rustix::net::sockopt::set_socket_recv_buffer_size(&socket, SEEN_BYTES_MAX)?;
    Ok(socket)
}

/// A datagram that came in, from [`Network::datagrams`]: where it was to go. `None`: what was read is none.
#[must_use]
pub fn destination(packet: &[u8]) -> Option<SocketAddrV4> {
    let header_bytes = usize::from(packet.first()? & 0x0f) * 4;
    let ip: [u8; 4] = packet.get(16..20)?.try_into().ok()?;
    let port: [u8; 2] = packet.get(header_bytes + 2..header_bytes + 4)?.try_into().ok()?;
    Some(SocketAddrV4::new(ip.into(), u16::from_be_bytes(port)))
}

/// Takes the next of [`Network::datagrams`]; `WouldBlock`: there is none.
pub fn next_datagram(socket: BorrowedFd<'_>) -> io::Result<Option<SocketAddrV4>> {
    // An IPv4 header with all options, and the ports.
    let mut head = [0_u8; 64];
    let (length, _) = rustix::net::recv(socket, &mut head, RecvFlags::DONTWAIT)?;
    Ok(destination(&head[..length]))
}

#[cfg(test)]
mod tests;
