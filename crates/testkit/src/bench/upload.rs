//! A body of a gibibyte through the sandbox's API, and the same into a file by a plain HTTP server.

use std::convert::Infallible;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use bytes::Bytes;
use futures_util::stream;
use http_body_util::{BodyExt, Empty, StreamBody};
use hyper::body::{Frame, Incoming};
use hyper::service::service_fn;
use hyper::{Request, Response};
use hyper_util::rt::TokioIo;
use tokio::io::AsyncWriteExt;
use tokio::net::{TcpListener, TcpStream};

pub const BYTES: usize = 1 << 30;
const CHUNK: usize = 256 << 10;

/// Sends zeros that no layer can skip: the time until the answer.
pub async fn send(address: &str, path: &str, headers: &[(&str, String)]) -> Result<Duration> {
    let chunk = Bytes::from((0..CHUNK).map(|i| u8::try_from(i % 251).unwrap_or(0)).collect::<Vec<u8>>());
    let frames = (0..BYTES / CHUNK).map(move |_| Ok::<_, Infallible>(Frame::data(chunk.clone())));
    let stream = TcpStream::connect(address).await.with_context(|| format!("cannot connect to {address}"))?;
    let (mut sender, connection) = hyper::client::conn::http1::handshake(TokioIo::new(stream)).await?;
    tokio::spawn(connection);
    let mut request = Request::post(path).header("host", address).header("content-length", BYTES);
    for (name, value) in headers {
        request = request.header(*name, value);
    }
    let request = request.body(StreamBody::new(stream::iter(frames)))?;
    let started = Instant::now();
    let response = sender.send_request(request).await?;
    let status = response.status();
    let body = response.into_body().collect().await?.to_bytes();
    ensure!(status.is_success(), "the upload was answered {status}: {}", String::from_utf8_lossy(&body));
    Ok(started.elapsed())
}

async fn into_file(request: Request<Incoming>, path: PathBuf) -> Result<Response<Empty<Bytes>>> {
    let mut file = tokio::fs::File::create(&path).await?;
    let mut body = request.into_body();
    while let Some(frame) = body.frame().await {
        if let Ok(data) = frame?.into_data() {
            file.write_all(&data).await?;
        }
    }
    file.flush().await?;
    Ok(Response::new(Empty::new()))
}

/// A plain server that writes each body into one file.
pub async fn plain_server(path: PathBuf) -> Result<String> {
    let listener = TcpListener::bind("127.0.0.1:0").await.context("no free port")?;
    let address = listener.local_addr()?.to_string();
    tokio::spawn(async move {
        while let Ok((stream, _)) = listener.accept().await {
            let path = path.clone();
            let service = service_fn(move |request| into_file(request, path.clone()));
            let connection =
                hyper::server::conn::http1::Builder::new().serve_connection(TokioIo::new(stream), service);
            tokio::spawn(async move {
                if let Err(error) = connection.await {
                    eprintln!("the plain server: {error}");
                }
            });
        }
    });
    Ok(address)
}
