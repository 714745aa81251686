//! Guests that lie: whatever one does, its monitor answers, or has ended with a named reason.

use std::os::fd::AsFd;
use std::path::{Path, PathBuf};

use dormouse_sys::cgroup::{Hierarchies, Limits, Version};
use dormouse_vmm::arch::x86_64::layout;
use dormouse_vmm::control::{Client, ClientError, Exit, ExitReason, Kernel, State};

use super::rig::{COUNTER, Rig, machine, wait_for};
use super::{connect, exit_of, grow};

/// Where a probe's code begins, and how much there is room for behind it.
const CODE: u16 = 0x8000;
const TABLE: u16 = 0x8100;
const QUEUE: u16 = 0x9000;
const AVAIL: u16 = 0xa000;
const USED: u16 = 0xb000;
/// The entropy device's slot of a machine without disks: vsock, rng, balloon.
const RNG: u16 = 1;
const NEXT: u16 = 1;
const WRITE: u16 = 2;

/// Makes the 32-bit writes of a table to the devices' registers, then counts ([`COUNTER`]):
/// ```text
/// xor ax,ax; mov ds,ax; mov si,TABLE
/// next: mov bx,[si]; cmp bx,-1; je done; mov eax,[si+2]; mov fs:[bx],eax; add si,6; jmp next; done:
/// ```
const WRITER: &[u8] = &[
    0x31, 0xc0, 0x8e, 0xd8, 0xbe, 0x00, 0x81, 0x8b, 0x1c, 0x83, 0xfb, 0xff, 0x74, 0x0d, 0x66, 0x8b, 0x44,
    0x02, 0x64, 0x66, 0x89, 0x07, 0x83, 0xc6, 0x06, 0xeb, 0xec,
];

/// A guest that writes to its devices' registers, with something prepared in its memory.
#[derive(Clone)]
struct Driver {
    /// At [`CODE`].
    memory: Vec<u8>,
    writes: Vec<(u16, u32)>,
}

impl Driver {
    fn new() -> Self {
        let mut driver = Self { memory: vec![0; 0x4000], writes: Vec::new() };
        driver.put(CODE, WRITER);
        driver.put(CODE + 27, COUNTER);
        driver
    }

    fn put(&mut self, address: u16, bytes: &[u8]) {
        let at = usize::from(address - CODE);
        self.memory[at..at + bytes.len()].copy_from_slice(bytes);
    }

    fn register(&mut self, slot: u16, offset: u16, value: u32) {
        self.writes.push((slot * 0x1000 + offset, value));
    }

    /// The entropy device, ready, with one queue of `size` at the usual places.
    fn ready(size: u32) -> Self {
        let mut driver = Self::new();
        for (offset, value) in [
            (0x070, 1),
            (0x070, 3),
            // VIRTIO_F_VERSION_1.
            (0x024, 1),
            (0x020, 1),
            (0x070, 0xb),
            (0x030, 0),
            (0x038, size),
            (0x080, u32::from(QUEUE)),
            (0x090, u32::from(AVAIL)),
            (0x0a0, u32::from(USED)),
            (0x044, 1),
            (0x070, 0xf),
        ] {
            driver.register(RNG, offset, value);
        }
        driver
    }

    fn descriptor(&mut self, number: u16, address: u64, bytes: u32, flags: u16, next: u16) {
        let mut entry = address.to_le_bytes().to_vec();
        entry.extend(bytes.to_le_bytes());
        entry.extend(flags.to_le_bytes());
        entry.extend(next.to_le_bytes());
        self.put(QUEUE + number * 16, &entry);
    }

    /// `count` requests are said to be there, whose chains begin at `heads`; and the device is told.
    fn offer(&mut self, count: u16, heads: &[u16]) {
        let mut ring = vec![0, 0];
        ring.extend(count.to_le_bytes());
        heads.iter().for_each(|head| ring.extend(head.to_le_bytes()));
        self.put(AVAIL, &ring);
        self.register(RNG, 0x050, 0);
    }

    fn kernel(&self, rig: &Rig) -> Kernel {
        let mut memory = self.memory.clone();
        let table: Vec<u8> = self
            .writes
            .iter()
            .chain(&[(0xffff, 0)])
            .flat_map(|(offset, value)| [&offset.to_le_bytes()[..], &value.to_le_bytes()].concat())
            .collect();
        let at = usize::from(TABLE - CODE);
        memory[at..at + table.len()].copy_from_slice(&table);
        rig.probe_with_window(&memory, layout::VIRTIO_MMIO_BASE)
    }
}

/// The guest's fate: `Some`: it ended; `None`: it counts, and can be paused, forked and stopped.
fn fate(rig: &mut Rig, kernel: &Kernel) -> Option<Exit> {
    let (dir, _client) = rig.boot(&machine(16), kernel);
    wait_for("the guest to end or go on", || {
        (super::serial(&dir).len() > 60 || dir.join("exit.json").exists()).then_some(())
    });
    // It may end in between: the device's thread has its own pace.
    match lives(rig, &dir) {
        Ok(()) => None,
        Err(_) => Some(exit_of(&dir)),
    }
}

