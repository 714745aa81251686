//! As much of DNS messages (RFC 1035) as a stub needs: one question read, one answer written. No I/O.
//!
//! Invariant: whatever bytes come in, reading them ends with a question or with nothing; names are
//! bounded, compression pointers in a question are refused.

use std::net::IpAddr;

/// A message longer than this is refused; TCP framing could say 64 KiB.
pub const MESSAGE_BYTES_MAX: usize = 4096;
/// What a UDP answer may hold without EDNS.
pub const UDP_BYTES_MAX: usize = 512;
const HEADER_BYTES: usize = 12;
const NAME_CHARS_MAX: usize = 253;
/// Addresses per answer: fits a UDP message.
const ANSWERS_MAX: usize = 12;
/// Seconds; short, since the keeper decides anew on every connection.
const TTL: u32 = 30;

pub const TYPE_A: u16 = 1;
pub const TYPE_AAAA: u16 = 28;
const CLASS_IN: u16 = 1;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub enum Rcode {
    NoError = 0,
    FormatError = 1,
    ServerFailure = 2,
    NoSuchName = 3,
    NotImplemented = 4,
    Refused = 5,
}

/// A query with exactly one question of class IN.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Query {
    pub id: u16,
    recursion_desired: bool,
    /// Without the last dot; as it was written.
    pub name: String,
    pub kind: u16,
    /// The question's bytes, repeated in the answer.
    question: Vec<u8>,
}

fn u16_at(bytes: &[u8], at: usize) -> Option<u16> {
    Some(u16::from_be_bytes(bytes.get(at..at + 2)?.try_into().ok()?))
}

/// The id of whatever message it is.
#[must_use]
pub fn message_id(bytes: &[u8]) -> Option<u16> {
    u16_at(bytes, 0)
}

/// Whether the message is cut short and is to be asked for again over TCP.
#[must_use]
pub fn is_truncated(bytes: &[u8]) -> bool {
    bytes.get(2).is_some_and(|flags| flags & 0x02 != 0)
}

impl Query {
    /// `Err`: the answer to give, or nothing where not even that makes sense.
    pub fn parse(bytes: &[u8]) -> Result<Self, Option<Vec<u8>>> {
        if bytes.len() < HEADER_BYTES || bytes.len() > MESSAGE_BYTES_MAX || bytes[2] & 0x80 != 0 {
            return Err(None);
        }
        let refuse = |rcode: Rcode| {
            let mut answer = bytes[..HEADER_BYTES].to_vec();
            answer[2] = 0x80 | (bytes[2] & 0x79);
            answer[3] = 0x80 | rcode as u8;
            answer[4..].fill(0);
            Err(Some(answer))
        };
        if bytes[2] & 0x78 != 0 {
            return refuse(Rcode::NotImplemented);
        }
        match Self::parse_question(bytes) {
            Some(query) => Ok(query),
            None => refuse(Rcode::FormatError),
        }
    }

    fn parse_question(bytes: &[u8]) -> Option<Self> {
        if u16_at(bytes, 4)? != 1 {
            return None;
        }
        let mut name = String::new();
        let mut at = HEADER_BYTES;
        loop {
            let len = usize::from(*bytes.get(at)?);
            at += 1;
            if len == 0 {
                break;
            }
            let label = bytes.get(at..at + len).filter(|_| len < 64)?;
            if !label.iter().all(|b| b.is_ascii_alphanumeric() || *b == b'-' || *b == b'_') {
                return None;
            }
            if !name.is_empty() {
                name.push('.');
            }
            name.extend(label.iter().copied().map(char::from));
            if name.len() > NAME_CHARS_MAX {
                return None;
            }
            at += len;
        }
        let (kind, class) = (u16_at(bytes, at)?, u16_at(bytes, at + 2)?);
        if class != CLASS_IN {
            return None;
        }
        Some(Self {
            id: u16_at(bytes, 0)?,
            recursion_desired: bytes[2] & 0x01 != 0,
            name,
            kind,
            question: bytes[HEADER_BYTES..at + 4].to_vec(),
        })
    }

    /// An answer without records.
    #[must_use]
    pub fn refuse(&self, rcode: Rcode) -> Vec<u8> {
        self.answer(rcode, &[])
    }

