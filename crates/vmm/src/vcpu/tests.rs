//! Small real-mode guests on the real KVM (they run without hardware virtualisation too).

use std::time::{Duration, Instant};

use dormouse_snapshot::devices::x86::PowerState;
use vm_memory::{Bytes, GuestAddress};

use super::*;
use crate::BusDevice;
use crate::arch::x86_64::power;
use crate::ending::EndReason;
use crate::memory::anonymous;
use crate::vm::{Vm, open_kvm};

const CODE: u64 = 0x1000;
const PORT: u64 = 0x10;
const WAIT: Duration = Duration::from_secs(20);

/// Remembers what is written; a read gives how many writes there were.
#[derive(Default)]
struct Recorder(Vec<Vec<u8>>);

impl BusDevice for Recorder {
    fn read(&mut self, _: u64, data: &mut [u8]) {
        data.fill(u8::try_from(self.0.len()).unwrap());
    }

    fn write(&mut self, _: u64, data: &[u8]) {
        self.0.push(data.to_vec());
    }
}

struct Guest {
    vm: Vm,
    vcpus: VcpuSet,
    ending: Arc<Ending>,
    recorder: Arc<Mutex<Recorder>>,
}

/// vCPU 0 is to run `code` in real mode.
fn guest(code: &[u8], vcpus: usize) -> Guest {
    let kvm = open_kvm().unwrap();
    let vm = Vm::new(&kvm, anonymous(2).unwrap()).unwrap();
    vm.memory().write_slice(code, GuestAddress(CODE)).unwrap();
    let fds = vm.create_vcpus(vcpus).unwrap();
    let mut sregs = fds[0].get_sregs().unwrap();
    (sregs.cs.base, sregs.cs.selector) = (0, 0);
    fds[0].set_sregs(&sregs).unwrap();
    let regs = kvm_bindings::kvm_regs { rip: CODE, rflags: 2, rsp: 0x8000, ..Default::default() };
    fds[0].set_regs(&regs).unwrap();
    let ending = Arc::new(Ending::new().unwrap());
    let mut ports = Bus::new();
    power::attach(&mut ports, &ending, PowerState::default()).unwrap();
    let recorder = Arc::new(Mutex::new(Recorder::default()));
    ports.insert(PORT, 1, recorder.clone()).unwrap();
    let machine = Machine { mmio: Arc::new(Bus::new()), ports: Arc::new(ports), ending: Arc::clone(&ending) };
    Guest { vm, vcpus: VcpuSet::start(fds, &machine).unwrap(), ending, recorder }
}

impl Guest {
    fn wait(&self, mut until: impl FnMut(&Self) -> bool) {
        let since = Instant::now();
        while !until(self) {
            assert!(
                since.elapsed() < WAIT,
                "the guest did not get there; it ended by {:?}",
                self.ending.reason()
            );
            std::thread::yield_now();
        }
    }

    fn written(&self) -> usize {
        self.recorder.lock().unwrap().0.len()
    }
}

/// The reason by which a guest with this code ends.
fn ends(code: &[u8]) -> EndReason {
    let guest = guest(code, 1);
    guest.vcpus.resume();
    guest.wait(|guest| guest.ending.reason().is_some());
    guest.vcpus.park().unwrap();
    guest.vcpus.resume();
    guest.vcpus.stop().unwrap();
    guest.ending.reason().unwrap().clone()
}

#[test]
fn a_guest_ends_with_a_named_reason() {
    // mov dx, 0x604; mov ax, 0x3400; out dx, ax; hlt
    assert_eq!(ends(&[0xba, 0x04, 0x06, 0xb8, 0x00, 0x34, 0xef, 0xf4]), EndReason::PowerOff);
    // mov al, 0xfe; out 0x64, al; hlt
    assert_eq!(ends(&[0xb0, 0xfe, 0xe6, 0x64, 0xf4]), EndReason::Reset);
}

