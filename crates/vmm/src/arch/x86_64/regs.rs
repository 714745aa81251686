//! How the first vCPU's registers stand when a 64-bit kernel is entered (Linux' `boot.rst`, "64-bit boot protocol").

use kvm_bindings::{Msrs, kvm_dtable, kvm_lapic_state, kvm_msr_entry, kvm_regs, kvm_segment};
use kvm_ioctls::VcpuFd;
use vm_memory::{Bytes, GuestAddress};
use vmm_sys_util::errno;

use super::layout;
use crate::error::{BootError, kvm_error};
use crate::memory::GuestMemory;

const CR0_PROTECTED: u64 = 1;
const CR0_EXTENSION_TYPE: u64 = 1 << 4;
const CR0_PAGING: u64 = 1 << 31;
const CR4_PAE: u64 = 1 << 5;
const EFER_LONG_MODE: u64 = 1 << 8;
const EFER_LONG_MODE_ACTIVE: u64 = 1 << 10;

const PAGE: u64 = 0x1000;
const PRESENT_WRITABLE: u64 = 0b11;
const LARGE: u64 = 1 << 7;
const LARGE_BYTES: u64 = 2 << 20;
const ENTRIES: u64 = 512;
/// Each maps 1 GiB.
const DIRECTORIES: u64 = 4;

/// Null, null, code, data, task: the selectors 0x10, 0x18 and 0x20 that the protocol asks for.
const GDT: [u64; 5] = [0, 0, 0x00af_9b00_0000_ffff, 0x00cf_9300_0000_ffff, 0x008f_8b00_0000_ffff];
const CODE: u16 = 0x10;
const DATA: u16 = 0x18;
const TASK: u16 = 0x20;

/// Writes GDT and page tables to where [`set_boot_registers`] expects them.
pub fn write_tables(memory: &GuestMemory) -> Result<(), BootError> {
    for (at, entry) in (layout::GDT_START..).step_by(8).zip(GDT) {
        put(memory, "the GDT", at, entry)?;
    }
    let (level4, level3) = (layout::PAGE_TABLES_START, layout::PAGE_TABLES_START + PAGE);
    let directories = level3 + PAGE;
    put(memory, "a page table", level4, level3 | PRESENT_WRITABLE)?;
    for directory in 0..DIRECTORIES {
        let table = directories + directory * PAGE;
        put(memory, "a page table", level3 + directory * 8, table | PRESENT_WRITABLE)?;
        for entry in 0..ENTRIES {
            let page = (directory * ENTRIES + entry) * LARGE_BYTES;
            put(memory, "a page table", table + entry * 8, page | PRESENT_WRITABLE | LARGE)?;
        }
    }
    Ok(())
}

fn put(memory: &GuestMemory, what: &'static str, address: u64, value: u64) -> Result<(), BootError> {
    memory.write_obj(value.to_le(), GuestAddress(address)).map_err(|_| BootError::Write { what, address })
}

/// Lets vCPU 0 start at `entry` in long mode, with the zero page in RSI.
pub fn set_boot_registers(fd: &VcpuFd, entry: u64) -> Result<(), BootError> {
    let refused = |what| move |error| vcpu_error(0, what, error);
    let mut sregs = fd.get_sregs().map_err(refused("segment registers"))?;
    let gdt_limit = u16::try_from(size_of_val(&GDT) - 1).unwrap_or(u16::MAX);
    sregs.gdt = kvm_dtable { base: layout::GDT_START, limit: gdt_limit, ..Default::default() };
    sregs.idt = kvm_dtable::default();
    sregs.cs = segment(CODE, 0xb, true);
    let data = segment(DATA, 0x3, false);
    (sregs.ds, sregs.es, sregs.fs, sregs.gs, sregs.ss) = (data, data, data, data, data);
    sregs.tr = kvm_segment { s: 0, ..segment(TASK, 0xb, false) };
    sregs.cr3 = layout::PAGE_TABLES_START;
    sregs.cr4 |= CR4_PAE;
    sregs.cr0 = CR0_PROTECTED | CR0_EXTENSION_TYPE | CR0_PAGING;
    sregs.efer |= EFER_LONG_MODE | EFER_LONG_MODE_ACTIVE;
    fd.set_sregs(&sregs).map_err(refused("segment registers"))?;
    let regs = kvm_regs {
        rflags: 2,
        rip: entry,
        rsp: layout::BOOT_STACK,
        rbp: layout::BOOT_STACK,
        rsi: layout::ZERO_PAGE_START,
        ..Default::default()
    };
    fd.set_regs(&regs).map_err(refused("registers"))
}

