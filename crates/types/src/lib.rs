//! Words of the project as types: ids, units, shapes, the clock.
//!
//! Invariants: knows no I/O but the random source that ids come from; every id is parsed (validated)
//! before it exists, is globally unique, and is safe as a file name, a host name label and a URL segment.

mod clock;
mod id;
mod shape;

pub use clock::{Clock, ManualClock, SystemClock};
pub use id::{BuildId, IdError, KeyId, RuntimeId, SandboxId, SnapshotId, TemplateId, random_hex};
pub use jiff::Timestamp;
pub use shape::{EngineKind, Generation, Shape, ShapeError, UnknownEngine};
