//! The ways in which a guest switches itself off or resets itself: keyboard controller, reset port, ACPI.

use std::sync::{Arc, Mutex};

use dormouse_snapshot::devices::x86::PowerState;

use super::layout;
use crate::bus::{Bus, BusDevice, BusError};
use crate::ending::{EndReason, Ending};

/// The keyboard controller's "pulse the reset line".
const I8042_RESET: u8 = 0xfe;
/// Bit of the reset port that does it.
const RESET_CPU: u8 = 1 << 2;
const PM1_SCI_ENABLE: u16 = 1;
const PM1_SLEEP_ENABLE: u16 = 1 << 13;
const PM1_SLEEP_TYPE_SHIFT: u16 = 10;

/// The keyboard controller: never has a key, and resets the machine when told to.
struct Keyboard(Arc<Ending>);

impl BusDevice for Keyboard {
    fn read(&mut self, _: u64, data: &mut [u8]) {
        data.fill(0);
    }

    fn write(&mut self, offset: u64, data: &[u8]) {
        if offset == u64::from(layout::I8042_COMMAND - layout::I8042_BASE) && data == [I8042_RESET] {
            self.0.set(EndReason::Reset);
        }
    }
}

struct ResetPort(Arc<Ending>);

impl BusDevice for ResetPort {
    fn read(&mut self, _: u64, data: &mut [u8]) {
        data.fill(0);
    }

    fn write(&mut self, _: u64, data: &[u8]) {
        if let [byte] = data
            && byte & RESET_CPU != 0
        {
            self.0.set(EndReason::Reset);
        }
    }
}

/// ACPI's PM1a registers: status and enable (no event ever happens), and control.
pub struct PowerRegisters {
    state: PowerState,
    ending: Arc<Ending>,
}

impl PowerRegisters {
    #[must_use]
    pub fn new(state: PowerState, ending: Arc<Ending>) -> Self {
        Self { state, ending }
    }

    #[must_use]
    pub fn save(&self) -> PowerState {
        self.state
    }
}

const STATUS: u64 = 0;
const ENABLE: u64 = 2;
const CONTROL: u64 = (layout::PM1A_CONTROL - layout::PM1A_EVENT) as u64;
const PM1_BYTES: u64 = CONTROL + 2;

impl BusDevice for PowerRegisters {
    fn read(&mut self, offset: u64, data: &mut [u8]) {
        data.fill(0);
        let value = match offset {
            ENABLE => self.state.pm1_enable,
            CONTROL => self.state.pm1_control | PM1_SCI_ENABLE,
            _ => 0,
        };
        for (to, from) in data.iter_mut().zip(value.to_le_bytes()) {
            *to = from;
        }
    }

    fn write(&mut self, offset: u64, data: &[u8]) {
        let value = match data {
            [low] => u16::from(*low),
            [low, high] => u16::from_le_bytes([*low, *high]),
            _ => return,
        };
        match offset {
            // Writing a one clears an event: there is none.
            STATUS => {}
            ENABLE => self.state.pm1_enable = value,
            CONTROL => {
                self.state.pm1_control = value & !PM1_SLEEP_ENABLE;
                let sleep_type = (value >> PM1_SLEEP_TYPE_SHIFT) & 7;
                if value & PM1_SLEEP_ENABLE != 0 && sleep_type == u16::from(layout::SLEEP_TYPE_S5) {
                    self.ending.set(EndReason::PowerOff);
                }
            }
            _ => {}
        }
    }
}

/// Puts all of them on the bus for port I/O; the answer is what has state to save.
pub fn attach(
    ports: &mut Bus,
    ending: &Arc<Ending>,
    state: PowerState,
) -> Result<Arc<Mutex<PowerRegisters>>, BusError> {
    // 0x61 lies between the keyboard controller's ports and is KVM's (PIT, speaker): it never gets here.
    let keyboard = Arc::new(Mutex::new(Keyboard(Arc::clone(ending))));
    let keyboard_bytes = u64::from(layout::I8042_COMMAND - layout::I8042_BASE) + 1;
    ports.insert(layout::I8042_BASE.into(), keyboard_bytes, keyboard)?;
    let reset = Arc::new(Mutex::new(ResetPort(Arc::clone(ending))));
    ports.insert(layout::RESET_PORT.into(), 1, reset)?;
    let power = Arc::new(Mutex::new(PowerRegisters::new(state, Arc::clone(ending))));
    ports.insert(layout::PM1A_EVENT.into(), PM1_BYTES, power.clone())?;
    Ok(power)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn after(writes: &[(u64, &[u8])]) -> (Option<EndReason>, PowerState) {
        let ending = Arc::new(Ending::new().unwrap());
        let mut ports = Bus::new();
        let power = attach(&mut ports, &ending, PowerState::default()).unwrap();
        for (port, data) in writes {
            ports.write(*port, data);
        }
        let state = power.lock().unwrap().save();
        (ending.reason().cloned(), state)
    }

    #[test]
    fn each_way_ends_the_machine() {
        assert_eq!(after(&[(0x64, &[0xfe])]).0, Some(EndReason::Reset));
        assert_eq!(after(&[(0xcf9, &[2]), (0xcf9, &[6])]).0, Some(EndReason::Reset));
        assert_eq!(after(&[(0x604, &[0, 0x34])]).0, Some(EndReason::PowerOff));
        assert_eq!(after(&[(0x604, &[0, 0x34]), (0x64, &[0xfe])]).0, Some(EndReason::PowerOff), "the first");
    }

    #[test]
    fn anything_else_does_not() {
        let (reason, state) = after(&[
            (0x64, &[0xd4]),
            (0x60, &[0xfe]),
            (0xcf9, &[2]),
            (0x604, &[0, 0x20]),
            (0x602, &[0x20, 1]),
        ]);
        assert_eq!(reason, None);
        assert_eq!(state, PowerState { pm1_enable: 0x120, pm1_control: 0 });
    }

    #[test]
    fn control_says_that_acpi_is_on() {
        let ending = Arc::new(Ending::new().unwrap());
        let mut power = PowerRegisters::new(PowerState { pm1_enable: 0x20, pm1_control: 4 }, ending);
        let mut data = [0xff; 2];
        power.read(CONTROL, &mut data);
        assert_eq!(data, [5, 0]);
        power.read(ENABLE, &mut data);
        assert_eq!(data, [0x20, 0]);
        power.read(STATUS, &mut data);
        assert_eq!(data, [0, 0]);
    }
}
