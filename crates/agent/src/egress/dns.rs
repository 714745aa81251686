//! The DNS stub: carries messages to the keeper, one stream per question (UDP) or connection (TCP).

use std::io;
use std::net::SocketAddr;
use std::sync::Arc;

use dormouse_wire::carrier::Guest;
use dormouse_wire::dns::{MESSAGE_BYTES_MAX, Query, Rcode, UDP_BYTES_MAX};
use dormouse_wire::stream::Open;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, UdpSocket};
use tokio::sync::Semaphore;

use super::{accept, dial};
use crate::carrier::join;

/// Questions at a time over UDP; what comes beyond waits in the socket's buffer.
const QUESTIONS_MAX: usize = 48;
/// Connections at a time over TCP.
const CONNECTIONS_MAX: usize = 16;

pub async fn serve_udp(socket: UdpSocket, guest: Guest) {
    let socket = Arc::new(socket);
    let places = Arc::new(Semaphore::new(QUESTIONS_MAX));
    let mut buffer = vec![0_u8; MESSAGE_BYTES_MAX];
    loop {
        let Ok(place) = places.clone().acquire_owned().await else { return };
        let (len, from) = match socket.recv_from(&mut buffer).await {
            Ok(received) => received,
            Err(error) => {
                tracing::warn!(%error, "a DNS question could not be received");
                tokio::task::yield_now().await;
                continue;
            }
        };
        let (question, socket, guest) = (buffer[..len].to_vec(), socket.clone(), guest.clone());
        tokio::spawn(async move {
            answer_udp(&question, from, &socket, &guest).await;
            drop(place);
        });
    }
}

async fn answer_udp(question: &[u8], to: SocketAddr, socket: &UdpSocket, guest: &Guest) {
    let answer = match Query::parse(question) {
        Ok(query) => match ask(question, guest).await {
            Ok(answer) if answer.len() <= UDP_BYTES_MAX => answer,
            // Truncated: the resolver inside asks again over TCP.
            Ok(_) => {
                let mut cut = query.refuse(Rcode::NoError);
                cut[2] |= 0x02;
                cut
            }
            Err(error) => {
                tracing::debug!(%error, name = query.name, "a DNS question was not answered");
                query.refuse(Rcode::ServerFailure)
            }
        },
        Err(Some(refusal)) => refusal,
        Err(None) => return,
    };
    if let Err(error) = socket.send_to(&answer, to).await {
        tracing::debug!(%error, "a DNS answer could not be sent");
    }
}

async fn ask(question: &[u8], guest: &Guest) -> io::Result<Vec<u8>> {
    let mut stream = dial(guest, &Open::Dns).await.map_err(|refused| io::Error::other(refused.message))?;
    let len = u16::try_from(question.len()).map_err(|_| io::ErrorKind::InvalidInput)?;
    stream.write_u16(len).await?;
    stream.write_all(question).await?;
    stream.shutdown().await?;
    let mut answer = vec![0; usize::from(stream.read_u16().await?)];
    stream.read_exact(&mut answer).await?;
    Ok(answer)
}

/// The framing inside is the carrier's too (RFC 1035 §4.2.2): bytes are copied.
pub async fn serve_tcp(listener: TcpListener, guest: Guest) {
    let places = Arc::new(Semaphore::new(CONNECTIONS_MAX));
    loop {
        let Ok(place) = places.clone().acquire_owned().await else { return };
        let Some(mut socket) = accept(&listener).await else { continue };
        let guest = guest.clone();
        tokio::spawn(async move {
            match dial(&guest, &Open::Dns).await {
                Ok(stream) => drop(join(&stream, &mut socket).await),
                Err(refused) => tracing::debug!(message = %refused.message, "no DNS over TCP"),
            }
            drop(place);
        });
    }
}
