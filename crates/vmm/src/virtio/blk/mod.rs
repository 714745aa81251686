//! virtio-blk: a disk. One request after the other, each done when its answer is given.
//!
//! Invariants: an answer OK to a flush means that the disk said so, and a flush that failed once is never
//! answered OK again (the kernel may have dropped what it could not write); a guest without the flush feature
//! gets every write flushed; an I/O error reaches the guest as an error.

mod backend;
#[cfg(test)]
mod tests;

use std::io;

use dormouse_snapshot::devices::virtio::{BlockState, DeviceKind, DeviceState};
use virtio_bindings::virtio_blk::{
    VIRTIO_BLK_F_DISCARD, VIRTIO_BLK_F_FLUSH, VIRTIO_BLK_F_RO, VIRTIO_BLK_F_SEG_MAX, VIRTIO_BLK_F_SIZE_MAX,
    VIRTIO_BLK_F_WRITE_ZEROES, VIRTIO_BLK_S_IOERR, VIRTIO_BLK_S_OK, VIRTIO_BLK_S_UNSUPP,
    VIRTIO_BLK_T_DISCARD, VIRTIO_BLK_T_FLUSH, VIRTIO_BLK_T_GET_ID, VIRTIO_BLK_T_IN, VIRTIO_BLK_T_OUT,
    VIRTIO_BLK_T_WRITE_ZEROES, VIRTIO_BLK_WRITE_ZEROES_FLAG_UNMAP,
};

pub use self::backend::{BlockBackend, FileDisk};
use super::device::{DeviceError, Progress, Rings, VirtioDevice};
use super::queue::{Chain, QueueError};
use crate::memory::GuestMemory;

const SECTOR_BYTES: u64 = 512;
const HEADER_BYTES: usize = 16;
const RANGE_BYTES: usize = 16;
const QUEUE_SIZE: u16 = 256;
/// Buffers of one request, beside header and status.
const SEGMENTS_MAX: u32 = QUEUE_SIZE as u32 - 2;
/// Bytes of one buffer.
const SEGMENT_BYTES_MAX: u32 = 128 << 10;
/// A request with more is answered with an error: it would keep everybody who waits for the device for too long.
const REQUEST_BYTES_MAX: u64 = SEGMENTS_MAX as u64 * SEGMENT_BYTES_MAX as u64;
/// What passes through at once between disk and guest memory.
const BOUNCE_BYTES: usize = 256 << 10;
/// Zeros are written, so one request must not ask for too many.
const ZEROES_SECTORS_MAX: u32 = 8192;
const DISCARD_SECTORS_MAX: u32 = 1 << 21;
const DISCARD_RANGES_MAX: u32 = 16;
const CONFIG_BYTES: usize = 60;

#[derive(Debug, thiserror::Error)]
pub enum BlockError {
    #[error("the disk has {given} bytes, not the {expected} that the guest knows")]
    Size { given: u64, expected: u64 },
    #[error("the disk's size, {given} bytes, is no multiple of 512")]
    Sectors { given: u64 },
}

/// A virtio-blk device.
pub struct Block {
    backend: Box<dyn BlockBackend>,
    state: BlockState,
    /// The guest takes no care of flushes: every write is flushed.
    writethrough: bool,
    flush_failed: bool,
    bounce: Vec<u8>,
    /// Requests that failed by the disk's fault.
    io_errors: u64,
}

/// How a request ended.
enum Failure {
    Unsupported,
    Io(io::Error),
    /// The guest asked for what is not on the disk.
    Range,
    Queue(QueueError),
}

impl From<QueueError> for Failure {
    fn from(error: QueueError) -> Self {
        Self::Queue(error)
    }
}

impl Block {
    /// `serial`: what the guest finds as the disk's name; cut off after 20 bytes.
    pub fn new(backend: Box<dyn BlockBackend>, read_only: bool, serial: &str) -> Result<Self, BlockError> {
        let mut padded = [0; 20];
        padded.iter_mut().zip(serial.bytes()).for_each(|(to, from)| *to = from);
        let disk_bytes = backend.size_bytes();
        if !disk_bytes.is_multiple_of(SECTOR_BYTES) {
            return Err(BlockError::Sectors { given: disk_bytes });
        }
        let discards = backend.discards();
        Ok(Self::with(backend, BlockState { disk_bytes, read_only, discards, serial: padded }))
    }

    /// The device goes on with another backend that holds the same bytes.
    pub fn restore(state: &BlockState, backend: Box<dyn BlockBackend>) -> Result<Self, BlockError> {
        let block = Self::with(backend, *state);
        block.check_size()?;
        Ok(block)
    }

    fn with(backend: Box<dyn BlockBackend>, state: BlockState) -> Self {
        Self { backend, state, writethrough: false, flush_failed: false, bounce: Vec::new(), io_errors: 0 }
    }

    fn check_size(&self) -> Result<(), BlockError> {
        let (given, expected) = (self.backend.size_bytes(), self.state.disk_bytes);
        if given == expected { Ok(()) } else { Err(BlockError::Size { given, expected }) }
    }

