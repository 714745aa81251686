//! Decisions without I/O: egress.
