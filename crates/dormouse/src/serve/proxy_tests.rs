//! The data plane between a real TCP client and services behind real Unix sockets.

use std::convert::Infallible;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use axum::body::Bytes;
use http_body_util::{BodyExt, Empty, Full, StreamBody};
use hyper::body::Frame;
use hyper::server::conn::http1 as server;
use hyper::service::service_fn;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::mpsc;

use super::*;

const ID: &str = "s0123456789";
const OPEN: u16 = 8000;
const CLOSED: u16 = 8001;

type Service = Box<dyn Fn(usize, UnixStream) + Send + Sync>;

/// A sandbox whose port 8000 is `service`, called with the number of the stream.
struct Sandbox {
    service: Service,
    streams: AtomicUsize,
    running: AtomicBool,
    ingress: Mutex<Ingress>,
}

impl Inside for Arc<Sandbox> {
    async fn stream(&self, id: &SandboxId, port: u16) -> Result<UnixStream, StreamError> {
        if id.as_str() != ID {
            return Err(StreamError::NotFound(id.to_string()));
        }
        if port != OPEN {
            return Err(StreamError::PortClosed(port));
        }
        let (ours, theirs) = UnixStream::pair().expect("a pair of sockets");
        (self.service)(self.streams.fetch_add(1, Ordering::SeqCst), theirs);
        Ok(ours)
    }

    async fn runs(&self, id: &SandboxId) -> bool {
        id.as_str() == ID && self.running.load(Ordering::SeqCst)
    }

    async fn ingress(&self, _: &SandboxId) -> Ingress {
        self.ingress.lock().expect("no panic").clone()
    }

    async fn keepable(&self, id: &SandboxId) -> Option<Generation> {
        self.runs(id).await.then_some(Generation(1))
    }
}

struct Setup {
    sandbox: Arc<Sandbox>,
    address: std::net::SocketAddr,
}

/// A listener whose every request goes to the sandbox and port named in its headers.
async fn setup(service: impl Fn(usize, UnixStream) + Send + Sync + 'static) -> Setup {
    let sandbox = Arc::new(Sandbox {
        service: Box::new(service),
        streams: AtomicUsize::new(0),
        running: AtomicBool::new(true),
        ingress: Mutex::default(),
    });
    let gate = Arc::new(Gate {
        inside: Arc::clone(&sandbox),
        pool: Arc::default(),
        going: CancellationToken::new(),
    });
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a listener");
    let address = listener.local_addr().expect("an address");
    tokio::spawn(async move {
        while let Ok((stream, _)) = listener.accept().await {
            let gate = Arc::clone(&gate);
            let service = service_fn(move |request: Request<Incoming>| {
                let gate = Arc::clone(&gate);
                async move {
                    let header = |name: &str| request.headers()[name].to_str().expect("text").to_owned();
                    let id = header("e2b-sandbox-id").parse().expect("an id");
                    let port = header("e2b-sandbox-port").parse().expect("a port");
                    Ok::<_, Infallible>(handle(&gate, &id, port, request).await)
                }
            });
            tokio::spawn(
                server::Builder::new().serve_connection(TokioIo::new(stream), service).with_upgrades(),
            );
        }
    });
    Setup { sandbox, address }
}

/// A service that speaks HTTP.
fn http<F, A>(answer: F) -> impl Fn(usize, UnixStream) + Send + Sync + 'static
where
    F: Fn(Request<Incoming>) -> A + Clone + Send + Sync + 'static,
    A: Future<Output = Response<Body>> + Send + 'static,
{
    move |_, stream| {
        let answer = answer.clone();
        let service = service_fn(move |request| {
            let answering = answer(request);
            async move { Ok::<_, Infallible>(answering.await) }
        });
        tokio::spawn(server::Builder::new().serve_connection(TokioIo::new(stream), service));
    }
}

fn head(method: &str, id: &str, port: u16, more: &str) -> String {
    format!(
        "{method} /a%20b?c=d HTTP/1.1\r\nHost: x.test\r\nE2b-Sandbox-Id: {id}\r\nE2b-Sandbox-Port: {port}\r\n{more}\r\n"
    )
}

async fn client<B>(setup: &Setup) -> http1::SendRequest<B>
where
    B: hyper::body::Body<Data = Bytes, Error = Infallible> + Send + 'static,
{
    let stream = TcpStream::connect(setup.address).await.expect("a connection");
    let (sender, connection) = http1::handshake(TokioIo::new(stream)).await.expect("a handshake");
    tokio::spawn(connection);
    sender
}

