//! Our own additions, under `/dormouse/v1/`: what E2B's API has no words for.

mod node;
mod sandbox;
mod snapshot;
mod template;

pub use node::{
    Check, CheckOutcome, DoctorReport, EngineReport, Event, GcReport, KeyInfo, NewKey, NodeInfo, Usage,
};
pub use sandbox::{
    CreateOptions, ForkResult, IdlePolicy, Lineage, LineageKind, Network, PauseResult, Receipt, Rollback,
    SandboxInfo, Shape, ShapeRequest, State, Tier,
};
pub use snapshot::{Checkpoint, Removed, SnapshotInfo};
pub use template::{BuildLine, BuildQuery, TemplateInfo};

/// Where all of it is found.
pub const PREFIX: &str = "/dormouse/v1";
