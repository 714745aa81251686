//! Metadata in the headers of an upload: `X-Metadata-<key>: value`.

use http::HeaderMap;

use super::error::Refusal;
use crate::filesystem::metadata::{ALL_BYTES_MAX, KEY_BYTES_MAX, Tags};

const PREFIX: &str = "x-metadata-";

/// Keys are lower case, as header names are; values are printable ASCII.
pub fn of_headers(headers: &HeaderMap) -> Result<Tags, Refusal> {
    let mut tags = Tags::new();
    let mut bytes = 0;
    for name in headers.keys() {
        let Some(key) = name.as_str().strip_prefix(PREFIX) else { continue };
        let value = headers.get(name).map_or(&b""[..], |value| value.as_bytes());
        if key.is_empty() || key.len() > KEY_BYTES_MAX {
            let message =
                format!("metadata key {key:?} has {} bytes: 1 to {KEY_BYTES_MAX} are possible", key.len());
            return Err(Refusal::bad_request(message));
        }
        let value = std::str::from_utf8(value)
            .ok()
            .filter(|text| text.bytes().all(|byte| (b' '..=b'~').contains(&byte)));
        let Some(value) = value else {
            return Err(Refusal::bad_request(format!(
                "the value of metadata key {key:?} is not printable ASCII"
            )));
        };
        bytes += key.len() + value.len();
        tags.insert(key.to_owned(), value.to_owned());
    }
    if bytes > ALL_BYTES_MAX {
        let message =
            format!("the metadata has {bytes} bytes: {ALL_BYTES_MAX} are possible, keys and values together");
        return Err(Refusal::bad_request(message));
    }
    Ok(tags)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(pairs: &[(&str, &[u8])]) -> Result<Tags, Refusal> {
        let mut headers = HeaderMap::new();
        for (name, value) in pairs {
            headers.append(
                http::HeaderName::from_bytes(name.as_bytes()).unwrap(),
                http::HeaderValue::from_bytes(value).unwrap(),
            );
        }
        of_headers(&headers)
    }

    #[test]
    fn headers_become_tags() {
        let tags =
            read(&[("X-Metadata-Owner-Id", b"7 ~"), ("X-Other", b"x"), ("x-metadata-e", b"")]).unwrap();
        let wanted = [("e".to_owned(), String::new()), ("owner-id".to_owned(), "7 ~".to_owned())];
        assert_eq!(tags, wanted.into_iter().collect());
    }

    #[test]
    fn what_does_not_fit_is_refused() {
        assert!(read(&[("x-metadata-", b"v")]).is_err());
        assert!(read(&[("x-metadata-k", "ü".as_bytes())]).is_err());
        assert!(read(&[("x-metadata-k", b"a\tb")]).is_err());
        assert!(read(&[(&format!("x-metadata-{}", "k".repeat(247)), b"v")]).is_err());
        assert!(read(&[(&format!("x-metadata-{}", "k".repeat(246)), b"v")]).is_ok());
        assert!(read(&[("x-metadata-k", "v".repeat(4096).as_bytes())]).is_err());
    }
}
