//! vCPUs: one thread each.
