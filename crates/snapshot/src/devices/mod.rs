//! The file `devices` of a microVM's snapshot: everything that is neither guest memory nor disk.
//!
//! An [`Envelope`] of sections; each section is one part's state, encoded and validated by that part's own type
//! here. Layout: `docs/formats/devices.md`.

mod envelope;
mod inventory;
pub mod virtio;
pub mod x86;

pub use envelope::{
    DEVICES_BYTES_MAX, DEVICES_MAGIC, DEVICES_VERSION, Envelope, EnvelopeError, SECTIONS_MAX, Section,
    SectionKind,
};
pub use inventory::{DISKS_MAX, DiskRecord, Inventory, InventoryError, LAYERS_MAX};
