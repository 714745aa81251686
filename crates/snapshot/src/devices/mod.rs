//! The file `devices` of a microVM's snapshot: everything that is neither guest memory nor disk.

pub mod virtio;
pub mod x86;
