//! What the first process of a virtual machine asks its kernel for.

use std::io;
use std::mem::size_of;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};

/// The host, as every guest calls it (vsock(7)).
pub const CID_HOST: u32 = 2;

/// A stream to `port` of `cid` (vsock(7)). Blocking; the kernel gives up after two seconds.
pub fn connect_vsock(cid: u32, port: u32) -> io::Result<OwnedFd> {
    let socket = socket(libc::AF_VSOCK, libc::SOCK_STREAM)?;
    // SAFETY: all-zero bytes are a valid value of this plain structure.
    let mut address: libc::sockaddr_vm = unsafe { std::mem::zeroed() };
    address.svm_family = libc::sa_family_t::try_from(libc::AF_VSOCK).unwrap_or_default();
    address.svm_cid = cid;
    address.svm_port = port;
    let length = libc::socklen_t::try_from(size_of::<libc::sockaddr_vm>()).unwrap_or_default();
    // SAFETY: the address is a whole structure of the length that is given.
    let done = unsafe { libc::connect(socket.as_raw_fd(), (&raw const address).cast(), length) };
    if done < 0 { Err(io::Error::last_os_error()) } else { Ok(socket) }
}

/// Sets the loopback interface up (netdevice(7)); its addresses come by themselves.
pub fn set_loopback_up() -> io::Result<()> {
    let socket = socket(libc::AF_INET, libc::SOCK_DGRAM)?;
    // SAFETY: all-zero bytes are a valid value of this plain structure.
    let mut request: libc::ifreq = unsafe { std::mem::zeroed() };
    for (to, from) in request.ifr_name.iter_mut().zip(b"lo") {
        *to = libc::c_char::from_ne_bytes([*from]);
    }
    request.ifr_ifru.ifru_flags =
        libc::c_short::try_from(libc::IFF_UP | libc::IFF_RUNNING).unwrap_or_default();
    // SAFETY: the request is a whole `struct ifreq`, which this call reads.
    let done = unsafe { libc::ioctl(socket.as_raw_fd(), libc::SIOCSIFFLAGS, &raw const request) };
    if done < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

fn socket(family: libc::c_int, kind: libc::c_int) -> io::Result<OwnedFd> {
    // SAFETY: the call takes no pointer.
    let fd = unsafe { libc::socket(family, kind | libc::SOCK_CLOEXEC, 0) };
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the descriptor was just made and belongs to nobody else.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_port_that_nobody_serves_is_an_error() {
        assert!(connect_vsock(CID_HOST, 1).is_err());
    }
}
