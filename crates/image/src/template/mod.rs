//! Template files.
