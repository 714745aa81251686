//! What the lab needs of this machine, named before it is installed.

use crate::tools::{self, Need};

/// Debian 12's own QEMU excludes the backported qemu-utils: where that is installed, it goes back with it.
const QEMU: &str = "p='qemu-system-x86'; if dpkg-query -W qemu-utils >/dev/null 2>&1; then p=\"$p qemu-utils\"; fi; \
     if grep -q '^VERSION_CODENAME=bookworm' /etc/os-release; then p=$(echo $p | sed 's,[^ ]*,&/bookworm,g'); fi; \
     DEBIAN_FRONTEND=noninteractive apt-get install -y -q --no-install-recommends --allow-downgrades $p";

/// What emulates.
const MACHINE: &[Need] = &[Need {
    what: "qemu-system-x86",
    why: "its software CPU emulates the hardware virtualisation that this host may not have",
    probe: &["qemu-system-x86_64", "--version"],
    mend: &["sh", "-c", QEMU],
}];

/// What makes file systems.
const FILES: &[Need] = &[
    Need {
        what: "mmdebstrap",
        why: "it builds the lab's file system from Debian packages",
        probe: &["mmdebstrap", "--version"],
        mend: &["apt-get", "install", "-y", "-q", "--no-install-recommends", "mmdebstrap"],
    },
    Need {
        what: "e2fsprogs",
        why: "it makes the lab's disks",
        probe: &["mkfs.ext4", "-V"],
        mend: &["apt-get", "install", "-y", "-q", "--no-install-recommends", "e2fsprogs"],
    },
];

/// True: all is there. Without `install` it only tells.
pub fn all(install: bool) -> anyhow::Result<bool> {
    Ok(tools::meet(MACHINE, install)? & files(install)?)
}

/// The same for what a machine that runs microVMs by itself needs, too.
pub fn files(install: bool) -> anyhow::Result<bool> {
    tools::meet(FILES, install)
}
