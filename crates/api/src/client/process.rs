//! Processes in a sandbox: start, attach, input, signals, terminal size.

use std::collections::BTreeMap;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use bytes::Bytes;
use serde::Deserialize;
use serde_json::{Value, json};

use super::ClientError;
use super::envd::{Envd, Frames};

const SERVICE: &str = "/process.Process";

/// What is to be started.
#[derive(Debug, Clone, Default)]
pub struct StartSpec {
    pub command: String,
    pub args: Vec<String>,
    pub env: BTreeMap<String, String>,
    /// `None`: the user's home.
    pub cwd: Option<String>,
    /// Columns and rows of a terminal; `None`: pipes.
    pub terminal: Option<(u16, u16)>,
    /// Whether stdin stays open for [`Envd::send_stdin`].
    pub stdin: bool,
    pub tag: Option<String>,
    /// The process is killed after this; `None`: never.
    pub deadline_ms: Option<u64>,
}

/// One thing that a process did.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ProcessOutput {
    Started {
        pid: u32,
    },
    Stdout(Bytes),
    Stderr(Bytes),
    /// A terminal's output: both in one.
    Terminal(Bytes),
    Ended {
        exit_code: i32,
        exited: bool,
        status: String,
    },
}

/// A process's output as it comes. Dropping it leaves the process running.
pub struct ProcessEvents {
    frames: Frames,
}

/// One process that was started through the API.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ProcessSummary {
    pub pid: u32,
    pub tag: Option<String>,
    pub command: String,
    pub args: Vec<String>,
}

#[derive(Deserialize)]
struct Response {
    event: Event,
}

#[derive(Deserialize, Default)]
#[serde(default)]
struct Event {
    start: Option<Start>,
    data: Option<Data>,
    end: Option<End>,
}

#[derive(Deserialize, Default)]
#[serde(default)]
struct Start {
    pid: u32,
}

#[derive(Deserialize, Default)]
#[serde(default)]
struct Data {
    stdout: Option<String>,
    stderr: Option<String>,
    pty: Option<String>,
}

#[derive(Deserialize, Default)]
#[serde(default, rename_all = "camelCase")]
struct End {
    #[serde(alias = "exit_code")]
    exit_code: i32,
    exited: bool,
    status: String,
}

#[derive(Deserialize, Default)]
#[serde(default)]
struct List {
    processes: Vec<Info>,
}

#[derive(Deserialize, Default)]
#[serde(default)]
struct Info {
    config: Config,
    pid: u32,
    tag: Option<String>,
}

#[derive(Deserialize, Default)]
#[serde(default)]
struct Config {
    cmd: String,
    args: Vec<String>,
}

impl Envd {
    /// Starts a process and follows it.
    pub async fn start(&self, spec: &StartSpec) -> Result<ProcessEvents, ClientError> {
        let what = format!("run `{}` in sandbox {}", spec.command, self.sandbox());
        let mut request = json!({
            "process": {"cmd": spec.command, "args": spec.args, "envs": spec.env},
            "stdin": spec.stdin,
        });
        if let Some(cwd) = &spec.cwd {
            request["process"]["cwd"] = json!(cwd);
        }
        if let Some((cols, rows)) = spec.terminal {
            request["pty"] = json!({"size": {"cols": cols, "rows": rows}});
        }
        if let Some(tag) = &spec.tag {
            request["tag"] = json!(tag);
        }
        let frames =
            self.server_stream(&what, &format!("{SERVICE}/Start"), &request, spec.deadline_ms).await?;
        Ok(ProcessEvents { frames })
    }

    /// Follows a process that runs already.
    pub async fn attach(&self, pid: u32) -> Result<ProcessEvents, ClientError> {
        let what = format!("attach to process {pid} in sandbox {}", self.sandbox());
        let request = json!({"process": {"pid": pid}});
        let frames = self.server_stream(&what, &format!("{SERVICE}/Connect"), &request, None).await?;
        Ok(ProcessEvents { frames })
    }

