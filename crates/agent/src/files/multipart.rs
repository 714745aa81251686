//! `multipart/form-data` (RFC 7578), read as it arrives: bytes in, events out, in constant memory.
//!
//! Written by hand because the clients' file names are whole paths in two encodings that a library
//! would undo differently (or cut to the last name), and because a part's bytes are handed on without
//! being copied.

use bytes::{Buf as _, Bytes, BytesMut};
use memchr::memmem::{Finder, find};

/// RFC 2046.
const BOUNDARY_BYTES_MAX: usize = 70;
/// All header lines of one part.
const HEADERS_BYTES_MAX: usize = 16 << 10;
const PREAMBLE_BYTES_MAX: usize = 64 << 10;
/// Parts of one body.
const PARTS_MAX: usize = 20_000;

#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum MultipartError {
    #[error("the content type {0:?} names no usable boundary")]
    Boundary(String),
    #[error("the body does not begin with its boundary")]
    Preamble,
    #[error("the boundary is followed by something that is no line end")]
    Delimiter,
    #[error("the headers of a part are longer than {HEADERS_BYTES_MAX} bytes")]
    HeadersTooLong,
    #[error("a part has no valid Content-Disposition header: {0}")]
    Disposition(&'static str),
    #[error("the body has more than {PARTS_MAX} parts")]
    TooManyParts,
    #[error("the body ended before its last boundary: the upload is incomplete")]
    Truncated,
}

