//! Answers: JSON, errors in their one shape, and the headers that go with them.

use axum::body::Body;
use axum::response::IntoResponse;
use dormouse_api::error::{ApiError, Retry};
use dormouse_node::{ErrorCode, NodeError};
use http::header::{CONNECTION, CONTENT_TYPE, RETRY_AFTER};
use http::{HeaderValue, Response, StatusCode};
use serde::Serialize;

pub type Reply = Response<Body>;

/// What a handler of the control plane fails with.
#[derive(Debug)]
pub struct Failure(pub ApiError);

pub type Outcome = Result<Reply, Failure>;

impl From<ApiError> for Failure {
    fn from(error: ApiError) -> Self {
        Self(error)
    }
}

impl From<NodeError> for Failure {
    fn from(error: NodeError) -> Self {
        Self(from_node(&error))
    }
}

impl IntoResponse for Failure {
    fn into_response(self) -> Reply {
        failure(&self.0)
    }
}

/// A node's error in the API's words.
pub fn from_node(error: &NodeError) -> ApiError {
    let message = match &error.code {
        ErrorCode::Invalid { field } if !error.message.contains(field.as_str()) => {
            format!("{field}: {}", error.message)
        }
        _ => error.message.clone(),
    };
    let told = ApiError::new(error.http_status(), error.code.as_str(), message);
    match error.code {
        ErrorCode::Unavailable => told.retry(Retry::AfterSeconds(1)),
        _ => told,
    }
}

pub fn json(status: u16, value: &impl Serialize) -> Reply {
    match serde_json::to_vec(value) {
        Ok(body) => with_body(status, "application/json", body),
        Err(error) => {
            failure(&ApiError::internal(format!("the answer could not be written as JSON: {error}")))
        }
    }
}

pub fn with_body(status: u16, media: &'static str, body: impl Into<Body>) -> Reply {
    let mut reply = Response::new(body.into());
    *reply.status_mut() = StatusCode::from_u16(status).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
    reply.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static(media));
    reply
}

/// A success without a body.
pub fn empty(status: StatusCode) -> Reply {
    let mut reply = Response::new(Body::empty());
    *reply.status_mut() = status;
    reply
}

pub fn failure(error: &ApiError) -> Reply {
    let body = serde_json::to_vec(&error.body()).unwrap_or_default();
    let mut reply = with_body(error.status, "application/json", body);
    match error.retry {
        Retry::Unsaid => {}
        Retry::Never => {
            reply.headers_mut().insert("should-retry", HeaderValue::from_static("false"));
        }
        Retry::AfterSeconds(seconds) => {
            reply.headers_mut().insert("should-retry", HeaderValue::from_static("true"));
            reply.headers_mut().insert(RETRY_AFTER, HeaderValue::from(seconds));
        }
    }
    reply
}

/// Tells the client that this connection ends with this answer.
pub fn closing(mut reply: Reply) -> Reply {
    reply.headers_mut().insert(CONNECTION, HeaderValue::from_static("close"));
    reply
}

/// One page of a list and, where there is more, the token of the next.
pub fn page(items: &impl Serialize, next: Option<String>) -> Reply {
    let mut reply = json(200, items);
    if let Some(token) = next.and_then(|next| HeaderValue::from_str(&next).ok()) {
        reply.headers_mut().insert("x-next-token", token);
    }
    reply
}

#[cfg(test)]
mod tests {
    use super::*;

    fn header(reply: &Reply, name: &str) -> Option<String> {
        reply.headers().get(name).map(|value| value.to_str().expect("text").to_owned())
    }

    #[test]
    fn errors_say_whether_to_repeat() {
        let busy = failure(&from_node(&NodeError::unavailable("busy")));
        assert_eq!(busy.status(), 503);
        assert_eq!(header(&busy, "should-retry").as_deref(), Some("true"));
        assert_eq!(header(&busy, "retry-after").as_deref(), Some("1"));
        let quota = failure(&from_node(&NodeError::new(ErrorCode::QuotaExceeded, "too many")));
        assert_eq!(quota.status(), 429);
        assert_eq!(header(&quota, "should-retry").as_deref(), Some("false"));
        let gone = failure(&from_node(&NodeError::not_found("gone")));
        assert_eq!(header(&gone, "should-retry"), None);
    }

    #[test]
    fn an_invalid_field_is_named() {
        let error = from_node(&NodeError::invalid("timeout", "must not be 0"));
        assert_eq!((error.status, error.message.as_str()), (400, "timeout: must not be 0"));
    }
}
