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
use futures_util::Stream;
use http::header::{
    ACCEPT_RANGES, CONTENT_DISPOSITION, CONTENT_ENCODING, CONTENT_LENGTH, CONTENT_RANGE, CONTENT_TYPE, ETAG,
    LAST_MODIFIED, VARY,
};
use http::{HeaderMap, HeaderValue, StatusCode};
use rustix::fs::OFlags;

use super::accept::{Accepted, Encoding};
use super::conditions::{self, Decision, Validators};
use super::error::Refusal;
use super::kind;
use super::pool::{PIECE_BYTES, Pool};
use crate::filesystem::path::base_name;
use crate::filesystem::{Caller, blocking};

/// Read before the answer begins.
const FIRST_BYTES: usize = 256 << 10;

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
        return Body::from_stream(Pieces::new(opened, None, None).stream()).into_response();
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
    let body = Body::from_stream(Pieces::new(opened, Some(range), None).stream());
    ([(CONTENT_LENGTH, length)], body).into_response()
}

async fn gzipped(opened: Opened) -> Response {
    let encoding = [(CONTENT_ENCODING, "gzip")];
    let mut encoder = GzEncoder::new(Vec::new(), Compression::fast());
    if opened.complete {
        let packed = blocking(move || {
            encoder.write_all(&opened.first)?;
            encoder.finish()
        });
        return match packed.await {
            Ok(packed) => (encoding, Body::from(packed)).into_response(),
            Err(why) => {
                let message = format!("compressing failed: {why}");
                Refusal::new(StatusCode::INTERNAL_SERVER_ERROR, message).into_response()
            }
        };
    }
    (encoding, Body::from_stream(Pieces::new(opened, None, Some(encoder)).stream())).into_response()
}

/// A file's bytes, each piece read while the one before it is sent. With an end, exactly up to there or
/// an error; without, until the file ends. Runs in the blocking pool one piece at a time: a client that
/// does not read holds no thread.
struct Pieces {
    opened: Opened,
    at: u64,
    end: Option<u64>,
    pack: Option<GzEncoder<Vec<u8>>>,
    pool: Pool,
    ended: bool,
}

impl Pieces {
    fn new(opened: Opened, range: Option<Range<u64>>, pack: Option<GzEncoder<Vec<u8>>>) -> Self {
        let (at, end) = range.map_or((0, None), |range| (range.start, Some(range.end)));
        Self { opened, at, end, pack, pool: Pool::default(), ended: false }
    }

    fn stream(self) -> impl Stream<Item = io::Result<Bytes>> + Send + 'static {
        let read = |mut pieces: Self| {
            tokio::task::spawn_blocking(move || {
                let piece = pieces.next().transpose();
                (pieces, piece)
            })
        };
        futures_util::stream::unfold(Some(read(self)), move |task| async move {
            let (pieces, piece) = match task?.await {
                Ok((pieces, piece)) => (pieces, piece?),
                Err(why) => return Some((Err(io::Error::other(why)), None)),
            };
            if let Err(why) = &piece {
                tracing::debug!(path = %pieces.opened.path.display(), %why, "a download broke");
                return Some((piece, None));
            }
            Some((piece, (!pieces.ended).then(|| read(pieces))))
        })
    }

    /// The next bytes to be sent, never empty.
    fn next(&mut self) -> io::Result<Option<Bytes>> {
        while !self.ended {
            let piece = self.read()?;
            self.at += piece.len() as u64;
            if piece.is_empty() && self.end.is_some_and(|end| self.at < end) {
                let message = "the file became shorter while it was sent";
                return Err(io::Error::new(io::ErrorKind::UnexpectedEof, message));
            }
            self.ended = piece.is_empty() || self.end == Some(self.at);
            let Some(pack) = &mut self.pack else {
                if piece.is_empty() {
                    break;
                }
                return Ok(Some(piece));
            };
            pack.write_all(&piece)?;
            if self.ended {
                pack.try_finish()?;
            }
            let packed = std::mem::take(pack.get_mut());
            if !packed.is_empty() {
                return Ok(Some(packed.into()));
            }
        }
        Ok(None)
    }

    /// A piece of the file; empty at its end, and at the end that was asked for.
    fn read(&self) -> io::Result<Bytes> {
        let wanted = self
            .end
            .map_or(PIECE_BYTES, |end| usize::try_from(end - self.at).unwrap_or(usize::MAX).min(PIECE_BYTES));
        if let Ok(start) = usize::try_from(self.at)
            && start < self.opened.first.len()
        {
            let end = self.opened.first.len().min(start + wanted);
            return Ok(self.opened.first.slice(start..end));
        }
        let mut buffer = self.pool.take();
        let read = loop {
            match rustix::io::pread(&self.opened.file, rustix::buffer::spare_capacity(&mut buffer), self.at) {
                Err(rustix::io::Errno::INTR) => {}
                read => break read?.min(wanted),
            }
        };
        buffer.truncate(read);
        Ok(self.pool.lend(buffer))
    }
}
