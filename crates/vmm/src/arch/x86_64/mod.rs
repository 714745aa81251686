//! x86-64: the machine that a guest sees, and how it is started.

pub mod layout;
