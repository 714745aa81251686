//! The control service, for the host alone: quiesce, wake, stat, shutdown (messages: `wire::control`).

mod files;
mod hooks;
mod identity;
mod trust;
mod wake;

use std::path::PathBuf;

use axum::extract::State;
use axum::response::{IntoResponse as _, Response};
use axum::routing::{get, post};
use axum::{Json, Router};
use dormouse_wire::control::{Quiesced, Stat};
use http::StatusCode;
use tokio_util::sync::CancellationToken;

use crate::context::Ctx;
use crate::procfs;

/// What a wake may change.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum System {
    /// All: this is process 1 of a sandbox.
    Sandbox,
    /// Files below a folder that stands for `/`; not the kernel's clock, name and random source.
    Folder(PathBuf),
    /// Nothing but the agent's own settings.
    Untouched,
}

impl System {
    /// The folder that holds `etc`, `usr`, …
    fn root(&self) -> Option<PathBuf> {
        match self {
            Self::Sandbox => Some(PathBuf::from("/")),
            Self::Folder(root) => Some(root.clone()),
            Self::Untouched => None,
        }
    }
}

#[derive(Clone)]
struct Control {
    ctx: Ctx,
    system: System,
    shutdown: CancellationToken,
    /// One wake at a time.
    waking: std::sync::Arc<tokio::sync::Mutex<()>>,
}

pub fn router(ctx: Ctx, system: System, shutdown: CancellationToken) -> Router {
    let control = Control { ctx, system, shutdown, waking: std::sync::Arc::default() };
    Router::new()
        .route("/quiesce", post(quiesce))
        .route("/wake", post(wake::wake))
        .route("/stat", get(stat))
        .route("/shutdown", post(shut_down))
        .with_state(control)
}

fn failed(status: StatusCode, message: &str) -> Response {
    (status, Json(serde_json::json!({ "message": message }))).into_response()
}

/// Writes the file systems out, so that a snapshot of the disk alone is a good one.
async fn quiesce(State(_): State<Control>) -> Response {
    match tokio::task::spawn_blocking(rustix::fs::sync).await {
        Ok(()) => Json(Quiesced { notes: Vec::new() }).into_response(),
        Err(why) => failed(StatusCode::INTERNAL_SERVER_ERROR, &format!("sync did not end: {why}")),
    }
}

async fn stat(State(control): State<Control>) -> Response {
    let Ok(processes) = tokio::task::spawn_blocking(procfs::processes).await else {
        return failed(StatusCode::INTERNAL_SERVER_ERROR, "the processes cannot be counted");
    };
    let ctx = &control.ctx;
    Json(Stat {
        attached: ctx.processes().attached(),
        processes: processes.count,
        cpu_ms: processes.cpu_ms,
        outbound: ctx.outbound(),
        in_flight: ctx.in_flight(),
        awake_locks: ctx.awake_locks(),
    })
    .into_response()
}

/// Answers first: the sandbox ends a moment later.
async fn shut_down(State(control): State<Control>) -> StatusCode {
    let token = control.shutdown.clone();
    // Clients see their streams cut before the processes are asked to end.
    control.ctx.processes().closing().cancel();
    tokio::spawn(async move {
        tokio::task::yield_now().await;
        token.cancel();
    });
    StatusCode::NO_CONTENT
}