/// The `Content-Disposition` of a part.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Disposition {
    /// Name of the form's field.
    pub name: String,
    pub file_name: Option<String>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Event {
    Part(Disposition),
    /// Some bytes of the part; never empty.
    Data(Bytes),
    PartEnd,
    /// The last boundary. What follows it is ignored.
    End,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Stage {
    Preamble,
    /// After a boundary: `--`, or the end of the line.
    Delimiter,
    Headers,
    Data,
    Done,
}

pub struct Multipart {
    /// CR LF `--` boundary.
    delimiter: Vec<u8>,
    finder: Finder<'static>,
    stage: Stage,
    unread: Bytes,
    skipped: usize,
    parts: usize,
}

impl Multipart {
    /// From the value of the Content-Type header.
    pub fn of_content_type(value: &str) -> Result<Self, MultipartError> {
        let wrong = || MultipartError::Boundary(value.chars().take(200).collect());
        let boundary = parameters(value.split_once(';').ok_or_else(wrong)?.1)
            .into_iter()
            .find_map(|(name, value)| name.eq_ignore_ascii_case("boundary").then_some(value))
            .ok_or_else(wrong)?;
        if boundary.is_empty() || boundary.len() > BOUNDARY_BYTES_MAX || boundary.contains(['\r', '\n']) {
            return Err(wrong());
        }
        let delimiter = format!("\r\n--{boundary}").into_bytes();
        Ok(Self {
            finder: Finder::new(&delimiter).into_owned(),
            delimiter,
            stage: Stage::Preamble,
            // The first boundary needs no line end before it: give it one.
            unread: Bytes::from_static(b"\r\n"),
            skipped: 0,
            parts: 0,
        })
    }

    pub fn push(&mut self, bytes: Bytes) {
        if self.stage == Stage::Done || bytes.is_empty() {
            return;
        }
        if self.unread.is_empty() {
            self.unread = bytes;
        } else {
            // Rare, or short: only what may be the beginning of a boundary or of headers is kept.
            let mut joined = BytesMut::with_capacity(self.unread.len() + bytes.len());
            joined.extend_from_slice(&self.unread);
            joined.extend_from_slice(&bytes);
            self.unread = joined.freeze();
        }
    }

    /// The next event; `None`: more bytes are needed.
    pub fn next_event(&mut self) -> Result<Option<Event>, MultipartError> {
        loop {
            match self.stage {
                Stage::Preamble => {
                    if !self.skip_preamble()? {
                        return Ok(None);
                    }
                }
                Stage::Delimiter => match self.after_boundary()? {
                    None => return Ok(None),
                    Some(true) => return Ok(Some(Event::End)),
                    Some(false) => {}
                },
                Stage::Headers => return self.headers(),
                Stage::Data => return Ok(self.data()),
                Stage::Done => {
                    self.unread.clear();
                    return Ok(None);
                }
            }
        }
    }

    /// To be called at the end of the bytes.
    pub fn finish(&self) -> Result<(), MultipartError> {
        if self.stage == Stage::Done { Ok(()) } else { Err(MultipartError::Truncated) }
    }

    fn skip_preamble(&mut self) -> Result<bool, MultipartError> {
        if let Some(at) = self.finder.find(&self.unread) {
            self.unread.advance(at + self.delimiter.len());
            self.stage = Stage::Delimiter;
            return Ok(true);
        }
        let skip = self.unread.len() - self.possible_delimiter();
        self.unread.advance(skip);
        self.skipped += skip;
        if self.skipped > PREAMBLE_BYTES_MAX { Err(MultipartError::Preamble) } else { Ok(false) }
    }

    /// `Some(true)`: that was the last boundary.
    fn after_boundary(&mut self) -> Result<Option<bool>, MultipartError> {
        if self.unread.starts_with(b"--") {
            self.stage = Stage::Done;
            self.unread.clear();
            return Ok(Some(true));
        }
        // The boundary's line may end in blanks (RFC 2046).
        let blanks = self.unread.iter().take_while(|byte| matches!(byte, b' ' | b'\t')).count();
        let rest = &self.unread[blanks..];
        if rest.starts_with(b"\r\n") {
            self.unread.advance(blanks);
            self.parts += 1;
            self.stage = Stage::Headers;
            return if self.parts > PARTS_MAX { Err(MultipartError::TooManyParts) } else { Ok(Some(false)) };
        }
        let may_come = rest.is_empty() || rest == b"\r" || (blanks == 0 && rest == b"-");
        if may_come && blanks < BOUNDARY_BYTES_MAX { Ok(None) } else { Err(MultipartError::Delimiter) }
    }

    /// `unread` begins with the line end of the boundary, so that headers always end in an empty line.
    fn headers(&mut self) -> Result<Option<Event>, MultipartError> {
        const EMPTY_LINE: &[u8] = b"\r\n\r\n";
        let Some(at) = find(&self.unread, EMPTY_LINE) else {
            let too_long = self.unread.len() > HEADERS_BYTES_MAX + EMPTY_LINE.len();
            return if too_long { Err(MultipartError::HeadersTooLong) } else { Ok(None) };
        };
        if at > HEADERS_BYTES_MAX {
            return Err(MultipartError::HeadersTooLong);
        }
        let lines = self.unread.split_to(at);
        self.unread.advance(EMPTY_LINE.len());
        let disposition = disposition(&lines)?;
        self.stage = Stage::Data;
        Ok(Some(Event::Part(disposition)))
    }

    fn data(&mut self) -> Option<Event> {
        let Some(at) = self.finder.find(&self.unread) else {
            let certain = self.unread.len() - self.possible_delimiter();
            return (certain > 0).then(|| Event::Data(self.unread.split_to(certain)));
        };
        if at > 0 {
            return Some(Event::Data(self.unread.split_to(at)));
        }
        self.unread.advance(self.delimiter.len());
        self.stage = Stage::Delimiter;
        Some(Event::PartEnd)
    }

    /// How many bytes at the end of `unread` may be the beginning of a boundary.
    fn possible_delimiter(&self) -> usize {
        let window = self.unread.len().min(self.delimiter.len() - 1);
        let start = self.unread.len() - window;
        memchr::memchr_iter(b'\r', &self.unread[start..])
            .map(|at| &self.unread[start + at..])
            .find(|tail| self.delimiter.starts_with(tail))
            .map_or(0, <[u8]>::len)
    }
}

fn disposition(lines: &[u8]) -> Result<Disposition, MultipartError> {
    let lines = std::str::from_utf8(lines).map_err(|_| MultipartError::Disposition("it is not UTF-8"))?;
    let value = lines
        .split("\r\n")
        .filter_map(|line| line.split_once(':'))
        .find_map(|(name, value)| name.trim().eq_ignore_ascii_case("content-disposition").then_some(value))
        .ok_or(MultipartError::Disposition("it is missing"))?;
    let (kind, rest) = value.split_once(';').unwrap_or((value, ""));
    if !kind.trim().eq_ignore_ascii_case("form-data") {
        return Err(MultipartError::Disposition("it is not form-data"));
    }
    let mut disposition = Disposition::default();
    let mut extended = None;
    for (name, value) in parameters(rest) {
        match name.to_ascii_lowercase().as_str() {
            "name" => disposition.name = unescape(&value),
            "filename" => disposition.file_name = Some(unescape(&value)),
            "filename*" => extended = extended_value(&value),
            _ => {}
        }
    }
    // The extended form says the encoding, so it is the better one.
    disposition.file_name = extended.or(disposition.file_name);
    Ok(disposition)
}

/// `; a=b; c="d e"` as pairs. In quotes, a backslash takes away the meaning of a quote or a backslash
/// and is itself before anything else (browsers write it plainly).
fn parameters(text: &str) -> Vec<(String, String)> {
    let mut pairs = Vec::new();
    let mut rest = text.trim_start_matches([';', ' ', '\t']);
    while let Some((name, value)) = rest.split_once('=') {
        let name = name.trim().to_owned();
        let value = value.trim_start();
        let (value, after) = match value.strip_prefix('"') {
            Some(quoted) => unquote(quoted),
            None => {
                let (value, after) = value.split_once(';').unwrap_or((value, ""));
                (value.trim_end().to_owned(), after)
            }
        };
        pairs.push((name, value));
        rest = after.trim_start_matches([';', ' ', '\t']);
    }
    pairs
}

fn unquote(quoted: &str) -> (String, &str) {
    let mut value = String::new();
    let mut chars = quoted.char_indices().peekable();
    while let Some((at, char)) = chars.next() {
        match char {
            '"' => return (value, &quoted[at + 1..]),
            '\\' => match chars.next_if(|(_, next)| matches!(next, '"' | '\\')) {
                Some((_, escaped)) => value.push(escaped),
                None => value.push('\\'),
            },
            other => value.push(other),
        }
    }
    (value, "")
}

/// Form names are sent with quotes and control characters percent-encoded, and nothing else
/// (`%41` stands for itself).
fn unescape(value: &str) -> String {
    percent_decoded(value, |byte| byte < 0x20 || byte == b'"')
}

/// `utf-8''a%20b` (RFC 8187).
fn extended_value(value: &str) -> Option<String> {
    let (charset, rest) = value.split_once('\'')?;
    let (_language, encoded) = rest.split_once('\'')?;
    charset.eq_ignore_ascii_case("utf-8").then(|| percent_decoded(encoded, |_| true))
}

fn percent_decoded(value: &str, decode: impl Fn(u8) -> bool) -> String {
    let bytes = value.as_bytes();
    let mut decoded = Vec::with_capacity(bytes.len());
    let mut at = 0;
    while at < bytes.len() {
        let hex = bytes.get(at + 1..at + 3).and_then(|hex| std::str::from_utf8(hex).ok());
        let byte = hex.filter(|_| bytes[at] == b'%').and_then(|hex| u8::from_str_radix(hex, 16).ok());
        match byte.filter(|byte| decode(*byte)) {
            Some(byte) => {
                decoded.push(byte);
                at += 3;
            }
            None => {
                decoded.push(bytes[at]);
                at += 1;
            }
        }
    }
    String::from_utf8_lossy(&decoded).into_owned()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const TYPE: &str = "multipart/form-data; boundary=XX";

    fn read(content_type: &str, portions: &[&[u8]]) -> Result<Vec<(Disposition, Vec<u8>)>, MultipartError> {
        let mut multipart = Multipart::of_content_type(content_type)?;
        let mut parts = Vec::new();
        let mut open = false;
        for portion in portions {
            multipart.push(Bytes::copy_from_slice(portion));
            while let Some(event) = multipart.next_event()? {
                match event {
                    Event::Part(disposition) => {
                        assert!(!open);
                        open = true;
                        parts.push((disposition, Vec::new()));
                    }
                    Event::Data(bytes) => {
                        assert!(open && !bytes.is_empty());
                        parts.last_mut().unwrap().1.extend_from_slice(&bytes);
                    }
                    Event::PartEnd => open = false,
                    Event::End => assert!(!open),
                }
            }
        }
        multipart.finish()?;
        Ok(parts)
    }

    fn part(header: &str, content: &[u8]) -> Vec<u8> {
        let head = format!("--XX\r\nContent-Disposition: form-data; {header}\r\nContent-Type: a/b\r\n\r\n");
        [head.as_bytes(), content, b"\r\n"].concat()
    }

    fn body(parts: &[Vec<u8>]) -> Vec<u8> {
        [parts.concat(), b"--XX--\r\n".to_vec()].concat()
    }

    fn file_name(header: &str) -> Option<String> {
        let body = body(&[part(header, b"x")]);
        read(TYPE, &[&body]).unwrap().remove(0).0.file_name
    }

    #[test]
    fn file_names_are_whole_paths_in_either_encoding() {
        assert_eq!(file_name(r#"name="file"; filename="/a/b c.txt""#).as_deref(), Some("/a/b c.txt"));
        // Browsers and undici: quotes and line ends percent-encoded, backslashes plain.
        assert_eq!(file_name(r#"name="file"; filename="a%22b%0A\c%41""#).as_deref(), Some("a\"b\n\\c%41"));
        // httpx: backslashes doubled.
        assert_eq!(file_name(r#"name="file"; filename="a\\b%22""#).as_deref(), Some("a\\b\""));
        assert_eq!(file_name(r#"name="file"; filename="a\"b""#).as_deref(), Some("a\"b"));
        assert_eq!(file_name("name=file; filename=plain").as_deref(), Some("plain"));
        assert_eq!(file_name(r#"name="file"; filename="ü;=.txt""#).as_deref(), Some("ü;=.txt"));
        let both = r#"name="file"; filename="x"; filename*=utf-8'en'%e2%82%ac%20a"#;
        assert_eq!(file_name(both).as_deref(), Some("€ a"));
        assert_eq!(file_name(r#"name="file""#), None);
    }

    #[test]
    fn preamble_epilogue_and_blanks_are_taken() {
        let body =
            b"hello\r\n--XX \t\r\ncontent-disposition:form-data;name=a\r\n\r\n\r\n--XX--bye\r\n--XX\r\n";
        let parts = read(TYPE, &[body]).unwrap();
        assert_eq!(parts, [(Disposition { name: "a".into(), file_name: None }, Vec::new())]);
        assert_eq!(read(TYPE, &[b"--XX--"]).unwrap(), []);
        assert_eq!(read("multipart/form-data; charset=x; boundary=\"XX\"", &[b"--XX--"]).unwrap(), []);
    }

    #[test]
    fn hostile_bodies_are_refused() {
        use MultipartError as E;
        let refuse = |body: &[u8]| read(TYPE, &[body]).unwrap_err();
        assert_eq!(refuse(b""), E::Truncated);
        assert_eq!(refuse(&part("name=file", b"abc")), E::Truncated);
        assert_eq!(refuse(b"--XXY\r\n"), E::Delimiter);
        assert_eq!(refuse(b"--XX\r\nA: b\r\n\r\n"), E::Disposition("it is missing"));
        assert_eq!(
            refuse(b"--XX\r\nContent-Disposition: inline\r\n\r\n"),
            E::Disposition("it is not form-data")
        );
        assert_eq!(refuse(&[b"--XX\r\n".to_vec(), vec![b'a'; 40_000]].concat()), E::HeadersTooLong);
        assert_eq!(refuse(&vec![b'a'; 70_000]), E::Preamble);
        let many = body(&vec![part("name=a", b""); PARTS_MAX + 1]);
        assert_eq!(refuse(&many), E::TooManyParts);
        for content_type in
            ["multipart/form-data", "multipart/form-data; boundary=", "x; boundary=\"a\r\nb\""]
        {
            assert!(matches!(read(content_type, &[]), Err(E::Boundary(_))), "{content_type}");
        }
        assert!(read(&format!("x; boundary={}", "a".repeat(71)), &[]).is_err());
    }

    proptest! {
        /// Contents that look like boundaries, cut anywhere, arrive as they were sent.
        #[test]
        fn parts_survive_any_cutting(
            contents in proptest::collection::vec("[-X\r\n a]{0,40}", 0..4),
            cuts in proptest::collection::vec(1_usize..12, 1..40),
        ) {
            prop_assume!(contents.iter().all(|content| !format!("\r\n{content}\r\n").contains("\r\n--XX")));
            let parts: Vec<_> = contents.iter().map(|content| part("name=file; filename=f", content.as_bytes())).collect();
            let bytes = body(&parts);
            let mut portions = Vec::new();
            let (mut rest, mut cuts) = (bytes.as_slice(), cuts.iter().cycle());
            while !rest.is_empty() {
                let (portion, after) = rest.split_at((*cuts.next().unwrap()).min(rest.len()));
                portions.push(portion);
                rest = after;
            }
            let read = read(TYPE, &portions).unwrap();
            let read: Vec<_> = read.iter().map(|(_, content)| content.as_slice()).collect();
            let sent: Vec<_> = contents.iter().map(String::as_bytes).collect();
            prop_assert_eq!(read, sent);
        }

        #[test]
        fn no_bytes_break_the_reader(bytes in proptest::collection::vec(any::<u8>(), 0..300), cut in 1_usize..50) {
            let portions: Vec<&[u8]> = bytes.chunks(cut).collect();
            let _ = read(TYPE, &portions);
        }
    }
}
