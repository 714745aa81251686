//! Answers that come a line of JSON at a time: events, build progress.

use bytes::{Buf, BytesMut};
use http::Response;
use http_body_util::BodyExt;
use hyper::body::Incoming;
use serde::de::DeserializeOwned;

use super::ClientError;

/// A line longer than this ends the stream.
const LINE_BYTES_MAX: usize = 4 << 20;

pub struct Lines {
    what: String,
    body: Incoming,
    buffer: BytesMut,
    ended: bool,
}

impl Lines {
    pub(super) fn new(what: &str, response: Response<Incoming>) -> Self {
        Self { what: what.to_owned(), body: response.into_body(), buffer: BytesMut::new(), ended: false }
    }

    /// The next line, or `None` at the end. Empty lines (keep-alives) are skipped.
    pub async fn next<T: DeserializeOwned>(&mut self) -> Result<Option<T>, ClientError> {
        loop {
            if let Some(line) = self.take_line() {
                if line.iter().all(u8::is_ascii_whitespace) {
                    continue;
                }
                return serde_json::from_slice(&line).map(Some).map_err(|error| ClientError::Answer {
                    what: self.what.clone(),
                    why: error.to_string(),
                });
            }
            if self.ended {
                return Ok(None);
            }
            self.fill().await?;
        }
    }

    fn take_line(&mut self) -> Option<BytesMut> {
        if let Some(at) = self.buffer.iter().position(|byte| *byte == b'\n') {
            let line = self.buffer.split_to(at);
            self.buffer.advance(1);
            return Some(line);
        }
        (self.ended && !self.buffer.is_empty()).then(|| self.buffer.split())
    }

    async fn fill(&mut self) -> Result<(), ClientError> {
        if self.buffer.len() > LINE_BYTES_MAX {
            return Err(self.broken("a line is longer than 4 MiB".to_owned()));
        }
        match self.body.frame().await {
            Some(Ok(frame)) => {
                if let Some(data) = frame.data_ref() {
                    self.buffer.extend_from_slice(data);
                }
                Ok(())
            }
            Some(Err(error)) => Err(self.broken(error.to_string())),
            None => {
                self.ended = true;
                Ok(())
            }
        }
    }

    fn broken(&self, why: String) -> ClientError {
        ClientError::Broken { what: self.what.clone(), why }
    }
}
