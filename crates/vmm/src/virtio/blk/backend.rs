//! What a disk is to the device.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;

/// Where a disk's bytes are. Calls block; they are made on the disk's own thread, with ranges inside the disk.
pub trait BlockBackend: Send {
    /// A multiple of 512; it never changes.
    fn size_bytes(&self) -> u64;
    /// Fills the whole buffer.
    fn read_at(&mut self, buffer: &mut [u8], offset: u64) -> io::Result<()>;
    /// Writes the whole buffer; it may be lost in a crash until `flush` has returned.
    fn write_at(&mut self, buffer: &[u8], offset: u64) -> io::Result<()>;
    /// Returns when everything written is on stable storage.
    fn flush(&mut self) -> io::Result<()>;

    /// The range reads as zeros afterwards.
    fn write_zeroes(&mut self, offset: u64, bytes: u64) -> io::Result<()> {
        static ZEROS: [u8; 64 << 10] = [0; 64 << 10];
        let mut done = 0;
        while done < bytes {
            let part = usize::try_from(bytes - done).map_or(ZEROS.len(), |left| left.min(ZEROS.len()));
            self.write_at(&ZEROS[..part], offset + done)?;
            done += part as u64;
        }
        Ok(())
    }

    /// Whether `discard` frees anything: only then is it offered to the guest.
    fn discards(&self) -> bool {
        false
    }

    /// The guest will not miss what is in the range.
    fn discard(&mut self, _offset: u64, _bytes: u64) -> io::Result<()> {
        Ok(())
    }
}

/// A plain file, or a block device.
pub struct FileDisk {
    file: File,
    bytes: u64,
}

impl FileDisk {
    /// `bytes` is the size that the guest sees.
    #[must_use]
    pub fn new(file: File, bytes: u64) -> Self {
        Self { file, bytes }
    }
}

impl BlockBackend for FileDisk {
    fn size_bytes(&self) -> u64 {
        self.bytes
    }

    fn read_at(&mut self, buffer: &mut [u8], offset: u64) -> io::Result<()> {
        self.file.read_exact_at(buffer, offset)
    }

    fn write_at(&mut self, buffer: &[u8], offset: u64) -> io::Result<()> {
        self.file.write_all_at(buffer, offset)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.file.sync_data()
    }
}
