//! DNS for the sandbox: addresses by the host's resolver, filtered by the policy; other types by the
//! servers that the host uses.

use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::sync::atomic::Ordering;
use std::time::Duration;

use dormouse_policy::Decision;
use dormouse_types::random_hex;
use dormouse_wire::dns::{MESSAGE_BYTES_MAX, Query, Rcode, TYPE_A, TYPE_AAAA, is_truncated, message_id};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::net::{TcpStream, UdpSocket};
use tokio::time::timeout;

use super::decide;
use super::resolve::{LookupError, lookup};
use crate::Keeper;

const FORWARD_TIME_MAX: Duration = Duration::from_secs(5);
/// Questions of one stream: then the agent opens another.
const QUESTIONS_MAX: usize = 1000;
const DNS_PORT: u16 = 53;
const RESOLV_CONF: &str = "/etc/resolv.conf";
const SERVERS_MAX: usize = 3;

/// Answers the questions of one stream, in order.
pub(crate) async fn serve(
    stream: &mut (impl AsyncRead + AsyncWrite + Unpin),
    keeper: &Keeper,
) -> io::Result<()> {
    for _ in 0..QUESTIONS_MAX {
        let len = match stream.read_u16().await {
            Ok(len) => usize::from(len),
            Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => break,
            Err(error) => return Err(error),
        };
        if len > MESSAGE_BYTES_MAX {
            return Err(io::Error::new(io::ErrorKind::InvalidData, "a DNS question is too long"));
        }
        let mut question = vec![0; len];
        stream.read_exact(&mut question).await?;
        let answer = match Query::parse(&question) {
            Ok(query) => answer(keeper, &query, &question).await,
            Err(Some(refusal)) => refusal,
            Err(None) => return Err(io::Error::new(io::ErrorKind::InvalidData, "not a DNS question")),
        };
        let len = u16::try_from(answer.len()).map_err(|_| io::ErrorKind::InvalidData)?;
        stream.write_u16(len).await?;
        stream.write_all(&answer).await?;
    }
    stream.shutdown().await
}

/// The answer to one question, which is `query`.
pub(crate) async fn answer(keeper: &Keeper, query: &Query, question: &[u8]) -> Vec<u8> {
    let policy = keeper.policy.borrow().clone();
    if query.name.is_empty() || !policy.may_resolve(&query.name) {
        return deny(keeper, query, "this sandbox has no internet access and no rule allows the name");
    }
    if query.kind != TYPE_A && query.kind != TYPE_AAAA {
        return forward(query, question).await;
    }
    let found = match lookup(&query.name).await {
        Ok(found) => found,
        Err(LookupError::NoSuchName { .. }) => return query.refuse(Rcode::NoSuchName),
        Err(error @ LookupError::Failed { .. }) => {
            tracing::info!(%error, "a name could not be resolved");
            return query.refuse(Rcode::ServerFailure);
        }
    };
    let mut denied = None;
    let mut allowed = Vec::new();
    for ip in found {
        match decide(&policy, std::slice::from_ref(&query.name), ip, 0) {
            Decision::Allow => allowed.push(ip),
            Decision::Deny(why) => denied = Some(why),
        }
    }
    match denied {
        Some(why) if allowed.is_empty() => deny(keeper, query, &why.to_string()),
        _ => {
            keeper.network.learn(&query.name, &allowed);
            query.answer(Rcode::NoError, &allowed)
        }
    }
}

fn deny(keeper: &Keeper, query: &Query, why: &str) -> Vec<u8> {
    keeper.meter.egress_denied.fetch_add(1, Ordering::Relaxed);
    tracing::info!(name = query.name, why, "a name is not answered");
    query.refuse(Rcode::Refused)
}

/// Asks the host's servers in turn; the sandbox's id is not shown to them.
async fn forward(query: &Query, question: &[u8]) -> Vec<u8> {
    let servers = servers().await;
    if servers.is_empty() {
        return query.refuse(Rcode::NotImplemented);
    }
    for server in servers {
        match timeout(FORWARD_TIME_MAX, ask(server, question)).await {
            Ok(Ok(mut answer)) => {
                answer[..2].copy_from_slice(&query.id.to_be_bytes());
                return answer;
            }
            Ok(Err(error)) => tracing::debug!(%error, %server, "a DNS server did not answer"),
            Err(_) => tracing::debug!(%server, "a DNS server was too slow"),
        }
    }
    query.refuse(Rcode::ServerFailure)
}

async fn ask(server: IpAddr, question: &[u8]) -> io::Result<Vec<u8>> {
    let id = u16::from_str_radix(&random_hex(2), 16).unwrap_or_default();
    let mut question = question.to_vec();
    question[..2].copy_from_slice(&id.to_be_bytes());
    let any: IpAddr =
        if server.is_ipv4() { Ipv4Addr::UNSPECIFIED.into() } else { Ipv6Addr::UNSPECIFIED.into() };
    let socket = UdpSocket::bind((any, 0)).await?;
    // Connected: only this server's datagrams are received.
    socket.connect((server, DNS_PORT)).await?;
    socket.send(&question).await?;
    let mut buffer = vec![0_u8; MESSAGE_BYTES_MAX];
    loop {
        let len = socket.recv(&mut buffer).await?;
        if message_id(&buffer[..len]) != Some(id) {
            continue;
        }
        if is_truncated(&buffer[..len]) {
            return ask_tcp(server, &question).await;
        }
        buffer.truncate(len);
        return Ok(buffer);
    }
}

async fn ask_tcp(server: IpAddr, question: &[u8]) -> io::Result<Vec<u8>> {
    let mut socket = TcpStream::connect((server, DNS_PORT)).await?;
    let len = u16::try_from(question.len()).map_err(|_| io::ErrorKind::InvalidInput)?;
    socket.write_all(&[&len.to_be_bytes(), question].concat()).await?;
    let mut answer = vec![0; usize::from(socket.read_u16().await?)];
    socket.read_exact(&mut answer).await?;
    if message_id(&answer) != message_id(question) {
        return Err(io::Error::new(io::ErrorKind::InvalidData, "the answer is to another question"));
    }
    Ok(answer)
}

/// Read anew each time: the host's resolver changes under a process that runs for months.
async fn servers() -> Vec<IpAddr> {
    match tokio::fs::read_to_string(RESOLV_CONF).await {
        Ok(text) => parse_servers(&text),
        Err(error) => {
            tracing::debug!(%error, "{RESOLV_CONF} cannot be read");
            Vec::new()
        }
    }
}

fn parse_servers(text: &str) -> Vec<IpAddr> {
    let lines = text.lines().filter_map(|line| line.trim().strip_prefix("nameserver"));
    lines.filter_map(|rest| rest.split_whitespace().next()?.parse().ok()).take(SERVERS_MAX).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn servers_are_read_from_the_hosts_file() {
        let text = "# x\nnameserver 10.0.0.2\n nameserver ::1 \noptions edns0\nnameserver bad\nnameserver";
        let wanted: Vec<IpAddr> = vec!["10.0.0.2".parse().unwrap(), "::1".parse().unwrap()];
        assert_eq!(parse_servers(text), wanted);
    }
}
