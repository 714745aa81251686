//! Asking the kernel to begin writing a file's dirty pages, without waiting for them.

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;

/// Starts the write-out of what is dirty in `bytes` bytes from `offset` (sync_file_range(2)). It makes a
/// later fsync(2) short and replaces none: nothing is promised about what is on the disk.
pub fn start(file: &File, offset: u64, bytes: u64) -> io::Result<()> {
    let signed = |value: u64| i64::try_from(value).map_err(|_| io::Error::from(io::ErrorKind::InvalidInput));
    let (offset, bytes) = (signed(offset)?, signed(bytes)?);
    // SAFETY: the descriptor is open for the length of the call, and the call touches no memory of ours.
    let done = unsafe { libc::sync_file_range(file.as_raw_fd(), offset, bytes, libc::SYNC_FILE_RANGE_WRITE) };
    if done == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::FileExt;

    #[test]
    fn a_range_can_be_started_and_a_senseless_one_is_refused() {
        let path = std::env::temp_dir().join(format!("dormouse-writeback-{}", std::process::id()));
        let file = std::fs::File::create_new(&path).unwrap();
        file.write_all_at(&[7; 8192], 0).unwrap();
        let started = super::start(&file, 0, 8192);
        let refused = super::start(&file, u64::MAX, 1);
        std::fs::remove_file(&path).unwrap();
        started.unwrap();
        refused.unwrap_err();
    }
}
