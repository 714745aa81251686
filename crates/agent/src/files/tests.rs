//! `/files` over HTTP, as clients call it.

use std::fs::File;
use std::io::{Read as _, Write as _};
use std::os::fd::AsFd as _;
use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _, symlink};
use std::path::{Path, PathBuf};

use axum::body::Body;
use dormouse_wire::envd::filesystem::STAT;
use http::Method;
use serde_json::json;
use tokio::io::AsyncWriteExt as _;

use super::signature::{Operation, Signed, sign};
use crate::context::Settings;
use crate::filesystem::harness::{Answer, Served};
use crate::filesystem::transfer::UNFINISHED_PREFIX;

const LARGE: usize = (5 << 20) + 7;

/// Bytes that show where they come from.
fn pattern(length: usize) -> Vec<u8> {
    // Longer than any buffer, and of a length that divides none.
    let cycle: Vec<u8> =
        (0..1_000_003_usize).map(|at| u8::try_from((at ^ (at >> 8)) % 251).unwrap()).collect();
    cycle.iter().copied().cycle().take(length).collect()
}

fn gzip(content: &[u8]) -> Vec<u8> {
    let mut encoder = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
    encoder.write_all(content).unwrap();
    encoder.finish().unwrap()
}

fn gunzip(packed: &[u8]) -> Vec<u8> {
    let mut content = Vec::new();
    flate2::read::MultiGzDecoder::new(packed).read_to_end(&mut content).unwrap();
    content
}

fn names(dir: &Path) -> Vec<String> {
    let mut names: Vec<_> = std::fs::read_dir(dir)
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect();
    names.sort();
    names
}

/// A form of files, with a field that is none.
fn form(files: &[(&str, &[u8])]) -> Vec<u8> {
    let mut body = b"--B\r\nContent-Disposition: form-data; name=\"other\"\r\n\r\nignored\r\n".to_vec();
    for (name, content) in files {
        let head =
            format!("--B\r\nContent-Disposition: form-data; name=\"file\"; filename=\"{name}\"\r\n\r\n");
        body.extend_from_slice(&[head.as_bytes(), content, b"\r\n"].concat());
    }
    body.extend_from_slice(b"--B--\r\n");
    body
}

type Header = (&'static str, &'static str);

const FORM: Header = ("content-type", "multipart/form-data; boundary=B");
const OCTETS: Header = ("content-type", "application/octet-stream");

async fn post(served: &Served, uri: &str, headers: &[(&str, &str)], body: impl Into<Body>) -> Answer {
    served.send(Method::POST, uri, headers, body).await
}

/// A body of unknown length, in portions of `size`.
fn portions(content: &[u8], size: usize) -> Body {
    let portions: Vec<_> =
        content.chunks(size).map(|portion| Ok::<_, std::io::Error>(portion.to_vec())).collect();
    Body::from_stream(futures_util::stream::iter(portions))
}

#[tokio::test]
async fn files_arrive_whole_and_belong_to_the_user() {
    let served = Served::start().await;
    for (name, content) in [("a/b/small", pattern(10)), ("a/large", pattern(LARGE)), ("a/empty", Vec::new())]
    {
        let answer = post(&served, &served.files(name, "&username=nobody"), &[OCTETS], content.clone()).await;
        assert_eq!(answer.status, 200, "{:?}", answer.body);
        let last = name.rsplit('/').next().unwrap();
        assert_eq!(answer.json(), json!([{"name": last, "path": served.at(name), "type": "file"}]));
        let meta = served.at(name).metadata().unwrap();
        assert_eq!((meta.uid(), meta.gid(), meta.mode() & 0o7777), (65534, 65534, 0o644), "{name}");
        assert_eq!(std::fs::read(served.at(name)).unwrap(), content, "{name}");
        assert_eq!(served.get(name, &[]).await.body, content, "{name}");
    }
    assert_eq!(served.at("a/b").metadata().unwrap().uid(), 65534);
    assert_eq!(names(&served.at("a")), ["b", "empty", "large"]);
}

