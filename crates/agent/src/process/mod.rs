//! process.Process: the processes that clients start.
//!
//! Every process leads a session and a process group of its own; signals and deadlines reach the
//! whole group. A client that goes away never ends a process. Output is bounded (see [`output`]).

mod events;
mod fd;
mod output;
mod reaper;
mod registry;
mod service;
mod spawn;
mod supervise;

pub use reaper::{Exit, Reaper, Started};
pub use registry::Processes;
pub use service::router;
