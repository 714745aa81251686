#![no_main]
//! Chains of layers: their merged view answers as looking down page by page does.

use dormouse_vmm::layers::{Extents, Merged};
use libfuzzer_sys::fuzz_target;

const SPAN: u64 = 256;

fuzz_target!(|layers: Vec<Vec<(u8, u8)>>| {
    let mut merged = Merged::default();
    let mut model = vec![None; SPAN as usize];
    for (number, ranges) in layers.iter().take(16).enumerate() {
        let mut extents = Extents::default();
        let mut at = 0;
        for (gap, len) in ranges {
            let start = at + u64::from(*gap);
            let end = start + u64::from(*len) + 1;
            if end > SPAN {
                break;
            }
            extents.push(start..end);
            model[start as usize..end as usize].fill(Some(number));
            at = end;
        }
        merged.overlay(&extents, number);
    }
    let mut at = 0;
    while at < SPAN {
        let (layer, end) = merged.find(at, SPAN);
        assert!(end > at && end <= SPAN);
        assert!(model[at as usize..end as usize].iter().all(|other| *other == layer));
        at = end;
    }
    let pieces: Vec<_> = merged.iter().collect();
    assert!(pieces.windows(2).all(|pair| pair[0].end <= pair[1].start));
});
