//! Watchers over HTTP. A polled watcher's answer holds all that happened before the question, so
//! nothing here waits but for frames of a stream.

use std::collections::BTreeSet;
use std::path::PathBuf;

use axum::body::Body;
use dormouse_wire::envd::connect::{Decoder, EndStream, Frame, STREAM_TYPE};
use dormouse_wire::envd::filesystem::{
    CREATE_WATCHER, EventType, GET_WATCHER_EVENTS, MAKE_DIR, REMOVE_WATCHER, WATCH_DIR, WatchDirResponse,
};
use http::Request;
use http_body_util::BodyExt as _;
use proptest::prelude::*;
use serde_json::json;

use super::tree::Tree;
use crate::filesystem::harness::Served;

use EventType::{Chmod, Create, Remove, Rename, Write};

fn named(events: &[(String, EventType)], name: &str) -> Vec<EventType> {
    events.iter().filter(|event| event.0 == name).map(|event| event.1).collect()
}

#[tokio::test]
async fn writing_a_file_is_three_events() {
    let served = Served::start().await;
    let watcher = served.watch("", json!({})).await;
    for (name, bytes) in [("small", 5), ("large", 3 << 20)] {
        served.put(name, vec![b'x'; bytes]).await;
        assert_eq!(served.events(&watcher).await, [Create, Chmod, Write].map(|what| (name.to_owned(), what)));
        served.put(name, vec![b'y'; bytes]).await;
        let events = served.events(&watcher).await;
        assert!(events.iter().all(|event| event.0 == name), "{events:?}");
        let events: Vec<_> = events.into_iter().map(|event| event.1).collect();
        // A large one may be written in several portions.
        assert!(events.starts_with(&[Write, Chmod, Write]), "{events:?}");
        assert!(events[2..].iter().all(|what| *what == Write), "{events:?}");
    }
    let headers = [("content-type", "application/octet-stream"), ("x-metadata-k", "v")];
    served.send(http::Method::POST, &served.files("tagged", ""), &headers, "x").await;
    assert_eq!(served.events(&watcher).await, [Create, Chmod, Write].map(|what| ("tagged".to_owned(), what)));
    assert_eq!(served.events(&watcher).await, []);
}

#[tokio::test]
async fn a_write_that_makes_directories_is_seen_whole_by_a_recursive_watcher() {
    let served = Served::start().await;
    let watcher = served.watch("", json!({"recursive": true})).await;
    served.call(MAKE_DIR, json!({"path": served.at("a")})).await.unwrap();
    served.put("a/f", "x").await;
    served.put("b/c/f", "x").await;
    let events = served.events(&watcher).await;
    assert_eq!(named(&events, "a"), [Create, Chmod]);
    for name in ["a/f", "b/c/f"] {
        assert_eq!(named(&events, name), [Create, Chmod, Write], "{name} in {events:?}");
    }
    assert_eq!(named(&events, "b/c"), [Create, Chmod]);
}

#[tokio::test]
async fn a_plain_watcher_stays_in_its_directory() {
    let served = Served::start().await;
    std::fs::create_dir(served.at("d")).unwrap();
    let watcher = served.watch("", json!({})).await;
    std::fs::write(served.at("d/f"), "x").unwrap();
    std::fs::write(served.at("g"), "x").unwrap();
    assert_eq!(served.events(&watcher).await, [("g".to_owned(), Create), ("g".to_owned(), Write)]);
}

#[tokio::test]
async fn moved_directories_are_followed() {
    let served = Served::start().await;
    let outside = tempfile::tempdir_in(served.dir().parent().unwrap()).unwrap();
    std::fs::create_dir_all(outside.path().join("in/sub")).unwrap();
    std::fs::write(outside.path().join("in/sub/old"), "x").unwrap();
    std::fs::create_dir(served.at("d")).unwrap();
    let watcher = served.watch("", json!({"recursive": true})).await;

    std::fs::rename(outside.path().join("in"), served.at("d/in")).unwrap();
    let events = served.events(&watcher).await;
    let created = ["d/in", "d/in/sub", "d/in/sub/old"].map(|name| (name.to_owned(), Create));
    assert_eq!(events, created);
    std::fs::write(served.at("d/in/sub/new"), "x").unwrap();
    assert_eq!(named(&served.events(&watcher).await, "d/in/sub/new"), [Create, Write]);

    // Inside the tree: nothing is lost in between, and the path is the new one.
    std::fs::rename(served.at("d/in"), served.at("moved")).unwrap();
    std::fs::write(served.at("moved/sub/more"), "x").unwrap();
    let events = served.events(&watcher).await;
    assert_eq!(named(&events, "d/in"), [Rename]);
    assert_eq!(named(&events, "moved"), [Create]);
    assert_eq!(named(&events, "moved/sub/more"), [Create, Write]);

    // Out of it: no longer ours.
    std::fs::rename(served.at("moved"), outside.path().join("out")).unwrap();
    assert_eq!(served.events(&watcher).await, [("moved".to_owned(), Rename)]);
    std::fs::write(outside.path().join("out/sub/last"), "x").unwrap();
    assert_eq!(served.events(&watcher).await, []);
}

