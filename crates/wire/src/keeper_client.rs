//! The daemon's side of a keeper: its control socket, and streams into the sandbox.

use std::io;
use std::os::fd::BorrowedFd;
use std::path::{Path, PathBuf};

use tokio::net::UnixStream;

use crate::carrier::{read_line, write_line};
use crate::keeper::{AGENT_SOCKET, Answer, CONTROL_SOCKET, Request};
use crate::local;
use crate::stream::{LineError, Open, Refusal, Reply};

#[derive(Debug, thiserror::Error)]
pub enum KeeperClientError {
    #[error("no keeper answers in {}", dir.display())]
    Connect { dir: PathBuf, source: io::Error },
    #[error("the request {request} could not be sent to the keeper")]
    Send { request: &'static str, source: io::Error },
    #[error("the keeper did not answer the request {request}")]
    Receive { request: &'static str, source: io::Error },
    #[error("the keeper closed the connection instead of answering the request {request}")]
    Closed { request: &'static str },
}

/// One connection to a keeper's control socket; answers come in the order of the requests. A request
/// whose future was dropped leaves the connection useless: connect again.
#[derive(Debug)]
pub struct KeeperClient {
    socket: UnixStream,
}

fn name(request: &Request) -> &'static str {
    match request {
        Request::Hello => "hello",
        Request::Attach { .. } => "attach",
        Request::Detach => "detach",
        Request::Reattach => "reattach",
        Request::SetEgress { .. } => "set_egress",
        Request::Network => "network",
        Request::Tap => "tap",
        Request::Status => "status",
        Request::Shutdown => "shutdown",
    }
}

impl KeeperClient {
    /// Connects to the keeper whose folder is `dir`.
    pub async fn connect(dir: &Path) -> Result<Self, KeeperClientError> {
        let connected = local::connect(dir, CONTROL_SOCKET).await;
        let socket =
            connected.map_err(|source| KeeperClientError::Connect { dir: dir.to_owned(), source })?;
        Ok(Self { socket })
    }

    /// Sends one request (`fds` in the order that [`Request`] names) and waits for its answer.
    pub async fn request(
        &mut self,
        request: &Request,
        fds: &[BorrowedFd<'_>],
    ) -> Result<Answer, KeeperClientError> {
        let what = name(request);
        let sent = local::send_frame(&self.socket, request, fds).await;
        sent.map_err(|source| KeeperClientError::Send { request: what, source })?;
        match local::recv_frame::<Answer>(&self.socket).await {
            Ok(Some((answer, _))) => Ok(answer),
            Ok(None) => Err(KeeperClientError::Closed { request: what }),
            Err(source) => Err(KeeperClientError::Receive { request: what, source }),
        }
    }
}

/// Why a stream into the sandbox could not be had.
#[derive(Debug, thiserror::Error)]
pub enum ConnectError {
    #[error("no keeper answers in {}", dir.display())]
    Keeper { dir: PathBuf, source: io::Error },
    #[error("port {port} of the sandbox: {message} ({})", why.code())]
    Refused { port: u16, why: Refusal, message: String },
    #[error("the stream to port {port} broke before it was open")]
    Broken { port: u16, source: io::Error },
    #[error("the keeper's answer for port {port} was not understood")]
    Answer { port: u16, source: LineError },
}

/// A byte stream to `port` of the sandbox whose keeper's folder is `dir`. Waits while the carrier is
/// detached; drop the future to give up.
pub async fn connect_agent(dir: &Path, port: u16) -> Result<UnixStream, ConnectError> {
    let connected = local::connect(dir, AGENT_SOCKET).await;
    let mut socket = connected.map_err(|source| ConnectError::Keeper { dir: dir.to_owned(), source })?;
    let broken = |source| ConnectError::Broken { port, source };
    write_line(&mut socket, &Open::Connect { port }).await.map_err(broken)?;
    let line = read_line(&mut socket).await.map_err(broken)?;
    match Reply::parse(&line).map_err(|source| ConnectError::Answer { port, source })? {
        Reply::Ok => Ok(socket),
        Reply::Refused { why, message } => Err(ConnectError::Refused { port, why, message }),
    }
}
