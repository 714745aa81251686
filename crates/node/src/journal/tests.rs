use dormouse_types::{KeyId, SandboxId, SnapshotId, Timestamp};

use super::{Journal, SnapshotRow, hash_secret};
use crate::model::KeyInfo;

fn row(id: &str, parent: Option<&str>) -> SnapshotRow {
    SnapshotRow {
        id: id.parse().unwrap(),
        parent: parent.map(|id| id.parse().unwrap()),
        sandbox: "s1".parse::<SandboxId>().unwrap(),
        automatic: true,
        owner: None,
        created_ms: 1,
        names: Vec::new(),
    }
}

#[tokio::test]
async fn a_damaged_file_is_kept_aside_and_named() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("node.db");
    std::fs::write(&path, vec![7_u8; 8192]).unwrap();
    let opened = Journal::open(dir.path()).unwrap();
    let kept = opened.lost.expect("the damage was not noticed").kept_aside.expect("it was not kept");
    assert_eq!(std::fs::read(&kept).unwrap(), vec![7_u8; 8192]);
    assert!(opened.journal.keys().await.unwrap().is_empty());
}

#[tokio::test]
async fn a_newer_schema_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    drop(Journal::open(dir.path()).unwrap());
    let connection = rusqlite::Connection::open(dir.path().join("node.db")).unwrap();
    connection.pragma_update(None, "user_version", 1000).unwrap();
    let error = Journal::open(dir.path()).err().expect("a newer schema was opened");
    assert!(error.to_string().contains("newer release"), "{error}");
}

#[tokio::test]
async fn children_of_a_removed_snapshot_hang_on_its_parent() {
    let dir = tempfile::tempdir().unwrap();
    let journal = Journal::open(dir.path()).unwrap().journal;
    for (id, parent) in [("a", None), ("b", Some("a")), ("c", Some("b"))] {
        journal.put_snapshot(row(id, parent)).await.unwrap();
    }
    let now = Timestamp::now();
    let (b, c) = ("b".parse::<SnapshotId>().unwrap(), "c".parse::<SnapshotId>().unwrap());
    journal.claim_snapshot(b.clone(), Some("kept".to_owned()), now).await.unwrap();
    assert_eq!(journal.snapshot_by_name("kept".to_owned()).await.unwrap().unwrap().id, b);
    journal.claim_snapshot(c.clone(), Some("kept".to_owned()), now).await.unwrap();
    journal.drop_snapshot(b.clone()).await.unwrap();
    let c = journal.snapshot(c).await.unwrap().unwrap();
    assert_eq!(c.parent, Some("a".parse().unwrap()));
    assert_eq!(c.names, ["kept"], "the name points to the newest");
    assert!(journal.snapshot(b).await.unwrap().is_none());
}

#[tokio::test]
async fn a_failing_closure_undoes_itself_alone() {
    let dir = tempfile::tempdir().unwrap();
    let journal = Journal::open(dir.path()).unwrap().journal;
    let info = |name: &str| KeyInfo {
        id: KeyId::generate(),
        name: name.to_owned(),
        hint: "e2b_00".to_owned(),
        created_at: Timestamp::now(),
    };
    let (good, bad) = tokio::join!(
        journal.put_key(info("good"), hash_secret("a")),
        journal.call(|connection| {
            connection.execute("DELETE FROM keys", [])?;
            connection.execute("INSERT INTO keys (id) VALUES ('x')", [])
        }),
    );
    good.unwrap();
    assert!(bad.is_err());
    assert_eq!(journal.keys().await.unwrap().len(), 1);
    assert!(journal.key_by_hash(hash_secret("a")).await.unwrap().is_some());
    assert!(journal.key_by_hash(hash_secret("b")).await.unwrap().is_none());
}

#[tokio::test]
async fn nobody_else_can_read_it_or_its_copy() {
    use std::os::unix::fs::PermissionsExt;
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("node.db");
    std::fs::write(&path, "").unwrap();
    std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o644)).unwrap();
    let journal = Journal::open(dir.path()).unwrap().journal;
    let info = KeyInfo {
        id: KeyId::generate(),
        name: "k".to_owned(),
        hint: "e2b_".to_owned(),
        created_at: Timestamp::now(),
    };
    journal.put_key(info, hash_secret("secret")).await.unwrap();
    drop(journal);
    let mut seen = 0;
    for entry in std::fs::read_dir(dir.path()).unwrap() {
        let entry = entry.unwrap();
        let mode = entry.metadata().unwrap().permissions().mode() & 0o777;
        assert_eq!(mode, 0o600, "{}", entry.path().display());
        seen += 1;
    }
    assert_eq!(seen, 2, "the journal and its copy");
}
