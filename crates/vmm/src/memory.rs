//! Guest memory: how it is laid out, and where it comes from.
//!
//! A guest's RAM is private memory of the monitor: that is what makes `fork(2)` the snapshot. It is mapped once and
//! stays mapped for the life of the process, at the same address in every forked child. Regions start on 2 MiB
//! boundaries, in the host and in the guest alike, so that the kernel can use huge pages: the page tables are what
//! a fork copies.
#![allow(unsafe_code, reason = "mapping memory for a guest has no safe form")]

use std::io;
use std::ptr;

use vm_memory::mmap::MmapRegionBuilder;
use vm_memory::{GuestAddress, GuestRegionMmap};

use crate::arch::x86_64::layout::{HOLE_END, HOLE_START};
use crate::error::MemoryError;

/// All of a guest's RAM: one or two regions, below and above the hole for devices.
pub type GuestMemory = vm_memory::GuestMemoryMmap<()>;

pub const MEMORY_MIB_MIN: u64 = 2;
pub const MEMORY_MIB_MAX: u64 = 64 << 10;
/// Size and alignment of a huge page.
pub const HUGE_PAGE_BYTES: usize = 2 << 20;

const PROT: i32 = libc::PROT_READ | libc::PROT_WRITE;
const FLAGS: i32 = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;

/// A part of guest memory that is mapped already.
#[derive(Debug, Clone, Copy)]
pub struct Mapping {
    pub guest_base: u64,
    /// Start of the mapping in this process.
    pub address: *mut u8,
    pub bytes: usize,
}

/// Guest address and size in bytes of each region of a guest with `mib` MiB.
pub fn regions(mib: u64) -> Result<Vec<(u64, usize)>, MemoryError> {
    let bytes = (MEMORY_MIB_MIN..=MEMORY_MIB_MAX)
        .contains(&mib)
        .then_some(mib << 20)
        .ok_or(MemoryError::Size { mib, min: MEMORY_MIB_MIN, max: MEMORY_MIB_MAX })?;
    let below = bytes.min(HOLE_START);
    let parts = [(0, below), (HOLE_END, bytes - below)];
    parts
        .into_iter()
        .filter(|(_, bytes)| *bytes > 0)
        .map(|(base, bytes)| {
            let bytes = usize::try_from(bytes).map_err(|_| MemoryError::Size {
                mib,
                min: MEMORY_MIB_MIN,
                max: MEMORY_MIB_MAX,
            })?;
            Ok((base, bytes))
        })
        .collect()
}

/// New, zeroed memory for a guest with `mib` MiB, in huge pages where the host allows it.
pub fn anonymous(mib: u64) -> Result<GuestMemory, MemoryError> {
    let mappings: Vec<Mapping> = regions(mib)?
        .into_iter()
        .map(|(guest_base, bytes)| Ok(Mapping { guest_base, address: map_anonymous(bytes)?, bytes }))
        .collect::<Result<_, MemoryError>>()?;
    // SAFETY: each was mapped just now, readable and writable, and nothing ever unmaps it.
    unsafe { from_mappings(&mappings) }
}

/// Memory that the caller has mapped, for example from the layers of a snapshot.
///
/// # Safety
/// Each mapping must be valid, readable and writable, used by nothing else, and stay so until the process ends.
pub unsafe fn from_mappings(mappings: &[Mapping]) -> Result<GuestMemory, MemoryError> {
    let region = |mapping: &Mapping| {
        let invalid = |why: String| MemoryError::Mapping { base: mapping.guest_base, why };
        let builder = MmapRegionBuilder::new(mapping.bytes).with_mmap_prot(PROT).with_mmap_flags(FLAGS);
        // SAFETY: the caller promises that the mapping is valid for as long as the process lives.
        let builder = unsafe { builder.with_raw_mmap_pointer(mapping.address) };
        let mapped = builder.build().map_err(|error| invalid(error.to_string()))?;
        GuestRegionMmap::new(mapped, GuestAddress(mapping.guest_base))
            .ok_or_else(|| invalid("it ends beyond the last address".into()))
    };
    let regions = mappings.iter().map(region).collect::<Result<_, _>>()?;
    GuestMemory::from_regions(regions).map_err(|error| MemoryError::Mapping {
        base: mappings.first().map_or(0, |mapping| mapping.guest_base),
        why: error.to_string(),
    })
}