    /// For the one who owns the disk's layers: what the running device writes to.
    pub fn backend(&mut self) -> &mut dyn BlockBackend {
        &mut *self.backend
    }

    /// The running device goes on with another backend that holds the same bytes.
    pub fn replace_backend(&mut self, backend: Box<dyn BlockBackend>) -> Result<(), BlockError> {
        let former = std::mem::replace(&mut self.backend, backend);
        self.check_size().inspect_err(|_| self.backend = former)
    }

    #[must_use]
    pub fn io_errors(&self) -> u64 {
        self.io_errors
    }

    fn serve(&mut self, memory: &GuestMemory, chain: &Chain) -> Result<u32, DeviceError> {
        let Some(status_at) = (chain.writable_bytes as usize).checked_sub(1) else {
            return Err(DeviceError::Request("a disk request has no room for its status"));
        };
        let broken = |source| DeviceError::Queue { index: 0, source };
        let outcome = self.execute(memory, chain, status_at);
        let (status, written) = match outcome {
            Ok(written) => (VIRTIO_BLK_S_OK, written),
            Err(Failure::Unsupported) => (VIRTIO_BLK_S_UNSUPP, 0),
            Err(Failure::Range) => (VIRTIO_BLK_S_IOERR, 0),
            Err(Failure::Io(error)) => {
                // The first is told; a disk that fails often would flood the log.
                if self.io_errors == 0 {
                    tracing::warn!(%error, "a request of a guest failed on its disk");
                }
                self.io_errors += 1;
                (VIRTIO_BLK_S_IOERR, 0)
            }
            Err(Failure::Queue(source)) => return Err(broken(source)),
        };
        chain.write(memory, status_at, &[u8::try_from(status).unwrap_or(u8::MAX)]).map_err(broken)?;
        Ok(written + 1)
    }

    /// Returns how many bytes before the status were written.
    fn execute(&mut self, memory: &GuestMemory, chain: &Chain, room: usize) -> Result<u32, Failure> {
        let mut header = [0; HEADER_BYTES];
        chain.read(memory, 0, &mut header)?;
        let (kind, rest) = header.split_at(8);
        let kind = u32::from_le_bytes([kind[0], kind[1], kind[2], kind[3]]);
        let sector = rest.iter().rev().fold(0, |sum: u64, byte| sum << 8 | u64::from(*byte));
        let sent = chain.readable_bytes as usize - HEADER_BYTES;
        match kind {
            VIRTIO_BLK_T_IN => self.read(memory, chain, sector, room),
            VIRTIO_BLK_T_OUT => self.write(memory, chain, sector, sent),
            VIRTIO_BLK_T_FLUSH => self.flush(),
            VIRTIO_BLK_T_GET_ID => {
                let bytes = room.min(self.state.serial.len());
                chain.write(memory, 0, &self.state.serial[..bytes])?;
                Ok(u32::try_from(bytes).unwrap_or(0))
            }
            VIRTIO_BLK_T_DISCARD if self.state.discards => self.ranges(memory, chain, sent, false),
            VIRTIO_BLK_T_WRITE_ZEROES => self.ranges(memory, chain, sent, true),
            _ => Err(Failure::Unsupported),
        }
    }

    /// The offset of `bytes` from `sector` on, if all of it is on the disk.
    fn offset(&self, sector: u64, bytes: u64) -> Result<u64, Failure> {
        let offset = sector.checked_mul(SECTOR_BYTES).ok_or(Failure::Range)?;
        let end = offset.checked_add(bytes).ok_or(Failure::Range)?;
        let fits = bytes.is_multiple_of(SECTOR_BYTES) && end <= self.state.disk_bytes;
        if fits { Ok(offset) } else { Err(Failure::Range) }
    }

    /// The same for what passes through guest memory.
    fn data_offset(&self, sector: u64, bytes: u64) -> Result<u64, Failure> {
        if bytes > REQUEST_BYTES_MAX { Err(Failure::Range) } else { self.offset(sector, bytes) }
    }

    fn read(
        &mut self,
        memory: &GuestMemory,
        chain: &Chain,
        sector: u64,
        room: usize,
    ) -> Result<u32, Failure> {
        let offset = self.data_offset(sector, room as u64)?;
        let mut done = 0;
        while done < room {
            let part = bounce(&mut self.bounce, room - done);
            self.backend.read_at(part, offset + done as u64).map_err(Failure::Io)?;
            chain.write(memory, done, part)?;
            done += part.len();
        }
        Ok(u32::try_from(room).unwrap_or(u32::MAX - 1))
    }

    fn write(
        &mut self,
        memory: &GuestMemory,
        chain: &Chain,
        sector: u64,
        sent: usize,
    ) -> Result<u32, Failure> {
        self.check_writable()?;
        let offset = self.data_offset(sector, sent as u64)?;
        let mut done = 0;
        while done < sent {
            let part = bounce(&mut self.bounce, sent - done);
            chain.read(memory, HEADER_BYTES + done, part)?;
            self.backend.write_at(part, offset + done as u64).map_err(Failure::Io)?;
            done += part.len();
        }
        self.flush_if_writethrough()
    }

