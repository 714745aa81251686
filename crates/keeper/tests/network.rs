//! A real keeper and a real network. A namespace plays the host's, with all the world in it; another one, at the
//! other end of the tap, plays the guest.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::fs;
use std::io::{ErrorKind, Read, Write};
use std::net::{Ipv4Addr, Shutdown, TcpListener, TcpStream, UdpSocket};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{Sender, channel};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::Duration;

use dormouse_sys::net::{
    DNS_PORT, GATEWAY, Network, guest_tap, in_new_namespace, pretend_world, set_up_card,
};
use dormouse_types::SandboxId;
use dormouse_wire::keeper::{Answer, CONTROL_SOCKET, EgressRules, LOG_FILE, Request, Status};

const PATIENCE: Duration = Duration::from_secs(20);
const PUBLIC: &str = "93.184.216.34";
const HOSTS: &str = "127.0.0.1 localhost\n93.184.216.34 served.test\n93.184.216.35 other.test\n";

/// Runs a test where no packet leaves this machine.
fn in_world(test: impl FnOnce() + Send + 'static) {
    in_new_namespace(move || {
        pretend_world().unwrap();
        test();
    })
    .unwrap();
}

/// A keeper whose resolver knows [`HOSTS`].
struct Keeper {
    dir: tempfile::TempDir,
    process: Child,
    control: UnixStream,
}

