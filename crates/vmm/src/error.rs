//! Why operations on a VM fail.
