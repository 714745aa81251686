//! The subset of the Connect protocol that envd speaks: JSON codec, no compression, no GET.
//!
//! A unary call is plain JSON over HTTP; its error is a status and an [`Error`]. A stream is a body of
//! frames, always under status 200: one byte of flags, a big-endian length, JSON; the last frame has
//! [`FLAG_END`] and says how the stream ended ([`EndStream`]).

use bytes::{Buf, BufMut, Bytes, BytesMut};
use serde::{Deserialize, Serialize};

/// Content type of a unary call.
pub const UNARY_TYPE: &str = "application/json";
/// Content type of a stream.
pub const STREAM_TYPE: &str = "application/connect+json";
pub const FLAG_COMPRESSED: u8 = 0x01;
pub const FLAG_END: u8 = 0x02;
const HEADER_BYTES: usize = 5;
/// The largest message that is accepted in either direction.
pub const MESSAGE_BYTES_MAX: usize = 4 << 20;

/// Milliseconds that the caller gives the call. For `Start`: the deadline of the process.
pub const TIMEOUT_HEADER: &str = "connect-timeout-ms";
/// Seconds of silence after which a stream carries a keepalive event.
pub const KEEPALIVE_HEADER: &str = "keepalive-ping-interval";
pub const KEEPALIVE_SECONDS_DEFAULT: u64 = 90;

macro_rules! codes {
    ($($variant:ident, $text:literal, $status:literal;)*) => {
        /// How a call failed.
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
        pub enum Code {
            $(#[serde(rename = $text)] $variant,)*
        }

        impl Code {
            pub const ALL: &'static [Self] = &[$(Self::$variant),*];

            #[must_use]
            pub fn as_str(self) -> &'static str {
                match self { $(Self::$variant => $text),* }
            }

            #[must_use]
            pub fn http_status(self) -> u16 {
                match self { $(Self::$variant => $status),* }
            }
        }
    };
}

codes! {
    Canceled, "canceled", 499;
    Unknown, "unknown", 500;
    InvalidArgument, "invalid_argument", 400;
    DeadlineExceeded, "deadline_exceeded", 504;
    NotFound, "not_found", 404;
    AlreadyExists, "already_exists", 409;
    PermissionDenied, "permission_denied", 403;
    ResourceExhausted, "resource_exhausted", 429;
    FailedPrecondition, "failed_precondition", 400;
    Aborted, "aborted", 409;
    OutOfRange, "out_of_range", 400;
    Unimplemented, "unimplemented", 501;
    Internal, "internal", 500;
    Unavailable, "unavailable", 503;
    DataLoss, "data_loss", 500;
    Unauthenticated, "unauthenticated", 401;
}

impl Code {
    /// The code of an HTTP error that carries none (a proxy answered).
    #[must_use]
    pub fn of_http_status(status: u16) -> Self {
        match status {
            400 => Self::InvalidArgument,
            401 => Self::Unauthenticated,
            403 => Self::PermissionDenied,
            404 => Self::NotFound,
            409 => Self::AlreadyExists,
            413 | 429 => Self::ResourceExhausted,
            499 => Self::Canceled,
            500 => Self::Internal,
            501 | 505 => Self::Unimplemented,
            502 | 503 => Self::Unavailable,
            504 => Self::DeadlineExceeded,
            _ => Self::Unknown,
        }
    }
}

/// What a failed call answers.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
#[error("{}: {message}", code.as_str())]
pub struct Error {
    pub code: Code,
    #[serde(default)]
    pub message: String,
}

macro_rules! constructors {
    ($($name:ident, $code:ident;)*) => {
        impl Error {
            pub fn new(code: Code, message: impl Into<String>) -> Self {
                Self { code, message: message.into() }
            }

            $(pub fn $name(message: impl Into<String>) -> Self {
                Self::new(Code::$code, message)
            })*
        }
    };
}

