//! The monitor: the process that runs one microVM.