#[tokio::test]
async fn forms_carry_many_files_of_any_size() {
    let served = Served::start().await;
    let files = [("x \u{fc}.txt", pattern(3)), ("large", pattern(LARGE)), ("d/empty", Vec::new())];
    let paths: Vec<String> =
        files.iter().map(|(name, _)| served.at(name).to_str().unwrap().to_owned()).collect();
    let parts: Vec<(&str, &[u8])> =
        paths.iter().zip(&files).map(|(path, (_, content))| (path.as_str(), content.as_slice())).collect();
    let body = form(&parts);
    for size in [body.len(), 1000, 70_001] {
        let answer = post(&served, "/files", &[FORM], portions(&body, size)).await;
        assert_eq!(answer.status, 200, "{:?}", answer.body);
        assert_eq!(answer.json().as_array().unwrap().len(), 3);
        assert_eq!(answer.json()[1]["path"], json!(served.at("large")));
        for (name, content) in &files {
            assert_eq!(&std::fs::read(served.at(name)).unwrap(), content, "{name}");
            std::fs::remove_file(served.at(name)).unwrap();
        }
    }
    // The query's path beats the part's.
    let answer = post(&served, &served.files("q", ""), &[FORM], form(&[("elsewhere", b"1")])).await;
    assert_eq!(answer.json()[0]["path"], json!(served.at("q")));
}

#[tokio::test]
async fn packed_uploads_are_unpacked() {
    let served = Served::start().await;
    let content = pattern(LARGE);
    let encoding = ("content-encoding", "gzip");
    let answer = post(&served, &served.files("f", ""), &[OCTETS, encoding], gzip(&content)).await;
    assert_eq!(answer.status, 200, "{:?}", answer.body);
    assert_eq!(std::fs::read(served.at("f")).unwrap(), content);
    let body = form(&[(served.at("g").to_str().unwrap(), b"hello")]);
    assert_eq!(post(&served, "/files", &[FORM, encoding], gzip(&body)).await.status, 200);
    assert_eq!(std::fs::read(served.at("g")).unwrap(), b"hello");

    let packed = gzip(&content);
    let mut damaged = packed.clone();
    *damaged.last_mut().unwrap() ^= 1;
    for broken in [&packed[..packed.len() - 9], &damaged, b"no gzip", b""] {
        let answer = post(&served, &served.files("h", ""), &[OCTETS, encoding], broken.to_vec()).await;
        assert_eq!(answer.refusal().0, 400, "{} bytes", broken.len());
        assert!(!served.at("h").exists());
    }
    let answer = post(&served, &served.files("h", ""), &[OCTETS, ("content-encoding", "br")], "x").await;
    assert_eq!(answer.refusal().0, 400);
}

#[tokio::test]
async fn what_cannot_be_written_is_refused() {
    let served = Served::start().await;
    std::fs::create_dir(served.at("dir")).unwrap();
    std::fs::write(served.at("f"), "old").unwrap();
    rustix::fs::mknodat(rustix::fs::CWD, served.at("pipe"), rustix::fs::FileType::Fifo, 0o600.into(), 0)
        .unwrap();
    let same = [
        served.at("same").to_str().unwrap().to_owned(),
        served.at("dir/../same").to_str().unwrap().to_owned(),
    ];
    let twice = [(same[0].as_str(), &b"1"[..]), (same[1].as_str(), b"2")];
    let requests: Vec<(String, Header, Vec<u8>, u16)> = vec![
        (served.files("dir", ""), OCTETS, b"x".to_vec(), 400),
        (served.files("f/below", ""), OCTETS, b"x".to_vec(), 400),
        (served.files("pipe", ""), OCTETS, b"x".to_vec(), 400),
        ("/files".into(), OCTETS, b"x".to_vec(), 400),
        (served.files("n", "&username=no-such"), OCTETS, b"x".to_vec(), 401),
        (served.files("n", ""), ("content-type", "text/plain"), b"x".to_vec(), 400),
        (served.files("n", ""), ("content-type", "multipart/form-data"), b"x".to_vec(), 400),
        (served.files("n", ""), FORM, form(&[]), 400),
        ("/files".into(), FORM, form(&[("", b"x")]), 400),
        ("/files?path=~daemon/x".into(), OCTETS, b"x".to_vec(), 400),
        ("/files?path=%00".into(), OCTETS, b"x".to_vec(), 400),
        (served.files("n", "&signature_expiration=soon"), OCTETS, b"x".to_vec(), 400),
        ("/files".into(), FORM, form(&twice), 400),
    ];
    for (uri, content_type, body, status) in requests {
        let answer = post(&served, &uri, &[content_type], body).await;
        assert_eq!(answer.refusal().0, status, "{uri} {content_type:?}: {:?}", answer.body);
    }
    // Of the two for one path, the first was written before the second was seen.
    assert_eq!(std::fs::read(served.at("same")).unwrap(), b"1");
    assert_eq!(names(served.dir()), ["dir", "f", "pipe", "same"]);
    assert_eq!(std::fs::read(served.at("f")).unwrap(), b"old");
}

