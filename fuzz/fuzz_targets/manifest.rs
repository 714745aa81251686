#![no_main]
//! Whatever decodes, encodes to what decodes to the same.

use dormouse_snapshot::Manifest;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| {
    if let Ok(manifest) = Manifest::decode(bytes) {
        let again = manifest.encode().expect("a decoded manifest can be encoded");
        assert_eq!(Manifest::decode(&again).as_ref(), Ok(&manifest));
    }
});
