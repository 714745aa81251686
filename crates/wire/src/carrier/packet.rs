//! Packets on the pipes: framing, checksums, and what to skip after a cut. No I/O.
//!
//! ```text
//! 0      1      2        4          8           16         20       24
//! [0xD1] [kind] [0 u16]  [len u32]  [session u64][stream u32][crc32] [payload: len bytes]
//! ```
//!
//! Little-endian; the CRC covers the header before it and the payload. Bytes `0x00` between packets
//! are filler. Every field's value can only shrink when the rest of a cut header is filled with zeros,
//! so a completed stale packet never asks for more bytes than the filler holds.

use std::ops::Range;

use dormouse_types::Generation;

pub const MAGIC: u8 = 0xD1;
pub const FILLER: u8 = 0x00;
pub const HEADER_BYTES: usize = 24;
pub const PAYLOAD_BYTES_MAX: usize = 64 << 10;
pub const PACKET_BYTES_MAX: usize = HEADER_BYTES + PAYLOAD_BYTES_MAX;
/// Version of the carrier, said in `HELLO`.
pub const CARRIER_VERSION: u32 = 1;

const CRC_AT: usize = 20;
const HELLO_BYTES: usize = 12;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub enum Kind {
    /// Keeper → agent: a new session. Payload: version u32, generation u64.
    Hello = 1,
    /// Agent → keeper: the session is taken. Payload as in `Hello`.
    Welcome = 2,
    /// Agent → keeper: the stream of bytes was damaged; a new session is needed.
    Lost = 3,
    Open = 4,
    Data = 5,
    /// The receiver takes this many bytes more. Payload: u32.
    Credit = 6,
    /// No more data in this direction.
    Fin = 7,
    /// The stream is void in both directions.
    Reset = 8,
}

impl Kind {
    fn parse(byte: u8) -> Option<Self> {
        Some(match byte {
            1 => Self::Hello,
            2 => Self::Welcome,
            3 => Self::Lost,
            4 => Self::Open,
            5 => Self::Data,
            6 => Self::Credit,
            7 => Self::Fin,
            8 => Self::Reset,
            _ => return None,
        })
    }

    /// Lengths that this kind may have.
    fn lengths(self) -> Range<usize> {
        match self {
            Self::Hello | Self::Welcome => HELLO_BYTES..HELLO_BYTES + 1,
            Self::Data => 1..PAYLOAD_BYTES_MAX + 1,
            Self::Credit => 4..5,
            Self::Lost | Self::Open | Self::Fin | Self::Reset => 0..1,
        }
    }
}

/// A packet whose checksum is right; its payload is `bytes[HEADER_BYTES..HEADER_BYTES + len]`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Packet {
    pub kind: Kind,
    pub session: u64,
    pub stream: u32,
    pub len: usize,
}

impl Packet {
    #[must_use]
    pub fn total(&self) -> usize {
        HEADER_BYTES + self.len
    }
}

/// What the bytes begin with.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Decoded {
    /// This many bytes of filler.
    Filler(usize),
    Packet(Packet),
    /// More bytes are needed to tell.
    Incomplete,
    /// A whole packet whose checksum is wrong: cut by a new session. Skip this many bytes.
    Cut(usize),
    /// Not the start of a packet. Skip this many bytes.
    Garbage(usize),
}

fn u32_at(bytes: &[u8], at: usize) -> Option<u32> {
    Some(u32::from_le_bytes(bytes.get(at..at + 4)?.try_into().ok()?))
}

fn u64_at(bytes: &[u8], at: usize) -> Option<u64> {
    Some(u64::from_le_bytes(bytes.get(at..at + 8)?.try_into().ok()?))
}

fn checksum(header: &[u8], payload: &[u8]) -> u32 {
    let mut crc = crc32fast::Hasher::new();
    crc.update(header);
    crc.update(payload);
    crc.finalize()
}

/// Reads the start of `bytes`, trusting nothing in them.
#[must_use]
pub fn decode_packet(bytes: &[u8]) -> Decoded {
    match bytes.first() {
        None => return Decoded::Incomplete,
        Some(&FILLER) => {
            return Decoded::Filler(bytes.iter().position(|b| *b != FILLER).unwrap_or(bytes.len()));
        }
        Some(&MAGIC) => {}
        Some(_) => {
            let next = bytes.iter().position(|b| *b == MAGIC || *b == FILLER);
            return Decoded::Garbage(next.unwrap_or(bytes.len()));
        }
    }
    let Some(header) = bytes.get(..HEADER_BYTES) else { return Decoded::Incomplete };
    let fields = (
        Kind::parse(header[1]),
        u32_at(header, 4).and_then(|len| usize::try_from(len).ok()),
        u64_at(header, 8),
        u32_at(header, 16),
        u32_at(header, CRC_AT),
    );
    let (Some(kind), Some(len), Some(session), Some(stream), Some(crc)) = fields else {
        return Decoded::Garbage(1);
    };
    if header[2..4] != [0, 0] || !kind.lengths().contains(&len) {
        return Decoded::Garbage(1);
    }
    let Some(payload) = bytes.get(HEADER_BYTES..HEADER_BYTES + len) else { return Decoded::Incomplete };
    if checksum(&header[..CRC_AT], payload) != crc {
        return Decoded::Cut(HEADER_BYTES + len);
    }
    Decoded::Packet(Packet { kind, session, stream, len })
}

