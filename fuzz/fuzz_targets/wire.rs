#![no_main]
//! Everything that comes out of a sandbox or from a client as bytes: no input makes a parser panic, and
//! what is decoded lies within what was given.

use dormouse_wire::carrier::packet::{Decoded, decode_packet};
use dormouse_wire::dns::Query;
use dormouse_wire::envd::connect::Decoder;
use dormouse_wire::stream::{Open, Reply};
use libfuzzer_sys::fuzz_target;

const MESSAGE_BYTES_MAX: usize = 1 << 16;

fuzz_target!(|bytes: &[u8]| {
    if let Decoded::Packet(packet) = decode_packet(bytes) {
        assert!(packet.total() <= bytes.len());
    }
    let _ = Query::parse(bytes);
    let mut decoder = Decoder::new(MESSAGE_BYTES_MAX);
    for part in bytes.chunks(7) {
        decoder.push(part);
        while let Ok(Some(frame)) = decoder.next_frame() {
            assert!(frame.payload.len() <= MESSAGE_BYTES_MAX);
        }
    }
    if let Ok(line) = std::str::from_utf8(bytes) {
        if let Ok(open) = Open::parse(line) {
            assert_eq!(Open::parse(&open.to_string()), Ok(open));
        }
        let _ = Reply::parse(line);
    }
});