impl Drop for Keeper {
    fn drop(&mut self) {
        // A test that failed must not leave its process behind.
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

impl Keeper {
    fn start() -> Self {
        let dir = tempfile::tempdir().unwrap();
        fs::write(dir.path().join("hosts"), HOSTS).unwrap();
        let script = "mount --bind \"$0/hosts\" /etc/hosts && exec \"$1\" \"$0\" \"$2\"";
        let mut process = Command::new("unshare")
            .args(["--mount", "sh", "-c", script])
            .arg(dir.path())
            .arg(env!("CARGO_BIN_EXE_dormouse-keeper"))
            .arg(SandboxId::generate().as_str())
            .stdin(Stdio::null())
            .spawn()
            .unwrap();
        let control = loop {
            match dormouse_sys::unix::connect(dir.path(), CONTROL_SOCKET) {
                Ok(control) => break control,
                Err(error) => assert!(process.try_wait().unwrap().is_none(), "the keeper ended: {error}"),
            }
            thread::yield_now();
        };
        control.set_read_timeout(Some(PATIENCE)).unwrap();
        Self { dir, process, control }
    }

    fn ask(&mut self, request: &Request, fds: &[BorrowedFd<'_>]) -> (Answer, Vec<OwnedFd>) {
        let body = serde_json::to_vec(request).unwrap();
        let frame = [&u32::try_from(body.len()).unwrap().to_le_bytes()[..], &body].concat();
        let sent = dormouse_sys::fds::send_with_fds(&self.control, &frame, fds).unwrap();
        self.control.write_all(&frame[sent..]).unwrap();
        let mut head = [0; 4];
        let (got, fds) = dormouse_sys::fds::recv_with_fds(&self.control, &mut head).unwrap();
        self.control.read_exact(&mut head[got..]).unwrap();
        let mut body = vec![0; u32::from_le_bytes(head) as usize];
        self.control.read_exact(&mut body).unwrap();
        (serde_json::from_slice(&body).unwrap(), fds)
    }

    fn done(&mut self, request: &Request, fds: &[BorrowedFd<'_>]) -> Vec<OwnedFd> {
        let (answer, fds) = self.ask(request, fds);
        assert_eq!(answer, Answer::Done, "{request:?}");
        fds
    }

    fn rules(&mut self, internet: bool, allow: &[&str], deny: &[&str]) {
        let own = |rules: &[&str]| rules.iter().map(|rule| (*rule).to_owned()).collect();
        let rules = EgressRules { internet, allow: own(allow), deny: own(deny) };
        self.done(&Request::SetEgress { rules }, &[]);
    }

    /// Serves a new network; its tap.
    fn network(&mut self) -> OwnedFd {
        let network = Network::new().unwrap();
        let [tcp, dns, datagrams, steering] = network.sockets();
        self.done(&Request::Network, &[network.tap.as_fd(), tcp, dns, datagrams, steering]);
        network.tap
    }

    fn status(&mut self) -> Status {
        match self.ask(&Request::Status, &[]).0 {
            Answer::Status(status) => status,
            other => panic!("{other:?}"),
        }
    }

    fn log(&self) -> String {
        fs::read_to_string(self.dir.path().join(LOG_FILE)).unwrap()
    }

    /// Until the log has it: it is written when what it tells has happened.
    fn await_log(&self, words: &str) {
        let until = std::time::Instant::now() + PATIENCE;
        while !self.log().contains(words) {
            assert!(std::time::Instant::now() < until, "{words:?} is not in the log:\n{}", self.log());
            thread::sleep(Duration::from_millis(5));
        }
    }
}

type Work = Box<dyn FnOnce() + Send>;

/// A machine with one network card, whose other end is in a tap or in none.
struct Guest {
    card: Arc<OwnedFd>,
    plug: Arc<Mutex<Option<Arc<OwnedFd>>>>,
    work: Sender<Work>,
}

impl Guest {
    fn start() -> Self {
        let (work, todo) = channel::<Work>();
        let (tell, told) = channel();
        thread::spawn(move || {
            in_new_namespace(move || {
                let card = guest_tap("eth0").unwrap();
                set_up_card("eth0").unwrap();
                tell.send(card).unwrap();
                for work in todo {
                    work();
                }
            })
        });
        let card = Arc::new(told.recv().unwrap());
        let plug: Arc<Mutex<Option<Arc<OwnedFd>>>> = Arc::default();
        let (from, to) = (card.clone(), plug.clone());
        thread::spawn(move || {
            let mut frame = vec![0; 70_000];
            while let Ok(length) = rustix::io::read(&from, &mut frame) {
                let to = to.lock().unwrap().clone();
                // What nobody takes is lost, as on a wire.
                let _ = to.map(|to| rustix::io::write(&*to, &frame[..length]));
            }
        });
        Self { card, plug, work }
    }

    fn plug(&self, tap: OwnedFd) {
        let tap = Arc::new(tap);
        *self.plug.lock().unwrap() = Some(tap.clone());
        let (plug, card) = (self.plug.clone(), self.card.clone());
        thread::spawn(move || {
            let mut frame = vec![0; 70_000];
            let is_in = || plug.lock().unwrap().as_ref().is_some_and(|it| Arc::ptr_eq(it, &tap));
            while is_in() {
                let mut fds = [rustix::event::PollFd::new(&*tap, rustix::event::PollFlags::IN)];
                let wait = rustix::event::Timespec { tv_sec: 0, tv_nsec: 20_000_000 };
                if rustix::event::poll(&mut fds, Some(&wait)) == Ok(1)
                    && is_in()
                    && let Ok(length) = rustix::io::read(&*tap, &mut frame)
                {
                    let _ = rustix::io::write(&*card, &frame[..length]);
                }
            }
        });
    }

    fn unplug(&self) {
        self.plug.lock().unwrap().take();
    }

    fn run<T: Send + 'static>(&self, work: impl FnOnce() -> T + Send + 'static) -> T {
        let (tell, told) = channel();
        self.work.send(Box::new(move || drop(tell.send(work())))).unwrap();
        told.recv().expect("the guest's work panicked")
    }

    fn connect(&self, to: &str) -> std::io::Result<TcpStream> {
        let to = to.parse().unwrap();
        self.run(move || {
            let stream = TcpStream::connect_timeout(&to, PATIENCE)?;
            stream.set_read_timeout(Some(PATIENCE))?;
            Ok(stream)
        })
    }

    /// Whether the connection is made and answered.
    fn is_served(&self, to: &str) -> bool {
        let mut answer = String::new();
        let served = self.connect(to).and_then(|mut stream| stream.read_to_string(&mut answer));
        match served {
            Ok(_) => answer == "served",
            Err(error) => {
                assert_eq!(error.kind(), ErrorKind::ConnectionReset, "it must end by a reset: {error}");
                false
            }
        }
    }

    /// Answer's code, and the last address in it.
    fn look_up(&self, name: &str) -> (u8, Option<Ipv4Addr>) {
        let question = question(name);
        self.run(move || {
            let socket = UdpSocket::bind((Ipv4Addr::UNSPECIFIED, 0)).unwrap();
            socket.set_read_timeout(Some(PATIENCE)).unwrap();
            socket.send_to(&question, (GATEWAY, DNS_PORT)).unwrap();
            let mut answer = [0; 512];
            let (length, _) = socket.recv_from(&mut answer).unwrap();
            read_answer(&answer[..length])
        })
    }
}

fn question(name: &str) -> Vec<u8> {
    let mut bytes = vec![0x12, 0x34, 1, 0, 0, 1, 0, 0, 0, 0, 0, 0];
    for label in name.split('.') {
        bytes.push(u8::try_from(label.len()).unwrap());
        bytes.extend(label.bytes());
    }
    bytes.extend([0, 0, 1, 0, 1]);
    bytes
}

fn read_answer(answer: &[u8]) -> (u8, Option<Ipv4Addr>) {
    let last: [u8; 4] = answer[answer.len() - 4..].try_into().unwrap();
    (answer[3] & 0x0f, (answer[7] > 0).then(|| last.into()))
}

/// Says "served" to whoever comes, at every address of the world.
fn serve(port: u16) {
    let listener = TcpListener::bind((Ipv4Addr::UNSPECIFIED, port)).unwrap();
    thread::spawn(move || {
        for stream in listener.incoming() {
            let _ = stream.and_then(|mut stream| stream.write_all(b"served"));
        }
    });
}

fn start(internet: bool, allow: &[&str]) -> (Keeper, Guest) {
    let (mut keeper, guest) = (Keeper::start(), Guest::start());
    keeper.rules(internet, allow, &[]);
    guest.plug(keeper.network());
    (keeper, guest)
}

#[test]
fn what_the_rules_allow_is_reached_and_anything_else_is_reset() {
    in_world(|| {
        let (mut keeper, guest) = start(true, &[]);
        serve(80);
        assert!(guest.is_served("93.184.216.34:80"));
        let denied = keeper.status().egress_denied;
        for to in ["169.254.169.254:80", "10.0.0.1:80", "192.168.1.1:22", "198.18.0.1:80"] {
            assert!(!guest.is_served(to), "{to}");
        }
        assert_eq!(keeper.status().egress_denied, denied + 4);
        keeper.await_log("cloud metadata");
        // A port that nobody serves, where the rules would let it.
        assert!(!guest.is_served("93.184.216.34:81"));
        assert_eq!(keeper.status().egress_denied, denied + 4);
    });
}

#[test]
fn bytes_and_ends_pass_both_ways() {
    in_world(|| {
        let (mut keeper, guest) = start(true, &[]);
        let listener = TcpListener::bind((Ipv4Addr::UNSPECIFIED, 7)).unwrap();
        let mut inside = guest.connect("93.184.216.34:7").unwrap();
        let (mut outside, _) = listener.accept().unwrap();
        inside.write_all(b"ping").unwrap();
        let mut got = [0; 4];
        outside.read_exact(&mut got).unwrap();
        assert_eq!(keeper.status().egress_open, 1);
        // The guest's end alone: what the other one has to say still comes.
        inside.shutdown(Shutdown::Write).unwrap();
        assert_eq!(outside.read(&mut got).unwrap(), 0);
        let much = vec![7; 1 << 20];
        let (mut to, sent) = (outside, much.clone());
        let writing = thread::spawn(move || to.write_all(&sent).unwrap());
        let mut back = Vec::new();
        inside.read_to_end(&mut back).unwrap();
        writing.join().unwrap();
        assert!(back == much);
        let status = keeper.status();
        assert_eq!((status.bytes_in, status.bytes_out), (1 << 20, 4));
    });
}

#[test]
fn rules_that_change_hold_for_what_comes_and_end_what_is_open() {
    in_world(|| {
        let (mut keeper, guest) = start(false, &[]);
        serve(80);
        let held = TcpListener::bind((Ipv4Addr::UNSPECIFIED, 7)).unwrap();
        assert!(!guest.is_served("93.184.216.34:80"));
        keeper.rules(false, &["93.184.216.0/24"], &[]);
        assert!(guest.is_served("93.184.216.34:80"));
        assert!(!guest.is_served("93.184.217.34:80"));
        let mut open = guest.connect("93.184.216.34:7").unwrap();
        let (mut outside, _) = held.accept().unwrap();
        keeper.rules(false, &[], &[]);
        for end in [&mut open, &mut outside] {
            assert_eq!(end.read(&mut [0; 8]).unwrap_err().kind(), ErrorKind::ConnectionReset);
        }
        assert!(!guest.is_served("93.184.216.34:80"));
    });
}

#[test]
fn a_name_that_is_allowed_opens_what_it_resolves_to() {
    in_world(|| {
        let (mut keeper, guest) = start(false, &["served.test"]);
        serve(80);
        assert_eq!(guest.look_up("served.test"), (0, Some(PUBLIC.parse().unwrap())));
        assert!(guest.is_served("93.184.216.34:80"));
        let (refused, address) = guest.look_up("other.test");
        assert_eq!((refused, address), (5, None));
        assert!(!guest.is_served("93.184.216.35:80"));
        keeper.await_log("other.test");
        // Over TCP, too.
        let asked = question("served.test");
        let mut stream = guest.connect("198.18.0.1:53").unwrap();
        stream.write_all(&[&u16::try_from(asked.len()).unwrap().to_be_bytes()[..], &asked].concat()).unwrap();
        stream.shutdown(Shutdown::Write).unwrap();
        let mut answer = Vec::new();
        stream.read_to_end(&mut answer).unwrap();
        assert_eq!(read_answer(&answer[2..]), (0, Some(PUBLIC.parse().unwrap())));
        assert_eq!(keeper.status().egress_denied, 2);
    });
}

/// As in a fork: the guest asked its source's keeper, this one was never asked.
#[test]
fn a_name_that_was_asked_for_elsewhere_opens_its_address_too() {
    in_world(|| {
        let (_keeper, guest) = start(false, &["served.test", "*.example.test"]);
        serve(80);
        assert!(guest.is_served("93.184.216.34:80"));
        assert!(!guest.is_served("93.184.216.35:80"));
    });
}

#[test]
fn datagrams_are_refused_at_once_counted_and_told() {
    in_world(|| {
        let (mut keeper, guest) = start(true, &[]);
        guest.run(|| {
            let socket = UdpSocket::bind((Ipv4Addr::UNSPECIFIED, 0)).unwrap();
            socket.set_read_timeout(Some(PATIENCE)).unwrap();
            socket.connect("93.184.216.34:443").unwrap();
            socket.send(b"hello").unwrap();
            assert_eq!(socket.recv(&mut [0; 8]).unwrap_err().kind(), ErrorKind::ConnectionRefused);
        });
        keeper.await_log("to=93.184.216.34:443");
        assert_eq!(keeper.status().egress_denied, 1);
    });
}

/// As in a pause and a resume: nobody reads the tap for a while, then another monitor does.
#[test]
fn what_is_open_stays_open_while_the_guest_is_away() {
    in_world(|| {
        let (mut keeper, guest) = start(true, &[]);
        let listener = TcpListener::bind((Ipv4Addr::UNSPECIFIED, 7)).unwrap();
        let mut inside = guest.connect("93.184.216.34:7").unwrap();
        let (mut outside, _) = listener.accept().unwrap();
        guest.unplug();
        outside.write_all(b"while away").unwrap();
        outside.shutdown(Shutdown::Write).unwrap();
        let tap = keeper.done(&Request::Tap, &[]).pop().unwrap();
        guest.plug(tap);
        let mut text = String::new();
        inside.read_to_string(&mut text).unwrap();
        assert_eq!(text, "while away");
    });
}

/// As in a fork and a rollback.
#[test]
fn a_new_network_resets_what_the_guest_believes_to_be_open() {
    in_world(|| {
        let (mut keeper, guest) = start(true, &[]);
        serve(80);
        let listener = TcpListener::bind((Ipv4Addr::UNSPECIFIED, 7)).unwrap();
        let mut inside = guest.connect("93.184.216.34:7").unwrap();
        let (mut outside, _) = listener.accept().unwrap();
        guest.unplug();
        guest.plug(keeper.network());
        assert_eq!(outside.read(&mut [0; 8]).unwrap_or(0), 0, "the other end is told");
        inside.write_all(b"still there?").unwrap();
        assert_eq!(inside.read(&mut [0; 8]).unwrap_err().kind(), ErrorKind::ConnectionReset);
        assert!(guest.is_served("93.184.216.34:80"));
    });
}

#[test]
fn a_keeper_that_is_killed_leaves_a_guest_that_is_answered_by_resets() {
    in_world(|| {
        let (mut keeper, guest) = start(true, &[]);
        let listener = TcpListener::bind((Ipv4Addr::UNSPECIFIED, 7)).unwrap();
        let mut inside = guest.connect("93.184.216.34:7").unwrap();
        let _outside = listener.accept().unwrap();
        keeper.process.kill().unwrap();
        keeper.process.wait().unwrap();
        // Its sockets went with it; the namespace lives on as long as the guest's tap does.
        let ended = inside.write_all(b"still there?").and_then(|()| inside.read(&mut [0; 8]));
        assert_eq!(ended.unwrap_or(0), 0);
        let refused = guest.connect("93.184.216.34:7").unwrap_err();
        assert_eq!(refused.kind(), ErrorKind::ConnectionRefused);
    });
}

#[test]
fn there_is_no_tap_before_there_is_a_network() {
    in_world(|| {
        let mut keeper = Keeper::start();
        let (answer, fds) = keeper.ask(&Request::Tap, &[]);
        assert!(matches!(answer, Answer::Failed { .. }) && fds.is_empty());
        let (answer, _) = keeper.ask(&Request::Network, &[]);
        assert!(matches!(answer, Answer::Failed { message } if message.contains("5 descriptors")));
    });
}
