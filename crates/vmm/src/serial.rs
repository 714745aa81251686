//! The serial port (COM1): the guest's console, written to a log of bounded size.

use std::fs::File;
use std::io::{self, Read, Seek, SeekFrom, Write};

use dormouse_snapshot::devices::x86::SerialState as SavedState;
use vm_superio::serial::NoEvents;
use vm_superio::{Serial, SerialState, Trigger};
use vmm_sys_util::eventfd::EventFd;

use crate::bus::BusDevice;

/// A log grows to this size; then its older half is dropped.
pub const LOG_BYTES_MAX: u64 = 1 << 20;

/// Where a console's output goes: a log file, and a second sink when somebody watches.
///
/// Output is never a reason to stop the guest: what cannot be written is lost.
pub struct ConsoleLog {
    /// Opened for reading and writing.
    log: Option<File>,
    watcher: Option<File>,
    written: u64,
    bytes_max: u64,
}

impl ConsoleLog {
    /// Appends to `log`; a copy goes to `watcher`, which should not block.
    pub fn new(mut log: Option<File>, watcher: Option<File>) -> io::Result<Self> {
        let written = log.as_mut().map_or(Ok(0), |file| file.seek(SeekFrom::End(0)))?;
        Ok(Self { log, watcher, written, bytes_max: LOG_BYTES_MAX })
    }

    fn append(&mut self, bytes: &[u8]) -> io::Result<()> {
        let Some(log) = &mut self.log else { return Ok(()) };
        if self.written + bytes.len() as u64 > self.bytes_max {
            self.written = drop_older_half(log, self.written)?;
        }
        log.write_all(bytes)?;
        self.written += bytes.len() as u64;
        Ok(())
    }
}

/// Answers how many bytes are left.
fn drop_older_half(log: &mut File, written: u64) -> io::Result<u64> {
    let mut rest = Vec::new();
    log.seek(SeekFrom::Start(written / 2))?;
    log.take(written).read_to_end(&mut rest)?;
    log.set_len(0)?;
    log.seek(SeekFrom::Start(0))?;
    log.write_all(&rest)?;
    Ok(rest.len() as u64)
}

impl Write for ConsoleLog {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        if self.append(bytes).is_err() {
            // A full disk: no further try, and the guest runs on.
            self.log = None;
        }
        if let Some(watcher) = &mut self.watcher {
            match watcher.write_all(bytes) {
                Err(error) if error.kind() != io::ErrorKind::WouldBlock => self.watcher = None,
                _ => {}
            }
        }
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// The interrupt line of COM1: an irqfd.
pub struct Line(EventFd);

impl Trigger for Line {
    type E = io::Error;

    fn trigger(&self) -> io::Result<()> {
        self.0.write(1)
    }
}

/// COM1.
pub struct SerialPort {
    uart: Serial<Line, NoEvents, ConsoleLog>,
}

impl SerialPort {
    /// As after a reset. `interrupt` is the irqfd of COM1's line.
    #[must_use]
    pub fn new(interrupt: EventFd, log: ConsoleLog) -> Self {
        Self { uart: Serial::new(Line(interrupt), log) }
    }

    /// As it was when saved; raises the interrupt again where one was pending.
    pub fn restore(saved: &SavedState, interrupt: EventFd, log: ConsoleLog) -> io::Result<Self> {
        let [baud_divisor_low, baud_divisor_high, interrupt_enable, interrupt_identification, rest @ ..] =
            saved.registers;
        let [line_control, line_status, modem_control, modem_status, scratch] = rest;
        let state = SerialState {
            baud_divisor_low,
            baud_divisor_high,
            interrupt_enable,
            interrupt_identification,
            line_control,
            line_status,
            modem_control,
            modem_status,
            scratch,
            in_buffer: saved.input.to_vec(),
        };
        let uart = Serial::from_state(&state, Line(interrupt), NoEvents, log)
            .map_err(|error| io::Error::other(format!("the serial port's state is not valid: {error:?}")))?;
        Ok(Self { uart })
    }

    #[must_use]
    pub fn save(&self) -> SavedState {
        let state = self.uart.state();
        SavedState {
            registers: [
                state.baud_divisor_low,
                state.baud_divisor_high,
                state.interrupt_enable,
                state.interrupt_identification,
                state.line_control,
                state.line_status,
                state.modem_control,
                state.modem_status,
                state.scratch,
            ],
            input: state.in_buffer.into(),
        }
    }

    /// Gives the guest something to read; answers how many bytes it had room for.
    pub fn input(&mut self, bytes: &[u8]) -> usize {
        self.uart.enqueue_raw_bytes(bytes).unwrap_or(0)
    }
}

/// The registers are bytes: a wider access reaches none of them.
impl BusDevice for SerialPort {
    fn read(&mut self, offset: u64, data: &mut [u8]) {
        match (u8::try_from(offset), data) {
            (Ok(offset), [byte]) => *byte = self.uart.read(offset),
            (_, data) => data.fill(0xff),
        }
    }

    fn write(&mut self, offset: u64, data: &[u8]) {
        if let (Ok(offset), [byte]) = (u8::try_from(offset), data) {
            // Only the interrupt line can fail, when its counter is full: then the interrupt is pending anyway.
            let _ = self.uart.write(offset, *byte);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn contents(file: &mut File) -> String {
        let mut text = String::new();
        file.seek(SeekFrom::Start(0)).unwrap();
        file.read_to_string(&mut text).unwrap();
        text
    }

    #[test]
    fn a_log_is_bounded_and_keeps_the_newest() {
        let mut file = tempfile::tempfile().unwrap();
        let mut log = ConsoleLog::new(Some(file.try_clone().unwrap()), None).unwrap();
        log.bytes_max = 100;
        for n in 0..1000 {
            log.write_all(format!("{n}\n").as_bytes()).unwrap();
        }
        let text = contents(&mut file);
        assert!(text.len() <= 100 && text.ends_with("998\n999\n"), "{text}");
    }

    #[test]
    fn a_saved_port_goes_on() {
        let mut file = tempfile::tempfile().unwrap();
        let log = || ConsoleLog::new(Some(file.try_clone().unwrap()), None).unwrap();
        let mut port = SerialPort::new(EventFd::new(0).unwrap(), log());
        port.write(7, &[42]);
        port.write(0, b"a");
        port.write(0, &[1, 2]);
        assert_eq!(port.input(b"xyz"), 3);
        let mut port = SerialPort::restore(&port.save(), EventFd::new(0).unwrap(), log()).unwrap();
        port.write(0, b"b");
        let mut byte = [0];
        port.read(7, &mut byte);
        assert_eq!(byte, [42], "scratch register");
        port.read(0, &mut byte);
        assert_eq!(byte, *b"x");
        assert_eq!(contents(&mut file), "ab");
    }
}
