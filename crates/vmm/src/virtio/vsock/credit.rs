//! Credit: how much each side may send before the other has taken it (VIRTIO 1.2, 5.10.6.3).
//!
//! All counters wrap around at 2^32. Those of the guest may lie: then it gets less, never more than it offered.

/// The counters of one stream.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Credit {
    /// What we offer: the most that `unsent` of the stream may hold.
    pub buf_alloc: u32,
    /// Bytes of the guest that reached the host's side.
    pub fwd_cnt: u32,
    /// The `fwd_cnt` that the guest knows.
    pub told_fwd_cnt: u32,
    /// Bytes sent to the guest.
    pub tx_cnt: u32,
    pub peer_buf_alloc: u32,
    pub peer_fwd_cnt: u32,
}

impl Credit {
    /// What the guest says of its side in every packet.
    pub fn update(&mut self, buf_alloc: u32, fwd_cnt: u32) {
        self.peer_buf_alloc = buf_alloc;
        self.peer_fwd_cnt = fwd_cnt;
    }

    /// Bytes that may be sent to the guest.
    #[must_use]
    pub fn for_guest(&self) -> u32 {
        self.peer_buf_alloc.saturating_sub(self.tx_cnt.wrapping_sub(self.peer_fwd_cnt))
    }

    pub fn sent(&mut self, bytes: u32) {
        self.tx_cnt = self.tx_cnt.wrapping_add(bytes);
    }

    /// `bytes` of the guest were taken by the host's side. True: the guest must be told, or it may run dry.
    pub fn forwarded(&mut self, bytes: u32) -> bool {
        self.fwd_cnt = self.fwd_cnt.wrapping_add(bytes);
        self.fwd_cnt.wrapping_sub(self.told_fwd_cnt) >= self.buf_alloc / 4
    }

    /// A packet that carries the counters is on its way.
    pub fn told(&mut self) {
        self.told_fwd_cnt = self.fwd_cnt;
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn a_guest_that_lies_gets_nothing() {
        let mut credit = Credit::default();
        credit.update(1000, 5);
        assert_eq!(credit.for_guest(), 0, "it says it took what was never sent");
        credit.update(1000, 0);
        credit.sent(600);
        credit.update(500, 0);
        assert_eq!(credit.for_guest(), 0, "it offers less than is under way");
    }

    proptest! {
        #[test]
        fn an_honest_guest_never_gets_more_than_it_offers(
            start in any::<u32>(), buf_alloc in 1..100_000_u32,
            steps in prop::collection::vec((any::<bool>(), 0..50_000_u32), 1..200),
        ) {
            let mut credit = Credit { tx_cnt: start, peer_fwd_cnt: start, ..Credit::default() };
            credit.update(buf_alloc, start);
            let (mut held, mut taken) = (0, start);
            for (send, bytes) in steps {
                if send {
                    let bytes = bytes.min(credit.for_guest());
                    credit.sent(bytes);
                    held += bytes;
                    prop_assert!(held <= buf_alloc);
                } else {
                    let bytes = bytes.min(held);
                    held -= bytes;
                    taken = taken.wrapping_add(bytes);
                    credit.update(buf_alloc, taken);
                    prop_assert_eq!(credit.for_guest(), buf_alloc - held);
                }
            }
        }

        #[test]
        fn a_guest_is_told_before_it_runs_dry(
            start in any::<u32>(), steps in prop::collection::vec(1..3000_u32, 1..200),
        ) {
            let mut credit =
                Credit { buf_alloc: 8192, fwd_cnt: start, told_fwd_cnt: start, ..Credit::default() };
            for bytes in steps {
                if credit.forwarded(bytes) {
                    credit.told();
                }
                prop_assert!(credit.fwd_cnt.wrapping_sub(credit.told_fwd_cnt) < 2048);
            }
        }
    }
}
