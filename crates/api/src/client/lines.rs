//! Answers that come a line of JSON at a time: build progress, and server-sent events (WHATWG HTML §9.2), of which
//! only `data:` is looked at.

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
    /// Only what follows `data:` counts.
    events: bool,
}

impl Lines {
    pub(super) fn new(what: &str, response: Response<Incoming>) -> Self {
        let (body, buffer) = (response.into_body(), BytesMut::new());
        Self { what: what.to_owned(), body, buffer, ended: false, events: false }
    }

    pub(super) fn events(what: &str, response: Response<Incoming>) -> Self {
        Self { events: true, ..Self::new(what, response) }
    }

    /// The next line, or `None` at the end. Empty lines (keep-alives) are skipped.
    pub async fn next<T: DeserializeOwned>(&mut self) -> Result<Option<T>, ClientError> {
        loop {
            if let Some(line) = self.take_line() {
                let Some(json) = payload(&line, self.events) else { continue };
                return serde_json::from_slice(json).map(Some).map_err(|error| ClientError::Answer {
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

/// The JSON in a line; `None`: a keep-alive, a comment, another field of an event.
fn payload(line: &[u8], events: bool) -> Option<&[u8]> {
    let json = if events { line.strip_prefix(b"data:")? } else { line };
    (!json.iter().all(u8::is_ascii_whitespace)).then_some(json)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_data_counts() {
        assert_eq!(payload(b"{}", false), Some(b"{}".as_slice()));
        assert_eq!(payload(b"\r", false), None);
        assert_eq!(payload(b"data: {}\r", true), Some(b" {}\r".as_slice()));
        assert_eq!(payload(b": keep-alive", true), None);
        assert_eq!(payload(b"event: paused", true), None);
    }
}
