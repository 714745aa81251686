//! How long forks and checkpoints take: `monitor measure [--json]`. A real-mode guest, so that any `/dev/kvm` will do.

use std::time::{Duration, Instant};

use dormouse_vmm::control::Client;

use crate::rig::{COUNTER, Rig, connect, machine, serial, wait_for};

const ROUNDS: usize = 10;
const DIRTY_MIB: [u32; 3] = [64, 256, 1024];

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

fn millis(duration: Duration) -> f64 {
    duration.as_secs_f64() * 1e3
}

/// Figures, as a table or (`json`) as a list of objects with `name`, `ms` and `limit_ms`.
pub fn measure(json: bool) {
    let mut figures = Vec::new();
    if !json {
        println!(
            "| dirty MiB | pages | fork stops source ms | answered ms | child's first output ms | child's own KiB \
             | checkpoint stops ms |"
        );
        println!("|---|---|---|---|---|---|---|");
    }
    for dirty_mib in DIRTY_MIB {
        for huge_pages in [true, false] {
            let row = row(dirty_mib, huge_pages);
            let pages = if huge_pages { "huge" } else { "small" };
            let Row { stopped, answered, output, own, checkpoint } = row;
            if !json {
                println!(
                    "| {dirty_mib} | {pages} | {stopped:.2} | {answered:.1} | {output:.1} | {own:.0} | {checkpoint:.2} |"
                );
            }
            // The promise is made for a whole GiB; what is smaller has the same overhead.
            let limit_ms = (dirty_mib == 1024).then_some(if huge_pages { 2.0 } else { 20.0 });
            for (name, ms, limit_ms) in [
                ("fork_stop", stopped, limit_ms),
                ("fork_answered", answered, None),
                ("fork_first_output", output, None),
                ("checkpoint_stop", checkpoint, limit_ms),
            ] {
                let name = format!("microvm_{name}_{dirty_mib}_mib_{pages}_pages");
                figures.push(serde_json::json!({ "name": name, "ms": ms, "limit_ms": limit_ms }));
            }
        }
    }
    if json {
        println!("{}", serde_json::Value::from(figures));
    }
}

/// Medians; milliseconds, and KiB of the child's own memory.
struct Row {
    stopped: f64,
    answered: f64,
    output: f64,
    own: f64,
    checkpoint: f64,
}

fn row(dirty_mib: u32, huge_pages: bool) -> Row {
    let mut rig = Rig::new();
    let mut shape = machine(dirty_mib + 64);
    shape.huge_pages = huge_pages;
    let kernel = rig.probe(COUNTER, dirty_mib);
    let (dir, mut client) = rig.boot(&shape, &kernel);
    wait_for("the counter", || (serial(&dir).len() > 100).then_some(()));
    let (mut stopped, mut answered, mut output) = (vec![], vec![], vec![]);
    let (mut own, mut checkpoints) = (vec![], vec![]);
    for _ in 0..ROUNDS {
        let since = Instant::now();
        let (children, forked) = rig.fork(&mut client, 1);
        answered.push(millis(since.elapsed()));
        stopped.push(millis(Duration::from_micros(forked.stopped_us)));
        let mut child = connect(&children[0]);
        child.resume().expect("a resume");
        wait_for("the child", || (!serial(&children[0]).is_empty()).then_some(()));
        output.push(millis(since.elapsed()));
        own.push(own_kib(forked.pids[0]));
        child.stop().expect("a stop");
    }
    for _ in 0..ROUNDS {
        checkpoints.push(checkpoint(&mut rig, &mut client));
    }
    let [stopped, answered, output, own, checkpoint] =
        [stopped, answered, output, own, checkpoints].map(median);
    Row { stopped, answered, output, own, checkpoint }
}

/// Memory that the process has for itself.
fn own_kib(pid: u32) -> f64 {
    let text = std::fs::read_to_string(format!("/proc/{pid}/smaps_rollup")).expect("its memory");
    let own = text.lines().filter(|line| line.starts_with("Private_"));
    own.filter_map(|line| line.split_ascii_whitespace().nth(1)?.parse::<f64>().ok()).sum()
}

fn checkpoint(rig: &mut Rig, client: &mut Client) -> f64 {
    let into = rig.folder();
    let done = client.checkpoint(into.clone(), false).expect("a checkpoint");
    std::fs::remove_dir_all(into).expect("the snapshot's folder");
    millis(Duration::from_micros(done.stopped_us))
}
