//! Monitors as processes of their own, for tests and measurements: this executable runs itself.

use std::io::Read;
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use dormouse_sys::net::Network;
use dormouse_vmm::control::{Client, ClientError, Forked, Kernel, Machine};
use dormouse_vmm::jail::User;

/// Anything that takes longer has failed.
pub const WAIT: Duration = Duration::from_secs(60);
/// What this executable is called with to be a monitor.
pub const MONITOR: &str = "run-monitor";

/// Counts in memory at 0x600 and writes each number as eight hexadecimal digits and a line end to the serial port:
/// ```text
/// again: mov ecx,0x400; 1: dec ecx; jnz 1b; inc dword [0x600]; mov eax,[0x600]; mov di,8
/// 2: rol eax,4; (low nibble of al as a digit); mov dx,0x3f8; out dx,al; dec di; jnz 2b; (line end); jmp again
/// ```
pub const COUNTER: &[u8] = &[
    0x31, 0xc0, 0x8e, 0xd8, 0x8e, 0xd0, 0xbc, 0x00, 0x70, 0x66, 0xb9, 0x00, 0x04, 0x00, 0x00, 0x66, 0x49,
    0x75, 0xfc, 0x66, 0xff, 0x06, 0x00, 0x06, 0x66, 0xa1, 0x00, 0x06, 0xbf, 0x08, 0x00, 0x66, 0xc1, 0xc0,
    0x04, 0x88, 0xc3, 0x80, 0xe3, 0x0f, 0x80, 0xc3, 0x30, 0x80, 0xfb, 0x39, 0x76, 0x03, 0x80, 0xc3, 0x27,
    0x50, 0x88, 0xd8, 0xba, 0xf8, 0x03, 0xee, 0x58, 0x4f, 0x75, 0xe1, 0xb0, 0x0a, 0xba, 0xf8, 0x03, 0xee,
    0xeb, 0xc3,
];

/// The group of all monitors: nobody else's.
const GROUP: u32 = 0x7000_0000;

/// The monitors' `number`th user, where these tests may make somebody another one.
pub fn user(number: u32) -> Option<User> {
    let user = User { uid: GROUP + 1 + number, gid: GROUP };
    rustix::process::geteuid().is_root().then_some(user)
}

/// Lets all monitors read a file, or write to a folder, as the engine does.
pub fn share(path: &Path) {
    let mode = if path.is_dir() { 0o770 } else { 0o640 };
    if user(0).is_some() {
        std::os::unix::fs::lchown(path, Some(0), Some(GROUP)).expect("a new owner");
        let mode = std::os::unix::fs::PermissionsExt::from_mode(mode);
        std::fs::set_permissions(path, mode).expect("another mode");
    }
}

/// A folder with monitors in it; all of them end with it.
pub struct Rig {
    pub root: tempfile::TempDir,
    children: Vec<Child>,
    pids: Vec<u32>,
    /// The engine's ends of all carriers.
    carriers: Vec<(OwnedFd, OwnedFd)>,
    networks: Vec<Network>,
    made: usize,
    users: u32,
}

impl Rig {
    pub fn new() -> Self {
        let root = tempfile::tempdir().expect("a folder for the test");
        share(root.path());
        Self {
            root,
            children: Vec::new(),
            pids: Vec::new(),
            carriers: Vec::new(),
            networks: Vec::new(),
            made: 0,
            users: 0,
        }
    }

    pub fn folder(&mut self) -> PathBuf {
        self.made += 1;
        let dir = self.root.path().join(format!("d{}", self.made));
        std::fs::create_dir(&dir).expect("a folder");
        share(&dir);
        dir
    }

    /// A probe guest's file, for [`Kernel::image`].
    pub fn probe(&self, code: &[u8], dirty_mib: u32) -> Kernel {
        self.probe_file(code, dirty_mib, 0)
    }

    /// One whose FS begins at `window`, below 4 GiB.
    pub fn probe_with_window(&self, code: &[u8], window: u64) -> Kernel {
        self.probe_file(code, 0, u32::try_from(window).expect("an address below 4 GiB"))
    }

    fn probe_file(&self, code: &[u8], dirty_mib: u32, window: u32) -> Kernel {
        let numbers = [dirty_mib.to_le_bytes(), window.to_le_bytes()].concat();
        let bytes = [&b"DMPROBE1"[..], &numbers, code].concat();
        let mut file =
            tempfile::Builder::new().prefix("probe").tempfile_in(self.root.path()).expect("a file");
        std::io::Write::write_all(&mut file, &bytes).expect("the probe's file");
        let (_, path) = file.keep().expect("the probe's file");
        share(&path);
        Kernel { image: path, initramfs: None, cmdline_extra: String::new() }
    }

    /// The monitor's ends of a new carrier.
    pub fn carrier(&mut self) -> [OwnedFd; 2] {
        let (input, output) = (rustix::pipe::pipe().expect("a pipe"), rustix::pipe::pipe().expect("a pipe"));
        self.carriers.push((input.1, output.0));
        [input.0, output.1]
    }

    /// A whole set of a monitor's ends: a new carrier and, where the machine has a card, a new network's tap.
    pub fn ends(&mut self, net: bool) -> Vec<OwnedFd> {
        let mut ends = Vec::from(self.carrier());
        if net {
            let network = Network::new().expect("a network");
            ends.push(network.tap.try_clone().expect("another handle"));
            self.networks.push(network);
        }
        ends
    }

