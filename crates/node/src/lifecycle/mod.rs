//! One sandbox's life as a pure function: `step(machine, event) -> (machine, actions)`.
//!
//! Owns: which request is answered when and how, what is begun next, and what is true after each
//! outcome. Does no I/O and reads no clock; the time is in the event. The actor (`crate::actor`)
//! carries the actions out, one sandbox's in order.
//!
//! ```text
//!               create            freeze
//!   (nothing) ─────────> Running ────────> Frozen          at rest: Running, Frozen, Paused, Failed, Gone
//!                         │ ▲  ▲ <──────── │               in between: Busy { work, from }
//!              checkpoint └─┘  │   thaw    │
//!                         │    │           │ (thaws, then pauses)
//!                   pause │    │ resume    │
//!                         ▼    │           │
//!                        Paused ◄──────────┘
//!                         │ ▲
//!        Failed ─rollback─┴─┴─> Running          any ──kill──> Busy{Destroy} ──> Gone
//! ```
//!
//! In prose:
//! - **Busy**: one piece of work runs. Requests that arrive wait in a bounded queue, in order. A kill
//!   goes before all of them and starts as soon as the work has ended; a change of the deadline is
//!   answered at once.
//! - **create**: done → Running. Not done → everything is removed, the caller gets the reason.
//! - **freeze**, **thaw**: Running ⇄ Frozen; not done → where it was. What needs a running sandbox
//!   thaws a frozen one first.
//! - **checkpoint**: done → Running, the new snapshot is the head. Not done → Running, and says why.
//! - **fork**: done → Running, copies exist; their own machines begin at create. Not done → Running, and
//!   says why. Asked of a paused one: answered with the snapshot to start them from.
//! - **pause**: done → Paused on the new snapshot. Not done → Running, and says why; one that the
//!   deadline asked for is tried again after [`RETRY_MS`].
//!   One that idleness asked for ends with the next thing that wants the sandbox, as a frozen one does.
//! - **resume**: done → Running under the next generation. Not done → Paused on the same snapshot; if
//!   the new runtime had already run, the carrier's session cannot go on ([`Machine::carrier_broken`]).
//! - **roll back**: done → Running on the target. Failed before the old runtime was stopped → as
//!   before. Failed after → Paused on the target (asked for, verified, restorable again).
//! - **replace the keeper**: the keeper ended under a running sandbox: checkpoint, stop, restore with a
//!   new session. Not done → Paused on that snapshot, or Failed when there is none.
//! - **ended**: the runtime ended by itself → Failed with the reason; only a rollback or a kill leads on.
//! - **kill**: written down first, then carried out. Not done → Failed with the reason, kill again.
//!
//! Fences: an outcome counts only for the operation number that runs; an end only for the generation
//! that serves; idleness only if nothing was asked for since it was measured.
//!
//! After the daemon died, `recover` makes the machine of what the journal holds and what the engine
//! and the store found; the same invariants hold (`tests`).

mod machine;
mod recover;
mod step;
#[cfg(test)]
mod tests;

pub use machine::{
    Action, Busy, Caller, Ended, Event, EventKind, IdleTier, Machine, NOBODY, Outcome, Phase, QUEUE_MAX,
    RETRY_MS, Reply, Request, Rest, Work,
};
pub use recover::{Found, recover};
pub use step::step;
