//! Restores by the pager. They need /dev/userfaultfd, and the right to open it.
//!
//! With a real kernel, where KVM can run one: `monitor live-lazy KERNEL INITRAMFS`. The guest's init fills memory, checks
//! it again and again, and writes `tick N` to the serial port, or `FAIL`; with `rebootnow` on its command line it
//! reboots after a few.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use dormouse_snapshot::WorkingSet;
use dormouse_vmm::control::{Client, ExitReason, Kernel};
use rustix::fs::SeekFrom;

use crate::rig::{Rig, connect, machine, serial, wait_for};
use crate::{assert_continues, counting, exit_of, grow};

const MIB: usize = 1 << 20;

/// What a snapshot's layers say together.
fn content(snapshot: &Path, mib: usize) -> Vec<u8> {
    let mut bytes = vec![0; mib * MIB];
    for number in 0.. {
        let Ok(layer) = File::open(snapshot.join(format!("memory.{number}"))) else { break };
        let mut at = 0;
        while let Ok(start) = rustix::fs::seek(&layer, SeekFrom::Data(at)) {
            at = rustix::fs::seek(&layer, SeekFrom::Hole(start)).unwrap();
            let range = usize::try_from(start).unwrap()..usize::try_from(at).unwrap();
            layer.read_exact_at(&mut bytes[range], start).unwrap();
        }
    }
    bytes
}

fn snapshot(rig: &mut Rig, client: &mut Client) -> PathBuf {
    let into = rig.folder();
    client.checkpoint(into.clone(), true).unwrap();
    into
}

/// The process that brings a monitor's pages.
fn pager_of(client: &mut Client) -> Option<u32> {
    let (_, monitor) = client.hello().unwrap();
    let is_pager = |pid: &u32| {
        let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
        let (head, tail) = stat.rsplit_once(") ").unwrap_or_default();
        head.ends_with("(pager") && tail.split(' ').nth(1) == Some(&monitor.to_string())
    };
    let names = std::fs::read_dir("/proc")
        .unwrap()
        .flatten()
        .filter_map(|entry| entry.file_name().into_string().ok());
    names.filter_map(|name| name.parse().ok()).find(is_pager)
}

fn kill_pager(client: &mut Client) {
    // It gives itself its name after it was forked off.
    let pager = wait_for("the pager", || pager_of(client));
    let pager = i32::try_from(pager).unwrap();
    let pager = rustix::process::Pid::from_raw(pager).unwrap();
    rustix::process::kill_process(pager, rustix::process::Signal::KILL).unwrap();
}

pub fn lazily_restored_memory_is_the_same() {
    let mut rig = Rig::new();
    let (_, mut client) = counting(&mut rig, 64, 48);
    let from = snapshot(&mut rig, &mut client);
    let expected = content(&from, 64);
    assert!(expected[MIB..49 * MIB].iter().all(|byte| *byte & 1 == 1), "it has what the guest has");
    for lazy in [false, true] {
        let (_, mut other) = rig.restore_by(&machine(64), &from, lazy);
        if lazy {
            wait_for("the pager", || pager_of(&mut other));
        } else {
            assert_eq!(pager_of(&mut other), None);
        }
        let into = rig.folder();
        let done = other.checkpoint(into.clone(), true).unwrap();
        assert!(content(&into, 64) == expected, "lazy: {lazy}");
        assert!(done.memory_bytes <= 64 << 10, "only what the devices wrote is new: {done:?}");
        wait_for("the pager to go", || pager_of(&mut other).is_none().then_some(()));
        other.stop().unwrap();
    }
}

pub fn a_lazily_restored_guest_is_one_like_any_other() {
    let mut rig = Rig::new();
    let (dir, mut client) = counting(&mut rig, 64, 48);
    let from = snapshot(&mut rig, &mut client);
    let before = serial(&dir);
    let (restored, mut other) = rig.restore_by(&machine(64), &from, true);
    other.resume().unwrap();
    grow(&restored);
    other.pause().unwrap();
    assert_continues(&before, &serial(&restored));
    let so_far = before + &serial(&restored);
    assert!(pager_of(&mut other).is_some(), "a pause needs no more of its memory");
    // A fork does; and what was asked meanwhile waits.
    let (children, forked) = rig.fork(&mut other, 3);
    assert!(pager_of(&mut other).is_none());
    assert_eq!(forked.pids.len(), 3);
    for child in &children {
        connect(child).resume().unwrap();
        grow(child);
        assert_continues(&so_far, &serial(child));
    }
    other.resume().unwrap();
    grow(&restored);
    let into = snapshot(&mut rig, &mut other);
    let (again, mut third) = rig.restore_by(&machine(64), &into, true);
    third.resume().unwrap();
    grow(&again);
    // While it runs, and two at once.
    let folders = [rig.folder(), rig.folder()];
    std::thread::scope(|scope| {
        for into in &folders {
            let again = &again;
            scope.spawn(move || connect(again).checkpoint(into.clone(), false).unwrap());
        }
    });
    for into in &folders {
        let (last, mut fourth) = rig.restore_by(&machine(64), into, true);
        fourth.resume().unwrap();
        grow(&last);
    }
    grow(&again);
    third.stop().unwrap();
}

