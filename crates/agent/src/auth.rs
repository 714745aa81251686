//! Who may call envd: the access token in `X-Access-Token`.
//!
//! `GET /health` and `GET|HEAD|POST /files` are let through: the first is open, the second accepts
//! signatures too and decides by itself ([`header_token`]).

use axum::extract::{Request, State};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use http::{HeaderMap, Method, StatusCode};

use crate::context::{Ctx, Settings};

pub const TOKEN_HEADER: &str = "x-access-token";

/// What the token in a request's headers is worth.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum HeaderToken {
    /// The sandbox asks for none.
    NotNeeded,
    Missing,
    Matches,
    Differs,
}

#[must_use]
pub fn header_token(headers: &HeaderMap, settings: &Settings) -> HeaderToken {
    let Some(wanted) = &settings.access_token else { return HeaderToken::NotNeeded };
    match headers.get(TOKEN_HEADER) {
        None => HeaderToken::Missing,
        Some(given) if equal(given.as_bytes(), wanted.as_bytes()) => HeaderToken::Matches,
        Some(_) => HeaderToken::Differs,
    }
}

/// Compares without telling by its duration where the difference is.
#[must_use]
pub fn equal(a: &[u8], b: &[u8]) -> bool {
    a.len() == b.len() && a.iter().zip(b).fold(0, |differs, (x, y)| differs | (x ^ y)) == 0
}

fn is_open(method: &Method, path: &str) -> bool {
    match path {
        "/health" => method == Method::GET,
        "/files" => [Method::GET, Method::HEAD, Method::POST].contains(method),
        _ => false,
    }
}

/// The middleware around all of envd.
pub async fn require_token(State(ctx): State<Ctx>, request: Request, next: Next) -> Response {
    let verdict = header_token(request.headers(), &ctx.settings());
    let good = matches!(verdict, HeaderToken::NotNeeded | HeaderToken::Matches);
    if good || is_open(request.method(), request.uri().path()) {
        return next.run(request).await;
    }
    refused("unauthorized access, please provide a valid access token or method signing if supported")
}

/// The answer to a request without the right to it.
#[must_use]
pub fn refused(message: &str) -> Response {
    let body = serde_json::json!({ "code": 401, "message": message });
    (StatusCode::UNAUTHORIZED, axum::Json(body)).into_response()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_token_is_compared_whole() {
        let settings = Settings { access_token: Some("secret".into()), ..Settings::default() };
        let with = |token: &str| {
            HeaderMap::from_iter([(http::HeaderName::from_static(TOKEN_HEADER), token.parse().unwrap())])
        };
        assert_eq!(header_token(&with("secret"), &settings), HeaderToken::Matches);
        assert_eq!(header_token(&with("secre"), &settings), HeaderToken::Differs);
        assert_eq!(header_token(&HeaderMap::new(), &settings), HeaderToken::Missing);
        assert_eq!(header_token(&HeaderMap::new(), &Settings::default()), HeaderToken::NotNeeded);
    }

    #[test]
    fn only_health_and_files_are_open() {
        assert!(is_open(&Method::GET, "/health") && is_open(&Method::POST, "/files"));
        assert!(!is_open(&Method::POST, "/health") && !is_open(&Method::GET, "/envs"));
        assert!(!is_open(&Method::POST, "/files/compose"));
    }
}