constructors! {
    invalid_argument, InvalidArgument;
    deadline_exceeded, DeadlineExceeded;
    not_found, NotFound;
    already_exists, AlreadyExists;
    permission_denied, PermissionDenied;
    resource_exhausted, ResourceExhausted;
    failed_precondition, FailedPrecondition;
    unimplemented, Unimplemented;
    internal, Internal;
    unavailable, Unavailable;
    unauthenticated, Unauthenticated;
}

/// Body of the last frame.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct EndStream {
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub error: Option<Error>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Frame {
    pub flags: u8,
    pub payload: Bytes,
}

impl Frame {
    #[must_use]
    pub fn is_end(&self) -> bool {
        self.flags & FLAG_END != 0
    }

    /// The message in it.
    pub fn parse<'a, T: Deserialize<'a>>(&'a self) -> Result<T, Error> {
        parse(&self.payload)
    }
}

/// A stream of frames cannot be read on.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum FrameError {
    #[error("a frame announces {announced} bytes, more than the {max} that are accepted")]
    TooLarge { announced: usize, max: usize },
    #[error("a frame is compressed, which was not agreed on")]
    Compressed,
    #[error("a frame has the unknown flags {0:#04x}")]
    Flags(u8),
    #[error("the stream ended inside a frame")]
    Truncated,
}

impl From<FrameError> for Error {
    fn from(error: FrameError) -> Self {
        let code = match error {
            FrameError::TooLarge { .. } => Code::ResourceExhausted,
            _ => Code::InvalidArgument,
        };
        Self::new(code, error.to_string())
    }
}

/// Reads frames out of bytes that arrive in any portions. Buffers at most one frame and one portion.
#[derive(Debug)]
pub struct Decoder {
    buffer: BytesMut,
    max: usize,
}

impl Default for Decoder {
    fn default() -> Self {
        Self::new(MESSAGE_BYTES_MAX)
    }
}

impl Decoder {
    #[must_use]
    pub fn new(message_bytes_max: usize) -> Self {
        Self { buffer: BytesMut::new(), max: message_bytes_max }
    }

    pub fn push(&mut self, bytes: &[u8]) {
        self.buffer.extend_from_slice(bytes);
    }

    /// The next whole frame; `None`: more bytes are needed. After an error the stream is useless.
    pub fn next_frame(&mut self) -> Result<Option<Frame>, FrameError> {
        let Some(header) = self.buffer.first_chunk::<HEADER_BYTES>() else { return Ok(None) };
        let [flags, a, b, c, d] = *header;
        if flags & FLAG_COMPRESSED != 0 {
            return Err(FrameError::Compressed);
        }
        if flags & !FLAG_END != 0 {
            return Err(FrameError::Flags(flags));
        }
        let announced = usize::try_from(u32::from_be_bytes([a, b, c, d])).unwrap_or(usize::MAX);
        if announced > self.max {
            return Err(FrameError::TooLarge { announced, max: self.max });
        }
        if self.buffer.len() < HEADER_BYTES + announced {
            return Ok(None);
        }
        self.buffer.advance(HEADER_BYTES);
        Ok(Some(Frame { flags, payload: self.buffer.split_to(announced).freeze() }))
    }

    /// To be called at the end of the bytes.
    pub fn finish(&self) -> Result<(), FrameError> {
        if self.buffer.is_empty() { Ok(()) } else { Err(FrameError::Truncated) }
    }
}

/// A frame's bytes.
#[must_use]
pub fn frame(flags: u8, payload: &[u8]) -> Bytes {
    let mut bytes = BytesMut::with_capacity(HEADER_BYTES + payload.len());
    bytes.put_u8(flags);
    // A payload of 4 GiB cannot come up: messages are bounded where they are made.
    bytes.put_u32(u32::try_from(payload.len()).unwrap_or(u32::MAX));
    bytes.put_slice(payload);
    bytes.freeze()
}

/// The frame of a message.
#[must_use]
pub fn message<T: Serialize>(message: &T) -> Bytes {
    frame(0, &to_json(message))
}

