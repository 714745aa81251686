//! Connect calls on axum: reading requests, answering unary calls and streams.

use std::time::Duration;

use axum::body::{Body, Bytes};
use axum::response::{IntoResponse, Response};
use dormouse_wire::envd::connect::{
    Code, Decoder, Error, KEEPALIVE_HEADER, KEEPALIVE_SECONDS_DEFAULT, MESSAGE_BYTES_MAX, STREAM_TYPE,
    TIMEOUT_HEADER, UNARY_TYPE, end, parse, to_json,
};
use futures_util::Stream;
use http::header::CONTENT_TYPE;
use http::{HeaderMap, StatusCode};
use http_body_util::BodyExt as _;
use serde::Serialize;
use serde::de::DeserializeOwned;

/// Streams are not given up earlier than this, whatever the caller asks for.
const KEEPALIVE_SECONDS_MAX: u64 = 24 * 3600;

/// The whole message of a unary call.
pub async fn read_unary<T: DeserializeOwned>(headers: &HeaderMap, body: Body) -> Result<T, Error> {
    check_type(headers, UNARY_TYPE)?;
    parse(&read_body(body).await?)
}

/// The one message of a server stream's request.
pub async fn read_stream_request<T: DeserializeOwned>(headers: &HeaderMap, body: Body) -> Result<T, Error> {
    check_type(headers, STREAM_TYPE)?;
    let mut decoder = Decoder::default();
    decoder.push(&read_body(body).await?);
    match decoder.next_frame()? {
        Some(frame) if !frame.is_end() => frame.parse(),
        _ => Err(Error::invalid_argument("the request holds no message")),
    }
}

/// Refuses any other codec than JSON by name.
pub fn check_type(headers: &HeaderMap, wanted: &str) -> Result<(), Error> {
    let given = headers.get(CONTENT_TYPE).and_then(|value| value.to_str().ok()).unwrap_or("");
    let essence = given.split(';').next().unwrap_or("").trim();
    if essence.eq_ignore_ascii_case(wanted) {
        return Ok(());
    }
    Err(Error::unimplemented(format!("the content type {given:?} is not served here: use {wanted}")))
}

async fn read_body(body: Body) -> Result<Bytes, Error> {
    // Frames carry five bytes more than their message.
    let limited = http_body_util::Limited::new(body, MESSAGE_BYTES_MAX + 5);
    match limited.collect().await {
        Ok(collected) => Ok(collected.to_bytes()),
        Err(why) if why.is::<http_body_util::LengthLimitError>() => {
            Err(Error::resource_exhausted(format!("the request is larger than {MESSAGE_BYTES_MAX} bytes")))
        }
        Err(why) => Err(Error::new(Code::Canceled, format!("the request broke off: {why}"))),
    }
}

/// The answer of a unary call.
pub fn unary<T: Serialize>(result: Result<T, Error>) -> Response {
    match result {
        Ok(message) => ([(CONTENT_TYPE, UNARY_TYPE)], to_json(&message)).into_response(),
        Err(error) => {
            let status =
                StatusCode::from_u16(error.code.http_status()).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
            (status, [(CONTENT_TYPE, UNARY_TYPE)], to_json(&error)).into_response()
        }
    }
}

/// A stream of frames (made with `connect::message` and `connect::end`). An `Err` cuts the
/// connection: the client sees that the stream broke, not that it ended.
pub fn stream<S>(frames: S) -> Response
where
    S: Stream<Item = Result<Bytes, std::io::Error>> + Send + 'static,
{
    ([(CONTENT_TYPE, STREAM_TYPE)], Body::from_stream(frames)).into_response()
}

/// A stream that failed before its first message.
#[must_use]
pub fn stream_failed(error: Error) -> Response {
    ([(CONTENT_TYPE, STREAM_TYPE)], end(Some(error))).into_response()
}

/// How much silence a stream's keepalive interrupts.
#[must_use]
pub fn keepalive(headers: &HeaderMap) -> Duration {
    let seconds = number(headers, KEEPALIVE_HEADER).unwrap_or(KEEPALIVE_SECONDS_DEFAULT);
    Duration::from_secs(seconds.clamp(1, KEEPALIVE_SECONDS_MAX))
}

/// The caller's time limit; absent or 0: none.
#[must_use]
pub fn timeout(headers: &HeaderMap) -> Option<Duration> {
    number(headers, TIMEOUT_HEADER).filter(|ms| *ms > 0).map(Duration::from_millis)
}

fn number(headers: &HeaderMap, name: &str) -> Option<u64> {
    headers.get(name)?.to_str().ok()?.trim().parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn headers_are_read_with_bounds() {
        let headers = |name: &'static str, value: &str| {
            HeaderMap::from_iter([(http::HeaderName::from_static(name), value.parse().unwrap())])
        };
        assert_eq!(keepalive(&HeaderMap::new()), Duration::from_secs(90));
        assert_eq!(keepalive(&headers(KEEPALIVE_HEADER, "0")), Duration::from_secs(1));
        assert_eq!(timeout(&headers(TIMEOUT_HEADER, "1500")), Some(Duration::from_millis(1500)));
        assert_eq!(timeout(&headers(TIMEOUT_HEADER, "0")), None);
        assert_eq!(timeout(&headers(TIMEOUT_HEADER, "-5")), None);
    }

    #[tokio::test]
    async fn other_codecs_are_refused() {
        let headers = HeaderMap::from_iter([(CONTENT_TYPE, "application/proto".parse().unwrap())]);
        let refused = read_unary::<serde_json::Value>(&headers, Body::empty()).await.unwrap_err();
        assert_eq!(refused.code, Code::Unimplemented);
    }
}
