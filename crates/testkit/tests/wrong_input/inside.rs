//! What happens to a sandbox from within, and to the processes that hold it.

use std::time::{Duration, Instant};

use dormouse_testkit::http::Call;
use dormouse_testkit::sandbox::Sandbox;
use hyper::Method;
use serde_json::{Value, json};

use crate::place::Place;

/// Longer than anything here honestly takes.
const LONGEST: Duration = Duration::from_secs(90);

async fn until(what: &str, sandbox: &Sandbox, check: impl Fn(&Value) -> bool) -> Value {
    let end = Instant::now() + LONGEST;
    loop {
        let info = sandbox.own_info().await.unwrap();
        if check(&info) {
            return info;
        }
        assert!(Instant::now() < end, "{what} did not come: {info}");
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}

/// Failed, for this reason, with this snapshot offered; going back to it works.
async fn failed_and_goes_back(sandbox: &Sandbox, snapshot: &str, reason: &str) {
    let info = until("the failure", sandbox, |info| info["state"] == "failed").await;
    assert!(info.to_string().contains(reason), "{reason:?} is not told: {info}");
    let refused = sandbox.pause_answer().await.unwrap();
    assert!(refused.text().contains(snapshot), "the snapshot is not offered: {}", refused.text());
    sandbox.rollback(snapshot).await.unwrap();
    assert_eq!(sandbox.sh("cat /home/user/note").await.unwrap(), "kept");
}

async fn with_snapshot(place: &Place, request: Value) -> (dormouse_testkit::daemon::Daemon, Sandbox, String) {
    let daemon = place.daemon().await;
    let sandbox = Sandbox::create(&daemon.http, request).await.unwrap();
    sandbox.write("/home/user/note", "kept").await.unwrap();
    let snapshot = sandbox.snapshot().await.unwrap();
    (daemon, sandbox, snapshot)
}

#[tokio::test(flavor = "multi_thread")]
async fn a_sandbox_whose_agent_was_killed_fails_and_offers_its_last_snapshot() {
    let place = Place::new("agent");
    let (daemon, sandbox, snapshot) = with_snapshot(&place, json!({})).await;
    let attached = sandbox.start("sleep 1000").await.unwrap();
    // Its own end is a broken stream.
    drop(sandbox.sh_root("kill -9 1").await);
    // Nobody waits for ever for what cannot come.
    let ended = tokio::time::timeout(LONGEST, attached.wait()).await.expect("the stream hangs");
    assert!(ended.is_err(), "a command that was cut off is said to have ended: {ended:?}");
    failed_and_goes_back(&sandbox, &snapshot, "agent").await;

    // The same from the host: the runtime's own processes.
    let pids = dormouse_testkit::host::processes_of_runtime(&place.dir, daemon.pid(), &sandbox.id).unwrap();
    let pids: Vec<String> = pids.iter().map(ToString::to_string).collect();
    drop(std::process::Command::new("kill").arg("-9").args(&pids).output().unwrap());
    failed_and_goes_back(&sandbox, &snapshot, "ended").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_killed_keeper_is_replaced_and_the_sandbox_goes_on() {
    let place = Place::new("keeper");
    let (_daemon, sandbox, _) = with_snapshot(&place, json!({})).await;
    sandbox
        .spawn("echo $$ > /tmp/pid; i=0; while :; do i=$((i+1)); echo $i > /tmp/n; sleep 0.05; done")
        .await
        .unwrap();
    let pid = sandbox.sh("until cat /tmp/pid; do sleep 0.05; done").await.unwrap();
    // More than once, and at other moments after the last time.
    for pause_ms in [0, 700, 2500] {
        let attached = sandbox.start("sleep 1000").await.unwrap();
        tokio::time::sleep(Duration::from_millis(pause_ms)).await;
        let generation = sandbox.own_info().await.unwrap()["generation"].clone();
        let keeper = std::fs::read(place.dir.join("run").join(&sandbox.id).join("keeper.json")).unwrap();
        let (keeper, _): (u32, u64) = serde_json::from_slice(&keeper).unwrap();
        let killed = std::process::Command::new("kill").args(["-9", &keeper.to_string()]).status().unwrap();
        assert!(killed.success());
        let ended = tokio::time::timeout(LONGEST, attached.wait()).await.expect("the stream hangs");
        assert!(ended.is_err(), "{ended:?}");
        let replaced = |info: &Value| info["state"] == "running" && info["generation"] != generation;
        until("another keeper", &sandbox, replaced).await;
        assert_eq!(sandbox.sh("cat /tmp/pid; kill -0 $(cat /tmp/pid)").await.unwrap(), pid);
        sandbox.sh("n=$(cat /tmp/n); until [ $(cat /tmp/n) != $n ]; do sleep 0.05; done").await.unwrap();
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn memory_and_disk_beyond_the_limit_end_a_sandbox_with_that_reason() {
    let place = Place::new("limits");
    let small = json!({"dormouse": {"shape": {"memoryMB": 512, "diskMB": 256}}});
    let (_daemon, sandbox, snapshot) = with_snapshot(&place, small).await;
    let hog = "exec python3 -c 'x = []\nwhile True: x.append(b\"x\" * (16 << 20))'";
    // The kernel ends either the process that holds the memory or the sandbox; it never goes on.
    match tokio::time::timeout(LONGEST, sandbox.run(hog)).await.expect("it goes on beyond its limit") {
        Ok(output) => {
            assert_ne!(output.exit, 0, "{output:?}");
            assert_eq!(sandbox.read("/home/user/note").await.unwrap(), "kept");
        }
        Err(_) => failed_and_goes_back(&sandbox, &snapshot, "limit of 512 MiB").await,
    }
    drop(sandbox.spawn("exec dd if=/dev/zero of=/home/user/big bs=1M count=2000").await);
    failed_and_goes_back(&sandbox, &snapshot, "256 MiB on disk").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_fork_bomb_is_refused_more_processes_and_nothing_else_suffers() {
    let place = Place::new("bomb");
    let few = json!({"dormouse": {"shape": {"processesMax": 64}}});
    let (_daemon, sandbox, _) = with_snapshot(&place, few).await;
    let bomb = "import errno, os, signal, time\nsignal.signal(signal.SIGCHLD, signal.SIG_DFL)\nmade = 0\n\
        while made < 500:\n    try:\n        pid = os.fork()\n    except OSError as error:\n\
        \x20       print(errno.errorcode[error.errno], flush=True)\n        break\n\
        \x20   if pid == 0:\n        time.sleep(1000)\n    made += 1\nprint(made, flush=True)\ntime.sleep(1000)\n";
    sandbox.write("/home/user/bomb.py", bomb).await.unwrap();
    let mut running = sandbox.start("exec python3 /home/user/bomb.py").await.unwrap();
    running.until("EAGAIN\n").await.unwrap();
    assert_eq!(sandbox.state().await.unwrap(), "running");
    assert_eq!(sandbox.read("/home/user/note").await.unwrap(), "kept");
    // Another command may find no room; it is answered, and so is the end of the bomb.
    drop(sandbox.run("true").await);
    let body = json!({"process": {"pid": running.pid}, "signal": "SIGNAL_SIGKILL"}).to_string();
    let headers = vec![
        ("e2b-sandbox-id", sandbox.id.clone()),
        ("e2b-sandbox-port", "49983".to_owned()),
        ("x-access-token", sandbox.token.clone().unwrap_or_default()),
        ("content-type", "application/json".to_owned()),
    ];
    let call = Call { method: Method::POST, path: "/process.Process/SendSignal", headers, body: body.into() };
    sandbox.http.send(call).await.unwrap().expect(200).unwrap();
}
