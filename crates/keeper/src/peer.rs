//! Who is at the other end of a Unix socket.

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::geteuid;
use tokio::io::Interest;
use tokio::net::UnixStream;

/// The keeper's own user, or root.
pub(crate) fn is_trusted(socket: &UnixStream) -> bool {
    match rustix::net::sockopt::socket_peercred(socket) {
        Ok(peer) => peer.uid == geteuid() || peer.uid.is_root(),
        Err(error) => {
            tracing::warn!(%error, "a client's identity cannot be learnt: it is refused");
            false
        }
    }
}

/// Whether the other end is closed in both directions: nobody waits for an answer.
pub(crate) fn is_gone(socket: &UnixStream) -> bool {
    let mut fds = [PollFd::new(socket, PollFlags::HUP)];
    let now = Timespec { tv_sec: 0, tv_nsec: 0 };
    matches!(poll(&mut fds, Some(&now)), Ok(1)) && fds[0].revents().contains(PollFlags::HUP)
}

/// Ends when the client goes away before it said more.
pub(crate) async fn gone(socket: &UnixStream) {
    if socket.ready(Interest::READABLE).await.is_ok() && !is_gone(socket) {
        // It has sent more, or closed its own direction: it waits.
        std::future::pending::<()>().await;
    }
}
