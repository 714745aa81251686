//! Polled watchers: `CreateWatcher`, `GetWatcherEvents`, `RemoveWatcher`.
//!
//! A task per watcher moves the kernel's events into its queue as they come, so that new directories
//! are followed at once. A question for events reads the kernel once more first: what happened before
//! the question is in its answer.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};

use dormouse_wire::envd::connect::Error;
use dormouse_wire::envd::filesystem::{
    CreateWatcherResponse, Empty, GetWatcherEventsResponse, WatchRequest, WatcherRequest,
};
use tokio::task::AbortHandle;

use super::{Watch, protocol_error};
use crate::filesystem::{Caller, blocking};

/// The polled watchers of one agent.
#[derive(Clone, Default)]
pub struct Watchers(Arc<Mutex<HashMap<String, Polled>>>);

struct Polled {
    watch: Arc<Watch>,
    reader: AbortHandle,
    /// Kept while a broken watcher's error has been told: each later question gets it again.
    gone: Option<Error>,
}

impl Drop for Polled {
    fn drop(&mut self) {
        self.reader.abort();
    }
}

impl Watchers {
    pub async fn create(
        &self,
        caller: Caller,
        request: WatchRequest,
    ) -> Result<CreateWatcherResponse, Error> {
        let watch = Watch::start(caller, request).await?;
        let reading = Arc::clone(&watch);
        let reader = tokio::spawn(async move { while reading.wait().await.is_ok() {} }).abort_handle();
        let watcher_id = format!("w{}", dormouse_types::random_hex(10));
        let polled = Polled { watch, reader, gone: None };
        self.0.lock().unwrap_or_else(PoisonError::into_inner).insert(watcher_id.clone(), polled);
        Ok(CreateWatcherResponse { watcher_id })
    }

    /// What happened since the last question. A watcher that lost events answers with that once it has
    /// handed out what came before the hole, and from then on.
    pub async fn events(&self, request: WatcherRequest) -> Result<GetWatcherEventsResponse, Error> {
        let watch = {
            let watchers = self.0.lock().unwrap_or_else(PoisonError::into_inner);
            let polled = watchers.get(&request.watcher_id).ok_or_else(|| unknown(&request))?;
            if let Some(error) = &polled.gone {
                return Err(error.clone());
            }
            Arc::clone(&polled.watch)
        };
        let (events, broken) = blocking(move || {
            while !watch.drain() {}
            watch.take()
        })
        .await;
        let Some(error) = broken.map(protocol_error) else { return Ok(GetWatcherEventsResponse { events }) };
        let mut watchers = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(polled) = watchers.get_mut(&request.watcher_id) {
            polled.reader.abort();
            polled.gone = Some(error.clone());
        }
        if events.is_empty() { Err(error) } else { Ok(GetWatcherEventsResponse { events }) }
    }

    pub fn remove(&self, request: &WatcherRequest) -> Result<Empty, Error> {
        let removed = self.0.lock().unwrap_or_else(PoisonError::into_inner).remove(&request.watcher_id);
        removed.map(|_| Empty {}).ok_or_else(|| unknown(request))
    }
}

fn unknown(request: &WatcherRequest) -> Error {
    let id: String = request.watcher_id.chars().take(64).collect();
    Error::not_found(format!("watcher with id '{id}' not found"))
}
