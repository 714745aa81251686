//! Loads a kernel: ELF vmlinux or bzImage, initramfs, command line, and the zero page that tells of them.
//!
//! Both kinds are entered in long mode (Linux' `boot.rst`, "64-bit boot protocol"). The initramfs lies at the end
//! of low memory, as far from the kernel as can be.

use std::fs::File;
use std::io::{Read, Seek, SeekFrom};

use kvm_bindings::CpuId;
use kvm_ioctls::VcpuFd;
use linux_loader::loader::bootparam::{boot_e820_entry, boot_params, setup_header};
use linux_loader::loader::{BzImage, Elf, KernelLoader};
use vm_memory::{Bytes, GuestAddress, GuestMemoryBackend, GuestMemoryRegion};

use super::{acpi, cpuid, layout, regs};
use crate::error::BootError;
use crate::memory::GuestMemory;

const E820_RAM: u32 = 1;
const E820_RESERVED: u32 = 2;
const PAGE: u64 = 0x1000;

/// What to boot.
#[derive(Debug)]
pub struct BootSource<'a> {
    pub kernel: &'a File,
    pub initramfs: Option<&'a File>,
    pub cmdline: &'a str,
    pub vcpus: usize,
    /// So many virtio slots are described, from the first on.
    pub virtio_slots: usize,
}

/// Fills guest memory with all that a boot needs; answers where vCPU 0 starts.
pub fn load(memory: &GuestMemory, source: &BootSource<'_>) -> Result<u64, BootError> {
    check_cmdline(source.cmdline)?;
    let kernel = load_kernel(memory, source.kernel)?;
    let initramfs = match source.initramfs {
        Some(file) => load_initramfs(memory, file, &kernel)?,
        None => (0, 0),
    };
    let mut cmdline = source.cmdline.as_bytes().to_vec();
    cmdline.push(0);
    write(memory, "the command line", layout::CMDLINE_START, &cmdline)?;
    let rsdp = acpi::write(memory, source.vcpus, source.virtio_slots)?;
    regs::write_tables(memory)?;
    write_zero_page(memory, &kernel, initramfs, rsdp)?;
    Ok(kernel.entry)
}

/// Prepares new vCPUs for a boot at `entry`: the first runs, the others wait for it to start them.
pub fn set_up_vcpus(fds: &[VcpuFd], cpuid: &CpuId, entry: u64) -> Result<(), BootError> {
    for (id, fd) in fds.iter().enumerate() {
        let own = cpuid::for_vcpu(cpuid, id, fds.len());
        fd.set_cpuid2(&own).map_err(|error| regs::vcpu_error(id, "CPUID", error))?;
        regs::set_boot_msrs(fd, id)?;
        regs::set_lints(fd, id)?;
        if id == 0 {
            regs::set_boot_registers(fd, entry)?;
        }
    }
    Ok(())
}

struct Kernel {
    entry: u64,
    /// First address behind all that it uses before it knows of the initramfs.
    end: u64,
    header: setup_header,
}

fn check_cmdline(cmdline: &str) -> Result<(), BootError> {
    let max = layout::CMDLINE_BYTES_MAX - 1;
    if cmdline.len() > max {
        return Err(BootError::CmdlineLength { given: cmdline.len(), max });
    }
    let printable = cmdline.bytes().all(|byte| (b' '..=b'~').contains(&byte));
    if printable { Ok(()) } else { Err(BootError::CmdlineCharacter) }
}

fn load_kernel(memory: &GuestMemory, file: &File) -> Result<Kernel, BootError> {
    let mut file = file.try_clone().map_err(BootError::ReadKernel)?;
    let mut magic = [0; 4];
    file.seek(SeekFrom::Start(0)).map_err(BootError::ReadKernel)?;
    file.read_exact(&mut magic).map_err(BootError::ReadKernel)?;
    if magic == *b"\x7fELF" { load_elf(memory, &mut file) } else { load_bzimage(memory, &mut file) }
}

fn load_elf(memory: &GuestMemory, file: &mut File) -> Result<Kernel, BootError> {
    let lowest = Some(GuestAddress(layout::HIGH_RAM_START));
    let loaded =
        Elf::load(memory, None, file, lowest).map_err(|error| BootError::LoadKernel(error.to_string()))?;
    let header = setup_header {
        boot_flag: 0xaa55,
        header: u32::from_le_bytes(*b"HdrS"),
        version: 0x20f,
        kernel_alignment: 0x100_0000,
        initrd_addr_max: 0x7fff_ffff,
        cmdline_size: u32::try_from(layout::CMDLINE_BYTES_MAX - 1).unwrap_or(0),
        ..Default::default()
    };
    Ok(Kernel { entry: loaded.kernel_load.0, end: loaded.kernel_end, header })
}

