//! Query strings and path segments: percent-decoding as E2B's clients encode it.

use std::collections::BTreeMap;

use crate::error::ApiError;

/// More filters than this are refused.
const PAIRS_MAX: usize = 256;

/// Undoes one level of percent-encoding. `plus`: a `+` is a space (forms).
pub fn percent_decode(given: &str, plus: bool) -> Result<String, String> {
    let bytes = given.as_bytes();
    let mut decoded = Vec::with_capacity(bytes.len());
    let mut at = 0;
    while let Some(&byte) = bytes.get(at) {
        match byte {
            b'%' => {
                let hex = bytes.get(at + 1..at + 3).and_then(|pair| std::str::from_utf8(pair).ok());
                let value = hex.filter(|pair| pair.bytes().all(|b| b.is_ascii_hexdigit()));
                let value = value.and_then(|pair| u8::from_str_radix(pair, 16).ok());
                decoded.push(value.ok_or_else(|| format!("{given:?} has a % without two hex digits"))?);
                at += 3;
            }
            b'+' if plus => {
                decoded.push(b' ');
                at += 1;
            }
            other => {
                decoded.push(other);
                at += 1;
            }
        }
    }
    String::from_utf8(decoded).map_err(|_| format!("{given:?} is not UTF-8 once decoded"))
}

/// Encodes everything but unreserved characters: one path segment or query value.
#[must_use]
pub fn percent_encode(given: &str) -> String {
    let mut encoded = String::with_capacity(given.len());
    for byte in given.bytes() {
        if byte.is_ascii_alphanumeric() || b"-._~".contains(&byte) {
            encoded.push(char::from(byte));
        } else {
            encoded.push_str(&format!("%{byte:02X}"));
        }
    }
    encoded
}

/// A query string as pairs, the last one of a name winning.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Query(BTreeMap<String, String>);

impl Query {
    pub fn parse(query: Option<&str>) -> Result<Self, ApiError> {
        Ok(Self(form_pairs(query.unwrap_or("")).map_err(|why| ApiError::invalid("query", why))?))
    }

    /// A value that is there and not empty.
    #[must_use]
    pub fn get(&self, name: &str) -> Option<&str> {
        self.0.get(name).map(String::as_str).filter(|value| !value.is_empty())
    }

    pub fn number<N: std::str::FromStr>(&self, name: &str) -> Result<Option<N>, ApiError> {
        self.get(name)
            .map(|given| {
                given.parse().map_err(|_| ApiError::invalid(name, format!("{given:?} is not such a number")))
            })
            .transpose()
    }

    pub fn flag(&self, name: &str) -> Result<Option<bool>, ApiError> {
        self.get(name)
            .map(|given| match given {
                "true" | "1" => Ok(true),
                "false" | "0" => Ok(false),
                other => Err(ApiError::invalid(name, format!("{other:?} is neither true nor false"))),
            })
            .transpose()
    }

    /// `limit`, between 1 and `max`, `max` where it was left out.
    pub fn limit(&self, max: usize) -> Result<usize, ApiError> {
        let given: usize = self.number("limit")?.unwrap_or(max);
        if (1..=max).contains(&given) {
            Ok(given)
        } else {
            Err(ApiError::invalid("limit", format!("{given} is outside 1..={max}")))
        }
    }
}

fn form_pairs(form: &str) -> Result<BTreeMap<String, String>, String> {
    let mut pairs = BTreeMap::new();
    for pair in form.split('&').filter(|pair| !pair.is_empty()) {
        if pairs.len() == PAIRS_MAX {
            return Err(format!("more than {PAIRS_MAX} pairs"));
        }
        let (name, value) = pair.split_once('=').unwrap_or((pair, ""));
        pairs.insert(percent_decode(name, true)?, percent_decode(value, true)?);
    }
    Ok(pairs)
}

/// The `metadata` filter of a list: its value, once query-decoded, is a form whose names and values
/// are percent-encoded once more.
pub fn metadata_filter(value: &str) -> Result<BTreeMap<String, String>, ApiError> {
    let decode = || -> Result<BTreeMap<String, String>, String> {
        form_pairs(value)?
            .into_iter()
            .map(|(name, value)| Ok((percent_decode(&name, false)?, percent_decode(&value, false)?)))
            .collect()
    };
    decode().map_err(|why| ApiError::invalid("metadata", why))
}

/// The encoding that [`metadata_filter`] undoes, without the outermost level.
#[must_use]
pub fn encode_metadata_filter(metadata: &BTreeMap<String, String>) -> String {
    let pairs = metadata.iter().map(|(name, value)| {
        format!("{}={}", percent_encode(&percent_encode(name)), percent_encode(&percent_encode(value)))
    });
    pairs.collect::<Vec<_>>().join("&")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn map(pairs: &[(&str, &str)]) -> BTreeMap<String, String> {
        pairs.iter().map(|(k, v)| ((*k).to_owned(), (*v).to_owned())).collect()
    }

    #[test]
    fn the_metadata_filter_is_decoded_three_times() {
        // As Python sends it: urlencode of quoted names and values, then the query's own encoding.
        let query = Query::parse(Some("metadata=user%3Da%252520b%2526c%26path%3D%252Fx&limit=3"))
            .expect("a valid query");
        let filter = metadata_filter(query.get("metadata").expect("a filter")).expect("a valid filter");
        assert_eq!(filter, map(&[("user", "a b&c"), ("path", "/x")]));
        // A slash that was left as it is.
        assert_eq!(metadata_filter("path=/x").expect("valid"), map(&[("path", "/x")]));
    }

    #[test]
    fn filters_are_read_back() {
        for metadata in [map(&[("a", "1"), ("b c", "ä/ö&=%+")]), map(&[("", "x")]), map(&[])] {
            let sent = percent_encode(&encode_metadata_filter(&metadata));
            let query = Query::parse(Some(&format!("metadata={sent}"))).expect("a valid query");
            let filter = metadata_filter(query.get("metadata").unwrap_or("")).expect("a valid filter");
            assert_eq!(filter, metadata);
        }
    }

    #[test]
    fn hostile_queries_are_refused() {
        for query in ["a=%", "a=%4", "a=%zz", "a=%ff"] {
            assert!(Query::parse(Some(query)).is_err(), "{query:?} was accepted");
        }
        let many: String = (0..300).map(|n| format!("k{n}=v&")).collect();
        assert!(Query::parse(Some(&many)).is_err());
        let query = Query::parse(Some("limit=0&order=x&n=-1")).expect("a valid query");
        assert!(query.limit(100).is_err());
        assert!(query.number::<u32>("n").is_err());
        assert!(query.flag("order").is_err());
        assert_eq!(Query::parse(None).expect("no query").limit(100), Ok(100));
    }

    #[test]
    fn segments_are_decoded() {
        assert_eq!(percent_decode("team%2Fname%3Atag", false), Ok("team/name:tag".to_owned()));
        assert_eq!(percent_decode("a+b", false), Ok("a+b".to_owned()));
        assert_eq!(percent_encode("team/name:tag"), "team%2Fname%3Atag");
    }
}
