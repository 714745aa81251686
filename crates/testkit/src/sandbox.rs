//! A sandbox seen through the public API alone.

use anyhow::{Context, Result, bail, ensure};
use bytes::Bytes;
use dormouse_wire::stream::ENVD_PORT;
use hyper::Method;
use serde_json::{Value, json};

use crate::http::{Answer, Call, Frames, Http, envelope, start_request};

/// What a finished command left.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Output {
    pub stdout: String,
    pub stderr: String,
    pub exit: i64,
}

#[derive(Debug, Clone)]
pub struct Sandbox {
    pub http: Http,
    pub id: String,
    pub token: Option<String>,
}

/// A running command whose events are read when asked for.
pub struct Running {
    pub pid: u64,
    frames: Frames,
    output: Output,
}

impl Sandbox {
    pub async fn create(http: &Http, mut request: Value) -> Result<Self> {
        if request.get("templateID").is_none() {
            request["templateID"] = json!("base");
        }
        if request.get("timeout").is_none() {
            request["timeout"] = json!(3600);
        }
        let answer = http.api(Method::POST, "/v2/sandboxes", Some(request)).await?.expect(201)?;
        Self::of(http, &answer.json()?)
    }

    /// From a create, connect or fork answer.
    pub fn of(http: &Http, made: &Value) -> Result<Self> {
        let id = made["sandboxID"].as_str().context("the answer has no sandboxID")?.to_owned();
        let token = made["envdAccessToken"].as_str().map(str::to_owned);
        Ok(Self { http: http.clone(), id, token })
    }

    async fn call(&self, method: Method, rest: &str, body: Option<Value>) -> Result<Answer> {
        self.http.api(method, &format!("/sandboxes/{}{rest}", self.id), body).await
    }

    async fn own(&self, method: Method, rest: &str, body: Option<Value>) -> Result<Answer> {
        self.http.api(method, &format!("/dormouse/v1/sandboxes/{}{rest}", self.id), body).await
    }

    pub async fn info(&self) -> Result<Value> {
        self.call(Method::GET, "", None).await?.expect(200)?.json()
    }

    /// What Dormouse itself tells of it: tier, why awake, parent.
    pub async fn own_info(&self) -> Result<Value> {
        self.own(Method::GET, "", None).await?.expect(200)?.json()
    }

    pub async fn state(&self) -> Result<String> {
        Ok(self.info().await?["state"].as_str().unwrap_or_default().to_owned())
    }

    pub async fn kill(&self) -> Result<Answer> {
        self.call(Method::DELETE, "", None).await
    }

    pub async fn pause_answer(&self) -> Result<Answer> {
        self.call(Method::POST, "/pause", Some(json!({}))).await
    }

    pub async fn pause(&self) -> Result<()> {
        self.pause_answer().await?.expect(204).map(drop)
    }

    pub async fn connect_answer(&self) -> Result<Answer> {
        let path = format!("/v2/sandboxes/{}/connect", self.id);
        self.http.api(Method::POST, &path, Some(json!({"timeout": 3600}))).await
    }

    /// Resumes it; the id and the token must stay what they were.
    pub async fn resume(&self) -> Result<()> {
        let made = self.connect_answer().await?.expect(201)?.json()?;
        ensure!(made["sandboxID"] == self.id.as_str(), "the id changed to {}", made["sandboxID"]);
        ensure!(made["envdAccessToken"].as_str() == self.token.as_deref(), "the access token changed");
        Ok(())
    }

    pub async fn snapshot(&self) -> Result<String> {
        let made = self.call(Method::POST, "/snapshots", Some(json!({}))).await?.expect(201)?.json()?;
        Ok(made["snapshotID"].as_str().context("the answer has no snapshotID")?.to_owned())
    }

    pub async fn rollback_answer(&self, snapshot: &str) -> Result<Answer> {
        self.own(Method::POST, "/rollback", Some(json!({"snapshotID": snapshot}))).await
    }

    pub async fn rollback(&self, snapshot: &str) -> Result<()> {
        let answer = self.rollback_answer(snapshot).await?;
        ensure!(answer.status.is_success(), "the rollback failed: {} {}", answer.status, answer.text());
        Ok(())
    }

    pub async fn fork(&self, count: u32) -> Result<Vec<Self>> {
        let body = json!({"count": count, "timeout": 3600});
        let answer = self.call(Method::POST, "/fork", Some(body)).await?.expect(201)?.json()?;
        let forks = answer.as_array().context("the answer is not a list")?;
        ensure!(forks.len() == count as usize, "{} forks in place of {count}", forks.len());
        forks
            .iter()
            .map(|fork| match fork.get("sandbox") {
                Some(made) => Self::of(&self.http, made),
                None => bail!("a fork failed: {fork}"),
            })
            .collect()
    }

