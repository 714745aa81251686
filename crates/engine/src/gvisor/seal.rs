//! Keeping the carrier's pipes still while a checkpoint is written.
//!
//! The sandbox must survive a checkpoint that fails, so runsc lets it run on afterwards; what it does
//! between the image and its end must then not be seen outside. Its only way out are its two pipes:
//!
//! ```text
//!            sealed                                  unsealed
//!  stdin     emptied: nothing can be read            what was in it is put back
//!  stdout    made small and filled up                emptied, what was in it is put back
//! ```
//!
//! Small, as the runtime takes what is in a pipe into the image, and slowly (64 KiB: 15 ms).
//!
//! Sealing and unsealing happen while the sandbox is frozen and its keeper detached, so that nobody
//! else moves a byte. What was taken out lies in a file meanwhile: a daemon that dies in between is
//! followed by one that unseals. Unsealing twice does no harm.

use std::fs::{File, OpenOptions};
use std::io::{self, ErrorKind, Read, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use crate::common::io_failure;
use crate::error::Failure;

/// The kernel allows more only to pipes that were enlarged; ours never are (1 MiB is its own bound).
const PIPE_BYTES_MAX: u64 = 1 << 20;
const CHUNK_BYTES: usize = 64 << 10;
/// The least that a pipe can hold, and what the kernel gives it.
const PIPE_BYTES_SMALL: usize = 4 << 10;
const PIPE_BYTES_USUAL: usize = 64 << 10;
const FILE: &str = "sealed";

/// The pipes of one sandbox, found through the process that holds its ends.
#[derive(Debug, Clone)]
pub(super) struct Seal {
    /// The sandbox process.
    pub pid: u32,
    /// Inodes of its stdin's and stdout's pipes.
    pub pipes: [u64; 2],
    /// The container's folder.
    pub dir: PathBuf,
}

impl Seal {
    /// True while what was in the pipes lies in the file.
    pub fn is_sealed(dir: &Path) -> bool {
        dir.join(FILE).exists()
    }

    pub fn seal(&self) -> Result<(), Failure> {
        let [stdin, stdout] = self.paths()?;
        let at = io_failure("seal the pipes of", &self.dir);
        // Nothing is taken out before it lies in the file: whoever dies in between loses nothing.
        let kept = peek(&stdin).and_then(|input| Ok((input, peek(&stdout)?)));
        if let Err(source) = kept.and_then(|(input, output)| self.write_file(&input, &output)) {
            return Err(at(source));
        }
        let emptied = drain(&stdin).and_then(|_| drain(&stdout));
        let filled = emptied.and_then(|_| resize(&stdout, PIPE_BYTES_SMALL)).and_then(|()| fill(&stdout));
        if let Err(source) = filled {
            self.unseal()?;
            return Err(at(source));
        }
        Ok(())
    }

    /// Puts back what was in the pipes.
    pub fn unseal(&self) -> Result<(), Failure> {
        let path = self.dir.join(FILE);
        let kept = match std::fs::read(&path) {
            Err(error) if error.kind() == ErrorKind::NotFound => return Ok(()),
            other => other.map_err(io_failure("read", &path))?,
        };
        let [stdin, stdout] = self.paths()?;
        let put_back = || -> io::Result<()> {
            let (input, output) = split(&kept).ok_or_else(|| io::Error::from(ErrorKind::InvalidData))?;
            for (pipe, bytes) in [(&stdin, input), (&stdout, output)] {
                drain(pipe)?;
                resize(pipe, PIPE_BYTES_USUAL.max(bytes.len()))?;
                put(pipe, bytes)?;
            }
            std::fs::remove_file(&path)
        };
        put_back().map_err(io_failure("unseal the pipes of", &self.dir))
    }

    /// The four ends that a keeper holds, for one that takes over from a dead one.
    pub fn ends(&self) -> Result<[File; 4], Failure> {
        let [stdin, stdout] = self.paths()?;
        let end = |pipe: &Path, read: bool| {
            File::options().read(read).write(!read).open(pipe).map_err(io_failure("open the pipe", pipe))
        };
        Ok([end(&stdin, false)?, end(&stdout, true)?, end(&stdin, true)?, end(&stdout, false)?])
    }

    fn write_file(&self, input: &[u8], output: &[u8]) -> io::Result<()> {
        let (path, temporary) = (self.dir.join(FILE), self.dir.join("sealed.tmp"));
        let mut file = File::create(&temporary)?;
        file.write_all(&(input.len() as u64).to_le_bytes())?;
        file.write_all(input)?;
        file.write_all(output)?;
        drop(file);
        std::fs::rename(temporary, path)
    }

    /// Names under which the two pipes can be opened, at either end.
    fn paths(&self) -> Result<[PathBuf; 2], Failure> {
        let dir = PathBuf::from(format!("/proc/{}/fd", self.pid));
        let links: Vec<(PathBuf, PathBuf)> = std::fs::read_dir(&dir)
            .map_err(io_failure("list the descriptors in", &dir))?
            .flatten()
            .filter_map(|entry| Some((entry.path(), std::fs::read_link(entry.path()).ok()?)))
            .collect();
        let find = |inode: u64| {
            let wanted = PathBuf::from(format!("pipe:[{inode}]"));
            links.iter().find(|(_, target)| *target == wanted).map(|(path, _)| path.clone())
        };
        match (find(self.pipes[0]), find(self.pipes[1])) {
            (Some(stdin), Some(stdout)) => Ok([stdin, stdout]),
            _ => {
                let source = io::Error::new(ErrorKind::NotFound, "the carrier's pipes are not open there");
                Err(io_failure("find the pipes among the descriptors in", &dir)(source))
            }
        }
    }
}

fn split(kept: &[u8]) -> Option<(&[u8], &[u8])> {
    let (length, rest) = kept.split_first_chunk::<8>()?;
    rest.split_at_checked(usize::try_from(u64::from_le_bytes(*length)).ok()?)
}

/// Opening a pipe through `/proc` gives either of its ends, of its own file status: what is set
/// non-blocking here is not so for the sandbox.
fn open(pipe: &Path, read: bool) -> io::Result<File> {
    let flags = i32::try_from(rustix::fs::OFlags::NONBLOCK.bits()).unwrap_or_default();
    OpenOptions::new().read(read).write(!read).custom_flags(flags).open(pipe)
}

/// A copy of all that is in the pipe, which stays there.
fn peek(pipe: &Path) -> io::Result<Vec<u8>> {
    use rustix::pipe::{PipeFlags, SpliceFlags, fcntl_getpipe_size, fcntl_setpipe_size, pipe_with, tee};
    let source = open(pipe, true)?;
    let waiting = usize::try_from(rustix::io::ioctl_fionread(&source)?).unwrap_or(usize::MAX);
    let (read, write) = pipe_with(PipeFlags::CLOEXEC)?;
    // As many places as the source has: what is in it may be in small pieces.
    fcntl_setpipe_size(&write, fcntl_getpipe_size(&source)?)?;
    let copied = if waiting == 0 { 0 } else { tee(&source, &write, waiting, SpliceFlags::NONBLOCK)? };
    if copied != waiting {
        return Err(io::Error::other(format!("{copied} of {waiting} bytes in a pipe could be copied")));
    }
    drop(write);
    let mut kept = Vec::with_capacity(copied);
    File::from(read).read_to_end(&mut kept)?;
    Ok(kept)
}

/// Takes out all that is in the pipe.
fn drain(pipe: &Path) -> io::Result<Vec<u8>> {
    let mut kept = Vec::new();
    match open(pipe, true)?.take(PIPE_BYTES_MAX).read_to_end(&mut kept) {
        Ok(_) => Ok(kept),
        // `read_to_end` keeps what it had read before the pipe was empty.
        Err(error) if error.kind() == ErrorKind::WouldBlock => Ok(kept),
        Err(error) => Err(error),
    }
}

/// For bytes that were in the pipe before: it has room for them.
fn put(pipe: &Path, bytes: &[u8]) -> io::Result<()> {
    open(pipe, false)?.write_all(bytes)
}

/// Makes an empty pipe hold that much.
fn resize(pipe: &Path, bytes: usize) -> io::Result<()> {
    rustix::pipe::fcntl_setpipe_size(open(pipe, false)?, bytes)?;
    Ok(())
}

/// Fills an empty pipe until it takes not one byte more.
fn fill(pipe: &Path) -> io::Result<()> {
    let mut file = open(pipe, false)?;
    let zeros = [0_u8; CHUNK_BYTES];
    let mut chunk = CHUNK_BYTES;
    while chunk > 0 {
        match file.write(&zeros[..chunk]) {
            Ok(_) => {}
            Err(error) if error.kind() == ErrorKind::WouldBlock => chunk /= 2,
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use dormouse_sys::fds::Pipe;
    use std::os::fd::{AsRawFd, OwnedFd};
    use std::os::unix::fs::MetadataExt;

    fn inode(fd: &OwnedFd) -> u64 {
        std::fs::metadata(format!("/proc/self/fd/{}", fd.as_raw_fd())).unwrap().ino()
    }

    #[test]
    fn bytes_in_flight_come_back_in_order() {
        let dir = std::env::temp_dir().join(format!("dormouse-seal-{}", std::process::id()));
        std::fs::create_dir_all(&dir).unwrap();
        let (stdin, stdout) = (Pipe::new().unwrap(), Pipe::new().unwrap());
        rustix::io::write(&stdin.write, b"to the sandbox").unwrap();
        rustix::io::write(&stdout.write, b"from the sandbox").unwrap();
        let seal = Seal {
            pid: std::process::id(),
            pipes: [inode(&stdin.read), inode(&stdout.write)],
            dir: dir.clone(),
        };
        seal.seal().unwrap();
        assert!(Seal::is_sealed(&dir));
        let read_end = format!("/proc/self/fd/{}", stdin.read.as_raw_fd());
        let write_end = format!("/proc/self/fd/{}", stdout.write.as_raw_fd());
        let mut one = [0_u8; 1];
        let empty = open(Path::new(&read_end), true).unwrap().read(&mut one).unwrap_err();
        assert_eq!(empty.kind(), ErrorKind::WouldBlock);
        let full = open(Path::new(&write_end), false).unwrap().write(&one).unwrap_err();
        assert_eq!(full.kind(), ErrorKind::WouldBlock);

        seal.unseal().unwrap();
        seal.unseal().unwrap();
        assert!(!Seal::is_sealed(&dir));
        let mut buffer = [0_u8; 64];
        let got = rustix::io::read(&stdin.read, &mut buffer).unwrap();
        assert_eq!(&buffer[..got], b"to the sandbox");
        let got = rustix::io::read(&stdout.read, &mut buffer).unwrap();
        assert_eq!(&buffer[..got], b"from the sandbox");
        std::fs::remove_dir_all(dir).unwrap();
    }

    #[test]
    fn a_file_that_is_cut_is_not_believed() {
        assert!(split(b"abc").is_none());
        assert!(split(&[9, 0, 0, 0, 0, 0, 0, 0, b'x']).is_none());
        assert_eq!(split(&[1, 0, 0, 0, 0, 0, 0, 0, b'x', b'y']), Some((&b"x"[..], &b"y"[..])));
    }
}