    /// An answer with those addresses that are of the question's type.
    #[must_use]
    pub fn answer(&self, rcode: Rcode, ips: &[IpAddr]) -> Vec<u8> {
        let fitting = ips.iter().filter(|ip| match ip {
            IpAddr::V4(_) => self.kind == TYPE_A,
            IpAddr::V6(_) => self.kind == TYPE_AAAA,
        });
        let ips: Vec<_> = fitting.take(ANSWERS_MAX).collect();
        let mut out = self.id.to_be_bytes().to_vec();
        out.extend_from_slice(&[0x80 | u8::from(self.recursion_desired), 0x80 | rcode as u8, 0, 1, 0]);
        out.push(u8::try_from(ips.len()).unwrap_or(0));
        out.extend_from_slice(&[0; 4]);
        out.extend_from_slice(&self.question);
        for ip in ips {
            // The name: a pointer to the question's.
            out.extend_from_slice(&[0xC0, 0x0C]);
            out.extend_from_slice(&self.kind.to_be_bytes());
            out.extend_from_slice(&CLASS_IN.to_be_bytes());
            out.extend_from_slice(&TTL.to_be_bytes());
            match ip {
                IpAddr::V4(ip) => {
                    out.extend_from_slice(&[0, 4]);
                    out.extend_from_slice(&ip.octets());
                }
                IpAddr::V6(ip) => {
                    out.extend_from_slice(&[0, 16]);
                    out.extend_from_slice(&ip.octets());
                }
            }
        }
        out
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn query(name: &str, kind: u16) -> Vec<u8> {
        let mut bytes = vec![0x12, 0x34, 0x01, 0, 0, 1, 0, 0, 0, 0, 0, 0];
        for label in name.split('.') {
            bytes.push(u8::try_from(label.len()).unwrap());
            bytes.extend_from_slice(label.as_bytes());
        }
        bytes.push(0);
        bytes.extend_from_slice(&kind.to_be_bytes());
        bytes.extend_from_slice(&[0, 1]);
        bytes
    }

    #[test]
    fn a_question_is_read_and_answered() {
        let parsed = Query::parse(&query("www.Example.org", TYPE_A)).unwrap();
        assert_eq!((parsed.id, parsed.name.as_str(), parsed.kind), (0x1234, "www.Example.org", TYPE_A));
        let answer = parsed.answer(Rcode::NoError, &["::1".parse().unwrap(), "1.2.3.4".parse().unwrap()]);
        assert_eq!(answer[..8], [0x12, 0x34, 0x81, 0x80, 0, 1, 0, 1]);
        assert_eq!(answer[answer.len() - 4..], [1, 2, 3, 4]);
        let many = vec!["::1".parse().unwrap(); 100];
        let aaaa = Query::parse(&query("a.b", TYPE_AAAA)).unwrap();
        assert!(aaaa.answer(Rcode::NoError, &many).len() <= UDP_BYTES_MAX);
        assert_eq!(parsed.refuse(Rcode::Refused)[3] & 0x0F, 5);
    }

    #[test]
    fn hostile_messages_are_refused() {
        assert_eq!(Query::parse(b"short"), Err(None));
        let mut answer = query("a.b", TYPE_A);
        answer[2] |= 0x80;
        assert_eq!(Query::parse(&answer), Err(None), "answers are not answered");
        let mut pointer = query("a.b", TYPE_A);
        pointer[12] = 0xC0;
        let refused = Query::parse(&pointer).unwrap_err().unwrap();
        assert_eq!(refused[3] & 0x0F, Rcode::FormatError as u8);
        let mut two = query("a.b", TYPE_A);
        two[5] = 2;
        assert!(Query::parse(&two).unwrap_err().is_some());
        let long = vec!["a".repeat(60); 5].join(".");
        assert!(Query::parse(&query(&long, TYPE_A)).is_err());
    }

    proptest! {
        #[test]
        fn any_bytes_are_survived(bytes in proptest::collection::vec(any::<u8>(), 0..600)) {
            if let Ok(query) = Query::parse(&bytes) {
                prop_assert!(query.name.len() <= NAME_CHARS_MAX);
            }
        }
    }
}
