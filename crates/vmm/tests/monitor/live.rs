//! With a real kernel, where KVM can run one: `monitor live KERNEL INITRAMFS DISK [CMDLINE]`.
//!
//! The guest's init writes, reads and checks a file on the disk and 64 MiB of memory, and writes `tick N …` to the
//! serial port again and again, or `FAIL` and why. It connects to the carrier's port and sends back what it gets there.

use std::path::{Path, PathBuf};
use std::time::Instant;

use dormouse_vmm::control::{Client, Disk, Kernel, Machine};

use crate::rig::{Rig, connect, serial, wait_for};

/// More than all buffers on the way hold.
const TALK_BYTES: usize = 1 << 20;

fn ticks(dir: &Path) -> usize {
    let text = serial(dir);
    assert!(!text.contains("FAIL"), "{}: {text}", dir.display());
    assert!(!dir.join("exit.json").exists(), "{}: {text}", dir.display());
    text.matches("\ntick ").count()
}

/// The guest does something, at least so often.
fn goes_on(dir: &Path, times: usize) {
    let before = ticks(dir);
    wait_for("the guest to go on", || (ticks(dir) >= before + times).then_some(()));
}

fn ms(since: Instant) -> f64 {
    since.elapsed().as_secs_f64() * 1e3
}

fn resumed(what: &str, dir: &Path) -> Client {
    let mut client = connect(dir);
    let since = Instant::now();
    let before = serial(dir).len();
    client.resume().expect("a resume");
    wait_for("a first sign of life", || (serial(dir).len() > before).then_some(()));
    let life = ms(since);
    // The guest's own largest gap between two turns of its loop tells whether it stood still or nobody ran it.
    let lines = || serial(dir).split('\n').skip(1).take(2).map(str::to_owned).collect::<Vec<_>>();
    let seen = wait_for("two lines", || (serial(dir).matches('\n').count() > 2).then(lines));
    println!("{what}: first sign of life {life:.1} ms after resume; {seen:?} after {:.1} ms", ms(since));
    client
}

pub fn live(args: &[String]) {
    let [kernel, initramfs, disk, rest @ ..] = args else { panic!("KERNEL INITRAMFS DISK [CMDLINE]") };
    let kernel =
        Kernel { image: kernel.into(), initramfs: Some(initramfs.into()), cmdline_extra: rest.join(" ") };
    let disks = vec![Disk { layers: vec![PathBuf::from(disk)], read_only: false }];
    let machine =
        Machine { vcpus: 2, memory_mib: 256, disks, cpu_template: None, net: false, huge_pages: true };
    let mut rig = Rig::new();
    let since = Instant::now();
    let (dir, mut client) = rig.boot(&machine, &kernel);
    goes_on(&dir, 3);
    println!("boot to the third tick: {:.0} ms", ms(since));
    rig.talk(0, TALK_BYTES);
    println!("the carrier carries {TALK_BYTES} bytes there and back");
    print_load(&mut client);
    for _ in 0..5 {
        let since = Instant::now();
        client.pause().expect("a pause");
        println!("pause: {:.2} ms", ms(since));
        client.resume().expect("a resume");
        goes_on(&dir, 1);
    }
    fork_and_fork_again(&mut rig, &dir, &mut client);
    let first = rig.folder();
    let since = Instant::now();
    let done = client.checkpoint(first.clone(), false).expect("a checkpoint");
    println!(
        "checkpoint: stopped {} us, {} KiB, all {:.0} ms",
        done.stopped_us,
        done.memory_bytes >> 10,
        ms(since)
    );
    goes_on(&dir, 2);
    chain(&mut rig, &machine, first);
    many_checkpoints(&mut rig, &machine, &dir, &mut client);
    goes_on(&dir, 2);
    println!("live: all passed");
}

