//! The control service, tokens, awake locks and shutdown, against the agent's executable.

#![allow(clippy::unwrap_used, reason = "helpers of tests are tests, too")]

mod support;

use std::collections::BTreeMap;
use std::os::unix::fs::PermissionsExt as _;
use std::process::{Command, Stdio};

use base64::Engine as _;
use dormouse_types::Generation;
use dormouse_wire::control::{Stat, Wake, Woken};
use dormouse_wire::envd::process::{LIST, ListRequest};
use http::Method;
use support::{Agent, bash, full, in_time};

fn wake(generation: u64) -> Wake {
    Wake {
        sandbox: "s1".parse().unwrap(),
        generation: Generation(generation),
        entropy: base64::prelude::BASE64_STANDARD.encode([1; 64]),
        wall_clock_ns: 0,
        hostname: "sleepy".into(),
        machine_id: "0123456789abcdef0123456789abcdef".into(),
        access_token: Some("secret".into()),
        new_identity: true,
        env: Some(BTreeMap::from([("COLOUR".into(), "blue".into())])),
        default_user: Some("root".into()),
        default_workdir: Some("/usr".into()),
        trusted_ca: None,
        egress: false,
        processes_max: None,
    }
}

async fn stat(agent: &Agent) -> Stat {
    let (status, body) = agent.control().await.json(Method::GET, "/stat", &()).await;
    assert_eq!(status, 200);
    serde_json::from_value(body).unwrap()
}

#[tokio::test]
async fn a_wake_sets_token_variables_names_and_runs_the_hooks() {
    let agent = Agent::start();
    let hooks = agent.path("etc/dormouse/wake.d");
    std::fs::create_dir_all(&hooks).unwrap();
    for (name, script) in [
        ("10-tell", "echo $DORMOUSE_SANDBOX_ID $DORMOUSE_GENERATION > $0.ran"),
        ("20-fail", "exit 7"),
        ("30-not-executable", "touch $0.ran"),
    ] {
        std::fs::write(hooks.join(name), format!("#!/bin/sh\n{script}\n")).unwrap();
        let mode = if name.starts_with("30") { 0o644 } else { 0o755 };
        std::fs::set_permissions(hooks.join(name), std::fs::Permissions::from_mode(mode)).unwrap();
    }
    let (status, body) = agent.control().await.json(Method::POST, "/wake", &wake(4)).await;
    assert_eq!(status, 200, "{body}");
    let woken: Woken = serde_json::from_value(body).unwrap();
    assert_eq!(woken.generation, Generation(4));
    assert!(
        matches!(&woken.notes[..], [note] if note.contains("20-fail") && note.contains("exit code 7")),
        "{:?}",
        woken.notes
    );
    assert_eq!(std::fs::read_to_string(hooks.join("10-tell.ran")).unwrap(), "s1 4\n");
    assert!(!hooks.join("30-not-executable.ran").exists());
    assert_eq!(std::fs::read_to_string(agent.path("etc/hostname")).unwrap(), "sleepy\n");

    let mut client = agent.client().await;
    let headers = [("content-type", "application/json")];
    let refused = client.send(Method::POST, LIST, &headers, full("{}")).await;
    assert_eq!(refused.status(), 401);
    let health = agent.client().await.send(Method::GET, "/health", &[], full("")).await;
    assert_eq!(health.status(), 204);
    let token = ("x-access-token", "secret");
    let mut stream =
        agent.client().await.start(&bash("echo $COLOUR; pwd; echo $E2B_SANDBOX_ID"), &[token]).await;
    assert_eq!(stream.rest().await.stdout(), "blue\n/usr\ns1\n");

    // Another identity counts its generations anew; the same one never goes back.
    let stale = Wake { new_identity: false, ..wake(3) };
    let (status, body) = agent.control().await.json(Method::POST, "/wake", &stale).await;
    assert_eq!(status, 409, "{body}");
    let bad = Wake { hostname: "a b".into(), ..wake(5) };
    let (status, body) = agent.control().await.json(Method::POST, "/wake", &bad).await;
    assert_eq!((status, body["message"].as_str().unwrap().contains("a b")), (400, true));
}

