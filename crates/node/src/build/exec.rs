//! Commands in a sandbox, over the agent's process service: what a build needs of it.

use std::collections::BTreeMap;
use std::path::PathBuf;

use base64::Engine as _;
use bytes::Bytes;
use dormouse_wire::envd::connect::{self, Decoder, EndStream};
use dormouse_wire::envd::process::{ProcessConfig, ProcessEvent, StartRequest, StartResponse};
use dormouse_wire::stream::ENVD_PORT;
use http::Method;
use http_body_util::BodyExt;
use hyper::body::Incoming;

use crate::agent::{self, Body, Call};
use crate::error::NodeError;
use crate::hub::Hub;
use crate::model::SandboxInfo;

/// How to reach one sandbox.
pub struct Shell {
    pub dir: PathBuf,
    token: String,
}

pub struct Command {
    pub argv: Vec<String>,
    pub env: BTreeMap<String, String>,
    pub user: String,
    /// Empty: the user's home.
    pub cwd: String,
    pub tag: Option<String>,
}

impl Command {
    pub fn root(argv: &[&str]) -> Self {
        Self {
            argv: argv.iter().map(|word| (*word).to_owned()).collect(),
            env: BTreeMap::new(),
            user: "root".to_owned(),
            cwd: "/".to_owned(),
            tag: None,
        }
    }
}

/// A command that runs. Dropped, it runs on.
pub struct Running {
    body: Incoming,
    decoder: Decoder,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Exit {
    pub code: i32,
    pub status: String,
}

impl Shell {
    pub fn new(hub: &Hub, info: &SandboxInfo) -> Result<Self, NodeError> {
        let dir = hub.engine(info.engine)?.keeper_dir(&info.id);
        Ok(Self { dir, token: info.access_token.clone() })
    }

    /// Empty: the agent's default user.
    fn authorization(user: &str) -> Option<(&'static str, String)> {
        let basic = base64::engine::general_purpose::STANDARD.encode(format!("{user}:"));
        (!user.is_empty()).then(|| ("authorization", format!("Basic {basic}")))
    }

    /// Resolves when the process exists, or with the agent's reason.
    pub async fn start(&self, command: Command) -> Result<Running, NodeError> {
        let mut argv = command.argv.into_iter();
        let process = ProcessConfig {
            cmd: argv.next().unwrap_or_default(),
            args: argv.collect(),
            envs: command.env,
            cwd: (!command.cwd.is_empty()).then_some(command.cwd),
        };
        let request =
            StartRequest { process: Some(process), pty: None, tag: command.tag, stdin: Some(false) };
        let mut headers = vec![
            ("content-type", connect::STREAM_TYPE.to_owned()),
            ("connect-protocol-version", "1".to_owned()),
        ];
        headers.extend(Self::authorization(&command.user));
        let call = Call {
            port: ENVD_PORT,
            method: Method::POST,
            path: "/process.Process/Start",
            token: Some(&self.token),
            headers: &headers,
            body: agent::whole(connect::message(&request)),
        };
        let response =
            agent::send(&self.dir, call).await.map_err(|error| NodeError::failed(error.to_string()))?;
        let mut running = Running { body: response.into_body(), decoder: Decoder::default() };
        match running.next().await? {
            Some(ProcessEvent { start: Some(_), .. }) => Ok(running),
            _ => Err(NodeError::failed("the agent did not say that the command started")),
        }
    }

    /// Runs it to its end; `output` gets what it writes, in portions.
    pub async fn run(&self, command: Command, mut output: impl FnMut(&[u8])) -> Result<Exit, NodeError> {
        let mut running = self.start(command).await?;
        while let Some(event) = running.next().await? {
            if let Some(data) = event.data {
                for part in [data.stdout, data.stderr].into_iter().flatten() {
                    output(&part);
                }
            }
            if let Some(end) = event.end {
                return Ok(Exit { code: end.exit_code, status: end.status });
            }
        }
        Err(NodeError::failed("the command's stream ended before the command"))
    }

    /// Writes a file as root.
    pub async fn upload(&self, path: &str, body: Body) -> Result<(), NodeError> {
        let target = format!("/files?path={path}&username=root");
        let mut headers = vec![("content-type", "application/octet-stream".to_owned())];
        headers.extend(Self::authorization("root"));
        let call = Call {
            port: ENVD_PORT,
            method: Method::POST,
            path: &target,
            token: Some(&self.token),
            headers: &headers,
            body,
        };
        let response =
            agent::send(&self.dir, call).await.map_err(|error| NodeError::failed(error.to_string()))?;
        agent::read(response, "POST /files")
            .await
            .map(drop)
            .map_err(|error| NodeError::failed(error.to_string()))
    }
}

impl Running {
    /// `None`: the stream ended in order.
    pub async fn next(&mut self) -> Result<Option<ProcessEvent>, NodeError> {
        loop {
            let frame = self.decoder.next_frame().map_err(|error| NodeError::failed(error.to_string()))?;
            if let Some(frame) = frame {
                if frame.is_end() {
                    let end: EndStream =
                        frame.parse().map_err(|error| NodeError::failed(error.to_string()))?;
                    return end.error.map_or(Ok(None), |error| Err(NodeError::failed(error.to_string())));
                }
                let response: StartResponse =
                    frame.parse().map_err(|error| NodeError::failed(error.to_string()))?;
                if let Some(event) = response.event {
                    return Ok(Some(event));
                }
                continue;
            }
            match self.body.frame().await {
                Some(Ok(part)) => {
                    if let Ok(bytes) = part.into_data() {
                        self.push(&bytes);
                    }
                }
                Some(Err(error)) => {
                    return Err(NodeError::failed(format!("the command's stream broke: {error}")));
                }
                None => return Err(NodeError::failed("the command's stream was cut off")),
            }
        }
    }

    fn push(&mut self, bytes: &Bytes) {
        self.decoder.push(bytes);
    }
}