fn lives(rig: &mut Rig, dir: &Path) -> Result<(), ClientError> {
    let mut client = Client::connect(dir)?;
    client.pause()?;
    if client.status()?.state != State::Paused {
        return Err(ClientError::Unexpected { what: "pause", answer: "it runs".to_owned() });
    }
    client.resume()?;
    let (children, _) = rig.try_fork(&mut client, 1, false)?;
    connect(&children[0]).resume()?;
    wait_for("the child to go on", || (super::serial(&children[0]).len() > 40).then_some(()));
    connect(&children[0]).stop()?;
    client.stop()
}

/// A driver that keeps to the rules gets its bytes: what the others are refused is not the rig's fault.
pub fn an_honest_driver_is_served() {
    let mut rig = Rig::new();
    let mut driver = Driver::ready(8);
    driver.descriptor(0, 0x1000, 64, WRITE, 0);
    driver.offer(1, &[0]);
    let kernel = driver.kernel(&rig);
    assert_eq!(fate(&mut rig, &kernel), None);
}

pub fn broken_queues_end_the_guest_with_a_reason() {
    let mut rig = Rig::new();
    let refused = |what: &str, prepare: &dyn Fn(&mut Driver)| {
        let mut driver = Driver::ready(8);
        prepare(&mut driver);
        let kernel = driver.kernel(&rig);
        (what.to_owned(), kernel)
    };
    let cases = [
        refused("a buffer outside of memory", &|driver| {
            driver.descriptor(0, 0xdead_beef_0000, 64, WRITE, 0);
            driver.offer(1, &[0]);
        }),
        refused("a buffer that ends beyond the last address", &|driver| {
            driver.descriptor(0, u64::MAX - 7, 64, WRITE, 0);
            driver.offer(1, &[0]);
        }),
        refused("a buffer in the devices' registers", &|driver| {
            driver.descriptor(0, layout::VIRTIO_MMIO_BASE, 64, WRITE, 0);
            driver.offer(1, &[0]);
        }),
        refused("a chain that is a loop", &|driver| {
            driver.descriptor(0, 0x1000, 64, WRITE | NEXT, 1);
            driver.descriptor(1, 0x1000, 64, WRITE | NEXT, 0);
            driver.offer(1, &[0]);
        }),
        refused("a chain that goes on outside of the table", &|driver| {
            driver.descriptor(0, 0x1000, 64, WRITE | NEXT, 0x4000);
            driver.offer(1, &[0]);
        }),
        refused("a head outside of the table", &|driver| driver.offer(1, &[500])),
        refused("more requests than the ring holds", &|driver| driver.offer(300, &[0; 8])),
    ];
    for (what, kernel) in cases {
        let (dir, _client) = rig.boot(&machine(16), &kernel);
        let exit = exit_of(&dir);
        assert_eq!(exit.reason, ExitReason::DeviceFailed, "{what}: {}", exit.message);
        assert!(exit.message.contains("rng"), "{what}: {}", exit.message);
    }
}

/// A ring in no memory, a queue that is too large, steps in the wrong order: refused, or the end.
pub fn a_nonsensical_set_up_harms_nobody() {
    let mut rig = Rig::new();
    let mut cases = Vec::new();
    for (offset, value) in [(0x084, 0xffff_ffff), (0x094, 0xffff), (0x0a4, 0x7fff_ffff), (0x080, 0xffff_fff0)]
    {
        let mut driver = Driver::ready(8);
        // Before the queue is made ready.
        driver.writes.insert(10, (RNG * 0x1000 + offset, value));
        driver.offer(1, &[0]);
        cases.push(driver.kernel(&rig));
    }
    for size in [0, 3, 0xffff, u32::MAX] {
        let mut driver = Driver::ready(size);
        driver.offer(1, &[0]);
        cases.push(driver.kernel(&rig));
    }
    for kernel in cases {
        if let Some(exit) = fate(&mut rig, &kernel) {
            assert_eq!(exit.reason, ExitReason::DeviceFailed, "{}", exit.message);
        }
    }
}

/// Every register of every slot, there or not, with all ones, zeros and a pattern.
pub fn wild_mmio_harms_nobody() {
    let mut rig = Rig::new();
    for value in [u32::MAX, 0, 0xa5a5_5a5a] {
        let mut driver = Driver::new();
        for slot in 0..5 {
            (0..0x120).step_by(4).for_each(|offset| driver.register(slot, offset, value));
            driver.register(slot, 0xffc, value);
        }
        let kernel = driver.kernel(&rig);
        if let Some(exit) = fate(&mut rig, &kernel) {
            assert_eq!(exit.reason, ExitReason::DeviceFailed, "{}", exit.message);
        }
    }
}

