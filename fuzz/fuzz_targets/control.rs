#![no_main]
//! What comes to a monitor's control socket, in pieces: a request that was validated, or a refusal, never a panic.

use std::io::Write;
use std::os::unix::net::UnixStream;

use dormouse_vmm::control::{Event, Peer};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|pieces: Vec<Vec<u8>>| {
    let (mut client, server) = UnixStream::pair().unwrap();
    let mut peer = Peer::new(server).unwrap();
    for piece in pieces {
        // Longer ones would not fit the socket, and this is one thread.
        client.write_all(&piece[..piece.len().min(4096)]).unwrap();
        loop {
            match peer.read(2) {
                Event::More => break,
                Event::Request(request, fds) => assert_eq!(fds.len(), request.fds(2)),
                Event::Refused(_) | Event::End => return,
            }
        }
    }
    drop(client);
    assert!(matches!(peer.read(2), Event::End | Event::Refused(_)));
});
