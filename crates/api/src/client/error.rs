//! What went wrong with a call, in words that a person can act on.

use http::StatusCode;
use serde_json::Value;

/// Words of a refusal that are shown at most.
const MESSAGE_CHARS_MAX: usize = 2000;

#[derive(Debug, thiserror::Error)]
pub enum ClientError {
    #[error("{given:?} cannot be used as the daemon's address: {why}; give --url http://HOST:PORT")]
    Address { given: String, why: String },
    #[error("cannot {what}: the request cannot be made: {why}")]
    Request { what: String, why: String },
    #[error(
        "cannot {what}: no daemon answers at {url}; start one with `dormouse serve`, or name it with --url"
    )]
    Unreachable {
        what: String,
        url: String,
        #[source]
        source: Box<dyn std::error::Error + Send + Sync>,
    },
    #[error("cannot {what}: {message}")]
    Refused { what: String, status: u16, error_code: Option<String>, message: String },
    #[error("cannot {what}: the answer was not understood: {why}")]
    Answer { what: String, why: String },
    #[error("{what}: the stream broke: {why}")]
    Broken { what: String, why: String },
    #[error("cannot {what}: cannot {action} {path}")]
    Local {
        what: String,
        action: &'static str,
        path: String,
        #[source]
        source: std::io::Error,
    },
}

impl ClientError {
    /// The HTTP status of a refusal.
    #[must_use]
    pub fn status(&self) -> Option<u16> {
        match self {
            Self::Refused { status, .. } => Some(*status),
            _ => None,
        }
    }

    pub(super) fn refused(what: &str, status: StatusCode, body: &[u8]) -> Self {
        let json: Option<Value> = serde_json::from_slice(body).ok();
        let field = |name: &str| json.as_ref().and_then(|json| json.get(name));
        let text = field("message")
            .and_then(Value::as_str)
            .map(str::to_owned)
            .unwrap_or_else(|| String::from_utf8_lossy(body).trim().to_owned());
        let message = if text.is_empty() { format!("the daemon answered {status}") } else { text };
        // Connect errors carry a textual `code`, the control plane's an `error_code`.
        let code = field("error_code").or_else(|| field("code")).and_then(Value::as_str);
        Self::Refused {
            what: what.to_owned(),
            status: status.as_u16(),
            error_code: code.map(str::to_owned),
            message: message.chars().take(MESSAGE_CHARS_MAX).collect(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_daemons_words_are_shown() {
        let error = ClientError::refused(
            "pause sandbox s1",
            StatusCode::CONFLICT,
            br#"{"code":409,"message":"it is already paused","error_code":"already_paused"}"#,
        );
        assert_eq!(error.to_string(), "cannot pause sandbox s1: it is already paused");
        assert_eq!(error.status(), Some(409));
    }

    #[test]
    fn an_answer_without_words_is_still_told() {
        let error = ClientError::refused("list sandboxes", StatusCode::BAD_GATEWAY, b"");
        assert!(error.to_string().contains("502"), "{error}");
    }
}
