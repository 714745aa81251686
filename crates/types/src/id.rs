//! Ids: a lower-case prefix letter group and random base-32 characters, all matching `[a-z0-9]+`.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

/// Characters of an id: digits and lower-case letters without the look-alikes `i l o u`.
const ALPHABET: &[u8; 32] = b"0123456789abcdefghjkmnpqrstvwxyz";
/// Random characters of an id: 20 × 5 bits = 100 bits, so that two nodes never draw the same.
const RANDOM_CHARS: usize = 20;
const ID_CHARS_MAX: usize = 64;

/// An id was refused.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{what} id {given:?} is not valid: it must match [a-z0-9]+ and have at most 64 characters")]
pub struct IdError {
    pub what: &'static str,
    pub given: String,
}

/// `len` random bytes from the operating system, as lower-case hex.
#[must_use]
pub fn random_hex(len: usize) -> String {
    random_bytes(len).iter().map(|byte| format!("{byte:02x}")).collect()
}

fn random_bytes(len: usize) -> Vec<u8> {
    let mut bytes = vec![0_u8; len];
    // The kernel's random source cannot fail on the hosts that are supported; an id that is not
    // random would break uniqueness, so there is nothing better to do than to stop.
    if let Err(error) = getrandom::fill(&mut bytes) {
        panic!("the kernel's random source failed: {error}");
    }
    bytes
}

fn generate(prefix: &str) -> String {
    let random = random_bytes(RANDOM_CHARS);
    let chars = random.iter().map(|byte| char::from(ALPHABET[usize::from(byte % 32)]));
    prefix.chars().chain(chars).collect()
}

fn check(what: &'static str, given: &str) -> Result<(), IdError> {
    let fits = !given.is_empty()
        && given.len() <= ID_CHARS_MAX
        && given.bytes().all(|byte| byte.is_ascii_lowercase() || byte.is_ascii_digit());
    if fits { Ok(()) } else { Err(IdError { what, given: given.chars().take(80).collect() }) }
}

macro_rules! id {
    ($(#[$doc:meta])* $name:ident, $what:literal, $prefix:literal) => {
        $(#[$doc])*
        #[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
        #[serde(try_from = "String", into = "String")]
        pub struct $name(String);

        impl $name {
            /// A new, globally unique id.
            #[must_use]
            pub fn generate() -> Self {
                Self(generate($prefix))
            }

            #[must_use]
            pub fn as_str(&self) -> &str {
                &self.0
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(&self.0)
            }
        }

        impl FromStr for $name {
            type Err = IdError;

            fn from_str(given: &str) -> Result<Self, IdError> {
                check($what, given)?;
                Ok(Self(given.to_owned()))
            }
        }

        impl TryFrom<String> for $name {
            type Error = IdError;

            fn try_from(given: String) -> Result<Self, IdError> {
                check($what, &given)?;
                Ok(Self(given))
            }
        }

        impl From<$name> for String {
            fn from(id: $name) -> Self {
                id.0
            }
        }

        impl AsRef<str> for $name {
            fn as_ref(&self) -> &str {
                &self.0
            }
        }
    };
}

id!(
    /// One isolated identity. Kept over pause and resume, new after a fork.
    SandboxId, "sandbox", "s"
);
id!(
    /// One immutable state.
    SnapshotId, "snapshot", "snap"
);
id!(TemplateId, "template", "t");
id!(BuildId, "build", "b");
id!(KeyId, "key", "k");
id!(
    /// One incarnation of a sandbox on an engine: a runsc container or a monitor. A sandbox gets a
    /// new one with each restore, so that what is left of an old one can be told apart and removed.
    RuntimeId, "runtime", "r"
);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn generated_ids_parse_and_differ() {
        let (a, b) = (SandboxId::generate(), SandboxId::generate());
        assert_ne!(a, b);
        assert_eq!(a.as_str().parse::<SandboxId>(), Ok(a.clone()));
        assert_eq!(a.as_str().len(), 21);
    }

    #[test]
    fn hostile_ids_are_refused() {
        for given in ["", "../x", "A", "a-b", "a.b", "a/b", "ä", &"a".repeat(65)] {
            assert!(given.parse::<SandboxId>().is_err(), "{given:?} was accepted");
        }
    }
}
