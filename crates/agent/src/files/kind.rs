//! What browsers need to be told of a file: its type by its name, and its name.

use std::path::Path;

const DEFAULT: &str = "application/octet-stream";
const TYPES: [(&str, &str); 26] = [
    ("avif", "image/avif"),
    ("css", "text/css; charset=utf-8"),
    ("csv", "text/csv; charset=utf-8"),
    ("gif", "image/gif"),
    ("gz", "application/gzip"),
    ("htm", "text/html; charset=utf-8"),
    ("html", "text/html; charset=utf-8"),
    ("jpeg", "image/jpeg"),
    ("jpg", "image/jpeg"),
    ("js", "text/javascript; charset=utf-8"),
    ("json", "application/json"),
    ("md", "text/markdown; charset=utf-8"),
    ("mjs", "text/javascript; charset=utf-8"),
    ("mp3", "audio/mpeg"),
    ("mp4", "video/mp4"),
    ("pdf", "application/pdf"),
    ("png", "image/png"),
    ("py", "text/x-python; charset=utf-8"),
    ("svg", "image/svg+xml"),
    ("txt", "text/plain; charset=utf-8"),
    ("wasm", "application/wasm"),
    ("wav", "audio/wav"),
    ("webm", "video/webm"),
    ("webp", "image/webp"),
    ("xml", "text/xml; charset=utf-8"),
    ("zip", "application/zip"),
];

#[must_use]
pub fn content_type(path: &Path) -> &'static str {
    let extension =
        path.extension().and_then(|extension| extension.to_str()).unwrap_or("").to_ascii_lowercase();
    TYPES.iter().find(|(known, _)| *known == extension).map_or(DEFAULT, |(_, kind)| kind)
}

/// `Content-Disposition` with the file's name: plain, quoted, or percent-encoded UTF-8 (RFC 6266).
#[must_use]
pub fn inline(name: &str) -> String {
    let token = |byte: u8| byte.is_ascii_alphanumeric() || b"!#$&+-.^_`|~".contains(&byte);
    if !name.is_empty() && name.bytes().all(token) {
        return format!("inline; filename={name}");
    }
    if name.bytes().all(|byte| (b' '..0x7f).contains(&byte)) {
        return format!("inline; filename=\"{}\"", name.replace('\\', "\\\\").replace('"', "\\\""));
    }
    let encoded: String = name
        .bytes()
        .map(|byte| if token(byte) { char::from(byte).to_string() } else { format!("%{byte:02X}") })
        .collect();
    format!("inline; filename*=utf-8''{encoded}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_become_header_values() {
        assert_eq!(inline("a.txt"), "inline; filename=a.txt");
        assert_eq!(inline("a b\".txt"), "inline; filename=\"a b\\\".txt\"");
        assert_eq!(inline("ü\n"), "inline; filename*=utf-8''%C3%BC%0A");
        assert_eq!(content_type(Path::new("/x/A.PNG")), "image/png");
        assert_eq!(content_type(Path::new("/x/png")), DEFAULT);
    }
}
