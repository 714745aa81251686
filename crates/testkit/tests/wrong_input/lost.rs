//! What the daemon wrote is damaged or gone: it says so, keeps what is there, and destroys nothing.

use std::path::Path;

use dormouse_testkit::sandbox::Sandbox;
use hyper::Method;
use serde_json::json;

use crate::place::Place;

type Harm = fn(&Path);

/// To the file, with the daemon gone.
fn harms() -> [(&'static str, Harm); 4] {
    [
        ("node.db.damaged", |path| std::fs::write(path, [0x5a; 40_000]).unwrap()),
        ("node.db.damaged", |path| {
            let half = std::fs::metadata(path).unwrap().len() / 2;
            std::fs::File::options().write(true).open(path).unwrap().set_len(half).unwrap();
        }),
        ("node.db.damaged", |path| std::fs::write(path, "").unwrap()),
        ("was gone", |path| std::fs::remove_file(path).unwrap()),
    ]
}

fn harm(dir: &Path, harm: Harm) {
    // The log would mend the file.
    for name in ["node.db-wal", "node.db-shm"] {
        drop(std::fs::remove_file(dir.join(name)));
    }
    harm(&dir.join("node.db"));
}

/// Its copy lags by about a second.
async fn copied(dir: &Path, words: &[&str]) {
    let copy = dir.join("node.db.copy");
    loop {
        let bytes = std::fs::read(&copy).unwrap_or_default();
        let holds = |word: &&str| bytes.windows(word.len()).any(|part| part == word.as_bytes());
        if words.iter().all(holds) {
            return;
        }
        tokio::time::sleep(std::time::Duration::from_millis(50)).await;
    }
}

const COUNT: &str = "echo $$ > /tmp/pid; i=0; while :; do i=$((i+1)); echo $i > /tmp/n; sleep 0.05; done";

#[tokio::test(flavor = "multi_thread")]
async fn a_damaged_database_is_kept_aside_and_nothing_is_forgotten() {
    let place = Place::new("database");
    let mut daemon = place.daemon().await;
    let (awake, asleep) = (
        Sandbox::create(&daemon.http, json!({"metadata": {"who": "awake"}})).await.unwrap(),
        Sandbox::create(&daemon.http, json!({"metadata": {"who": "asleep"}})).await.unwrap(),
    );
    awake.spawn(COUNT).await.unwrap();
    let pid = awake.sh("until cat /tmp/pid; do sleep 0.05; done").await.unwrap();
    asleep.write("/home/user/note", "remember").await.unwrap();
    for (word, how) in harms() {
        asleep.pause().await.unwrap();
        let head = asleep.own_info().await.unwrap()["parentSnapshotID"].as_str().unwrap().to_owned();
        copied(&place.dir, &[&awake.id, &head]).await;
        daemon.kill().unwrap();
        harm(&place.dir, how);
        daemon.restart().await.unwrap();
        assert!(place.log().contains(word), "{word:?} is not told: {}", place.log());
        assert_eq!(awake.state().await.unwrap(), "running", "{word}");
        assert_eq!(awake.info().await.unwrap()["metadata"]["who"], "awake");
        assert_eq!(awake.sh("cat /tmp/pid; kill -0 $(cat /tmp/pid)").await.unwrap(), pid);
        assert_eq!(asleep.state().await.unwrap(), "paused");
        asleep.resume().await.unwrap();
        assert_eq!(asleep.read("/home/user/note").await.unwrap(), "remember");
        // Templates and keys, too.
        let more = Sandbox::create(&daemon.http, json!({})).await.unwrap();
        more.sh("true").await.unwrap();
        more.kill().await.unwrap().expect(204).unwrap();
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn what_a_database_forgot_is_not_swept_until_somebody_says_so() {
    let place = Place::new("forgotten");
    let mut daemon = place.daemon().await;
    let awake = Sandbox::create(&daemon.http, json!({})).await.unwrap();
    let snapshot = awake.snapshot().await.unwrap();
    let keeper = |id: &str| place.dir.join("run").join(id).join("agent.sock").exists();
    let runs = |id: &str| {
        let line = dormouse_testkit::host::holdings(&place.dir, 0).unwrap().processes;
        line.iter().any(|process| process.contains(id))
    };
    daemon.kill().unwrap();
    harm(&place.dir, |path| std::fs::write(path, [0x5a; 40_000]).unwrap());
    std::fs::remove_file(place.dir.join("node.db.copy")).unwrap();
    for _ in 0..2 {
        daemon.restart().await.unwrap();
        assert!(keeper(&awake.id) && runs(&awake.id), "it was swept away: {}", place.log());
        let key = std::fs::read_to_string(place.dir.join("admin.key")).unwrap();
        key.trim().clone_into(&mut daemon.http.key);
        let path = format!("/dormouse/v1/snapshots/{snapshot}");
        daemon.http.api(Method::GET, &path, None).await.unwrap().expect(200).unwrap();
        daemon.kill().unwrap();
    }
    daemon.restart().await.unwrap();
    daemon.cli(&["gc"]).unwrap();
    assert!(!keeper(&awake.id) && !runs(&awake.id), "gc left it");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_damaged_manifest_is_kept_aside_and_costs_only_itself() {
    let place = Place::new("manifest");
    let mut daemon = place.daemon().await;
    let sandbox = Sandbox::create(&daemon.http, json!({})).await.unwrap();
    let (good, bad) = (sandbox.snapshot().await.unwrap(), sandbox.snapshot().await.unwrap());
    daemon.kill().unwrap();
    let path = place.dir.join("snapshots").join(&bad).join("manifest");
    let mut bytes = std::fs::read(&path).unwrap();
    let middle = bytes.len() / 2;
    bytes[middle] ^= 1;
    std::fs::write(&path, bytes).unwrap();
    daemon.restart().await.unwrap();
    assert!(place.log().contains(&format!("{bad}.damaged.1")), "{}", place.log());
    assert!(place.dir.join("snapshots").join(format!("{bad}.damaged.1")).is_dir());
    let refused = sandbox.rollback_answer(&bad).await.unwrap();
    assert!(refused.status.is_client_error() && refused.text().contains(&bad), "{}", refused.text());
    assert_eq!(sandbox.sh("echo goes on").await.unwrap(), "goes on\n");
    sandbox.rollback(&good).await.unwrap();
    assert_eq!(sandbox.sh("echo goes on").await.unwrap(), "goes on\n");
}
