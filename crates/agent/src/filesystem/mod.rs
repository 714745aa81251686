//! filesystem.Filesystem: stat, list, move, remove, watch.

use axum::Router;

use crate::context::Ctx;

pub fn router(_ctx: Ctx) -> Router {
    Router::new()
}