/// `bytes` of zeroed private memory on a huge page's boundary, mapped for good.
pub fn map_anonymous(bytes: usize) -> Result<*mut u8, MemoryError> {
    let failed = |source: io::Error| MemoryError::Map { bytes, source };
    let overflow = || failed(io::ErrorKind::OutOfMemory.into());
    let reserved = bytes.checked_add(HUGE_PAGE_BYTES).ok_or_else(overflow)?;
    // SAFETY: a new mapping at an address that the kernel chooses touches nothing that exists.
    let start = unsafe { libc::mmap(ptr::null_mut(), reserved, PROT, FLAGS, -1, 0) };
    if start == libc::MAP_FAILED {
        return Err(failed(io::Error::last_os_error()));
    }
    let skip = start.align_offset(HUGE_PAGE_BYTES).min(HUGE_PAGE_BYTES);
    let aligned = start.cast::<u8>().wrapping_add(skip);
    // Of the reserve on both sides nothing is ever touched: it costs address space only. The advice may be refused
    // (no huge pages in this kernel, or forbidden): then the guest runs on small ones.
    // SAFETY: the range lies within the mapping made above; advice changes no content.
    let _ = unsafe { libc::madvise(aligned.cast(), bytes, libc::MADV_HUGEPAGE) };
    // A core dump of the monitor must not hold the guest's secrets.
    // SAFETY: as above.
    let _ = unsafe { libc::madvise(aligned.cast(), bytes, libc::MADV_DONTDUMP) };
    Ok(aligned)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use vm_memory::{Bytes, GuestMemoryBackend};

    use super::*;

    #[test]
    fn sizes_out_of_bounds_are_refused() {
        for mib in [0, 1, MEMORY_MIB_MAX + 1, u64::MAX] {
            assert!(matches!(regions(mib), Err(MemoryError::Size { .. })), "{mib}");
        }
        assert_eq!(regions(256).unwrap(), [(0, 256 << 20)]);
        assert_eq!(regions(3072).unwrap(), [(0, 3 << 30)]);
        assert_eq!(regions(4096).unwrap(), [(0, 3 << 30), (4 << 30, 1 << 30)]);
    }

    #[test]
    fn memory_is_zeroed_aligned_and_can_be_written() {
        let memory = anonymous(8).unwrap();
        let region = memory.iter().next().unwrap();
        assert_eq!(region.as_ptr() as usize % HUGE_PAGE_BYTES, 0);
        assert_eq!(memory.read_obj::<u64>(GuestAddress((8 << 20) - 8)).unwrap(), 0);
        assert!(memory.write_obj(7_u64, GuestAddress((8 << 20) - 7)).is_err(), "over the end");
        memory.write_obj(7_u64, GuestAddress((8 << 20) - 8)).unwrap();
        let again = Mapping { guest_base: 0, address: region.as_ptr(), bytes: 8 << 20 };
        // SAFETY: the mapping of `memory` stays until the process ends.
        let again = unsafe { from_mappings(&[again]) }.unwrap();
        assert_eq!(again.read_obj::<u64>(GuestAddress((8 << 20) - 8)).unwrap(), 7);
    }

    proptest! {
        #[test]
        fn regions_keep_the_hole_free_and_add_up(mib in MEMORY_MIB_MIN..=MEMORY_MIB_MAX) {
            let regions = regions(mib).unwrap();
            prop_assert_eq!(regions.iter().map(|(_, bytes)| *bytes as u64).sum::<u64>(), mib << 20);
            let mut free = 0;
            for (base, bytes) in regions {
                prop_assert!(base >= free, "in order and disjoint");
                free = base + bytes as u64;
                prop_assert!(free <= HOLE_START || base >= HOLE_END);
                prop_assert_eq!(base % HUGE_PAGE_BYTES as u64, 0);
            }
        }
    }
}