    fn check_writable(&self) -> Result<(), Failure> {
        if self.state.read_only { Err(Failure::Range) } else { Ok(()) }
    }

    fn flush_if_writethrough(&mut self) -> Result<u32, Failure> {
        if self.writethrough { self.flush() } else { Ok(0) }
    }

    fn flush(&mut self) -> Result<u32, Failure> {
        if self.flush_failed {
            return Err(Failure::Io(io::Error::other("an earlier flush failed")));
        }
        self.backend.flush().map_err(|error| {
            self.flush_failed = true;
            Failure::Io(error)
        })?;
        Ok(0)
    }

    fn ranges(
        &mut self,
        memory: &GuestMemory,
        chain: &Chain,
        sent: usize,
        zero: bool,
    ) -> Result<u32, Failure> {
        self.check_writable()?;
        let (ranges_max, sectors_max, flags_known) = if zero {
            (1, ZEROES_SECTORS_MAX, VIRTIO_BLK_WRITE_ZEROES_FLAG_UNMAP)
        } else {
            (DISCARD_RANGES_MAX as usize, DISCARD_SECTORS_MAX, 0)
        };
        if sent == 0 || !sent.is_multiple_of(RANGE_BYTES) || sent / RANGE_BYTES > ranges_max {
            return Err(Failure::Range);
        }
        for at in (0..sent).step_by(RANGE_BYTES) {
            let mut sector = [0; 8];
            let mut rest = [0; 8];
            chain.read(memory, HEADER_BYTES + at, &mut sector)?;
            chain.read(memory, HEADER_BYTES + at + 8, &mut rest)?;
            let [s0, s1, s2, s3, f0, f1, f2, f3] = rest;
            let (sectors, flags) =
                (u32::from_le_bytes([s0, s1, s2, s3]), u32::from_le_bytes([f0, f1, f2, f3]));
            if flags & !flags_known != 0 {
                return Err(Failure::Unsupported);
            }
            if sectors > sectors_max {
                return Err(Failure::Range);
            }
            let bytes = u64::from(sectors) * SECTOR_BYTES;
            let offset = self.offset(u64::from_le_bytes(sector), bytes)?;
            let outcome = if zero {
                self.backend.write_zeroes(offset, bytes)
            } else {
                self.backend.discard(offset, bytes)
            };
            outcome.map_err(Failure::Io)?;
        }
        self.flush_if_writethrough()
    }
}

/// At most `wanted` bytes to pass data through; kept, so that not every request allocates.
fn bounce(buffer: &mut Vec<u8>, wanted: usize) -> &mut [u8] {
    let bytes = wanted.min(BOUNCE_BYTES);
    if buffer.len() < bytes {
        buffer.resize(bytes, 0);
    }
    &mut buffer[..bytes]
}

impl VirtioDevice for Block {
    fn kind(&self) -> DeviceKind {
        DeviceKind::Block
    }

    fn features(&self) -> u64 {
        let mut features = 1 << VIRTIO_BLK_F_FLUSH | 1 << VIRTIO_BLK_F_SEG_MAX | 1 << VIRTIO_BLK_F_SIZE_MAX;
        if self.state.read_only {
            features |= 1 << VIRTIO_BLK_F_RO;
        } else {
            features |= 1 << VIRTIO_BLK_F_WRITE_ZEROES;
            features |= u64::from(self.state.discards) << VIRTIO_BLK_F_DISCARD;
        }
        features
    }

    fn queue_sizes(&self) -> &'static [u16] {
        &[QUEUE_SIZE]
    }

    /// `struct virtio_blk_config`; what belongs to features that are not offered is zero.
    fn config(&self) -> Vec<u8> {
        let mut config = vec![0; CONFIG_BYTES];
        let mut put = |at: usize, bytes: &[u8]| config[at..at + bytes.len()].copy_from_slice(bytes);
        put(0, &(self.state.disk_bytes / SECTOR_BYTES).to_le_bytes());
        put(8, &SEGMENT_BYTES_MAX.to_le_bytes());
        put(12, &SEGMENTS_MAX.to_le_bytes());
        if self.state.discards {
            put(36, &DISCARD_SECTORS_MAX.to_le_bytes());
            put(40, &DISCARD_RANGES_MAX.to_le_bytes());
            put(44, &8_u32.to_le_bytes());
        }
        put(48, &ZEROES_SECTORS_MAX.to_le_bytes());
        put(52, &1_u32.to_le_bytes());
        config
    }

    fn activate(&mut self, rings: &mut Rings) {
        self.writethrough = rings.features & 1 << VIRTIO_BLK_F_FLUSH == 0;
    }

    fn queue_event(&mut self, rings: &mut Rings, index: usize) -> Result<Progress, DeviceError> {
        rings.serve(index, |memory, chain| self.serve(memory, chain))
    }

    fn save(&self) -> DeviceState {
        DeviceState::Block(self.state)
    }
}
