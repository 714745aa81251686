//! Networks, and the blocks that are not of the public internet (IANA special-purpose registries,
//! RFC 6890 and its updates).

use std::fmt;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

/// An address block. IPv4-mapped input is held as IPv4.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Network {
    ip: IpAddr,
    prefix: u8,
}

const fn v4(a: u8, b: u8, c: u8, d: u8, prefix: u8) -> Network {
    Network { ip: IpAddr::V4(Ipv4Addr::new(a, b, c, d)), prefix }
}

const fn v6(head: [u16; 4], tail: u16, prefix: u8) -> Network {
    let [a, b, c, d] = head;
    Network { ip: IpAddr::V6(Ipv6Addr::new(a, b, c, d, 0, 0, 0, tail)), prefix }
}

/// The documentation blocks are left out on purpose: nobody's host has them, and gateways that stand in
/// front of the internet answer names with them.
const SPECIAL: &[(Network, &str)] = &[
    (v4(0, 0, 0, 0, 8), "unspecified"),
    (v4(10, 0, 0, 0, 8), "private"),
    (v4(100, 64, 0, 0, 10), "carrier-grade NAT"),
    (v4(127, 0, 0, 0, 8), "loopback"),
    (v4(169, 254, 169, 254, 32), "cloud metadata"),
    (v4(169, 254, 0, 0, 16), "link-local"),
    (v4(168, 63, 129, 16, 32), "cloud metadata"),
    (v4(172, 16, 0, 0, 12), "private"),
    (v4(192, 0, 0, 0, 24), "protocol"),
    (v4(192, 88, 99, 0, 24), "6to4 relay"),
    (v4(192, 168, 0, 0, 16), "private"),
    (v4(198, 18, 0, 0, 15), "benchmarking"),
    (v4(224, 0, 0, 0, 4), "multicast"),
    (v4(240, 0, 0, 0, 4), "reserved"),
    (v6([0, 0, 0, 0], 0, 128), "unspecified"),
    (v6([0, 0, 0, 0], 1, 128), "loopback"),
    (v6([0x64, 0xff9b, 1, 0], 0, 48), "local translation"),
    (v6([0x100, 0, 0, 0], 0, 64), "discard"),
    (v6([0x2001, 0, 0, 0], 0, 32), "Teredo"),
    (v6([0xfd00, 0xec2, 0, 0], 0x254, 128), "cloud metadata"),
    (v6([0xfc00, 0, 0, 0], 0, 7), "private"),
    (v6([0xfe80, 0, 0, 0], 0, 10), "link-local"),
    (v6([0xfec0, 0, 0, 0], 0, 10), "site-local"),
    (v6([0xff00, 0, 0, 0], 0, 8), "multicast"),
];

/// What kind of special address it is, directly or embedded; `None`: an address of the public internet.
#[must_use]
pub fn special(ip: IpAddr) -> Option<&'static str> {
    let ip = ip.to_canonical();
    let direct = SPECIAL.iter().find(|(network, _)| network.contains(ip)).map(|(_, what)| *what);
    direct.or_else(|| match ip {
        IpAddr::V4(_) => None,
        IpAddr::V6(ip) => embedded(ip).and_then(|inner| special(IpAddr::V4(inner))),
    })
}

/// The IPv4 address that an IPv6 address carries: IPv4-compatible, 6to4 (RFC 3056), NAT64 (RFC 6052).
#[must_use]
pub fn embedded(ip: Ipv6Addr) -> Option<Ipv4Addr> {
    let join = |high: u16, low: u16| Ipv4Addr::from((u32::from(high) << 16) | u32::from(low));
    match ip.segments() {
        [0, 0, 0, 0, 0, 0, high, low] => Some(join(high, low)),
        [0x2002, high, low, ..] => Some(join(high, low)),
        [0x64, 0xff9b, 0, 0, 0, 0, high, low] => Some(join(high, low)),
        _ => None,
    }
}

fn bits(ip: IpAddr) -> (u128, u8) {
    match ip {
        IpAddr::V4(ip) => (u128::from(u32::from(ip)) << 96, 32),
        IpAddr::V6(ip) => (u128::from(ip), 128),
    }
}

fn same_prefix(a: u128, b: u128, prefix: u8) -> bool {
    prefix == 0 || (a ^ b) >> (128 - u32::from(prefix)) == 0
}

impl Network {
    /// `address` or `address/prefix`; bits behind the prefix are ignored.
    #[must_use]
    pub fn parse(text: &str) -> Option<Self> {
        let (ip, prefix) = match text.split_once('/') {
            Some((ip, prefix)) => (ip, Some(prefix)),
            None => (text, None),
        };
        let given: IpAddr = ip.parse().ok()?;
        let max = bits(given).1;
        let prefix = match prefix {
            None => max,
            Some(text) if text.bytes().all(|b| b.is_ascii_digit()) => text.parse().ok()?,
            Some(_) => return None,
        };
        if prefix > max {
            return None;
        }
        match (given, given.to_canonical()) {
            (IpAddr::V6(_), canonical @ IpAddr::V4(_)) if prefix >= 96 => {
                Some(Self { ip: canonical, prefix: prefix - 96 })
            }
            _ => Some(Self { ip: given, prefix }),
        }
    }

    /// Whether the address lies within. `0.0.0.0/0` means everything, of both families.
    #[must_use]
    pub fn contains(&self, ip: IpAddr) -> bool {
        if self.prefix == 0 && self.ip.is_ipv4() {
            return true;
        }
        let ((own, width), (other, other_width)) = (bits(self.ip), bits(ip.to_canonical()));
        width == other_width && same_prefix(own, other, self.prefix)
    }

    /// Exactly one address.
    #[must_use]
    pub fn is_single(&self) -> bool {
        self.prefix == bits(self.ip).1
    }

    /// Wholly within a block that is not of the public internet.
    #[must_use]
    pub fn is_special(&self) -> bool {
        self.is_single() && special(self.ip).is_some()
            || SPECIAL.iter().any(|(block, _)| self.prefix >= block.prefix && block.contains(self.ip))
    }
}

impl fmt::Display for Network {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.is_single() { write!(f, "{}", self.ip) } else { write!(f, "{}/{}", self.ip, self.prefix) }
    }
}
