//! The service over HTTP, as clients call it.

use std::os::unix::fs::{MetadataExt as _, symlink};

use dormouse_wire::envd::filesystem::{LIST_DIR, MAKE_DIR, MOVE, REMOVE, STAT};
use serde_json::json;

use super::harness::Served;

#[tokio::test]
async fn directories_are_made_with_their_parents_and_once() {
    let served = Served::start().await;
    let path = served.at("a/b/c");
    let made = served.call(MAKE_DIR, json!({"path": path})).await.unwrap();
    assert_eq!(made["entry"]["type"], "FILE_TYPE_DIRECTORY");
    assert_eq!(made["entry"]["permissions"], "drwxr-xr-x");
    assert_eq!(served.code(MAKE_DIR, json!({"path": path})).await, "already_exists");
    std::fs::write(served.at("f"), "").unwrap();
    assert_eq!(served.code(MAKE_DIR, json!({"path": served.at("f")})).await, "invalid_argument");
    assert_eq!(served.code(MAKE_DIR, json!({"path": served.at("f/x")})).await, "invalid_argument");
}

#[tokio::test]
async fn what_a_user_makes_is_theirs() {
    let served = Served::start().await;
    let message = json!({"path": served.at("a/b")}).to_string();
    // Basic authentication of "nobody:".
    let headers = [("content-type", "application/json"), ("authorization", "Basic bm9ib2R5Og==")];
    let answer = served.send(http::Method::POST, MAKE_DIR, &headers, message.clone()).await;
    assert_eq!(answer.json()["entry"]["owner"], "nobody");
    assert_eq!(served.at("a").metadata().unwrap().uid(), 65534);
    // "no-such:"
    let headers = [("content-type", "application/json"), ("authorization", "Basic bm8tc3VjaDo=")];
    let answer = served.send(http::Method::POST, STAT, &headers, message).await;
    assert_eq!(answer.status, 401);
    assert_eq!(answer.json(), json!({"code": "unauthenticated", "message": "invalid username: 'no-such'"}));
}

#[tokio::test]
async fn lists_go_as_deep_as_asked_and_do_not_follow_links() {
    let served = Served::start().await;
    std::fs::create_dir_all(served.at("d/b/deep")).unwrap();
    std::fs::write(served.at("d/b/f"), "12").unwrap();
    std::fs::write(served.at("d/a"), "").unwrap();
    symlink(served.at("d/b"), served.at("d/link")).unwrap();
    symlink(served.at("d"), served.at("start")).unwrap();
    let list = async |name: &str, depth: u32| {
        let answer = served.call(LIST_DIR, json!({"path": served.at(name), "depth": depth})).await.unwrap();
        let prefix = format!("{}/", served.at(name).display());
        let entries = answer["entries"].as_array().cloned().unwrap_or_default();
        entries
            .iter()
            .map(|entry| entry["path"].as_str().unwrap().strip_prefix(&prefix).unwrap().to_owned())
            .collect::<Vec<_>>()
    };
    assert_eq!(list("d", 0).await, ["a", "b", "link"]);
    assert_eq!(list("d", 1).await, ["a", "b", "link"]);
    assert_eq!(list("start", 2).await, ["a", "b", "b/deep", "b/f", "link"]);
    assert!(list("d/b/deep", 9).await.is_empty());
    symlink("loop", served.at("loop")).unwrap();
    for (name, code) in [("none", "not_found"), ("d/a", "invalid_argument"), ("loop", "failed_precondition")]
    {
        assert_eq!(served.code(LIST_DIR, json!({"path": served.at(name)})).await, code, "{name}");
    }
}

#[tokio::test]
async fn moving_makes_the_parent_and_replaces_files() {
    let served = Served::start().await;
    std::fs::write(served.at("f"), "new").unwrap();
    let moved = served
        .call(MOVE, json!({"source": served.at("f"), "destination": served.at("x/y/g")}))
        .await
        .unwrap();
    assert_eq!(moved["entry"]["path"], json!(served.at("x/y/g")));
    assert_eq!(moved["entry"]["size"], "3");
    std::fs::write(served.at("h"), "old").unwrap();
    served.call(MOVE, json!({"source": served.at("x/y/g"), "destination": served.at("h")})).await.unwrap();
    assert_eq!(std::fs::read_to_string(served.at("h")).unwrap(), "new");
    let missing = json!({"source": served.at("f"), "destination": served.at("never/g")});
    assert_eq!(served.code(MOVE, missing).await, "not_found");
    assert!(!served.at("never").exists());
    let into_itself = json!({"source": served.at("x"), "destination": served.at("x/y/z")});
    assert_eq!(served.code(MOVE, into_itself).await, "invalid_argument");
}

#[tokio::test]
async fn removing_takes_all_below_and_no_links_targets() {
    let served = Served::start().await;
    std::fs::create_dir_all(served.at("keep")).unwrap();
    std::fs::write(served.at("keep/f"), "").unwrap();
    std::fs::create_dir_all(served.at("d/e")).unwrap();
    symlink(served.at("keep"), served.at("d/e/link")).unwrap();
    for name in ["d", "d", "none/below"] {
        assert_eq!(served.call(REMOVE, json!({"path": served.at(name)})).await, Ok(json!({})));
    }
    assert!(!served.at("d").exists() && served.at("keep/f").exists());
    assert_eq!(served.code(REMOVE, json!({"path": "/x/.."})).await, "invalid_argument");
}

#[tokio::test]
async fn hostile_messages_are_answered() {
    let served = Served::start().await;
    assert_eq!(served.code(STAT, json!({"path": 7})).await, "invalid_argument");
    assert_eq!(served.code(STAT, json!({"path": "a\0b"})).await, "invalid_argument");
    assert_eq!(served.code(STAT, json!({"path": "~daemon/x"})).await, "invalid_argument");
    assert_eq!(served.code(STAT, json!({"path": format!("/{}", "x".repeat(300))})).await, "invalid_argument");
    assert_eq!(served.code(STAT, json!({"path": served.at("none")})).await, "not_found");
    let answer = served.send(http::Method::POST, STAT, &[("content-type", "application/proto")], "").await;
    assert_eq!(answer.json()["code"], "unimplemented");
}
