//! The one shape of an error: HTTP status, stable code, a message that a person can act on.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// Body of every answer that is not a success. E2B's clients need `code` and `message`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct ErrorBody {
    /// The HTTP status again.
    pub code: u16,
    /// What was tried, on what, why it failed and what to do.
    pub message: String,
    /// Stable word for programs.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub error_code: Option<String>,
}

/// Whether a client that repeats the request by itself does good or harm.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Retry {
    /// Leave it to the client: statuses that nobody repeats.
    Unsaid,
    Never,
    AfterSeconds(u32),
}

/// An error on its way to a client.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{message}")]
pub struct ApiError {
    pub status: u16,
    pub error_code: &'static str,
    pub message: String,
    pub retry: Retry,
}

impl ApiError {
    /// E2B's clients repeat 429, 502, 503 and 504 unless told otherwise, so those are told.
    #[must_use]
    pub fn new(status: u16, error_code: &'static str, message: impl Into<String>) -> Self {
        let retry = if matches!(status, 429 | 502..=504) { Retry::Never } else { Retry::Unsaid };
        Self { status, error_code, message: message.into(), retry }
    }

    #[must_use]
    pub fn retry(self, retry: Retry) -> Self {
        Self { retry, ..self }
    }

    #[must_use]
    pub fn invalid(field: &str, why: impl std::fmt::Display) -> Self {
        Self::new(400, "invalid_request", format!("{field}: {why}"))
    }

    #[must_use]
    pub fn unauthorized(message: impl Into<String>) -> Self {
        Self::new(401, "unauthorized", message)
    }

    #[must_use]
    pub fn not_found(message: impl Into<String>) -> Self {
        Self::new(404, "not_found", message)
    }

    /// A known part of E2B's API that this release does not have.
    #[must_use]
    pub fn not_implemented(message: impl Into<String>) -> Self {
        Self::new(501, "not_implemented", message)
    }

    #[must_use]
    pub fn internal(message: impl Into<String>) -> Self {
        Self::new(500, "internal_server_error", message)
    }

    #[must_use]
    pub fn body(&self) -> ErrorBody {
        ErrorBody {
            code: self.status,
            message: self.message.clone(),
            error_code: Some(self.error_code.to_owned()),
        }
    }
}

/// Parses a JSON body; an error names the field by its path (`network.allowOut[0]`).
pub fn parse_json<T: serde::de::DeserializeOwned>(body: &[u8]) -> Result<T, ApiError> {
    // No body at all means a body in which everything was left out.
    let given: &[u8] = if body.iter().all(u8::is_ascii_whitespace) { b"{}" } else { body };
    let mut deserializer = serde_json::Deserializer::from_slice(given);
    let value = serde_path_to_error::deserialize(&mut deserializer).map_err(|error| {
        let path = error.path().to_string();
        let why = error.into_inner();
        if matches!(path.as_str(), "." | "?" | "") {
            ApiError::new(400, "invalid_request", format!("the request body is not what was expected: {why}"))
        } else {
            ApiError::invalid(&path, why)
        }
    })?;
    deserializer.end().map_err(|why| {
        ApiError::new(400, "invalid_request", format!("the request body goes on after its JSON value: {why}"))
    })?;
    Ok(value)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::e2b::NewSandbox;

    fn refusal(body: &str) -> String {
        match parse_json::<NewSandbox>(body.as_bytes()) {
            Ok(parsed) => panic!("{body} was accepted: {parsed:?}"),
            Err(error) => {
                assert_eq!(error.status, 400);
                error.message
            }
        }
    }

    #[test]
    fn a_wrong_type_is_named_by_its_field() {
        assert!(refusal(r#"{"templateID": 5}"#).starts_with("templateID: "));
        assert!(refusal(r#"{"templateID": "base", "timeout": "soon"}"#).starts_with("timeout: "));
        assert!(refusal(r#"{"templateID": "base", "metadata": {"a": 1}}"#).starts_with("metadata.a: "));
        assert!(
            refusal(r#"{"templateID": "base", "network": {"allowOut": [1]}}"#)
                .starts_with("network.allowOut[0]: ")
        );
        assert!(refusal("{}").contains("templateID"));
        assert!(refusal("").contains("templateID"));
        assert!(refusal("[]").contains("not what was expected"));
        assert!(refusal(r#"{"templateID":"a"} x"#).contains("goes on"));
    }

    #[test]
    fn unknown_fields_and_nulls_are_let_through() {
        let body = br#"{"templateID": "base", "secure": true, "shiny": [1], "timeout": null, "mcp": null}"#;
        let parsed: NewSandbox = parse_json(body).expect("a valid body");
        assert_eq!(parsed.timeout, None);
    }

    #[test]
    fn repeated_statuses_say_whether_to_repeat() {
        assert_eq!(ApiError::new(503, "x", "y").retry, Retry::Never);
        assert_eq!(ApiError::new(404, "x", "y").retry, Retry::Unsaid);
    }
}
