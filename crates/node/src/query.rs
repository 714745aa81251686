//! Filters, order and pages of lists; counts.

use std::sync::atomic::Ordering::Relaxed;

use dormouse_types::Timestamp;

use crate::build::BUILDER;
use crate::error::NodeError;
use crate::hub::Hub;
use crate::model::{ListQuery, Order, SandboxInfo, State, StateFilter, Tier, UsageSummary};

const PAGE_MAX: usize = 100;

fn filter(state: &State) -> Option<StateFilter> {
    match state {
        State::Creating | State::Running | State::Resuming | State::RollingBack => Some(StateFilter::Running),
        State::Paused { tier: Tier::Frozen } => Some(StateFilter::Running),
        State::Pausing | State::Paused { .. } => Some(StateFilter::Paused),
        State::Failed { .. } => Some(StateFilter::Failed),
        State::Killed => None,
    }
}

fn matches(info: &SandboxInfo, query: &ListQuery) -> bool {
    let Some(state) = filter(&info.state).filter(|_| !info.metadata.contains_key(BUILDER)) else {
        return false;
    };
    (query.states.is_empty() || query.states.contains(&state))
        && query.metadata.iter().all(|(key, value)| info.metadata.get(key) == Some(value))
        && query.template.as_ref().is_none_or(|template| {
            info.template.as_str() == template || info.template_alias.as_ref() == Some(template)
        })
        && query.started_after.is_none_or(|after| info.started_at >= after)
}

pub fn sandboxes(
    all: Vec<SandboxInfo>,
    query: &ListQuery,
) -> Result<(Vec<SandboxInfo>, Option<String>), NodeError> {
    let mut found: Vec<SandboxInfo> = all.into_iter().filter(|info| matches(info, query)).collect();
    found.sort_by(|a, b| (a.started_at, &a.id).cmp(&(b.started_at, &b.id)));
    if query.order == Order::Descending {
        found.reverse();
    }
    page(found, query.limit, query.cursor.as_deref(), |info| (info.started_at, info.id.to_string()))
}

/// `items` are in order; the cursor names the last one of the page before, so that what comes and goes
/// in between moves nothing.
pub fn page<T>(
    items: Vec<T>,
    limit: Option<usize>,
    cursor: Option<&str>,
    key: impl Fn(&T) -> (Timestamp, String),
) -> Result<(Vec<T>, Option<String>), NodeError> {
    let limit = limit.unwrap_or(PAGE_MAX);
    if limit == 0 || limit > PAGE_MAX {
        return Err(NodeError::invalid("limit", format!("limit = {limit} is outside 1..={PAGE_MAX}")));
    }
    let descending = match (items.first().map(&key), items.last().map(&key)) {
        (Some(first), Some(last)) => first > last,
        _ => false,
    };
    let after = cursor.map(parse_cursor).transpose()?;
    let mut rest: Vec<T> = items
        .into_iter()
        .filter(|item| {
            after
                .as_ref()
                .is_none_or(|after| if descending { key(item) < *after } else { key(item) > *after })
        })
        .collect();
    let more = rest.len() > limit;
    rest.truncate(limit);
    let next = rest.last().filter(|_| more).map(|item| {
        let (at, id) = key(item);
        format!("{}_{id}", at.as_nanosecond())
    });
    Ok((rest, next))
}

fn parse_cursor(cursor: &str) -> Result<(Timestamp, String), NodeError> {
    let parsed = cursor
        .split_once('_')
        .and_then(|(at, id)| Some((Timestamp::from_nanosecond(at.parse().ok()?).ok()?, id.to_owned())));
    parsed.ok_or_else(|| {
        let shown: String = cursor.chars().take(80).collect();
        NodeError::invalid("nextToken", format!("{shown:?} is no cursor of this list"))
    })
}

pub async fn summary(hub: &Hub) -> Result<UsageSummary, NodeError> {
    let store = hub.store.clone();
    let (listed, space) =
        hub.blocking("the look at the store", move || (store.list(), store.space())).await?;
    let listed = listed.map_err(|error| NodeError::internal(error.to_string()))?;
    let space = space.map_err(|error| NodeError::internal(error.to_string()))?;
    let mut summary = UsageSummary {
        snapshots: listed.len(),
        snapshot_bytes: listed.iter().map(dormouse_snapshot::Manifest::bytes).sum(),
        templates: hub.journal.templates().await?.len(),
        disk_free_bytes: space.available_bytes,
        created_total: hub.counts.created.load(Relaxed),
        paused_total: hub.counts.paused.load(Relaxed),
        resumed_total: hub.counts.resumed.load(Relaxed),
        forked_total: hub.counts.forked.load(Relaxed),
        failed_total: hub.counts.failed.load(Relaxed),
        ..UsageSummary::default()
    };
    for actor in hub.actors() {
        let count = match actor.info().state {
            State::Running => &mut summary.running,
            State::Paused { tier: Tier::Frozen } => &mut summary.frozen,
            State::Paused { .. } => &mut summary.paused,
            State::Failed { .. } => &mut summary.failed,
            State::Creating | State::Pausing | State::Resuming | State::RollingBack | State::Killed => {
                &mut summary.busy
            }
        };
        *count += 1;
    }
    Ok(summary)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pages(count: i64, limit: usize, descending: bool) -> Vec<Vec<i64>> {
        let mut items: Vec<i64> = (0..count).collect();
        if descending {
            items.reverse();
        }
        let (mut found, mut cursor) = (Vec::new(), None);
        loop {
            let key = |item: &i64| (Timestamp::from_second(*item).unwrap(), format!("s{item}"));
            let (page, next) = page(items.clone(), Some(limit), cursor.as_deref(), key).unwrap();
            found.push(page);
            match next {
                Some(next) => cursor = Some(next),
                None => return found,
            }
        }
    }

    #[test]
    fn every_item_is_on_one_page() {
        assert_eq!(pages(5, 2, false), [vec![0, 1], vec![2, 3], vec![4]]);
        assert_eq!(pages(4, 2, true), [vec![3, 2], vec![1, 0]]);
        assert_eq!(pages(0, 2, true), [Vec::<i64>::new()]);
        assert_eq!(pages(100, 100, true).len(), 1);
    }

    #[test]
    fn hostile_pages_are_refused() {
        let key = |_: &i64| (Timestamp::UNIX_EPOCH, String::new());
        for (limit, cursor) in [(Some(0), None), (Some(101), None), (None, Some("x")), (None, Some("9e99_s"))]
        {
            assert!(page(vec![1_i64], limit, cursor, key).is_err(), "{limit:?} {cursor:?}");
        }
    }
}
