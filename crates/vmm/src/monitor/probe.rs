//! A guest without an operating system: 16-bit code, for hosts whose KVM runs no kernel, and for measurements.
//!
//! ```text
//! 0  magic "DMPROBE1"   8  MiB of memory to be dirty at the start, from 1 MiB on, u32   12  base of FS, u32   16  code
//! ```
//! vCPU 0 enters the code at address 0x8000 in real mode with all other segments at 0; the others wait to be started.

use std::fs::File;
use std::io::{self, Read};
use std::os::unix::fs::FileExt;

use kvm_bindings::CpuId;
use kvm_ioctls::VcpuFd;
use vm_memory::{Bytes, GuestAddress};

use crate::arch::x86_64::{cpuid, regs};
use crate::error::BootError;
use crate::memory::GuestMemory;

const MAGIC: [u8; 8] = *b"DMPROBE1";
const HEADER_BYTES: usize = 16;
const CODE_START: u64 = 0x8000;
/// The rest of what a real-mode segment reaches.
const CODE_BYTES_MAX: u64 = 0x8000;
const DIRTY_START: u64 = 1 << 20;
const MIB: u64 = 1 << 20;

/// Such a guest, read from a file.
pub struct Probe {
    dirty_mib: u32,
    /// What the guest reaches by FS, beside the first 64 KiB: devices' registers, for example.
    window: u32,
    code: Vec<u8>,
}

impl Probe {
    /// `None`: the file is something else.
    pub fn read(file: &File) -> io::Result<Option<Self>> {
        let mut header = [0; HEADER_BYTES];
        match file.read_exact_at(&mut header, 0) {
            Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => return Ok(None),
            other => other?,
        }
        if header[..8] != MAGIC {
            return Ok(None);
        }
        let [.., a, b, c, d, e, f, g, h] = header;
        let (dirty_mib, window) = (u32::from_le_bytes([a, b, c, d]), u32::from_le_bytes([e, f, g, h]));
        let mut bytes = Vec::new();
        file.take(HEADER_BYTES as u64 + CODE_BYTES_MAX).read_to_end(&mut bytes)?;
        Ok(Some(Self { dirty_mib, window, code: bytes.split_off(HEADER_BYTES.min(bytes.len())) }))
    }

    /// Fills memory and prepares the vCPUs.
    pub fn load(&self, memory: &GuestMemory, fds: &[VcpuFd], cpuid: &CpuId) -> Result<(), BootError> {
        let write = |what, address| move |_| BootError::Write { what, address };
        let pattern: Vec<u8> = (0..MIB).map(|at| u8::try_from(at % 251).unwrap_or(0) | 1).collect();
        for number in 0..u64::from(self.dirty_mib) {
            let address = DIRTY_START + number * MIB;
            memory
                .write_slice(&pattern, GuestAddress(address))
                .map_err(write("what is to be dirty", address))?;
        }
        memory.write_slice(&self.code, GuestAddress(CODE_START)).map_err(write("the code", CODE_START))?;
        for (id, fd) in fds.iter().enumerate() {
            let own = cpuid::for_vcpu(cpuid, id, fds.len());
            fd.set_cpuid2(&own).map_err(|error| regs::vcpu_error(id, "CPUID", error))?;
        }
        let Some(first) = fds.first() else { return Ok(()) };
        let refused = |what| move |error| regs::vcpu_error(0, what, error);
        let mut sregs = first.get_sregs().map_err(refused("segment registers"))?;
        (sregs.cs.base, sregs.cs.selector) = (0, 0);
        sregs.fs.base = self.window.into();
        first.set_sregs(&sregs).map_err(refused("segment registers"))?;
        let mut registers = first.get_regs().map_err(refused("registers"))?;
        (registers.rip, registers.rflags) = (CODE_START, 2);
        first.set_regs(&registers).map_err(refused("registers"))
    }
}
