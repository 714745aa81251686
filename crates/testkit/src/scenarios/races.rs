//! Races and truth: S24, S27, S28.

use std::time::Duration;

use anyhow::{Context, Result, ensure};
use hyper::Method;
use serde_json::json;

use super::stage::{Stage, ask_witness, eventually, start_witness};

/// Pause, resume, kill and fork at once: serialised, each answer true, nothing stuck.
pub async fn s24(stage: &Stage) -> Result<()> {
    let sandbox = stage.sandbox().await?;
    let before = start_witness(&sandbox, 8124, 8).await?;
    // Two pauses: one pauses, the other hears that it was paused.
    let (one, two) = tokio::join!(sandbox.pause_answer(), sandbox.pause_answer());
    let mut statuses = [one?.status.as_u16(), two?.status.as_u16()];
    statuses.sort_unstable();
    ensure!(statuses == [204, 409], "two pauses were answered {statuses:?}");
    // Two resumes: both are served, one of them did it.
    let (one, two) = tokio::join!(sandbox.connect_answer(), sandbox.connect_answer());
    let mut statuses = [one?.status.as_u16(), two?.status.as_u16()];
    statuses.sort_unstable();
    ensure!(statuses == [200, 201], "two connects were answered {statuses:?}");
    ask_witness(&sandbox, 8124).await?.goes_on_from(&before)?;
    // Pause then at once resume; resume then at once pause.
    for _ in 0..3 {
        let (pause, resume) = tokio::join!(sandbox.pause_answer(), async {
            tokio::time::sleep(Duration::from_millis(5)).await;
            sandbox.connect_answer().await
        });
        ensure!(pause?.status.is_success(), "the pause failed");
        ensure!(resume?.status.is_success(), "the resume failed");
        ensure!(sandbox.state().await? == "running", "it ended {}", sandbox.state().await?);
        ask_witness(&sandbox, 8124).await?.goes_on_from(&before)?;
    }
    // Fork during a pause: forks of the running or of the paused one, or a true refusal; never stuck.
    let (pause, fork) = tokio::join!(sandbox.pause_answer(), sandbox.fork(2));
    ensure!(pause?.status.is_success(), "the pause failed");
    for one in fork.unwrap_or_default() {
        ask_witness(&one, 8124).await?.goes_on_from(&before)?;
    }
    if sandbox.state().await? == "paused" {
        sandbox.resume().await?;
    }
    ask_witness(&sandbox, 8124).await?.goes_on_from(&before)?;
    // Two kills: each hears that it was killed or that there is nothing; during a pause they win.
    let (pause, one, two) = tokio::join!(sandbox.pause_answer(), sandbox.kill(), sandbox.kill());
    pause.context("the pause was not answered")?;
    let mut statuses = [one?.status.as_u16(), two?.status.as_u16()];
    statuses.sort_unstable();
    ensure!(statuses == [204, 404] || statuses == [204, 204], "two kills were answered {statuses:?}");
    let path = format!("/sandboxes/{}", sandbox.id);
    sandbox.http.api(Method::GET, &path, None).await?.expect(404).map(drop)
}

/// Two creates with one idempotency key make one sandbox, and both get it.
pub async fn s27(stage: &Stage) -> Result<()> {
    let http = stage.http()?;
    let key = format!("scenario-{}", std::process::id());
    let create = |timeout: u32| {
        let headers = vec![("idempotency-key", key.clone())];
        let request = json!({"templateID": "base", "timeout": timeout, "metadata": {"of": "s27"}});
        let http = http.clone();
        async move {
            http.api_with(Method::POST, "/v2/sandboxes", Some(request), headers).await?.expect(201)?.json()
        }
    };
    let (one, two) = tokio::join!(create(300), create(300));
    let (one, two, three) = (one?, two?, create(300).await?);
    ensure!(
        one["sandboxID"] == two["sandboxID"] && two["sandboxID"] == three["sandboxID"],
        "{one} {two} {three}"
    );
    ensure!(one["envdAccessToken"] == two["envdAccessToken"], "the tokens differ");
    let list = http.api(Method::GET, "/v2/sandboxes?metadata=of%3Ds27", None).await?.expect(200)?.json()?;
    ensure!(list.as_array().map(Vec::len) == Some(1), "not one sandbox: {list}");
    Ok(())
}

/// An expired snapshot is a typed error, not a silent start from elsewhere.
pub async fn s28(stage: &Stage) -> Result<()> {
    let sandbox = stage.sandbox().await?;
    let http = stage.http()?;
    let path = format!("/dormouse/v1/sandboxes/{}/checkpoint", sandbox.id);
    let made = http.api(Method::POST, &path, Some(json!({"ttl": 1}))).await?.expect(201)?.json()?;
    let id = made["snapshotID"].as_str().context("no id")?.to_owned();
    let request = json!({"templateID": id, "timeout": 60});
    let refused = || async {
        let answer = http.api(Method::POST, "/v2/sandboxes", Some(request.clone())).await?;
        Ok(!answer.status.is_success())
    };
    eventually("the end of the snapshot's time", refused).await?;
    let answer = http.api(Method::POST, "/v2/sandboxes", Some(request.clone())).await?;
    let body = answer.json()?;
    let code = body["error_code"].as_str().unwrap_or_default().to_owned();
    ensure!(code.contains("expired"), "the error is not typed: {} {body}", answer.status);
    let rollback = sandbox.rollback_answer(&id).await?;
    ensure!(rollback.status.as_u16() >= 400 && rollback.text().contains("expired"), "{}", rollback.text());
    sandbox.sh("true").await.map(drop)
}
