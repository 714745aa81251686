//! userfaultfd(2) as far as a pager needs it (Documentation/admin-guide/mm/userfaultfd.rst).
#![allow(unsafe_code, reason = "userfaultfd has no safe form")]

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};

const DEVICE: &str = "/dev/userfaultfd";
const API: u64 = 0xaa;
/// `USERFAULTFD_IOC_NEW` and `UFFDIO_*` of linux/userfaultfd.h.
const IOC_NEW: libc::c_ulong = 0xaa00;
const UFFDIO_API: libc::c_ulong = 0xc018_aa3f;
const UFFDIO_REGISTER: libc::c_ulong = 0xc020_aa00;
const UFFDIO_UNREGISTER: libc::c_ulong = 0x8010_aa01;
const UFFDIO_WAKE: libc::c_ulong = 0x8010_aa02;
const UFFDIO_COPY: libc::c_ulong = 0xc028_aa03;
const UFFDIO_ZEROPAGE: libc::c_ulong = 0xc020_aa04;
const MODE_MISSING: u64 = 1;
const EVENT_PAGEFAULT: u8 = 0x12;
const MESSAGE_BYTES: usize = 32;
const ADDRESS_AT: usize = 16;
/// Messages that are read at once.
const MESSAGES: usize = 16;
const PAGE: usize = 4096;

/// `struct uffdio_register`, and `uffdio_zeropage`; its first half is `uffdio_range`.
#[repr(C)]
struct Range {
    start: u64,
    len: u64,
    mode: u64,
    /// Set by the kernel.
    done: i64,
}

/// `struct uffdio_copy`.
#[repr(C)]
struct Copy {
    to: u64,
    from: u64,
    len: u64,
    mode: u64,
    done: i64,
}

/// Opens what makes userfaults, for the kernel's accesses, too, which KVM's are. Only a privileged process can.
pub fn open_device() -> io::Result<File> {
    File::options().read(true).write(true).open(DEVICE)
}

/// Faults of this process's memory, which a pager answers.
///
/// Never closed but by [`Userfault::close`]: a closed one lets whoever waits go on with a page of zeros.
#[derive(Debug)]
pub struct Userfault(std::mem::ManuallyDrop<OwnedFd>);

impl Userfault {
    /// Of the calling process.
    pub fn new(device: &File) -> io::Result<Self> {
        let flags = libc::O_CLOEXEC | libc::O_NONBLOCK;
        // SAFETY: takes a number.
        let fd = unsafe { libc::ioctl(device.as_raw_fd(), IOC_NEW, flags) };
        if fd < 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: the kernel made it just now, and nobody else has it.
        let fd = unsafe { OwnedFd::from_raw_fd(fd) };
        let userfault = Self(std::mem::ManuallyDrop::new(fd));
        let mut api = [API, 0, 0];
        // SAFETY: `struct uffdio_api`, three numbers, alive over the call.
        let done = unsafe { libc::ioctl(userfault.raw(), UFFDIO_API, api.as_mut_ptr()) };
        if done == 0 { Ok(userfault) } else { Err(io::Error::last_os_error()) }
    }

    fn raw(&self) -> i32 {
        self.0.as_raw_fd()
    }

    /// From now on whoever touches a page of the range that is not there waits for it.
    pub fn register(&self, start: usize, len: u64) -> io::Result<()> {
        let mut range = Range { start: start as u64, len, mode: MODE_MISSING, done: 0 };
        self.on_range(UFFDIO_REGISTER, &mut range)
    }

    pub fn unregister(&self, start: usize, len: u64) -> io::Result<()> {
        self.on_range(UFFDIO_UNREGISTER, &mut Range { start: start as u64, len, mode: 0, done: 0 })
    }

    /// Whoever waits in the range looks again.
    pub fn wake(&self, start: usize, len: usize) -> io::Result<()> {
        self.on_range(UFFDIO_WAKE, &mut Range { start: start as u64, len: len as u64, mode: 0, done: 0 })
    }

    fn on_range(&self, what: libc::c_ulong, range: &mut Range) -> io::Result<()> {
        // SAFETY: the kernel's structure, or a longer one that begins like it, alive over the call. What is done to the
        // mapping changes no content that was seen.
        let done = unsafe { libc::ioctl(self.raw(), what, std::ptr::from_mut(range)) };
        if done == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
    }

    /// Puts pages there; where there are some, those stay. Lengths are multiples of a page.
    pub fn copy(&self, to: usize, from: &[u8]) -> io::Result<()> {
        self.put(to, from.len(), |at, rest| {
            let from = from[from.len() - rest..].as_ptr() as u64;
            let mut copy = Copy { to: at as u64, from, len: rest as u64, mode: 0, done: 0 };
            // SAFETY: the kernel's structure, alive over the call, with a source of that length; pages are only put
            // where there is none.
            let failed = unsafe { libc::ioctl(self.raw(), UFFDIO_COPY, &raw mut copy) } != 0;
            (failed, copy.done)
        })
    }

    /// The same with pages of zeros.
    pub fn zero(&self, to: usize, len: usize) -> io::Result<()> {
        self.put(to, len, |at, rest| {
            let mut range = Range { start: at as u64, len: rest as u64, mode: 0, done: 0 };
            // SAFETY: as in `copy`.
            let failed = unsafe { libc::ioctl(self.raw(), UFFDIO_ZEROPAGE, &raw mut range) } != 0;
            (failed, range.done)
        })
    }

    /// `call`: for what is left, from which address on; whether it failed, and what the kernel says was done.
    fn put(&self, to: usize, len: usize, call: impl Fn(usize, usize) -> (bool, i64)) -> io::Result<()> {
        let mut done = 0;
        while done < len {
            let (failed, told) = call(to + done, len - done);
            let error = io::Error::last_os_error();
            match usize::try_from(told) {
                Ok(bytes) if bytes > 0 => done += bytes,
                _ if told == -i64::from(libc::EEXIST) => {
                    // It came there otherwise: whoever waits for it was told, or is told now.
                    self.wake(to + done, PAGE)?;
                    done += PAGE;
                }
                // The mapping is being changed by somebody: again.
                _ if told == -i64::from(libc::EAGAIN) => std::thread::yield_now(),
                _ if failed => return Err(error),
                _ => return Err(io::ErrorKind::WriteZero.into()),
            }
        }
        Ok(())
    }

    /// Addresses of pages that somebody waits for now; maybe none.
    pub fn faults(&self) -> io::Result<Vec<usize>> {
        let mut buffer = [0; MESSAGE_BYTES * MESSAGES];
        let got = match rustix::io::read(self, &mut buffer) {
            Ok(got) => got,
            Err(rustix::io::Errno::AGAIN | rustix::io::Errno::INTR) => 0,
            Err(error) => return Err(error.into()),
        };
        let messages = buffer[..got].as_chunks::<MESSAGE_BYTES>().0.iter();
        let faults = messages.filter(|message| message[0] == EVENT_PAGEFAULT).filter_map(|message| {
            let address = message[ADDRESS_AT..].first_chunk::<8>()?;
            usize::try_from(u64::from_ne_bytes(*address)).ok()
        });
        Ok(faults.collect())
    }

    /// When nothing is registered any more.
    pub fn close(self) {
        drop(std::mem::ManuallyDrop::into_inner(self.0));
    }
}

impl AsFd for Userfault {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}
