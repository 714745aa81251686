//! Names, by the host's own resolver.

use std::io;
use std::net::{IpAddr, SocketAddr, UdpSocket};
use std::time::Duration;

use tokio::net::lookup_host;
use tokio::time::timeout;

const LOOKUP_TIME_MAX: Duration = Duration::from_secs(8);
/// Addresses that are kept of one answer.
const ADDRESSES_MAX: usize = 16;
/// Any port: nothing is sent to it.
const PROBE_PORT: u16 = 9;

#[derive(Debug, thiserror::Error)]
pub(crate) enum LookupError {
    #[error("the name {name} does not exist")]
    NoSuchName { name: String },
    /// The reason is part of the text: it goes to the sandbox as one line.
    #[error("the name {name} cannot be resolved now: {why}")]
    Failed { name: String, why: String },
}

pub(crate) async fn lookup(name: &str) -> Result<Vec<IpAddr>, LookupError> {
    let failed = |why: String| LookupError::Failed { name: name.to_owned(), why };
    let found = timeout(LOOKUP_TIME_MAX, lookup_host((name, 0)))
        .await
        .map_err(|_| failed(format!("no answer within {} s", LOOKUP_TIME_MAX.as_secs())))?;
    match found {
        Ok(addresses) => {
            let mut ips = Vec::new();
            for ip in addresses.map(|address: SocketAddr| address.ip()).take(ADDRESSES_MAX) {
                if !ips.contains(&ip) {
                    ips.push(ip);
                }
            }
            Ok(ips)
        }
        Err(error) if is_temporary(&error) => Err(failed(error.to_string())),
        Err(_) => Err(LookupError::NoSuchName { name: name.to_owned() }),
    }
}

/// The standard library tells getaddrinfo's codes apart only in words (EAI_AGAIN, EAI_FAIL).
fn is_temporary(error: &io::Error) -> bool {
    let text = error.to_string().to_ascii_lowercase();
    error.raw_os_error().is_some() || text.contains("temporary") || text.contains("try again")
}

/// Whether the address is one of the host's own, also when carried within an IPv6 address: the kernel
/// would talk to itself. Nothing is sent.
pub(crate) fn is_hosts_own(ip: IpAddr) -> bool {
    let carried = match ip {
        IpAddr::V4(_) => None,
        IpAddr::V6(ip) => dormouse_policy::embedded(ip).map(IpAddr::V4),
    };
    [Some(ip), carried].into_iter().flatten().any(routes_to_itself)
}

fn routes_to_itself(ip: IpAddr) -> bool {
    let any: SocketAddr = match ip {
        IpAddr::V4(_) => (std::net::Ipv4Addr::UNSPECIFIED, 0).into(),
        IpAddr::V6(_) => (std::net::Ipv6Addr::UNSPECIFIED, 0).into(),
    };
    let source = UdpSocket::bind(any).and_then(|socket| {
        socket.connect((ip, PROBE_PORT))?;
        socket.local_addr()
    });
    source.is_ok_and(|source| source.ip() == ip)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn loopback_is_the_hosts_own_and_documentation_is_not() {
        assert!(is_hosts_own("127.0.0.1".parse().unwrap()));
        assert!(is_hosts_own("::ffff:127.0.0.1".parse().unwrap()));
        assert!(!is_hosts_own("192.0.2.1".parse().unwrap()));
    }
}
