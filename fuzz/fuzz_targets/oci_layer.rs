#![no_main]
//! No archive changes anything beside the root it is unpacked into.

use std::fs;

use dormouse_image::{Applied, Limits, apply_layer};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| {
    let dir = tempfile::tempdir().expect("a folder for the test");
    let (root, outside) = (dir.path().join("root"), dir.path().join("outside"));
    fs::create_dir(&root).expect("the root");
    fs::write(&outside, "as it was").expect("a file beside it");
    let limits = Limits { bytes_max: 1 << 20, entries_max: 1000, ..Limits::default() };
    let mut reader = bytes;
    let _ = apply_layer(&root, &mut reader, "fuzzed", &limits, &mut Applied::default());
    assert_eq!(fs::read_to_string(&outside).expect("the file beside it"), "as it was");
    assert_eq!(fs::read_dir(dir.path()).expect("the folder").count(), 2);
});
