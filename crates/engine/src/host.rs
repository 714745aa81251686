//! What this host is, as far as a snapshot's restore depends on it.

/// CPU features that a program can see and use: an image that was made with one needs it.
/// Prefixes of the kernel's names in `/proc/cpuinfo`.
const FEATURES: [&str; 40] = [
    "abm",
    "adx",
    "aes",
    "amx",
    "avx",
    "bmi",
    "cldemote",
    "clflushopt",
    "clwb",
    "cmov",
    "cx16",
    "cx8",
    "erms",
    "f16c",
    "fma",
    "fsgsbase",
    "fsrm",
    "fxsr",
    "gfni",
    "lahf_lm",
    "mmx",
    "movbe",
    "movdir",
    "pclmulqdq",
    "pku",
    "pni",
    "popcnt",
    "rdpid",
    "rdrand",
    "rdseed",
    "rdtscp",
    "sha_ni",
    "sse",
    "ssse3",
    "tsc",
    "vaes",
    "vpclmulqdq",
    "waitpkg",
    "xop",
    "xsave",
];

/// Sorted, without repetition; empty where the kernel does not tell.
pub(crate) fn cpu_features() -> Vec<String> {
    parse(&std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default())
}

fn parse(cpuinfo: &str) -> Vec<String> {
    let flags = cpuinfo
        .lines()
        .find_map(|line| line.strip_prefix("flags")?.split_once(':').map(|(_, flags)| flags))
        .unwrap_or_default();
    let counts =
        |flag: &&str| FEATURES.iter().any(|prefix| flag.starts_with(prefix)) && !flag.starts_with("tsc_");
    let mut found: Vec<String> = flags.split_ascii_whitespace().filter(counts).map(str::to_owned).collect();
    found.sort();
    found.dedup();
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn features_that_a_program_sees_are_kept() {
        let text = "processor : 0\nflags\t\t: fpu avx2 sse4_2 arat tsc_deadline_timer avx2 constant_tsc\n";
        assert_eq!(parse(text), ["avx2", "sse4_2"]);
        assert!(parse("").is_empty());
    }
}