/// Appends one packet whose payload is written by `fill` (at most [`PAYLOAD_BYTES_MAX`] bytes).
pub fn encode_with(
    out: &mut Vec<u8>,
    kind: Kind,
    session: u64,
    stream: u32,
    fill: impl FnOnce(&mut Vec<u8>),
) {
    let start = out.len();
    out.extend_from_slice(&[MAGIC, kind as u8, 0, 0, 0, 0, 0, 0]);
    out.extend_from_slice(&session.to_le_bytes());
    out.extend_from_slice(&stream.to_le_bytes());
    out.extend_from_slice(&[0; 4]);
    fill(out);
    let len = out.len() - start - HEADER_BYTES;
    debug_assert!(kind.lengths().contains(&len), "{kind:?} of {len} bytes");
    let len = u32::try_from(len).unwrap_or(u32::MAX);
    out[start + 4..start + 8].copy_from_slice(&len.to_le_bytes());
    let (header, payload) = out[start..].split_at(HEADER_BYTES);
    let crc = checksum(&header[..CRC_AT], payload);
    out[start + CRC_AT..start + HEADER_BYTES].copy_from_slice(&crc.to_le_bytes());
}

/// Appends one packet.
pub fn encode_packet(out: &mut Vec<u8>, kind: Kind, session: u64, stream: u32, payload: &[u8]) {
    encode_with(out, kind, session, stream, |out| out.extend_from_slice(payload));
}

/// What `HELLO` and `WELCOME` say.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Greeting {
    pub version: u32,
    pub generation: Generation,
}

impl Greeting {
    #[must_use]
    pub fn parse(payload: &[u8]) -> Option<Self> {
        if payload.len() != HELLO_BYTES {
            return None;
        }
        Some(Self { version: u32_at(payload, 0)?, generation: Generation(u64_at(payload, 4)?) })
    }

    /// Appends the greeting as a packet.
    pub fn encode(&self, out: &mut Vec<u8>, kind: Kind, session: u64) {
        encode_with(out, kind, session, 0, |out| {
            out.extend_from_slice(&self.version.to_le_bytes());
            out.extend_from_slice(&self.generation.0.to_le_bytes());
        });
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn a_packet_is_read_back_and_a_cut_one_is_skipped_whole() {
        let mut bytes = vec![0, 0, 0];
        encode_packet(&mut bytes, Kind::Data, 7, 3, b"hello");
        assert_eq!(decode_packet(&bytes), Decoded::Filler(3));
        let packet = Packet { kind: Kind::Data, session: 7, stream: 3, len: 5 };
        assert_eq!(decode_packet(&bytes[3..]), Decoded::Packet(packet));
        for cut in 1..packet.total() {
            let mut stale = bytes[3..3 + cut].to_vec();
            assert_eq!(decode_packet(&stale), Decoded::Incomplete, "cut after {cut}");
            stale.resize(cut + PACKET_BYTES_MAX, FILLER);
            let skip = match decode_packet(&stale) {
                Decoded::Cut(skip) | Decoded::Garbage(skip) => skip,
                other => panic!("cut after {cut}: {other:?}"),
            };
            assert!(skip < cut + PACKET_BYTES_MAX);
        }
    }

    #[test]
    fn greetings_are_read_back() {
        let greeting = Greeting { version: 1, generation: Generation(9) };
        let mut bytes = Vec::new();
        greeting.encode(&mut bytes, Kind::Hello, 5);
        let Decoded::Packet(packet) = decode_packet(&bytes) else { panic!("not a packet") };
        assert_eq!(packet.session, 5);
        assert_eq!(Greeting::parse(&bytes[HEADER_BYTES..]), Some(greeting));
        assert_eq!(Greeting::parse(b"short"), None);
    }

    proptest! {
        #[test]
        fn any_bytes_are_survived_and_progress_is_made(bytes in proptest::collection::vec(any::<u8>(), 0..400)) {
            match decode_packet(&bytes) {
                Decoded::Filler(n) | Decoded::Cut(n) | Decoded::Garbage(n) => {
                    prop_assert!(n > 0 && n <= bytes.len());
                }
                Decoded::Packet(packet) => prop_assert!(packet.total() <= bytes.len()),
                Decoded::Incomplete => prop_assert!(bytes.len() < PACKET_BYTES_MAX),
            }
        }
    }
}