#[tokio::test]
async fn stat_tells_what_keeps_the_sandbox_awake() {
    let agent = Agent::start();
    assert_eq!((stat(&agent).await.attached, stat(&agent).await.in_flight), (0, 0));
    let mut stream = agent.client().await.start(&bash("read a"), &[]).await;
    stream.pid().await;
    let busy = stat(&agent).await;
    assert_eq!((busy.attached, busy.in_flight), (1, 1));
    drop(stream);
    // The agent sees the broken connection a moment later.
    let quiet =
        async { while stat(&agent).await != (Stat { attached: 0, in_flight: 0, ..stat(&agent).await }) {} };
    in_time("quiet", quiet).await;
}

#[tokio::test]
async fn an_awake_lock_lasts_as_long_as_its_command() {
    let agent = Agent::start();
    let mut command = Command::new(Agent::executable());
    command.args(["awake", "sh", "-c", "echo held; read a; exit 6"]);
    command.env("DORMOUSE_AWAKE_SOCKET", agent.path("run/dormouse/awake.sock"));
    let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
    let mut line = String::new();
    std::io::BufRead::read_line(&mut std::io::BufReader::new(child.stdout.take().unwrap()), &mut line)
        .unwrap();
    assert_eq!(line, "held\n");
    assert_eq!(stat(&agent).await.awake_locks, ["sh -c echo held; read a; exit 6"]);
    drop(child.stdin.take());
    let status = child.wait().unwrap();
    assert_eq!(status.code(), Some(6));
    in_time("the release", async { while !stat(&agent).await.awake_locks.is_empty() {} }).await;
}

#[tokio::test]
async fn without_an_agent_there_is_no_lock() {
    let mut command = Command::new(Agent::executable());
    command.args(["awake", "true"]).env("DORMOUSE_AWAKE_SOCKET", "/no/socket");
    let output = command.output().unwrap();
    assert_eq!(output.status.code(), Some(125));
    assert!(String::from_utf8_lossy(&output.stderr).contains("/no/socket"));
}

#[tokio::test]
async fn a_shutdown_cuts_streams_and_is_no_exit_of_a_command() {
    let agent = Agent::start();
    let mut stream = agent.client().await.start(&bash("sleep 1000"), &[]).await;
    stream.pid().await;
    let answer = agent.control().await.send(Method::POST, "/shutdown", &[], full("")).await;
    assert_eq!(answer.status(), 204);
    let rest = in_time("the cut", stream.rest()).await;
    assert!(rest.cut && rest.end.is_none(), "{rest:?}");
    assert!(agent.exit().await.success());
}

#[tokio::test]
async fn metrics_and_variables_are_served() {
    let agent = Agent::start();
    let (status, metrics) = agent.client().await.json(Method::GET, "/metrics", &()).await;
    assert_eq!(status, 200);
    for name in ["ts", "cpu_count", "mem_total", "mem_used", "disk_total", "mem_total_mib"] {
        assert!(metrics[name].as_u64().unwrap() > 0, "{name} of {metrics}");
    }
    assert!(metrics["cpu_used_pct"].is_number());
    let (status, envs) = agent.client().await.json(Method::GET, "/envs", &()).await;
    assert_eq!((status, envs), (200, serde_json::json!({})));
}

#[tokio::test]
async fn process_1_collects_every_orphan_and_loses_no_exit_code() {
    // The agent as process 1 of a process namespace of its own.
    let mut command = Command::new("unshare");
    command.args(["--pid", "--fork", "--mount-proc", "--kill-child", Agent::executable()]);
    let agent = Agent::start_by(command);
    // Sixty orphans that end at about the same time as sixty commands.
    let runs = (0..60_i32).map(|n| {
        let agent = &agent;
        async move {
            let outcome = agent.run(&format!("(true & ) ; exit {n}")).await;
            assert_eq!(outcome.end.unwrap().exit_code, n);
        }
    });
    in_time("all exit codes", futures_util::future::join_all(runs)).await;
    let count = "cat /proc/[0-9]*/stat 2>/dev/null | grep -c ') Z '";
    in_time("the end of all zombies", async { while agent.run(count).await.stdout() != "0\n" {} }).await;
    let _: dormouse_wire::envd::process::ListResponse = agent.call(LIST, &ListRequest {}).await.unwrap();
}
