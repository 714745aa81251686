#![no_main]
//! Whatever decodes, encodes to the same bytes.

use dormouse_snapshot::WorkingSet;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| {
    if let Ok(set) = WorkingSet::decode(bytes) {
        assert_eq!(set.encode().expect("a decoded set can be encoded"), bytes);
    }
});
