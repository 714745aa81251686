//! Every OS call that needs `unsafe` or knowledge of kernel files: processes, cgroups, descriptors.
//!
//! Invariants: knows no sandbox and no tokio; all calls block, shortly or for a time that the caller
//! gives; what the kernel answers is parsed, never trusted to be well-formed.

pub mod cgroup;
#[allow(unsafe_code, reason = "pre_exec and setgroups/setresuid have no safe form")]
pub mod child;
pub mod fds;
pub mod files;
#[allow(unsafe_code, reason = "vsock addresses and the interfaces' ioctls have no safe form")]
pub mod guest;
#[allow(unsafe_code, reason = "clone(2) has no safe form")]
pub mod launch;
#[allow(unsafe_code, reason = "namespaces, interfaces and bpf(2) have no safe form")]
pub mod net;
pub mod process;
#[allow(unsafe_code, reason = "the random device's ioctls have no safe form")]
pub mod random;
pub mod spawn;
pub mod unix;
