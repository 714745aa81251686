//! The guest's connections, to wherever: each is decided on, made again from the host's namespace, and copied.
//!
//! The guest's end is open before the other one is: what is denied, closed or unreachable ends by a reset at once.

use std::io;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use dormouse_policy::{Decision, EgressPolicy, Why};
use dormouse_sys::net::{DNS_PORT, GATEWAY};
use dormouse_wire::carrier::Direction;
use rustix::net::Shutdown;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::Semaphore;
use tokio::task::JoinSet;
use tokio::time::timeout;

use crate::Keeper;
use crate::egress::{decide, denied, dial, dns, resolve};
use crate::meter::Counted;

/// At a time; more wait in the listener's queue.
const CONNECTIONS_MAX: usize = 1000;
/// Names of rules that are looked up for one address that nobody asked for by name here.
const NAMES_TRIED_MAX: usize = 16;
const NAMES_TIME_MAX: Duration = Duration::from_secs(2);
/// Held only while bytes move.
const BUFFER_BYTES: usize = 64 << 10;
/// Then others have their turn.
const READS_IN_A_ROW: usize = 16;

pub(super) async fn serve(listener: TcpListener, keeper: Arc<Keeper>) {
    let places = Arc::new(Semaphore::new(CONNECTIONS_MAX));
    let mut open = JoinSet::new();
    loop {
        let Ok(place) = places.clone().acquire_owned().await else { return };
        while open.try_join_next().is_some() {}
        let inside = match listener.accept().await {
            Ok((inside, _)) => inside,
            Err(error) => {
                tracing::warn!(%error, "a connection of the guest could not be accepted");
                tokio::task::yield_now().await;
                continue;
            }
        };
        let keeper = keeper.clone();
        open.spawn(async move {
            if let Err(error) = serve_connection(inside, &keeper).await {
                tracing::debug!(%error, "a connection of the guest broke");
            }
            drop(place);
        });
    }
}

async fn serve_connection(mut inside: TcpStream, keeper: &Keeper) -> io::Result<()> {
    let to = inside.local_addr()?;
    if to == SocketAddr::from((GATEWAY, DNS_PORT)) {
        return dns::serve(&mut inside, keeper).await;
    }
    let (ip, port) = (to.ip().to_canonical(), to.port());
    let policy = keeper.policy.borrow().clone();
    let (names, decision) = judge(&policy, keeper, ip, port).await;
    if let Decision::Deny(why) = decision {
        keeper.meter.egress_denied.fetch_add(1, Ordering::Relaxed);
        tracing::info!(%to, ?names, %why, "a connection is denied");
        return reset(&inside);
    }
    let outside = match dial(ip, port).await {
        Ok(outside) => outside,
        Err(error) => {
            tracing::debug!(%to, %error, "a connection cannot be made");
            return reset(&inside);
        }
    };
    let _counted = Counted::new(&keeper.meter.egress_open);
    // Best effort: without it small writes wait for acknowledgements.
    let _ = inside.set_nodelay(true).and_then(|()| outside.set_nodelay(true));
    let both = async {
        tokio::try_join!(
            copy(&inside, &outside, |bytes| keeper.meter.moved(Direction::FromCarrier, bytes)),
            copy(&outside, &inside, |bytes| keeper.meter.moved(Direction::ToCarrier, bytes)),
        )
    };
    let joined = tokio::select! {
        joined = both => joined.map(drop),
        () = denied(keeper, &names, ip, port) => Err(io::ErrorKind::PermissionDenied.into()),
    };
    if joined.is_err() {
        // What ends by an error on one side ends by a reset on the other.
        let _ = reset(&inside).and(reset(&outside));
    }
    joined
}

/// With the names that the address is known by.
async fn judge(policy: &EgressPolicy, keeper: &Keeper, ip: IpAddr, port: u16) -> (Vec<String>, Decision) {
    let decided = || {
        let names = keeper.network.names_of(ip);
        let decision = decide(policy, &names, ip, port);
        (names, decision)
    };
    let first = decided();
    let by_name = matches!(first.1, Decision::Deny(Why::NoInternet | Why::Rule(_)));
    if !by_name || !keeper.network.may_look_up() {
        return first;
    }
    // A fork may know addresses of names that it asked for before it was one.
    let mut asked = JoinSet::new();
    for name in policy.whole_names(NAMES_TRIED_MAX) {
        let name = name.to_owned();
        asked.spawn(async move { resolve::lookup(&name).await.ok().map(|ips| (name, ips)) });
    }
    // Who is not found in time is not found; the others count.
    let _ = timeout(NAMES_TIME_MAX, async {
        while let Some(found) = asked.join_next().await {
            if let Ok(Some((name, ips))) = found {
                keeper.network.learn(&name, &ips);
            }
        }
    })
    .await;
    decided()
}

/// The other end sees a reset when this one is closed.
fn reset(socket: &TcpStream) -> io::Result<()> {
    socket.set_zero_linger()
}

/// Until `from` ends; then `to` is told.
async fn copy(from: &TcpStream, to: &TcpStream, moved: impl Fn(usize)) -> io::Result<()> {
    loop {
        from.readable().await?;
        let mut buffer = Vec::with_capacity(BUFFER_BYTES);
        for _ in 0..READS_IN_A_ROW {
            buffer.clear();
            match from.try_read_buf(&mut buffer) {
                Ok(0) => {
                    rustix::net::shutdown(to, Shutdown::Write)?;
                    return Ok(());
                }
                Ok(bytes) => {
                    write_all(to, &buffer).await?;
                    moved(bytes);
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => break,
                Err(error) => return Err(error),
            }
        }
        tokio::task::yield_now().await;
    }
}

async fn write_all(to: &TcpStream, mut bytes: &[u8]) -> io::Result<()> {
    while !bytes.is_empty() {
        match to.try_write(bytes) {
            Ok(written) => bytes = &bytes[written..],
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => to.writable().await?,
            Err(error) => return Err(error),
        }
    }
    Ok(())
}
