//! The proxies against a real carrier; the keeper's part is played by a few lines.

use std::io;

use dormouse_types::Generation;
use dormouse_wire::carrier::{Host, HostPipes, relay};
use dormouse_wire::keeper::Session;
use rustix::pipe::{PipeFlags, pipe_with};
use tokio::io::{AsyncReadExt, AsyncWriteExt};

use super::*;
use crate::context::Settings;
use crate::process::Processes;

/// Serves `open.test` with an echo, refuses `denied.test`, and answers DNS by sending the question back.
async fn keep(host: Host) {
    while let Some(stream) = host.accept().await {
        tokio::spawn(serve_egress(stream));
    }
}

async fn serve_egress(mut stream: Stream) -> io::Result<()> {
    let line = read_line(&mut stream).await?;
    match Open::parse(&line) {
        Ok(Open::Tcp { host, .. }) if host == "open.test" => {
            write_line(&mut stream, &Reply::Ok).await?;
            let (mut near, far) = tokio::io::duplex(1024);
            let (mut reading, mut writing) = tokio::io::split(far);
            let echo = async {
                tokio::io::copy(&mut reading, &mut writing).await?;
                writing.shutdown().await
            };
            let (joined, echoed) = tokio::join!(relay(&stream, &mut near, |_, _| {}, |_| false), echo);
            joined.and(echoed)
        }
        Ok(Open::Dns) => {
            write_line(&mut stream, &Reply::Ok).await?;
            let mut message = vec![0; usize::from(stream.read_u16().await?)];
            stream.read_exact(&mut message).await?;
            stream.write_u16(u16::try_from(message.len()).unwrap()).await?;
            stream.write_all(&message).await?;
            stream.shutdown().await
        }
        _ => {
            let refused = Reply::Refused { why: Refusal::Denied, message: "it is private".into() };
            write_line(&mut stream, &refused).await?;
            stream.shutdown().await
        }
    }
}

/// A guest whose session is up.
async fn carried() -> Guest {
    let (stdin, to_sandbox) = pipe_with(PipeFlags::CLOEXEC).unwrap();
    let (from_sandbox, stdout) = pipe_with(PipeFlags::CLOEXEC).unwrap();
    let (sandbox_stdin, sandbox_stdout) = (stdin.try_clone().unwrap(), stdout.try_clone().unwrap());
    let (host, guest) = (Host::new(), Guest::new());
    let pipes = HostPipes { to_sandbox, from_sandbox, sandbox_stdin, sandbox_stdout };
    host.attach(pipes, Session::New, Generation(1)).unwrap();
    let (moving, running) = (host.clone(), guest.clone());
    tokio::spawn(async move { moving.run().await });
    tokio::spawn(async move { running.run(stdin, stdout).await.unwrap() });
    let (opened, accepted) = tokio::join!(host.open(), guest.accept());
    drop((opened.unwrap(), accepted));
    tokio::spawn(keep(host));
    guest
}

async fn proxy() -> (SocketAddr, Ctx) {
    let ctx = Ctx::new(Settings::default(), Processes::default());
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.unwrap();
    let address = listener.local_addr().unwrap();
    tokio::spawn(serve_proxy(listener, ctx.clone(), carried().await));
    (address, ctx)
}

/// Sends all, closes that direction, and returns what came until the end.
async fn exchange(address: SocketAddr, sent: &[u8]) -> Vec<u8> {
    let mut socket = TcpStream::connect(address).await.unwrap();
    socket.write_all(sent).await.unwrap();
    socket.shutdown().await.unwrap();
    let mut received = Vec::new();
    socket.read_to_end(&mut received).await.unwrap();
    received
}

#[tokio::test]
async fn the_http_proxy_tunnels_forwards_and_says_why_not() {
    let (proxy, _) = proxy().await;
    let tunnel = exchange(proxy, b"CONNECT open.test:443 HTTP/1.1\r\n\r\nthrough").await;
    assert_eq!(tunnel, b"HTTP/1.1 200 Connection established\r\n\r\nthrough");
    let plain = exchange(proxy, b"POST http://open.test/a HTTP/1.1\r\nHost: open.test\r\n\r\nbody").await;
    let wanted = b"POST /a HTTP/1.1\r\nHost: open.test\r\nConnection: close\r\n\r\nbody";
    assert_eq!(String::from_utf8_lossy(&plain), String::from_utf8_lossy(wanted));
    let denied = exchange(proxy, b"CONNECT denied.test:443 HTTP/1.1\r\n\r\n").await;
    let denied = String::from_utf8(denied).unwrap();
    assert!(denied.starts_with("HTTP/1.1 403 ") && denied.contains("it is private"), "{denied}");
    let confused = String::from_utf8(exchange(proxy, b"GET / HTTP/1.1\r\n\r\n").await).unwrap();
    assert!(confused.starts_with("HTTP/1.1 400 "), "{confused}");
}

#[tokio::test]
async fn socks_connects_refuses_and_is_counted() {
    let (proxy, ctx) = proxy().await;
    let request = |name: &str| {
        let mut bytes = vec![5, 1, 0, 5, 1, 0, 3, u8::try_from(name.len()).unwrap()];
        bytes.extend_from_slice(name.as_bytes());
        bytes.extend_from_slice(&443_u16.to_be_bytes());
        bytes
    };
    let mut socket = TcpStream::connect(proxy).await.unwrap();
    socket.write_all(&request("open.test")).await.unwrap();
    let mut head = [0; 12];
    socket.read_exact(&mut head).await.unwrap();
    assert_eq!(head[..4], [5, 0, 5, 0]);
    assert_eq!(ctx.outbound(), 1);
    socket.write_all(b"x").await.unwrap();
    assert_eq!(socket.read_u8().await.unwrap(), b'x');
    drop(socket);

    let denied = exchange(proxy, &request("denied.test")).await;
    assert_eq!(denied[..4], [5, 0, 5, 2]);
    let unknown = exchange(proxy, &[5, 1, 2]).await;
    assert_eq!(unknown, [5, 0xFF]);
    while ctx.outbound() > 0 {
        tokio::task::yield_now().await;
    }
}

#[tokio::test]
async fn dns_questions_are_carried() {
    let guest = carried().await;
    let server = UdpSocket::bind((Ipv4Addr::LOCALHOST, 0)).await.unwrap();
    let address = server.local_addr().unwrap();
    tokio::spawn(dns::serve_udp(server, guest));
    let client = UdpSocket::bind((Ipv4Addr::LOCALHOST, 0)).await.unwrap();
    let question = b"\x12\x34\x01\0\0\x01\0\0\0\0\0\0\x01a\x01b\0\0\x01\0\x01";
    client.send_to(question, address).await.unwrap();
    let mut answer = [0; 512];
    let len = client.recv(&mut answer).await.unwrap();
    assert_eq!(&answer[..len], question);
    // Nonsense gets an answer too, at once.
    client.send_to(b"\x12\x35\x01\0\0\x02\0\0\0\0\0\0", address).await.unwrap();
    let len = client.recv(&mut answer).await.unwrap();
    assert_eq!((len, answer[3] & 0x0F), (12, 1));
}
