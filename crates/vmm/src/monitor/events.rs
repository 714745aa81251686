//! What the device thread waits for.
//!
//! Two epoll instances: the outer one always; the inner one, of devices, hangs in the outer one only while the
//! guest runs. So a paused guest's devices take nothing from their host side.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::event::Timespec;
use rustix::event::epoll::{self, CreateFlags, EventData, EventFlags};

/// What became readable.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Token {
    Listener,
    /// The guest ended.
    Ending,
    /// Look into the devices.
    Devices,
    /// A connection.
    Peer(u32),
    /// The report of a fork's child.
    Child {
        fork: u32,
        number: u16,
    },
    /// The report of a process that was forked off.
    Report(u32),
    /// The end of a process that was forked off.
    Ended(u32),
    /// All of a lazily restored guest's memory is there.
    Filled,
    Queue {
        slot: u16,
        queue: u16,
    },
    Backend {
        slot: u16,
    },
}

impl Token {
    fn pack(self) -> u64 {
        let numbered = |kind: u64, number: u32| kind << 32 | u64::from(number);
        match self {
            Self::Listener => numbered(0, 0),
            Self::Ending => numbered(1, 0),
            Self::Devices => numbered(2, 0),
            Self::Peer(id) => numbered(3, id),
            Self::Report(id) => numbered(4, id),
            Self::Ended(id) => numbered(5, id),
            Self::Queue { slot, queue } => numbered(6, u32::from(slot) << 16 | u32::from(queue)),
            Self::Backend { slot } => numbered(7, slot.into()),
            Self::Filled => numbered(9, 0),
            // The kind is in the lowest bits of the upper half.
            Self::Child { fork, number } => numbered(u64::from(number) << 4 | 8, fork),
        }
    }

    fn unpack(packed: u64) -> Option<Self> {
        let number = u32::try_from(packed & u64::from(u32::MAX)).ok()?;
        let low = u16::try_from(number & 0xffff).ok()?;
        let high = u16::try_from(number >> 16).ok()?;
        let upper = u16::try_from(packed >> 36).ok()?;
        let plain = upper == 0;
        match (packed >> 32) & 0xf {
            8 => Some(Self::Child { fork: number, number: upper }),
            _ if !plain => None,
            0 => Some(Self::Listener),
            1 => Some(Self::Ending),
            2 => Some(Self::Devices),
            3 => Some(Self::Peer(number)),
            4 => Some(Self::Report(number)),
            5 => Some(Self::Ended(number)),
            6 => Some(Self::Queue { slot: high, queue: low }),
            9 => Some(Self::Filled),
            7 => Some(Self::Backend { slot: low }),
            _ => None,
        }
    }
}

/// Events handled before the outer instance is looked at again: no device starves the control socket.
const BATCH: usize = 32;

/// One epoll instance; everything is watched for readability, level-triggered.
#[derive(Debug)]
pub struct Watch(OwnedFd);

impl Watch {
    pub fn new() -> io::Result<Self> {
        Ok(Self(epoll::create(CreateFlags::CLOEXEC)?))
    }

    pub fn add(&self, fd: impl AsFd, token: Token) -> io::Result<()> {
        let data = EventData::new_u64(token.pack());
        Ok(epoll::add(&self.0, fd, data, EventFlags::IN)?)
    }

    pub fn remove(&self, fd: impl AsFd) -> io::Result<()> {
        Ok(epoll::delete(&self.0, fd)?)
    }

    /// Waits for something; interrupted: nothing. `None`: nothing came for `seconds`.
    pub fn wait(&self, seconds: Option<u64>) -> io::Result<Option<Vec<Token>>> {
        let limit = seconds.and_then(|seconds| i64::try_from(seconds).ok());
        let limit = limit.map(|tv_sec| Timespec { tv_sec, tv_nsec: 0 });
        let mut buffer = Vec::with_capacity(BATCH);
        match epoll::wait(&self.0, rustix::buffer::spare_capacity(&mut buffer), limit.as_ref()) {
            Ok(0) if limit.is_some() => return Ok(None),
            Ok(_) | Err(rustix::io::Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
        Ok(Some(buffer.iter().filter_map(|event| Token::unpack(event.data.u64())).collect()))
    }

    /// What is readable now.
    pub fn poll(&self) -> io::Result<Vec<Token>> {
        Ok(self.wait(Some(0))?.unwrap_or_default())
    }
}

impl AsFd for Watch {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tokens_survive_packing() {
        let tokens = [
            Token::Listener,
            Token::Ending,
            Token::Devices,
            Token::Peer(u32::MAX),
            Token::Child { fork: u32::MAX, number: 99 },
            Token::Report(7),
            Token::Ended(7),
            Token::Filled,
            Token::Queue { slot: 3, queue: u16::MAX },
            Token::Backend { slot: 9 },
        ];
        for token in tokens {
            assert_eq!(Token::unpack(token.pack()), Some(token));
        }
        assert_eq!(Token::unpack(u64::MAX), None);
    }

    #[test]
    fn devices_are_heard_only_while_they_hang_in_the_outer_one() {
        let (outer, inner) = (Watch::new().unwrap(), Watch::new().unwrap());
        let pipe = dormouse_sys::fds::Pipe::new().unwrap();
        inner.add(&pipe.read, Token::Backend { slot: 1 }).unwrap();
        rustix::io::write(&pipe.write, b"x").unwrap();
        assert_eq!(outer.poll().unwrap(), []);
        outer.add(&inner, Token::Devices).unwrap();
        assert_eq!(outer.wait(None).unwrap().unwrap(), [Token::Devices]);
        assert_eq!(inner.poll().unwrap(), [Token::Backend { slot: 1 }]);
        outer.remove(&inner).unwrap();
        assert_eq!(outer.poll().unwrap(), []);
    }
}
