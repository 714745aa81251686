//! The guest's first file system: the agent as `/init` and the modules it loads, as a cpio archive that the
//! kernel unpacks (`Documentation/driver-api/early-userspace/buffer-format.rst`, "newc").
//!
//! Names and order are the agent's (`crates/agent/src/vm_init.rs`): `/modules/order` names the files in
//! `/modules`, a line each.

use std::io::{self, Write};

use crate::modules::Module;

const TYPE_DIR: u32 = 0o040_000;
const TYPE_FILE: u32 = 0o100_000;
const TYPE_CHAR: u32 = 0o020_000;

/// Writes the whole archive.
pub fn write_initramfs(out: impl Write, agent: &[u8], modules: &[Module]) -> io::Result<()> {
    let mut archive = Newc { out, inode: 0 };
    for dir in ["dev", "modules", "root"] {
        archive.entry(dir, TYPE_DIR | 0o755, (0, 0), &[])?;
    }
    // What process 1 has as its standard descriptors.
    archive.entry("dev/console", TYPE_CHAR | 0o600, (5, 1), &[])?;
    archive.entry("init", TYPE_FILE | 0o755, (0, 0), agent)?;
    let mut order = String::new();
    for module in modules {
        let file = format!("{}.ko", module.name);
        archive.entry(&format!("modules/{file}"), TYPE_FILE | 0o644, (0, 0), &module.content)?;
        order.push_str(&file);
        order.push('\n');
    }
    archive.entry("modules/order", TYPE_FILE | 0o644, (0, 0), order.as_bytes())?;
    archive.finish()
}

struct Newc<W> {
    out: W,
    inode: u32,
}

impl<W: Write> Newc<W> {
    /// `device`: major and minor number of a device file.
    fn entry(&mut self, name: &str, mode: u32, device: (u32, u32), content: &[u8]) -> io::Result<()> {
        self.inode += 1;
        let too_large = |_| io::Error::new(io::ErrorKind::FileTooLarge, "no cpio entry can be so large");
        let size = u32::try_from(content.len()).map_err(too_large)?;
        let name_size = u32::try_from(name.len() + 1).map_err(too_large)?;
        let links = if mode & TYPE_DIR == TYPE_DIR { 2 } else { 1 };
        // ino mode uid gid nlink mtime filesize devmajor devminor rdevmajor rdevminor namesize check
        let fields = [self.inode, mode, 0, 0, links, 0, size, 0, 0, device.0, device.1, name_size, 0];
        let mut header = "070701".to_owned();
        for field in fields {
            header.push_str(&format!("{field:08x}"));
        }
        self.out.write_all(header.as_bytes())?;
        self.out.write_all(name.as_bytes())?;
        self.pad(header.len() + name.len(), true)?;
        self.out.write_all(content)?;
        self.pad(content.len(), false)
    }

    /// To a multiple of four; after a name at least one zero, its end.
    fn pad(&mut self, written: usize, at_least_one: bool) -> io::Result<()> {
        let count = match (4 - written % 4) % 4 {
            0 if at_least_one => 4,
            count => count,
        };
        self.out.write_all(&[0; 4][..count])
    }

    fn finish(mut self) -> io::Result<()> {
        self.inode = 0;
        self.entry("TRAILER!!!", 0, (0, 0), &[])?;
        self.out.flush()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::process::{Command, Stdio};

    #[test]
    fn the_archive_is_as_the_kernel_reads_it() {
        let modules = [("virtio_ring", "12345"), ("virtio", "1234")]
            .map(|(name, content)| Module { name: name.to_owned(), content: content.as_bytes().to_vec() });
        let mut bytes = Vec::new();
        write_initramfs(&mut bytes, b"agent", &modules).unwrap();
        assert_eq!(bytes.len() % 4, 0);
        let entries = read(&bytes);
        let names: Vec<&str> = entries.iter().map(|(name, ..)| name.as_str()).collect();
        let expected = [
            "dev",
            "modules",
            "root",
            "dev/console",
            "init",
            "modules/virtio_ring.ko",
            "modules/virtio.ko",
            "modules/order",
        ];
        assert_eq!(names, expected);
        assert_eq!(entries[4].1, TYPE_FILE | 0o755);
        assert_eq!(entries[4].2, b"agent");
        assert_eq!(entries[7].2, b"virtio_ring.ko\nvirtio.ko\n");
    }

    /// Reads it by the format's description, independently of the writer.
    fn read(mut bytes: &[u8]) -> Vec<(String, u32, Vec<u8>)> {
        let mut entries = Vec::new();
        loop {
            assert_eq!(&bytes[..6], b"070701");
            let field = |index: usize| {
                let text = std::str::from_utf8(&bytes[6 + index * 8..14 + index * 8]).unwrap();
                u32::from_str_radix(text, 16).unwrap()
            };
            let (mode, size, name_size) = (field(1), field(6) as usize, field(11) as usize);
            let name = std::str::from_utf8(&bytes[110..110 + name_size - 1]).unwrap().to_owned();
            assert_eq!(bytes[110 + name_size - 1], 0);
            let start = (110 + name_size).next_multiple_of(4);
            if name == "TRAILER!!!" {
                return entries;
            }
            entries.push((name, mode, bytes[start..start + size].to_vec()));
            bytes = &bytes[(start + size).next_multiple_of(4)..];
        }
    }

    #[test]
    fn cpio_itself_reads_it() {
        // Where there is a cpio; the test above needs none.
        let Ok(mut cpio) =
            Command::new("cpio").args(["-t", "--quiet"]).stdin(Stdio::piped()).stdout(Stdio::piped()).spawn()
        else {
            return;
        };
        let mut bytes = Vec::new();
        write_initramfs(&mut bytes, b"agent", &[]).unwrap();
        cpio.stdin.take().unwrap().write_all(&bytes).unwrap();
        let output = cpio.wait_with_output().unwrap();
        assert!(String::from_utf8(output.stdout).unwrap().contains("modules/order"));
    }
}
