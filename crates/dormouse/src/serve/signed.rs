//! Signed file URLs that name no sandbox (one shared sandbox URL): whose token made the signature?
//!
//! `v1_` and base64, without padding, of SHA-256 over `path:operation:user:token[:expiration]`.

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD_NO_PAD;
use dormouse_api::error::ApiError;
use dormouse_api::query::Query;
use dormouse_node::model::{ListQuery, StateFilter};
use dormouse_node::{Node, NodeError};
use dormouse_types::SandboxId;
use dormouse_wire::stream::ENVD_PORT;
use http::{Method, Request};
use hyper::body::Incoming;
use sha2::{Digest, Sha256};

use super::app::App;
use super::reply::{self, Reply};
use super::{control, proxy};

/// A file URL that names no sandbox: the one whose token signed it is meant.
pub async fn handle(app: &App, request: Request<Incoming>) -> Reply {
    let invalid = ApiError::unauthorized("invalid signature");
    let Some(signed) = Signed::parse(request.method(), request.uri().query()) else {
        return control::refuse(request, &invalid).await;
    };
    match signer(&app.node, &signed).await {
        Ok(Some(id)) => proxy::handle(&app.gate, &id, ENVD_PORT, request).await,
        Ok(None) => control::refuse(request, &invalid).await,
        Err(error) => control::refuse(request, &reply::from_node(&error)).await,
    }
}

async fn signer(node: &Node, signed: &Signed) -> Result<Option<SandboxId>, NodeError> {
    let states = vec![StateFilter::Running, StateFilter::Paused];
    let mut query = ListQuery { states, ..ListQuery::default() };
    loop {
        let (sandboxes, next) = node.list(query.clone()).await?;
        if let Some(found) = sandboxes.into_iter().find(|sandbox| signed.made_with(&sandbox.access_token)) {
            return Ok(Some(found.id));
        }
        match next {
            Some(next) => query.cursor = Some(next),
            None => return Ok(None),
        }
    }
}

/// The signed part of a URL.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Signed {
    signature: String,
    /// What comes before the token.
    before: String,
    expiration: Option<String>,
}

impl Signed {
    pub fn parse(method: &Method, query: Option<&str>) -> Option<Self> {
        let query = Query::parse(query).ok()?;
        let operation = if method == Method::POST { "write" } else { "read" };
        let path = query.get("path").unwrap_or("");
        let user = query.get("username").unwrap_or("");
        Some(Self {
            signature: query.get("signature")?.to_owned(),
            before: format!("{path}:{operation}:{user}:"),
            expiration: query.get("signature_expiration").map(str::to_owned),
        })
    }

    /// True when this token signed it. Whether it is still valid is for the agent to say.
    pub fn made_with(&self, token: &str) -> bool {
        let mut hash = Sha256::new();
        hash.update(self.before.as_bytes());
        hash.update(token.as_bytes());
        if let Some(expiration) = &self.expiration {
            hash.update(b":");
            hash.update(expiration.as_bytes());
        }
        let expected = format!("v1_{}", STANDARD_NO_PAD.encode(hash.finalize()));
        // Compared without an early end: how far a guess was right is not told.
        expected.len() == self.signature.len()
            && expected.bytes().zip(self.signature.bytes()).fold(0, |differs, (a, b)| differs | (a ^ b)) == 0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn query(signature: &str) -> String {
        format!("path=%2Fhome%2Fuser%2Fa.txt&signature={}", dormouse_api::query::percent_encode(signature))
    }

    #[test]
    fn the_token_that_signed_is_recognised() {
        // printf '/home/user/a.txt:read::secret' | openssl dgst -sha256 -binary | base64
        let digest = Sha256::digest(b"/home/user/a.txt:read::secret");
        let signature = format!("v1_{}", STANDARD_NO_PAD.encode(digest));
        let signed = Signed::parse(&Method::GET, Some(&query(&signature))).expect("a signed URL");
        assert!(signed.made_with("secret"));
        assert!(!signed.made_with("other"));
        let write = Signed::parse(&Method::POST, Some(&query(&signature))).expect("a signed URL");
        assert!(!write.made_with("secret"));
    }

    #[test]
    fn the_expiration_and_user_are_signed_too() {
        let digest = Sha256::digest(b"a:write:root:secret:1700000000");
        let signature =
            dormouse_api::query::percent_encode(&format!("v1_{}", STANDARD_NO_PAD.encode(digest)));
        let query = format!("username=root&path=a&signature_expiration=1700000000&signature={signature}");
        assert!(Signed::parse(&Method::POST, Some(&query)).expect("a signed URL").made_with("secret"));
        let later = query.replace("1700000000", "1700000001");
        assert!(!Signed::parse(&Method::POST, Some(&later)).expect("a signed URL").made_with("secret"));
    }

    #[test]
    fn what_has_no_signature_is_not_signed() {
        assert_eq!(Signed::parse(&Method::GET, Some("path=a")), None);
        assert_eq!(Signed::parse(&Method::GET, None), None);
    }
}
