//! The gVisor driver: runsc, its pool, its pipes.
