//! The network: S19–S23.

use std::net::SocketAddr;

use anyhow::{Context, Result, bail, ensure};
use hyper::Method;
use serde_json::json;
use tokio::io::AsyncWriteExt;
use tokio::net::TcpListener;

use super::stage::{Stage, ask_witness, eventually, start_witness};

/// Ports of the source and of each fork answer, 50 of 50 tries.
pub async fn s19(stage: &Stage) -> Result<()> {
    let source = stage.sandbox().await?;
    let before = start_witness(&source, 8119, 1).await?;
    let forks = source.fork(3).await?;
    for attempt in 0..50 {
        for one in std::iter::once(&source).chain(&forks) {
            let now = ask_witness(one, 8119).await.with_context(|| format!("try {attempt} of {}", one.id))?;
            now.goes_on_from(&before)?;
        }
    }
    Ok(())
}

/// A connection that arrives during a checkpoint or resume waits and is served; it gets no 502.
pub async fn s20(stage: &Stage) -> Result<()> {
    let sandbox = stage.sandbox_with(json!({"autoPause": true, "autoResume": {"enabled": true}})).await?;
    let before = start_witness(&sandbox, 8120, 64).await?;
    let hammer = |count: usize| {
        let sandbox = sandbox.clone();
        tokio::spawn(async move {
            for attempt in 0..count {
                ask_witness(&sandbox, 8120).await.with_context(|| format!("request {attempt}"))?;
            }
            anyhow::Ok(())
        })
    };
    let (one, two) = (hammer(60), hammer(60));
    for _ in 0..3 {
        sandbox.snapshot().await?;
    }
    one.await?.context("during a checkpoint")?;
    two.await?.context("during a checkpoint")?;
    for _ in 0..3 {
        sandbox.pause().await?;
        let first: Vec<_> = (0..8).map(|_| hammer(3)).collect();
        for task in first {
            task.await?.context("while it was resumed by traffic")?;
        }
        ask_witness(&sandbox, 8120).await?.goes_on_from(&before)?;
    }
    Ok(())
}

/// The agent's channel comes back after restore; a streaming command goes on with nothing lost.
pub async fn s21(stage: &Stage) -> Result<()> {
    let sandbox = stage.sandbox().await?;
    let mut running = sandbox.start("for i in $(seq 1 400); do echo line-$i; sleep 0.02; done").await?;
    running.until("line-20\n").await?;
    for _ in 0..3 {
        sandbox.pause().await?;
        sandbox.resume().await?;
        sandbox.snapshot().await?;
    }
    let output = running.wait().await?;
    let expected: String = (1..=400).map(|i| format!("line-{i}\n")).collect();
    ensure!(output.stdout == expected, "lines were lost, repeated or reordered:\n{}", output.stdout);
    ensure!(output.exit == 0, "it ended with {}", output.exit);
    sandbox.sh("echo the channel works").await.map(drop)
}

/// A listener on 127.0.0.1 inside is reachable through the exposed port; a closed port says so.
pub async fn s22(stage: &Stage) -> Result<()> {
    let sandbox = stage.sandbox().await?;
    sandbox.sh("mkdir -p www && echo inside > www/index.html").await?;
    sandbox.spawn("exec python3 -m http.server 8122 --bind 127.0.0.1 -d www").await?;
    let ask = || async { Ok(sandbox.get(8122, "/index.html").await?.status == 200) };
    eventually("the server inside", ask).await?;
    let page = sandbox.get(8122, "/index.html").await?.expect(200)?.text();
    ensure!(page == "inside\n", "the page is {page:?}");
    let closed = sandbox.get(8123, "/").await?.expect(502)?.text();
    ensure!(closed.contains("port is not open"), "a closed port answers {closed}");
    // The agent's own service for the host is no port of the sandbox.
    let control = sandbox.get(dormouse_wire::stream::CONTROL_PORT, "/stat").await?;
    ensure!(control.status.as_u16() >= 400, "the control service answers a client: {}", control.text());
    Ok(())
}

/// A server on the host that answers every connection with a line.
async fn host_server(address: &str) -> Result<SocketAddr> {
    let listener = TcpListener::bind((address, 0)).await.with_context(|| format!("cannot bind {address}"))?;
    let bound = listener.local_addr()?;
    tokio::spawn(async move {
        while let Ok((mut stream, _)) = listener.accept().await {
            let answer = b"HTTP/1.1 200 OK\r\ncontent-length: 10\r\nconnection: close\r\n\r\nfrom-host\n";
            // A client that went away is its own affair.
            drop(stream.write_all(answer).await);
        }
    });
    Ok(bound)
}

/// The host's own services, private ranges and metadata addresses are unreachable unless allowed.
pub async fn s23(stage: &Stage) -> Result<()> {
    let loopback = host_server("127.0.0.1").await?;
    let sandbox = stage.sandbox().await?;
    let outside = super::stage::shell("hostname -I || true")?;
    let mut targets = vec![
        loopback.to_string(),
        stage.http()?.address,
        "169.254.169.254:80".to_owned(),
        "10.0.0.1:80".to_owned(),
        "192.168.0.1:80".to_owned(),
        "172.16.0.1:80".to_owned(),
        "100.64.0.1:80".to_owned(),
        "[::1]:80".to_owned(),
        "[fd00:ec2::254]:80".to_owned(),
        format!("[::ffff:127.0.0.1]:{}", loopback.port()),
    ];
    for address in outside.split_whitespace().filter(|address| !address.contains(':')) {
        let server = host_server(address).await?;
        targets.push(server.to_string());
    }
    for target in &targets {
        for through in ["", "--proxy socks5h://127.0.0.1:$DORMOUSE_SOCKS_PORT", "--noproxy '*'"] {
            let through = through.replace("$DORMOUSE_SOCKS_PORT", "${ALL_PROXY##*:}");
            let command = format!("curl -s -f --max-time 10 {through} http://{target}/");
            let output = sandbox.run(&command).await?;
            if output.exit == 0 || output.stdout.contains("from-host") {
                bail!("{command} reached it from inside: {}", output.stdout);
            }
            ensure!(output.exit != 28, "{command} hung in place of failing at once");
        }
    }
    let allowed = json!({"network": {"allowOut": ["127.0.0.1/32"]}});
    let sandbox = stage.sandbox_with(allowed).await?;
    let page = sandbox.sh(&format!("NO_PROXY= no_proxy= curl -s --max-time 10 http://{loopback}/")).await?;
    ensure!(page == "from-host\n", "an allowed address is not reached: {page:?}");
    let path = format!("/sandboxes/{}/network", sandbox.id);
    sandbox.http.api(Method::PUT, &path, Some(json!({}))).await?.expect(204)?;
    let output =
        sandbox.run(&format!("NO_PROXY= no_proxy= curl -s -f --max-time 10 http://{loopback}/")).await?;
    ensure!(output.exit != 0, "it is still reached after the rule was taken away");
    Ok(())
}
