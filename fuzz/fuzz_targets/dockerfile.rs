#![no_main]
//! Any text is a Dockerfile or refused, with a line that the text has.

use dormouse_image::template::Template;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|text: &str| {
    let lines = text.lines().count().max(1);
    let line = match Template::parse("Dockerfile", text) {
        Ok(template) => template.instructions.last().map(|it| it.line),
        Err(error) => error.line,
    };
    assert!(line.is_none_or(|line| (1..=lines).contains(&(line as usize))));
});
