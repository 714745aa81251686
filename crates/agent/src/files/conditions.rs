//! Conditional requests and ranges (RFC 9110, 13 and 14), decided before anything is sent.

use std::ops::Range;

use dormouse_types::Timestamp;
use http::HeaderMap;
use http::header::{
    HeaderName, IF_MATCH, IF_MODIFIED_SINCE, IF_NONE_MATCH, IF_RANGE, IF_UNMODIFIED_SINCE, RANGE,
};
use jiff::fmt::rfc2822::{DateTimeParser, DateTimePrinter};

const CONDITIONS: [HeaderName; 6] =
    [RANGE, IF_RANGE, IF_MATCH, IF_NONE_MATCH, IF_MODIFIED_SINCE, IF_UNMODIFIED_SINCE];

/// What tells one state of a file from another.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Validators {
    pub etag: String,
    /// Whole seconds.
    pub modified: Option<Timestamp>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Decision {
    Whole,
    Part(Range<u64>),
    NotModified,
    PreconditionFailed,
    Unsatisfiable,
}

/// True where the answer must be the file's own bytes.
#[must_use]
pub fn any(headers: &HeaderMap) -> bool {
    CONDITIONS.iter().any(|name| headers.contains_key(name))
}

/// As HTTP writes times.
#[must_use]
pub fn http_date(time: Timestamp) -> Option<String> {
    DateTimePrinter::new().timestamp_to_rfc9110_string(&time).ok()
}

/// What to answer, of `size` bytes; without validators (special files) there is nothing to compare.
#[must_use]
pub fn decide(headers: &HeaderMap, validators: Option<&Validators>, size: u64) -> Decision {
    let Some(validators) = validators else { return Decision::Whole };
    if let Some(tags) = text(headers, IF_MATCH) {
        if !matches(tags, &validators.etag) {
            return Decision::PreconditionFailed;
        }
    } else if let (Some(since), Some(modified)) = (date(headers, IF_UNMODIFIED_SINCE), validators.modified)
        && modified > since
    {
        return Decision::PreconditionFailed;
    }
    if let Some(tags) = text(headers, IF_NONE_MATCH) {
        if matches(tags, &validators.etag) {
            return Decision::NotModified;
        }
    } else if let (Some(since), Some(modified)) = (date(headers, IF_MODIFIED_SINCE), validators.modified)
        && modified <= since
    {
        return Decision::NotModified;
    }
    match text(headers, RANGE) {
        Some(range) if range_applies(headers, validators) => parse_range(range, size),
        _ => Decision::Whole,
    }
}

fn text(headers: &HeaderMap, name: HeaderName) -> Option<&str> {
    headers.get(name)?.to_str().ok()
}

fn date(headers: &HeaderMap, name: HeaderName) -> Option<Timestamp> {
    DateTimeParser::new().parse_timestamp(text(headers, name)?).ok()
}

fn matches(tags: &str, etag: &str) -> bool {
    tags.split(',').map(str::trim).any(|tag| tag == "*" || tag.trim_start_matches("W/") == etag)
}

fn range_applies(headers: &HeaderMap, validators: &Validators) -> bool {
    match text(headers, IF_RANGE) {
        None => true,
        Some(tag) if tag.starts_with('"') => tag == validators.etag,
        Some(_) => validators.modified.is_some() && date(headers, IF_RANGE) == validators.modified,
    }
}

