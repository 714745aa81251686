//! Measures the carrier: bytes through `agent.sock`, a keeper process, pipes, and a guest's end that
//! copies to a TCP server, beside the same bytes over plain loopback TCP.
//!
//! `cargo run --release -p dormouse-keeper --example throughput [KEEPER-BINARY [MIB]]`

#![allow(clippy::unwrap_used, reason = "a measurement that fails may panic")]

use std::net::Ipv4Addr;
use std::os::fd::AsFd;
use std::process::{Command, Stdio};
use std::time::Instant;

use dormouse_types::{Generation, SandboxId};
use dormouse_wire::carrier::{Guest, read_line, relay, write_line};
use dormouse_wire::keeper::{Request, Session};
use dormouse_wire::keeper_client::{KeeperClient, connect_agent};
use dormouse_wire::stream::Reply;
use rustix::pipe::{PipeFlags, pipe_with};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};

/// Counts what comes, then says so; or sends what was asked for (`u64` first, 0: count).
async fn serve(mut socket: TcpStream) -> std::io::Result<()> {
    let wanted = socket.read_u64().await?;
    let mut buffer = vec![0; 256 << 10];
    if wanted > 0 {
        let mut left = usize::try_from(wanted).unwrap();
        while left > 0 {
            let n = left.min(buffer.len());
            socket.write_all(&buffer[..n]).await?;
            left -= n;
        }
        return socket.shutdown().await;
    }
    let mut count = 0_u64;
    loop {
        match socket.read(&mut buffer).await? {
            0 => break,
            n => count += n as u64,
        }
    }
    socket.write_u64(count).await?;
    socket.shutdown().await
}

async fn upload<S: AsyncRead + AsyncWrite + Unpin>(mut socket: S, bytes: u64) {
    let chunk = vec![0x5A; 256 << 10];
    socket.write_u64(0).await.unwrap();
    for _ in 0..bytes / chunk.len() as u64 {
        socket.write_all(&chunk).await.unwrap();
    }
    socket.shutdown().await.unwrap();
    assert_eq!(socket.read_u64().await.unwrap(), bytes);
}

async fn download<S: AsyncRead + AsyncWrite + Unpin>(mut socket: S, bytes: u64) {
    socket.write_u64(bytes).await.unwrap();
    let mut buffer = vec![0; 256 << 10];
    let mut count = 0;
    loop {
        match socket.read(&mut buffer).await.unwrap() {
            0 => break,
            n => count += n as u64,
        }
    }
    assert_eq!(count, bytes);
}

fn report(what: &str, bytes: u64, since: Instant) {
    let seconds = since.elapsed().as_secs_f64();
    println!("{what}: {:.0} MiB/s", bytes as f64 / seconds / f64::from(1 << 20));
}

/// User and system time of a process, in ticks of 10 ms.
fn cpu_ticks(pid: u32) -> u64 {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap();
    let fields: Vec<_> = stat.rsplit_once(')').unwrap().1.split_whitespace().collect();
    fields[11].parse::<u64>().unwrap() + fields[12].parse::<u64>().unwrap()
}

fn guest_thread(stdin: std::os::fd::OwnedFd, stdout: std::os::fd::OwnedFd, port: u16) {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(async {
        let guest = Guest::new();
        let accepting = guest.clone();
        tokio::spawn(async move {
            loop {
                let mut stream = accepting.accept().await;
                tokio::spawn(async move {
                    read_line(&mut stream).await.unwrap();
                    let mut socket = TcpStream::connect((Ipv4Addr::LOCALHOST, port)).await.unwrap();
                    write_line(&mut stream, &Reply::Ok).await.unwrap();
                    relay(&stream, &mut socket, |_, _| {}, |_| false).await
                });
            }
        });
        guest.run(stdin, stdout).await.unwrap();
    });
}

fn main() {
    let mut args = std::env::args().skip(1);
    let keeper = args.next().unwrap_or_else(|| "target/release/dormouse-keeper".to_owned());
    let bytes = args.next().map_or(1024, |mib| mib.parse::<u64>().unwrap()) << 20;
    let dir = tempfile::tempdir().unwrap();
    let mut keeper = Command::new(keeper)
        .args([dir.path().as_os_str(), SandboxId::generate().as_str().as_ref()])
        .stdin(Stdio::null())
        .spawn()
        .unwrap();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(async {
        let server = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.unwrap();
        let port = server.local_addr().unwrap().port();
        let server = server.into_std().unwrap();
        std::thread::spawn(move || {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
            runtime.block_on(async {
                let server = TcpListener::from_std(server).unwrap();
                while let Ok((socket, _)) = server.accept().await {
                    tokio::spawn(serve(socket));
                }
            });
        });
        let mut client = loop {
            if let Ok(client) = KeeperClient::connect(dir.path()).await {
                break client;
            }
            tokio::task::yield_now().await;
        };
        let (stdin, to_sandbox) = pipe_with(PipeFlags::CLOEXEC).unwrap();
        let (from_sandbox, stdout) = pipe_with(PipeFlags::CLOEXEC).unwrap();
        let fds = [to_sandbox.as_fd(), from_sandbox.as_fd(), stdin.as_fd(), stdout.as_fd()];
        let attach = Request::Attach { generation: Generation(1), session: Session::New };
        client.request(&attach, &fds).await.unwrap();
        std::thread::spawn(move || guest_thread(stdin, stdout, port));

        let start = Instant::now();
        upload(TcpStream::connect((Ipv4Addr::LOCALHOST, port)).await.unwrap(), bytes).await;
        report("plain loopback TCP, up", bytes, start);
        let start = Instant::now();
        download(TcpStream::connect((Ipv4Addr::LOCALHOST, port)).await.unwrap(), bytes).await;
        report("plain loopback TCP, down", bytes, start);
        let idle = std::fs::read_to_string(format!("/proc/{}/smaps_rollup", keeper.id())).unwrap();
        let before = cpu_ticks(keeper.id());
        let start = Instant::now();
        upload(connect_agent(dir.path(), port).await.unwrap(), bytes).await;
        report("agent.sock, keeper, pipes, TCP, up", bytes, start);
        let start = Instant::now();
        download(connect_agent(dir.path(), port).await.unwrap(), bytes).await;
        report("agent.sock, keeper, pipes, TCP, down", bytes, start);
        println!("the keeper's CPU for both: {} ms", (cpu_ticks(keeper.id()) - before) * 10);
        let used = std::fs::read_to_string(format!("/proc/{}/smaps_rollup", keeper.id())).unwrap();
        for (when, text) in [("idle", idle), ("after the transfers", used)] {
            let lines = text.lines().filter(|l| l.starts_with("Pss:") || l.starts_with("Private_Dirty:"));
            println!("keeper {when}: {}", lines.collect::<Vec<_>>().join(", "));
        }
        let mut rounds = 0;
        let start = Instant::now();
        while rounds < 500 {
            download(connect_agent(dir.path(), port).await.unwrap(), 1).await;
            rounds += 1;
        }
        println!("open, one byte, close: {:.0} µs", start.elapsed().as_secs_f64() * 1e6 / f64::from(rounds));
        client.request(&Request::Shutdown, &[]).await.unwrap();
    });
    keeper.wait().unwrap();
}
