//! fork(2) is the snapshot: a guest that counts and writes each number to a port goes on in a forked child, and its
//! child's child, where it stopped, with no number missing and none repeated.
#![allow(unsafe_code, reason = "fork(2) has no safe form")]
#![allow(clippy::unwrap_used, reason = "a test that fails is to panic")]

use std::process::ExitCode;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use dormouse_snapshot::devices::x86::{MachineState, PowerState};
use dormouse_vmm::arch::x86_64::{layout, power, state};
use dormouse_vmm::ending::Ending;
use dormouse_vmm::serial::{ConsoleLog, SerialPort};
use dormouse_vmm::vcpu::{Machine, VcpuSet};
use dormouse_vmm::vm::{Vm, open_kvm};
use dormouse_vmm::{Bus, BusDevice, GuestMemory, memory};
use kvm_ioctls::Kvm;
use vm_memory::{Bytes, GuestAddress};
use vmm_sys_util::eventfd::EventFd;

const CODE: u64 = 0x1000;
const COUNTER: u64 = 0x2000;
const PORT: u64 = 0x10;
const DEPTH: usize = 3;
const MORE: usize = 2000;

/// again: inc dword [0x2000]; mov eax, [0x2000]; out 0x10, eax; jmp again
const PROGRAM: [u8; 14] =
    [0x66, 0xff, 0x06, 0x00, 0x20, 0x66, 0xa1, 0x00, 0x20, 0x66, 0xe7, 0x10, 0xeb, 0xf2];

#[derive(Default)]
struct Numbers(Vec<u32>);

impl BusDevice for Numbers {
    fn read(&mut self, _: u64, data: &mut [u8]) {
        data.fill(0);
    }

    fn write(&mut self, _: u64, data: &[u8]) {
        self.0.push(u32::from_le_bytes(data.try_into().unwrap_or_default()));
    }
}

struct Running {
    vm: Vm,
    vcpus: VcpuSet,
    numbers: Arc<Mutex<Numbers>>,
    serial: Arc<Mutex<SerialPort>>,
    power: Arc<Mutex<power::PowerRegisters>>,
}

/// A machine over `memory`: as saved, or new.
fn machine(kvm: &Kvm, memory: GuestMemory, saved: Option<&MachineState>) -> Running {
    let vm = Vm::new(kvm, memory).unwrap();
    let fds = vm.create_vcpus(saved.map_or(1, |saved| saved.vcpus.len())).unwrap();
    let line = EventFd::new(0).unwrap();
    vm.connect_interrupt(&line, layout::COM1_IRQ).unwrap();
    let log = ConsoleLog::new(None, None).unwrap();
    let serial = match saved {
        Some(saved) => {
            for (id, (fd, vcpu)) in fds.iter().zip(&saved.vcpus).enumerate() {
                state::restore_vcpu(fd, id, vcpu).unwrap();
            }
            state::restore_vm(vm.fd(), &saved.vm).unwrap();
            SerialPort::restore(&saved.serial, line, log).unwrap()
        }
        None => {
            let mut sregs = fds[0].get_sregs().unwrap();
            (sregs.cs.base, sregs.cs.selector) = (0, 0);
            fds[0].set_sregs(&sregs).unwrap();
            let regs = kvm_bindings::kvm_regs { rip: CODE, rflags: 2, ..Default::default() };
            fds[0].set_regs(&regs).unwrap();
            SerialPort::new(line, log)
        }
    };
    let ending = Arc::new(Ending::new().unwrap());
    let mut ports = Bus::new();
    let power_state = saved.map_or(PowerState::default(), |saved| saved.power);
    let power = power::attach(&mut ports, &ending, power_state).unwrap();
    let (numbers, serial) = (Arc::new(Mutex::new(Numbers::default())), Arc::new(Mutex::new(serial)));
    ports.insert(PORT, 4, numbers.clone()).unwrap();
    ports.insert(layout::COM1_BASE.into(), 8, serial.clone()).unwrap();
    let parts = Machine { mmio: Arc::new(Bus::new()), ports: Arc::new(ports), ending };
    Running { vm, vcpus: VcpuSet::start(fds, &parts).unwrap(), numbers, serial, power }
}