#[tokio::test]
async fn an_existing_file_stays_the_same_file() {
    let served = Served::start().await;
    for content in [pattern(5), pattern(LARGE), Vec::new()] {
        std::fs::write(served.at("f"), pattern(1 << 20)).unwrap();
        std::fs::set_permissions(served.at("f"), std::fs::Permissions::from_mode(0o755)).unwrap();
        let _ = std::fs::remove_file(served.at("other-name"));
        std::fs::hard_link(served.at("f"), served.at("other-name")).unwrap();
        let before = served.at("f").metadata().unwrap();
        assert_eq!(served.put("f", content.clone()).await.status, 200);
        let after = served.at("f").metadata().unwrap();
        assert_eq!((after.ino(), after.mode()), (before.ino(), before.mode()));
        assert_eq!(std::fs::read(served.at("other-name")).unwrap(), content);
        assert_eq!(names(served.dir()), ["f", "other-name"]);
    }
}

#[tokio::test]
async fn very_large_content_takes_an_existing_files_place() {
    let served = Served::start().await;
    let content = pattern(usize::try_from(super::target::REPLACE_BYTES_MIN).unwrap());
    for (links, same) in [(1, false), (2, true)] {
        std::fs::write(served.at("f"), "old").unwrap();
        std::fs::set_permissions(served.at("f"), std::fs::Permissions::from_mode(0o755)).unwrap();
        if links == 2 {
            std::fs::hard_link(served.at("f"), served.at("other-name")).unwrap();
        }
        let before = File::open(served.at("f")).unwrap();
        assert_eq!(served.put("f", content.clone()).await.status, 200);
        let after = served.at("f").metadata().unwrap();
        assert_eq!(after.ino() == before.metadata().unwrap().ino(), same);
        assert_eq!(after.mode() & 0o777, 0o755);
        assert!(std::fs::read(served.at("f")).unwrap() == content);
    }
    assert_eq!(names(served.dir()), ["f", "other-name"]);
}

#[tokio::test]
async fn links_are_written_through() {
    let served = Served::start().await;
    std::fs::create_dir(served.at("d")).unwrap();
    symlink("d/target", served.at("link")).unwrap();
    for content in [pattern(5), pattern(LARGE)] {
        let _ = std::fs::remove_file(served.at("d/target"));
        for _ in 0..2 {
            assert_eq!(served.put("link", content.clone()).await.status, 200);
            assert!(served.at("link").is_symlink());
            assert_eq!(std::fs::read(served.at("d/target")).unwrap(), content);
        }
    }
    symlink("loop", served.at("loop")).unwrap();
    assert!(served.put("loop", "x").await.status.is_server_error());
    assert_eq!(names(&served.at("d")), ["target"]);
}

