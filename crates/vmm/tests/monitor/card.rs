//! A machine with a network card, over real taps: the jail lets a monitor use them, and every life has its own.

use std::os::fd::AsFd;

use dormouse_vmm::control::Machine;

use super::grow;
use super::rig::{COUNTER, Rig, connect, machine};

pub fn a_card_goes_from_tap_to_tap() {
    let mut rig = Rig::new();
    let machine = Machine { net: true, ..machine(16) };
    let kernel = rig.probe(COUNTER, 1);
    let (dir, mut source) = rig.boot(&machine, &kernel);
    grow(&dir);
    // As when a keeper is replaced: under the running guest.
    let ends = rig.ends(true);
    source.carrier(&ends.iter().map(AsFd::as_fd).collect::<Vec<_>>()).unwrap();
    grow(&dir);
    let without_tap = rig.ends(false);
    assert!(source.carrier(&without_tap.iter().map(AsFd::as_fd).collect::<Vec<_>>()).is_err());
    let mut source = connect(&dir);
    let (children, _) = rig.fork_with(&mut source, 3, true);
    for child in &children {
        connect(child).resume().unwrap();
        grow(child);
    }
    let into = rig.folder();
    source.checkpoint(into.clone(), false).unwrap();
    let (restored, mut client) = rig.restore(&machine, &into);
    client.resume().unwrap();
    grow(&restored);
    grow(&dir);
}