fn load_bzimage(memory: &GuestMemory, file: &mut File) -> Result<Kernel, BootError> {
    /// The header's `xloadflags`: there is a 64-bit entry, and it lies so far behind the start.
    const HAS_64_BIT_ENTRY: u16 = 1;
    const ENTRY_64_OFFSET: u64 = 0x200;
    let high = GuestAddress(layout::HIGH_RAM_START);
    let loaded = BzImage::load(memory, Some(high), file, Some(high)).map_err(|error| match error {
        linux_loader::loader::Error::Bzimage(linux_loader::loader::bzimage::Error::InvalidBzImage) => {
            BootError::KernelFormat
        }
        other => BootError::LoadKernel(other.to_string()),
    })?;
    let header = loaded.setup_header.ok_or(BootError::KernelFormat)?;
    let [minor, major] = header.version.to_le_bytes();
    if (major, minor) < (2, 12) || header.xloadflags & HAS_64_BIT_ENTRY == 0 {
        return Err(BootError::Kernel32 { major, minor });
    }
    // It unpacks itself to the preferred address and works there until it has its own map.
    let unpacked = header.pref_address.saturating_add(header.init_size.into());
    let entry = loaded.kernel_load.0 + ENTRY_64_OFFSET;
    Ok(Kernel { entry, end: loaded.kernel_end.max(unpacked), header })
}

/// Answers address and size.
fn load_initramfs(memory: &GuestMemory, file: &File, kernel: &Kernel) -> Result<(u32, u32), BootError> {
    let mut file = file.try_clone().map_err(BootError::ReadInitramfs)?;
    let bytes = file.seek(SeekFrom::End(0)).map_err(BootError::ReadInitramfs)?;
    file.seek(SeekFrom::Start(0)).map_err(BootError::ReadInitramfs)?;
    let no_room = BootError::NoRoom { kernel: kernel.end, initramfs: bytes };
    let Some(start) = initramfs_start(low_end(memory), kernel, bytes) else {
        return Err(no_room);
    };
    let (Ok(address), Ok(size)) = (u32::try_from(start), u32::try_from(bytes)) else {
        return Err(no_room);
    };
    memory
        .read_exact_volatile_from(GuestAddress(start), &mut file, size as usize)
        .map_err(|error| BootError::ReadInitramfs(std::io::Error::other(error)))?;
    Ok((address, size))
}

/// The highest page boundary from which `bytes` fit below all limits, and above the kernel.
fn initramfs_start(low_end: u64, kernel: &Kernel, bytes: u64) -> Option<u64> {
    let limit = u64::from(kernel.header.initrd_addr_max).saturating_add(1).min(low_end);
    let start = limit.checked_sub(bytes)? / PAGE * PAGE;
    (start >= kernel.end).then_some(start)
}

/// End of the RAM below the hole.
fn low_end(memory: &GuestMemory) -> u64 {
    memory.iter().next().map_or(0, |region| region.start_addr().0 + region.len())
}

