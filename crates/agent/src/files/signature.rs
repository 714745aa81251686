//! Signed URLs: whoever holds one may read or write one path without the sandbox's access token.
//!
//! `v1_` + base64(sha256("path:operation:user:token[:expiration]")) without padding; path and user as
//! they stand in the query (no user: empty).

use base64::Engine as _;
use base64::prelude::BASE64_STANDARD_NO_PAD;
use http::HeaderMap;
use sha2::{Digest as _, Sha256};

use super::error::Refusal;
use crate::auth::{HeaderToken, equal, header_token};
use crate::context::Settings;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Operation {
    Read,
    Write,
}

/// What a request says about itself in its query.
#[derive(Debug, Clone, Copy)]
pub struct Signed<'a> {
    pub path: &'a str,
    pub username: &'a str,
    pub signature: Option<&'a str>,
    /// Unix time, seconds.
    pub expiration: Option<i64>,
}

#[must_use]
pub fn sign(operation: Operation, signed: Signed<'_>, token: &str) -> String {
    let operation = match operation {
        Operation::Read => "read",
        Operation::Write => "write",
    };
    let mut text = format!("{}:{operation}:{}:{token}", signed.path, signed.username);
    if let Some(expiration) = signed.expiration {
        text.push_str(&format!(":{expiration}"));
    }
    format!("v1_{}", BASE64_STANDARD_NO_PAD.encode(Sha256::digest(text)))
}

/// Lets a request through that has the token, or a signature made with it. A token in the header beats
/// a signature. Clients compare these messages.
pub fn check(
    operation: Operation,
    signed: Signed<'_>,
    headers: &HeaderMap,
    settings: &Settings,
    now_s: i64,
) -> Result<(), Refusal> {
    let refuse = |message: &str| Err(Refusal::unauthorized(message));
    match header_token(headers, settings) {
        HeaderToken::NotNeeded | HeaderToken::Matches => return Ok(()),
        HeaderToken::Differs => return refuse("access token present in header but does not match"),
        HeaderToken::Missing => {}
    }
    let (Some(token), Some(signature)) = (&settings.access_token, signed.signature) else {
        return refuse("missing signature query parameter");
    };
    if !equal(signature.as_bytes(), sign(operation, signed, token).as_bytes()) {
        return refuse("invalid signature");
    }
    if signed.expiration.is_some_and(|expiration| expiration < now_s) {
        return refuse("signature is already expired");
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn settings() -> Settings {
        Settings { access_token: Some("secret".into()), ..Settings::default() }
    }

    fn outcome(operation: Operation, signed: Signed<'_>) -> Result<(), String> {
        check(operation, signed, &HeaderMap::new(), &settings(), 1000).map_err(|refusal| refusal.message)
    }

    #[test]
    fn the_signature_is_the_clients() {
        // Computed with Python's hashlib and base64.
        let signed = Signed {
            path: "/home/user/a b",
            username: "user",
            signature: None,
            expiration: Some(1_700_000_000),
        };
        assert_eq!(sign(Operation::Read, signed, "secret"), "v1_DvKe8VBWrHTttrlYtdA8fxgeLdz7x1MbpJe+kpwLhbY");
        let signed = Signed { path: "x", username: "", signature: None, expiration: None };
        assert_eq!(
            sign(Operation::Write, signed, "secret"),
            "v1_bxPau9bge0yo1a56OLWw1OCnJmT31nWVHAtCb2y0BSA"
        );
    }

    #[test]
    fn what_was_signed_is_what_is_let_through() {
        let unsigned = Signed { path: "a", username: "u", signature: None, expiration: Some(1000) };
        let signature = sign(Operation::Read, unsigned, "secret");
        let signed = Signed { signature: Some(&signature), ..unsigned };
        assert_eq!(outcome(Operation::Read, signed), Ok(()));
        let invalid = Err("invalid signature".to_owned());
        assert_eq!(outcome(Operation::Write, signed), invalid);
        assert_eq!(outcome(Operation::Read, Signed { path: "b", ..signed }), invalid);
        assert_eq!(outcome(Operation::Read, Signed { username: "", ..signed }), invalid);
        assert_eq!(outcome(Operation::Read, Signed { expiration: Some(2000), ..signed }), invalid);
        assert_eq!(outcome(Operation::Read, unsigned), Err("missing signature query parameter".into()));
        let late = Signed { expiration: Some(999), ..unsigned };
        let signature = sign(Operation::Read, late, "secret");
        let late = Signed { signature: Some(&signature), ..late };
        assert_eq!(outcome(Operation::Read, late), Err("signature is already expired".into()));
    }

    #[test]
    fn a_token_in_the_header_decides() {
        let signed = Signed { path: "a", username: "", signature: None, expiration: None };
        let signature = sign(Operation::Read, signed, "secret");
        let signed = Signed { signature: Some(&signature), ..signed };
        let with = |token: &str| {
            let name = http::HeaderName::from_static(crate::auth::TOKEN_HEADER);
            let headers = HeaderMap::from_iter([(name, token.parse().unwrap())]);
            check(Operation::Read, signed, &headers, &settings(), 0).map_err(|refusal| refusal.message)
        };
        assert_eq!(with("secret"), Ok(()));
        assert_eq!(with("other"), Err("access token present in header but does not match".into()));
    }
}
