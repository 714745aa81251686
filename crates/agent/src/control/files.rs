//! Small system files, changed in place: some are mounts of their own, which cannot be renamed over.

use std::fs;
use std::io;
use std::path::Path;

/// Such a file is read up to here; a larger one is left alone.
const BYTES_MAX: u64 = 8 << 20;

/// The file's text; a missing one is empty.
pub fn read(path: &Path) -> io::Result<String> {
    match fs::metadata(path) {
        Ok(metadata) if metadata.len() > BYTES_MAX => {
            Err(io::Error::other(format!("it has {} bytes", metadata.len())))
        }
        Ok(_) => Ok(String::from_utf8_lossy(&fs::read(path)?).into_owned()),
        Err(why) if why.kind() == io::ErrorKind::NotFound => Ok(String::new()),
        Err(why) => Err(why),
    }
}

/// Writes the file unless it has this text already.
pub fn write(path: &Path, text: &str) -> io::Result<()> {
    if fs::read(path).is_ok_and(|now| now == text.as_bytes()) {
        return Ok(());
    }
    if let Some(parent) = path.parent() {
        fs::create_dir_all(parent)?;
    }
    fs::write(path, text)
}

/// `text` with `block` (may be empty: none) as its only part between the marks; idempotent.
#[must_use]
pub fn with_block(text: &str, begin: &str, end: &str, block: &str) -> String {
    let mut kept = String::with_capacity(text.len() + block.len() + 100);
    let mut inside = false;
    for line in text.lines() {
        match line {
            line if line == begin => inside = true,
            line if line == end && inside => inside = false,
            line if !inside => {
                kept.push_str(line);
                kept.push('\n');
            }
            _ => {}
        }
    }
    if !block.is_empty() {
        kept.push_str(&format!("{begin}\n{}\n{end}\n", block.trim_end()));
    }
    kept
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn a_block_is_replaced_and_removed() {
        let once = with_block("a\nb", "#<", "#>", "x\ny\n");
        assert_eq!(once, "a\nb\n#<\nx\ny\n#>\n");
        assert_eq!(with_block(&once, "#<", "#>", "z"), "a\nb\n#<\nz\n#>\n");
        assert_eq!(with_block(&once, "#<", "#>", ""), "a\nb\n");
    }

    proptest! {
        #[test]
        fn a_block_is_there_once(text in "([ab#<>]{0,3}\n){0,12}", block in "[xyz]{0,5}") {
            let once = with_block(&text, "#<", "#>", &block);
            prop_assert_eq!(with_block(&once, "#<", "#>", &block), once);
        }
    }
}
