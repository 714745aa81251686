//! The way out: loopback proxies whose connections the keeper makes.
//!
//! ```text
//! program ── 127.0.0.1:9040 (HTTP proxy or SOCKS5, told apart by the first byte) ─┐
//! program ── 127.0.0.1:53   (DNS, UDP and TCP) ───────────────────────────────────┴─ carrier ── keeper
//! ```
//!
//! Nothing is decided here: the keeper resolves, decides and connects. A refusal comes back at once and
//! says why. Invariants: no timers of its own (a clock that jumps over a pause breaks nothing); every
//! count and length is bounded.

mod dns;
mod http;
mod socks;
#[cfg(test)]
mod tests;

use std::io;
use std::net::{Ipv4Addr, SocketAddr};
use std::sync::Arc;

use dormouse_wire::carrier::{Guest, Stream, read_line, write_line};
use dormouse_wire::stream::{Open, Refusal, Reply};
use tokio::net::{TcpListener, TcpStream, UdpSocket};
use tokio::sync::Semaphore;

use crate::context::Ctx;

/// HTTP proxy and SOCKS5.
pub const PROXY_PORT: u16 = 9040;
pub const DNS_PORT: u16 = 53;
/// Connections that are served at a time; more wait in the listener's queue.
const CONNECTIONS_MAX: usize = 400;

/// Variables that make programs use the proxies; set for what is started while egress is offered.
///
/// `ALL_PROXY` names the HTTP proxy, not SOCKS: some clients fail at start when they lack SOCKS support.
#[must_use]
pub fn proxy_env() -> Vec<(String, String)> {
    let proxy = format!("http://127.0.0.1:{PROXY_PORT}");
    let direct = "localhost,127.0.0.1,::1,127.0.0.0/8,.localhost";
    let mut env = Vec::new();
    for name in ["http_proxy", "https_proxy", "all_proxy"] {
        env.push((name.to_owned(), proxy.clone()));
        env.push((name.to_ascii_uppercase(), proxy.clone()));
    }
    for name in ["no_proxy", "NO_PROXY"] {
        env.push((name.to_owned(), direct.to_owned()));
    }
    // Node's own fetch looks at the variables only when told to.
    env.push(("NODE_USE_ENV_PROXY".to_owned(), "1".to_owned()));
    env
}

/// Starts the proxies on loopback. What cannot be bound is logged and left out: the sandbox is of use
/// without a way out.
pub async fn start(ctx: &Ctx, guest: &Guest) {
    let proxy = SocketAddr::from((Ipv4Addr::LOCALHOST, PROXY_PORT));
    let dns = SocketAddr::from((Ipv4Addr::LOCALHOST, DNS_PORT));
    match TcpListener::bind(proxy).await {
        Ok(listener) => drop(tokio::spawn(serve_proxy(listener, ctx.clone(), guest.clone()))),
        Err(error) => tracing::warn!(%error, %proxy, "no egress proxy"),
    }
    match TcpListener::bind(dns).await {
        Ok(listener) => drop(tokio::spawn(dns::serve_tcp(listener, guest.clone()))),
        Err(error) => tracing::warn!(%error, %dns, "no DNS over TCP"),
    }
    match UdpSocket::bind(dns).await {
        Ok(socket) => drop(tokio::spawn(dns::serve_udp(socket, guest.clone()))),
        Err(error) => tracing::warn!(%error, %dns, "no DNS over UDP"),
    }
}

async fn serve_proxy(listener: TcpListener, ctx: Ctx, guest: Guest) {
    let places = Arc::new(Semaphore::new(CONNECTIONS_MAX));
    loop {
        let Ok(place) = places.clone().acquire_owned().await else { return };
        let Some(socket) = accept(&listener).await else { continue };
        let (ctx, guest) = (ctx.clone(), guest.clone());
        tokio::spawn(async move {
            let served = serve_connection(socket, &ctx, &guest).await;
            if let Err(error) = served {
                tracing::debug!(%error, "a proxied connection broke");
            }
            drop(place);
        });
    }
}

/// A connection, or nothing after an error that will pass (out of descriptors, aborted by the peer).
async fn accept(listener: &TcpListener) -> Option<TcpStream> {
    match listener.accept().await {
        Ok((socket, _)) => Some(socket),
        Err(error) => {
            tracing::warn!(%error, "a connection could not be accepted");
            tokio::task::yield_now().await;
            None
        }
    }
}

async fn serve_connection(socket: TcpStream, ctx: &Ctx, guest: &Guest) -> io::Result<()> {
    let mut first = [0_u8; 1];
    if socket.peek(&mut first).await? == 0 {
        return Ok(());
    }
    if first[0] == socks::VERSION {
        socks::serve(socket, ctx, guest).await
    } else {
        http::serve(socket, ctx, guest).await
    }
}

/// Why there is no connection.
#[derive(Debug)]
struct Refused {
    why: Refusal,
    message: String,
}

/// Asks the keeper for a connection; the stream is the connection once `Ok`.
async fn dial(guest: &Guest, open: &Open) -> Result<Stream, Refused> {
    let refused = |why, message: String| Refused { why, message };
    // The line is what the keeper will parse: nothing that it would read differently leaves here.
    if Open::parse(&open.to_string()).as_ref() != Ok(open) {
        return Err(refused(Refusal::Invalid, "the host or the port is not valid".to_owned()));
    }
    let mut stream = guest.open().map_err(|error| refused(Refusal::Unavailable, error.to_string()))?;
    let broken = |error: io::Error| refused(Refusal::Unavailable, format!("the way out broke: {error}"));
    write_line(&mut stream, open).await.map_err(broken)?;
    let line = read_line(&mut stream).await.map_err(broken)?;
    match Reply::parse(&line) {
        Ok(Reply::Ok) => Ok(stream),
        Ok(Reply::Refused { why, message }) => Err(refused(why, message)),
        Err(error) => Err(refused(Refusal::Unavailable, error.to_string())),
    }
}