#[tokio::test]
async fn entries_come_with_what_is_there() {
    let served = Served::start().await;
    let watcher = served.watch("", json!({"includeEntry": true})).await;
    std::fs::write(served.at("f"), "123").unwrap();
    std::fs::remove_file(served.at("f")).unwrap();
    std::fs::write(served.at("g"), "1234").unwrap();
    let answer = served.call(GET_WATCHER_EVENTS, watcher).await.unwrap();
    for event in answer["events"].as_array().unwrap() {
        let shown = event["name"] == "g" && event["type"] != "EVENT_TYPE_REMOVE";
        assert_eq!(event["entry"]["size"].as_str(), shown.then_some("4"), "{event}");
    }
}

#[tokio::test]
async fn the_watched_directory_itself_is_a_dot() {
    let served = Served::start().await;
    std::fs::create_dir(served.at("d")).unwrap();
    let watcher = served.watch("d", json!({"recursive": true})).await;
    std::fs::remove_dir(served.at("d")).unwrap();
    assert!(named(&served.events(&watcher).await, ".").contains(&Remove));
}

#[tokio::test]
async fn what_cannot_be_watched_is_refused() {
    let served = Served::start().await;
    std::fs::write(served.at("f"), "").unwrap();
    assert_eq!(served.code(CREATE_WATCHER, json!({"path": served.at("none")})).await, "not_found");
    assert_eq!(served.code(CREATE_WATCHER, json!({"path": served.at("f")})).await, "invalid_argument");
    let watcher = served.watch("", json!({})).await;
    assert_eq!(served.call(REMOVE_WATCHER, watcher.clone()).await, Ok(json!({})));
    assert_eq!(served.code(REMOVE_WATCHER, watcher.clone()).await, "not_found");
    assert_eq!(served.code(GET_WATCHER_EVENTS, watcher).await, "not_found");
    let mut frames = Frames::open(&served, &[], json!({"path": served.at("none")})).await;
    assert_eq!(frames.end().await.as_deref(), Some("not_found"));
}

#[tokio::test]
async fn a_watcher_that_lost_events_says_so() {
    let served = Served::start().await;
    let watcher = served.watch("", json!({})).await;
    for name in ["a", "b"] {
        std::fs::write(served.at(name), "").unwrap();
    }
    // Two files in turn: the kernel merges equal neighbours.
    for _ in 0..super::QUEUE_MAX {
        for name in ["a", "b"] {
            std::os::unix::fs::chown(served.at(name), Some(0), None).unwrap();
        }
    }
    let first = served.call(GET_WATCHER_EVENTS, watcher.clone()).await.unwrap();
    assert_eq!(first["events"].as_array().unwrap().len(), super::QUEUE_MAX);
    for _ in 0..2 {
        let (code, message) = served.call(GET_WATCHER_EVENTS, watcher.clone()).await.unwrap_err();
        assert_eq!(code, "resource_exhausted");
        assert!(message.contains("events were lost"), "{message}");
    }
    served.call(REMOVE_WATCHER, watcher).await.unwrap();
}

struct Frames {
    body: hyper::body::Incoming,
    decoder: Decoder,
}

impl Frames {
    async fn open(served: &Served, headers: &[(&str, &str)], message: serde_json::Value) -> Self {
        let mut request = Request::post(WATCH_DIR).header("host", "test").header("content-type", STREAM_TYPE);
        for (name, value) in headers {
            request = request.header(*name, *value);
        }
        let body = Body::from(dormouse_wire::envd::connect::message(&message));
        let response = served.open(request.body(body).unwrap()).await;
        assert_eq!(response.status(), 200);
        assert_eq!(response.headers()["content-type"], STREAM_TYPE);
        Self { body: response.into_body(), decoder: Decoder::default() }
    }

