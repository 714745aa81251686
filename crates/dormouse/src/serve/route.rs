//! Which part of the server a request is for: a pure decision over its head.
//!
//! A host `<port>-<sandbox>.<domain>` names a sandbox, else the headers `E2b-Sandbox-Id` and
//! `E2b-Sandbox-Port` do; everything else is the control plane's.

use dormouse_types::SandboxId;
use http::request::Parts;
use http::{HeaderMap, Method};

pub const ID_HEADER: &str = "e2b-sandbox-id";
pub const PORT_HEADER: &str = "e2b-sandbox-port";

#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Route {
    Sandbox {
        id: SandboxId,
        port: u16,
    },
    /// A signed file URL that names no sandbox.
    Signed,
    Control,
    /// A sandbox was meant but not named as it must be.
    Invalid {
        why: String,
    },
}

/// The domain under which sandboxes have host names, without its port, lower case.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Domain {
    /// As given: what answers say.
    pub text: String,
    bare: String,
}

impl Domain {
    pub fn parse(given: &str) -> Result<Self, &'static str> {
        let (bare, port) = given.split_once(':').map_or((given, None), |(bare, port)| (bare, Some(port)));
        if bare.is_empty() || bare.len() > 200 {
            return Err("its length is not in 1..=200");
        }
        if !bare.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'-' || b == b'.') {
            return Err("it may hold letters, digits, '-' and '.' only");
        }
        if port.is_some_and(|port| port.parse::<u16>().is_err()) {
            return Err("what follows ':' is not a port");
        }
        Ok(Self { text: given.to_owned(), bare: bare.to_ascii_lowercase() })
    }

    /// `<port>-<id>` of a host under this domain, or under `localhost`.
    fn label<'h>(&self, host: &'h str) -> Option<&'h str> {
        let host = host.rsplit_once(':').map_or(host, |(name, _)| name);
        let (label, rest) = host.split_once('.')?;
        let ours = rest.eq_ignore_ascii_case(&self.bare) || rest.eq_ignore_ascii_case("localhost");
        ours.then_some(label)
    }
}

/// `<port>-<id>`; what follows a further `-` is ignored, as E2B does.
fn parse_label(label: &str) -> Option<(u16, SandboxId)> {
    let mut parts = label.split('-');
    let port = parts.next()?;
    let id = parts.next()?;
    if !port.bytes().all(|b| b.is_ascii_digit()) {
        return None;
    }
    Some((port.parse().ok().filter(|port| *port != 0)?, id.to_ascii_lowercase().parse().ok()?))
}

fn header<'h>(headers: &'h HeaderMap, name: &str) -> Option<&'h str> {
    headers.get(name).and_then(|value| value.to_str().ok()).map(str::trim)
}

/// The host that a request names: its URI's, else its header's.
pub fn host(parts: &Parts) -> Option<&str> {
    parts.uri.host().or_else(|| header(&parts.headers, "host"))
}

pub fn route(parts: &Parts, domain: &Domain) -> Route {
    if let Some((port, id)) = host(parts).and_then(|host| domain.label(host)).and_then(parse_label) {
        return Route::Sandbox { id, port };
    }
    if let Some(given) = parts.headers.get(ID_HEADER) {
        return by_headers(&parts.headers, given.to_str().unwrap_or("?"));
    }
    let file =
        parts.uri.path() == "/files" && matches!(parts.method, Method::GET | Method::POST | Method::HEAD);
    let signed =
        parts.uri.query().is_some_and(|query| query.split('&').any(|pair| pair.starts_with("signature=")));
    if file && signed { Route::Signed } else { Route::Control }
}

fn by_headers(headers: &HeaderMap, id: &str) -> Route {
    let id = match id.trim().parse::<SandboxId>() {
        Ok(id) => id,
        Err(error) => return Route::Invalid { why: format!("E2b-Sandbox-Id: {error}") },
    };
    let given = header(headers, PORT_HEADER).unwrap_or("");
    match given.parse::<u16>() {
        Ok(port) if port != 0 => Route::Sandbox { id, port },
        _ => Route::Invalid { why: format!("E2b-Sandbox-Port: {given:?} is not a port in 1..=65535") },
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use http::Request;

    fn check(uri: &str, headers: &[(&str, &str)], expected: &Route) {
        let mut request = Request::builder().uri(uri);
        for (name, value) in headers {
            request = request.header(*name, *value);
        }
        let (parts, ()) = request.body(()).expect("a valid request").into_parts();
        let domain = Domain::parse("sbx.test:8443").expect("a domain");
        assert_eq!(&route(&parts, &domain), expected, "{uri} {headers:?}");
    }

    fn sandbox(id: &str, port: u16) -> Route {
        Route::Sandbox { id: id.parse().expect("an id"), port }
    }

    #[test]
    fn hosts_and_headers_name_sandboxes() {
        check("/", &[("host", "8000-sabc1.sbx.test:8443")], &sandbox("sabc1", 8000));
        check("/x", &[("host", "8000-SABC1.SBX.test")], &sandbox("sabc1", 8000));
        check("/x", &[("host", "8000-sabc1-extra.localhost:3000")], &sandbox("sabc1", 8000));
        let headers = [("host", "127.0.0.1:3000"), (ID_HEADER, "sabc"), (PORT_HEADER, "49983")];
        check("/health", &headers, &sandbox("sabc", 49983));
        check("/v2/sandboxes", &headers, &sandbox("sabc", 49983));
    }

    #[test]
    fn everything_else_is_the_control_plane() {
        for host in [
            "127.0.0.1:3000",
            "localhost",
            "api.sbx.test",
            "sandbox.sbx.test",
            "8000-sabc.elsewhere.example",
            "x-sabc.sbx.test",
            "0-sabc.sbx.test",
            "70000-sabc.sbx.test",
            "8000-sa_c.sbx.test",
            "8000.sbx.test",
            "",
        ] {
            check("/v2/sandboxes", &[("host", host)], &Route::Control);
        }
        check("/files?path=/a", &[("host", "localhost")], &Route::Control);
    }

    #[test]
    fn a_badly_named_sandbox_is_refused() {
        for headers in [
            vec![(ID_HEADER, "../etc"), (PORT_HEADER, "1")],
            vec![(ID_HEADER, "sabc")],
            vec![(ID_HEADER, "sabc"), (PORT_HEADER, "0")],
            vec![(ID_HEADER, "sabc"), (PORT_HEADER, "65536")],
            vec![(ID_HEADER, "")],
        ] {
            let mut request = Request::builder().uri("/");
            for (name, value) in &headers {
                request = request.header(*name, *value);
            }
            let (parts, ()) = request.body(()).expect("a valid request").into_parts();
            let domain = Domain::parse("localhost:3000").expect("a domain");
            assert!(matches!(route(&parts, &domain), Route::Invalid { .. }), "{headers:?} was accepted");
        }
    }

    #[test]
    fn signed_urls_are_known_by_their_query() {
        let host = [("host", "127.0.0.1:3000")];
        check("/files?path=%2Fa&signature=v1_x&signature_expiration=1", &host, &Route::Signed);
        check("/file?signature=v1_x", &host, &Route::Control);
    }

    #[test]
    fn domains_are_checked() {
        for given in ["", "a b", "a/b", "x:port", "ä.example"] {
            assert!(Domain::parse(given).is_err(), "{given:?} was accepted");
        }
    }
}
