//! Guest memory.

/// All of a guest's RAM: one or two regions, below and above the hole for devices.
pub type GuestMemory = vm_memory::GuestMemoryMmap<()>;
