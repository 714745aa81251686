//! The network of a microVM: a namespace (`dormouse_sys::net`) whose sockets are this process's.
//!
//! ```text
//! guest ═ tap ═ namespace ─┬─ any TCP connection ─> connections ─ policy ─> host's namespace, internet
//!                          ├─ names (UDP, TCP 53) ─> names, and so what an address is called
//!                          └─ any other datagram: refused by the kernel, told by datagrams
//! ```
//! The tap stays here while the sandbox sleeps, so that what was open is open when it wakes. A session that is new
//! (fork, rollback) has a network that is new, where what a guest believes to be open is answered by a reset.

mod connections;
mod datagrams;
mod known;
mod names;

use std::net::{IpAddr, TcpListener, UdpSocket};
use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::task::JoinSet;

use crate::Keeper;
use known::Known;

/// What is served, if anything is.
#[derive(Default)]
pub(crate) struct Network {
    served: Mutex<Option<Served>>,
    known: Mutex<Known>,
}

struct Served {
    tap: OwnedFd,
    /// Connections are steered to the listener as long as this is open.
    _steering: OwnedFd,
    /// They end when this is dropped.
    _tasks: JoinSet<()>,
}

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Network {
    /// In the place of what was served before. `fds`: as `Request::Network` names them.
    pub fn serve(&self, fds: Vec<OwnedFd>, keeper: &Arc<Keeper>) -> Result<(), String> {
        let [tap, tcp, dns, seen, steering] = <[OwnedFd; 5]>::try_from(fds)
            .map_err(|fds| format!("a network needs 5 descriptors, {} came", fds.len()))?;
        let unusable = |error| format!("a socket of the network cannot be used: {error}");
        let listener = tokio::net::TcpListener::from_std(TcpListener::from(tcp)).map_err(unusable)?;
        let dns = tokio::net::UdpSocket::from_std(UdpSocket::from(dns)).map_err(unusable)?;
        let seen = datagrams::watch(seen).map_err(unusable)?;
        let mut tasks = JoinSet::new();
        tasks.spawn(connections::serve(listener, keeper.clone()));
        tasks.spawn(names::serve(dns, keeper.clone()));
        tasks.spawn(datagrams::tell(seen, keeper.clone()));
        *locked(&self.served) = Some(Served { tap, _steering: steering, _tasks: tasks });
        Ok(())
    }

    pub fn is_served(&self) -> bool {
        locked(&self.served).is_some()
    }

    /// Another handle of the tap.
    pub fn tap(&self) -> Option<OwnedFd> {
        let tap = locked(&self.served).as_ref()?.tap.try_clone();
        tap.inspect_err(|error| tracing::warn!(%error, "the tap cannot be handed on")).ok()
    }

    pub fn close(&self) {
        locked(&self.served).take();
    }

    /// The sandbox was told that these are the name's addresses.
    pub fn learn(&self, name: &str, ips: &[IpAddr]) {
        locked(&self.known).learn(name, ips);
    }

    /// Whether the rules' own names may be asked for now: not for each connection that is denied.
    fn may_look_up(&self) -> bool {
        locked(&self.known).may_look_up()
    }

    fn names_of(&self, ip: IpAddr) -> Vec<String> {
        locked(&self.known).of(ip)
    }
}
