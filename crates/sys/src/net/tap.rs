//! Tap devices and namespaces of a thread.

use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};

use super::interface::named;

const DEVICE: &str = "/dev/net/tun";

/// A tap with virtio headers in the calling thread's namespace; it goes with its last descriptor.
pub fn open(name: &str) -> io::Result<OwnedFd> {
    let tap = File::options().read(true).write(true).open(DEVICE)?;
    let mut request = named(name);
    let flags = libc::IFF_TAP | libc::IFF_NO_PI | libc::IFF_VNET_HDR;
    request.ifr_ifru.ifru_flags = libc::c_short::try_from(flags).map_err(io::Error::other)?;
    // SAFETY: `TUNSETIFF` reads and writes a whole `ifreq`, which `request` is.
    let done = unsafe { libc::ioctl(tap.as_raw_fd(), libc::TUNSETIFF, &raw mut request) };
    if done < 0 { Err(io::Error::last_os_error()) } else { Ok(tap.into()) }
}

/// The calling thread goes into a network namespace that is new.
pub fn leave_namespace() -> io::Result<()> {
    // SAFETY: takes flags only; nothing of this process relies on its threads sharing a network namespace.
    if unsafe { libc::unshare(libc::CLONE_NEWNET) } < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}
