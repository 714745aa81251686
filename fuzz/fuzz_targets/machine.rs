#![no_main]
//! The platform of a microVM: damaged state is refused or is valid, and a guest's accesses to its ports, of any width
//! and at any offset, end in no panic; what the devices say of themselves can be saved and read again.

use std::sync::{Arc, Mutex};

use dormouse_snapshot::devices::x86::{MachineState, PowerState, SerialState};
use dormouse_vmm::arch::x86_64::{cpuid, layout, power};
use dormouse_vmm::ending::Ending;
use dormouse_vmm::serial::{ConsoleLog, SerialPort};
use dormouse_vmm::{Bus, BusDevice};
use libfuzzer_sys::fuzz_target;
use vmm_sys_util::eventfd::EventFd;

fn restore(serial: &SerialState, power: PowerState, accesses: &[u8]) {
    let log = || ConsoleLog::new(None, None).unwrap();
    let Ok(port) = SerialPort::restore(serial, EventFd::new(0).unwrap(), log()) else { return };
    let port = Arc::new(Mutex::new(port));
    let ending = Arc::new(Ending::new().unwrap());
    let mut ports = Bus::new();
    let power = power::attach(&mut ports, &ending, power).unwrap();
    ports.insert(layout::COM1_BASE.into(), 8, port.clone()).unwrap();
    let bases = [layout::COM1_BASE, layout::I8042_BASE, layout::RESET_PORT, layout::PM1A_EVENT];
    for access in accesses.chunks_exact(4) {
        let [what, offset, low, high] = *access else { return };
        let address = u64::from(bases[usize::from(what & 3)]) + u64::from(offset & 15);
        let mut data = [low, high, low, high];
        let width = 1 << (what >> 3 & 3).min(2);
        if what & 4 == 0 {
            ports.read(address, &mut data[..width]);
        } else {
            ports.write(address, &data[..width]);
        }
    }
    port.lock().unwrap().input(&[1; 100]);
    let saved = port.lock().unwrap().save();
    SerialPort::restore(&saved, EventFd::new(0).unwrap(), log()).expect("what was saved can be restored");
    let _ = power.lock().unwrap().save();
    port.lock().unwrap().write(0, b"x");
}

fuzz_target!(|input: (&[u8], &[u8])| {
    let (bytes, accesses) = input;
    match MachineState::decode(bytes) {
        Ok(state) => {
            let again = state.encode().expect("a decoded state can be encoded");
            assert_eq!(MachineState::decode(&again).as_ref(), Ok(&state));
            for vcpu in &state.vcpus {
                assert!(cpuid::load(&vcpu.cpuid).is_some());
                let _ = cpuid::feature_names(&vcpu.cpuid);
            }
            restore(&state.serial, state.power, accesses);
        }
        Err(_) => {
            let serial = SerialState { registers: [0; 9], input: Vec::new().into() };
            restore(&serial, PowerState::default(), accesses);
        }
    }
});