    pub async fn processes(&self) -> Result<Vec<ProcessSummary>, ClientError> {
        let what = format!("list the processes of sandbox {}", self.sandbox());
        let list: List = self.unary(&what, &format!("{SERVICE}/List"), &json!({})).await?;
        let summary = |info: Info| ProcessSummary {
            pid: info.pid,
            tag: info.tag,
            command: info.config.cmd,
            args: info.config.args,
        };
        Ok(list.processes.into_iter().map(summary).collect())
    }

    pub async fn send_stdin(&self, pid: u32, bytes: &[u8]) -> Result<(), ClientError> {
        self.send_input(pid, json!({"stdin": STANDARD.encode(bytes)})).await
    }

    pub async fn send_terminal(&self, pid: u32, bytes: &[u8]) -> Result<(), ClientError> {
        self.send_input(pid, json!({"pty": STANDARD.encode(bytes)})).await
    }

    async fn send_input(&self, pid: u32, input: Value) -> Result<(), ClientError> {
        let request = json!({"process": {"pid": pid}, "input": input});
        self.process_call("send input to", "SendInput", pid, &request).await
    }

    pub async fn close_stdin(&self, pid: u32) -> Result<(), ClientError> {
        self.process_call("close the input of", "CloseStdin", pid, &json!({"process": {"pid": pid}})).await
    }

    pub async fn resize(&self, pid: u32, cols: u16, rows: u16) -> Result<(), ClientError> {
        let request = json!({"process": {"pid": pid}, "pty": {"size": {"cols": cols, "rows": rows}}});
        self.process_call("resize the terminal of", "Update", pid, &request).await
    }

    /// SIGKILL, or SIGTERM where `kill` is false.
    pub async fn signal(&self, pid: u32, kill: bool) -> Result<(), ClientError> {
        let signal = if kill { "SIGNAL_SIGKILL" } else { "SIGNAL_SIGTERM" };
        let request = json!({"process": {"pid": pid}, "signal": signal});
        self.process_call("signal", "SendSignal", pid, &request).await
    }

    async fn process_call(
        &self,
        verb: &str,
        method: &str,
        pid: u32,
        request: &Value,
    ) -> Result<(), ClientError> {
        let what = format!("{verb} process {pid} in sandbox {}", self.sandbox());
        let _: Value = self.unary(&what, &format!("{SERVICE}/{method}"), request).await?;
        Ok(())
    }
}

impl ProcessEvents {
    /// What it did next; `None` after its end.
    pub async fn next(&mut self) -> Result<Option<ProcessOutput>, ClientError> {
        loop {
            let Some(response) = self.frames.next::<Response>().await? else { return Ok(None) };
            if let Some(output) = self.read(response.event)? {
                return Ok(Some(output));
            }
        }
    }

    /// `None`: a keepalive.
    fn read(&self, event: Event) -> Result<Option<ProcessOutput>, ClientError> {
        let decode = |text: String| {
            STANDARD
                .decode(text)
                .map(Bytes::from)
                .map_err(|error| self.frames.not_understood(error.to_string()))
        };
        if let Some(start) = event.start {
            return Ok(Some(ProcessOutput::Started { pid: start.pid }));
        }
        if let Some(data) = event.data {
            return match (data.stdout, data.stderr, data.pty) {
                (Some(text), _, _) => Ok(Some(ProcessOutput::Stdout(decode(text)?))),
                (_, Some(text), _) => Ok(Some(ProcessOutput::Stderr(decode(text)?))),
                (_, _, Some(text)) => Ok(Some(ProcessOutput::Terminal(decode(text)?))),
                _ => Ok(None),
            };
        }
        Ok(event.end.map(|end| ProcessOutput::Ended {
            exit_code: end.exit_code,
            exited: end.exited,
            status: end.status,
        }))
    }
}
