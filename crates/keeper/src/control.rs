//! What the daemon asks for.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::Ordering;

use dormouse_policy::EgressPolicy;
use dormouse_wire::carrier::HostPipes;
use dormouse_wire::keeper::{Answer, KEEPER_VERSION, Request, Status};
use dormouse_wire::local::{recv_frame, send_frame};
use tokio::net::{UnixListener, UnixStream};
use tokio::sync::Semaphore;

use crate::{Keeper, chain, peer};

/// Daemons that talk at a time: one, and one that replaces it; more wait.
const CONNECTIONS_MAX: usize = 16;

pub(crate) async fn serve(listener: UnixListener, keeper: Arc<Keeper>) {
    let places = Arc::new(Semaphore::new(CONNECTIONS_MAX));
    loop {
        let Ok(place) = places.clone().acquire_owned().await else { return };
        let socket = match listener.accept().await {
            Ok((socket, _)) if peer::is_trusted(&socket) => socket,
            Ok(_) => continue,
            Err(error) => {
                tracing::warn!(%error, "a control connection could not be accepted");
                tokio::task::yield_now().await;
                continue;
            }
        };
        let keeper = keeper.clone();
        tokio::spawn(async move {
            serve_connection(socket, &keeper).await;
            drop(place);
        });
    }
}

async fn serve_connection(socket: UnixStream, keeper: &Arc<Keeper>) {
    loop {
        let (request, fds) = match recv_frame::<Request>(&socket).await {
            Ok(Some(received)) => received,
            Ok(None) => return,
            Err(error) => {
                let message = format!("the request was not understood: {error}");
                // The connection is out of step: it is closed whether or not this arrives.
                let _ = send_frame(&socket, &Answer::Failed { message }, &[]).await;
                return;
            }
        };
        let ends = request == Request::Shutdown;
        let tap = if request == Request::Tap { keeper.network.tap() } else { None };
        let answer = handle(keeper, request, fds);
        let beside: Vec<BorrowedFd<'_>> = tap.iter().map(AsFd::as_fd).collect();
        if let Err(error) = send_frame(&socket, &answer, &beside).await {
            tracing::warn!(%error, "the daemon did not take its answer");
        }
        if ends {
            keeper.shutdown.notify_one();
            return;
        }
    }
}

fn handle(keeper: &Arc<Keeper>, request: Request, fds: Vec<OwnedFd>) -> Answer {
    let done = match request {
        Request::Hello => {
            let pid = std::process::id();
            return Answer::Hello { version: KEEPER_VERSION, pid, sandbox: keeper.sandbox.clone() };
        }
        Request::Status => return Answer::Status(status(keeper)),
        Request::Attach { generation, session } => match <[OwnedFd; 4]>::try_from(fds) {
            Ok([to_sandbox, from_sandbox, sandbox_stdin, sandbox_stdout]) => {
                let pipes = HostPipes { to_sandbox, from_sandbox, sandbox_stdin, sandbox_stdout };
                let attached = keeper.host.attach(pipes, session, generation);
                tracing::info!(?session, %generation, ok = attached.is_ok(), "attach");
                attached.map_err(|error| chain(&error))
            }
            Err(fds) => Err(format!("attach needs 4 descriptors, {} came", fds.len())),
        },
        Request::Detach => {
            keeper.host.detach();
            Ok(())
        }
        Request::Reattach => keeper.host.reattach().map_err(|error| chain(&error)),
        Request::SetEgress { rules } => match EgressPolicy::compile(&rules) {
            Ok(policy) => {
                keeper.policy.send_replace(Arc::new(policy));
                Ok(())
            }
            Err(error) => Err(chain(&error)),
        },
        Request::Network => {
            let served = keeper.network.serve(fds, keeper);
            tracing::info!(ok = served.is_ok(), "network");
            served
        }
        // It goes beside the answer.
        Request::Tap if keeper.network.is_served() => Ok(()),
        Request::Tap => Err("no network is served here".to_owned()),
        Request::Shutdown => Ok(()),
    };
    match done {
        Ok(()) => Answer::Done,
        Err(message) => Answer::Failed { message },
    }
}

fn status(keeper: &Keeper) -> Status {
    let meter = &keeper.meter;
    Status {
        carrier: keeper.host.state(),
        generation: keeper.host.generation(),
        ingress_open: meter.ingress_open.load(Ordering::Relaxed),
        egress_open: meter.egress_open.load(Ordering::Relaxed),
        last_activity_ms: meter.last_activity_ms.load(Ordering::Relaxed),
        bytes_in: meter.bytes_in.load(Ordering::Relaxed),
        bytes_out: meter.bytes_out.load(Ordering::Relaxed),
        egress_denied: meter.egress_denied.load(Ordering::Relaxed),
    }
}
