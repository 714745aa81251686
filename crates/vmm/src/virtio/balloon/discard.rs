//! Giving guest RAM back to the host's kernel.
#![allow(unsafe_code, reason = "madvise on guest memory")]

use std::io;

use vm_memory::{GuestAddress, GuestMemory as _, Permissions};

use crate::memory::GuestMemory;

/// Drops the pages: anonymous ones read as zeros, those of a mapped snapshot read as they were in there.
pub fn discard_pages(memory: &GuestMemory, address: GuestAddress, bytes: u64) -> io::Result<()> {
    let bytes = usize::try_from(bytes).map_err(io::Error::other)?;
    let slices = memory.get_slices(address, bytes, Permissions::ReadWrite).map_err(io::Error::other)?;
    for slice in slices {
        let slice = slice.map_err(io::Error::other)?;
        let guard = slice.ptr_guard_mut();
        // SAFETY: the range is mapped guest memory, for as long as `memory` is borrowed. Nobody holds references
        // into it: it is only accessed through `vm-memory`, by copying, and by the guest itself.
        let result = unsafe { libc::madvise(guard.as_ptr().cast(), guard.len(), libc::MADV_DONTNEED) };
        if result != 0 {
            return Err(io::Error::last_os_error());
        }
    }
    Ok(())
}
