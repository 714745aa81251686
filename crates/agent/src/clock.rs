//! Waiting in time during which the sandbox ran.
//!
//! After a restore the monotonic clock may have jumped by the whole time that the sandbox was on disk
//! (gVisor), so one long sleep would end at once. Deadlines are slept in short steps instead: a jump
//! shortens them by one step at most.

use std::time::Duration;

const STEP: Duration = Duration::from_secs(2);

/// Sleeps for `duration`, not counting the time that the sandbox did not run.
pub async fn sleep_awake(duration: Duration) {
    let mut left = duration;
    while !left.is_zero() {
        let step = left.min(STEP);
        tokio::time::sleep(step).await;
        left = left.saturating_sub(step);
    }
}

/// The same where there may be no limit: then it never ends.
pub async fn sleep_awake_or_never(duration: Option<Duration>) {
    match duration {
        Some(duration) => sleep_awake(duration).await,
        None => std::future::pending().await,
    }
}
