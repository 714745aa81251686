//! Templates in E2B's words.

use std::sync::Arc;

use axum::extract::State as Extracted;
use dormouse_api::e2b::{Template, TemplateAlias};
use dormouse_node::ErrorCode;
use http::StatusCode;

use super::extract::Segment;
use crate::serve::app::App;
use crate::serve::convert;
use crate::serve::reply::{self, Outcome};

type Shared = Extracted<Arc<App>>;

pub async fn list(app: Shared) -> Outcome {
    let templates: Vec<Template> = app.node.templates().await?.iter().map(convert::template).collect();
    Ok(reply::json(200, &templates))
}

pub async fn get(app: Shared, Segment(name): Segment) -> Outcome {
    let template = app.node.template_by_name(&name).await?;
    Ok(reply::json(200, &convert::template_with_builds(&template)))
}

pub async fn alias(app: Shared, Segment(name): Segment) -> Outcome {
    let template = app.node.template_by_name(&name).await?;
    Ok(reply::json(200, &TemplateAlias { template_id: template.id.to_string(), public: false }))
}

/// E2B deletes snapshots and templates by one call.
pub async fn remove(app: Shared, Segment(name): Segment) -> Outcome {
    match app.node.snapshot_rm(&name).await {
        Ok(_) => {}
        Err(error) if error.code == ErrorCode::NotFound => {
            app.node.template_rm(&name).await?;
        }
        Err(error) => return Err(error.into()),
    }
    Ok(reply::empty(StatusCode::NO_CONTENT))
}
