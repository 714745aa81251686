//! `GET /files`: a file's bytes.
//!
//! The first piece is read before anything is answered. A file that ends within it is sent with its true
//! length, whatever the file system says its size is (files in /proc have size 0, those in /sys 4096).
//! Only beyond that is the size believed, and a file that gets shorter on the way cuts the connection.

use std::fs::{File, Metadata, OpenOptions};
use std::io::{self, Write as _};
use std::ops::Range;
use std::os::unix::fs::{MetadataExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};

use axum::body::{Body, Bytes};
use axum::response::{IntoResponse, Response};
use dormouse_types::Timestamp;
use flate2::Compression;
use flate2::write::GzEncoder;
use http::header::{
    ACCEPT_RANGES, CONTENT_DISPOSITION, CONTENT_ENCODING, CONTENT_LENGTH, CONTENT_RANGE, CONTENT_TYPE, ETAG,
    LAST_MODIFIED, VARY,
};
use http::{HeaderMap, HeaderValue, StatusCode};
use rustix::fs::OFlags;
use tokio::sync::mpsc;

use super::accept::{Accepted, Encoding};
use super::conditions::{self, Decision, Validators};
use super::error::Refusal;
use super::kind;
use super::pool::{PIECE_BYTES, Pool};
use crate::filesystem::path::base_name;
use crate::filesystem::{Caller, blocking};

/// Read before the answer begins.
const FIRST_BYTES: usize = 256 << 10;
/// Pieces between the file and the connection.
const PIECES_MAX: usize = 3;

pub async fn download(caller: Caller, path: String, headers: HeaderMap) -> Result<Response, Refusal> {
    let opened = blocking(move || open(&caller.resolve(&path)?)).await?;
    let accepted = Accepted::of(&headers);
    let whole = !conditions::any(&headers);
    let Some(encoding) = accepted.choose(opened.size(), whole) else {
        let message = "none of the encodings that the request accepts can be sent: allow gzip or identity";
        return Err(Refusal::new(StatusCode::NOT_ACCEPTABLE, message));
    };
    let validators = opened.validators();
    let decision = conditions::decide(&headers, validators.as_ref(), opened.size());
    let mut response = match (decision, encoding) {
        (Decision::NotModified, _) => StatusCode::NOT_MODIFIED.into_response(),
        (Decision::PreconditionFailed, _) => {
            let message =
                format!("file '{}' is not in the state that the request asks for", opened.path.display());
            return Err(Refusal::new(StatusCode::PRECONDITION_FAILED, message));
        }
        (Decision::Unsatisfiable, _) => unsatisfiable(&opened),
        (Decision::Part(range), _) => part(opened.clone(), range),
        (Decision::Whole, Encoding::Identity) => plain(opened.clone()),
        (Decision::Whole, Encoding::Gzip) => gzipped(opened.clone()).await,
    };
    describe(response.headers_mut(), &opened, validators.as_ref());
    Ok(response)
}

/// An open file and its beginning.
#[derive(Clone)]
struct Opened {
    path: PathBuf,
    file: std::sync::Arc<File>,
    meta: Metadata,
    first: Bytes,
    /// All of it is in `first`.
    complete: bool,
}

impl Opened {
    fn size(&self) -> u64 {
        if self.complete { self.first.len() as u64 } else { self.meta.len() }
    }

    /// Files whose size is not what the file system says have no state that could be compared.
    fn validators(&self) -> Option<Validators> {
        if self.size() != self.meta.len() || self.meta.len() == 0 {
            return None;
        }
        let (seconds, nanos) = (self.meta.mtime(), self.meta.mtime_nsec());
        let etag = format!("\"{seconds:x}.{nanos:x}-{:x}-{:x}\"", self.meta.len(), self.meta.ino());
        Some(Validators { etag, modified: Timestamp::new(seconds, 0).ok() })
    }
}

fn open(path: &Path) -> Result<Opened, Refusal> {
    let failed = |why: io::Error| Refusal::io("reading", path, &why);
    // Not to wait for the other end of a pipe; the kind is looked at below.
    let nonblock = i32::try_from(OFlags::NONBLOCK.bits()).unwrap_or(0);
    let file = OpenOptions::new().read(true).custom_flags(nonblock).open(path).map_err(failed)?;
    let meta = file.metadata().map_err(failed)?;
    if meta.is_dir() {
        return Err(Refusal::is_directory(path));
    }
    if !meta.is_file() {
        return Err(Refusal::bad_request(format!("path '{}' is not a regular file", path.display())));
    }
    let mut first = Vec::with_capacity(FIRST_BYTES);
    let mut ended = false;
    while first.len() < FIRST_BYTES && !ended {
        match rustix::io::read(&file, rustix::buffer::spare_capacity(&mut first)) {
            Ok(0) => ended = true,
            Ok(_) => {}
            Err(why) if why == rustix::io::Errno::INTR => {}
            Err(why) => return Err(failed(why.into())),
        }
    }
    // A special file that goes on beyond what was read has a size that says nothing.
    let complete = ended || meta.len() == first.len() as u64;
    Ok(Opened { path: path.to_owned(), file: file.into(), meta, first: first.into(), complete })
}

fn describe(headers: &mut HeaderMap, opened: &Opened, validators: Option<&Validators>) {
    let text = |value: &str| HeaderValue::from_str(value).ok();
    let mut set = |name, value: Option<HeaderValue>| {
        if let Some(value) = value {
            headers.insert(name, value);
        }
    };
    set(CONTENT_TYPE, text(kind::content_type(&opened.path)));
    set(CONTENT_DISPOSITION, text(&kind::inline(&base_name(&opened.path))));
    set(VARY, text("Accept-Encoding"));
    if let Some(validators) = validators {
        set(ACCEPT_RANGES, text("bytes"));
        set(ETAG, text(&validators.etag));
        set(LAST_MODIFIED, validators.modified.and_then(conditions::http_date).and_then(|date| text(&date)));
    }
}

