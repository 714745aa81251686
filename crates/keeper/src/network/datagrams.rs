//! Datagrams that the kernel refuses in the network: told, so that nobody searches for long.

use std::io;
use std::net::{IpAddr, SocketAddrV4};
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use dormouse_sys::net::{DNS_PORT, GATEWAY, next_datagram};
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;

use crate::Keeper;

/// Looked at in one go; then others have their turn. What comes faster is refused all the same, and not told.
const BATCH: usize = 64;
const PAUSE: Duration = Duration::from_millis(50);
const TELL_EVERY: Duration = Duration::from_secs(1);

#[allow(
    deprecated,
    reason = "the successor is unsafe for types whose descriptor changes; a socket's never does"
)]
pub(super) fn watch(socket: OwnedFd) -> io::Result<AsyncFd<OwnedFd>> {
    AsyncFd::with_interest(socket, Interest::READABLE)
}

pub(super) async fn tell(seen: AsyncFd<OwnedFd>, keeper: Arc<Keeper>) {
    let mut told: Option<Instant> = None;
    loop {
        let Ok(mut ready) = seen.readable().await else { return };
        for _ in 0..BATCH {
            match ready.try_io(|socket| next_datagram(socket.get_ref().as_fd())) {
                Ok(Ok(Some(to))) => refused(to, &keeper, &mut told),
                Ok(Ok(None)) => {}
                Ok(Err(error)) => {
                    tracing::debug!(%error, "a datagram could not be looked at");
                    break;
                }
                Err(_would_block) => break,
            }
        }
        tokio::time::sleep(PAUSE).await;
    }
}

fn refused(to: SocketAddrV4, keeper: &Keeper, told: &mut Option<Instant>) {
    if *to.ip() == GATEWAY && to.port() == DNS_PORT {
        return;
    }
    keeper.meter.egress_denied.fetch_add(1, Ordering::Relaxed);
    if told.is_none_or(|told| told.elapsed() >= TELL_EVERY) {
        *told = Some(Instant::now());
        let names = keeper.network.names_of(IpAddr::V4(*to.ip()));
        tracing::info!(%to, ?names, "a datagram is refused: of UDP only names pass, at {GATEWAY} port {DNS_PORT}");
    }
}
