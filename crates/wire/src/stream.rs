//! The first line of a stream: who is asked for, and the answer.
//!
//! A client of `agent.sock` writes `CONNECT <port>\n` and reads `OK <port>\n` or
//! `ERR <code> <message>\n` (Firecracker's vsock convention); after `OK` the stream is bytes.
//! Inside the carrier the same lines open a stream: `CONNECT` from the keeper towards the agent,
//! `TCP <host>:<port>` and `DNS` from the agent towards the keeper (egress).

use std::fmt;

/// The agent's own services. Never reachable through a client's port.
pub const CONTROL_PORT: u16 = 1;
/// envd: the sandbox's API.
pub const ENVD_PORT: u16 = 49_983;
/// A first line longer than this is refused.
pub const LINE_BYTES_MAX: usize = 512;

/// What a stream is opened for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Open {
    /// 127.0.0.1:port inside the sandbox, or one of the agent's own services.
    Connect { port: u16 },
    /// An outbound TCP connection by name or address.
    Tcp { host: String, port: u16 },
    /// DNS messages, each with a 16-bit big-endian length before it (RFC 1035 §4.2.2).
    Dns,
}

/// Why a stream could not be opened.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Refusal {
    /// Nothing listens there.
    Closed,
    /// The egress policy says no.
    Denied,
    /// The name cannot be resolved or the address not reached.
    Unreachable,
    /// Too many streams, or the carrier is gone.
    Unavailable,
    /// The line was not understood.
    Invalid,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Reply {
    Ok,
    Refused { why: Refusal, message: String },
}

#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("the line {line:?} does not open a stream: {why}")]
pub struct LineError {
    pub line: String,
    pub why: &'static str,
}

fn refuse(line: &str, why: &'static str) -> LineError {
    LineError { line: line.chars().take(120).collect(), why }
}

impl fmt::Display for Open {
    /// The line without its newline.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Connect { port } => write!(f, "CONNECT {port}"),
            Self::Tcp { host, port } if host.contains(':') => write!(f, "TCP [{host}]:{port}"),
            Self::Tcp { host, port } => write!(f, "TCP {host}:{port}"),
            Self::Dns => f.write_str("DNS"),
        }
    }
}

impl Open {
    /// Parses a line without its newline.
    pub fn parse(line: &str) -> Result<Self, LineError> {
        let (verb, rest) = line.split_once(' ').unwrap_or((line, ""));
        match verb {
            "CONNECT" => Ok(Self::Connect { port: port(line, rest)? }),
            "TCP" => {
                let (host, given) =
                    rest.rsplit_once(':').ok_or_else(|| refuse(line, "no port after the host"))?;
                let host = host.strip_prefix('[').and_then(|h| h.strip_suffix(']')).unwrap_or(host);
                let plain = !host.is_empty()
                    && host.len() <= 253
                    && host.bytes().all(|b| b.is_ascii_alphanumeric() || b".-_:".contains(&b));
                if !plain {
                    return Err(refuse(line, "the host is not a name or an address"));
                }
                Ok(Self::Tcp { host: host.to_owned(), port: port(line, given)? })
            }
            "DNS" if rest.is_empty() => Ok(Self::Dns),
            _ => Err(refuse(line, "the verb is not CONNECT, TCP or DNS")),
        }
    }
}

fn port(line: &str, given: &str) -> Result<u16, LineError> {
    given
        .parse::<u16>()
        .ok()
        .filter(|port| *port != 0)
        .ok_or_else(|| refuse(line, "the port is not in 1..=65535"))
}

impl Refusal {
    const ALL: [Self; 5] = [Self::Closed, Self::Denied, Self::Unreachable, Self::Unavailable, Self::Invalid];

    #[must_use]
    pub fn code(self) -> &'static str {
        match self {
            Self::Closed => "closed",
            Self::Denied => "denied",
            Self::Unreachable => "unreachable",
            Self::Unavailable => "unavailable",
            Self::Invalid => "invalid",
        }
    }
}

impl fmt::Display for Reply {
    /// The line without its newline; the message never holds one.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Ok => f.write_str("OK"),
            Self::Refused { why, message } => {
                let clean: String =
                    message.chars().map(|c| if c.is_control() { ' ' } else { c }).take(300).collect();
                write!(f, "ERR {} {clean}", why.code())
            }
        }
    }
}

impl Reply {
    pub fn parse(line: &str) -> Result<Self, LineError> {
        if line == "OK" || line.starts_with("OK ") {
            return Ok(Self::Ok);
        }
        let rest = line.strip_prefix("ERR ").ok_or_else(|| refuse(line, "neither OK nor ERR"))?;
        let (code, message) = rest.split_once(' ').unwrap_or((rest, ""));
        let why = Refusal::ALL
            .into_iter()
            .find(|refusal| refusal.code() == code)
            .ok_or_else(|| refuse(line, "the refusal's code is not known"))?;
        Ok(Self::Refused { why, message: message.to_owned() })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_are_read_back() {
        for open in [
            Open::Connect { port: 8000 },
            Open::Tcp { host: "example.org".into(), port: 443 },
            Open::Tcp { host: "2001:db8::1".into(), port: 80 },
            Open::Dns,
        ] {
            assert_eq!(Open::parse(&open.to_string()), Ok(open));
        }
        let refused = Reply::Refused { why: Refusal::Denied, message: "private\naddress".into() };
        assert_eq!(
            Reply::parse(&refused.to_string()),
            Ok(Reply::Refused { why: Refusal::Denied, message: "private address".into() })
        );
    }

    #[test]
    fn hostile_lines_are_refused() {
        for line in ["", "CONNECT", "CONNECT 0", "CONNECT 70000", "TCP a", "TCP :1", "TCP a b:1", "DNS x"] {
            assert!(Open::parse(line).is_err(), "{line:?} was accepted");
        }
    }
}