    /// Sends bytes through the carrier that was made as the `number`th, to a guest that sends back what it gets.
    pub fn talk(&self, number: usize, bytes: usize) {
        let (to_guest, from_guest) = &self.carriers[number];
        let sent: Vec<u8> =
            (0..bytes).map(|at| u8::try_from((at * 7 + number) % 251).expect("small")).collect();
        let mut got = vec![0; bytes];
        std::thread::scope(|scope| {
            scope.spawn(|| {
                let mut rest = &sent[..];
                while !rest.is_empty() {
                    let done = rustix::io::write(to_guest, rest).expect("the carrier takes bytes");
                    rest = &rest[done..];
                }
            });
            let mut filled = 0;
            while filled < bytes {
                let done = rustix::io::read(from_guest, &mut got[filled..]).expect("the carrier has bytes");
                assert!(done > 0, "the carrier ended");
                filled += done;
            }
        });
        assert!(got == sent, "the carrier lost or changed bytes");
    }

    /// How many carriers were made.
    pub fn carriers(&self) -> usize {
        self.carriers.len()
    }

    /// A monitor without a guest, and its folder.
    pub fn start(&mut self) -> (PathBuf, Client) {
        let dir = self.folder();
        let log = std::fs::File::create(dir.join("monitor.log")).expect("a log");
        self.users += 1;
        let child = Command::new(std::env::current_exe().expect("this executable"))
            .args([MONITOR.as_ref(), dir.as_os_str()])
            .arg(self.users.to_string())
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(log)
            .spawn()
            .expect("a monitor");
        self.children.push(child);
        let client = connect(&dir);
        (dir, client)
    }

    /// A running guest.
    pub fn boot(&mut self, machine: &Machine, kernel: &Kernel) -> (PathBuf, Client) {
        let (dir, mut client) = self.start();
        let ends = self.ends(machine.net);
        let fds: Vec<_> = ends.iter().map(AsFd::as_fd).collect();
        client.boot(machine.clone(), kernel.clone(), &fds).expect("a boot");
        (dir, client)
    }

    /// A paused guest from a snapshot.
    pub fn restore(&mut self, machine: &Machine, from: &Path) -> (PathBuf, Client) {
        self.restore_by(machine, from, false)
    }

    pub fn restore_by(&mut self, machine: &Machine, from: &Path, lazy: bool) -> (PathBuf, Client) {
        std::fs::read_dir(from).expect("the snapshot").flatten().for_each(|file| share(&file.path()));
        let (dir, mut client) = self.start();
        let ends = self.ends(machine.net);
        let fds: Vec<_> = ends.iter().map(AsFd::as_fd).collect();
        client.restore(machine.clone(), from.to_owned(), lazy, &fds).expect("a restore");
        (dir, client)
    }

    /// Paused children.
    pub fn fork(&mut self, source: &mut Client, count: usize) -> (Vec<PathBuf>, Forked) {
        self.fork_with(source, count, false)
    }

    pub fn fork_with(&mut self, source: &mut Client, count: usize, net: bool) -> (Vec<PathBuf>, Forked) {
        self.try_fork(source, count, net).expect("a fork")
    }

    pub fn try_fork(
        &mut self,
        source: &mut Client,
        count: usize,
        net: bool,
    ) -> Result<(Vec<PathBuf>, Forked), ClientError> {
        let dirs: Vec<PathBuf> = (0..count).map(|_| self.folder()).collect();
        let fds: Vec<OwnedFd> = (0..count).flat_map(|_| self.ends(net)).collect();
        let fds: Vec<_> = fds.iter().map(AsFd::as_fd).collect();
        let children = dirs.iter().cloned().map(|dir| dormouse_vmm::control::ForkChild { dir }).collect();
        let forked = source.fork(children, &fds)?;
        self.pids.extend(&forked.pids);
        Ok((dirs, forked))
    }
}

impl Drop for Rig {
    fn drop(&mut self) {
        for pid in self.pids.iter().filter_map(|pid| i32::try_from(*pid).ok()) {
            if let Some(pid) = rustix::process::Pid::from_raw(pid) {
                // It may have ended with the test.
                let _ = rustix::process::kill_process(pid, rustix::process::Signal::KILL);
            }
        }
        for child in &mut self.children {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

pub fn connect(dir: &Path) -> Client {
    let client = Client::connect_within(dir, WAIT).unwrap_or_else(|error| {
        let mut log = String::new();
        let file = std::fs::File::open(dir.join("monitor.log"));
        let _ = file.and_then(|mut file| file.read_to_string(&mut log));
        panic!("{error}; its log: {log}")
    });
    client.set_timeout(Some(WAIT)).expect("a timeout");
    client
}

pub fn machine(memory_mib: u32) -> Machine {
    Machine { vcpus: 1, memory_mib, disks: Vec::new(), cpu_template: None, net: false, huge_pages: true }
}

/// What the guest wrote to its serial port.
pub fn serial(dir: &Path) -> String {
    let bytes = std::fs::read(dir.join("serial.log")).unwrap_or_default();
    String::from_utf8_lossy(&bytes).into_owned()
}

/// Waits until `ready` finds what it looks for.
pub fn wait_for<T>(what: &str, mut ready: impl FnMut() -> Option<T>) -> T {
    let deadline = Instant::now() + WAIT;
    loop {
        if let Some(found) = ready() {
            return found;
        }
        assert!(Instant::now() < deadline, "waited in vain for {what}");
        std::thread::yield_now();
    }
}
