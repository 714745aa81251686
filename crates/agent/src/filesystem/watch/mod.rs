//! Watching directories: the `WatchDir` stream and the polled watchers.
//!
//! A [`Watch`] is read when the kernel says that there is something, when a client asks, and when the
//! agent itself has made a directory ([`settle`]); nothing runs on a timer but the keepalive of an open
//! stream. Queues are bounded: a watcher that loses events says so instead of going on with a hole.

mod mounts;
mod poll;
mod stream;
#[cfg(test)]
mod tests;
mod tree;

use std::collections::VecDeque;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError, Weak};

use dormouse_wire::envd::connect::{Code, Error};
use dormouse_wire::envd::filesystem::{EventType, FilesystemEvent, WatchRequest};
use dormouse_wire::ready;
use tokio::sync::Notify;

pub use poll::Watchers;
pub use stream::frames;
use tree::{Change, Tree, WatchError};

use super::entry::{Names, describe};
use super::{Caller, ops};

/// Watchers of both kinds at a time.
const WATCHES_MAX: usize = 256;
/// Events that wait for a client.
const QUEUE_MAX: usize = 16_384;
/// Changes that are handled in one go, so that a stream's queue stays short.
const DRAIN_MAX: usize = 1024;

/// All watches of the process, for [`settle`] and the limit.
static LIVE: Mutex<Vec<Weak<Watch>>> = Mutex::new(Vec::new());

pub struct Watch {
    state: Mutex<State>,
    /// A duplicate of the inotify descriptor, for the reactor.
    fd: OwnedFd,
    /// Rung when events were queued by somebody who is not waiting for them.
    bell: Notify,
    recursive: bool,
    include_entry: bool,
}

struct State {
    tree: Tree,
    names: Names,
    queue: VecDeque<FilesystemEvent>,
    /// Why there is no going on.
    broken: Option<WatchError>,
}

impl Watch {
    /// Starts watching. Everything that happens after this has returned is reported.
    pub async fn start(caller: Caller, request: WatchRequest) -> Result<Arc<Self>, Error> {
        let (recursive, include_entry) = (request.recursive, request.include_entry);
        let tree = super::blocking(move || open(&caller, &request)).await?;
        let broke = |why: std::io::Error| Error::internal(format!("the watcher cannot be waited for: {why}"));
        let fd = tree.fd().try_clone_to_owned().map_err(broke)?;
        let watch = Arc::new(Self {
            state: Mutex::new(State { tree, names: Names::default(), queue: VecDeque::new(), broken: None }),
            fd,
            bell: Notify::new(),
            recursive,
            include_entry,
        });
        let mut live = LIVE.lock().unwrap_or_else(PoisonError::into_inner);
        live.retain(|watch| watch.strong_count() > 0);
        if live.len() >= WATCHES_MAX {
            return Err(Error::resource_exhausted(format!(
                "{WATCHES_MAX} directories are being watched already: end a watcher first"
            )));
        }
        live.push(Arc::downgrade(&watch));
        Ok(watch)
    }

    /// Moves what the kernel has into the queue. True: it has no more. Blocking.
    fn drain(&self) -> bool {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        let State { tree, names, queue, broken } = &mut *state;
        if broken.is_some() {
            return true;
        }
        let root = tree.root().to_owned();
        let mut lost = false;
        let drained = tree.drain(DRAIN_MAX, &mut |change| {
            if queue.len() < QUEUE_MAX {
                queue.push_back(event(&root, change, self.include_entry.then_some(&mut *names)));
            } else {
                lost = true;
            }
        });
        if lost {
            *broken = Some(WatchError::Overflow);
        }
        drained.unwrap_or_else(|why| {
            *broken = Some(why);
            true
        })
    }

    /// Takes what is queued, and why nothing will follow it.
    fn take(&self) -> (Vec<FilesystemEvent>, Option<WatchError>) {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        // Names may have changed by the next time.
        state.names = Names::default();
        (state.queue.drain(..).collect(), state.broken.take())
    }

    /// Waits until there is something, and queues it.
    async fn wait(self: &Arc<Self>) -> std::io::Result<()> {
        tokio::select! {
            ready = ready::readable(&self.fd) => {
                ready?;
                let watch = Arc::clone(self);
                tokio::task::spawn_blocking(move || watch.drain()).await.map_err(std::io::Error::other)?;
            }
            () = self.bell.notified() => {}
        }
        Ok(())
    }
}

fn open(caller: &Caller, request: &WatchRequest) -> Result<Tree, Error> {
    let path = caller.resolve(&request.path)?;
    let dir = ops::directory(&path)?;
    if !request.allow_network_mounts {
        mounts::refuse_network(&path, &dir)?;
    }
    Tree::watch(&path, request.recursive).map_err(protocol_error)
}

fn protocol_error(why: WatchError) -> Error {
    let code = if why.is_limit() { Code::ResourceExhausted } else { Code::Internal };
    Error::new(code, why.to_string())
}

fn event(root: &Path, change: Change, names: Option<&mut Names>) -> FilesystemEvent {
    let shown = matches!(change.what, EventType::Create | EventType::Write | EventType::Chmod);
    // One that is gone again has no entry.
    let entry = names.filter(|_| shown).and_then(|names| describe(&root.join(&change.name), names).ok());
    FilesystemEvent { name: change.name.to_string_lossy().into_owned(), event_type: change.what, entry }
}

/// Lets every recursive watcher see the directories that were made until now. The agent calls it after
/// making a directory and before putting anything into it, so that clients get the events of what they
/// do through the API exactly. Blocking.
pub fn settle() {
    let live: Vec<_> = {
        let live = LIVE.lock().unwrap_or_else(PoisonError::into_inner);
        live.iter().filter_map(Weak::upgrade).filter(|watch| watch.recursive).collect()
    };
    for watch in live {
        while !watch.drain() {}
        watch.bell.notify_one();
    }
}
