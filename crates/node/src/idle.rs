//! When a sandbox is idle: `judge` is pure, `run` measures and asks.
//!
//! Awake are: an attached command, CPU use beyond the engine's own, a request in flight, an open
//! outbound connection, an awake lock, and (through the actor) whatever asked for the sandbox. A client
//! that polls does not count as attached: only open streams and what was asked for since do.
//! Sandboxes without a policy are never measured.

use std::collections::HashMap;
use std::sync::{Arc, Weak};
use std::time::Duration;

use dormouse_types::SandboxId;
use dormouse_wire::control::Stat;
use dormouse_wire::keeper::Status;
use futures_util::StreamExt;

use crate::actor::{Handle, View};
use crate::agent;
use crate::error::NodeError;
use crate::hub::Hub;
use crate::lifecycle::IdleTier;
use crate::model::{IdlePolicy, State, Tier};

const LOOK: Duration = Duration::from_secs(1);
/// Measurements within the shortest wait of a policy.
const LOOKS_PER_WAIT: i64 = 5;
const LOOK_MS_MIN: i64 = 900;
const LOOK_MS_MAX: i64 = 10_000;
const LOOKS_AT_ONCE: usize = 16;
/// Share of one core that processes inside may use and still count as doing nothing, per mille.
const CPU_IDLE_PER_MILLE: u64 = 20;

/// One measurement.
#[derive(Debug, Clone, Default)]
pub struct Reading {
    pub stat: Stat,
    pub ingress_open: u32,
    pub egress_open: u32,
}

/// What is known of one sandbox between two looks.
#[derive(Debug, Clone)]
pub struct Track {
    pub activity: u64,
    pub at_ms: i64,
    pub cpu_ms: u64,
    pub idle_since_ms: i64,
}

/// Why it is awake; empty: nothing keeps it awake.
#[must_use]
pub fn reasons(reading: &Reading, before: Option<&Track>, now_ms: i64) -> Vec<String> {
    let mut why = Vec::new();
    let stat = &reading.stat;
    let mut count = |n: u32, one: &str, many: &str| {
        if n > 0 {
            why.push(format!("{n} {}", if n == 1 { one } else { many }));
        }
    };
    count(stat.attached, "attached command", "attached commands");
    count(stat.in_flight, "request in flight", "requests in flight");
    count(stat.outbound.max(reading.egress_open), "outbound connection", "outbound connections");
    count(reading.ingress_open, "open client stream", "open client streams");
    why.extend(stat.awake_locks.iter().map(|lock| format!("awake lock of `{lock}`")));
    if let Some(before) = before {
        let elapsed_ms = u64::try_from(now_ms - before.at_ms).unwrap_or(0).max(1);
        let used_ms = stat.cpu_ms.saturating_sub(before.cpu_ms);
        let per_mille = used_ms.saturating_mul(1000) / elapsed_ms;
        if per_mille > CPU_IDLE_PER_MILLE {
            why.push(format!("its processes use {}.{} % of a core", per_mille / 10, per_mille % 10));
        }
    }
    why
}

/// Which tier is due after so long an idleness.
#[must_use]
pub fn due(policy: &IdlePolicy, frozen: bool, idle_ms: i64) -> Option<IdleTier> {
    let reached = |after_s: Option<u32>| after_s.is_some_and(|after_s| idle_ms >= i64::from(after_s) * 1000);
    if reached(policy.disk_after_s) {
        return Some(IdleTier::Disk);
    }
    (!frozen && reached(policy.freeze_after_s)).then_some(IdleTier::Frozen)
}

pub async fn read(hub: &Hub, handle: &Handle) -> Result<Reading, NodeError> {
    let info = handle.info();
    let engine = hub.engine(info.engine)?;
    let Status { ingress_open, egress_open, .. } = engine.keeper_status(&info.id).await?;
    let stat = agent::stat(&engine.keeper_dir(&info.id))
        .await
        .map_err(|error| NodeError::unavailable(error.to_string()))?;
    Ok(Reading { stat, ingress_open, egress_open })
}

/// How often a sandbox with this policy is asked: each question costs it a little CPU time.
fn interval_ms(policy: &IdlePolicy) -> i64 {
    let first_s = policy.freeze_after_s.into_iter().chain(policy.disk_after_s).min().unwrap_or(u32::MAX);
    (i64::from(first_s) * 1000 / LOOKS_PER_WAIT).clamp(LOOK_MS_MIN, LOOK_MS_MAX)
}