/// The last frame.
#[must_use]
pub fn end(error: Option<Error>) -> Bytes {
    frame(FLAG_END, &to_json(&EndStream { error }))
}

/// A message's JSON. The types of this module tree always have one (no map with keys that are not text).
#[must_use]
pub fn to_json<T: Serialize>(message: &T) -> Vec<u8> {
    serde_json::to_vec(message).unwrap_or_else(|_| b"{}".to_vec())
}

/// Reads a message; an empty body is the empty message.
pub fn parse<'a, T: Deserialize<'a>>(json: &'a [u8]) -> Result<T, Error> {
    let json = if json.iter().all(u8::is_ascii_whitespace) { b"{}" } else { json };
    serde_json::from_slice(json).map_err(|why| {
        Error::invalid_argument(format!("the message is not the JSON that was expected: {why}"))
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn decode(portions: &[&[u8]], max: usize) -> Result<Vec<Frame>, FrameError> {
        let mut decoder = Decoder::new(max);
        let mut frames = Vec::new();
        for portion in portions {
            decoder.push(portion);
            while let Some(frame) = decoder.next_frame()? {
                frames.push(frame);
            }
        }
        decoder.finish()?;
        Ok(frames)
    }

    #[test]
    fn frames_are_read_back_from_any_portions() {
        let bytes = [message(&serde_json::json!({"a": 1})), end(Some(Error::not_found("gone")))].concat();
        for size in 1..bytes.len() {
            let portions: Vec<&[u8]> = bytes.chunks(size).collect();
            let frames = decode(&portions, 1024).unwrap();
            assert_eq!(frames.len(), 2);
            assert_eq!(frames[0].payload, r#"{"a":1}"#);
            let last: EndStream = frames[1].parse().unwrap();
            assert!(frames[1].is_end());
            assert_eq!(last.error, Some(Error::not_found("gone")));
        }
    }

    #[test]
    fn hostile_frames_are_refused() {
        assert_eq!(
            decode(&[&[0, 0xff, 0xff, 0xff, 0xff]], 1024),
            Err(FrameError::TooLarge { announced: 0xffff_ffff, max: 1024 })
        );
        assert_eq!(decode(&[&[1, 0, 0, 0, 0]], 1024), Err(FrameError::Compressed));
        assert_eq!(decode(&[&[0x80, 0, 0, 0, 0]], 1024), Err(FrameError::Flags(0x80)));
        assert_eq!(decode(&[&[0, 0, 0, 0, 2, b'x']], 1024), Err(FrameError::Truncated));
    }

    proptest! {
        #[test]
        fn any_frames_are_read_back(
            payloads in prop::collection::vec(prop::collection::vec(any::<u8>(), 0..300), 0..8),
            size in 1..64_usize,
        ) {
            let bytes = payloads.iter().map(|payload| frame(0, payload)).collect::<Vec<_>>().concat();
            let portions: Vec<&[u8]> = bytes.chunks(size).collect();
            let read: Vec<Vec<u8>> =
                decode(&portions, 300).unwrap().into_iter().map(|frame| frame.payload.to_vec()).collect();
            prop_assert_eq!(read, payloads);
        }

        /// Hostile bytes are frames or an error, and never make the decoder hold more than it was given.
        #[test]
        fn any_bytes_are_survived(bytes in prop::collection::vec(any::<u8>(), 0..2000), max in 0..500_usize) {
            if let Ok(frames) = decode(&[&bytes], max) {
                prop_assert!(frames.iter().all(|frame| frame.payload.len() <= max));
            }
            let _ = parse::<EndStream>(&bytes);
        }
    }

    #[test]
    fn codes_are_the_protocols() {
        for code in Code::ALL {
            assert_eq!(serde_json::to_string(code).unwrap(), format!("{:?}", code.as_str()));
        }
        assert_eq!(String::from_utf8(end(None)[5..].to_vec()).unwrap(), "{}");
    }
}
