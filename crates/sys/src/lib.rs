//! Every OS call that needs `unsafe`, wrapped into something safe.
//!
//! Invariants: knows no sandbox and no tokio; nothing here decides anything.

#![allow(unsafe_code, reason = "this crate is where unsafe lives")]

pub mod child;
pub mod random;
