//! Which encoding a download is sent in: `Accept-Encoding` (RFC 9110, 12.5.3).

use http::HeaderMap;
use http::header::ACCEPT_ENCODING;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Encoding {
    Identity,
    Gzip,
}

/// Files beyond this are sent as they are to who merely allows gzip: most libraries offer it without
/// being asked, and compressing costs the sandbox more time than it saves on the way.
pub const OFFERED_BYTES_MAX: u64 = 1 << 20;

/// What a client accepts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Accepted {
    pub gzip: bool,
    pub identity: bool,
    /// Gzip and nothing else was named: it is wanted, not only known.
    pub gzip_wanted: bool,
}

impl Accepted {
    #[must_use]
    pub fn of(headers: &HeaderMap) -> Self {
        let (mut gzip, mut identity, mut any, mut others) = (None, None, None, false);
        for value in headers.get_all(ACCEPT_ENCODING) {
            for item in value.to_str().unwrap_or("").split(',') {
                let (name, parameters) = item.split_once(';').unwrap_or((item, ""));
                let allowed = quality(parameters) > 0.0;
                match name.trim().to_ascii_lowercase().as_str() {
                    "gzip" | "x-gzip" => gzip = Some(allowed),
                    "identity" => identity = Some(allowed),
                    "*" => any = Some(allowed),
                    "" => {}
                    _ => others |= allowed,
                }
            }
        }
        let gzip_named = gzip == Some(true);
        Self {
            gzip: gzip.or(any).unwrap_or(false),
            // Always acceptable unless excluded.
            identity: identity.or(any.filter(|any| !any)).unwrap_or(true),
            gzip_wanted: gzip_named && !others && identity != Some(true) && any != Some(true),
        }
    }

    /// The encoding for so many bytes; with `whole` false (a range, a condition) only as they are.
    #[must_use]
    pub fn choose(self, bytes: u64, whole: bool) -> Option<Encoding> {
        let worth_it = self.gzip_wanted || bytes <= OFFERED_BYTES_MAX || !self.identity;
        if whole && self.gzip && worth_it {
            Some(Encoding::Gzip)
        } else {
            self.identity.then_some(Encoding::Identity)
        }
    }
}

fn quality(parameters: &str) -> f32 {
    parameters
        .split(';')
        .filter_map(|parameter| parameter.split_once('='))
        .find_map(|(name, value)| {
            name.trim().eq_ignore_ascii_case("q").then(|| value.trim().parse().unwrap_or(0.0))
        })
        .unwrap_or(1.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn choose(accept: Option<&str>, bytes: u64, whole: bool) -> Option<Encoding> {
        let headers = accept.map(|value| (ACCEPT_ENCODING, value.parse().unwrap()));
        Accepted::of(&HeaderMap::from_iter(headers)).choose(bytes, whole)
    }

    #[test]
    fn gzip_is_sent_to_who_takes_it() {
        use Encoding::{Gzip, Identity};
        for (accept, wanted) in [
            (None, Some(Identity)),
            (Some(""), Some(Identity)),
            (Some("gzip"), Some(Gzip)),
            (Some("gzip, deflate"), Some(Gzip)),
            (Some("br;q=1.0, GZIP;q=0.5"), Some(Gzip)),
            (Some("*"), Some(Gzip)),
            (Some("gzip;q=0"), Some(Identity)),
            (Some("gzip;q=0, *"), Some(Identity)),
            (Some("deflate"), Some(Identity)),
            (Some("identity;q=0, gzip"), Some(Gzip)),
            (Some("identity;q=0"), None),
            (Some("*;q=0"), None),
            (Some("br, *;q=0"), None),
            (Some("identity, *;q=0"), Some(Identity)),
        ] {
            assert_eq!(choose(accept, 100, true), wanted, "{accept:?}");
        }
    }

    #[test]
    fn large_files_and_ranges_are_sent_as_they_are() {
        use Encoding::{Gzip, Identity};
        assert_eq!(choose(Some("gzip, deflate"), 2 << 20, true), Some(Identity));
        assert_eq!(choose(Some("gzip"), 2 << 20, true), Some(Gzip));
        assert_eq!(choose(Some("gzip, deflate, identity;q=0"), 2 << 20, true), Some(Gzip));
        assert_eq!(choose(Some("gzip"), 100, false), Some(Identity));
        assert_eq!(choose(Some("gzip, identity;q=0"), 100, false), None);
    }
}