/// One range; several at once, other units and what cannot be read are answered with the whole file,
/// which the standard allows.
fn parse_range(range: &str, size: u64) -> Decision {
    let Some(spec) = range.trim().strip_prefix("bytes=") else { return Decision::Whole };
    let Some((first, last)) = spec.split_once('-').filter(|_| !spec.contains(',')) else {
        return Decision::Whole;
    };
    let (first, last) = (first.trim(), last.trim());
    let number =
        |digits: &str| digits.bytes().all(|byte| byte.is_ascii_digit()).then(|| digits.parse::<u64>().ok());
    let (start, end) = match (first, last) {
        ("", "") => return Decision::Whole,
        // The last bytes.
        ("", suffix) => match number(suffix).flatten() {
            Some(0) => return Decision::Unsatisfiable,
            Some(suffix) => (size.saturating_sub(suffix), size),
            None => return Decision::Whole,
        },
        (first, "") => match number(first).flatten() {
            Some(first) => (first, size),
            None => return Decision::Whole,
        },
        (first, last) => match (number(first).flatten(), number(last).flatten()) {
            (Some(first), Some(last)) if first <= last => (first, size.min(last.saturating_add(1))),
            _ => return Decision::Whole,
        },
    };
    if start < end { Decision::Part(start..end) } else { Decision::Unsatisfiable }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn decided(given: &[(HeaderName, &str)]) -> Decision {
        let headers = given.iter().map(|(name, value)| (name.clone(), value.parse().unwrap())).collect();
        let modified = "2024-01-02T03:04:05Z".parse().ok();
        decide(&headers, Some(&Validators { etag: "\"e\"".into(), modified }), 10)
    }

    #[test]
    fn ranges_are_cut_to_the_file() {
        for (range, wanted) in [
            ("bytes=0-3", Decision::Part(0..4)),
            ("bytes=4-", Decision::Part(4..10)),
            ("bytes=-3", Decision::Part(7..10)),
            ("bytes=-30", Decision::Part(0..10)),
            ("bytes=5-500", Decision::Part(5..10)),
            ("bytes=10-", Decision::Unsatisfiable),
            ("bytes=-0", Decision::Unsatisfiable),
            ("bytes=0-18446744073709551615", Decision::Part(0..10)),
            ("bytes=5-4", Decision::Whole),
            ("bytes=0-1,4-5", Decision::Whole),
            ("bytes=+1-2", Decision::Whole),
            ("lines=0-1", Decision::Whole),
            ("bytes=99999999999999999999-", Decision::Whole),
        ] {
            assert_eq!(decided(&[(RANGE, range)]), wanted, "{range}");
        }
    }

    #[test]
    fn conditions_are_asked_in_their_order() {
        let (at, before, after) = (
            "Tue, 02 Jan 2024 03:04:05 GMT",
            "Mon, 01 Jan 2024 00:00:00 GMT",
            "Wed, 03 Jan 2024 00:00:00 GMT",
        );
        for (given, wanted) in [
            (vec![(IF_NONE_MATCH, "\"a\", W/\"e\"")], Decision::NotModified),
            (vec![(IF_NONE_MATCH, "*")], Decision::NotModified),
            (vec![(IF_NONE_MATCH, "\"a\""), (IF_MODIFIED_SINCE, after)], Decision::Whole),
            (vec![(IF_MODIFIED_SINCE, at)], Decision::NotModified),
            (vec![(IF_MODIFIED_SINCE, before)], Decision::Whole),
            (vec![(IF_MODIFIED_SINCE, "yesterday")], Decision::Whole),
            (vec![(IF_MATCH, "\"a\"")], Decision::PreconditionFailed),
            (vec![(IF_MATCH, "\"e\""), (IF_UNMODIFIED_SINCE, before)], Decision::Whole),
            (vec![(IF_UNMODIFIED_SINCE, before)], Decision::PreconditionFailed),
            (vec![(IF_UNMODIFIED_SINCE, at)], Decision::Whole),
            (vec![(RANGE, "bytes=1-2"), (IF_RANGE, "\"e\"")], Decision::Part(1..3)),
            (vec![(RANGE, "bytes=1-2"), (IF_RANGE, "\"a\"")], Decision::Whole),
            (vec![(RANGE, "bytes=1-2"), (IF_RANGE, at)], Decision::Part(1..3)),
            (vec![(RANGE, "bytes=1-2"), (IF_RANGE, after)], Decision::Whole),
        ] {
            assert_eq!(decided(&given), wanted, "{given:?}");
        }
        assert_eq!(http_date("2024-01-02T03:04:05Z".parse().unwrap()).as_deref(), Some(at));
    }

    proptest! {
        #[test]
        fn a_part_is_never_empty_nor_outside(range in "bytes=[0-9]{0,3}-[0-9]{0,3}", size in 0_u64..500) {
            if let Decision::Part(part) = parse_range(&range, size) {
                prop_assert!(part.start < part.end && part.end <= size);
            }
        }
    }
}