/// What each thread of the monitor uses of a processor.
fn print_load(client: &mut Client) {
    let (_, pid) = client.hello().expect("a greeting");
    let ticks = || -> Vec<(String, u64)> {
        let tasks = std::fs::read_dir(format!("/proc/{pid}/task")).expect("its threads").flatten();
        let stats = tasks.filter_map(|task| std::fs::read_to_string(task.path().join("stat")).ok());
        let used = |stat: String| {
            let (head, tail) = stat.rsplit_once(") ")?;
            let words: Vec<&str> = tail.split(' ').collect();
            let of = |word: usize| words.get(word)?.parse::<u64>().ok();
            Some((head.rsplit_once('(')?.1.to_owned(), of(11)? + of(12)?))
        };
        stats.filter_map(used).collect()
    };
    let (before, since) = (ticks(), Instant::now());
    std::thread::sleep(std::time::Duration::from_secs(5));
    let seconds = since.elapsed().as_secs_f64();
    for ((name, before), (_, after)) in before.into_iter().zip(ticks()) {
        // Clock ticks are hundredths of a second on every Linux of this architecture.
        println!("thread {name}: {:.0} % of a processor", (after - before) as f64 / seconds);
    }
}

fn fork_and_fork_again(rig: &mut Rig, dir: &Path, client: &mut Client) {
    for count in [1, 1, 4] {
        let since = Instant::now();
        let (children, forked) = rig.fork(client, count);
        println!("fork of {count}: stopped {} us, answered after {:.1} ms", forked.stopped_us, ms(since));
        let mut clients: Vec<Client> = children.iter().map(|child| resumed("fork", child)).collect();
        for (number, child) in children.iter().enumerate() {
            goes_on(child, 2);
            rig.talk(rig.carriers() - count + number, TALK_BYTES);
        }
        goes_on(dir, 2);
        rig.talk(0, TALK_BYTES);
        let (grandchildren, _) = rig.fork(&mut clients[0], 1);
        let mut grandchild = resumed("fork of a fork", &grandchildren[0]);
        goes_on(&grandchildren[0], 2);
        goes_on(&children[0], 2);
        grandchild.stop().expect("a stop");
        for client in &mut clients {
            client.stop().expect("a stop");
        }
    }
}

/// So many that the layers of disk and memory are made one, while the guest runs on.
fn many_checkpoints(rig: &mut Rig, machine: &Machine, dir: &Path, client: &mut Client) {
    let mut last = PathBuf::new();
    for number in 1..=12 {
        if last.is_dir() {
            std::fs::remove_dir_all(&last).expect("the snapshot is removed");
        }
        last = rig.folder();
        let since = Instant::now();
        let done = client.checkpoint(last.clone(), false).expect("a checkpoint");
        let layers = |prefix: &str| done.files.iter().filter(|file| file.name.starts_with(prefix)).count();
        let (memory, disk) = (layers("memory"), layers("disk"));
        assert!(memory <= 8 && disk <= 8, "{memory} and {disk} layers");
        let (stopped, kib) = (done.stopped_us, done.memory_bytes >> 10);
        let all = ms(since);
        println!(
            "checkpoint {number}: stopped {stopped} us, {kib} KiB new, {memory}+{disk} layers, all {all:.0} ms"
        );
        goes_on(dir, 2);
    }
    let (restored, _) = rig.restore(machine, &last);
    let mut other = resumed("restore of the last", &restored);
    goes_on(&restored, 3);
    rig.talk(rig.carriers() - 1, TALK_BYTES);
    other.stop().expect("a stop");
}

/// Restore, go on, checkpoint, restore that…
fn chain(rig: &mut Rig, machine: &Machine, mut from: PathBuf) {
    for generation in 1..=4 {
        let since = Instant::now();
        let (dir, mut client) = rig.restore(machine, &from);
        println!("restore {generation}: {:.1} ms", ms(since));
        drop(resumed("restore", &dir));
        goes_on(&dir, 3);
        rig.talk(rig.carriers() - 1, TALK_BYTES);
        from = rig.folder();
        let since = Instant::now();
        let done = client.checkpoint(from.clone(), generation % 2 == 0).expect("a checkpoint");
        let (stopped, kib) = (done.stopped_us, done.memory_bytes >> 10);
        println!("checkpoint {generation}: stopped {stopped} us, {kib} KiB new, all {:.0} ms", ms(since));
        if generation % 2 == 1 {
            goes_on(&dir, 2);
        }
        client.stop().expect("a stop");
    }
}
