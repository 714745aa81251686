//! A guest's network: made here, served by the sandbox's keeper, its tap the monitor's.
//!
//! ```text
//! a session that is new (boot, fork, rollback): a new network; what a guest believes to be open is reset
//! a session that goes on (resume):              the keeper's, which stayed while the sandbox slept
//! ```
//! Nothing of it has a name on the host: with the last descriptor, in keeper or monitor, it is gone.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use dormouse_sys::net::{Network, NetworkError};
use dormouse_wire::keeper::{Request, Session};

use crate::error::Failure;
use crate::keepers::{Keeper, Pipes};

/// Where a guest's frames go.
#[derive(Debug)]
pub(super) enum Link {
    /// Nowhere: the guest has no network card.
    None,
    /// Made just now.
    New(Network),
    /// The keeper has served it since before the sandbox slept.
    Kept(OwnedFd),
}

impl Link {
    /// `card`: whether the guest has a network card.
    pub fn make(card: bool) -> Result<Self, Failure> {
        if !card {
            return Ok(Self::None);
        }
        Network::new().map(Self::New).map_err(unfit)
    }

    /// What the session goes on with.
    pub fn find_or_make(card: bool, keeper: &Keeper, session: Session) -> Result<Self, Failure> {
        if card && session == Session::Continue && keeper.answers() {
            match keeper.tap() {
                Ok(tap) => return Ok(Self::Kept(tap)),
                Err(error) => {
                    tracing::warn!(sandbox = %keeper.sandbox, %error, "a resume's connections are lost");
                }
            }
        }
        Self::make(card)
    }

    /// `keeper` serves it from now on. `started`: it was started just now.
    pub fn serve(&self, keeper: &Keeper, started: bool) -> Result<(), Failure> {
        match self {
            Self::New(network) => {
                let [tcp, dns, datagrams, steering] = network.sockets();
                keeper.done(&Request::Network, &[network.tap.as_fd(), tcp, dns, datagrams, steering])
            }
            Self::Kept(_) if started => {
                Err(Failure::Keeper { why: "ended, and the sandbox's network with it".to_owned() })
            }
            Self::Kept(_) | Self::None => Ok(()),
        }
    }

    fn tap(&self) -> Option<BorrowedFd<'_>> {
        match self {
            Self::None => None,
            Self::New(network) => Some(network.tap.as_fd()),
            Self::Kept(tap) => Some(tap.as_fd()),
        }
    }

    /// What a monitor is given, in the order that it wants: what it reads, what it writes, its tap.
    pub fn monitor_ends<'a>(&'a self, pipes: &'a Pipes) -> Vec<BorrowedFd<'a>> {
        [pipes.stdin.read.as_fd(), pipes.stdout.write.as_fd()].into_iter().chain(self.tap()).collect()
    }
}

fn unfit(error: NetworkError) -> Failure {
    Failure::Unfit {
        what: "the network of a microVM".to_owned(),
        why: words(&error),
        mend: error.mend().to_owned(),
    }
}

fn words(error: &NetworkError) -> String {
    let cause = std::error::Error::source(error);
    cause.map_or_else(|| error.to_string(), |cause| format!("{error}: {cause}"))
}

/// Whether guests can have a network here; why not, and what mends it. Makes one and drops it.
pub fn probe() -> Result<(), (String, &'static str)> {
    Network::new().map(drop).map_err(|error| (words(&error), error.mend()))
}
