//! One process's life: its output is pumped, its deadline kept, its end told.
//!
//! After a normal exit the output is read to its end, however long descendants hold it (what E2B's
//! users know). After a signal (from a client, by the deadline, or what it died of) only what is
//! there is still read. The same holds for a terminal, which background jobs may keep for ever.

use std::io;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use dormouse_wire::envd::process::EndEvent;
use rustix::process::{Pid, Signal, kill_process};
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;

use super::fd::Fd;
use super::output::{Kind, Output};
use super::reaper::Exit;
use super::registry::Process;
use super::spawn::Spawned;
use crate::clock::sleep_awake_or_never;
use crate::procfs;

/// After the stop of a pump, at most this much is still read: more than a pipe holds.
const REST_BYTES_MAX: usize = 1 << 20;

/// Returns when the end was published, or the sandbox closes.
pub async fn supervise(
    process: &Arc<Process>,
    spawned: Spawned,
    deadline: Option<Duration>,
    closing: &CancellationToken,
) {
    let stop = CancellationToken::new();
    let mut pumps = JoinSet::new();
    for (kind, fd) in spawned.outputs {
        pumps.spawn(pump(kind, fd, process.output.clone(), stop.clone()));
    }
    let mut deadline = std::pin::pin!(sleep_awake_or_never(deadline));
    let mut leader = spawned.started.exit;
    let exit = loop {
        tokio::select! {
            exit = &mut leader => break exit.unwrap_or(Exit::Signal(Signal::KILL.as_raw())),
            () = &mut deadline, if !is_overdue(process) => kill_overdue(process),
        }
    };
    if process.has_pty && matches!(exit, Exit::Signal(_)) {
        let leader = process.pid;
        // It looks at every process.
        let _ = tokio::task::spawn_blocking(move || hang_up(leader)).await;
    }
    let wait_for_descendants = matches!(exit, Exit::Code(_)) && !process.has_pty;
    let mut all_read = false;
    if wait_for_descendants {
        tokio::select! {
            () = finished(&mut pumps) => all_read = true,
            () = process.signalled.cancelled() => {}
            () = closing.cancelled() => {}
            () = &mut deadline, if !is_overdue(process) => kill_overdue(process),
        }
    }
    stop.cancel();
    if !all_read {
        finished(&mut pumps).await;
    }
    process.disconnect().await;
    process.output.finish(end_event(exit));
}

fn is_overdue(process: &Process) -> bool {
    process.overdue.load(Ordering::Relaxed)
}

fn kill_overdue(process: &Process) {
    process.overdue.store(true, Ordering::Relaxed);
    process.signal(Signal::KILL);
}

/// A terminal whose shell was killed is gone, and its jobs are told so: shells do that when they may,
/// and kernels for what is in the foreground, but gVisor's does not.
fn hang_up(leader: u32) {
    for pid in procfs::session(leader) {
        if let Some(pid) = i32::try_from(pid).ok().and_then(Pid::from_raw) {
            // It may have ended in the meantime.
            let _ = kill_process(pid, Signal::HUP);
        }
    }
}

async fn finished(pumps: &mut JoinSet<()>) {
    while pumps.join_next().await.is_some() {}
}

/// Moves output until its end; after `stop` only what is there.
async fn pump(kind: Kind, fd: Arc<Fd>, output: Arc<Output>, stop: CancellationToken) {
    let mut buffer = vec![0_u8; kind.chunk_bytes_max()];
    let mut rest = REST_BYTES_MAX;
    loop {
        match fd.read_now(&mut buffer) {
            Ok(0) => return,
            Ok(count) => {
                output.append(kind, buffer.get(..count).unwrap_or_default()).await;
                if stop.is_cancelled() {
                    rest = rest.saturating_sub(count);
                    if rest == 0 {
                        return;
                    }
                }
            }
            Err(why) if why.kind() == io::ErrorKind::WouldBlock => {
                if stop.is_cancelled() {
                    return;
                }
                tokio::select! {
                    ready = fd.readable() => if ready.is_err() { return },
                    () = stop.cancelled() => {}
                }
            }
            Err(error) => {
                tracing::debug!(%error, ?kind, "output cannot be read on");
                return;
            }
        }
    }
}

/// The end in E2B's words.
fn end_event(exit: Exit) -> EndEvent {
    match exit {
        Exit::Code(code) => {
            let status = format!("exit status {code}");
            let error = (code != 0).then(|| status.clone());
            EndEvent { exit_code: code, exited: true, status, error }
        }
        Exit::Signal(signal) => {
            let status = format!("signal: {}", signal_name(signal));
            EndEvent { exit_code: -1, exited: false, status: status.clone(), error: Some(status) }
        }
    }
}

/// Names as Go's `os.ProcessState` prints them, as E2B's envd answers with those.
fn signal_name(signal: i32) -> String {
    let name = match signal {
        1 => "hangup",
        2 => "interrupt",
        3 => "quit",
        4 => "illegal instruction",
        5 => "trace/breakpoint trap",
        6 => "aborted",
        7 => "bus error",
        8 => "floating point exception",
        9 => "killed",
        10 => "user defined signal 1",
        11 => "segmentation fault",
        12 => "user defined signal 2",
        13 => "broken pipe",
        14 => "alarm clock",
        15 => "terminated",
        other => return format!("signal {other}"),
    };
    name.to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ends_are_said_in_the_protocols_words() {
        let end = end_event(Exit::Code(0));
        assert_eq!(
            (end.exit_code, end.exited, end.status.as_str(), end.error),
            (0, true, "exit status 0", None)
        );
        let end = end_event(Exit::Code(3));
        assert_eq!(end.error.as_deref(), Some("exit status 3"));
        let end = end_event(Exit::Signal(9));
        assert_eq!((end.exit_code, end.exited, end.error.as_deref()), (-1, false, Some("signal: killed")));
    }
}
