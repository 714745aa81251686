//! Unix sockets in folders whose path may be longer than an address can hold (108 bytes, unix(7)).

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};

/// Listens at `dir/name`. A file that is there already is an error: the caller decides about it.
pub fn bind(dir: &Path, name: &str) -> io::Result<UnixListener> {
    let (_held, path) = short(dir, name)?;
    UnixListener::bind(path)
}

pub fn connect(dir: &Path, name: &str) -> io::Result<UnixStream> {
    let (_held, path) = short(dir, name)?;
    UnixStream::connect(path)
}

/// A short name of the socket, valid while the folder's handle is open.
fn short(dir: &Path, name: &str) -> io::Result<(File, PathBuf)> {
    if name.contains('/') || name.len() > 64 {
        return Err(io::Error::from(io::ErrorKind::InvalidInput));
    }
    let held = File::open(dir)?;
    let path = PathBuf::from(format!("/proc/self/fd/{}/{name}", held.as_raw_fd()));
    Ok((held, path))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_long_path_is_no_obstacle() {
        let root = std::env::temp_dir().join(format!("dormouse-unix-{}", std::process::id()));
        let dir = root.join("x".repeat(120));
        std::fs::create_dir_all(&dir).unwrap();
        let listener = bind(&dir, "a.sock").unwrap();
        let client = connect(&dir, "a.sock").unwrap();
        let (_served, _) = listener.accept().unwrap();
        drop(client);
        assert!(bind(&dir, "../a").is_err());
        std::fs::remove_dir_all(root).unwrap();
    }
}
