//! The HTTP proxy: `CONNECT`, and absolute-form requests for `http://`.
//!
//! An absolute-form request is sent on in origin form with `Connection: close`: one connection, one
//! origin, so nothing behind the first request's head needs to be understood.

use std::io;

use dormouse_wire::carrier::{Guest, Stream};
use dormouse_wire::stream::{Open, Refusal};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

use super::{Refused, dial};
use crate::carrier::join;
use crate::context::Ctx;

/// A request's line and headers.
const HEAD_BYTES_MAX: usize = 64 << 10;
const HTTP_PORT: u16 = 80;

pub async fn serve(mut socket: TcpStream, ctx: &Ctx, guest: &Guest) -> io::Result<()> {
    let Some((head, rest)) = read_head(&mut socket).await? else {
        let message = format!("the request's head is longer than {HEAD_BYTES_MAX} bytes or not complete");
        return refuse(&mut socket, "431 Request Header Fields Too Large", &message).await;
    };
    let request = match Request::parse(&head) {
        Ok(request) => request,
        Err(why) => return refuse(&mut socket, "400 Bad Request", why).await,
    };
    let _counted = ctx.begin_outbound();
    let target = Open::Tcp { host: request.host, port: request.port };
    let mut stream: Stream = match dial(guest, &target).await {
        Ok(stream) => stream,
        Err(refused) => return refuse_dial(&mut socket, &target, &refused).await,
    };
    match request.forward {
        None => socket.write_all(b"HTTP/1.1 200 Connection established\r\n\r\n").await?,
        Some(head) => stream.write_all(head.as_bytes()).await?,
    }
    stream.write_all(&rest).await?;
    join(&stream, &mut socket).await
}

/// The head without its empty line, and what came behind it.
async fn read_head(socket: &mut TcpStream) -> io::Result<Option<(String, Vec<u8>)>> {
    const END: &[u8] = b"\r\n\r\n";
    let mut bytes = Vec::with_capacity(1024);
    loop {
        let from = bytes.len().saturating_sub(END.len() - 1);
        if socket.read_buf(&mut bytes).await? == 0 {
            return Ok(None);
        }
        if let Some(at) = bytes[from..].windows(END.len()).position(|window| window == END) {
            let rest = bytes.split_off(from + at + END.len());
            bytes.truncate(from + at);
            return Ok(String::from_utf8(bytes).ok().map(|head| (head, rest)));
        }
        if bytes.len() > HEAD_BYTES_MAX {
            return Ok(None);
        }
    }
}

#[derive(Debug, PartialEq, Eq)]
struct Request {
    host: String,
    port: u16,
    /// The head to send on; `None`: a tunnel.
    forward: Option<String>,
}

impl Request {
    fn parse(head: &str) -> Result<Self, &'static str> {
        let (line, headers) = head.split_once("\r\n").unwrap_or((head, ""));
        let mut words = line.split(' ');
        let (Some(method), Some(target), Some(version), None) =
            (words.next(), words.next(), words.next(), words.next())
        else {
            return Err("the request line is not METHOD TARGET VERSION");
        };
        if !version.starts_with("HTTP/1.") {
            return Err("only HTTP/1.x is spoken here");
        }
        if method == "CONNECT" {
            let (host, port) = split_authority(target, None)?;
            return Ok(Self { host, port, forward: None });
        }
        let Some(rest) = strip_scheme(target) else {
            return Err("this is a proxy: it takes CONNECT host:port and requests for http:// addresses");
        };
        let (authority, path) = match rest.find(['/', '?']) {
            Some(at) => rest.split_at(at),
            None => (rest, "/"),
        };
        let (host, port) = split_authority(authority, Some(HTTP_PORT))?;
        let slash = if path.starts_with('/') { "" } else { "/" };
        let mut forward = format!("{method} {slash}{path} {version}\r\n");
        let upgrades = headers.split("\r\n").any(|header| is(header, "upgrade"));
        for header in headers.split("\r\n").filter(|header| !header.is_empty()) {
            let is_connection = is(header, "connection") || is(header, "keep-alive");
            let is_proxys = is(header, "proxy-connection") || is(header, "proxy-authorization");
            if !is_proxys && (upgrades || !is_connection) {
                forward.push_str(header);
                forward.push_str("\r\n");
            }
        }
        forward.push_str(if upgrades { "\r\n" } else { "Connection: close\r\n\r\n" });
        Ok(Self { host, port, forward: Some(forward) })
    }
}

