//! Wrong input of every kind gives a clear error and loses nothing: against the real executable and
//! real sandboxes.
//!
//! `cargo xtask test` says where both are (`DORMOUSE_TEST_BINARY`, `DORMOUSE_TEST_DATA`: a data folder
//! that was set up and that no daemon runs on). Without them these tests fail: a host that cannot run
//! them has not passed them.
#![allow(clippy::unwrap_used, reason = "tests")]

mod host;
mod inside;
mod lost;
mod place;
mod requests;