    async fn frame(&mut self) -> Frame {
        loop {
            if let Some(frame) = self.decoder.next_frame().unwrap() {
                return frame;
            }
            let data = self.body.frame().await.expect("the stream ended without an end").unwrap();
            self.decoder.push(&data.into_data().unwrap());
        }
    }

    async fn message(&mut self) -> WatchDirResponse {
        self.frame().await.parse().unwrap()
    }

    /// The code of the error that ends the stream.
    async fn end(&mut self) -> Option<String> {
        let frame = self.frame().await;
        assert!(frame.is_end());
        frame.parse::<EndStream>().unwrap().error.map(|error| error.code.as_str().to_owned())
    }
}

#[tokio::test]
async fn a_stream_starts_tells_and_keeps_alive() {
    let served = Served::start().await;
    let request = json!({"path": served.dir(), "recursive": true});
    let mut frames = Frames::open(&served, &[("keepalive-ping-interval", "1")], request).await;
    assert!(matches!(frames.message().await, WatchDirResponse::Start(_)));
    served.put("d/f", "x").await;
    let mut events = Vec::new();
    while events.len() < 5 {
        if let WatchDirResponse::Filesystem(event) = frames.message().await {
            events.push((event.name, event.event_type));
        }
    }
    assert_eq!(named(&events, "d/f"), [Create, Chmod, Write]);
    assert!(matches!(frames.message().await, WatchDirResponse::Keepalive(_)));
}

#[tokio::test]
async fn a_stream_ends_with_its_deadline() {
    let served = Served::start().await;
    let mut frames =
        Frames::open(&served, &[("connect-timeout-ms", "20")], json!({"path": served.dir()})).await;
    assert!(matches!(frames.message().await, WatchDirResponse::Start(_)));
    assert_eq!(frames.end().await.as_deref(), Some("deadline_exceeded"));
}

/// More than may be watched at a time: each is let go with its client.
#[tokio::test]
async fn a_stream_whose_client_left_is_no_more() {
    let served = Served::start().await;
    for _ in 0..super::WATCHES_MAX + 20 {
        let mut frames = Frames::open(&served, &[], json!({"path": served.dir()})).await;
        assert!(matches!(frames.message().await, WatchDirResponse::Start(_)));
    }
}

#[derive(Debug, Clone)]
enum Step {
    Dirs(String),
    File(String),
    Gone(String),
    Look,
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let path = "[ab](/[ab]){0,3}";
    let step = prop_oneof![
        path.prop_map(Step::Dirs),
        path.prop_map(Step::File),
        path.prop_map(Step::Gone),
        Just(Step::Look),
    ];
    proptest::collection::vec(step, 0..30)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]

    /// However late a recursive watcher is read: who follows its events knows what is there, and no
    /// name is created twice.
    #[test]
    fn the_events_tell_the_tree(steps in steps()) {
        let dir = tempfile::tempdir().unwrap();
        let mut tree = Tree::watch(dir.path(), true).unwrap();
        let mut known = BTreeSet::<PathBuf>::new();
        let mut follow = |tree: &mut Tree| {
            let mut twice = None;
            let empty = tree.drain(usize::MAX, &mut |change| match change.what {
                Create if !known.insert(change.name.clone()) => twice = Some(change.name),
                Remove => known.retain(|path| !path.starts_with(&change.name)),
                _ => {}
            });
            assert!(empty.unwrap());
            (known.clone(), twice)
        };
        for step in steps {
            match step {
                Step::Dirs(path) => drop(std::fs::create_dir_all(dir.path().join(path))),
                Step::File(path) => drop(std::fs::write(dir.path().join(path), "x")),
                Step::Gone(path) => drop(crate::filesystem::transfer::remove(&dir.path().join(path))),
                Step::Look => prop_assert_eq!(follow(&mut tree).1, None),
            }
        }
        let (known, twice) = follow(&mut tree);
        prop_assert_eq!(twice, None);
        let mut there = BTreeSet::new();
        let mut pending = vec![PathBuf::new()];
        while let Some(at) = pending.pop() {
            for entry in std::fs::read_dir(dir.path().join(&at)).unwrap() {
                let path = at.join(entry.unwrap().file_name());
                if dir.path().join(&path).is_dir() {
                    pending.push(path.clone());
                }
                there.insert(path);
            }
        }
        prop_assert_eq!(known, there);
    }
}