impl Running {
    /// Runs until so many more numbers came, then parks; answers the first and the last one.
    fn run(&self, count: usize) -> (u32, u32) {
        self.numbers.lock().unwrap().0.clear();
        let since = Instant::now();
        self.vcpus.resume();
        while self.numbers.lock().unwrap().0.len() < count {
            assert!(since.elapsed() < Duration::from_secs(30), "the guest does not run");
            std::thread::yield_now();
        }
        self.vcpus.park().unwrap();
        let numbers = self.numbers.lock().unwrap();
        for pair in numbers.0.windows(2) {
            assert_eq!(pair[1], pair[0] + 1, "repeated or lost");
        }
        (numbers.0[0], *numbers.0.last().unwrap())
    }

    fn capture(&self, kvm: &Kvm) -> MachineState {
        let indices = state::msr_indices(kvm).unwrap();
        let vcpus = self.vcpus.with_parked(|id, fd| {
            Ok::<_, dormouse_vmm::error::VcpuError>(state::capture_vcpu(fd, id, &indices).unwrap())
        });
        MachineState {
            vcpus: vcpus.unwrap(),
            vm: state::capture_vm(self.vm.fd()).unwrap(),
            serial: self.serial.lock().unwrap().save(),
            power: self.power.lock().unwrap().save(),
        }
    }
}

/// Forks a child that goes on from here, and whose own children do so until `depth` is 0; true: all went well.
fn fork_and_go_on(kvm: &Kvm, parent: Running, last: u32, depth: usize) -> (Running, bool) {
    let captured = parent.capture(kvm);
    let state = MachineState::decode(&captured.encode().unwrap()).unwrap();
    assert_eq!(state, captured);
    // SAFETY: vCPU threads are parked, so no lock that the child needs is held; the child leaves by _exit.
    let pid = unsafe { libc::fork() };
    assert!(pid >= 0);
    if pid > 0 {
        let mut status = 0;
        // SAFETY: `status` is valid for the call.
        let waited = unsafe { libc::waitpid(pid, &raw mut status, 0) };
        return (parent, waited == pid && status == 0);
    }
    let outcome = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
        let Running { vm, vcpus, .. } = parent;
        vcpus.abandon();
        let memory = vm.memory().clone();
        drop(vm);
        let child = machine(kvm, memory, Some(&state));
        let (first, next) = child.run(MORE);
        assert_eq!(first, last + 1, "the child's first number");
        depth == 0 || fork_and_go_on(kvm, child, next, depth - 1).1
    }));
    let good = matches!(outcome, Ok(true));
    // SAFETY: ends the child at once, without the harness's cleanup, which is the parent's.
    unsafe { libc::_exit(i32::from(!good)) }
}

/// Without the test harness: its threads would not be there in the children.
fn main() -> ExitCode {
    let has = |flag: &str| std::env::args().any(|arg| arg == flag);
    if has("--list") {
        // As nextest asks for it, first all tests and then those that are left out by default: there are none.
        if !has("--ignored") {
            println!("machines_go_on_in_forked_children: test");
        }
        return ExitCode::SUCCESS;
    }
    let kvm = open_kvm().unwrap();
    let memory = memory::anonymous(4).unwrap();
    memory.write_slice(&PROGRAM, GuestAddress(CODE)).unwrap();
    let mut parent = machine(&kvm, memory, None);
    for round in 0..5 {
        let (_, last) = parent.run(100 + round);
        let (same, good) = fork_and_go_on(&kvm, parent, last, DEPTH);
        assert!(good, "a child did not go on as it should");
        parent = same;
        let (first, _) = parent.run(10);
        assert_eq!(first, last + 1, "the parent goes on too");
        let counter: u32 = parent.vm.memory().read_obj(GuestAddress(COUNTER)).unwrap();
        assert!(counter > last && counter < last + 1000, "and the children's counting is not seen in it");
    }
    parent.vcpus.stop().unwrap();
    println!("5 forks, each {DEPTH} deep: every number once");
    ExitCode::SUCCESS
}
