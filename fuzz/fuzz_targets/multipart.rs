#![no_main]
//! The body of an upload, in pieces: events in a sensible order, each byte at most once, the same events however the
//! body was cut, and never a panic.

#[allow(dead_code, reason = "the agent's own module, of which its tests are left out")]
#[path = "../../crates/agent/src/files/multipart.rs"]
mod multipart;

use bytes::Bytes;
use libfuzzer_sys::fuzz_target;
use multipart::{Disposition, Event, Multipart, MultipartError};

type Parts = Vec<(Disposition, Vec<u8>)>;

fn read(content_type: &str, pieces: &[&[u8]]) -> Result<Parts, MultipartError> {
    let mut multipart = Multipart::of_content_type(content_type)?;
    let (mut parts, mut open, mut ended) = (Parts::new(), false, false);
    for piece in pieces {
        multipart.push(Bytes::copy_from_slice(piece));
        while let Some(event) = multipart.next_event()? {
            assert!(!ended, "nothing follows the end");
            match event {
                Event::Part(disposition) => {
                    assert!(!std::mem::replace(&mut open, true), "one part at a time");
                    parts.push((disposition, Vec::new()));
                }
                Event::Data(bytes) => {
                    assert!(open && !bytes.is_empty());
                    parts.last_mut().expect("a part is open").1.extend_from_slice(&bytes);
                }
                Event::PartEnd => assert!(std::mem::take(&mut open)),
                Event::End => {
                    assert!(!open);
                    ended = true;
                }
            }
        }
    }
    multipart.finish()?;
    assert!(ended);
    Ok(parts)
}

fuzz_target!(|input: (&str, u8, &[u8])| {
    let (content_type, cut, body) = input;
    // Most inputs are to get beyond the boundary.
    let content_type = if content_type.len() % 4 == 0 { "multipart/form-data; boundary=XX" } else { content_type };
    let pieces: Vec<&[u8]> = body.chunks(usize::from(cut).max(1)).collect();
    let (whole, cut) = (read(content_type, &[body]), read(content_type, &pieces));
    if let Ok(parts) = &whole {
        assert!(parts.iter().map(|(_, bytes)| bytes.len()).sum::<usize>() <= body.len());
    }
    // Which limit a hostile body breaks first may depend on how it comes; a good one's parts do not.
    if whole.is_ok() || cut.is_ok() {
        assert_eq!(whole, cut);
    }
});