#[test]
fn a_triple_fault_is_named() {
    let flags = std::fs::read_to_string("/proc/cpuinfo").unwrap();
    if !flags.contains(" vmx") && !flags.contains(" svm") {
        // KVM without hardware virtualisation does not emulate this.
        return;
    }
    // lidt [0x3000] (all zeros); int3
    assert_eq!(ends(&[0x0f, 0x01, 0x1e, 0x00, 0x30, 0xcc]), EndReason::TripleFault { vcpu: 0 });
}

#[test]
fn each_access_of_a_string_instruction_is_one() {
    // mov si, 0x1020; mov dx, 0x10; mov cx, 5; rep outsb; then: mov cx, 3; mov si, 0x1020; rep outsw; power off
    let mut code = vec![0xbe, 0x20, 0x10, 0xba, 0x10, 0x00, 0xb9, 0x05, 0x00, 0xf3, 0x6e];
    // in al, dx; mov [0x3000], al; mov dx, 0x604; mov ax, 0x3400; out dx, ax; hlt
    code.extend([0xec, 0xa2, 0x00, 0x30, 0xba, 0x04, 0x06, 0xb8, 0x00, 0x34, 0xef, 0xf4]);
    code.resize(0x20, 0);
    code.extend(b"mouse");
    let guest = guest(&code, 1);
    guest.vcpus.resume();
    guest.wait(|guest| guest.ending.reason().is_some());
    guest.vcpus.stop().unwrap();
    let written = guest.recorder.lock().unwrap();
    assert_eq!(written.0, [b"m", b"o", b"u", b"s", b"e"]);
    assert_eq!(guest.vm.memory().read_obj::<u8>(GuestAddress(0x3000)).unwrap(), 5, "IN sees the device");
}

#[test]
fn nobody_at_an_address_reads_as_ones() {
    // mov ax, 0xa000; mov ds, ax... a port without device: in al, 0x99; mov [0x3000], al; reset
    let code = [0xe4, 0x99, 0xa2, 0x00, 0x30, 0xb0, 0xfe, 0xe6, 0x64, 0xf4];
    let guest = guest(&code, 1);
    guest.vcpus.resume();
    guest.wait(|guest| guest.ending.reason().is_some());
    assert_eq!(guest.vm.memory().read_obj::<u8>(GuestAddress(0x3000)).unwrap(), 0xff);
    guest.vcpus.stop().unwrap();
}

#[test]
fn a_halted_guest_and_a_waiting_vcpu_park_at_once() {
    let guest = guest(&[0xf4, 0xeb, 0xfd], 2);
    for _ in 0..20 {
        guest.vcpus.resume();
        guest.vcpus.park().unwrap();
    }
    let states = guest.vcpus.with_parked(|_, fd| Ok::<_, VcpuError>(fd.get_mp_state().unwrap().mp_state));
    assert_eq!(states.unwrap()[1], kvm_bindings::KVM_MP_STATE_UNINITIALIZED);
    guest.vcpus.stop().unwrap();
}

#[test]
fn endless_exits_do_not_keep_a_vcpu_from_parking() {
    // again: out 0x10, al; jmp again
    let guest = guest(&[0xe6, 0x10, 0xeb, 0xfc], 1);
    for round in 1..50 {
        guest.vcpus.resume();
        guest.wait(|guest| guest.written() > round * 3);
        guest.vcpus.park().unwrap();
        let (before, exits) = (guest.written(), guest.vcpus.exits());
        std::thread::yield_now();
        assert_eq!((guest.written(), guest.vcpus.exits()), (before, exits), "parked means parked");
    }
    guest.vcpus.stop().unwrap();
}

#[test]
fn registers_are_seen_only_while_parked() {
    let guest = guest(&[0xeb, 0xfe], 1);
    guest.vcpus.resume();
    guest.wait(|guest| guest.vcpus.vcpus[0].shared.lock().flag.is_some());
    let result = guest.vcpus.with_parked(|_, _| Ok::<_, VcpuError>(()));
    assert!(matches!(result, Err(VcpuError::NotParked { id: 0 })));
    guest.vcpus.park().unwrap();
    let rip = guest.vcpus.with_parked(|_, fd| Ok::<_, VcpuError>(fd.get_regs().unwrap().rip)).unwrap();
    assert_eq!(rip, [CODE]);
    guest.vcpus.stop().unwrap();
}
