//! The sandbox's connections to the outside.
//!
//! A name is resolved once, here; the policy decides on each address; the connection goes to exactly
//! the address that was allowed. When the rules change, connections that they no longer allow end.

pub(crate) mod dns;
pub(crate) mod resolve;

use std::io;
use std::net::IpAddr;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use dormouse_policy::{Decision, EgressPolicy, Target};
use dormouse_wire::carrier::{Direction, Stream, read_line, relay, write_line};
use dormouse_wire::stream::{Open, Refusal, Reply};
use tokio::io::AsyncWriteExt;
use tokio::net::TcpStream;
use tokio::time::timeout;

use crate::Keeper;
use crate::meter::Counted;

const LINE_TIME_MAX: Duration = Duration::from_secs(30);
/// For one address; a black hole must not eat the caller's patience.
const CONNECT_TIME_MAX: Duration = Duration::from_secs(8);
/// Addresses of one name that are tried.
const ADDRESSES_MAX: usize = 4;

pub(crate) async fn serve(keeper: Arc<Keeper>) {
    // The carrier bounds how many streams the agent has open.
    while let Some(stream) = keeper.host.accept().await {
        let keeper = keeper.clone();
        tokio::spawn(async move {
            if let Err(error) = serve_stream(stream, &keeper).await {
                tracing::debug!(%error, "a stream of the sandbox broke");
            }
        });
    }
}

async fn serve_stream(mut stream: Stream, keeper: &Keeper) -> io::Result<()> {
    let line =
        timeout(LINE_TIME_MAX, read_line(&mut stream)).await.map_err(|_| io::ErrorKind::TimedOut)??;
    match Open::parse(&line) {
        Ok(Open::Tcp { host, port }) => serve_tcp(stream, keeper, &host, port).await,
        Ok(Open::Dns) => {
            write_line(&mut stream, &Reply::Ok).await?;
            dns::serve(&mut stream, keeper).await
        }
        Ok(Open::Connect { .. }) => {
            refuse(stream, Refusal::Invalid, "the keeper serves TCP and DNS".to_owned()).await
        }
        Err(error) => refuse(stream, Refusal::Invalid, error.to_string()).await,
    }
}

async fn refuse(mut stream: Stream, why: Refusal, message: String) -> io::Result<()> {
    write_line(&mut stream, &Reply::Refused { why, message }).await?;
    stream.shutdown().await
}

async fn serve_tcp(mut stream: Stream, keeper: &Keeper, host: &str, port: u16) -> io::Result<()> {
    let policy = keeper.policy.borrow().clone();
    let (mut socket, ip) = match connect(keeper, &policy, host, port).await {
        Ok(connected) => connected,
        Err((why, message)) => return refuse(stream, why, message).await,
    };
    let _counted = Counted::new(&keeper.meter.egress_open);
    // Best effort: without it small writes wait for acknowledgements.
    let _ = socket.set_nodelay(true);
    write_line(&mut stream, &Reply::Ok).await?;
    let names = names(host);
    let joined = tokio::select! {
        joined = relay(&stream, &mut socket, |direction: Direction, n| keeper.meter.moved(direction, n), |_| false) => joined,
        () = denied(keeper, &names, ip, port) => Err(io::ErrorKind::PermissionDenied.into()),
    };
    if joined.is_err() {
        // What ends by an error inside ends by a reset outside.
        let _ = socket.set_zero_linger();
    }
    joined
}

/// The host as a name, if it is one.
fn names(host: &str) -> Vec<String> {
    if host.parse::<IpAddr>().is_ok() { Vec::new() } else { vec![host.to_owned()] }
}

/// Ends when the rules have changed so that the connection is no longer allowed.
pub(crate) async fn denied(keeper: &Keeper, names: &[String], ip: IpAddr, port: u16) {
    let mut changes = keeper.policy.subscribe();
    loop {
        let policy = changes.borrow_and_update().clone();
        if let Decision::Deny(why) = decide(&policy, names, ip, port) {
            tracing::info!(?names, %ip, port, %why, "the rules changed: an open connection ends");
            keeper.meter.egress_denied.fetch_add(1, Ordering::Relaxed);
            return;
        }
        if changes.changed().await.is_err() {
            return;
        }
    }
}

/// `names`: what the address is known by; any of them may allow it.
pub(crate) fn decide(policy: &EgressPolicy, names: &[String], ip: IpAddr, port: u16) -> Decision {
    let is_host = resolve::is_hosts_own(ip);
    let by = |host| policy.decide(&Target { host, ip, port, is_host });
    let mut named = names.iter().map(|name| by(Some(name.as_str())));
    if named.any(|decision| decision == Decision::Allow) { Decision::Allow } else { by(None) }
}

async fn connect(
    keeper: &Keeper,
    policy: &EgressPolicy,
    host: &str,
    port: u16,
) -> Result<(TcpStream, IpAddr), (Refusal, String)> {
    let deny = |why: String| {
        keeper.meter.egress_denied.fetch_add(1, Ordering::Relaxed);
        tracing::info!(host, port, why, "a connection is denied");
        (Refusal::Denied, why)
    };
    let ips = match host.parse::<IpAddr>() {
        Ok(ip) => vec![ip],
        Err(_) if !policy.may_resolve(host) => {
            return Err(deny(format!("this sandbox has no internet access and no rule allows {host}")));
        }
        Err(_) => resolve::lookup(host).await.map_err(|error| (Refusal::Unreachable, error.to_string()))?,
    };
    let names = names(host);
    let mut refusal = (Refusal::Unreachable, format!("{host} has no address"));
    let mut tried = 0;
    for ip in ips {
        if let Decision::Deny(why) = decide(policy, &names, ip, port) {
            if tried == 0 {
                refusal = (Refusal::Denied, format!("{ip} may not be reached: {why}"));
            }
            continue;
        }
        if tried == ADDRESSES_MAX {
            break;
        }
        tried += 1;
        match dial(ip, port).await {
            Ok(socket) => return Ok((socket, ip)),
            Err(error) => {
                let closed = error.kind() == io::ErrorKind::ConnectionRefused;
                let why = if closed { Refusal::Closed } else { Refusal::Unreachable };
                refusal = (why, format!("{ip} port {port}: {error}"));
            }
        }
    }
    if refusal.0 == Refusal::Denied { Err(deny(refusal.1)) } else { Err(refusal) }
}

/// Exactly this address, which was decided on.
pub(crate) async fn dial(ip: IpAddr, port: u16) -> io::Result<TcpStream> {
    match timeout(CONNECT_TIME_MAX, TcpStream::connect((ip, port))).await {
        Ok(connected) => connected,
        Err(_) => {
            let why = format!("no answer within {} s", CONNECT_TIME_MAX.as_secs());
            Err(io::Error::new(io::ErrorKind::TimedOut, why))
        }
    }
}