fn request<B>(method: Method, id: &str, port: u16, body: B) -> Request<B> {
    Request::builder()
        .method(method)
        .uri("/a%20b?c=d")
        .header("host", "x.test")
        .header("e2b-sandbox-id", id)
        .header("e2b-sandbox-port", port.to_string())
        .header("x-api-key", "e2b_secret")
        .header("connection", "x-private")
        .header("x-private", "1")
        .header("x-kept", "2")
        .body(body)
        .expect("a request")
}

async fn text(answer: Response<Incoming>) -> String {
    let body = answer.into_body().collect().await.expect("a whole body").to_bytes();
    String::from_utf8(body.to_vec()).expect("text")
}

#[tokio::test]
async fn a_request_arrives_as_it_was_sent_but_for_what_is_the_connections() {
    let setup = setup(http(|request| async move {
        let mut seen = format!("{} {}", request.method(), request.uri());
        for (name, value) in request.headers() {
            seen.push_str(&format!("\n{name}: {}", value.to_str().expect("text")));
        }
        Response::builder()
            .header("keep-alive", "timeout=5")
            .header("x-own", "3")
            .body(Body::from(seen))
            .expect("")
    }))
    .await;
    let answer = client(&setup)
        .await
        .send_request(request(Method::GET, ID, OPEN, Empty::<Bytes>::new()))
        .await
        .expect("an answer");
    assert_eq!(answer.headers()["x-own"], "3");
    assert!(!answer.headers().contains_key("keep-alive"));
    let seen = text(answer).await;
    assert!(seen.starts_with("GET /a%20b?c=d\n"), "{seen}");
    assert!(seen.contains("host: x.test") && seen.contains("x-kept: 2"), "{seen}");
    for absent in ["x-api-key", "x-private", "connection:"] {
        assert!(!seen.contains(absent), "{seen}");
    }
}

