//! Network file systems, whose events come late or never: refused unless the caller insists.

use std::fs::File;
use std::path::Path;

use dormouse_wire::envd::connect::Error;

/// Magic numbers of statfs(2). Not 9P: some engines' root file systems call themselves that.
const NETWORK: [(u32, &str); 5] =
    [(0x6969, "NFS"), (0xFF53_4D42, "CIFS"), (0xFE53_4D42, "SMB2"), (0x517B, "SMB"), (0x6573_5546, "FUSE")];

pub fn refuse_network(path: &Path, dir: &File) -> Result<(), Error> {
    // A file system that cannot be asked is none of these.
    let Ok(stat) = rustix::fs::fstatfs(dir) else { return Ok(()) };
    match network_kind(stat.f_type) {
        None => Ok(()),
        Some(kind) => Err(Error::invalid_argument(format!(
            "path '{}' is on a network file system ({kind}), whose events are unreliable: \
             set allow_network_mounts to watch it nevertheless",
            path.display()
        ))),
    }
}

fn network_kind(f_type: i64) -> Option<&'static str> {
    // Some architectures sign-extend the 32-bit number.
    NETWORK.iter().find(|(magic, _)| f_type & 0xFFFF_FFFF == i64::from(*magic)).map(|(_, kind)| *kind)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn network_file_systems_are_known_by_number() {
        assert_eq!(network_kind(0x6969), Some("NFS"));
        assert_eq!(network_kind(0xFF53_4D42), Some("CIFS"));
        assert_eq!(network_kind(i64::from(i32::from_ne_bytes(0xFF53_4D42_u32.to_ne_bytes()))), Some("CIFS"));
        // ext4, tmpfs, overlayfs, 9P
        for local in [0xEF53, 0x0102_1994, 0x794C_7630, 0x0102_1997] {
            assert_eq!(network_kind(local), None);
        }
    }
}
