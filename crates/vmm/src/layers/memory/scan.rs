//! Which pages of a private mapping are this process's own.

use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;
use std::sync::atomic::{AtomicBool, Ordering};

use crate::layers::PAGE_BYTES;

/// `struct page_region` of linux/fs.h.
#[repr(C)]
#[derive(Clone, Copy, Default)]
struct PageRegion {
    start: u64,
    end: u64,
    categories: u64,
}

/// `struct pm_scan_arg` of linux/fs.h.
#[repr(C)]
struct ScanArg {
    size: u64,
    flags: u64,
    start: u64,
    end: u64,
    walk_end: u64,
    vec: u64,
    vec_len: u64,
    max_pages: u64,
    category_inverted: u64,
    category_mask: u64,
    category_anyof_mask: u64,
    return_mask: u64,
}

/// `_IOWR('f', 16, struct pm_scan_arg)`: Documentation/admin-guide/mm/pagemap.rst, Linux 6.7.
const PAGEMAP_SCAN: libc::c_ulong = 0xc060_6610;
const IS_FILE: u64 = 1 << 2;
const IS_PRESENT: u64 = 1 << 3;
const IS_SWAPPED: u64 = 1 << 4;
const IS_PFNZERO: u64 = 1 << 5;
const REGIONS: usize = 512;

/// Bits of an entry of `/proc/self/pagemap`, and the entries read at once.
const ENTRY_PRESENT: u64 = 1 << 63;
const ENTRY_SWAPPED: u64 = 1 << 62;
const ENTRY_FILE: u64 = 1 << 61;
const ENTRIES: usize = 8192;

static NO_SCAN: AtomicBool = AtomicBool::new(false);

/// Ranges of bytes, relative to `start`, that are anonymous and there. The page of zeros may be among them.
pub fn anonymous(start: usize, bytes: u64) -> io::Result<Vec<Range<u64>>> {
    let pagemap = File::open("/proc/self/pagemap")?;
    if !NO_SCAN.load(Ordering::Relaxed) {
        match by_scan(&pagemap, start as u64, bytes) {
            Err(error) if matches!(error.raw_os_error(), Some(libc::ENOTTY | libc::EINVAL)) => {
                NO_SCAN.store(true, Ordering::Relaxed);
            }
            other => return other,
        }
    }
    by_entries(&pagemap, start as u64, bytes)
}

pub(super) fn by_scan(pagemap: &File, start: u64, bytes: u64) -> io::Result<Vec<Range<u64>>> {
    let mut found = Vec::new();
    let mut regions = vec![PageRegion::default(); REGIONS];
    let end = start + bytes;
    let mut at = start;
    while at < end {
        let mut arg = ScanArg {
            size: size_of::<ScanArg>() as u64,
            flags: 0,
            start: at,
            end,
            walk_end: 0,
            vec: regions.as_mut_ptr() as u64,
            vec_len: REGIONS as u64,
            max_pages: 0,
            category_inverted: IS_FILE | IS_PFNZERO,
            category_mask: IS_FILE | IS_PFNZERO,
            category_anyof_mask: IS_PRESENT | IS_SWAPPED,
            return_mask: IS_PRESENT,
        };
        // SAFETY: the argument is the kernel's structure with its size told; the vector it points to has room
        // for `vec_len` regions, and both live over the call.
        let filled = unsafe { libc::ioctl(pagemap.as_raw_fd(), PAGEMAP_SCAN, &raw mut arg) };
        let filled = usize::try_from(filled).map_err(|_| io::Error::last_os_error())?;
        let regions = regions.iter().take(filled);
        found.extend(regions.map(|region| region.start - start..region.end - start));
        if arg.walk_end <= at {
            break;
        }
        at = arg.walk_end;
    }
    Ok(found)
}

pub(super) fn by_entries(pagemap: &File, start: u64, bytes: u64) -> io::Result<Vec<Range<u64>>> {
    let mut found: Vec<Range<u64>> = Vec::new();
    let mut buffer = vec![0; ENTRIES * 8];
    let pages = bytes.div_ceil(PAGE_BYTES);
    let mut page = 0;
    while page < pages {
        let count = usize::try_from(pages - page).unwrap_or(ENTRIES).min(ENTRIES);
        let part = &mut buffer[..count * 8];
        pagemap.read_exact_at(part, (start / PAGE_BYTES + page) * 8)?;
        for entry in part.as_chunks::<8>().0 {
            let entry = u64::from_ne_bytes(*entry);
            let there = entry & (ENTRY_PRESENT | ENTRY_SWAPPED) != 0;
            // A page in swap is anonymous whatever the third bit says: private file pages are not swapped.
            if there && (entry & ENTRY_FILE == 0 || entry & ENTRY_SWAPPED != 0) {
                let at = page * PAGE_BYTES;
                match found.last_mut() {
                    Some(last) if last.end == at => last.end += PAGE_BYTES,
                    _ => found.push(at..at + PAGE_BYTES),
                }
            }
            page += 1;
        }
    }
    Ok(found)
}
