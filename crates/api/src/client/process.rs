//! Processes in a sandbox: start, attach, input, signals, terminal size.
//!
//! A stream that broke (the daemon was replaced) is taken up again where it broke: the agent keeps the last part of
//! each process's output, and [`ProcessEvents`] counts what it has received.

use std::collections::BTreeMap;

use bytes::Bytes;
use dormouse_wire::envd::process::{
    self as wire, ListResponse, ProcessConfig, ProcessEvent, ProcessInput, ProcessSelector, Pty, PtySize,
    SelectRequest, SendInputRequest, SendSignalRequest, Signal, StartRequest, StartResponse, UpdateRequest,
};
use serde::Serialize;
use serde_json::Value;

use super::ClientError;
use super::envd::{Envd, Frames};

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
    envd: Envd,
    frames: Frames,
    pid: u32,
    /// Number of the next byte of output.
    offset: u64,
}

/// One process that was started through the API.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ProcessSummary {
    pub pid: u32,
    pub tag: Option<String>,
    pub command: String,
    pub args: Vec<String>,
}

impl Envd {
    /// Starts a process and follows it.
    pub async fn start(&self, spec: &StartSpec) -> Result<ProcessEvents, ClientError> {
        let what = format!("run `{}` in sandbox {}", spec.command, self.sandbox());
        let request = StartRequest {
            process: Some(ProcessConfig {
                cmd: spec.command.clone(),
                args: spec.args.clone(),
                envs: spec.env.clone(),
                cwd: spec.cwd.clone(),
            }),
            pty: spec.terminal.map(pty),
            tag: spec.tag.clone(),
            stdin: Some(spec.stdin),
        };
        let frames = self.server_stream(&what, wire::START, &request, spec.deadline_ms, None).await?;
        Ok(ProcessEvents { envd: self.clone(), offset: frames.replay_offset.unwrap_or(0), frames, pid: 0 })
    }

    /// Follows a process that runs already, from now on.
    pub async fn attach(&self, pid: u32) -> Result<ProcessEvents, ClientError> {
        let frames = self.connect(pid, None).await?;
        Ok(ProcessEvents { envd: self.clone(), offset: frames.replay_offset.unwrap_or(0), frames, pid })
    }

    async fn connect(&self, pid: u32, from: Option<u64>) -> Result<Frames, ClientError> {
        let what = format!("attach to process {pid} in sandbox {}", self.sandbox());
        let request = SelectRequest { process: Some(ProcessSelector::pid(pid)) };
        self.server_stream(&what, wire::CONNECT, &request, None, from).await
    }

    pub async fn processes(&self) -> Result<Vec<ProcessSummary>, ClientError> {
        let what = format!("list the processes of sandbox {}", self.sandbox());
        let list: ListResponse = self.unary(&what, wire::LIST, &wire::ListRequest {}).await?;
        let summary = |info: wire::ProcessInfo| {
            let config = info.config.unwrap_or_default();
            ProcessSummary { pid: info.pid, tag: info.tag, command: config.cmd, args: config.args }
        };
        Ok(list.processes.into_iter().map(summary).collect())
    }

    pub async fn send_stdin(&self, pid: u32, bytes: &[u8]) -> Result<(), ClientError> {
        let input = ProcessInput { stdin: Some(Bytes::copy_from_slice(bytes)), pty: None };
        self.send_input(pid, input).await
    }

    pub async fn send_terminal(&self, pid: u32, bytes: &[u8]) -> Result<(), ClientError> {
        let input = ProcessInput { stdin: None, pty: Some(Bytes::copy_from_slice(bytes)) };
        self.send_input(pid, input).await
    }

    async fn send_input(&self, pid: u32, input: ProcessInput) -> Result<(), ClientError> {
        let request = SendInputRequest { process: Some(ProcessSelector::pid(pid)), input: Some(input) };
        self.process_call("send input to", wire::SEND_INPUT, pid, &request).await
    }

    pub async fn close_stdin(&self, pid: u32) -> Result<(), ClientError> {
        let request = SelectRequest { process: Some(ProcessSelector::pid(pid)) };
        self.process_call("close the input of", wire::CLOSE_STDIN, pid, &request).await
    }

    pub async fn resize(&self, pid: u32, cols: u16, rows: u16) -> Result<(), ClientError> {
        let request =
            UpdateRequest { process: Some(ProcessSelector::pid(pid)), pty: Some(pty((cols, rows))) };
        self.process_call("resize the terminal of", wire::UPDATE, pid, &request).await
    }

    /// SIGKILL, or SIGTERM where `kill` is false.
    pub async fn signal(&self, pid: u32, kill: bool) -> Result<(), ClientError> {
        let signal = if kill { Signal::Kill } else { Signal::Term };
        let request = SendSignalRequest { process: Some(ProcessSelector::pid(pid)), signal };
        self.process_call("signal", wire::SEND_SIGNAL, pid, &request).await
    }

    async fn process_call(
        &self,
        verb: &str,
        path: &str,
        pid: u32,
        request: &impl Serialize,
    ) -> Result<(), ClientError> {
        let what = format!("{verb} process {pid} in sandbox {}", self.sandbox());
        let _: Value = self.unary(&what, path, request).await?;
        Ok(())
    }
}

fn pty((cols, rows): (u16, u16)) -> Pty {
    Pty { size: Some(PtySize { cols: cols.into(), rows: rows.into() }) }
}

impl ProcessEvents {
    /// What it did next; `None` after its end.
    pub async fn next(&mut self) -> Result<Option<ProcessOutput>, ClientError> {
        loop {
            let Some(response) = self.frames.next::<StartResponse>().await? else { return Ok(None) };
            if let Some(output) = self.read(response.event.unwrap_or_default()) {
                return Ok(Some(output));
            }
        }
    }

    /// Takes the stream up again where it broke. Gives the number of bytes that the agent had no longer.
    pub async fn reattach(&mut self) -> Result<u64, ClientError> {
        self.frames = self.envd.connect(self.pid, Some(self.offset)).await?;
        let begins = self.frames.replay_offset.unwrap_or(self.offset);
        let lost = begins.saturating_sub(self.offset);
        self.offset = begins;
        Ok(lost)
    }

    /// `None`: a keepalive.
    fn read(&mut self, event: ProcessEvent) -> Option<ProcessOutput> {
        if let Some(start) = event.start {
            self.pid = start.pid;
            return Some(ProcessOutput::Started { pid: start.pid });
        }
        if let Some(data) = event.data {
            let output = match (data.stdout, data.stderr, data.pty) {
                (Some(bytes), _, _) => ProcessOutput::Stdout(bytes),
                (_, Some(bytes), _) => ProcessOutput::Stderr(bytes),
                (_, _, Some(bytes)) => ProcessOutput::Terminal(bytes),
                _ => return None,
            };
            if let ProcessOutput::Stdout(bytes)
            | ProcessOutput::Stderr(bytes)
            | ProcessOutput::Terminal(bytes) = &output
            {
                self.offset += bytes.len() as u64;
            }
            return Some(output);
        }
        event.end.map(|end| ProcessOutput::Ended {
            exit_code: end.exit_code,
            exited: end.exited,
            status: end.status,
        })
    }
}
