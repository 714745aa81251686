//! The daemon's core: sandbox actors, journal, deadlines, tiers.

pub mod model;
