//! `/files`: uploads and downloads.

use axum::Router;

use crate::context::Ctx;

pub fn router(_ctx: Ctx) -> Router {
    Router::new()
}