#[tokio::test]
async fn refusals_are_in_the_words_that_clients_match() {
    let setup = setup(http(|_| async { Response::new(Body::empty()) })).await;
    for (id, port, words) in [
        ("sgone", OPEN, r#""message":"The sandbox was not found""#),
        (ID, CLOSED, r#""message":"The sandbox is running but port is not open""#),
        (ID, CONTROL_PORT, r#""message":"The sandbox is running but port is not open""#),
    ] {
        let answer = client(&setup)
            .await
            .send_request(request(Method::POST, id, port, Full::new(Bytes::from_static(b"some body"))))
            .await
            .expect("an answer");
        assert_eq!(answer.status(), 502);
        let body = text(answer).await;
        assert!(body.contains(words) && body.contains(&format!(r#""sandboxId":"{id}""#)), "{body}");
        assert!(body.contains(r#""code":502"#), "{body}");
    }
    assert_eq!(setup.sandbox.streams.load(Ordering::SeqCst), 0);
}

#[tokio::test]
async fn an_answer_is_handed_on_while_it_is_made() {
    let (pieces, receiver) = mpsc::channel::<Result<Bytes, Infallible>>(1);
    let receiver = Arc::new(Mutex::new(Some(receiver)));
    let setup = setup(http(move |_| {
        let receiver = receiver.lock().expect("the lock").take().expect("one request");
        let pieces = futures_util::stream::unfold(receiver, |mut receiver| async move {
            receiver.recv().await.map(|piece| (piece, receiver))
        });
        async { Response::new(Body::from_stream(pieces)) }
    }))
    .await;
    let mut sender = client(&setup).await;
    let mut answer =
        sender.send_request(request(Method::GET, ID, OPEN, Empty::<Bytes>::new())).await.expect("an answer");
    for piece in ["one", "two"] {
        // The service goes on only after the client has the former piece.
        pieces.send(Ok(Bytes::from(piece))).await.expect("the service listens");
        let frame = answer.frame().await.expect("a frame").expect("no error");
        assert_eq!(frame.into_data().expect("data"), piece);
    }
    drop(pieces);
    assert!(answer.frame().await.is_none());
}

#[tokio::test]
async fn an_upload_is_handed_on_while_it_is_sent() {
    let setup = setup(http(|request| async move {
        let mut body = request.into_body();
        let mut bytes = 0;
        while let Some(frame) = body.frame().await {
            bytes += frame.expect("no error").into_data().map_or(0, |data| data.len());
        }
        Response::new(Body::from(bytes.to_string()))
    }))
    .await;
    let piece = Bytes::from(vec![7_u8; 64 << 10]);
    let pieces =
        futures_util::stream::iter((0..256).map(move |_| Ok::<_, Infallible>(Frame::data(piece.clone()))));
    let answer = client(&setup)
        .await
        .send_request(request(Method::POST, ID, OPEN, StreamBody::new(pieces)))
        .await
        .expect("an answer");
    assert_eq!(text(answer).await, (16 << 20).to_string());
}

/// Reads a head, then does what the test says.
async fn read_head(stream: &mut UnixStream) -> String {
    let mut head = Vec::new();
    while !head.ends_with(b"\r\n\r\n") {
        head.push(stream.read_u8().await.expect("a head"));
    }
    String::from_utf8(head).expect("text")
}

#[tokio::test]
async fn an_answer_that_breaks_off_cuts_the_connection() {
    let setup = setup(|_, mut stream: UnixStream| {
        tokio::spawn(async move {
            read_head(&mut stream).await;
            let part = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n3\r\nabc\r\n";
            stream.write_all(part).await.expect("written");
        });
    })
    .await;
    let mut stream = TcpStream::connect(setup.address).await.expect("a connection");
    stream.write_all(head("GET", ID, OPEN, "").as_bytes()).await.expect("written");
    let mut all = Vec::new();
    // A reset is as good a cut as an end.
    let _ = stream.read_to_end(&mut all).await;
    let all = String::from_utf8(all).expect("text");
    assert!(all.contains("abc"), "{all}");
    assert!(!all.ends_with("0\r\n\r\n"), "a broken answer looks whole: {all}");
}

#[tokio::test]
async fn a_client_that_goes_ends_the_stream_inside() {
    let (gone, mut is_gone) = mpsc::channel(1);
    let setup = setup(move |_, mut stream: UnixStream| {
        let gone = gone.clone();
        tokio::spawn(async move {
            read_head(&mut stream).await;
            stream.write_all(b"HTTP/1.1 200 OK\r\ncontent-length: 10\r\n\r\nabc").await.expect("written");
            let read = stream.read(&mut [0; 1]).await;
            gone.send(read.unwrap_or(0)).await.expect("the test listens");
        });
    })
    .await;
    let mut stream = TcpStream::connect(setup.address).await.expect("a connection");
    stream.write_all(head("GET", ID, OPEN, "").as_bytes()).await.expect("written");
    let mut part = [0; 16];
    assert_ne!(stream.read(&mut part).await.expect("read"), 0);
    drop(stream);
    assert_eq!(is_gone.recv().await, Some(0));
}

#[tokio::test]
async fn connections_switch_protocols() {
    let setup = setup(|_, mut stream: UnixStream| {
        tokio::spawn(async move {
            let head = read_head(&mut stream).await.to_lowercase();
            assert!(head.contains("connection: upgrade") && head.contains("upgrade: echo"), "{head}");
            let reply =
                b"HTTP/1.1 101 Switching Protocols\r\nconnection: upgrade\r\nupgrade: echo\r\n\r\nhello";
            stream.write_all(reply).await.expect("written");
            let (mut read, mut write) = stream.split();
            tokio::io::copy(&mut read, &mut write).await.expect("echoed");
        });
    })
    .await;
    let mut stream = TcpStream::connect(setup.address).await.expect("a connection");
    let head = head("GET", ID, OPEN, "Connection: keep-alive, Upgrade\r\nUpgrade: echo\r\n");
    stream.write_all(head.as_bytes()).await.expect("written");
    stream.write_all(b"ping").await.expect("written");
    stream.shutdown().await.expect("shut down");
    let mut all = String::new();
    stream.read_to_string(&mut all).await.expect("read");
    assert!(all.starts_with("HTTP/1.1 101 "), "{all}");
    assert!(all.to_lowercase().contains("upgrade: echo"), "{all}");
    assert!(all.ends_with("helloping"), "{all}");
}

#[tokio::test]
async fn an_early_refusal_announces_the_end_of_the_connection() {
    let setup = setup(|_, mut stream: UnixStream| {
        tokio::spawn(async move {
            read_head(&mut stream).await;
            stream.write_all(b"HTTP/1.1 403 Forbidden\r\ncontent-length: 0\r\n\r\n").await.expect("written");
            // Reads nothing more and stays open.
            std::future::pending::<()>().await;
        });
    })
    .await;
    let mut stream = TcpStream::connect(setup.address).await.expect("a connection");
    let head = head("POST", ID, OPEN, "Content-Length: 1000000\r\n");
    stream.write_all(head.as_bytes()).await.expect("written");
    let mut answer = Vec::new();
    while !answer.ends_with(b"\r\n\r\n") {
        answer.push(stream.read_u8().await.expect("an answer"));
    }
    let answer = String::from_utf8(answer).expect("text").to_lowercase();
    assert!(answer.starts_with("http/1.1 403") && answer.contains("connection: close"), "{answer}");
}

#[tokio::test]
async fn connections_inside_are_used_again_while_the_sandbox_runs() {
    let setup = setup(http(|_| async { Response::new(Body::from("x")) })).await;
    let mut sender = client(&setup).await;
    let mut ask = async |expected: usize| {
        sender.ready().await.expect("the connection stays open");
        let request = request(Method::GET, ID, OPEN, Empty::<Bytes>::new());
        let answer = sender.send_request(request).await.expect("an answer");
        assert_eq!(text(answer).await, "x");
        assert_eq!(setup.sandbox.streams.load(Ordering::SeqCst), expected);
    };
    ask(1).await;
    ask(1).await;
    setup.sandbox.running.store(false, Ordering::SeqCst);
    ask(2).await;
}

/// The first stream ends at once, the second answers.
fn fails_once() -> impl Fn(usize, UnixStream) + Send + Sync + 'static {
    let second = http(|request| async move {
        let body = request.into_body().collect().await.expect("a whole body").to_bytes();
        Response::new(Body::from(body))
    });
    move |number, stream| {
        if number == 0 {
            drop(stream);
        } else {
            second(number, stream);
        }
    }
}

#[tokio::test]
async fn a_request_that_nobody_can_have_acted_on_is_sent_again() {
    let once = setup(fails_once()).await;
    let mut sender = client(&once).await;
    let answer = sender.send_request(request(Method::GET, ID, OPEN, Empty::<Bytes>::new())).await;
    assert_eq!(answer.expect("an answer").status(), 200);

    let always = setup(|_, stream: UnixStream| drop(stream)).await;
    let mut sender = client(&always).await;
    let answer = sender.send_request(request(Method::GET, ID, OPEN, Empty::<Bytes>::new())).await;
    assert_eq!(answer.expect("an answer").status(), 502);
    assert_eq!(always.sandbox.streams.load(Ordering::SeqCst), ATTEMPTS_MAX);
}

#[tokio::test]
async fn a_request_that_was_read_is_not_sent_again() {
    let setup = setup(|_, mut stream: UnixStream| {
        tokio::spawn(async move {
            read_head(&mut stream).await;
        });
    })
    .await;
    let mut sender = client(&setup).await;
    let answer = sender.send_request(request(Method::POST, ID, OPEN, Empty::<Bytes>::new())).await;
    let answer = answer.expect("an answer");
    assert_eq!(answer.status(), 502);
    assert!(text(answer).await.contains("without an answer"));
    assert_eq!(setup.sandbox.streams.load(Ordering::SeqCst), 1);
}

#[tokio::test]
async fn ports_that_are_not_public_want_their_token() {
    let setup = setup(http(|request: Request<Incoming>| async move {
        let hidden = !request.headers().contains_key(TRAFFIC_TOKEN_HEADER);
        Response::new(Body::from(format!("token hidden: {hidden}")))
    }))
    .await;
    *setup.sandbox.ingress.lock().expect("no panic") = Ingress { token: Some("t0k3n".into()), host: None };
    let mut client = client(&setup).await;
    for (given, status) in [(None, 403), (Some("t0k3"), 403), (Some(""), 403), (Some("t0k3n"), 200)] {
        let mut request = request(Method::GET, ID, OPEN, Empty::<Bytes>::new());
        if let Some(given) = given {
            request.headers_mut().insert(TRAFFIC_TOKEN_HEADER, HeaderValue::from_static(given));
        }
        let answer = client.send_request(request).await.expect("an answer");
        assert_eq!(answer.status(), status, "{given:?}");
        let body = text(answer).await;
        assert!(body.contains(if status == 200 { "token hidden: true" } else { "not public" }), "{body}");
    }
    // The agent has a token of its own; here it is only not there.
    let request = request(Method::GET, ID, ENVD_PORT, Empty::<Bytes>::new());
    assert_eq!(client.send_request(request).await.expect("an answer").status(), 502);
}

#[tokio::test]
async fn services_are_told_the_masked_host() {
    let setup = setup(http(|request: Request<Incoming>| async move {
        Response::new(Body::from(format!("{:?}", request.headers().get_all(HOST).iter().collect::<Vec<_>>())))
    }))
    .await;
    *setup.sandbox.ingress.lock().expect("no panic") =
        Ingress { token: None, host: Some("${PORT}-mine.example.com".into()) };
    let mut client = client(&setup).await;
    let answer = client.send_request(request(Method::GET, ID, OPEN, Empty::<Bytes>::new())).await;
    assert_eq!(text(answer.expect("an answer")).await, "[\"8000-mine.example.com\"]");
}

#[test]
fn masks_are_hosts() {
    for good in ["example.com", "${PORT}-a.example.com", "example.com:${PORT}", "localhost", "[::1]:${PORT}"]
    {
        assert!(masked_host(good, 8000).is_some(), "{good}");
    }
    let long = format!("{}.com", "a".repeat(250));
    for bad in ["", "a b", "a/b", "a@b", "a\r\nx: y", "http://a", long.as_str()] {
        assert!(masked_host(bad, 8000).is_none(), "{bad:?}");
    }
}
