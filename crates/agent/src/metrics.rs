//! `/metrics` and `/envs` of envd.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;

use axum::extract::State;
use axum::response::{IntoResponse as _, Response};
use axum::routing::get;
use axum::{Json, Router};
use dormouse_types::Timestamp;
use http::StatusCode;
use serde::Serialize;

use crate::context::Ctx;
use crate::procfs;

#[derive(Debug, Serialize)]
struct Metrics {
    /// Unix time, seconds.
    ts: i64,
    cpu_count: usize,
    /// Of all CPUs, since the last call.
    cpu_used_pct: f64,
    mem_total: u64,
    mem_used: u64,
    mem_cache: u64,
    mem_total_mib: u64,
    mem_used_mib: u64,
    disk_used: u64,
    disk_total: u64,
}

/// When CPU time was last looked at, and what it was.
#[derive(Debug, Clone, Copy)]
struct Sample {
    at: Instant,
    cpu_ms: u64,
}

#[derive(Clone)]
struct Meter {
    ctx: Ctx,
    last: Arc<Mutex<Sample>>,
}

pub fn router(ctx: Ctx) -> Router {
    let last = Arc::new(Mutex::new(Sample { at: Instant::now(), cpu_ms: procfs::processes().cpu_ms }));
    Router::new().route("/metrics", get(metrics)).route("/envs", get(envs)).with_state(Meter { ctx, last })
}

async fn envs(State(meter): State<Meter>) -> Response {
    Json(&meter.ctx.settings().env).into_response()
}

async fn metrics(State(meter): State<Meter>) -> Response {
    match tokio::task::spawn_blocking(move || measure(&meter.last)).await {
        Ok(metrics) => Json(metrics).into_response(),
        Err(_) => StatusCode::INTERNAL_SERVER_ERROR.into_response(),
    }
}

fn measure(last: &Mutex<Sample>) -> Metrics {
    const MIB: u64 = 1 << 20;
    let cpu_count = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
    let now = Sample { at: Instant::now(), cpu_ms: procfs::processes().cpu_ms };
    let before = std::mem::replace(&mut *last.lock().unwrap_or_else(PoisonError::into_inner), now);
    let memory = procfs::memory();
    let (disk_total, disk_used) = disk();
    Metrics {
        ts: Timestamp::now().as_second(),
        cpu_count,
        cpu_used_pct: used_percent(before, now, cpu_count),
        mem_total: memory.total,
        mem_used: memory.used,
        mem_cache: memory.cache,
        mem_total_mib: memory.total / MIB,
        mem_used_mib: memory.used / MIB,
        disk_used,
        disk_total,
    }
}

/// Bytes of the root file system: all, used. A kernel that does not know (gVisor names an absurd size for
/// a root that lives in memory) gives zeros.
fn disk() -> (u64, u64) {
    const PLAUSIBLE_MAX: u64 = 1 << 50;
    let Ok(disk) = rustix::fs::statvfs("/") else { return (0, 0) };
    let bytes = |blocks: u64| blocks.saturating_mul(disk.f_frsize);
    match bytes(disk.f_blocks) {
        total if total <= PLAUSIBLE_MAX => (total, total.saturating_sub(bytes(disk.f_bfree))),
        _ => (0, 0),
    }
}

/// Two digits after the point; what the clock's resolution makes of short spans is cut at 100.
fn used_percent(before: Sample, now: Sample, cpu_count: usize) -> f64 {
    let wall_ms = now.at.saturating_duration_since(before.at).as_secs_f64() * 1000.0;
    // A span of milliseconds as f64 is exact for the next 200,000 years.
    let used_ms =
        std::time::Duration::from_millis(now.cpu_ms.saturating_sub(before.cpu_ms)).as_secs_f64() * 1000.0;
    let cpus = u32::try_from(cpu_count).unwrap_or(1);
    if wall_ms < 1.0 {
        return 0.0;
    }
    let percent = (used_ms / wall_ms / f64::from(cpus) * 100.0).clamp(0.0, 100.0);
    (percent * 100.0).round() / 100.0
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    #[test]
    fn the_share_is_of_all_cpus() {
        let at = Instant::now();
        let before = Sample { at, cpu_ms: 1000 };
        let after = |cpu_ms| Sample { at: at + Duration::from_secs(10), cpu_ms };
        let percent = |cpu_ms| format!("{:.2}", used_percent(before, after(cpu_ms), 2));
        assert_eq!(percent(11_000), "50.00");
        assert_eq!(percent(1000), "0.00");
        assert_eq!(percent(900), "0.00");
        assert_eq!(percent(1_000_000), "100.00");
    }
}
