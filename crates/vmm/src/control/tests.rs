use super::*;
use std::io::Write;
use std::os::fd::{AsFd, AsRawFd};

fn machine() -> Machine {
    Machine {
        vcpus: 2,
        memory_mib: 256,
        disks: vec![Disk { layers: vec!["/images/root".into()], read_only: false }],
        cpu_template: None,
        net: false,
        huge_pages: true,
    }
}

fn pair() -> (UnixStream, Peer) {
    let (client, server) = UnixStream::pair().unwrap();
    (client, Peer::new(server).unwrap())
}

fn raw(body: &[u8]) -> Vec<u8> {
    let mut bytes = u32::try_from(body.len()).unwrap().to_le_bytes().to_vec();
    bytes.extend_from_slice(body);
    bytes
}

/// What the monitor makes of these bytes.
fn refusal(bytes: &[u8]) -> String {
    let (mut client, mut peer) = pair();
    client.write_all(bytes).unwrap();
    match peer.read(2) {
        Event::Refused(why) => why,
        other => panic!("not refused: {other:?}"),
    }
}

#[test]
fn a_request_arrives_with_its_descriptors() {
    let (client, mut peer) = pair();
    let pipe = dormouse_sys::fds::Pipe::new().unwrap();
    let kernel = Kernel { image: "/k".into(), initramfs: None, cmdline_extra: "quiet".into() };
    let request = Request::Boot { machine: machine(), kernel };
    send(&client, &encode(&request).unwrap(), &[pipe.read.as_fd(), pipe.write.as_fd()]).unwrap();
    let Event::Request(got, fds) = peer.read(2) else { panic!("no request") };
    assert_eq!(got, request);
    assert_eq!(fds.len(), 2);
    rustix::io::write(&fds[1], b"through").unwrap();
    assert!(matches!(peer.read(2), Event::More));
}

#[test]
fn descriptors_stay_with_their_frame() {
    let (client, mut peer) = pair();
    let pipe = dormouse_sys::fds::Pipe::new().unwrap();
    let child = |dir: &str| ForkChild { dir: dir.into() };
    // More than one message holds.
    let many: Vec<_> = (0..300).map(|_| pipe.read.as_fd()).collect();
    let fork = Request::Fork { children: (0..100).map(|i| child(&format!("/c{i}"))).collect() };
    send(&client, &encode(&Request::Pause {}).unwrap(), &[]).unwrap();
    send(&client, &encode(&fork).unwrap(), &many).unwrap();
    send(&client, &encode(&Request::Resume {}).unwrap(), &[]).unwrap();
    assert!(matches!(peer.read(2), Event::Request(Request::Pause {}, fds) if fds.is_empty()));
    assert!(matches!(peer.read(3), Event::Request(Request::Fork { .. }, fds) if fds.len() == 300));
    assert!(matches!(peer.read(2), Event::Request(Request::Resume {}, fds) if fds.is_empty()));
    drop(client);
    assert!(matches!(peer.read(2), Event::End));
}

#[test]
fn a_frame_may_come_in_pieces() {
    let (mut client, mut peer) = pair();
    for byte in encode(&Request::Status {}).unwrap() {
        assert!(matches!(peer.read(2), Event::More));
        client.write_all(&[byte]).unwrap();
    }
    assert!(matches!(peer.read(2), Event::Request(Request::Status {}, _)));
}

#[test]
fn the_wrong_number_of_descriptors_is_refused_and_closed() {
    let (client, mut peer) = pair();
    let pipe = dormouse_sys::fds::Pipe::new().unwrap();
    send(&client, &encode(&Request::Pause {}).unwrap(), &[pipe.write.as_fd()]).unwrap();
    drop(pipe.write);
    assert!(matches!(peer.read(2), Event::Refused(why) if why.contains("descriptors")));
    // Nobody holds the other end any more.
    assert_eq!(rustix::io::read(&pipe.read, &mut [0; 4]).unwrap(), 0);
}

#[test]
fn hostile_bytes_are_refused() {
    assert!(refusal(&u32::MAX.to_le_bytes()).contains("frame"));
    assert!(refusal(&0_u32.to_le_bytes()).contains("frame"));
    assert!(refusal(&raw(b"not json")).contains("expected"));
    assert!(refusal(&raw(br#"{"explode":{}}"#)).contains("unknown variant"));
    assert!(refusal(&raw(br#"{"pause":{"x":1}}"#)).contains("unknown field"));
    assert!(refusal(&raw(br#"{"checkpoint":{"into":"relative"}}"#)).contains("absolute"));
    assert!(refusal(&raw(br#"{"checkpoint":{"into":"/a\u0000b"}}"#)).contains("absolute"));
    assert!(refusal(&raw(br#"{"fork":{"children":[]}}"#)).contains("children"));
    let children = vec![ForkChild { dir: "/c".into() }; CHILDREN_MAX + 1];
    assert!(refusal(&encode(&Request::Fork { children }).unwrap()).contains("children"));
    let mut big = machine();
    big.memory_mib = MEMORY_MIB_MAX + 1;
    let restore = |machine| Request::Restore { machine, snapshot_dir: "/s".into(), lazy: false };
    assert!(refusal(&encode(&restore(big)).unwrap()).contains("memory_mib"));
    let mut none = machine();
    none.vcpus = 0;
    assert!(refusal(&encode(&restore(none)).unwrap()).contains("vcpus"));
}

#[test]
fn the_client_reads_answers_and_refusals() {
    let (stream, mut peer) = pair();
    let served = std::thread::spawn(move || {
        let mut answers = vec![
            Answer::Error { code: ErrorCode::BadRequest, message: "no guest".into() },
            Answer::Hello { version: PROTOCOL_VERSION, pid: 7 },
        ];
        while let Some(answer) = answers.pop() {
            loop {
                let fd = peer.as_fd();
                let mut fds = [rustix::event::PollFd::new(&fd, rustix::event::PollFlags::IN)];
                rustix::event::poll(&mut fds, None).unwrap();
                match peer.read(2) {
                    Event::More => {}
                    Event::Request(..) => break,
                    other => panic!("{other:?}"),
                }
            }
            peer.answer(&answer).unwrap();
        }
    });
    let mut client = Client { stream };
    assert_eq!(client.hello().unwrap(), (PROTOCOL_VERSION, 7));
    let error = client.pause().unwrap_err();
    assert_eq!(error.to_string(), "the monitor cannot pause: no guest");
    served.join().unwrap();
    assert!(matches!(client.pause(), Err(ClientError::Io { .. })));
}

#[test]
fn a_client_finds_a_monitor_by_its_folder() {
    let dir = tempfile::tempdir().unwrap();
    assert!(matches!(Client::connect(dir.path()), Err(ClientError::Connect { .. })));
    let listener = dormouse_sys::unix::bind(dir.path(), SOCKET).unwrap();
    let client = Client::connect_within(dir.path(), Duration::from_secs(5)).unwrap();
    let (served, _) = listener.accept().unwrap();
    assert_ne!(served.as_raw_fd(), client.stream.as_raw_fd());
}

proptest::proptest! {
    /// Whatever comes, reading ends without a panic.
    #[test]
    fn any_bytes_are_survived(bytes in proptest::collection::vec(proptest::prelude::any::<u8>(), 0..200)) {
        let (mut client, mut peer) = pair();
        client.write_all(&bytes).unwrap();
        drop(client);
        let ended = (0..100).any(|_| matches!(peer.read(2), Event::End | Event::Refused(_)));
        proptest::prop_assert!(ended);
    }
}
