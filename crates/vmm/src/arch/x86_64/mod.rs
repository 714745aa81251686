//! x86-64: the machine that a guest sees, and how it is started.

pub mod acpi;
pub mod boot;
pub mod cpuid;
pub mod layout;
pub mod power;
mod registers;
pub mod regs;
pub mod state;