pub fn what_was_touched_first_is_brought_ahead() {
    let mut rig = Rig::new();
    let (_, mut client) = counting(&mut rig, 64, 48);
    let from = snapshot(&mut rig, &mut client);
    let (dir, mut other) = rig.restore_by(&machine(64), &from, true);
    other.resume().unwrap();
    grow(&dir);
    snapshot(&mut rig, &mut other);
    let bytes = std::fs::read(dir.join("working-set")).unwrap();
    let set = WorkingSet::decode(&bytes).unwrap();
    assert_eq!(set.memory_bytes(), 64 << 20);
    let touched =
        |page: u32| set.ranges().iter().any(|range| (range.first..range.first + range.count).contains(&page));
    assert!(touched(0) && touched(8), "its counter and its code: {set:?}");
    let pages: u32 = set.ranges().iter().map(|range| range.count).sum();
    assert!(pages < 64, "what nobody touched is none: {set:?}");
    // With it, with a damaged one and with another's.
    let other_size = WorkingSet::new(32 << 20, set.ranges().iter().copied()).encode().unwrap();
    let damaged: Vec<u8> = bytes.iter().map(|byte| byte ^ 1).collect();
    for (hint, good) in [(bytes, true), (damaged, false), (other_size, false)] {
        std::fs::write(from.join("working-set"), hint).unwrap();
        let (dir, mut other) = rig.restore_by(&machine(64), &from, true);
        other.resume().unwrap();
        grow(&dir);
        snapshot(&mut rig, &mut other);
        assert_eq!(dir.join("working-set").exists(), !good, "what is known is not found out again");
    }
}

pub fn without_its_pager_a_monitor_ends_with_the_reason() {
    let mut rig = Rig::new();
    let (_, mut client) = counting(&mut rig, 64, 48);
    let from = snapshot(&mut rig, &mut client);
    for running in [false, true] {
        let (dir, mut other) = rig.restore_by(&machine(64), &from, true);
        if running {
            other.resume().unwrap();
            grow(&dir);
        }
        kill_pager(&mut other);
        let exit = exit_of(&dir);
        assert_eq!(exit.reason, ExitReason::HostFailed);
        assert_eq!(exit.message, "the pager ended before all memory was there: it was killed or crashed");
        assert!(other.status().is_err());
    }
}

pub fn a_page_that_cannot_be_read_ends_the_monitor() {
    let mut rig = Rig::new();
    let (_, mut client) = counting(&mut rig, 64, 48);
    let from = snapshot(&mut rig, &mut client);
    let (dir, mut other) = rig.restore_by(&machine(64), &from, true);
    other.resume().unwrap();
    grow(&dir);
    File::options().write(true).open(from.join("memory.0")).unwrap().set_len(8 << 20).unwrap();
    other.checkpoint(rig.folder(), false).unwrap_err();
    let exit = exit_of(&dir);
    assert_eq!(exit.reason, ExitReason::HostFailed);
    assert!(exit.message.contains("a page at 0x800000 cannot be read"), "{}", exit.message);
}

fn ticks(dir: &Path) -> usize {
    let text = serial(dir);
    assert!(!text.contains("FAIL") && !dir.join("exit.json").exists(), "{}: {text}", dir.display());
    text.matches("\ntick ").count()
}

pub fn live(kernel: &str, initramfs: &str) {
    const MEMORY_MIB: u32 = 256;
    let mut rig = Rig::new();
    let kernel = |words: &str| Kernel {
        image: kernel.into(),
        initramfs: Some(initramfs.into()),
        cmdline_extra: words.to_owned(),
    };
    let (dir, mut client) = rig.boot(&machine(MEMORY_MIB), &kernel(""));
    wait_for("the guest to tick", || (ticks(&dir) > 10).then_some(()));
    let from = snapshot(&mut rig, &mut client);
    client.stop().unwrap();
    let expected = content(&from, 256);
    for lazy in [false, true] {
        let (_, mut other) = rig.restore_by(&machine(MEMORY_MIB), &from, lazy);
        let into = snapshot(&mut rig, &mut other);
        assert!(content(&into, 256) == expected, "lazy: {lazy}");
        other.stop().unwrap();
    }
    println!("memory is the same, mapped and by the pager");
    for (lazy, what) in
        [(false, "mapped"), (true, "by the pager"), (true, "by the pager, ahead what was touched first")]
    {
        let since = std::time::Instant::now();
        let (dir, mut other) = rig.restore_by(&machine(MEMORY_MIB), &from, lazy);
        let restored = since.elapsed();
        other.resume().unwrap();
        wait_for("a tick", || (ticks(&dir) > 0).then_some(()));
        println!("{what}: restored after {restored:.1?}, first tick after {:.1?}", since.elapsed());
        wait_for("all memory to be checked", || serial(&dir).contains("\nall ").then_some(()));
        println!("{what}: all memory checked by the guest after {:.1?}", since.elapsed());
        let _ = snapshot(&mut rig, &mut other);
        if lazy && !from.join("working-set").exists() {
            std::fs::copy(dir.join("working-set"), from.join("working-set")).unwrap();
        }
        other.stop().unwrap();
    }
    let (dir, mut other) = rig.restore_by(&machine(MEMORY_MIB), &from, true);
    other.resume().unwrap();
    wait_for("a tick", || (ticks(&dir) > 0).then_some(()));
    kill_pager(&mut other);
    println!("without its pager: {:?}", exit_of(&dir));
    let (dir, _client) = rig.boot(&machine(MEMORY_MIB), &kernel("rebootnow"));
    let exit = exit_of(&dir);
    assert_eq!(exit.reason, ExitReason::GuestReset, "{}", exit.message);
    println!("a reboot: {exit:?}\nlive-lazy: all passed");
}
