//! The agent, embedded: a static executable that `build.rs` built.

/// The executable's bytes.
pub const AGENT: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/agent"));

#[cfg(test)]
mod tests {
    use super::AGENT;

    /// In a sandbox there may be no C library, or another one: the agent must not ask for an
    /// interpreter (program header type 3, PT_INTERP).
    #[test]
    fn the_agent_is_a_static_executable() {
        assert_eq!(AGENT.get(..5), Some(&b"\x7fELF\x02"[..]), "a 64-bit ELF file");
        let number = |at: usize, len: usize| {
            AGENT[at..at + len].iter().rev().fold(0_usize, |sum, byte| sum << 8 | usize::from(*byte))
        };
        let (table, size, count) = (number(32, 8), number(54, 2), number(56, 2));
        let types: Vec<usize> = (0..count).map(|index| number(table + index * size, 4)).collect();
        assert!(types.contains(&1), "it has segments to load: {types:?}");
        assert!(!types.contains(&3), "it has no interpreter: {types:?}");
    }
}
