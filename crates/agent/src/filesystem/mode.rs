//! Modes as text, in the form of Go's `fs.FileMode`, which clients are shown.

use rustix::fs::{FileType, Mode, RawMode};

const PERMISSION_BITS: u32 = 0o777;

/// The permission bits of a `st_mode`.
#[must_use]
pub fn permission_bits(st_mode: RawMode) -> u32 {
    st_mode & PERMISSION_BITS
}

/// `-rw-r--r--`, `drwxr-xr-x`, `Lrwxrwxrwx`, `dtrwxrwxrwx`: letters for what is special, in Go's order,
/// a dash where nothing is, then the permissions.
#[must_use]
pub fn text(st_mode: RawMode) -> String {
    let mode = Mode::from_raw_mode(st_mode);
    let kind = FileType::from_raw_mode(st_mode);
    let special = [
        (kind == FileType::Directory, 'd'),
        (kind == FileType::Symlink, 'L'),
        (matches!(kind, FileType::BlockDevice | FileType::CharacterDevice), 'D'),
        (kind == FileType::Fifo, 'p'),
        (kind == FileType::Socket, 'S'),
        (mode.contains(Mode::SUID), 'u'),
        (mode.contains(Mode::SGID), 'g'),
        (kind == FileType::CharacterDevice, 'c'),
        (mode.contains(Mode::SVTX), 't'),
        (kind == FileType::Unknown, '?'),
    ];
    let mut text: String = special.iter().filter_map(|&(is, letter)| is.then_some(letter)).collect();
    if text.is_empty() {
        text.push('-');
    }
    text.extend(
        "rwxrwxrwx".chars().enumerate().map(
            |(index, letter)| {
                if st_mode & (0o400 >> index) != 0 { letter } else { '-' }
            },
        ),
    );
    text
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn modes_read_as_go_writes_them() {
        for (mode, wanted) in [
            (0o100_644, "-rw-r--r--"),
            (0o040_755, "drwxr-xr-x"),
            (0o120_777, "Lrwxrwxrwx"),
            (0o041_777, "dtrwxrwxrwx"),
            (0o104_755, "urwxr-xr-x"),
            (0o102_755, "grwxr-xr-x"),
            (0o020_666, "Dcrw-rw-rw-"),
            (0o060_660, "Drw-rw----"),
            (0o010_600, "prw-------"),
            (0o140_000, "S---------"),
            (0o100_000, "----------"),
        ] {
            assert_eq!(text(mode), wanted, "{mode:o}");
        }
    }

    proptest! {
        #[test]
        fn permissions_can_be_read_back(bits in 0_u32..0o1000) {
            let text = text(0o100_000 | bits);
            let back = text[1..].bytes().fold(0, |bits, letter| bits << 1 | u32::from(letter != b'-'));
            prop_assert_eq!((back, text.len()), (bits, 10));
        }
    }
}