fn strip_scheme(target: &str) -> Option<&str> {
    const SCHEME: &str = "http://";
    let head = target.get(..SCHEME.len())?;
    head.eq_ignore_ascii_case(SCHEME).then(|| &target[SCHEME.len()..])
}

fn is(header: &str, name: &str) -> bool {
    header.split_once(':').is_some_and(|(given, _)| given.trim().eq_ignore_ascii_case(name))
}

fn split_authority(authority: &str, default: Option<u16>) -> Result<(String, u16), &'static str> {
    let authority = authority.rsplit_once('@').map_or(authority, |(_, host)| host);
    let (host, port) = match authority.strip_prefix('[').and_then(|rest| rest.split_once(']')) {
        Some((host, rest)) => (host, rest.strip_prefix(':')),
        None => match authority.split_once(':') {
            Some((host, port)) => (host, Some(port)),
            None => (authority, None),
        },
    };
    let port = match port.filter(|port| !port.is_empty()) {
        Some(port) => port.parse().map_err(|_| "the port is not a number up to 65535")?,
        None => default.ok_or("CONNECT needs host:port")?,
    };
    if host.is_empty() {
        return Err("the host is missing");
    }
    Ok((host.to_owned(), port))
}

async fn refuse_dial(socket: &mut TcpStream, target: &Open, refused: &Refused) -> io::Result<()> {
    let status = match refused.why {
        Refusal::Denied => "403 Forbidden",
        Refusal::Unreachable | Refusal::Closed => "502 Bad Gateway",
        Refusal::Unavailable => "503 Service Unavailable",
        Refusal::Invalid => "400 Bad Request",
    };
    let message = format!("{target}: {}", refused.message);
    refuse(socket, status, &message).await
}

async fn refuse(socket: &mut TcpStream, status: &str, message: &str) -> io::Result<()> {
    let body = format!("dormouse egress: {message}\n");
    let head = format!(
        "HTTP/1.1 {status}\r\nContent-Type: text/plain; charset=utf-8\r\nContent-Length: {}\r\n\
         Proxy-Status: dormouse; error=connection_refused\r\nConnection: close\r\n\r\n",
        body.len()
    );
    socket.write_all(head.as_bytes()).await?;
    socket.write_all(body.as_bytes()).await?;
    socket.shutdown().await
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tunnels_and_plain_requests_are_told_apart() {
        let tunnel = Request::parse("CONNECT example.org:443 HTTP/1.1\r\nHost: example.org:443").unwrap();
        assert_eq!(tunnel, Request { host: "example.org".into(), port: 443, forward: None });
        let v6 = Request::parse("CONNECT [2606:4700::1]:443 HTTP/1.1").unwrap();
        assert_eq!((v6.host.as_str(), v6.port), ("2606:4700::1", 443));
        let plain = Request::parse(
            "GET http://u:p@example.org:8080/a?b HTTP/1.1\r\nHost: example.org\r\nConnection: keep-alive\r\n\
             Proxy-Authorization: x\r\nAccept: */*",
        )
        .unwrap();
        assert_eq!((plain.host.as_str(), plain.port), ("example.org", 8080));
        let wanted = "GET /a?b HTTP/1.1\r\nHost: example.org\r\nAccept: */*\r\nConnection: close\r\n\r\n";
        assert_eq!(plain.forward.as_deref(), Some(wanted));
        let bare = Request::parse("GET HTTP://example.org?q HTTP/1.0").unwrap();
        assert_eq!(bare.forward.as_deref(), Some("GET /?q HTTP/1.0\r\nConnection: close\r\n\r\n"));
    }

    #[test]
    fn an_upgrade_keeps_its_connection_header() {
        let head = "GET http://a.b/ws HTTP/1.1\r\nConnection: Upgrade\r\nUpgrade: websocket";
        let forward = Request::parse(head).unwrap().forward.unwrap();
        assert!(forward.contains("Connection: Upgrade\r\n") && !forward.contains("close"), "{forward}");
    }

    #[test]
    fn what_is_no_proxy_request_is_refused() {
        for head in [
            "",
            "GET",
            "GET / HTTP/1.1",
            "GET https://a.b/ HTTP/1.1",
            "CONNECT a.b HTTP/1.1",
            "CONNECT :1 HTTP/1.1",
            "CONNECT a.b:99999 HTTP/1.1",
            "GET http:// HTTP/1.1",
            "PRI * HTTP/2.0",
            "GET http://a b/ HTTP/1.1",
        ] {
            assert!(Request::parse(head).is_err(), "{head:?} was taken");
        }
    }
}
