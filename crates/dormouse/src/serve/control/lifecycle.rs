//! Deadlines, pause and resume, snapshots, forks: E2B's words for them.

use std::sync::Arc;

use axum::extract::State as Extracted;
use dormouse_api::e2b::{
    ConnectRequest, FORK_COUNT_MAX, ForkRequest, ForkResult, PauseRequest, RefreshRequest, ResumeRequest,
    SnapshotInfo, SnapshotRequest, TIMEOUT_V1_DEFAULT_S, TIMEOUT_V2_DEFAULT_S, TimeoutRequest,
};
use dormouse_api::error::ApiError;
use dormouse_node::model::{self, OnTimeout};
use dormouse_types::{SandboxId, Timestamp};
use http::StatusCode;

use super::extract::{Id, Idempotency, Json, seconds};
use crate::serve::app::App;
use crate::serve::convert;
use crate::serve::reply::{self, Failure, Outcome};

type Shared = Extracted<Arc<App>>;

pub async fn timeout(app: Shared, Id(id): Id, Json(asked): Json<TimeoutRequest>) -> Outcome {
    let timeout_s = seconds("timeout", Some(asked.timeout), 0)?;
    app.node.set_timeout(&id, timeout_s).await?;
    Ok(reply::empty(StatusCode::NO_CONTENT))
}

/// Extends, never shortens.
pub async fn refresh(app: Shared, Id(id): Id, Json(asked): Json<RefreshRequest>) -> Outcome {
    let duration_s = seconds("duration", asked.duration, TIMEOUT_V1_DEFAULT_S)?;
    let left_s = app.node.get(&id).await?.end_at.duration_since(Timestamp::now()).as_secs();
    if i64::from(duration_s) > left_s {
        app.node.set_timeout(&id, duration_s).await?;
    }
    Ok(reply::empty(StatusCode::NO_CONTENT))
}

pub fn pause_request(asked: &PauseRequest) -> model::PauseRequest {
    // `requireHealthyGuest` asks for what is always so here: a pause needs the agent's answer.
    model::PauseRequest { memory: asked.memory.unwrap_or(true), ..model::PauseRequest::default() }
}

pub async fn pause(app: Shared, Id(id): Id, Json(asked): Json<PauseRequest>) -> Outcome {
    app.node.pause(&id, pause_request(&asked)).await?;
    Ok(reply::empty(StatusCode::NO_CONTENT))
}

/// `memory: false` on resume would throw away what the pause kept.
fn refuse_cold_boot(memory: Option<bool>) -> Result<(), ApiError> {
    if memory == Some(false) {
        return Err(ApiError::invalid("memory", "a resume that ignores the memory is not supported here"));
    }
    Ok(())
}

pub async fn resume(app: Shared, Id(id): Id, Json(asked): Json<ResumeRequest>) -> Outcome {
    let timeout_s = checked_resume(&app, &id, &asked, TIMEOUT_V1_DEFAULT_S).await?;
    app.node.resume(&id, Some(timeout_s)).await?;
    let info = app.node.get(&id).await?;
    Ok(reply::json(201, &convert::sandbox(&info, &app.domain)))
}

pub async fn checked_resume(
    app: &App,
    id: &SandboxId,
    asked: &ResumeRequest,
    default_s: u32,
) -> Result<u32, Failure> {
    refuse_cold_boot(asked.memory)?;
    if let Some(pause) = asked.auto_pause {
        let now = app.node.get(id).await?.on_timeout == OnTimeout::Pause;
        if pause != now {
            return Err(Failure(ApiError::invalid(
                "autoPause",
                "it is set at creation and cannot be changed",
            )));
        }
    }
    Ok(seconds("timeout", asked.timeout, default_s)?)
}

pub async fn connect_v1(app: Shared, Id(id): Id, Json(asked): Json<ConnectRequest>) -> Outcome {
    connect(&app, &id, &asked, TIMEOUT_V1_DEFAULT_S).await
}

pub async fn connect_v2(app: Shared, Id(id): Id, Json(asked): Json<ConnectRequest>) -> Outcome {
    connect(&app, &id, &asked, TIMEOUT_V2_DEFAULT_S).await
}

async fn connect(app: &App, id: &SandboxId, asked: &ConnectRequest, default_s: u32) -> Outcome {
    let timeout_s = seconds("timeout", asked.timeout, default_s)?;
    refuse_cold_boot(asked.memory)?;
    let (info, resumed, _) = app.node.connect(id, timeout_s).await?;
    Ok(reply::json(if resumed { 201 } else { 200 }, &convert::sandbox(&info, &app.domain)))
}

pub async fn snapshot(app: Shared, Id(id): Id, Json(asked): Json<SnapshotRequest>) -> Outcome {
    if asked.memory == Some(false) {
        return Err(Failure(ApiError::invalid("memory", "a snapshot without memory is not supported here")));
    }
    let request =
        model::SnapshotRequest { name: asked.name.filter(|name| !name.is_empty()), ..Default::default() };
    let taken = app.node.checkpoint(&id, request).await?;
    Ok(reply::json(201, &SnapshotInfo { snapshot_id: taken.id.to_string(), names: taken.names }))
}

pub fn fork_count(given: Option<i64>) -> Result<usize, ApiError> {
    let given = given.unwrap_or(1);
    usize::try_from(given)
        .ok()
        .filter(|count| (1..=FORK_COUNT_MAX as usize).contains(count))
        .ok_or_else(|| ApiError::invalid("count", format!("{given} is outside 1..={FORK_COUNT_MAX}")))
}

pub async fn fork(app: Shared, Id(id): Id, key: Idempotency, Json(asked): Json<ForkRequest>) -> Outcome {
    let count = fork_count(asked.count)?;
    let timeout_s = seconds("timeout", asked.timeout, TIMEOUT_V1_DEFAULT_S)?;
    let forks = app.node.fork(&id, count, timeout_s, key.0).await?;
    let results: Vec<ForkResult> = forks
        .iter()
        .map(|fork| match fork {
            Ok((info, _)) => ForkResult { sandbox: Some(convert::sandbox(info, &app.domain)), error: None },
            Err(error) => ForkResult { sandbox: None, error: Some(reply::from_node(error).body()) },
        })
        .collect();
    Ok(reply::json(201, &results))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fork_counts_have_a_range() {
        assert_eq!(fork_count(None), Ok(1));
        assert_eq!(fork_count(Some(20)), Ok(20));
        for given in [0, 21, -1, i64::MAX] {
            assert!(fork_count(Some(given)).is_err(), "{given} was accepted");
        }
    }
}
