//! Runtimes kept ready: containers that were created and not started.
//!
//! Pool members have no entry under `runtimes/`: whoever finds one after a crash removes it. Their
//! pipes exist only in this process, so a member can serve no other daemon.

use std::collections::HashMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

use dormouse_types::RuntimeId;

use super::container::Container;
use crate::keepers::Pipes;
use crate::model::WarmSpec;

/// Members of all kinds together: each holds some 25 MiB.
const MEMBERS_MAX: usize = 32;

#[derive(Debug)]
pub(super) struct Member {
    pub spec: WarmSpec,
    pub container: Container,
    pub pipes: Pipes,
}

/// While it lives, a sweep leaves the container alone.
#[derive(Debug)]
pub(super) struct Claim<'a> {
    pool: &'a Pool,
    container: RuntimeId,
}

impl Drop for Claim<'_> {
    fn drop(&mut self) {
        self.pool.inner().claimed.retain(|claimed| *claimed != self.container);
    }
}

#[derive(Debug, Default)]
pub(super) struct Pool(Mutex<Inner>);

#[derive(Debug, Default)]
struct Inner {
    wanted: HashMap<WarmSpec, usize>,
    ready: Vec<Member>,
    /// Being created, or on the way from here to a runtime.
    claimed: Vec<RuntimeId>,
    filling: bool,
    closed: bool,
}

impl Pool {
    fn inner(&self) -> MutexGuard<'_, Inner> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Sets how many are wanted; returns the members that are not wanted any more.
    pub fn want(&self, spec: WarmSpec, count: usize) -> Vec<Member> {
        let mut inner = self.inner();
        if count == 0 {
            inner.wanted.remove(&spec);
        } else {
            inner.wanted.insert(spec.clone(), count);
        }
        let have = inner.ready.iter().filter(|member| member.spec == spec).count();
        let mut over = have.saturating_sub(count);
        let mut dropped = Vec::new();
        while over > 0 {
            let Some(at) = inner.ready.iter().position(|member| member.spec == spec) else { break };
            dropped.push(inner.ready.swap_remove(at));
            over -= 1;
        }
        dropped
    }

    pub fn take(&self, spec: &WarmSpec) -> Option<(Member, Claim<'_>)> {
        let mut inner = self.inner();
        let at = inner.ready.iter().position(|member| member.spec == *spec)?;
        let member = inner.ready.swap_remove(at);
        inner.claimed.push(member.container.id.clone());
        let claim = Claim { pool: self, container: member.container.id.clone() };
        Some((member, claim))
    }

    /// Marks a container as somebody's before anything else shows that it is.
    pub fn claim(&self, container: &RuntimeId) -> Claim<'_> {
        self.inner().claimed.push(container.clone());
        Claim { pool: self, container: container.clone() }
    }

    /// True: the caller is now the only one who fills, until [`Pool::filled`].
    pub fn start_filling(&self) -> bool {
        let mut inner = self.inner();
        let start = !inner.filling && !inner.closed && inner.lacks().is_some();
        inner.filling |= start;
        start
    }

    pub fn filled(&self) {
        self.inner().filling = false;
    }

    /// What should be created next.
    pub fn lacks(&self) -> Option<WarmSpec> {
        self.inner().lacks()
    }

    /// Takes a member in; gives it back when it is not wanted any more.
    pub fn put(&self, member: Member) -> Option<Member> {
        let mut inner = self.inner();
        if inner.closed || !inner.wanted.contains_key(&member.spec) {
            return Some(member);
        }
        inner.ready.push(member);
        None
    }

    /// Containers that have no runtime and yet are not left over.
    pub fn owns(&self, container: &RuntimeId) -> bool {
        let inner = self.inner();
        inner.claimed.contains(container)
            || inner.ready.iter().any(|member| member.container.id == *container)
    }

    /// No member is taken in from now on.
    pub fn close(&self) -> Vec<Member> {
        let mut inner = self.inner();
        inner.closed = true;
        inner.wanted.clear();
        std::mem::take(&mut inner.ready)
    }
}

impl Inner {
    fn lacks(&self) -> Option<WarmSpec> {
        if self.ready.len() >= MEMBERS_MAX {
            return None;
        }
        let have = |spec: &WarmSpec| self.ready.iter().filter(|member| member.spec == *spec).count();
        self.wanted.iter().find(|(spec, count)| have(spec) < **count).map(|(spec, _)| spec.clone())
    }
}
