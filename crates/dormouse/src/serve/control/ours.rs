//! `/dormouse/v1`: sandboxes with everything known, rollback, checkpoints, lineage, snapshots.

use std::sync::Arc;

use axum::extract::State as Extracted;
use dormouse_api::dormouse::{
    Checkpoint, ForkResult, IdlePolicy, Lineage, PauseResult, Receipt, Rollback, SandboxInfo, SnapshotInfo,
};
use dormouse_api::e2b::{ForkRequest, PauseRequest, ResumeRequest, TIMEOUT_V2_DEFAULT_S};
use dormouse_node::model::{SnapshotRequest, State, StateFilter};
use dormouse_types::SandboxId;
use http::StatusCode;

use super::extract::{Asked, Id, Idempotency, Json, Segment, seconds};
use super::lifecycle::{checked_resume, fork_count, pause_request};
use super::listing::{list_query, snapshots_query};
use super::sandboxes;
use crate::serve::app::App;
use crate::serve::convert;
use crate::serve::reply::{self, Failure, Outcome};

type Shared = Extracted<Arc<App>>;

pub async fn list(app: Shared, Asked(query): Asked) -> Outcome {
    let all = [StateFilter::Running, StateFilter::Paused, StateFilter::Failed];
    let (sandboxes, next) = app.node.list(list_query(&query, &all)?).await?;
    let listed: Vec<SandboxInfo> = sandboxes.iter().map(convert::info).collect();
    Ok(reply::page(&listed, next))
}

pub async fn get(app: Shared, Id(id): Id, Asked(query): Asked) -> Outcome {
    let info = app.node.get(&id).await?;
    let mut told = convert::info(&info);
    // To tell takes two looks half a second apart: not everybody wants to wait for it.
    let wanted = query.flag("whyAwake")?.unwrap_or(true);
    if wanted && matches!(info.state, State::Running) {
        told.why_awake = match app.node.why_awake(&id).await {
            Ok(why) => why,
            // It may have ended meanwhile; if not, the rest is still worth telling.
            Err(error) => {
                told = convert::info(&app.node.get(&id).await?);
                vec![format!("not known: {error}")]
            }
        };
    }
    told.receipts = latest_first(&app, &id).await?;
    Ok(reply::json(200, &told))
}

async fn latest_first(app: &App, id: &SandboxId) -> Result<Vec<Receipt>, Failure> {
    let mut receipts: Vec<Receipt> = app.node.receipts(id).await?.iter().map(convert::receipt).collect();
    receipts.sort_by_key(|receipt| std::cmp::Reverse(receipt.at));
    Ok(receipts)
}

pub async fn pause(app: Shared, Id(id): Id, Json(asked): Json<PauseRequest>) -> Outcome {
    let (receipt, snapshot) = app.node.pause(&id, pause_request(&asked)).await?;
    let told = PauseResult { receipt: convert::receipt(&receipt), snapshot: convert::snapshot(&snapshot) };
    Ok(reply::json(200, &told))
}

pub async fn resume(app: Shared, Id(id): Id, Json(asked): Json<ResumeRequest>) -> Outcome {
    let timeout_s = checked_resume(&app, &id, &asked, TIMEOUT_V2_DEFAULT_S).await?;
    let receipt = app.node.resume(&id, Some(timeout_s)).await?;
    Ok(reply::json(200, &convert::receipt(&receipt)))
}

pub async fn checkpoint(app: Shared, Id(id): Id, Json(asked): Json<Checkpoint>) -> Outcome {
    let request = SnapshotRequest {
        name: asked.name.filter(|name| !name.is_empty()),
        labels: asked.labels.unwrap_or_default(),
        ttl_s: asked.ttl,
    };
    let snapshot = app.node.checkpoint(&id, request).await?;
    Ok(reply::json(201, &convert::snapshot(&snapshot)))
}

pub async fn fork(app: Shared, Id(id): Id, key: Idempotency, Json(asked): Json<ForkRequest>) -> Outcome {
    let timeout_s = seconds("timeout", asked.timeout, TIMEOUT_V2_DEFAULT_S)?;
    let forks = app.node.fork(&id, fork_count(asked.count)?, timeout_s, key.0).await?;
    let results: Vec<ForkResult> = forks
        .iter()
        .map(|fork| match fork {
            Ok((info, receipt)) => ForkResult {
                sandbox: Some(convert::info(info)),
                receipt: Some(convert::receipt(receipt)),
                error: None,
            },
            Err(error) => {
                ForkResult { sandbox: None, receipt: None, error: Some(reply::from_node(error).body()) }
            }
        })
        .collect();
    Ok(reply::json(201, &results))
}

pub async fn rollback(app: Shared, Id(id): Id, Json(asked): Json<Rollback>) -> Outcome {
    let snapshot = app.node.snapshot_get(&asked.snapshot_id).await?;
    let receipt = app.node.rollback(&id, &snapshot.id).await?;
    Ok(reply::json(200, &convert::receipt(&receipt)))
}

pub async fn freeze(app: Shared, Id(id): Id) -> Outcome {
    app.node.freeze(&id).await?;
    Ok(reply::empty(StatusCode::NO_CONTENT))
}

pub async fn thaw(app: Shared, Id(id): Id) -> Outcome {
    app.node.thaw(&id).await?;
    Ok(reply::empty(StatusCode::NO_CONTENT))
}

pub async fn idle(app: Shared, Id(id): Id, Json(asked): Json<IdlePolicy>) -> Outcome {
    app.node.set_idle(&id, sandboxes::idle(asked)).await?;
    Ok(reply::empty(StatusCode::NO_CONTENT))
}

pub async fn receipts(app: Shared, Id(id): Id) -> Outcome {
    Ok(reply::json(200, &latest_first(&app, &id).await?))
}

pub async fn lineage(app: Shared, Id(id): Id) -> Outcome {
    let lineage: Vec<Lineage> =
        app.node.lineage(Some(&id)).await?.into_iter().map(convert::lineage).collect();
    Ok(reply::json(200, &lineage))
}

pub async fn lineage_of_all(app: Shared) -> Outcome {
    let lineage: Vec<Lineage> = app.node.lineage(None).await?.into_iter().map(convert::lineage).collect();
    Ok(reply::json(200, &lineage))
}

pub async fn snapshots(app: Shared, Asked(query): Asked) -> Outcome {
    let (snapshots, next) = app.node.snapshots(snapshots_query(&query)?).await?;
    let listed: Vec<SnapshotInfo> = snapshots.iter().map(convert::snapshot).collect();
    Ok(reply::page(&listed, next))
}

pub async fn snapshot(app: Shared, Segment(name): Segment) -> Outcome {
    Ok(reply::json(200, &convert::snapshot(&app.node.snapshot_get(&name).await?)))
}

pub async fn snapshot_rm(app: Shared, Segment(name): Segment) -> Outcome {
    Ok(reply::json(200, &convert::removed(app.node.snapshot_rm(&name).await?)))
}