    fn headers(&self, port: u16, user: Option<&str>) -> Vec<(&'static str, String)> {
        let mut headers = vec![("e2b-sandbox-id", self.id.clone()), ("e2b-sandbox-port", port.to_string())];
        if let Some(token) = &self.token {
            headers.push(("x-access-token", token.clone()));
        }
        if let Some(user) = user {
            // base64("root:"): the only other user that the scenarios need.
            ensure_root(user);
            headers.push(("authorization", "Basic cm9vdDo=".to_owned()));
        }
        headers
    }

    /// A GET of a port inside, through the daemon.
    pub async fn get(&self, port: u16, path: &str) -> Result<Answer> {
        let call = Call { method: Method::GET, path, headers: self.headers(port, None), body: Bytes::new() };
        self.http.send(call).await
    }

    pub async fn start(&self, command: &str) -> Result<Running> {
        self.start_as(command, None).await
    }

    async fn start_as(&self, command: &str, user: Option<&str>) -> Result<Running> {
        let mut headers = self.headers(ENVD_PORT, user);
        headers.push(("content-type", "application/connect+json".to_owned()));
        headers.push(("connect-protocol-version", "1".to_owned()));
        let body = envelope(&start_request(command));
        let call = Call { method: Method::POST, path: "/process.Process/Start", headers, body };
        let response = self.http.open(call).await?;
        ensure!(response.status() == 200, "start of {command:?} was answered {}", response.status());
        let mut frames = Frames::new(response.into_body());
        let first = frames.next().await?.context("the stream ended before the start event")?;
        let pid = first["event"]["start"]["pid"].as_u64().context("the first event is not a start")?;
        Ok(Running { pid, frames, output: Output::default() })
    }

    pub async fn run(&self, command: &str) -> Result<Output> {
        self.start(command).await?.wait().await
    }

    /// Standard output of a command that must succeed.
    pub async fn sh(&self, command: &str) -> Result<String> {
        succeeded(command, self.run(command).await.with_context(|| format!("cannot run {command:?}"))?)
    }

    pub async fn sh_root(&self, command: &str) -> Result<String> {
        succeeded(command, self.start_as(command, Some("root")).await?.wait().await?)
    }

    /// Starts a command that nobody stays attached to.
    pub async fn spawn(&self, command: &str) -> Result<u64> {
        Ok(self.start(command).await?.pid)
    }

    pub async fn write(&self, path: &str, content: impl Into<Bytes>) -> Result<()> {
        let mut headers = self.headers(ENVD_PORT, None);
        headers.push(("content-type", "application/octet-stream".to_owned()));
        let path = format!("/files?path={path}");
        let call = Call { method: Method::POST, path: &path, headers, body: content.into() };
        self.http.send(call).await?.expect(200).map(drop)
    }

    pub async fn read(&self, path: &str) -> Result<String> {
        Ok(self.get(ENVD_PORT, &format!("/files?path={path}")).await?.expect(200)?.text())
    }

    /// The agent's answer with a foreign token, or with none.
    pub async fn list_with_token(&self, token: Option<&str>) -> Result<Answer> {
        let mut other = self.clone();
        other.token = token.map(str::to_owned);
        let mut headers = other.headers(ENVD_PORT, None);
        headers.push(("content-type", "application/json".to_owned()));
        let call =
            Call { method: Method::POST, path: "/process.Process/List", headers, body: Bytes::from("{}") };
        self.http.send(call).await
    }
}

fn ensure_root(user: &str) {
    assert_eq!(user, "root", "only root is known here");
}

fn succeeded(command: &str, output: Output) -> Result<String> {
    ensure!(output.exit == 0, "{command:?} ended with {}: {}{}", output.exit, output.stdout, output.stderr);
    Ok(output.stdout)
}

impl Running {
    /// Reads on until the output holds `wanted`.
    pub async fn until(&mut self, wanted: &str) -> Result<()> {
        while !self.output.stdout.contains(wanted) {
            ensure!(self.step().await?, "the command ended before it wrote {wanted:?}: {:?}", self.output);
        }
        Ok(())
    }

    pub async fn wait(mut self) -> Result<Output> {
        while self.step().await? {}
        Ok(self.output)
    }

    #[must_use]
    pub fn stdout(&self) -> &str {
        &self.output.stdout
    }

    /// False once the end was read.
    async fn step(&mut self) -> Result<bool> {
        let Some(message) = self.frames.next().await? else { return Ok(false) };
        let event = &message["event"];
        for (name, text) in [("stdout", &mut self.output.stdout), ("stderr", &mut self.output.stderr)] {
            if let Some(data) = event["data"][name].as_str() {
                text.push_str(&String::from_utf8_lossy(&decode_base64(data)?));
            }
        }
        if let Some(end) = event.get("end") {
            self.output.exit = end["exitCode"].as_i64().unwrap_or(0);
        }
        Ok(true)
    }
}

fn decode_base64(text: &str) -> Result<Vec<u8>> {
    use base64::Engine as _;
    Ok(base64::engine::general_purpose::STANDARD.decode(text)?)
}