fn write_zero_page(
    memory: &GuestMemory,
    kernel: &Kernel,
    initramfs: (u32, u32),
    rsdp: u64,
) -> Result<(), BootError> {
    const LOADER_UNDEFINED: u8 = 0xff;
    let address = layout::ZERO_PAGE_START;
    let failed = || BootError::Write { what: "the zero page", address };
    let mut params = boot_params { hdr: kernel.header, acpi_rsdp_addr: rsdp, ..Default::default() };
    params.hdr.type_of_loader = LOADER_UNDEFINED;
    params.hdr.cmd_line_ptr = u32::try_from(layout::CMDLINE_START).map_err(|_| failed())?;
    (params.hdr.ramdisk_image, params.hdr.ramdisk_size) = initramfs;
    let map = memory_map(memory);
    params.e820_entries = u8::try_from(map.len()).map_err(|_| failed())?;
    for (entry, (addr, size, kind)) in params.e820_table.iter_mut().zip(map) {
        *entry = boot_e820_entry { addr, size, r#type: kind };
    }
    memory.write_obj(params, GuestAddress(address)).map_err(|_| failed())
}

/// Start, size and type of each range, as the e820 map has them.
fn memory_map(memory: &GuestMemory) -> Vec<(u64, u64, u32)> {
    let low_ram = layout::LOW_RAM_END;
    let high_start = layout::HIGH_RAM_START;
    let mut map = vec![
        (0, low_ram, E820_RAM),
        // ACPI tables, and what a PC has there.
        (low_ram, high_start - low_ram, E820_RESERVED),
        (high_start, low_end(memory).saturating_sub(high_start), E820_RAM),
    ];
    let above = memory.iter().skip(1).map(|region| (region.start_addr().0, region.len(), E820_RAM));
    map.extend(above);
    map
}

fn write(memory: &GuestMemory, what: &'static str, address: u64, bytes: &[u8]) -> Result<(), BootError> {
    memory.write_slice(bytes, GuestAddress(address)).map_err(|_| BootError::Write { what, address })
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use proptest::prelude::*;

    use super::*;
    use crate::memory::anonymous;

    fn file(bytes: &[u8]) -> File {
        let mut file = tempfile::tempfile().unwrap();
        file.write_all(bytes).unwrap();
        file
    }

    fn source<'a>(kernel: &'a File, initramfs: Option<&'a File>, cmdline: &'a str) -> BootSource<'a> {
        BootSource { kernel, initramfs, cmdline, vcpus: 1, virtio_slots: 1 }
    }

    /// An ELF file with one segment of 8 bytes at 1 MiB, which takes `memory_bytes`.
    fn elf(address: u64, memory_bytes: u64) -> Vec<u8> {
        let mut bytes = b"\x7fELF\x02\x01\x01\0\0\0\0\0\0\0\0\0\x02\0\x3e\0\x01\0\0\0".to_vec();
        bytes.extend(address.to_le_bytes());
        bytes.extend(64_u64.to_le_bytes());
        bytes.extend([0; 12]);
        for half in [64_u16, 56, 1, 64, 0, 0] {
            bytes.extend(half.to_le_bytes());
        }
        bytes.extend([1, 0, 0, 0, 7, 0, 0, 0]);
        for word in [120, address, address, 8, memory_bytes, 0x1000_u64] {
            bytes.extend(word.to_le_bytes());
        }
        bytes.extend(b"kernel!!");
        bytes
    }

    #[test]
    fn an_elf_kernel_and_its_initramfs_are_loaded() {
        let memory = anonymous(4).unwrap();
        let (kernel, initramfs) = (file(&elf(0x10_0000, 4096)), file(&[7; 5000]));
        let entry = load(&memory, &source(&kernel, Some(&initramfs), "quiet")).unwrap();
        assert_eq!(entry, 0x10_0000);
        assert_eq!(memory.read_obj::<[u8; 8]>(GuestAddress(entry)).unwrap(), *b"kernel!!");
        let params: boot_params = memory.read_obj(GuestAddress(layout::ZERO_PAGE_START)).unwrap();
        let (image, size) = (params.hdr.ramdisk_image, params.hdr.ramdisk_size);
        assert_eq!((image, size), ((4 << 20) - 0x2000, 5000));
        assert_eq!(memory.read_obj::<u8>(GuestAddress(u64::from(image) + 4999)).unwrap(), 7);
        let cmdline = params.hdr.cmd_line_ptr;
        assert_eq!(memory.read_obj::<[u8; 6]>(GuestAddress(cmdline.into())).unwrap(), *b"quiet\0");
        assert_eq!(params.e820_entries, 3);
    }

    #[test]
    fn what_cannot_be_booted_is_named() {
        let memory = anonymous(4).unwrap();
        let check = |kernel: &[u8], initramfs: Option<&File>, cmdline: &str| {
            load(&memory, &source(&file(kernel), initramfs, cmdline)).unwrap_err()
        };
        assert!(matches!(check(b"", None, ""), BootError::ReadKernel(_)));
        assert!(matches!(check(&[0; 4096], None, ""), BootError::KernelFormat));
        let good = elf(0x10_0000, 4096);
        assert!(matches!(check(&good, None, "a\nb"), BootError::CmdlineCharacter));
        assert!(matches!(check(&good, None, &"x".repeat(4096)), BootError::CmdlineLength { .. }));
        assert!(matches!(check(&elf(0x1000, 4096), None, ""), BootError::LoadKernel(_)), "below 1 MiB");
        assert!(matches!(check(&elf(0x40_0000, 4096), None, ""), BootError::LoadKernel(_)), "no such RAM");
        let large = file(&vec![0; 4 << 20]);
        assert!(matches!(check(&good, Some(&large), ""), BootError::NoRoom { .. }));
    }

    proptest! {
        #[test]
        fn the_memory_map_has_all_ram_and_no_device(mib in 2_u64..10_000) {
            let memory = anonymous(mib).unwrap();
            let map = memory_map(&memory);
            prop_assert_eq!(map.iter().map(|(_, bytes, _)| bytes).sum::<u64>(), mib << 20);
            let mut free = 0;
            for (start, bytes, kind) in map {
                prop_assert!(start >= free);
                free = start + bytes;
                prop_assert!(free <= layout::HOLE_START || start >= layout::HOLE_END);
                let legacy = start < layout::HIGH_RAM_START && free > layout::LOW_RAM_END;
                prop_assert_eq!(kind, if legacy { E820_RESERVED } else { E820_RAM });
            }
        }

        #[test]
        fn an_initramfs_lies_between_kernel_and_every_limit(
            low_end in 1_u64..1 << 33, kernel_end in 0_u64..1 << 33, bytes in 0_u64..1 << 33, max in any::<u32>(),
        ) {
            let header = setup_header { initrd_addr_max: max, ..Default::default() };
            let kernel = Kernel { entry: 0, end: kernel_end, header };
            if let Some(start) = initramfs_start(low_end, &kernel, bytes) {
                prop_assert!(start >= kernel_end && start % PAGE == 0);
                prop_assert!(start + bytes <= low_end && start + bytes <= u64::from(max) + 1);
            }
        }
    }
}
