//! Readiness of a device's host side, edge-triggered: one descriptor for the device thread to watch.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::event::{Timespec, epoll};

/// Events taken at once.
pub const EVENTS_MAX: usize = 64;

/// Which descriptor became ready, and how. Only changes are told: use a descriptor until it would block.
#[derive(Debug, Clone, Copy)]
pub struct Ready {
    pub token: u64,
    pub readable: bool,
    pub writable: bool,
    /// Both directions are closed, or the descriptor is broken.
    pub gone: bool,
}

pub struct Poller {
    epoll: OwnedFd,
}

impl Poller {
    pub fn new() -> io::Result<Self> {
        Ok(Self { epoll: epoll::create(epoll::CreateFlags::CLOEXEC)? })
    }

    pub fn fd(&self) -> BorrowedFd<'_> {
        self.epoll.as_fd()
    }

    /// Tells of `fd` from now on, and at once if it is ready.
    pub fn add(&self, fd: impl AsFd, token: u64) -> io::Result<()> {
        Ok(epoll::add(&self.epoll, fd, epoll::EventData::new_u64(token), Self::flags())?)
    }

    /// Tells of `fd` under another token, and at once if it is ready.
    pub fn rename(&self, fd: impl AsFd, token: u64) -> io::Result<()> {
        Ok(epoll::modify(&self.epoll, fd, epoll::EventData::new_u64(token), Self::flags())?)
    }

    pub fn remove(&self, fd: impl AsFd) {
        // Fails if it is not in there: then there is nothing to do.
        let _ = epoll::delete(&self.epoll, fd);
    }

    fn flags() -> epoll::EventFlags {
        epoll::EventFlags::IN | epoll::EventFlags::OUT | epoll::EventFlags::ET
    }

    /// What happened since the last call, at most `EVENTS_MAX` of it; never waits.
    pub fn take(&self) -> Vec<Ready> {
        let mut events = Vec::with_capacity(EVENTS_MAX);
        let now = Timespec { tv_sec: 0, tv_nsec: 0 };
        // Only fails by an interruption: what is ready stays so.
        let _ = epoll::wait(&self.epoll, rustix::buffer::spare_capacity(&mut events), Some(&now));
        let ready = |event: &epoll::Event| {
            // Copied: the kernel's struct is packed.
            let flags = event.flags;
            let gone = flags.intersects(epoll::EventFlags::HUP | epoll::EventFlags::ERR);
            Ready {
                token: event.data.u64(),
                readable: gone || flags.contains(epoll::EventFlags::IN),
                writable: gone || flags.contains(epoll::EventFlags::OUT),
                gone,
            }
        };
        events.iter().map(ready).collect()
    }
}
