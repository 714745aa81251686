//! Who the sandbox is: random source, clock, host name, machine id.
//!
//! What cannot be refreshed is a note for the receipt, never silence.

use std::io;
use std::path::Path;
use std::time::Duration;

use dormouse_sys::random::{ENTROPY_BYTES, reseed};
use dormouse_wire::control::Wake;
use rustix::io::Errno;
use rustix::time::{ClockId, Timespec, clock_gettime, clock_settime};

use super::files::{read, with_block, write};

/// The clock is left alone when it is off by less: the way here takes time, too.
const CLOCK_ERROR_MAX: Duration = Duration::from_millis(20);
/// A clock that cannot be set is worth a note when it is off by more.
const CLOCK_ERROR_NOTED: Duration = Duration::from_secs(1);
const HOSTS_BEGIN: &str = "# dormouse: this sandbox";
const HOSTS_END: &str = "# dormouse: end";

/// True when the random numbers that follow are new ones: the kernel took the bytes, or draws from the
/// host's source.
pub fn refresh_random(entropy: &[u8; ENTROPY_BYTES], notes: &mut Vec<String>) -> bool {
    match reseed(entropy) {
        Ok(()) => true,
        Err(_) if is_gvisor() => {
            notes.push(
                "the random source is gVisor's: it reads from the host and is new with each restore, so it needs \
                 no reseed"
                    .to_owned(),
            );
            true
        }
        Err(why) => {
            notes.push(format!("the kernel's random source was not reseeded: {why}"));
            false
        }
    }
}

/// gVisor prints a fixed line; its random device has no ioctls.
fn is_gvisor() -> bool {
    std::fs::read_to_string("/proc/version").is_ok_and(|version| version.contains("4.4.0 #1 SMP Sun Jan 10"))
}

/// Sets the wall clock if it is off.
pub fn set_clock(wall_clock_ns: i64, notes: &mut Vec<String>) {
    let wanted = Timespec {
        tv_sec: wall_clock_ns.div_euclid(1_000_000_000),
        tv_nsec: wall_clock_ns.rem_euclid(1_000_000_000),
    };
    let now = clock_gettime(ClockId::Realtime);
    let now_ns = i128::from(now.tv_sec) * 1_000_000_000 + i128::from(now.tv_nsec);
    let off_ns = (now_ns - i128::from(wall_clock_ns)).unsigned_abs();
    if off_ns < CLOCK_ERROR_MAX.as_nanos() {
        return;
    }
    if let Err(why) = clock_settime(ClockId::Realtime, wanted)
        && off_ns > CLOCK_ERROR_NOTED.as_nanos()
    {
        notes.push(format!("the clock is off by {} ms and cannot be set: {why}", off_ns / 1_000_000));
    }
}

pub fn set_kernel_hostname(hostname: &str, notes: &mut Vec<String>) {
    match rustix::system::sethostname(hostname.as_bytes()) {
        Ok(()) => {}
        Err(Errno::NOSYS) => notes.push("this kernel has no host name of its own".to_owned()),
        Err(why) => notes.push(format!("the host name cannot be set: {why}")),
    }
}

/// `/etc/hostname`, `/etc/hosts`, `/etc/machine-id`.
pub fn write_files(root: &Path, wake: &Wake, notes: &mut Vec<String>) {
    let mut note = |file: &str, result: io::Result<()>| {
        if let Err(why) = result {
            notes.push(format!("{file} cannot be written: {why}"));
        }
    };
    note("/etc/hostname", write(&root.join("etc/hostname"), &format!("{}\n", wake.hostname)));
    note("/etc/hosts", write_hosts(&root.join("etc/hosts"), &wake.hostname));
    note("/etc/machine-id", write(&root.join("etc/machine-id"), &format!("{}\n", wake.machine_id)));
    let dbus = root.join("var/lib/dbus/machine-id");
    if std::fs::symlink_metadata(&dbus).is_ok_and(|metadata| metadata.is_file()) {
        note("/var/lib/dbus/machine-id", write(&dbus, &format!("{}\n", wake.machine_id)));
    }
}

fn write_hosts(path: &Path, hostname: &str) -> io::Result<()> {
    let mut text = read(path)?;
    if !text.lines().any(|line| line.split_whitespace().skip(1).any(|name| name == "localhost")) {
        text = format!("127.0.0.1\tlocalhost\n::1\tlocalhost\n{text}");
    }
    write(path, &with_block(&text, HOSTS_BEGIN, HOSTS_END, &format!("127.0.1.1\t{hostname}")))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

    #[test]
    fn identity_files_follow_the_wake() {
        let root = tempfile::tempdir().unwrap();
        let etc = root.path().join("etc");
        fs::create_dir(&etc).unwrap();
        fs::write(etc.join("hosts"), "127.0.0.1 localhost\n10.0.0.1 mine\n").unwrap();
        let mut notes = Vec::new();
        for name in ["first", "second"] {
            let wake = super::super::wake::tests::sample(name);
            write_files(root.path(), &wake, &mut notes);
        }
        assert_eq!(notes, Vec::<String>::new());
        assert_eq!(fs::read_to_string(etc.join("hostname")).unwrap(), "second\n");
        assert_eq!(
            fs::read_to_string(etc.join("hosts")).unwrap(),
            format!("127.0.0.1 localhost\n10.0.0.1 mine\n{HOSTS_BEGIN}\n127.0.1.1\tsecond\n{HOSTS_END}\n")
        );
        assert_eq!(fs::read_to_string(etc.join("machine-id")).unwrap().trim().len(), 32);
    }
}
