//! Interfaces, as netdevice(7) and arp(7) have them.

use std::io;
use std::net::Ipv4Addr;
use std::os::fd::{AsRawFd, OwnedFd};

use rustix::net::{AddressFamily, SocketFlags, SocketType, socket_with};

/// Hardware type of Ethernet (linux/if_arp.h).
const ETHERNET: libc::sa_family_t = 1;

/// An `ifreq` for the interface of that name; a name that is too long is cut off.
pub fn named(name: &str) -> libc::ifreq {
    // SAFETY: all-zero bytes are a valid value of this plain structure.
    let mut request: libc::ifreq = unsafe { std::mem::zeroed() };
    copy_name(&mut request.ifr_name, name);
    request
}

fn copy_name(to: &mut [libc::c_char], name: &str) {
    let room = to.len() - 1;
    for (to, from) in to.iter_mut().zip(name.bytes().take(room)) {
        *to = libc::c_char::from_ne_bytes([from]);
    }
}

/// An interface of the namespace that the thread was in when this was opened.
pub struct Interface {
    name: String,
    socket: OwnedFd,
}

impl Interface {
    pub fn open(name: &str) -> io::Result<Self> {
        let socket = socket_with(AddressFamily::INET, SocketType::DGRAM, SocketFlags::CLOEXEC, None)?;
        Ok(Self { name: name.to_owned(), socket })
    }

    pub fn up(&self) -> io::Result<()> {
        let mut request = named(&self.name);
        let flags = libc::IFF_UP | libc::IFF_RUNNING;
        request.ifr_ifru.ifru_flags = libc::c_short::try_from(flags).map_err(io::Error::other)?;
        self.ask(libc::SIOCSIFFLAGS, &mut request)
    }

    pub fn set_mac(&self, mac: [u8; 6]) -> io::Result<()> {
        let mut request = named(&self.name);
        request.ifr_ifru.ifru_hwaddr = hardware(mac);
        self.ask(libc::SIOCSIFHWADDR, &mut request)
    }

    pub fn set_address(&self, address: Ipv4Addr, netmask: Ipv4Addr) -> io::Result<()> {
        let mut request = named(&self.name);
        request.ifr_ifru.ifru_addr = internet(address);
        self.ask(libc::SIOCSIFADDR, &mut request)?;
        let mut request = named(&self.name);
        request.ifr_ifru.ifru_netmask = internet(netmask);
        self.ask(libc::SIOCSIFNETMASK, &mut request)
    }

    pub fn index(&self) -> io::Result<u32> {
        let mut request = named(&self.name);
        self.ask(libc::SIOCGIFINDEX, &mut request)?;
        // SAFETY: `SIOCGIFINDEX` filled in the index.
        let index = unsafe { request.ifr_ifru.ifru_ifindex };
        u32::try_from(index).map_err(io::Error::other)
    }

    /// Who has the address, for good: nobody is asked.
    pub fn neighbour(&self, address: Ipv4Addr, mac: [u8; 6]) -> io::Result<()> {
        // SAFETY: all-zero bytes are a valid value of this plain structure.
        let mut entry: libc::arpreq = unsafe { std::mem::zeroed() };
        entry.arp_pa = internet(address);
        entry.arp_ha = hardware(mac);
        entry.arp_flags = libc::ATF_PERM | libc::ATF_COM;
        copy_name(&mut entry.arp_dev, &self.name);
        // SAFETY: `SIOCSARP` reads a whole `arpreq`, which `entry` is.
        done(unsafe { libc::ioctl(self.socket.as_raw_fd(), libc::SIOCSARP, &raw const entry) })
    }

    pub fn default_route(&self, gateway: Ipv4Addr) -> io::Result<()> {
        // SAFETY: all-zero bytes are a valid value of this plain structure.
        let mut route: libc::rtentry = unsafe { std::mem::zeroed() };
        route.rt_dst = internet(Ipv4Addr::UNSPECIFIED);
        route.rt_genmask = internet(Ipv4Addr::UNSPECIFIED);
        route.rt_gateway = internet(gateway);
        route.rt_flags = libc::RTF_UP | libc::RTF_GATEWAY;
        // SAFETY: `SIOCADDRT` reads a whole `rtentry`, which `route` is; its only pointer, a device's name, is null.
        done(unsafe { libc::ioctl(self.socket.as_raw_fd(), libc::SIOCADDRT, &raw const route) })
    }

    /// Only for requests that read or write an `ifreq`.
    fn ask(&self, what: libc::c_ulong, request: &mut libc::ifreq) -> io::Result<()> {
        let request: *mut libc::ifreq = request;
        // SAFETY: all requests of this file read or write a whole `ifreq`, which this is.
        done(unsafe { libc::ioctl(self.socket.as_raw_fd(), what, request) })
    }
}

fn done(outcome: libc::c_int) -> io::Result<()> {
    if outcome < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

/// A `sockaddr_in` without a port: family, port, address.
fn internet(address: Ipv4Addr) -> libc::sockaddr {
    let [a, b, c, d] = address.octets();
    socket_address(libc::sa_family_t::try_from(libc::AF_INET).unwrap_or_default(), &[0, 0, a, b, c, d])
}

fn hardware(mac: [u8; 6]) -> libc::sockaddr {
    socket_address(ETHERNET, &mac)
}

fn socket_address(family: libc::sa_family_t, bytes: &[u8]) -> libc::sockaddr {
    let mut address = libc::sockaddr { sa_family: family, sa_data: [0; 14] };
    for (to, from) in address.sa_data.iter_mut().zip(bytes) {
        *to = libc::c_char::from_ne_bytes([*from]);
    }
    address
}
