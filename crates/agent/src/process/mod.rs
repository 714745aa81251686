//! process.Process: the processes that clients start.

use axum::Router;

use crate::context::Ctx;

/// All processes that were started for clients.
#[derive(Debug, Clone, Default)]
pub struct Processes;

pub fn router(_ctx: Ctx) -> Router {
    Router::new()
}
