//! Messages of `process.Process`.
//!
//! Of the fields of a oneof, which are optional here, the first that is set counts.
//!
//! **Replay**, an addition to E2B's protocol: a process keeps the last part of its output. Its bytes
//! (stdout, stderr and pty together, in the order of the events) are counted from 0. The answers of
//! `Start` and `Connect` say in [`REPLAY_OFFSET_HEADER`] which number the first byte of their data
//! events has, and a `Connect` with [`REPLAY_FROM_HEADER`] begins at that byte, or at the oldest one
//! kept. A client that counts what it received goes on where its stream broke, for
//! [`ENDED_KEPT_SECONDS`] also after the process ended.

use std::collections::BTreeMap;

use bytes::Bytes;
use serde::{Deserialize, Serialize};

use super::json::{bytes64, is_default, or_default};

/// Paths of the calls.
pub const LIST: &str = "/process.Process/List";
pub const START: &str = "/process.Process/Start";
pub const CONNECT: &str = "/process.Process/Connect";
pub const UPDATE: &str = "/process.Process/Update";
pub const SEND_INPUT: &str = "/process.Process/SendInput";
pub const STREAM_INPUT: &str = "/process.Process/StreamInput";
pub const CLOSE_STDIN: &str = "/process.Process/CloseStdin";
pub const SEND_SIGNAL: &str = "/process.Process/SendSignal";

/// Request header of `Connect`: number of the first byte of output that is wanted.
pub const REPLAY_FROM_HEADER: &str = "dormouse-replay-from";
/// Answer header of `Start` and `Connect`: number of the first byte of output that will be sent.
pub const REPLAY_OFFSET_HEADER: &str = "dormouse-replay-offset";
/// How long an ended process can still be connected to.
pub const ENDED_KEPT_SECONDS: u64 = 30;

/// oneof selector.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct ProcessSelector {
    #[serde(skip_serializing_if = "Option::is_none")]
    pub pid: Option<u32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tag: Option<String>,
}

impl ProcessSelector {
    #[must_use]
    pub fn pid(pid: u32) -> Self {
        Self { pid: Some(pid), tag: None }
    }

    #[must_use]
    pub fn tag(tag: impl Into<String>) -> Self {
        Self { pid: None, tag: Some(tag.into()) }
    }
}

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct PtySize {
    #[serde(skip_serializing_if = "is_default")]
    pub cols: u32,
    #[serde(skip_serializing_if = "is_default")]
    pub rows: u32,
}

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct Pty {
    #[serde(skip_serializing_if = "Option::is_none")]
    pub size: Option<PtySize>,
}

#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct ProcessConfig {
    #[serde(skip_serializing_if = "is_default", deserialize_with = "or_default")]
    pub cmd: String,
    #[serde(skip_serializing_if = "is_default", deserialize_with = "or_default")]
    pub args: Vec<String>,
    #[serde(skip_serializing_if = "is_default", deserialize_with = "or_default")]
    pub envs: BTreeMap<String, String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cwd: Option<String>,
}

#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct ProcessInfo {
    #[serde(skip_serializing_if = "Option::is_none")]
    pub config: Option<ProcessConfig>,
    #[serde(skip_serializing_if = "is_default")]
    pub pid: u32,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tag: Option<String>,
}

#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ListRequest {}

#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct ListResponse {
    #[serde(skip_serializing_if = "is_default", deserialize_with = "or_default")]
    pub processes: Vec<ProcessInfo>,
}

#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct StartRequest {
    #[serde(skip_serializing_if = "Option::is_none")]
    pub process: Option<ProcessConfig>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub pty: Option<Pty>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tag: Option<String>,
    /// Absent: true.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub stdin: Option<bool>,
}

/// Answer of `Start` and of `Connect`.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct StartResponse {
    #[serde(skip_serializing_if = "Option::is_none")]
    pub event: Option<ProcessEvent>,
}

/// oneof event.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct ProcessEvent {
    #[serde(skip_serializing_if = "Option::is_none")]
    pub start: Option<StartEvent>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub data: Option<DataEvent>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub end: Option<EndEvent>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub keepalive: Option<KeepAlive>,
}

#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct StartEvent {
    #[serde(skip_serializing_if = "is_default")]
    pub pid: u32,
}

/// oneof output.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct DataEvent {
    #[serde(skip_serializing_if = "Option::is_none", with = "bytes64::option")]
    pub stdout: Option<Bytes>,
    #[serde(skip_serializing_if = "Option::is_none", with = "bytes64::option")]
    pub stderr: Option<Bytes>,
    #[serde(skip_serializing_if = "Option::is_none", with = "bytes64::option")]
    pub pty: Option<Bytes>,
}

