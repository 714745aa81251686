//! Whole monitors, as processes, with small real-mode guests: they run on any `/dev/kvm`, be it software.
//!
//! No harness: this executable is the monitor, too, and a monitor forks, which a harness's threads would not survive.
//! Beside the tests: `live` and `live-lazy` (a real kernel), and `measure`.
#![allow(clippy::unwrap_used, reason = "a test may panic")]

mod card;
mod hostile;
mod lazy;
mod live;
mod measure;
mod rig;

use std::path::Path;
use std::process::ExitCode;

use dormouse_vmm::control::{Client, ClientError, Exit, ExitReason, State};
use dormouse_vmm::jail::User;
use rig::{COUNTER, Rig, connect, machine, serial, wait_for};

/// What this executable is called with to do what a monitor may not.
const FORBIDDEN: &str = "run-forbidden";

type Test = (&'static str, fn());

const TESTS: &[Test] = &[
    ("a_guest_runs_pauses_and_resumes", a_guest_runs_pauses_and_resumes),
    ("a_fork_goes_on_from_the_same_instant", a_fork_goes_on_from_the_same_instant),
    ("forks_of_forks_and_many_at_once", forks_of_forks_and_many_at_once),
    (
        "a_fork_of_many_stops_its_source_once_or_fails_whole",
        a_fork_of_many_stops_its_source_once_or_fails_whole,
    ),
    ("a_hundred_children_go_on_from_one_instant", a_hundred_children_go_on_from_one_instant),
    ("a_device_that_gave_up_ends_the_monitor", a_device_that_gave_up_ends_the_monitor),
    ("a_card_goes_from_tap_to_tap", card::a_card_goes_from_tap_to_tap),
    ("a_checkpoint_is_restored_where_it_was", a_checkpoint_is_restored_where_it_was),
    ("incremental_checkpoints_write_what_changed", incremental_checkpoints_write_what_changed),
    ("checkpoint_after_checkpoint_writes_what_changed", checkpoint_after_checkpoint_writes_what_changed),
    ("a_held_checkpoint_stays_paused", a_held_checkpoint_stays_paused),
    ("several_checkpoints_at_once", several_checkpoints_at_once),
    ("lazily_restored_memory_is_the_same", lazy::lazily_restored_memory_is_the_same),
    ("a_lazily_restored_guest_is_one_like_any_other", lazy::a_lazily_restored_guest_is_one_like_any_other),
    ("what_was_touched_first_is_brought_ahead", lazy::what_was_touched_first_is_brought_ahead),
    (
        "without_its_pager_a_monitor_ends_with_the_reason",
        lazy::without_its_pager_a_monitor_ends_with_the_reason,
    ),
    ("a_page_that_cannot_be_read_ends_the_monitor", lazy::a_page_that_cannot_be_read_ends_the_monitor),
    ("a_guest_that_resets_ends_the_monitor", a_guest_that_resets_ends_the_monitor),
    ("what_makes_no_sense_is_refused", what_makes_no_sense_is_refused),
    ("a_damaged_snapshot_is_refused", a_damaged_snapshot_is_refused),
    ("every_thread_of_a_monitor_is_jailed", every_thread_of_a_monitor_is_jailed),
    ("what_the_jail_forbids_ends_the_process", what_the_jail_forbids_ends_the_process),
    ("an_honest_driver_is_served", hostile::an_honest_driver_is_served),
    ("broken_queues_end_the_guest_with_a_reason", hostile::broken_queues_end_the_guest_with_a_reason),
    ("a_nonsensical_set_up_harms_nobody", hostile::a_nonsensical_set_up_harms_nobody),
    ("wild_mmio_harms_nobody", hostile::wild_mmio_harms_nobody),
    ("wild_port_io_harms_nobody", hostile::wild_port_io_harms_nobody),
    ("a_triple_fault_ends_the_guest_with_a_reason", hostile::a_triple_fault_ends_the_guest_with_a_reason),
    ("a_storm_of_exits_starves_no_request", hostile::a_storm_of_exits_starves_no_request),
    ("a_storm_stays_within_its_limit_of_cpu_time", hostile::a_storm_stays_within_its_limit_of_cpu_time),
    (
        "a_stopped_monitor_leaves_its_reason_and_no_process",
        a_stopped_monitor_leaves_its_reason_and_no_process,
    ),
];

fn main() -> ExitCode {
    let args: Vec<String> = std::env::args().skip(1).collect();
    if let [mode, dir, number] = &args[..]
        && mode == rig::MONITOR
    {
        let (dir, user) = (Path::new(dir), rig::user(number.parse().unwrap()));
        return match dormouse_vmm::monitor::run(dir, dir.parent().unwrap(), user) {
            Ok(()) => ExitCode::SUCCESS,
            Err(error) => {
                eprintln!("{error}: {:?}", std::error::Error::source(&error).map(ToString::to_string));
                ExitCode::FAILURE
            }
        };
    }
    if let [mode, what] = &args[..]
        && mode == FORBIDDEN
    {
        return forbidden(what);
    }
    if let [mode, rest @ ..] = &args[..]
        && mode == "live"
    {
        live::live(rest);
        return ExitCode::SUCCESS;
    }
    if let [mode, kernel, initramfs] = &args[..]
        && mode == "live-lazy"
    {
        lazy::live(kernel, initramfs);
        return ExitCode::SUCCESS;
    }
    if args.first().is_some_and(|mode| mode == "measure") {
        measure::measure(args.iter().any(|arg| arg == "--json"));
        return ExitCode::SUCCESS;
    }
    let has = |flag: &str| args.iter().any(|arg| arg == flag);
    if has("--list") {
        // As nextest asks for it, first all tests and then those that are left out by default: there are none.
        TESTS.iter().filter(|_| !has("--ignored")).for_each(|(name, _)| println!("{name}: test"));
        return ExitCode::SUCCESS;
    }
    if !Path::new("/dev/kvm").exists() {
        println!("no /dev/kvm: the monitor's tests cannot run here");
        return ExitCode::FAILURE;
    }
    let filter = args.iter().find(|arg| !arg.starts_with('-'));
    let wanted = |name: &str| {
        filter
            .is_none_or(|filter| if has("--exact") { name == filter } else { name.contains(filter.as_str()) })
    };
    let mut passed = 0;
    for (name, test) in TESTS.iter().filter(|(name, _)| wanted(name)) {
        println!("test {name} ...");
        test();
        passed += 1;
    }
    println!("test result: ok. {passed} passed; 0 failed");
    ExitCode::SUCCESS
}

/// The numbers that a guest has written whole.
fn numbers(text: &str) -> Vec<u64> {
    let whole = text.rfind('\n').map_or(0, |end| end + 1);
    text[..whole].lines().map(|line| u64::from_str_radix(line, 16).expect("a number")).collect()
}

fn grow(dir: &Path) {
    let before = serial(dir).len();
    wait_for("the counter to go on", || (serial(dir).len() > before + 40).then_some(()));
}

/// What the guest wrote before it was forked or saved, and what its copy wrote, are one sequence without a gap.
fn assert_continues(before: &str, after: &str) {
    let all = numbers(&format!("{before}{after}"));
    for pair in all.windows(2) {
        assert_eq!(pair[1], pair[0] + 1, "in {} numbers", all.len());
    }
}

fn counting(rig: &mut Rig, memory_mib: u32, dirty_mib: u32) -> (std::path::PathBuf, Client) {
    let kernel = rig.probe(COUNTER, dirty_mib);
    let (dir, client) = rig.boot(&machine(memory_mib), &kernel);
    grow(&dir);
    (dir, client)
}

fn a_guest_runs_pauses_and_resumes() {
    let mut rig = Rig::new();
    let (dir, mut client) = counting(&mut rig, 16, 4);
    for _ in 0..20 {
        client.pause().unwrap();
        client.pause().unwrap();
        assert_eq!(client.status().unwrap().state, State::Paused);
        let still = serial(&dir);
        std::thread::yield_now();
        assert_eq!(serial(&dir), still);
        client.resume().unwrap();
        grow(&dir);
    }
    assert_continues(&serial(&dir), "");
    let status = client.status().unwrap();
    assert_eq!((status.vcpus, status.memory_mib, status.scribes), (1, 16, 0));
    assert!(status.cpu_us > 0);
}

fn a_fork_goes_on_from_the_same_instant() {
    let mut rig = Rig::new();
    let (dir, mut client) = counting(&mut rig, 32, 16);
    for _ in 0..10 {
        // Paused around it: the log says then exactly how far the guest was.
        client.pause().unwrap();
        let before = serial(&dir);
        let (children, _) = rig.fork(&mut client, 1);
        assert_eq!(serial(&children[0]), "", "it is paused");
        let mut child = connect(&children[0]);
        assert_eq!(child.status().unwrap().state, State::Paused);
        client.resume().unwrap();
        child.resume().unwrap();
        grow(&children[0]);
        grow(&dir);
        assert_continues(&before, &serial(&children[0]));
        child.stop().unwrap();
    }
    assert_continues(&serial(&dir), "");
}

fn forks_of_forks_and_many_at_once() {
    let mut rig = Rig::new();
    let (dir, mut client) = counting(&mut rig, 16, 4);
    let (children, forked) = rig.fork(&mut client, 8);
    assert_eq!(forked.pids.len(), 8);
    grow(&dir);
    let mut first = connect(&children[0]);
    let (grandchildren, _) = rig.fork(&mut first, 2);
    for dir in children.iter().chain(&grandchildren) {
        connect(dir).resume().unwrap();
    }
    for dir in children.iter().chain(&grandchildren) {
        grow(dir);
        // The first number may have been begun before.
        assert_continues(serial(dir).split_once('\n').unwrap().1, "");
    }
    // Each has a life of its own.
    client.stop().unwrap();
    let mut grandchild = connect(&grandchildren[0]);
    grow(&grandchildren[0]);
    assert_eq!(grandchild.status().unwrap().state, State::Running);
    let (_, pid) = grandchild.hello().unwrap();
    assert!(!forked.pids.contains(&pid));
}

/// Processes that were started as the monitor of `dir`, or forked off such a one; no zombies.
fn processes(dir: &Path) -> usize {
    let of_dir = |entry: &std::fs::DirEntry| {
        let words = std::fs::read(entry.path().join("cmdline")).unwrap_or_default();
        words.split(|byte| *byte == 0).any(|word| word == dir.as_os_str().as_encoded_bytes())
    };
    std::fs::read_dir("/proc").unwrap().flatten().filter(of_dir).count()
}

fn a_fork_of_many_stops_its_source_once_or_fails_whole() {
    let mut rig = Rig::new();
    let (dir, mut client) = counting(&mut rig, 300, 256);
    let (_, one) = rig.fork(&mut client, 1);
    let (_, many) = rig.fork(&mut client, 16);
    // Sixteen forks in a row would be sixteen times as long; much room for a host that is busy.
    assert!(many.stopped_us < one.stopped_us * 8 + 20_000, "{one:?} {many:?}");
    let before = processes(&dir);
    assert_eq!(before, 18);
    let mut children: Vec<_> =
        (0..5).map(|_| dormouse_vmm::control::ForkChild { dir: rig.folder() }).collect();
    for bad in [0, 2, 4] {
        use std::os::fd::AsFd;
        children[bad].dir = "/nowhere/at/all".into();
        let fds: Vec<_> = (0..5).flat_map(|_| rig.carrier()).collect();
        let fds: Vec<_> = fds.iter().map(AsFd::as_fd).collect();
        let error = client.fork(children.clone(), &fds).unwrap_err();
        assert!(error.to_string().contains(&format!("child {bad}")), "{error}");
        children = children.iter().map(|_| dormouse_vmm::control::ForkChild { dir: rig.folder() }).collect();
    }
    wait_for("the others to end", || (processes(&dir) == before).then_some(()));
    grow(&dir);
}

fn a_hundred_children_go_on_from_one_instant() {
    let mut rig = Rig::new();
    let (dir, mut client) = counting(&mut rig, 16, 4);
    let before = serial(&dir).len();
    let (children, forked) = rig.fork(&mut client, 100);
    assert_eq!(forked.pids.len(), 100);
    let first = |dir: &Path| {
        let mut child = connect(dir);
        child.resume().unwrap();
        grow(dir);
        child.stop().unwrap();
        serial(dir)
    };
    let instants: Vec<u64> = children
        .iter()
        .map(|child| {
            let text = first(child);
            // How much of a number was written already is the same for all, too.
            let begun = 9 - (text.find('\n').unwrap() + 1) as u64;
            numbers(text.split_once('\n').unwrap().1)[0] * 9 - begun
        })
        .collect();
    assert!(instants.iter().all(|instant| *instant == instants[0]), "{instants:?}");
    assert!(serial(&dir).len() > before);
    grow(&dir);
    assert_continues(&serial(&dir), "");
}

/// A snapshot of a guest that broke a device of its own, as none is made any more.
fn a_device_that_gave_up_ends_the_monitor() {
    use dormouse_snapshot::devices::virtio::VirtioState;
    use dormouse_snapshot::devices::{Envelope, SectionKind};
    let mut rig = Rig::new();
    let (_, mut client) = counting(&mut rig, 16, 0);
    let from = rig.folder();
    client.checkpoint(from.clone(), false).unwrap();
    let path = from.join("devices");
    let good = Envelope::decode(&std::fs::read(&path).unwrap()).unwrap();
    let mut bad = Envelope::new();
    for (kind, count) in [(SectionKind::Inventory, 1), (SectionKind::Platform, 1), (SectionKind::Virtio, 3)] {
        for index in 0..count {
            let mut bytes = good.get(kind, index).unwrap().to_vec();
            if kind == SectionKind::Virtio && index == 1 {
                let mut state = VirtioState::decode(&bytes).unwrap();
                state.needs_reset = true;
                bytes = state.encode().unwrap();
            }
            bad.put(kind, index, bytes);
        }
    }
    std::fs::write(&path, bad.encode().unwrap()).unwrap();
    let (dir, _client) = rig.restore(&machine(16), &from);
    let exit = exit_of(&dir);
    assert_eq!(exit.reason, ExitReason::DeviceFailed);
    assert_eq!(exit.message, "a device gave up: rng: it had given up before");
}

fn a_checkpoint_is_restored_where_it_was() {
    let mut rig = Rig::new();
    let (dir, mut client) = counting(&mut rig, 32, 16);
    client.pause().unwrap();
    let before = serial(&dir);
    let into = rig.folder();
    let done = client.checkpoint(into.clone(), false).unwrap();
    assert!(done.memory_bytes >= 16 << 20 && done.memory_bytes < 18 << 20, "{done:?}");
    assert_eq!(done.files.iter().map(|file| file.name.as_str()).collect::<Vec<_>>(), ["devices", "memory.0"]);
    drop(client);
    for _ in 0..2 {
        let (restored, mut other) = rig.restore(&machine(32), &into);
        assert_eq!(other.status().unwrap().state, State::Paused);
        other.resume().unwrap();
        grow(&restored);
        assert_continues(&before, &serial(&restored));
    }
}

fn incremental_checkpoints_write_what_changed() {
    let mut rig = Rig::new();
    let (_, mut client) = counting(&mut rig, 32, 16);
    let mut from = rig.folder();
    client.checkpoint(from.clone(), false).unwrap();
    let mut written = String::new();
    for generation in 1..12 {
        let (dir, mut other) = rig.restore(&machine(32), &from);
        other.resume().unwrap();
        grow(&dir);
        other.pause().unwrap();
        written.push_str(&serial(&dir));
        from = rig.folder();
        let done = other.checkpoint(from.clone(), true).unwrap();
        let layers = done.files.iter().filter(|file| file.name.starts_with("memory.")).count();
        assert!(layers <= 8, "{layers} layers");
        if layers > 1 {
            // The page with the counter, and what the stack touches.
            assert!(done.memory_bytes <= 16 << 10, "{} bytes in generation {generation}", done.memory_bytes);
            assert!(done.files.iter().filter(|file| file.shared).count() == layers - 1);
        }
        other.stop().unwrap();
    }
    assert_continues(written.split_once('\n').unwrap().1, "");
}

fn checkpoint_after_checkpoint_writes_what_changed() {
    let mut rig = Rig::new();
    let (dir, mut client) = counting(&mut rig, 64, 48);
    for round in 0..12 {
        client.pause().unwrap();
        let before = serial(&dir);
        let into = rig.folder();
        let done = client.checkpoint(into.clone(), false).unwrap();
        client.resume().unwrap();
        grow(&dir);
        let layers = done.files.iter().filter(|file| file.name.starts_with("memory.")).count();
        assert!(layers <= 8);
        if layers > 1 {
            assert!(done.memory_bytes <= 16 << 10, "{} bytes in round {round}", done.memory_bytes);
        }
        if round % 5 == 4 {
            let (restored, mut other) = rig.restore(&machine(64), &into);
            other.resume().unwrap();
            grow(&restored);
            assert_continues(&before, &serial(&restored));
            // A child's next snapshot, too, lies on its source's last one.
            let (children, _) = rig.fork(&mut client, 1);
            let mut child = connect(&children[0]);
            // Snapshots may go: what is needed of them is kept.
            std::fs::remove_dir_all(&into).unwrap();
            let from = rig.folder();
            let done = child.checkpoint(from.clone(), false).unwrap();
            assert!(done.memory_bytes <= 16 << 10 || done.files.len() == 2, "{done:?}");
            assert!(done.files.iter().filter(|file| file.shared).count() + 2 >= done.files.len(), "{done:?}");
            let (restored, mut other) = rig.restore(&machine(64), &from);
            other.resume().unwrap();
            grow(&restored);
        }
    }
}

fn a_held_checkpoint_stays_paused() {
    let mut rig = Rig::new();
    let (dir, mut client) = counting(&mut rig, 16, 4);
    client.checkpoint(rig.folder(), true).unwrap();
    assert_eq!(client.status().unwrap().state, State::Paused);
    client.resume().unwrap();
    grow(&dir);
    client.checkpoint(rig.folder(), false).unwrap();
    assert_eq!(client.status().unwrap().state, State::Running);
    // It cannot be written there: the guest runs on as if nothing had been.
    let error = client.checkpoint("/nowhere/at/all".into(), true).unwrap_err();
    assert!(matches!(&error, ClientError::Refused { .. }), "{error}");
    client.resume().unwrap();
    grow(&dir);
    assert_continues(&serial(&dir), "");
}

fn several_checkpoints_at_once() {
    let mut rig = Rig::new();
    let (dir, _client) = counting(&mut rig, 64, 48);
    let folders: Vec<_> = (0..4).map(|_| rig.folder()).collect();
    std::thread::scope(|scope| {
        for into in &folders {
            let dir = &dir;
            scope.spawn(move || connect(dir).checkpoint(into.clone(), false).unwrap());
        }
    });
    for into in &folders {
        let (restored, mut other) = rig.restore(&machine(64), into);
        other.resume().unwrap();
        grow(&restored);
    }
}

fn exit_of(dir: &Path) -> Exit {
    let bytes = wait_for("exit.json", || std::fs::read(dir.join("exit.json")).ok());
    serde_json::from_slice(&bytes).unwrap()
}

fn a_guest_that_resets_ends_the_monitor() {
    let mut rig = Rig::new();
    // mov al,0xfe; out 0x64,al; 1: jmp 1b
    let kernel = rig.probe(&[0xb0, 0xfe, 0xe6, 0x64, 0xeb, 0xfe], 0);
    let (dir, _client) = rig.boot(&machine(16), &kernel);
    let exit = exit_of(&dir);
    assert_eq!(exit.reason, ExitReason::GuestReset, "{}", exit.message);
    // mov dx,0x604; mov ax,0x3400; out dx,ax; 1: jmp 1b
    let kernel = rig.probe(&[0xba, 0x04, 0x06, 0xb8, 0x00, 0x34, 0xef, 0xeb, 0xfe], 0);
    let (dir, _client) = rig.boot(&machine(16), &kernel);
    assert_eq!(exit_of(&dir).reason, ExitReason::GuestPowerOff);
}

fn what_makes_no_sense_is_refused() {
    let mut rig = Rig::new();
    let (_, mut empty) = rig.start();
    assert_eq!(empty.status().unwrap().state, State::Empty);
    let refused = |result: Result<(), ClientError>| {
        assert!(matches!(result, Err(ClientError::Refused { .. })), "{result:?}");
    };
    refused(empty.pause());
    refused(empty.resume());
    refused(empty.checkpoint(rig.folder(), false).map(drop));
    let (dir, mut client) = counting(&mut rig, 16, 0);
    let [input, output] = rig.carrier();
    let kernel = rig.probe(COUNTER, 1);
    use std::os::fd::AsFd;
    refused(client.boot(machine(16), kernel, &[input.as_fd(), output.as_fd()]));
    // A child that cannot be: the source goes on, and no process stays.
    let children = vec![dormouse_vmm::control::ForkChild { dir: "/nowhere/at/all".into() }];
    refused(client.fork(children, &[input.as_fd(), output.as_fd()]).map(drop));
    grow(&dir);
    client.carrier(&[input.as_fd(), output.as_fd()]).unwrap();
    grow(&dir);
}

fn a_damaged_snapshot_is_refused() {
    let mut rig = Rig::new();
    let (_, mut client) = counting(&mut rig, 16, 4);
    let from = rig.folder();
    client.checkpoint(from.clone(), false).unwrap();
    let path = from.join("devices");
    let good = std::fs::read(&path).unwrap();
    let mut check = |what: &str| {
        use std::os::fd::AsFd;
        let (_, mut other) = rig.start();
        let [input, output] = rig.carrier();
        let result = other.restore(machine(16), from.clone(), false, &[input.as_fd(), output.as_fd()]);
        let refused = matches!(
            &result,
            Err(ClientError::Refused { code: dormouse_vmm::control::ErrorCode::BadSnapshot, .. })
        );
        assert!(refused, "{what}: {result:?}");
    };
    for at in [0, 20, 40, 100, good.len() - 1] {
        let mut bad = good.clone();
        bad[at] ^= 1;
        std::fs::write(&path, bad).unwrap();
        check("a changed byte");
    }
    std::fs::write(&path, &good).unwrap();
    let memory = std::fs::File::options().write(true).open(from.join("memory.0")).unwrap();
    memory.set_len((16 << 20) - 4096).unwrap();
    check("a shorter memory");
}

fn a_stopped_monitor_leaves_its_reason_and_no_process() {
    let mut rig = Rig::new();
    let (dir, mut client) = counting(&mut rig, 16, 4);
    let (_, pid) = client.hello().unwrap();
    let (children, forked) = rig.fork(&mut client, 1);
    connect(&children[0]).stop().unwrap();
    assert_eq!(exit_of(&children[0]).reason, ExitReason::Stopped);
    // The parent takes its child's exit status: no zombie stays.
    let proc = std::path::PathBuf::from(format!("/proc/{}", forked.pids[0]));
    wait_for("the child to be gone", || (!proc.exists()).then_some(()));
    client.stop().unwrap();
    assert_eq!(exit_of(&dir).reason, ExitReason::Stopped);
    let state = || std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    wait_for("the monitor to end", || (state().contains(") Z ") || state().is_empty()).then_some(()));
}

fn every_thread_of_a_monitor_is_jailed() {
    let mut rig = Rig::new();
    let image = rig.root.path().join("image");
    std::fs::write(&image, vec![0; 1 << 20]).unwrap();
    let disks = vec![dormouse_vmm::control::Disk { layers: vec![image], read_only: false }];
    let kernel = rig.probe(COUNTER, 0);
    let (dir, mut client) = rig.boot(&dormouse_vmm::control::Machine { disks, ..machine(16) }, &kernel);
    grow(&dir);
    let (children, forked) = rig.fork(&mut client, 1);
    connect(&children[0]).resume().unwrap();
    let (_, pid) = client.hello().unwrap();
    let log = std::fs::read_link(format!("/proc/{}/fd/2", forked.pids[0])).unwrap();
    assert_eq!(log, children[0].join("monitor.log"));
    let user = rig::user(1);
    let protected = std::fs::read_to_string("/proc/sys/fs/protected_hardlinks").unwrap().trim() != "0";
    for pid in [pid, forked.pids[0]] {
        // A thread gives itself its name, and only then its filter.
        for name in ["vcpu0", "disk0"] {
            wait_for(name, || filters(pid, name).is_some_and(|filters| filters == 3).then_some(()));
        }
        let tasks: Vec<_> = std::fs::read_dir(format!("/proc/{pid}/task")).unwrap().collect();
        for task in tasks {
            let status = std::fs::read_to_string(task.unwrap().path().join("status")).unwrap();
            let has = |line: &str| status.lines().any(|other| other == line);
            // KVM's own helper threads are the kernel's and make no system calls.
            if status.starts_with("Name:\tkvm-") {
                continue;
            }
            assert!(has("Seccomp:\t2") && has("NoNewPrivs:\t1"), "{status}");
            let capabilities = format!("{:016x}", if user.is_some() && protected { 1 << 3 } else { 0 });
            for set in ["CapPrm", "CapEff", "CapBnd"] {
                assert!(has(&format!("{set}:\t{capabilities}")), "{status}");
            }
            if let Some(User { uid, gid }) = user {
                assert!(has(&format!("Uid:\t{uid}\t{uid}\t{uid}\t{uid}")), "{status}");
                assert!(has(&format!("Gid:\t{gid}\t{gid}\t{gid}\t{gid}")) && has("Groups:\t "), "{status}");
            }
        }
        if user.is_some() {
            assert_sees_little(pid, rig.root.path());
        }
    }
}

/// The process has namespaces of its own, and in its root folder there is only what it needs.
fn assert_sees_little(pid: u32, within: &Path) {
    let space = |of: &str, kind: &str| std::fs::read_link(format!("/proc/{of}/ns/{kind}")).unwrap();
    for kind in ["mnt", "net", "ipc", "uts"] {
        assert_ne!(space(&pid.to_string(), kind), space("self", kind), "{kind}");
    }
    let root = std::path::PathBuf::from(format!("/proc/{pid}/root"));
    let first = within.components().nth(1).unwrap().as_os_str().to_owned();
    let mut there: Vec<_> =
        std::fs::read_dir(&root).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    there.sort();
    assert_eq!(there, ["proc".into(), first]);
    let mounts = std::fs::read_to_string(format!("/proc/{pid}/mountinfo")).unwrap();
    assert_eq!(mounts.lines().count(), 3, "{mounts}");
    assert!(mounts.lines().all(|line| line.contains("nosuid,nodev,noexec")), "{mounts}");
    let limits = std::fs::read_to_string(format!("/proc/{pid}/limits")).unwrap();
    let limit = |what: &str| {
        let line = limits.lines().find_map(|line| line.strip_prefix(what)).unwrap();
        line.split_ascii_whitespace().nth(1).unwrap().to_owned()
    };
    assert_eq!(limit("Max core file size"), "0");
    assert_eq!(limit("Max locked memory"), "0");
    // The guest's memory, 16 MiB, and 64 MiB.
    assert_eq!(limit("Max file size"), (80_u32 << 20).to_string());
    assert!(limit("Max open files").parse::<u32>().unwrap() <= 4096);
}

/// How many filters a thread has: two as all threads, and one of its own.
fn filters(pid: u32, name: &str) -> Option<u32> {
    let tasks = std::fs::read_dir(format!("/proc/{pid}/task")).unwrap().flatten();
    let statuses = tasks.filter_map(|task| std::fs::read_to_string(task.path().join("status")).ok());
    let status = statuses.into_iter().find(|status| status.starts_with(&format!("Name:\t{name}\n")))?;
    status.lines().find_map(|line| line.strip_prefix("Seccomp_filters:")?.trim().parse().ok())
}

/// Only comes back if it was allowed. With `as user` at its end: as somebody else.
fn forbidden(what: &str) -> ExitCode {
    let within = std::env::temp_dir().join("within");
    std::fs::create_dir_all(&within).unwrap();
    rig::share(&within);
    let (what, user) = match what.strip_suffix(" as user") {
        Some(what) => (what, rig::user(1)),
        None => (what, None),
    };
    dormouse_vmm::jail::enter(&within, user).unwrap();
    let write = |dir: &Path| std::fs::write(dir.join("file"), "x");
    match what {
        "files" => {
            write(&within).unwrap();
            std::fs::rename(within.join("file"), within.join("other")).unwrap();
            assert!(write(&std::env::temp_dir()).is_err());
            let hidden = ["/etc/passwd", "/dev/kvm", "/dev/null", "/proc/1/environ", "/proc/kcore"];
            for path in hidden.iter().filter(|_| user.is_some()) {
                assert!(std::fs::File::open(path).is_err(), "{path}");
            }
            assert!(std::fs::File::options().write(true).open("/proc/self/oom_score_adj").is_err());
            std::fs::read("/proc/self/stat").unwrap();
        }
        "nothing" => println!("still here"),
        "execute" => {
            drop(std::os::unix::process::CommandExt::exec(&mut std::process::Command::new("/bin/true")))
        }
        "network" => drop(std::net::UdpSocket::bind("127.0.0.1:0")),
        "mount" => drop(rustix::mount::unmount("/proc", rustix::mount::UnmountFlags::empty())),
        "mode" => {
            drop(std::fs::set_permissions(&within, std::os::unix::fs::PermissionsExt::from_mode(0o777)))
        }
        "owner" => drop(std::os::unix::fs::chown(&within, Some(0), Some(0))),
        "user" => drop(rustix::thread::set_thread_uid(rustix::process::Uid::from_raw(0))),
        "attributes" => drop(rustix::fs::ioctl_setflags(
            std::fs::File::open(&within).unwrap(),
            rustix::fs::IFlags::NOATIME,
        )),
        "namespace" => {
            let spaces = rustix::thread::UnshareFlags::NEWUSER;
            #[allow(unsafe_code, reason = "the safe form is deprecated")]
            // SAFETY: no descriptor table is unshared.
            let _ = unsafe { rustix::thread::unshare_unsafe(spaces) };
        }
        other => panic!("{other}"),
    }
    ExitCode::SUCCESS
}

fn what_the_jail_forbids_ends_the_process() {
    let root = tempfile::tempdir().unwrap();
    let code = |what: &str| {
        let mut command = std::process::Command::new(std::env::current_exe().unwrap());
        command.env("TMPDIR", root.path());
        let output = command.args([FORBIDDEN, what]).output().unwrap();
        (output.status.code(), String::from_utf8_lossy(&output.stderr).into_owned())
    };
    for user in ["", " as user"] {
        for what in ["nothing", "files"] {
            // Without Landlock it takes the user to be kept from files.
            if what == "files" && user.is_empty() && !dormouse_vmm::jail::confines_files() {
                println!("this kernel has no Landlock: files are not looked at without a user");
                continue;
            }
            let (status, said) = code(&format!("{what}{user}"));
            assert_eq!(status, Some(0), "{what}{user}: {said}");
        }
        for what in ["execute", "network", "mount", "mode", "owner", "user", "attributes", "namespace"] {
            let (status, said) = code(&format!("{what}{user}"));
            assert!(status == Some(159) && said.contains("may not make"), "{what}{user}: {status:?} {said}");
        }
    }
}
