//! `/files`: uploads and downloads of any size in constant memory.
//!
//! [`download`] and [`upload`] do the work; this module checks who is asking. A request needs the
//! access token or a signature ([`signature`]), and names its user in the query.

mod accept;
mod compose;
mod conditions;
mod download;
mod error;
mod kind;
mod multipart;
mod pool;
mod signature;
mod sink;
mod source;
mod tags;
mod target;
#[cfg(test)]
mod tests;
mod upload;

use axum::body::Body;
use axum::extract::rejection::QueryRejection;
use axum::extract::{Query, State};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use axum::{Json, Router};
use dormouse_types::Timestamp;
use http::{HeaderMap, StatusCode};
use http_body_util::{BodyExt as _, LengthLimitError, Limited};
use serde::Deserialize;

use crate::context::Ctx;
use crate::filesystem::{Caller, blocking};
use crate::users;
use compose::{ComposeRequest, compose};
use error::Refusal;
use signature::{Operation, Signed};

const COMPOSE_BYTES_MAX: usize = 4 << 20;

pub fn router(ctx: Ctx) -> Router {
    Router::new()
        .route("/files", get(read).post(write))
        .route("/files/compose", post(compose_files))
        .with_state(ctx)
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct FilesQuery {
    path: Option<String>,
    username: Option<String>,
    signature: Option<String>,
    signature_expiration: Option<String>,
}

type Given = Result<Query<FilesQuery>, QueryRejection>;

/// Who asks, if they may.
fn admit(
    ctx: &Ctx,
    operation: Operation,
    query: &FilesQuery,
    headers: &HeaderMap,
) -> Result<Caller, Refusal> {
    let expiration = query.signature_expiration.as_deref().filter(|given| !given.is_empty());
    let expiration = expiration.map(str::parse::<i64>).transpose().map_err(|_| {
        Refusal::bad_request("the query parameter signature_expiration is not a Unix time in seconds")
    })?;
    let settings = ctx.settings();
    let signed = Signed {
        path: query.path.as_deref().unwrap_or(""),
        username: query.username.as_deref().unwrap_or(""),
        signature: query.signature.as_deref(),
        expiration,
    };
    signature::check(operation, signed, headers, &settings, Timestamp::now().as_second())?;
    let user = users::named_or_default(query.username.as_deref(), &settings)?;
    Ok(Caller::new(user, &settings))
}

fn query(given: Given) -> Result<FilesQuery, Refusal> {
    match given {
        Ok(Query(query)) => Ok(query),
        Err(why) => Err(Refusal::bad_request(format!("the query cannot be read: {why}"))),
    }
}

async fn read(State(ctx): State<Ctx>, given: Given, headers: HeaderMap) -> Response {
    let answer = async {
        let query = query(given)?;
        let caller = admit(&ctx, Operation::Read, &query, &headers)?;
        download::download(caller, query.path.unwrap_or_default(), headers).await
    };
    answer.await.unwrap_or_else(Refusal::into_response)
}

async fn write(State(ctx): State<Ctx>, given: Given, headers: HeaderMap, body: Body) -> Response {
    let admitted = query(given)
        .and_then(|query| admit(&ctx, Operation::Write, &query, &headers).map(|caller| (caller, query.path)));
    match admitted {
        Ok((caller, path)) => upload::upload(caller, path, &headers, body).await,
        Err(refusal) => upload::refuse(refusal, body).await,
    }
}

async fn compose_files(State(ctx): State<Ctx>, body: Body) -> Response {
    let composed = async {
        let collected = Limited::new(body, COMPOSE_BYTES_MAX).collect().await.map_err(|why| {
            let large = why.is::<LengthLimitError>();
            let status = if large { StatusCode::PAYLOAD_TOO_LARGE } else { StatusCode::BAD_REQUEST };
            Refusal::new(status, format!("the request cannot be read: {why}"))
        })?;
        let request: ComposeRequest = serde_json::from_slice(&collected.to_bytes()).map_err(|why| {
            Refusal::bad_request(format!("the request is not the JSON that was expected: {why}"))
        })?;
        let settings = ctx.settings();
        let user = users::named_or_default(request.username.as_deref(), &settings)?;
        let caller = Caller::new(user, &settings);
        blocking(move || compose(&caller, &request)).await
    };
    match composed.await {
        Ok(written) => Json(written).into_response(),
        Err(refusal) => refusal.into_response(),
    }
}
