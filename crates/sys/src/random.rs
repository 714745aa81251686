//! The kernel's random source: bytes given to it, and a reseed from them.

use std::io;
use std::os::fd::{AsFd, AsRawFd};

/// random(4): `struct rand_pool_info` followed by its bytes.
#[repr(C)]
struct Pool {
    entropy_bits: libc::c_int,
    size_bytes: libc::c_int,
    bytes: [u8; ENTROPY_BYTES],
}

/// How many bytes one call gives.
pub const ENTROPY_BYTES: usize = 64;
// _IOW('R', 0x03, int[2]) and _IO('R', 0x07) of linux/random.h.
const RNDADDENTROPY: libc::c_ulong = 0x4008_5203;
const RNDRESEEDCRNG: libc::c_ulong = 0x5207;

/// Credits `bytes` to the kernel's random source and reseeds from it, so that the next random number
/// depends on them. Needs CAP_SYS_ADMIN; kernels without these calls answer ENOTTY.
pub fn reseed(bytes: &[u8; ENTROPY_BYTES]) -> io::Result<()> {
    let device = std::fs::OpenOptions::new().write(true).open("/dev/urandom")?;
    let bits_and_bytes = libc::c_int::try_from(ENTROPY_BYTES).unwrap_or(0);
    let pool = Pool { entropy_bits: bits_and_bytes * 8, size_bytes: bits_and_bytes, bytes: *bytes };
    let fd = device.as_fd().as_raw_fd();
    // SAFETY: the descriptor is open and the structure has the size that its second field says.
    let added = unsafe { libc::ioctl(fd, RNDADDENTROPY, &raw const pool) };
    if added < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the call takes no argument.
    let reseeded = unsafe { libc::ioctl(fd, RNDRESEEDCRNG) };
    if reseeded < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}
