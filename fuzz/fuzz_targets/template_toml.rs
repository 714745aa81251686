#![no_main]
//! Any text is a template or refused; what is accepted stays within the limits.

use dormouse_image::template::{STEPS_MAX, Template, check_alias};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|text: &str| {
    if let Ok(template) = Template::parse("dormouse.toml", text) {
        assert!(template.shape.validate().is_ok());
        assert!(template.aliases.iter().all(|alias| check_alias(alias).is_ok()));
        assert!(template.instructions.len() <= STEPS_MAX + 3);
    }
});
