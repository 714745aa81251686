//! Idle connections into sandboxes, kept a moment for the next request to the same port.
//!
//! Invariants: a connection is used again only for the sandbox, port and generation that it was made
//! for, and only while the caller knows the sandbox to run; few are kept, none for long.

use std::collections::HashMap;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use dormouse_types::{Generation, SandboxId};
use hyper::client::conn::http1::SendRequest;

use super::body::RequestBody;

pub type Sender = SendRequest<RequestBody>;

/// Idle longer than this, it is closed: an open connection would look like traffic.
const IDLE_MAX: Duration = Duration::from_secs(2);
const PER_PORT_MAX: usize = 8;
const KEPT_MAX: usize = 256;

#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Key {
    pub sandbox: SandboxId,
    pub port: u16,
    pub generation: Generation,
}

struct Idle {
    sender: Sender,
    since: Instant,
}

#[derive(Default)]
pub struct Pool(Mutex<HashMap<Key, Vec<Idle>>>);

impl Pool {
    fn with<T>(&self, act: impl FnOnce(&mut HashMap<Key, Vec<Idle>>) -> T) -> T {
        act(&mut self.0.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// A connection that can take a request now.
    pub fn take(&self, key: &Key) -> Option<Sender> {
        self.with(|kept| {
            let idle = kept.get_mut(key)?;
            let found = std::iter::from_fn(|| idle.pop())
                .find(|idle| idle.sender.is_ready() && idle.since.elapsed() < IDLE_MAX);
            if idle.is_empty() {
                kept.remove(key);
            }
            found.map(|idle| idle.sender)
        })
    }

    pub fn put(&self, key: Key, sender: Sender) {
        if sender.is_closed() {
            return;
        }
        self.with(|kept| {
            if kept.values().map(Vec::len).sum::<usize>() >= KEPT_MAX {
                return;
            }
            let idle = kept.entry(key).or_default();
            if idle.len() < PER_PORT_MAX {
                idle.push(Idle { sender, since: Instant::now() });
            }
        });
    }

    /// Closes what was idle too long.
    pub fn sweep(&self) {
        self.with(|kept| {
            kept.retain(|_, idle| {
                idle.retain(|idle| !idle.sender.is_closed() && idle.since.elapsed() < IDLE_MAX);
                !idle.is_empty()
            });
        });
    }
}

/// How often [`Pool::sweep`] is to be called.
pub const SWEEP_EVERY: Duration = Duration::from_secs(1);
