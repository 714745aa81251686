//! The clock: S12, S13, S14.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use anyhow::{Context, Result, ensure};

use super::stage::{Stage, eventually};

fn host_time() -> f64 {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs_f64()
}

/// Paused for 60 s: wall clock within 1 s of the host's; monotonic time does not go backwards.
pub async fn s12(stage: &Stage) -> Result<()> {
    let sandbox = stage.sandbox().await?;
    let script = "import time\nlast = time.monotonic()\nworst = 0.0\nwhile True:\n    now = time.monotonic()\n    worst = min(worst, now - last)\n    last = now\n    open('/tmp/worst', 'w').write(str(worst))\n    time.sleep(0.01)\n";
    sandbox.write("/home/user/mono.py", script).await?;
    sandbox.spawn("exec python3 mono.py").await?;
    let monotonic = "python3 -c 'import time; print(time.monotonic())'";
    let before: f64 = sandbox.sh(monotonic).await?.trim().parse()?;
    sandbox.pause().await?;
    // What is tested is the length of the sleep itself.
    tokio::time::sleep(Duration::from_secs(60)).await;
    sandbox.resume().await?;
    let asked = host_time();
    let inside: f64 = sandbox.sh("date +%s.%N").await?.trim().parse()?;
    let answered = host_time();
    ensure!(
        inside > asked - 1.0 && inside < answered + 1.0,
        "inside it is {inside}, outside {asked}..{answered}"
    );
    let after: f64 = sandbox.sh(monotonic).await?.trim().parse()?;
    ensure!(after >= before, "monotonic time went from {before} to {after}");
    let worst: f64 = sandbox.sh("cat /tmp/worst").await?.trim().parse()?;
    ensure!(worst >= 0.0, "monotonic time went back by {worst} s inside a process");
    Ok(())
}

const TIMERS: &str = r#"
import os, threading, time
fired = 0
def tick():
    global fired
    while True:
        time.sleep(0.05)
        fired += 1
        open("/tmp/fired", "w").write(f"{fired} {time.monotonic()}")
threading.Thread(target=tick, daemon=True).start()
time.sleep(4)
open("/tmp/pending", "w").write("fired")
time.sleep(1000)
"#;

/// A timer pending at the snapshot fires after resume; no storm of overdue timers after a sleep.
pub async fn s13(stage: &Stage) -> Result<()> {
    let sandbox = stage.sandbox().await?;
    sandbox.write("/home/user/timers.py", TIMERS).await?;
    sandbox.spawn("exec python3 timers.py").await?;
    let fired = || async {
        let text = sandbox.sh("cat /tmp/fired").await?;
        text.split_whitespace().next().context("no figure")?.parse::<u64>().context("no figure")
    };
    eventually("the first ticks", || async { Ok(fired().await? > 3) }).await?;
    let before = fired().await?;
    sandbox.pause().await?;
    tokio::time::sleep(Duration::from_secs(10)).await;
    sandbox.resume().await?;
    let after = fired().await?;
    // Ten seconds asleep are 200 missed ticks: a storm would show them all.
    ensure!(after < before + 150, "{} ticks fired at once after the sleep", after - before);
    eventually("the pending timer", || async { Ok(sandbox.sh("cat /tmp/pending").await.is_ok()) }).await?;
    let later = fired().await?;
    eventually("further ticks", || async { Ok(fired().await? > later) }).await
}

/// What a guest kernel says of processors or processes that stood still.
const STALLS: &str = "soft lockup|hard LOCKUP|rcu.*stall|blocked for more than|clocksource.*unstable";

/// No soft lock-up, RCU stall or hung task is logged by the guest after resume.
pub async fn s14(stage: &Stage) -> Result<()> {
    let sandbox = stage.sandbox().await?;
    sandbox.spawn("exec python3 -c 'while True: pass'").await?;
    for _ in 0..3 {
        sandbox.pause().await?;
        // Longer than the kernel's watchdog waits.
        tokio::time::sleep(Duration::from_secs(25)).await;
        sandbox.resume().await?;
    }
    let fork = sandbox.fork(1).await?.remove(0);
    // The watchdogs look every few seconds.
    tokio::time::sleep(Duration::from_secs(10)).await;
    for one in [&sandbox, &fork] {
        let log = one.sh_root("dmesg").await?;
        ensure!(log.contains("Linux version"), "the kernel's log cannot be read: {log:?}");
        let stalls = one.sh_root(&format!("dmesg | grep -E '{STALLS}' || true")).await?;
        ensure!(stalls.is_empty(), "the guest's kernel says: {stalls}");
    }
    Ok(())
}
