//! What handlers take: JSON bodies and ids whose errors name the field.

use axum::body::Body;
use axum::extract::{FromRequest, FromRequestParts, RawPathParams};
use dormouse_api::e2b::TIMEOUT_MAX_S;
use dormouse_api::error::{ApiError, parse_json};
use dormouse_api::query::Query;
use dormouse_types::SandboxId;
use http::Request;
use http::request::Parts;
use http_body_util::BodyExt;
use serde::de::DeserializeOwned;

use super::Failure;
use crate::serve::app::Caller;

/// A JSON body, whatever its media type says: E2B's clients send some without one.
pub struct Json<T>(pub T);

impl<T: DeserializeOwned, S: Send + Sync> FromRequest<S> for Json<T> {
    type Rejection = Failure;

    async fn from_request(request: Request<Body>, _: &S) -> Result<Self, Failure> {
        // In memory already, bounded by the control plane's entry.
        let body = request.into_body().collect().await.map_err(|error| {
            Failure(ApiError::new(400, "invalid_request", format!("the request body broke off: {error}")))
        })?;
        Ok(Self(parse_json(&body.to_bytes())?))
    }
}

/// The one segment of a path that is not fixed; the router decoded it after it chose the route, so
/// that it may hold `/` and `:`.
pub struct Segment(pub String);

impl<S: Send + Sync> FromRequestParts<S> for Segment {
    type Rejection = Failure;

    async fn from_request_parts(parts: &mut Parts, state: &S) -> Result<Self, Failure> {
        let segments = RawPathParams::from_request_parts(parts, state)
            .await
            .map_err(|error| Failure(ApiError::new(400, "invalid_request", error.to_string())))?;
        let (_, value) = segments
            .iter()
            .next()
            .ok_or_else(|| Failure(ApiError::internal("this path has no segment that varies")))?;
        Ok(Self(value.to_owned()))
    }
}

/// The sandbox that the path names.
pub struct Id(pub SandboxId);

impl<S: Send + Sync> FromRequestParts<S> for Id {
    type Rejection = Failure;

    async fn from_request_parts(parts: &mut Parts, state: &S) -> Result<Self, Failure> {
        let Segment(given) = Segment::from_request_parts(parts, state).await?;
        Ok(Self(given.parse().map_err(|error| ApiError::invalid("sandboxID", error))?))
    }
}

/// The query string.
pub struct Asked(pub Query);

impl<S: Send + Sync> FromRequestParts<S> for Asked {
    type Rejection = Failure;

    async fn from_request_parts(parts: &mut Parts, _: &S) -> Result<Self, Failure> {
        Ok(Self(Query::parse(parts.uri.query())?))
    }
}

impl<S: Send + Sync> FromRequestParts<S> for Caller {
    type Rejection = Failure;

    async fn from_request_parts(parts: &mut Parts, _: &S) -> Result<Self, Failure> {
        let caller = parts.extensions.get::<Self>().cloned();
        Ok(caller.ok_or_else(|| ApiError::unauthorized("no API key"))?)
    }
}

/// `Idempotency-Key`, where there is one.
pub struct Idempotency(pub Option<String>);

impl<S: Send + Sync> FromRequestParts<S> for Idempotency {
    type Rejection = Failure;

    async fn from_request_parts(parts: &mut Parts, _: &S) -> Result<Self, Failure> {
        let Some(value) = parts.headers.get("idempotency-key") else { return Ok(Self(None)) };
        let key = value.to_str().unwrap_or("");
        let plain = (1..=255).contains(&key.len())
            && key.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'-' || b == b'_');
        if !plain {
            let why = "must be 1 to 255 letters, digits, '-' or '_'";
            return Err(Failure(ApiError::invalid("Idempotency-Key", why)));
        }
        Ok(Self(Some(key.to_owned())))
    }
}

/// Seconds that a client gave, in range.
pub fn seconds(field: &str, given: Option<i64>, default: u32) -> Result<u32, ApiError> {
    let Some(given) = given else { return Ok(default) };
    u32::try_from(given)
        .ok()
        .filter(|seconds| *seconds <= TIMEOUT_MAX_S)
        .ok_or_else(|| ApiError::invalid(field, format!("{given} is outside 0..={TIMEOUT_MAX_S} seconds")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn seconds_have_a_range() {
        assert_eq!(seconds("timeout", None, 300), Ok(300));
        assert_eq!(seconds("timeout", Some(0), 300), Ok(0));
        for given in [-1, i64::MAX, i64::from(TIMEOUT_MAX_S) + 1] {
            let error = seconds("timeout", Some(given), 300).expect_err("out of range");
            assert!(error.message.starts_with("timeout: "), "{}", error.message);
        }
    }
}