/// Reads each port and writes a byte to it; those that end the machine by design are left out:
/// ```text
/// xor ax,ax; mov ds,ax; xor dx,dx
/// again: cmp dx,0x64; je skip; cmp dx,0x604; je skip; cmp dx,0xcf9; je skip; in al,dx; in eax,dx; mov al,0xff; out dx,al
/// skip: inc dx; jnz again; (counter)
/// ```
pub fn wild_port_io_harms_nobody() {
    let mut rig = Rig::new();
    let mut code = vec![
        0x31, 0xc0, 0x8e, 0xd8, 0x31, 0xd2, 0x83, 0xfa, 0x64, 0x74, 0x12, 0x81, 0xfa, 0x04, 0x06, 0x74, 0x0c,
        0x81, 0xfa, 0xf9, 0x0c, 0x74, 0x06, 0xec, 0x66, 0xed, 0xb0, 0xff, 0xee, 0x42, 0x75, 0xe6,
    ];
    code.extend(COUNTER);
    let (dir, _client) = rig.boot(&machine(16), &rig.probe(&code, 0));
    // What it wrote to the serial port's registers may have left that dumb: the control socket is what counts.
    let mut client = connect(&dir);
    for _ in 0..20 {
        client.pause().unwrap();
        client.resume().unwrap();
    }
    let (_, forked) = rig.fork(&mut client, 1);
    assert_eq!(forked.pids.len(), 1);
    client.stop().unwrap();
    assert_eq!(exit_of(&dir).reason, ExitReason::Stopped);
}

/// A shutdown of the processor, or what a KVM without hardware makes of it.
pub fn a_triple_fault_ends_the_guest_with_a_reason() {
    let mut rig = Rig::new();
    // lidt [0x3000], which is all zeros; int3
    let (dir, _client) = rig.boot(&machine(16), &rig.probe(&[0x0f, 0x01, 0x1e, 0x00, 0x30, 0xcc], 0));
    let flags = std::fs::read_to_string("/proc/cpuinfo").unwrap();
    if !flags.contains(" vmx") && !flags.contains(" svm") {
        println!(
            "without hardware virtualisation no processor shuts down: only that the monitor answers is looked at"
        );
        if !dir.join("exit.json").exists() {
            return drop(connect(&dir).pause());
        }
    }
    let exit = exit_of(&dir);
    assert_eq!(exit.reason, ExitReason::GuestFault, "{}", exit.message);
}

fn storm(rig: &mut Rig) -> (PathBuf, Client) {
    // again: out 0x99,al; jmp again
    let kernel = rig.probe(&[0xe6, 0x99, 0xeb, 0xfc], 0);
    rig.boot(&machine(16), &kernel)
}

pub fn a_storm_of_exits_starves_no_request() {
    let mut rig = Rig::new();
    let (dir, mut client) = storm(&mut rig);
    for _ in 0..20 {
        client.pause().unwrap();
        client.resume().unwrap();
        assert_eq!(client.status().unwrap().state, State::Running);
    }
    let (children, _) = rig.fork(&mut client, 2);
    let into = rig.folder();
    client.checkpoint(into.clone(), false).unwrap();
    let [input, output] = rig.carrier();
    client.carrier(&[input.as_fd(), output.as_fd()]).unwrap();
    connect(&children[1]).resume().unwrap();
    connect(&children[1]).stop().unwrap();
    client.stop().unwrap();
    assert_eq!(exit_of(&dir).reason, ExitReason::Stopped);
    rig.restore(&machine(16), &into).1.resume().unwrap();
}

/// Two sandboxes: one makes exits for all it is worth, within its limit; the other goes on, and both answer.
pub fn a_storm_stays_within_its_limit_of_cpu_time() {
    let mut rig = Rig::new();
    let (other, _client) = super::counting(&mut rig, 16, 0);
    let hierarchies = Hierarchies::detect().unwrap();
    let name = PathBuf::from(format!("dormouse-vmm-storm-{}", std::process::id()));
    let Some(group) = hierarchies.group(&name) else {
        println!("no usable cgroups: the limit of CPU time is not looked at");
        return;
    };
    hierarchies.prepare(&name).unwrap();
    // Those that the limit is for are below the group that hands it down.
    let group = hierarchies.group(&name.join("storm")).unwrap_or(group);
    group.create().unwrap();
    group.set_limits(&Limits { cpus: Some(1), ..Limits::default() }).unwrap();
    // A tenth of a processor: a busy host would not let it come to a whole one.
    let (file, quota) = match (hierarchies.version(), hierarchies.v1("cpu"), hierarchies.v2()) {
        (Some(Version::V1), Some(mount), _) => (mount.join(&name).join("storm/cpu.cfs_quota_us"), "10000"),
        (_, _, Some(mount)) => (mount.join(&name).join("storm/cpu.max"), "10000 100000"),
        other => panic!("{other:?}"),
    };
    std::fs::write(file, quota).unwrap();
    let (dir, mut client) = storm(&mut rig);
    let (_, pid) = client.hello().unwrap();
    group.add(pid).unwrap();
    wait_for("the kernel to hold it back", || (group.throttled().unwrap() > 2).then_some(()));
    grow(&other);
    client.pause().unwrap();
    client.resume().unwrap();
    client.stop().unwrap();
    assert_eq!(exit_of(&dir).reason, ExitReason::Stopped);
    wait_for("the group to be empty", || group.procs().unwrap().is_empty().then_some(()));
    group.remove().unwrap();
    hierarchies.group(&name).unwrap().remove().unwrap();
}
