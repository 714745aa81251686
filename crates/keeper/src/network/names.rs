//! Names, asked for over UDP at the network's own address. (Over TCP: [`super::connections`].)

use std::sync::Arc;

use dormouse_wire::dns::{MESSAGE_BYTES_MAX, Query, Rcode, UDP_BYTES_MAX};
use tokio::net::UdpSocket;
use tokio::sync::Semaphore;
use tokio::task::JoinSet;

use crate::Keeper;
use crate::egress::dns;

/// Questions at a time; what comes beyond waits in the socket's buffer.
const QUESTIONS_MAX: usize = 64;

pub(super) async fn serve(socket: UdpSocket, keeper: Arc<Keeper>) {
    let socket = Arc::new(socket);
    let places = Arc::new(Semaphore::new(QUESTIONS_MAX));
    let mut asked = JoinSet::new();
    let mut buffer = vec![0_u8; MESSAGE_BYTES_MAX];
    loop {
        let Ok(place) = places.clone().acquire_owned().await else { return };
        while asked.try_join_next().is_some() {}
        let (length, from) = match socket.recv_from(&mut buffer).await {
            Ok(received) => received,
            Err(error) => {
                tracing::debug!(%error, "a question could not be received");
                tokio::task::yield_now().await;
                continue;
            }
        };
        let (question, socket, keeper) = (buffer[..length].to_vec(), socket.clone(), keeper.clone());
        asked.spawn(async move {
            if let Some(answer) = answer(&question, &keeper).await
                && let Err(error) = socket.send_to(&answer, from).await
            {
                tracing::debug!(%error, "an answer could not be sent");
            }
            drop(place);
        });
    }
}

/// `None`: it is no question.
async fn answer(question: &[u8], keeper: &Keeper) -> Option<Vec<u8>> {
    let query = match Query::parse(question) {
        Ok(query) => query,
        Err(refusal) => return refusal,
    };
    let answer = dns::answer(keeper, &query, question).await;
    if answer.len() <= UDP_BYTES_MAX {
        return Some(answer);
    }
    // Truncated: the resolver inside asks again over TCP.
    let mut cut = query.refuse(Rcode::NoError);
    cut[2] |= 0x02;
    Some(cut)
}
