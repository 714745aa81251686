//! Clients' streams into the sandbox: `agent.sock`.
//!
//! A client that comes while nothing is attached waits; one whose session is replaced before the
//! sandbox answered is asked for again in the new one. After the answer a replaced session ends the
//! stream.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use dormouse_wire::carrier::{Direction, Stream, read_line, relay, write_line};
use dormouse_wire::stream::{Open, Refusal, Reply};
use tokio::net::{UnixListener, UnixStream};
use tokio::sync::Semaphore;
use tokio::time::timeout;

use crate::meter::Counted;
use crate::{Keeper, peer};

/// Clients at a time, waiting or served; below the carrier's own limit.
const CLIENTS_MAX: usize = 1000;
/// For the line that says what is wanted.
const LINE_TIME_MAX: Duration = Duration::from_secs(10);
/// Sessions that are tried for one client.
const SESSIONS_MAX: usize = 4;

pub(crate) async fn serve(listener: UnixListener, keeper: Arc<Keeper>) {
    let places = Arc::new(Semaphore::new(CLIENTS_MAX));
    loop {
        let socket = match listener.accept().await {
            Ok((socket, _)) if peer::is_trusted(&socket) => socket,
            Ok(_) => continue,
            Err(error) => {
                tracing::warn!(%error, "a client could not be accepted");
                tokio::task::yield_now().await;
                continue;
            }
        };
        let place = places.clone().try_acquire_owned();
        let keeper = keeper.clone();
        tokio::spawn(async move {
            let served = match place {
                Ok(_place) => {
                    let _counted = Counted::new(&keeper.meter.ingress_open);
                    serve_client(socket, &keeper).await
                }
                Err(_) => {
                    let message = format!("{CLIENTS_MAX} streams are open already");
                    refuse(socket, Refusal::Unavailable, message).await
                }
            };
            if let Err(error) = served {
                tracing::debug!(%error, "a client's stream broke");
            }
        });
    }
}

async fn refuse(mut socket: UnixStream, why: Refusal, message: String) -> io::Result<()> {
    write_line(&mut socket, &Reply::Refused { why, message }).await
}

async fn serve_client(mut socket: UnixStream, keeper: &Keeper) -> io::Result<()> {
    let line =
        timeout(LINE_TIME_MAX, read_line(&mut socket)).await.map_err(|_| io::ErrorKind::TimedOut)??;
    let port = match Open::parse(&line) {
        Ok(Open::Connect { port }) => port,
        Ok(_) => return refuse(socket, Refusal::Invalid, "only CONNECT is served here".to_owned()).await,
        Err(error) => return refuse(socket, Refusal::Invalid, error.to_string()).await,
    };
    let opened = tokio::select! {
        opened = open(keeper, port) => opened,
        () = peer::gone(&socket) => return Ok(()),
    };
    let stream = match opened {
        Ok(stream) => stream,
        Err((why, message)) => return refuse(socket, why, message).await,
    };
    write_line(&mut socket, &format!("OK {port}")).await?;
    let moved = |direction: Direction, bytes| {
        keeper.meter.moved(direction, bytes);
        keeper.meter.touch();
    };
    relay(&stream, &mut socket, moved, peer::is_gone).await
}

async fn open(keeper: &Keeper, port: u16) -> Result<Stream, (Refusal, String)> {
    let mut last = String::new();
    for _ in 0..SESSIONS_MAX {
        let opened = keeper.host.open().await;
        let stream = opened.map_err(|error| (Refusal::Unavailable, error.to_string()))?;
        match ask(stream, port).await {
            Ok((stream, Reply::Ok)) => return Ok(stream),
            Ok((_, Reply::Refused { why, message })) => return Err((why, message)),
            Err(error) => last = error.to_string(),
        }
    }
    Err((Refusal::Unavailable, format!("the sandbox did not answer in {SESSIONS_MAX} tries: {last}")))
}

async fn ask(mut stream: Stream, port: u16) -> io::Result<(Stream, Reply)> {
    write_line(&mut stream, &Open::Connect { port }).await?;
    let line = read_line(&mut stream).await?;
    let reply = Reply::parse(&line).map_err(|error| io::Error::new(io::ErrorKind::InvalidData, error))?;
    Ok((stream, reply))
}
