//! Idleness: S39, S40.

use std::time::Duration;

use anyhow::{Result, ensure};
use serde_json::{Value, json};
use tokio::io::AsyncReadExt;
use tokio::net::TcpListener;

use super::stage::{Stage, ask_witness, eventually, start_witness};
use crate::sandbox::Sandbox;

const FREEZE_AFTER_S: u64 = 3;

fn policy() -> Value {
    json!({"dormouse": {"idle": {"freezeAfter": FREEZE_AFTER_S, "diskAfter": null}}})
}

async fn frozen(sandbox: &Sandbox) -> Result<bool> {
    Ok(sandbox.own_info().await?["tier"] == "frozen")
}

/// Busy ones are not put to sleep; a quiet server is, and answers. Without a policy nothing is.
pub async fn s39(stage: &Stage) -> Result<()> {
    let listener = TcpListener::bind("127.0.0.1:0").await?;
    let port = listener.local_addr()?.port();
    let held = tokio::spawn(async move {
        let mut open = Vec::new();
        while let Ok((mut stream, _)) = listener.accept().await {
            let mut first = [0_u8; 1];
            // Held open and never answered: a worker that waits for its upstream.
            drop(stream.read(&mut first).await);
            open.push(stream);
        }
    });
    let quiet = stage.sandbox_with(policy()).await?;
    let before = start_quiet_server(&quiet).await?;
    let busy = stage.sandbox_with(policy()).await?;
    busy.spawn("exec python3 -c 'while True: pass'").await?;
    let mut request = policy();
    request["network"] = json!({"allowOut": ["127.0.0.1/32"]});
    let outbound = stage.sandbox_with(request).await?;
    outbound
        .spawn(&format!("NO_PROXY= no_proxy= exec curl -s --max-time 300 http://127.0.0.1:{port}/"))
        .await?;
    let locked = stage.sandbox_with(policy()).await?;
    locked.spawn("exec dormouse-awake sleep 300").await?;
    let without = stage.sandbox().await?;
    start_quiet_server(&without).await?;
    eventually("the quiet server's sleep", || frozen(&quiet)).await?;
    // Twice the time after which the quiet one slept.
    tokio::time::sleep(Duration::from_secs(2 * FREEZE_AFTER_S)).await;
    for (name, sandbox) in
        [("busy", &busy), ("outbound", &outbound), ("locked", &locked), ("without", &without)]
    {
        let own = sandbox.own_info().await?;
        ensure!(own["tier"].is_null(), "the {name} one was put to sleep: {own}");
        let why = own["whyAwake"].as_array().map_or(0, Vec::len);
        ensure!(why > 0, "the {name} one does not say why it is awake: {own}");
    }
    let after = quiet.get(8139, "/").await?.expect(200)?.text();
    ensure!(after == before, "the quiet server answered {after:?} in place of {before:?}");
    eventually("the quiet server's second sleep", || frozen(&quiet)).await?;
    held.abort();
    Ok(())
}

/// A server that does nothing between requests.
async fn start_quiet_server(sandbox: &Sandbox) -> Result<String> {
    sandbox.sh("mkdir -p quiet && echo still-here > quiet/index.html").await?;
    sandbox.spawn("exec python3 -m http.server 8139 --bind 127.0.0.1 -d quiet").await?;
    eventually("the quiet server", || async { Ok(sandbox.get(8139, "/").await?.status == 200) }).await?;
    Ok(sandbox.get(8139, "/").await?.text())
}

/// A client that polls in a loop does not keep a sandbox awake for ever when its policy says so.
pub async fn s40(stage: &Stage) -> Result<()> {
    let sandbox = stage.sandbox_with(policy()).await?;
    let before = start_witness(&sandbox, 8140, 1).await?;
    sandbox.sh("pkill -STOP -f witness.py").await?;
    let poller = sandbox.clone();
    let polling = tokio::spawn(async move {
        loop {
            // Asking how it is is no work for it.
            drop(poller.info().await);
            tokio::time::sleep(Duration::from_millis(200)).await;
        }
    });
    let slept = eventually("its sleep under polling", || frozen(&sandbox)).await;
    polling.abort();
    slept?;
    sandbox.sh("pkill -CONT -f witness.py").await?;
    ask_witness(&sandbox, 8140).await?.goes_on_from(&before)
}
