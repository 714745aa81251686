//! The body of an upload: its bytes as they come, unpacked where they were packed, never waiting for
//! ever.

use std::io::Write as _;
use std::time::Duration;

use axum::body::{Body, Bytes};
use flate2::write::MultiGzDecoder;
use http::header::CONTENT_ENCODING;
use http::{HeaderMap, StatusCode};
use http_body_util::BodyExt as _;

use super::error::Refusal;

/// A client that sends nothing for two of these in a row is given up. Two, because the clock jumps by
/// the time that the sandbox was paused: the first one may have passed in its sleep.
const SILENCE_MAX: Duration = Duration::from_secs(150);
/// Packed bytes that are unpacked at a time: they become at most about a thousand times as many.
const UNPACK_BYTES: usize = 4 << 10;
/// What is read of a refused body so that the connection can be used again.
const DISCARD_BYTES_MAX: usize = 64 << 20;

pub struct Source {
    body: Body,
    unpack: Option<Unpack>,
    ended: bool,
}

struct Unpack {
    decoder: MultiGzDecoder<Vec<u8>>,
    packed: Bytes,
}

impl Source {
    pub fn new(headers: &HeaderMap, body: Body) -> Result<Self, (Refusal, Body)> {
        let encoding = headers
            .get(CONTENT_ENCODING)
            .map(|value| value.to_str().unwrap_or("?").trim().to_ascii_lowercase());
        let unpack = match encoding.as_deref() {
            None | Some("" | "identity") => None,
            Some("gzip" | "x-gzip") => {
                Some(Unpack { decoder: MultiGzDecoder::new(Vec::new()), packed: Bytes::new() })
            }
            Some(other) => {
                let message = format!("the content encoding {other:?} cannot be unpacked: use gzip or none");
                return Err((Refusal::bad_request(message), body));
            }
        };
        Ok(Self { body, unpack, ended: false })
    }

    /// The next bytes, never empty; `None`: the body is complete.
    pub async fn next(&mut self) -> Result<Option<Bytes>, Refusal> {
        loop {
            if let Some(unpacked) = self.unpack.as_mut().map(Unpack::next).transpose()?.flatten() {
                return Ok(Some(unpacked));
            }
            if self.ended {
                return Ok(None);
            }
            match self.receive().await? {
                None => {
                    self.ended = true;
                    if let Some(unpack) = &mut self.unpack {
                        unpack.decoder.try_finish().map_err(broken_gzip)?;
                    }
                }
                Some(bytes) => match &mut self.unpack {
                    Some(unpack) => unpack.packed = bytes,
                    None => return Ok(Some(bytes)),
                },
            }
        }
    }

    async fn receive(&mut self) -> Result<Option<Bytes>, Refusal> {
        loop {
            let mut frame = tokio::time::timeout(SILENCE_MAX, self.body.frame()).await;
            if frame.is_err() {
                frame = tokio::time::timeout(SILENCE_MAX, self.body.frame()).await;
            }
            let Ok(frame) = frame else {
                let message =
                    format!("nothing came for {} s: the upload was given up", SILENCE_MAX.as_secs());
                return Err(Refusal::new(StatusCode::REQUEST_TIMEOUT, message));
            };
            let frame = match frame {
                None => return Ok(None),
                Some(Ok(frame)) => frame,
                Some(Err(why)) => return Err(Refusal::bad_request(format!("the upload broke off: {why}"))),
            };
            if let Ok(bytes) = frame.into_data()
                && !bytes.is_empty()
            {
                return Ok(Some(bytes));
            }
        }
    }

    /// The body, to be discarded.
    pub fn into_body(self) -> Body {
        self.body
    }
}

impl Unpack {
    fn next(&mut self) -> Result<Option<Bytes>, Refusal> {
        while !self.packed.is_empty() {
            let some = self.packed.split_to(self.packed.len().min(UNPACK_BYTES));
            self.decoder.write_all(&some).map_err(broken_gzip)?;
            if !self.decoder.get_ref().is_empty() {
                return Ok(Some(self.take()));
            }
        }
        Ok((!self.decoder.get_ref().is_empty()).then(|| self.take()))
    }

    fn take(&mut self) -> Bytes {
        std::mem::take(self.decoder.get_mut()).into()
    }
}

fn broken_gzip(why: std::io::Error) -> Refusal {
    Refusal::bad_request(format!("the body is not the gzip data that its Content-Encoding announces: {why}"))
}

/// Reads the rest of a body. False: it has too much of it, or broke; the connection is to be closed.
pub async fn discard(mut body: Body) -> bool {
    let mut left = DISCARD_BYTES_MAX;
    loop {
        match tokio::time::timeout(SILENCE_MAX, body.frame()).await {
            Ok(None) => return true,
            Ok(Some(Ok(frame))) => {
                let bytes = frame.data_ref().map_or(0, Bytes::len);
                if bytes > left {
                    return false;
                }
                left -= bytes;
            }
            Ok(Some(Err(_))) | Err(_) => return false,
        }
    }
}