/// Sends the beginning of an upload, and waits until its unfinished file is there (or goes on at once).
async fn break_off(served: &Served, name: &str, bytes: usize, wait: bool) {
    let watch = rustix::fs::inotify::init(rustix::fs::inotify::CreateFlags::empty()).unwrap();
    let interest = rustix::fs::inotify::WatchFlags::CREATE | rustix::fs::inotify::WatchFlags::DELETE;
    rustix::fs::inotify::add_watch(watch.as_fd(), served.dir(), interest).unwrap();
    let mut stream = tokio::net::TcpStream::connect(served.address).await.unwrap();
    let head = format!(
        "POST {} HTTP/1.1\r\nhost: test\r\ncontent-type: application/octet-stream\r\ncontent-length: {}\r\n\r\n",
        served.files(name, ""),
        bytes + 1
    );
    stream.write_all(head.as_bytes()).await.unwrap();
    stream.write_all(&pattern(bytes)).await.unwrap();
    let next = move || {
        let mut buffer = [std::mem::MaybeUninit::uninit(); 4096];
        let mut reader = rustix::fs::inotify::Reader::new(watch.as_fd(), &mut buffer);
        let (mut created, mut deleted) = (None, None);
        while deleted.is_none() {
            let event = reader.next().unwrap();
            let name = event.file_name().unwrap().to_str().unwrap().to_owned();
            match event.events().contains(rustix::fs::inotify::ReadFlags::CREATE) {
                true => created = Some(name),
                false => deleted = Some(name),
            }
        }
        (created.unwrap(), deleted.unwrap())
    };
    if wait {
        let waiting = tokio::task::spawn_blocking(next);
        stream.shutdown().await.unwrap();
        drop(stream);
        let (created, deleted) = waiting.await.unwrap();
        assert!(created.starts_with(UNFINISHED_PREFIX), "{created}");
        assert_eq!(created, deleted);
    } else {
        // The answer comes when the body is known to be incomplete.
        stream.shutdown().await.unwrap();
        let mut answer = Vec::new();
        let _ = tokio::io::AsyncReadExt::read_to_end(&mut stream, &mut answer).await;
        assert!(!answer.starts_with(b"HTTP/1.1 200"));
    }
}

#[tokio::test]
async fn a_broken_upload_leaves_what_was_there() {
    let served = Served::start().await;
    break_off(&served, "new-small", 1000, false).await;
    break_off(&served, "new-large", LARGE, true).await;
    assert!(names(served.dir()).is_empty());
    std::fs::write(served.at("old"), "content").unwrap();
    break_off(&served, "old", 1000, false).await;
    break_off(&served, "old", LARGE, true).await;
    assert_eq!(std::fs::read(served.at("old")).unwrap(), b"content");
    assert_eq!(names(served.dir()), ["old"]);
    // A form without its last boundary is broken too.
    let body = form(&[(served.at("f").to_str().unwrap(), &pattern(100))]);
    let answer = post(&served, "/files", &[FORM], body[..body.len() - 20].to_vec()).await;
    assert_eq!(answer.refusal().0, 400);
    assert_eq!(names(served.dir()), ["old"]);
}

#[tokio::test]
async fn downloads_are_whole_partial_or_not_needed() {
    let served = Served::start().await;
    for (name, size) in [("small.txt", 1000), ("large.bin", LARGE)] {
        let content = pattern(size);
        std::fs::write(served.at(name), &content).unwrap();
        let whole = served.get(name, &[]).await;
        assert_eq!((whole.status.as_u16(), whole.header("content-length")), (200, size.to_string().as_str()));
        assert_eq!(whole.header("content-disposition"), format!("inline; filename={name}"));
        assert_eq!(whole.header("vary"), "Accept-Encoding");
        assert_eq!(whole.header("accept-ranges"), "bytes");
        assert!(whole.body == content);
        for (range, from, to) in
            [("bytes=10-19", 10, 20), ("bytes=-5", size - 5, size), ("bytes=900-", 900, size)]
        {
            let part = served.get(name, &[("range", range), ("accept-encoding", "gzip")]).await;
            assert_eq!(part.status, 206);
            assert_eq!(part.header("content-range"), format!("bytes {from}-{}/{size}", to - 1));
            assert_eq!(part.header("content-encoding"), "");
            assert!(part.body == content[from..to], "{range}");
        }
        let outside = served.get(name, &[("range", &format!("bytes={size}-"))]).await;
        assert_eq!(
            (outside.status.as_u16(), outside.header("content-range")),
            (416, format!("bytes */{size}").as_str())
        );
        let same = served.get(name, &[("if-none-match", whole.header("etag"))]).await;
        assert_eq!((same.status.as_u16(), same.body.len()), (304, 0));
        let same = served.get(name, &[("if-modified-since", whole.header("last-modified"))]).await;
        assert_eq!(same.status, 304);
        assert_eq!(served.get(name, &[("if-match", "\"other\"")]).await.status, 412);
        let head = served.send(Method::HEAD, &served.files(name, ""), &[], Body::empty()).await;
        assert_eq!((head.header("content-length"), head.body.len()), (size.to_string().as_str(), 0));
    }
}

