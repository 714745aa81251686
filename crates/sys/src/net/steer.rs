//! One listener for every port: a program of the kernel's socket lookup
//! (kernel documentation, bpf/prog_sk_lookup; bpf(2)).
//!
//! ```text
//! r6 = context                       only TCP is steered; a datagram finds its socket or none, as ever
//! if context.protocol != TCP: pass
//! socket = sockets[0]
//! if socket: assign(context, socket); release(socket)
//! pass
//! ```

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};

/// `enum bpf_cmd` of linux/bpf.h.
const MAP_CREATE: libc::c_int = 0;
const MAP_UPDATE: libc::c_int = 2;
const PROGRAM_LOAD: libc::c_int = 5;
const LINK_CREATE: libc::c_int = 28;
const MAP_TYPE_SOCKMAP: u32 = 15;
const PROGRAM_TYPE_SK_LOOKUP: u32 = 30;
const ATTACH_SK_LOOKUP: u32 = 36;
const CALL_MAP_LOOKUP: i32 = 1;
const CALL_SOCKET_RELEASE: i32 = 86;
const CALL_SOCKET_ASSIGN: i32 = 124;
/// Of `protocol` in `struct bpf_sk_lookup`.
const PROTOCOL_OFFSET: i16 = 12;
const PROTOCOL_TCP: i32 = 6;
const PASS: i32 = 1;
/// None of the functions that it calls asks for another one.
const LICENSE: &[u8; 11] = b"Apache-2.0\0";

/// `union bpf_attr`, the part of each command.
#[repr(C)]
#[derive(Default)]
struct MapCreate {
    kind: u32,
    key_bytes: u32,
    value_bytes: u32,
    entries_max: u32,
    flags: u32,
}

#[repr(C)]
struct MapUpdate {
    map: u32,
    padding: u32,
    key: *const u32,
    value: *const u64,
    flags: u64,
}

#[repr(C)]
struct ProgramLoad {
    kind: u32,
    instructions: u32,
    code: *const Instruction,
    license: *const u8,
    log_level: u32,
    log_bytes: u32,
    log: *mut u8,
    kernel_version: u32,
    flags: u32,
    name: [u8; 16],
    interface: u32,
    expected_attach: u32,
}

#[repr(C)]
struct LinkCreate {
    program: u32,
    target: u32,
    attach: u32,
    flags: u32,
}

/// `struct bpf_insn`; `registers`: destination in the low half, source in the high one.
#[repr(C)]
#[derive(Clone, Copy)]
struct Instruction {
    code: u8,
    registers: u8,
    offset: i16,
    immediate: i32,
}

const fn op(code: u8, to: u8, from: u8, offset: i16, immediate: i32) -> Instruction {
    Instruction { code, registers: from << 4 | to, offset, immediate }
}

const fn copy(to: u8, from: u8) -> Instruction {
    op(0xbf, to, from, 0, 0)
}

const fn set(to: u8, immediate: i32) -> Instruction {
    op(0xb7, to, 0, 0, immediate)
}

const fn call(function: i32) -> Instruction {
    op(0x85, 0, 0, 0, function)
}

/// Jumps count from the next instruction.
const fn program(map: RawFd) -> [Instruction; 19] {
    const LOAD_MAP: u8 = 1;
    [
        copy(6, 1),
        // r2 = context.protocol
        op(0x61, 2, 6, PROTOCOL_OFFSET, 0),
        op(0x55, 2, 0, 14, PROTOCOL_TCP),
        // The key, 0, on the stack.
        op(0x62, 10, 0, -4, 0),
        copy(2, 10),
        op(0x07, 2, 0, 0, -4),
        // r1 = the map: two slots long.
        op(0x18, 1, LOAD_MAP, 0, map),
        op(0, 0, 0, 0, 0),
        call(CALL_MAP_LOOKUP),
        op(0x15, 0, 0, 7, 0),
        copy(7, 0),
        copy(1, 6),
        copy(2, 7),
        set(3, 0),
        call(CALL_SOCKET_ASSIGN),
        copy(1, 7),
        call(CALL_SOCKET_RELEASE),
        set(0, PASS),
        op(0x95, 0, 0, 0, 0),
    ]
}

/// Every connection within the namespace comes to the listener, as long as what is given back is open.
pub fn tcp_to(listener: BorrowedFd<'_>, namespace: BorrowedFd<'_>) -> io::Result<OwnedFd> {
    let map = sockets(listener)?;
    let code = program(map.as_raw_fd());
    let load = ProgramLoad {
        kind: PROGRAM_TYPE_SK_LOOKUP,
        instructions: u32::try_from(code.len()).map_err(io::Error::other)?,
        code: code.as_ptr(),
        license: LICENSE.as_ptr(),
        log_level: 0,
        log_bytes: 0,
        log: std::ptr::null_mut(),
        kernel_version: 0,
        flags: 0,
        name: *b"dormouse_steer\0\0",
        interface: 0,
        expected_attach: ATTACH_SK_LOOKUP,
    };
    // SAFETY: the command's own part of `bpf_attr`; the code and the licence that it points to outlive the call.
    let program = owned(unsafe { bpf(PROGRAM_LOAD, &load) })?;
    let link = LinkCreate {
        program: number(program.as_raw_fd())?,
        target: number(namespace.as_raw_fd())?,
        attach: ATTACH_SK_LOOKUP,
        flags: 0,
    };
    // SAFETY: the command's own part of `bpf_attr`, without pointers.
    owned(unsafe { bpf(LINK_CREATE, &link) })
}

/// A map with the listener in it.
fn sockets(listener: BorrowedFd<'_>) -> io::Result<OwnedFd> {
    let create = MapCreate {
        kind: MAP_TYPE_SOCKMAP,
        key_bytes: 4,
        value_bytes: 8,
        entries_max: 1,
        ..MapCreate::default()
    };
    // SAFETY: the command's own part of `bpf_attr`, without pointers.
    let map = owned(unsafe { bpf(MAP_CREATE, &create) })?;
    let (key, value) = (0_u32, u64::from(number(listener.as_raw_fd())?));
    let update = MapUpdate { map: number(map.as_raw_fd())?, padding: 0, key: &key, value: &value, flags: 0 };
    // SAFETY: the command's own part of `bpf_attr`; key and value have the map's sizes and outlive the call.
    if unsafe { bpf(MAP_UPDATE, &update) } < 0 { Err(io::Error::last_os_error()) } else { Ok(map) }
}

/// # Safety
///
/// `attributes` is what the command reads of `bpf_attr`; its pointers are as the command wants them.
unsafe fn bpf<T>(command: libc::c_int, attributes: &T) -> libc::c_long {
    // SAFETY: the kernel reads as many bytes as it is told, and takes what is missing for zeros.
    unsafe { libc::syscall(libc::SYS_bpf, command, std::ptr::from_ref(attributes), size_of::<T>()) }
}

fn number(fd: RawFd) -> io::Result<u32> {
    u32::try_from(fd).map_err(io::Error::other)
}

fn owned(fd: libc::c_long) -> io::Result<OwnedFd> {
    let fd = RawFd::try_from(fd).ok().filter(|fd| *fd >= 0).ok_or_else(io::Error::last_os_error)?;
    // SAFETY: the kernel made it just now, close-on-exec, and nobody else has it.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}
