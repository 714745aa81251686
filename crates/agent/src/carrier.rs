//! The agent's end of the carrier: streams of the keeper on standard input and output.
//!
//! Each stream names a port: envd and the control service are served here, any other is a connection to
//! that port on loopback. Standard input and output are never closed: what is behind them changes at a
//! restore, and then they go on.

use std::io;
use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr};
use std::time::Duration;

use dormouse_wire::carrier::{Guest, Stream, read_line, relay, write_line};
use dormouse_wire::stream::{CONTROL_PORT, ENVD_PORT, Open, Refusal, Reply};
use tokio::net::TcpStream;

use crate::context::Ctx;
use crate::egress;
use crate::http::{self, Services};

const CONNECT_PATIENCE: Duration = Duration::from_secs(2);
const CONNECTS_MAX: usize = 5;

/// Serves the keeper; ends only when standard input or output cannot be used at all.
pub async fn run(ctx: Ctx, services: Services) -> io::Result<()> {
    let guest = Guest::new();
    egress::start(&ctx, &guest).await;
    let accepting = guest.clone();
    tokio::spawn(async move {
        loop {
            let stream = accepting.accept().await;
            tokio::spawn(serve(stream, services.clone()));
        }
    });
    guest.run(io::stdin(), io::stdout()).await
}

async fn serve(mut stream: Stream, services: Services) {
    let served = match read_line(&mut stream).await.map(|line| Open::parse(&line)) {
        Ok(Ok(Open::Connect { port: ENVD_PORT })) => serve_http(stream, services.envd).await,
        Ok(Ok(Open::Connect { port: CONTROL_PORT })) => serve_http(stream, services.control).await,
        Ok(Ok(Open::Connect { port })) => serve_port(stream, port).await,
        Ok(Ok(other)) => refuse(stream, Refusal::Invalid, format!("the agent does not serve {other}")).await,
        Ok(Err(error)) => refuse(stream, Refusal::Invalid, error.to_string()).await,
        Err(error) => Err(error),
    };
    if let Err(error) = served {
        tracing::debug!(%error, "a stream of the keeper broke");
    }
}

async fn refuse(mut stream: Stream, why: Refusal, message: String) -> io::Result<()> {
    write_line(&mut stream, &Reply::Refused { why, message }).await?;
    tokio::io::AsyncWriteExt::shutdown(&mut stream).await
}

async fn serve_http(mut stream: Stream, router: axum::Router) -> io::Result<()> {
    write_line(&mut stream, &Reply::Ok).await?;
    http::serve_stream(stream, router).await;
    Ok(())
}

async fn serve_port(mut stream: Stream, port: u16) -> io::Result<()> {
    let mut socket = match connect(port).await {
        Ok(socket) => socket,
        Err(error) => {
            let message = format!("nothing answers on port {port} inside the sandbox: {error}");
            return refuse(stream, Refusal::Closed, message).await;
        }
    };
    write_line(&mut stream, &Reply::Ok).await?;
    join(&stream, &mut socket).await
}

/// Servers bind one family or the other; both are "the port".
async fn connect(port: u16) -> io::Result<TcpStream> {
    match connect_to(SocketAddr::from((Ipv4Addr::LOCALHOST, port))).await {
        Ok(socket) => Ok(socket),
        Err(error) => match connect_to(SocketAddr::from((Ipv6Addr::LOCALHOST, port))).await {
            Ok(socket) => Ok(socket),
            Err(_) => Err(error),
        },
    }
}

/// On the loopback an answer comes at once or not at all. Under load a dial was seen to hang for a
/// minute (cause not found): it is given up early and tried again from another port.
async fn connect_to(address: SocketAddr) -> io::Result<TcpStream> {
    for _ in 0..CONNECTS_MAX {
        if let Ok(told) = tokio::time::timeout(CONNECT_PATIENCE, TcpStream::connect(address)).await {
            return told;
        }
    }
    Err(io::ErrorKind::TimedOut.into())
}

/// Copies both ways; what ends by an error on one side ends by a reset on the other.
pub(crate) async fn join(stream: &Stream, socket: &mut TcpStream) -> io::Result<()> {
    // Best effort: without it small writes wait for acknowledgements.
    let _ = socket.set_nodelay(true);
    let joined = relay(stream, socket, |_, _| {}, |_| false).await;
    if joined.is_err() {
        let _ = socket.set_zero_linger();
    }
    joined
}
