//! What a tap device is told and asked (`drivers/net/tun.c`).
#![allow(unsafe_code, reason = "ioctls of the tap device")]

use std::io;
use std::os::fd::{AsFd, AsRawFd};

use super::HEADER_BYTES;

/// What the tap may leave to the guest, as in `TUNSETOFFLOAD`.
pub const OFFLOAD_CSUM: u32 = libc::TUN_F_CSUM;
pub const OFFLOAD_TSO4: u32 = libc::TUN_F_TSO4;
pub const OFFLOAD_TSO6: u32 = libc::TUN_F_TSO6;

/// Whether each frame has a virtio header before it: the tap was opened with `IFF_VNET_HDR`.
///
/// If so, the header gets the size that virtio 1.x wants.
pub fn has_headers(tap: impl AsFd) -> io::Result<bool> {
    // SAFETY: all zeros is a valid `ifreq`: plain integers and addresses.
    let mut request: libc::ifreq = unsafe { std::mem::zeroed() };
    let fd = tap.as_fd().as_raw_fd();
    // SAFETY: `TUNGETIFF` writes an `ifreq`, which `request` is, and fails on what is no tap.
    if unsafe { libc::ioctl(fd, libc::TUNGETIFF, &raw mut request) } != 0 {
        let error = io::Error::last_os_error();
        // No tap at all: a packet socket, in tests.
        return if error.raw_os_error() == Some(libc::ENOTTY) { Ok(false) } else { Err(error) };
    }
    // SAFETY: `TUNGETIFF` fills the flags.
    let flags = unsafe { request.ifr_ifru.ifru_flags };
    if i32::from(flags) & libc::IFF_VNET_HDR == 0 {
        return Ok(false);
    }
    let bytes = libc::c_int::try_from(HEADER_BYTES).map_err(io::Error::other)?;
    // SAFETY: `TUNSETVNETHDRSZ` reads one `int`, which `bytes` is.
    if unsafe { libc::ioctl(fd, libc::TUNSETVNETHDRSZ, &raw const bytes) } != 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(true)
}

/// Says what the guest can take.
pub fn set_offloads(tap: impl AsFd, offloads: u32) -> io::Result<()> {
    // SAFETY: `TUNSETOFFLOAD` takes its argument by value and touches no memory of ours.
    if unsafe { libc::ioctl(tap.as_fd().as_raw_fd(), libc::TUNSETOFFLOAD, libc::c_ulong::from(offloads)) }
        != 0
    {
        return Err(io::Error::last_os_error());
    }
    Ok(())
}
