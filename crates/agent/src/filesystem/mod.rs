//! `filesystem.Filesystem`: stat, list, make, move, remove, watch.
//!
//! Handlers only translate; what a call does is in [`ops`] (blocking, run in the blocking pool) and in
//! [`watch`].

pub mod entry;
#[cfg(test)]
pub mod harness;
pub mod metadata;
mod mode;
mod ops;
pub mod owned;
pub mod path;
#[cfg(test)]
mod tests;
pub mod transfer;
pub mod watch;

use std::path::PathBuf;

use axum::Router;
use axum::body::Body;
use axum::extract::State;
use axum::response::Response;
use axum::routing::post;
use dormouse_wire::envd::connect::Error;
use dormouse_wire::envd::filesystem::{self as messages, Empty, EntryResponse, ListDirResponse};
use http::HeaderMap;
use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::context::{Ctx, Settings};
use crate::rpc;
use crate::users::{self, User};
use watch::{Watch, Watchers};

/// On whose behalf a call runs, and where its relative paths start.
#[derive(Debug, Clone)]
pub struct Caller {
    pub user: User,
    pub workdir: Option<PathBuf>,
}

impl Caller {
    #[must_use]
    pub fn new(user: User, settings: &Settings) -> Self {
        Self { user, workdir: settings.default_workdir.clone() }
    }

    pub fn resolve(&self, given: &str) -> Result<PathBuf, path::PathError> {
        path::resolve(given, &self.user, self.workdir.as_deref())
    }
}

/// Runs work that may block in the pool that is there for it.
pub async fn blocking<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> T {
    match tokio::task::spawn_blocking(work).await {
        Ok(done) => done,
        // Nobody cancels these tasks: it panicked, and the caller goes down with it.
        Err(why) => std::panic::resume_unwind(why.into_panic()),
    }
}

#[derive(Clone)]
struct Service {
    ctx: Ctx,
    watchers: Watchers,
}

impl Service {
    fn caller(&self, headers: &HeaderMap) -> Result<Caller, Error> {
        let settings = self.ctx.settings();
        Ok(Caller::new(users::of_request(headers, &settings)?, &settings))
    }

    /// One unary call: parsed, checked, run in the blocking pool, answered.
    async fn call<Q, A, F>(self, headers: HeaderMap, body: Body, work: F) -> Response
    where
        Q: DeserializeOwned + Send + 'static,
        A: Serialize + Send + 'static,
        F: FnOnce(&Caller, &Q) -> Result<A, Error> + Send + 'static,
    {
        let answer = async {
            let request: Q = rpc::read_unary(&headers, body).await?;
            let caller = self.caller(&headers)?;
            blocking(move || work(&caller, &request)).await
        };
        rpc::unary(answer.await)
    }
}

pub fn router(ctx: Ctx) -> Router {
    let service = Service { ctx, watchers: Watchers::default() };
    Router::new()
        .route(messages::STAT, post(stat))
        .route(messages::LIST_DIR, post(list_dir))
        .route(messages::MAKE_DIR, post(make_dir))
        .route(messages::MOVE, post(move_entry))
        .route(messages::REMOVE, post(remove))
        .route(messages::WATCH_DIR, post(watch_dir))
        .route(messages::CREATE_WATCHER, post(create_watcher))
        .route(messages::GET_WATCHER_EVENTS, post(get_watcher_events))
        .route(messages::REMOVE_WATCHER, post(remove_watcher))
        .with_state(service)
}

fn entry_response(entry: messages::EntryInfo) -> EntryResponse {
    EntryResponse { entry: Some(entry) }
}

async fn stat(State(service): State<Service>, headers: HeaderMap, body: Body) -> Response {
    service.call(headers, body, |caller, request| ops::stat(caller, request).map(entry_response)).await
}

async fn make_dir(State(service): State<Service>, headers: HeaderMap, body: Body) -> Response {
    service.call(headers, body, |caller, request| ops::make_dir(caller, request).map(entry_response)).await
}

async fn move_entry(State(service): State<Service>, headers: HeaderMap, body: Body) -> Response {
    service.call(headers, body, |caller, request| ops::move_entry(caller, request).map(entry_response)).await
}

async fn remove(State(service): State<Service>, headers: HeaderMap, body: Body) -> Response {
    service.call(headers, body, |caller, request| ops::remove(caller, request).map(|()| Empty {})).await
}

async fn list_dir(State(service): State<Service>, headers: HeaderMap, body: Body) -> Response {
    let list = |caller: &Caller, request: &messages::ListDirRequest| {
        ops::list_dir(caller, request).map(|entries| ListDirResponse { entries })
    };
    service.call(headers, body, list).await
}

async fn watch_dir(State(service): State<Service>, headers: HeaderMap, body: Body) -> Response {
    let started = async {
        let request = rpc::read_stream_request(&headers, body).await?;
        Watch::start(service.caller(&headers)?, request).await
    };
    match started.await {
        Ok(watch) => rpc::stream(watch::frames(watch, rpc::keepalive(&headers), rpc::timeout(&headers))),
        Err(error) => rpc::stream_failed(error),
    }
}

async fn create_watcher(State(service): State<Service>, headers: HeaderMap, body: Body) -> Response {
    let created = async {
        let request = rpc::read_unary(&headers, body).await?;
        service.watchers.create(service.caller(&headers)?, request).await
    };
    rpc::unary(created.await)
}

async fn get_watcher_events(State(service): State<Service>, headers: HeaderMap, body: Body) -> Response {
    let events = async { service.watchers.events(rpc::read_unary(&headers, body).await?).await };
    rpc::unary(events.await)
}

async fn remove_watcher(State(service): State<Service>, headers: HeaderMap, body: Body) -> Response {
    let removed = async { service.watchers.remove(&rpc::read_unary(&headers, body).await?) };
    rpc::unary(removed.await)
}