fn segment(selector: u16, type_: u8, code: bool) -> kvm_segment {
    kvm_segment {
        base: 0,
        limit: 0xffff_ffff,
        selector,
        type_,
        present: 1,
        dpl: 0,
        db: u8::from(!code),
        s: 1,
        l: u8::from(code),
        g: 1,
        ..Default::default()
    }
}

/// What firmware would have set on every vCPU: memory is cacheable, fast string operations are on.
pub fn set_boot_msrs(fd: &VcpuFd, id: usize) -> Result<(), BootError> {
    const MISC_ENABLE: u32 = 0x1a0;
    const FAST_STRINGS: u64 = 1;
    const MTRR_DEFAULT: u32 = 0x2ff;
    const MTRR_ENABLE_WRITE_BACK: u64 = 1 << 11 | 6;
    let msr = |index: u32, data: u64| kvm_msr_entry { index, data, ..Default::default() };
    let entries = [msr(MISC_ENABLE, FAST_STRINGS), msr(MTRR_DEFAULT, MTRR_ENABLE_WRITE_BACK)];
    let refused = |error| vcpu_error(id, "MSRs", error);
    let msrs = Msrs::from_entries(&entries).map_err(|_| refused(errno::Error::new(libc::E2BIG)))?;
    match fd.set_msrs(&msrs) {
        Ok(count) if count == entries.len() => Ok(()),
        Ok(_) => Err(refused(errno::Error::new(libc::EINVAL))),
        Err(error) => Err(refused(error)),
    }
}

/// LINT0 takes interrupts of the PICs, LINT1 non-maskable ones, as firmware would have it.
pub fn set_lints(fd: &VcpuFd, id: usize) -> Result<(), BootError> {
    const LINT0: usize = 0x350;
    const LINT1: usize = 0x360;
    const MODE_NMI: u32 = 4;
    const MODE_EXTERNAL: u32 = 7;
    let mut lapic = fd.get_lapic().map_err(|error| vcpu_error(id, "local APIC", error))?;
    set_delivery_mode(&mut lapic, LINT0, MODE_EXTERNAL);
    set_delivery_mode(&mut lapic, LINT1, MODE_NMI);
    fd.set_lapic(&lapic).map_err(|error| vcpu_error(id, "local APIC", error))
}

fn set_delivery_mode(lapic: &mut kvm_lapic_state, register: usize, mode: u32) {
    const MODE_MASK: u32 = 0x700;
    let Some(bytes) = lapic.regs.get_mut(register..register + 4) else { return };
    let mut value = 0_u32;
    for (shift, byte) in (0..).step_by(8).zip(&*bytes) {
        value |= u32::from(byte.cast_unsigned()) << shift;
    }
    value = value & !MODE_MASK | mode << 8;
    for (to, from) in bytes.iter_mut().zip(value.to_le_bytes()) {
        *to = from.cast_signed();
    }
}

pub fn vcpu_error(id: usize, what: &'static str, error: errno::Error) -> BootError {
    BootError::Vcpu { id, what, source: kvm_error(error) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_tables_map_four_gib_one_to_one() {
        let memory = crate::memory::anonymous(2).unwrap();
        write_tables(&memory).unwrap();
        let read = |address: u64| memory.read_obj::<u64>(GuestAddress(address)).unwrap();
        let walk = |virt: u64| {
            let level3 = read(layout::PAGE_TABLES_START + (virt >> 39) * 8) & !0xfff;
            let level2 = read(level3 + (virt >> 30 & 511) * 8) & !0xfff;
            (read(level2 + (virt >> 21 & 511) * 8) & !0x1f_ffff) | virt & 0x1f_ffff
        };
        for virt in [0, 0x1234, 0x10_0000, 0x4000_0001, 0xc000_0000, 0xffff_ffff] {
            assert_eq!(walk(virt), virt);
        }
        let end = layout::PAGE_TABLES_START + (2 + DIRECTORIES) * PAGE;
        assert!(end <= layout::CMDLINE_START, "nothing else is overwritten");
        assert_eq!(read(end), 0);
    }

    #[test]
    fn a_delivery_mode_leaves_the_rest_of_the_register() {
        let mut lapic = kvm_lapic_state::default();
        lapic.regs[0x352] = 1;
        set_delivery_mode(&mut lapic, 0x350, 7);
        assert_eq!(lapic.regs[0x350..0x354], [0, 7, 1, 0]);
        set_delivery_mode(&mut lapic, 5000, 7);
    }
}
