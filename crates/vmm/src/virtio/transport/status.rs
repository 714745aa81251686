//! The device status: which writes of the guest are steps of its initialisation (VIRTIO 1.2, 2.1 and 3.1.1).
//!
//! ```text
//!   0 ── ACKNOWLEDGE ── DRIVER ── FEATURES_OK ── DRIVER_OK        writing 0 leads back to 0 from everywhere,
//!                                 (features fit)  (queues live)   FAILED may be set everywhere
//! ```

use virtio_bindings::virtio_config::{
    VIRTIO_CONFIG_S_ACKNOWLEDGE, VIRTIO_CONFIG_S_DRIVER, VIRTIO_CONFIG_S_DRIVER_OK, VIRTIO_CONFIG_S_FAILED,
    VIRTIO_CONFIG_S_FEATURES_OK, VIRTIO_CONFIG_S_NEEDS_RESET,
};

const fn bit(bit: u32) -> u8 {
    assert!(bit <= 0x80, "a status bit fits into 8 bits");
    #[allow(clippy::cast_possible_truncation, reason = "checked in the line above")]
    let bit = bit as u8;
    bit
}

pub const ACKNOWLEDGE: u8 = bit(VIRTIO_CONFIG_S_ACKNOWLEDGE);
pub const DRIVER: u8 = bit(VIRTIO_CONFIG_S_DRIVER);
pub const DRIVER_OK: u8 = bit(VIRTIO_CONFIG_S_DRIVER_OK);
pub const FEATURES_OK: u8 = bit(VIRTIO_CONFIG_S_FEATURES_OK);
pub const NEEDS_RESET: u8 = bit(VIRTIO_CONFIG_S_NEEDS_RESET);
pub const FAILED: u8 = bit(VIRTIO_CONFIG_S_FAILED);

const ORDER: [u8; 4] = [ACKNOWLEDGE, DRIVER, FEATURES_OK, DRIVER_OK];

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Step {
    Reset,
    /// The new status; `activate`: DRIVER_OK was just set.
    Status {
        status: u8,
        activate: bool,
    },
}

/// What the guest's write of `written` does to `status`. Bits out of order are not taken.
#[must_use]
pub fn step(status: u8, written: u8, features_fit: bool) -> Step {
    if written == 0 {
        return Step::Reset;
    }
    if written & FAILED != 0 || status & FAILED != 0 {
        return Step::Status { status: status | FAILED, activate: false };
    }
    let mut new = status;
    if written & status == status {
        for bit in ORDER {
            let fits = bit != FEATURES_OK || features_fit;
            if written & bit == 0 || !fits {
                break;
            }
            new |= bit;
        }
    }
    Step::Status { status: new, activate: new & !status & DRIVER_OK != 0 }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn the_straight_way_leads_to_activation() {
        let mut status = 0;
        for (bit, activates) in
            [(ACKNOWLEDGE, false), (DRIVER, false), (FEATURES_OK, false), (DRIVER_OK, true)]
        {
            let next = step(status, status | bit, true);
            status |= bit;
            assert_eq!(next, Step::Status { status, activate: activates });
        }
        assert_eq!(step(status, status, true), Step::Status { status, activate: false }, "only once");
    }

    #[test]
    fn features_that_do_not_fit_stop_it() {
        let status = ACKNOWLEDGE | DRIVER;
        let written = status | FEATURES_OK | DRIVER_OK;
        assert_eq!(step(status, written, false), Step::Status { status, activate: false });
    }

    proptest! {
        #[test]
        fn bits_only_come_in_order_and_go_only_by_reset(writes in prop::collection::vec(any::<(u8, bool)>(), 0..50)) {
            let mut status = 0;
            let mut active = false;
            for (written, fit) in writes {
                match step(status, written, fit) {
                    Step::Reset => (status, active) = (0, false),
                    Step::Status { status: new, activate } => {
                        prop_assert_eq!(new & status, status);
                        prop_assert!(!(activate && active), "activated twice");
                        active |= activate;
                        status = new;
                    }
                }
                let known = status & !FAILED;
                prop_assert!([0, 1, 3, 11, 15].contains(&known));
                prop_assert_eq!(active, status & DRIVER_OK != 0);
            }
        }
    }
}
