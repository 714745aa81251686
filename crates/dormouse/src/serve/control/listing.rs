//! Lists in pages, and their filters.

use std::sync::Arc;

use axum::extract::State as Extracted;
use dormouse_api::e2b::{LIST_LIMIT_MAX, ListedSandbox, SnapshotInfo};
use dormouse_api::error::ApiError;
use dormouse_api::query::{Query, metadata_filter};
use dormouse_node::model::{ListQuery, ListSnapshots, Order, SandboxInfo, StateFilter};
use dormouse_types::Timestamp;

use super::extract::Asked;
use crate::serve::app::App;
use crate::serve::convert;
use crate::serve::reply::{self, Outcome};

type Shared = Extracted<Arc<App>>;

/// The filters of a list; `states` where the query names none.
pub fn list_query(query: &Query, states: &[StateFilter]) -> Result<ListQuery, ApiError> {
    let states = match query.get("state") {
        None => states.to_vec(),
        Some(given) => given.split(',').map(|state| parse_state(state.trim())).collect::<Result<_, _>>()?,
    };
    let order = match query.get("order") {
        None | Some("desc") => Order::Descending,
        Some("asc") => Order::Ascending,
        Some(other) => return Err(ApiError::invalid("order", format!("{other:?} is neither asc nor desc"))),
    };
    Ok(ListQuery {
        states,
        metadata: query.get("metadata").map(metadata_filter).transpose()?.unwrap_or_default(),
        template: query.get("template").map(str::to_owned),
        started_after: query.get("startedAfter").map(parse_time).transpose()?,
        order,
        limit: Some(query.limit(LIST_LIMIT_MAX)?),
        cursor: query.get("nextToken").map(str::to_owned),
    })
}

fn parse_state(given: &str) -> Result<StateFilter, ApiError> {
    match given {
        "running" => Ok(StateFilter::Running),
        "paused" => Ok(StateFilter::Paused),
        "failed" => Ok(StateFilter::Failed),
        other => Err(ApiError::invalid("state", format!("{other:?} is none of running, paused, failed"))),
    }
}

fn parse_time(given: &str) -> Result<Timestamp, ApiError> {
    // A `+` of the offset that was not encoded arrives as a space.
    let given = given.replace(' ', "+");
    given.parse().map_err(|error| {
        ApiError::invalid("startedAfter", format!("{given:?} is not an RFC 3339 time: {error}"))
    })
}

const E2B_STATES: [StateFilter; 2] = [StateFilter::Running, StateFilter::Paused];

pub async fn page(app: Shared, Asked(query): Asked) -> Outcome {
    let (sandboxes, next) = app.node.list(list_query(&query, &E2B_STATES)?).await?;
    let listed: Vec<ListedSandbox> = sandboxes.iter().map(convert::listed).collect();
    Ok(reply::page(&listed, next))
}

/// v1: running ones only, all at once.
pub async fn running(app: Shared, Asked(query): Asked) -> Outcome {
    let metadata = query.get("metadata").map(metadata_filter).transpose()?.unwrap_or_default();
    let mut query = ListQuery { states: vec![StateFilter::Running], metadata, ..ListQuery::default() };
    let mut all: Vec<SandboxInfo> = Vec::new();
    loop {
        let (sandboxes, next) = app.node.list(query.clone()).await?;
        all.extend(sandboxes);
        match next {
            Some(next) => query.cursor = Some(next),
            None => break,
        }
    }
    let listed: Vec<ListedSandbox> = all.iter().map(convert::listed).collect();
    Ok(reply::json(200, &listed))
}

pub fn snapshots_query(query: &Query) -> Result<ListSnapshots, ApiError> {
    let sandbox = query.get("sandboxID").map(str::parse).transpose();
    Ok(ListSnapshots {
        sandbox: sandbox.map_err(|error| ApiError::invalid("sandboxID", error))?,
        name: query.get("name").map(str::to_owned),
        limit: Some(query.limit(LIST_LIMIT_MAX)?),
        cursor: query.get("nextToken").map(str::to_owned),
        all: query.flag("all")?.unwrap_or(false),
    })
}

pub async fn snapshots(app: Shared, Asked(query): Asked) -> Outcome {
    let (snapshots, next) = app.node.snapshots(snapshots_query(&query)?).await?;
    let listed: Vec<SnapshotInfo> = snapshots
        .into_iter()
        .map(|snapshot| SnapshotInfo { snapshot_id: snapshot.id.to_string(), names: snapshot.names })
        .collect();
    Ok(reply::page(&listed, next))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(query: &str) -> Result<ListQuery, ApiError> {
        list_query(&Query::parse(Some(query)).expect("a valid query"), &E2B_STATES)
    }

    #[test]
    fn filters_are_understood() {
        let query = parse(
            "metadata=a%3D1&state=running%2Cpaused&order=asc&startedAfter=2026-01-02T03%3A04%3A05%2B00%3A00&limit=7&nextToken=x",
        )
        .expect("a valid list");
        assert_eq!(query.states, [StateFilter::Running, StateFilter::Paused]);
        assert_eq!(query.metadata.get("a").map(String::as_str), Some("1"));
        assert_eq!(query.order, Order::Ascending);
        assert_eq!(query.limit, Some(7));
        assert_eq!(query.cursor.as_deref(), Some("x"));
        assert_eq!(query.started_after, Some("2026-01-02T03:04:05Z".parse().expect("a time")));
        let unencoded = parse("startedAfter=2026-01-02T03:04:05+00:00").expect("a valid list");
        assert_eq!(unencoded.started_after, query.started_after);
    }

    #[test]
    fn defaults_are_both_states_and_latest_first() {
        let query = parse("").expect("a valid list");
        assert_eq!(query.states, E2B_STATES);
        assert_eq!((query.order, query.limit), (Order::Descending, Some(100)));
    }

    #[test]
    fn wrong_filters_are_named() {
        for (query, field) in [
            ("state=asleep", "state"),
            ("order=up", "order"),
            ("startedAfter=yesterday", "startedAfter"),
            ("limit=101", "limit"),
            ("limit=x", "limit"),
            ("metadata=a%3D%25zz", "metadata"),
        ] {
            let error = parse(query).expect_err(query);
            assert!(error.message.starts_with(&format!("{field}: ")), "{query}: {}", error.message);
        }
    }
}