#[tokio::test]
async fn downloads_are_packed_for_who_wants_it() {
    let served = Served::start().await;
    for (name, size) in [("empty", 0), ("small", 1000), ("large", LARGE)] {
        let content = pattern(size);
        std::fs::write(served.at(name), &content).unwrap();
        let packed = served.get(name, &[("accept-encoding", "gzip")]).await;
        assert_eq!((packed.status.as_u16(), packed.header("content-encoding")), (200, "gzip"));
        assert!(gunzip(&packed.body) == content, "{name}");
        let refused = served.get(name, &[("accept-encoding", "identity;q=0")]).await;
        assert_eq!(refused.refusal().0, 406);
    }
    let offered = served.get("large", &[("accept-encoding", "gzip, deflate, br")]).await;
    assert_eq!(offered.header("content-encoding"), "");
}

#[tokio::test]
async fn special_files_are_read_to_their_end() {
    let served = Served::start().await;
    let get =
        async |path: &str| served.send(Method::GET, &format!("/files?path={path}"), &[], Body::empty()).await;
    let status = get("/proc/self/status").await;
    assert!(status.body.starts_with(b"Name:"), "{:?}", status.body);
    assert_eq!(status.header("content-length"), status.body.len().to_string());
    assert_eq!(get("/proc/version").await.body, std::fs::read("/proc/version").unwrap());
    std::fs::write(served.at("empty"), "").unwrap();
    let empty = served.get("empty", &[]).await;
    assert_eq!((empty.status.as_u16(), empty.header("content-length")), (200, "0"));
    // Its size is a page, its content is not.
    let cpus = "/sys/devices/system/cpu/online";
    assert_eq!(get(cpus).await.body, std::fs::read(cpus).unwrap());
}

#[tokio::test]
async fn what_cannot_be_read_is_refused() {
    let served = Served::start().await;
    std::fs::create_dir(served.at("dir")).unwrap();
    std::fs::write(served.at("f"), "x").unwrap();
    rustix::fs::mknodat(rustix::fs::CWD, served.at("pipe"), rustix::fs::FileType::Fifo, 0o600.into(), 0)
        .unwrap();
    for (name, status) in [("dir", 400), ("none", 404), ("pipe", 400), ("f/below", 400)] {
        let (got, message) = served.get(name, &[]).await.refusal();
        assert_eq!(got, status, "{name}: {message}");
        assert!(message.contains(served.at(name).to_str().unwrap()), "{message}");
    }
    let answer = served.send(Method::GET, &served.files("f", "&username=x-y"), &[], Body::empty()).await;
    assert_eq!(answer.refusal(), (401, "invalid username: 'x-y'".into()));
}