#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct EndEvent {
    /// -1 when a signal ended it.
    #[serde(skip_serializing_if = "is_default", alias = "exit_code")]
    pub exit_code: i32,
    /// False when a signal ended it.
    #[serde(skip_serializing_if = "is_default")]
    pub exited: bool,
    #[serde(skip_serializing_if = "is_default")]
    pub status: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
}

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct KeepAlive {}

/// oneof input.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct ProcessInput {
    #[serde(skip_serializing_if = "Option::is_none", with = "bytes64::option")]
    pub stdin: Option<Bytes>,
    #[serde(skip_serializing_if = "Option::is_none", with = "bytes64::option")]
    pub pty: Option<Bytes>,
}

#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct SendInputRequest {
    #[serde(skip_serializing_if = "Option::is_none")]
    pub process: Option<ProcessSelector>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub input: Option<ProcessInput>,
}

/// oneof event: first `start`, then `data` and `keepalive`.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct StreamInputRequest {
    #[serde(skip_serializing_if = "Option::is_none")]
    pub start: Option<StreamInputStart>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub data: Option<StreamInputData>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub keepalive: Option<KeepAlive>,
}

#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct StreamInputStart {
    #[serde(skip_serializing_if = "Option::is_none")]
    pub process: Option<ProcessSelector>,
}

#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct StreamInputData {
    #[serde(skip_serializing_if = "Option::is_none")]
    pub input: Option<ProcessInput>,
}

/// Request of `Connect` and `CloseStdin`.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct SelectRequest {
    #[serde(skip_serializing_if = "Option::is_none")]
    pub process: Option<ProcessSelector>,
}

#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct UpdateRequest {
    #[serde(skip_serializing_if = "Option::is_none")]
    pub process: Option<ProcessSelector>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub pty: Option<Pty>,
}

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum Signal {
    #[default]
    #[serde(rename = "SIGNAL_UNSPECIFIED")]
    Unspecified,
    #[serde(rename = "SIGNAL_SIGKILL")]
    Kill,
    #[serde(rename = "SIGNAL_SIGTERM")]
    Term,
}

#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct SendSignalRequest {
    #[serde(skip_serializing_if = "Option::is_none")]
    pub process: Option<ProcessSelector>,
    #[serde(skip_serializing_if = "is_default", deserialize_with = "signal")]
    pub signal: Signal,
}

/// An enum's name, or its number.
fn signal<'de, D: serde::Deserializer<'de>>(deserializer: D) -> Result<Signal, D::Error> {
    #[derive(Deserialize)]
    #[serde(untagged)]
    enum Given {
        Name(Signal),
        Number(i32),
    }
    Ok(match Given::deserialize(deserializer)? {
        Given::Name(signal) => signal,
        Given::Number(9) => Signal::Kill,
        Given::Number(15) => Signal::Term,
        Given::Number(_) => Signal::Unspecified,
    })
}

/// Answer of the calls that have nothing to say.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Empty {}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::envd::connect;

    #[test]
    fn messages_have_the_protocols_shape() {
        let end = ProcessEvent {
            end: Some(EndEvent { exit_code: 0, exited: true, status: "exit status 0".into(), error: None }),
            ..ProcessEvent::default()
        };
        let json = serde_json::to_string(&StartResponse { event: Some(end) }).unwrap();
        assert_eq!(json, r#"{"event":{"end":{"exited":true,"status":"exit status 0"}}}"#);
        let data = DataEvent { stdout: Some(Bytes::from_static(b"hi\xff")), ..DataEvent::default() };
        assert_eq!(serde_json::to_string(&data).unwrap(), r#"{"stdout":"aGn/"}"#);
    }

    #[test]
    fn what_clients_send_is_understood() {
        let start: StartRequest = connect::parse(
            br#"{"process":{"cmd":"/bin/bash","args":["-l","-c","ls"],"envs":null,"new":1},"stdin":false,"x":{}}"#,
        )
        .unwrap();
        assert_eq!(start.process.unwrap().args.len(), 3);
        assert_eq!((start.stdin, start.pty), (Some(false), None));
        let kill: SendSignalRequest =
            connect::parse(br#"{"process":{"pid":7},"signal":"SIGNAL_SIGKILL"}"#).unwrap();
        assert_eq!((kill.process, kill.signal), (Some(ProcessSelector::pid(7)), Signal::Kill));
        let kill: SendSignalRequest = connect::parse(br#"{"process":{"tag":"a"},"signal":15}"#).unwrap();
        assert_eq!(kill.signal, Signal::Term);
        let input: SendInputRequest =
            connect::parse(br#"{"process":{"pid":7},"input":{"stdin":"aGk"}}"#).unwrap();
        assert_eq!(input.input.unwrap().stdin.unwrap(), "hi");
        assert!(connect::parse::<SendInputRequest>(br#"{"input":{"stdin":"%%"}}"#).is_err());
    }
}
