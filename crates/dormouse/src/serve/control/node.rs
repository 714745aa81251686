//! `/dormouse/v1`: the node itself, its keys, its events.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use axum::body::Body;
use axum::extract::State as Extracted;
use bytes::Bytes;
use dormouse_api::ENVD_VERSION;
use dormouse_api::dormouse::{Event, GcReport, KeyInfo, NewKey, NodeInfo};
use dormouse_api::error::ApiError;
use dormouse_types::{KeyId, SandboxId};
use futures_util::Stream;
use http::{HeaderValue, StatusCode};
use tokio::sync::broadcast::error::RecvError;
use tokio::sync::mpsc;

use super::extract::{Asked, Json, Segment};
use crate::serve::app::App;
use crate::serve::convert;
use crate::serve::reply::{self, Failure, Outcome};

type Shared = Extracted<Arc<App>>;

pub async fn info(app: Shared) -> Outcome {
    let info = NodeInfo {
        version: env!("CARGO_PKG_VERSION").to_owned(),
        envd_version: ENVD_VERSION.to_owned(),
        pid: std::process::id(),
        data_dir: app.data_dir.display().to_string(),
        listen: app.listen.clone(),
        domain: app.domain.text.clone(),
        engines: app.engines.clone(),
        usage: convert::usage(&app.node.usage_summary().await?),
        notes: app.node.notes(),
    };
    Ok(reply::json(200, &info))
}

pub async fn doctor(app: Shared) -> Outcome {
    let data_dir = app.data_dir.clone();
    let report = tokio::task::spawn_blocking(move || crate::doctor::report(&data_dir))
        .await
        .map_err(|error| ApiError::internal(format!("the examination of this host failed: {error}")))?;
    Ok(reply::json(200, &report))
}

pub async fn gc(app: Shared) -> Outcome {
    let collected = app.node.gc().await?;
    let removed = [
        ("snapshots", collected.snapshots),
        ("images", collected.images),
        ("agents", collected.agents),
        ("leftovers", collected.leftovers),
    ];
    let removed: BTreeMap<_, _> = removed.into_iter().map(|(kind, names)| (kind.to_owned(), names)).collect();
    Ok(reply::json(200, &GcReport { removed, freed_bytes: collected.freed_bytes }))
}

pub async fn keys(app: Shared) -> Outcome {
    let keys: Vec<KeyInfo> = app.node.keys().await?.into_iter().map(|key| convert::key(key, None)).collect();
    Ok(reply::json(200, &keys))
}

pub async fn key_create(app: Shared, Json(new): Json<NewKey>) -> Outcome {
    let name = new.name.unwrap_or_else(|| "unnamed".to_owned());
    if name.is_empty() || name.chars().count() > 100 || name.chars().any(char::is_control) {
        return Err(Failure(ApiError::invalid("name", "must have 1 to 100 printable characters")));
    }
    let (key, secret) = app.node.key_create(&name).await?;
    Ok(reply::json(201, &convert::key(key, Some(secret))))
}

pub async fn key_rm(app: Shared, Segment(id): Segment) -> Outcome {
    let id: KeyId = id.parse().map_err(|error| ApiError::invalid("keyID", error))?;
    app.node.key_rm(&id).await?;
    Ok(reply::empty(StatusCode::NO_CONTENT))
}

/// Which events a client wants.
struct Wanted {
    since: u64,
    sandbox: Option<SandboxId>,
}

impl Wanted {
    fn has(&self, event: &dormouse_node::model::Event) -> bool {
        event.seq > self.since && self.sandbox.as_ref().is_none_or(|id| event.sandbox.as_ref() == Some(id))
    }
}

/// Events as they happen, after those since `since`. Missed ones are read again from the journal.
pub async fn events(app: Shared, Asked(query): Asked) -> Outcome {
    let sandbox = query.get("sandboxID").map(str::parse).transpose();
    let sandbox = sandbox.map_err(|error| ApiError::invalid("sandboxID", error))?;
    let wanted = Wanted { since: query.number("since")?.unwrap_or(0), sandbox };
    if query.flag("follow")? == Some(false) {
        let events: Vec<Event> = past(&app, &wanted).await?.into_iter().map(convert::event).collect();
        return Ok(reply::json(200, &events));
    }
    let (sender, receiver) = mpsc::channel(64);
    let app = Arc::clone(&app.0);
    tokio::spawn(async move {
        tokio::select! {
            () = follow(&app, wanted, &sender) => {}
            () = sender.closed() => {}
            () = app.going.cancelled() => {}
        }
    });
    let mut reply = reply::with_body(200, "text/event-stream", Body::from_stream(stream(receiver)));
    reply.headers_mut().insert("cache-control", HeaderValue::from_static("no-cache"));
    Ok(reply)
}

fn stream(receiver: mpsc::Receiver<Bytes>) -> impl Stream<Item = Result<Bytes, std::convert::Infallible>> {
    futures_util::stream::unfold(receiver, |mut receiver| async move {
        receiver.recv().await.map(|line| (Ok(line), receiver))
    })
}

/// All pages of what has happened.
async fn past(app: &App, wanted: &Wanted) -> Result<Vec<dormouse_node::model::Event>, Failure> {
    let mut since = wanted.since;
    let mut found = Vec::new();
    loop {
        let page = app.node.events(since).await?;
        let Some(last) = page.last() else { return Ok(found) };
        since = last.seq;
        found.extend(page.into_iter().filter(|event| wanted.has(event)));
    }
}

const SILENCE_MAX: Duration = Duration::from_secs(15);

async fn follow(app: &App, mut wanted: Wanted, sender: &mpsc::Sender<Bytes>) {
    // Subscribed before the past is read, so that nothing falls between.
    let mut receiver = app.node.subscribe();
    loop {
        let Ok(past) = past(app, &wanted).await else { return };
        for event in past {
            if !send(&mut wanted, event, sender).await {
                return;
            }
        }
        loop {
            let event = match tokio::time::timeout(SILENCE_MAX, receiver.recv()).await {
                Ok(Ok(event)) => event,
                // Too slow: what was missed is in the journal.
                Ok(Err(RecvError::Lagged(_))) => break,
                Ok(Err(RecvError::Closed)) => return,
                // A comment, so that a client and what lies between see that this stream lives.
                Err(_) if sender.send(Bytes::from_static(b": \n\n")).await.is_ok() => continue,
                Err(_) => return,
            };
            if wanted.has(&event) && !send(&mut wanted, event, sender).await {
                return;
            }
        }
    }
}

async fn send(wanted: &mut Wanted, event: dormouse_node::model::Event, sender: &mpsc::Sender<Bytes>) -> bool {
    wanted.since = event.seq;
    let event = convert::event(event);
    let Ok(data) = serde_json::to_string(&event) else { return false };
    let kind: String = event.kind.chars().filter(|c| !c.is_control()).collect();
    sender.send(Bytes::from(format!("id: {}\nevent: {kind}\ndata: {data}\n\n", event.seq))).await.is_ok()
}