#[tokio::test]
async fn signatures_open_one_path_for_one_operation() {
    let settings = Settings {
        access_token: Some("token".into()),
        default_user: Some("root".into()),
        ..Settings::default()
    };
    let served = Served::with(settings).await;
    let path = served.at("f").to_str().unwrap().to_owned();
    let signed = |operation: Operation, expiration: Option<i64>| {
        let signed = Signed { path: &path, username: "", signature: None, expiration };
        let signature = sign(operation, signed, "token").replace('+', "%2B").replace('/', "%2F");
        let expiration = expiration.map_or(String::new(), |at| format!("&signature_expiration={at}"));
        served.files("f", &format!("&signature={signature}{expiration}"))
    };
    assert_eq!(post(&served, &signed(Operation::Write, None), &[OCTETS], "x").await.status, 200);
    let get = async |uri: &str, headers: &[(&str, &str)]| {
        served.send(Method::GET, uri, headers, Body::empty()).await
    };
    assert_eq!(get(&signed(Operation::Read, Some(i64::from(u32::MAX))), &[]).await.body, "x");
    assert_eq!(get(&served.files("f", ""), &[("x-access-token", "token")]).await.body, "x");
    let read = signed(Operation::Read, None);
    for (uri, headers, message) in [
        (served.files("f", ""), vec![], "missing signature query parameter"),
        (signed(Operation::Write, None), vec![], "invalid signature"),
        (signed(Operation::Read, Some(5)), vec![], "signature is already expired"),
        (read, vec![("x-access-token", "no")], "access token present in header but does not match"),
    ] {
        let answer = get(&uri, &headers).await;
        assert_eq!(answer.status, 401);
        assert_eq!(answer.body, format!(r#"{{"code":401,"message":"{message}"}}"#));
    }
    assert_eq!(post(&served, &signed(Operation::Read, None), &[OCTETS], "y").await.status, 401);
    assert_eq!(std::fs::read(served.at("f")).unwrap(), b"x");
}

#[tokio::test]
async fn metadata_is_kept_with_the_file_and_replaced_with_it() {
    let served = Served::start().await;
    let tag = ("x-metadata-Owner", "me");
    for content in [pattern(5), pattern(LARGE)] {
        let answer = post(&served, &served.files("f", ""), &[OCTETS, tag], content.clone()).await;
        assert_eq!(answer.json()[0]["metadata"], json!({"owner": "me"}));
        let entry = served.call(STAT, json!({"path": served.at("f")})).await.unwrap();
        assert_eq!(entry["entry"]["metadata"], json!({"owner": "me"}));
        served.put("f", content).await;
        let entry = served.call(STAT, json!({"path": served.at("f")})).await.unwrap();
        assert_eq!(entry["entry"].get("metadata"), None);
        std::fs::remove_file(served.at("f")).unwrap();
    }
    let answer = post(&served, &served.files("g", ""), &[OCTETS, ("x-metadata-k", "a\tb")], "x").await;
    assert_eq!(answer.refusal().0, 400);
    assert!(!served.at("g").exists());
}

#[tokio::test]
async fn composing_joins_and_removes_the_sources() {
    let served = Served::start().await;
    let compose = async |sources: &[&str], destination: &str| {
        let sources: Vec<PathBuf> = sources.iter().map(|name| served.at(name)).collect();
        let request =
            json!({"source_paths": sources, "destination": served.at(destination), "username": "nobody"});
        post(&served, "/files/compose", &[("content-type", "application/json")], request.to_string()).await
    };
    for (name, content) in [("1", pattern(LARGE)), ("2", Vec::new()), ("3", b"end".to_vec())] {
        std::fs::write(served.at(name), content).unwrap();
    }
    for (sources, destination, status) in
        [(&["1", "4"][..], "out", 404), (&["1", "1"], "out", 400), (&["1"], "1", 400), (&[], "out", 400)]
    {
        assert_eq!(compose(sources, destination).await.refusal().0, status);
        assert_eq!(names(served.dir()), ["1", "2", "3"]);
    }
    let answer = compose(&["1", "2", "3"], "d/out").await;
    assert_eq!(answer.json(), json!({"name": "out", "path": served.at("d/out"), "type": "file"}));
    assert_eq!(names(served.dir()), ["d"]);
    assert!(std::fs::read(served.at("d/out")).unwrap() == [pattern(LARGE), b"end".to_vec()].concat());
    assert_eq!(served.at("d/out").metadata().unwrap().uid(), 65534);
}

/// A file system of one MiB, unmounted with the test.
struct Small(PathBuf);

impl Small {
    fn mount(at: PathBuf) -> Self {
        std::fs::create_dir(&at).unwrap();
        rustix::mount::mount("none", &at, "tmpfs", rustix::mount::MountFlags::empty(), Some(c"size=1m"))
            .unwrap();
        Self(at)
    }
}

impl Drop for Small {
    fn drop(&mut self) {
        let _ = rustix::mount::unmount(&self.0, rustix::mount::UnmountFlags::DETACH);
    }
}

#[tokio::test]
async fn a_full_disk_is_told_and_nothing_is_left() {
    let served = Served::start().await;
    let small = Small::mount(served.at("small"));
    std::fs::write(served.at("small/old"), "content").unwrap();
    for name in ["small/new", "small/old"] {
        // Known beforehand by its length; known only when it does not fit.
        for body in [Body::from(pattern(LARGE)), portions(&pattern(LARGE), 100_000)] {
            let (status, message) = served.put(name, body).await.refusal();
            assert_eq!((status, message.contains("not enough disk space")), (507, true), "{message}");
        }
    }
    let path = served.at("small/new").to_str().unwrap().to_owned();
    assert_eq!(post(&served, "/files", &[FORM], form(&[(&path, &pattern(LARGE))])).await.refusal().0, 507);
    assert_eq!(names(&small.0), ["old"]);
    assert_eq!(std::fs::read(served.at("small/old")).unwrap(), b"content");
}
