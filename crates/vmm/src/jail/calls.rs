//! The system calls that are allowed.

use std::collections::BTreeMap;

use libc::*;
use seccompiler::{BackendError, SeccompCmpArgLen, SeccompCmpOp, SeccompCondition, SeccompRule};

type Rules = BTreeMap<i64, Vec<SeccompRule>>;

/// `KVM_RUN` of linux/kvm.h.
const KVM_RUN: u64 = 0xae80;

/// What any thread needs to live: memory, locks, time, its own end.
const LIFE: &[i64] = &[
    SYS_brk,
    SYS_clock_getres,
    SYS_clock_gettime,
    SYS_clock_nanosleep,
    SYS_exit,
    SYS_exit_group,
    SYS_futex,
    SYS_getpid,
    SYS_getrandom,
    SYS_gettid,
    SYS_gettimeofday,
    SYS_madvise,
    SYS_membarrier,
    SYS_mmap,
    SYS_mprotect,
    SYS_mremap,
    SYS_munmap,
    SYS_nanosleep,
    SYS_restart_syscall,
    SYS_rseq,
    SYS_rt_sigaction,
    SYS_rt_sigprocmask,
    SYS_rt_sigreturn,
    SYS_sched_getaffinity,
    SYS_sched_yield,
    SYS_set_robust_list,
    SYS_sigaltstack,
    SYS_tgkill,
    SYS_time,
];

/// What devices do on a vCPU's thread: the serial port's log, the reset of a device that closes what it had.
const DEVICES_ON_VCPU: &[i64] = &[
    SYS_close,
    SYS_epoll_ctl,
    SYS_fcntl,
    SYS_ftruncate,
    SYS_lseek,
    SYS_pread64,
    SYS_pwrite64,
    SYS_read,
    SYS_readv,
    SYS_shutdown,
    SYS_write,
    SYS_writev,
];

/// Files, sockets, events, processes: the device thread, scribes, children that set themselves up.
const DEVICES: &[i64] = &[
    SYS_accept4,
    SYS_bind,
    SYS_close_range,
    SYS_copy_file_range,
    SYS_dup,
    SYS_dup2,
    SYS_dup3,
    SYS_epoll_create1,
    SYS_epoll_pwait,
    SYS_epoll_pwait2,
    SYS_epoll_wait,
    SYS_eventfd2,
    SYS_faccessat,
    SYS_faccessat2,
    SYS_fadvise64,
    SYS_fallocate,
    SYS_fdatasync,
    SYS_fstat,
    SYS_fsync,
    SYS_getcwd,
    SYS_getdents64,
    SYS_getpeername,
    SYS_getppid,
    SYS_getrusage,
    SYS_getsockname,
    SYS_getsockopt,
    // A forked child's own domain: a further one only forbids.
    SYS_landlock_add_rule,
    SYS_landlock_create_ruleset,
    SYS_landlock_restrict_self,
    SYS_linkat,
    SYS_listen,
    SYS_lstat,
    SYS_newfstatat,
    SYS_open,
    SYS_openat,
    SYS_pidfd_open,
    SYS_pidfd_send_signal,
    SYS_pipe2,
    SYS_poll,
    SYS_ppoll,
    SYS_prctl,
    SYS_preadv,
    SYS_prlimit64,
    SYS_pwritev,
    SYS_readlink,
    SYS_readlinkat,
    SYS_recvfrom,
    SYS_recvmsg,
    SYS_rename,
    SYS_renameat,
    SYS_renameat2,
    SYS_seccomp,
    SYS_sendmsg,
    SYS_sendto,
    SYS_set_tid_address,
    SYS_setsockopt,
    SYS_stat,
    SYS_statx,
    SYS_sync_file_range,
    SYS_sysinfo,
    SYS_tkill,
    SYS_uname,
    SYS_unlink,
    SYS_unlinkat,
    SYS_wait4,
    SYS_waitid,
];

/// The kinds of ioctl(2), bits 8 to 15 of its number: KVM's; those of a tap and of every descriptor; userfaultfd's.
const IOCTL_KINDS: [u64; 3] = [0xae00, 0x5400, 0xaa00];
/// Kind and number of PAGEMAP_SCAN: others of its kind change files' attributes.
const PAGEMAP_SCAN: u64 = 0x6610;

/// Of clone(2): every flag that makes a namespace, or a process that is not the monitor's child.
const CLONE_FORBIDDEN: u64 = 0x7e02_0000 | 0x80 | 0x8000;

fn all(lists: &[&[i64]]) -> Rules {
    lists.iter().copied().flatten().map(|call| (*call, Vec::new())).collect()
}

fn argument(number: u8, operator: SeccompCmpOp, value: u64) -> Result<Vec<SeccompRule>, BackendError> {
    let condition = SeccompCondition::new(number, SeccompCmpArgLen::Dword, operator, value)?;
    Ok(vec![SeccompRule::new(vec![condition])?])
}

/// For the thread of a vCPU.
pub fn vcpu() -> Result<Rules, BackendError> {
    let mut rules = all(&[LIFE, DEVICES_ON_VCPU]);
    rules.insert(SYS_ioctl, argument(1, SeccompCmpOp::Eq, KVM_RUN)?);
    Ok(rules)
}

/// For the thread of a disk: its files, and waiting for the guest.
pub fn worker() -> Result<Rules, BackendError> {
    let disk = &[SYS_fallocate, SYS_fdatasync, SYS_fsync, SYS_poll, SYS_ppoll];
    Ok(all(&[LIFE, DEVICES_ON_VCPU, disk]))
}

/// For every other thread and process of the monitor, and an upper bound for its vCPUs.
pub fn devices() -> Result<Rules, BackendError> {
    let mut rules = all(&[LIFE, DEVICES_ON_VCPU, DEVICES]);
    let unix = u64::from(AF_UNIX.unsigned_abs());
    rules.insert(SYS_socket, argument(0, SeccompCmpOp::Eq, unix)?);
    rules.insert(SYS_socketpair, argument(0, SeccompCmpOp::Eq, unix)?);
    let mut ioctls = argument(1, SeccompCmpOp::MaskedEq(0xffff), PAGEMAP_SCAN)?;
    for kind in IOCTL_KINDS {
        ioctls.extend(argument(1, SeccompCmpOp::MaskedEq(0xff00), kind)?);
    }
    rules.insert(SYS_ioctl, ioctls);
    rules.insert(SYS_clone, argument(0, SeccompCmpOp::MaskedEq(CLONE_FORBIDDEN), 0)?);
    // For the filter that has clone3 answered with ENOSYS: that answer wins over this one.
    rules.insert(SYS_clone3, Vec::new());
    Ok(rules)
}