/// Looks at all sandboxes with a policy until the node is gone.
pub async fn run(hub: Weak<Hub>) {
    let mut tracks: HashMap<SandboxId, Track> = HashMap::new();
    loop {
        tokio::time::sleep(LOOK).await;
        let Some(hub) = hub.upgrade() else { return };
        let actors: Vec<Handle> =
            hub.actors().into_iter().filter(|actor| actor.info().idle != IdlePolicy::default()).collect();
        tracks.retain(|id, _| actors.iter().any(|actor| actor.info().id == *id));
        let looks = futures_util::stream::iter(actors.into_iter().map(|actor| {
            let before = tracks.get(&actor.info().id).cloned();
            let hub = Arc::clone(&hub);
            async move { (actor.info().id, look(&hub, &actor, before).await) }
        }));
        // One that does not answer holds up nobody else.
        let found: Vec<_> = looks.buffer_unordered(LOOKS_AT_ONCE).collect().await;
        for (id, track) in found {
            match track {
                Some(track) => drop(tracks.insert(id, track)),
                None => drop(tracks.remove(&id)),
            }
        }
    }
}

async fn look(hub: &Arc<Hub>, actor: &Handle, before: Option<Track>) -> Option<Track> {
    let View { info, activity, since } = actor.view().borrow().clone();
    let now_ms = hub.now_ms();
    match info.state {
        // Nothing happens in it, and whoever wants something thaws it first.
        State::Paused { tier: Tier::Frozen } => {
            let frozen_ms = now_ms - since.as_millisecond();
            let before_ms = i64::from(info.idle.freeze_after_s.unwrap_or(0)) * 1000;
            if due(&info.idle, true, frozen_ms + before_ms) == Some(IdleTier::Disk) {
                actor.idle(activity, IdleTier::Disk);
            }
            None
        }
        State::Running => {
            let before = before.filter(|track| track.activity == activity);
            if before.as_ref().is_some_and(|track| now_ms - track.at_ms < interval_ms(&info.idle)) {
                return before;
            }
            let reading = read(hub, actor).await.ok()?;
            let busy = !reasons(&reading, before.as_ref(), now_ms).is_empty();
            let idle_since_ms = match &before {
                Some(track) if !busy => track.idle_since_ms,
                _ => now_ms,
            };
            if let Some(tier) = due(&info.idle, false, now_ms - idle_since_ms) {
                actor.idle(activity, tier);
            }
            Some(Track { activity, at_ms: now_ms, cpu_ms: reading.stat.cpu_ms, idle_since_ms })
        }
        _ => None,
    }
}

/// Between two looks half a second apart.
pub async fn why_awake(hub: &Hub, handle: &Handle) -> Result<Vec<String>, NodeError> {
    let info = handle.info();
    match info.state {
        State::Running => {}
        _ => return Ok(Vec::new()),
    }
    let first = read(hub, handle).await?;
    let before = Track { activity: 0, at_ms: hub.now_ms(), cpu_ms: first.stat.cpu_ms, idle_since_ms: 0 };
    tokio::time::sleep(Duration::from_millis(500)).await;
    let mut why = reasons(&read(hub, handle).await?, Some(&before), before.at_ms + 500);
    if info.idle == IdlePolicy::default() {
        why.push("it has no idle policy: it runs until its deadline".to_owned());
    }
    Ok(why)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn track(at_ms: i64, cpu_ms: u64) -> Track {
        Track { activity: 0, at_ms, cpu_ms, idle_since_ms: 0 }
    }

    #[test]
    fn what_keeps_it_awake_is_named() {
        let quiet = Reading::default();
        assert!(reasons(&quiet, None, 0).is_empty());
        let mut busy = Reading { egress_open: 1, ..Reading::default() };
        busy.stat.attached = 2;
        busy.stat.awake_locks = vec!["sleep 100".to_owned()];
        let why = reasons(&busy, None, 0);
        assert_eq!(why, ["2 attached commands", "1 outbound connection", "awake lock of `sleep 100`"]);
    }

    #[test]
    fn a_quiet_job_that_computes_is_not_idle() {
        let mut reading = Reading::default();
        reading.stat.cpu_ms = 1100;
        assert_eq!(reasons(&reading, Some(&track(0, 1000)), 1000), ["its processes use 10.0 % of a core"]);
        assert!(reasons(&reading, Some(&track(0, 1090)), 1000).is_empty());
    }

    #[test]
    fn tiers_come_in_order_and_never_without_a_policy() {
        let policy = IdlePolicy { freeze_after_s: Some(15), disk_after_s: Some(600) };
        for (frozen, idle_ms, tier) in [
            (false, 14_999, None),
            (false, 15_000, Some(IdleTier::Frozen)),
            (true, 15_000, None),
            (true, 600_000, Some(IdleTier::Disk)),
            (false, 600_000, Some(IdleTier::Disk)),
        ] {
            assert_eq!(due(&policy, frozen, idle_ms), tier, "{frozen} {idle_ms}");
        }
        assert_eq!(due(&IdlePolicy::default(), false, i64::MAX), None);
    }
}