fn unsatisfiable(opened: &Opened) -> Response {
    let message =
        format!("the range is outside of the {} bytes of '{}'", opened.size(), opened.path.display());
    let mut response = Refusal::new(StatusCode::RANGE_NOT_SATISFIABLE, message).into_response();
    if let Ok(range) = HeaderValue::from_str(&format!("bytes */{}", opened.size())) {
        response.headers_mut().insert(CONTENT_RANGE, range);
    }
    response
}

fn part(opened: Opened, range: Range<u64>) -> Response {
    let content_range = format!("bytes {}-{}/{}", range.start, range.end - 1, opened.size());
    let response = bytes_of(opened, range);
    (StatusCode::PARTIAL_CONTENT, [(CONTENT_RANGE, content_range)], response).into_response()
}

fn plain(opened: Opened) -> Response {
    // Of a special file nobody knows the length: send what comes.
    if !opened.complete && opened.meta.len() <= opened.first.len() as u64 {
        return Body::from_stream(pieces(opened, None, |piece, _| Ok(piece))).into_response();
    }
    let all = 0..opened.size();
    bytes_of(opened, all)
}

fn bytes_of(opened: Opened, range: Range<u64>) -> Response {
    let length = range.end - range.start;
    if opened.complete {
        let (Ok(start), Ok(end)) = (usize::try_from(range.start), usize::try_from(range.end)) else {
            return StatusCode::RANGE_NOT_SATISFIABLE.into_response();
        };
        return Body::from(opened.first.slice(start..end)).into_response();
    }
    let body = Body::from_stream(pieces(opened, Some(range), |piece, _| Ok(piece)));
    ([(CONTENT_LENGTH, length)], body).into_response()
}

async fn gzipped(opened: Opened) -> Response {
    let encoding = [(CONTENT_ENCODING, "gzip")];
    if opened.complete {
        let packed = blocking(move || {
            let mut encoder = GzEncoder::new(Vec::new(), Compression::fast());
            encoder.write_all(&opened.first)?;
            encoder.finish()
        });
        return match packed.await {
            Ok(packed) => (encoding, Body::from(packed)).into_response(),
            Err(why) => Refusal::new(StatusCode::INTERNAL_SERVER_ERROR, format!("compressing failed: {why}"))
                .into_response(),
        };
    }
    let mut encoder = GzEncoder::new(Vec::new(), Compression::fast());
    let pack = move |piece: Bytes, last: bool| {
        encoder.write_all(&piece)?;
        if last {
            encoder.try_finish()?;
        }
        Ok(Bytes::from(std::mem::take(encoder.get_mut())))
    };
    (encoding, Body::from_stream(pieces(opened, None, pack))).into_response()
}

/// The file's bytes, read ahead of the connection by a thread of the blocking pool. With a range,
/// exactly that many or an error; without, until the file ends. `change` sees each piece, the last one
/// (which may be empty) marked.
fn pieces(
    opened: Opened,
    range: Option<Range<u64>>,
    mut change: impl FnMut(Bytes, bool) -> io::Result<Bytes> + Send + 'static,
) -> impl futures_util::Stream<Item = io::Result<Bytes>> + Send + 'static {
    let (sender, mut receiver) = mpsc::channel(PIECES_MAX);
    tokio::task::spawn_blocking(move || {
        let outcome = read_pieces(&opened, range, &mut |piece, last| {
            let piece = change(piece, last)?;
            // An error here: nobody listens any more.
            Ok(piece.is_empty() || sender.blocking_send(Ok(piece)).is_ok())
        });
        if let Err(why) = outcome {
            tracing::debug!(path = %opened.path.display(), %why, "a download broke");
            let _ = sender.blocking_send(Err(why));
        }
    });
    futures_util::stream::poll_fn(move |cx| receiver.poll_recv(cx))
}

fn read_pieces(
    opened: &Opened,
    range: Option<Range<u64>>,
    send: &mut dyn FnMut(Bytes, bool) -> io::Result<bool>,
) -> io::Result<()> {
    let pool = Pool::default();
    let first_end = opened.first.len() as u64;
    let (mut at, end) = range.map_or((0, None), |range| (range.start, Some(range.end)));
    let left = |at: u64| {
        end.map_or(PIECE_BYTES, |end| usize::try_from(end - at).unwrap_or(usize::MAX).min(PIECE_BYTES))
    };
    if at < first_end {
        // At most FIRST_BYTES, which is less than a piece.
        let start = usize::try_from(at).unwrap_or(0);
        let piece = opened.first.slice(start..opened.first.len().min(start + left(at)));
        at += piece.len() as u64;
        if !send(piece, end == Some(at))? {
            return Ok(());
        }
    }
    loop {
        let wanted = left(at);
        if wanted == 0 {
            return Ok(());
        }
        let mut buffer = pool.take();
        let read = match rustix::io::pread(&opened.file, rustix::buffer::spare_capacity(&mut buffer), at) {
            Err(rustix::io::Errno::INTR) => continue,
            read => read?.min(wanted),
        };
        buffer.truncate(read);
        at += read as u64;
        if read == 0 && end.is_some() {
            return Err(io::Error::new(
                io::ErrorKind::UnexpectedEof,
                "the file became shorter while it was sent",
            ));
        }
        let last = read == 0 || end == Some(at);
        if !send(pool.lend(buffer), last)? || last {
            return Ok(());
        }
    }
}
