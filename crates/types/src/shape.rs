//! What a sandbox is made of, and on what it runs.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

/// What isolates a sandbox.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum EngineKind {
    Microvm,
    Gvisor,
}

#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("there is no engine {0:?}: use microvm or gvisor")]
pub struct UnknownEngine(pub String);

impl fmt::Display for EngineKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Microvm => "microvm",
            Self::Gvisor => "gvisor",
        })
    }
}

impl FromStr for EngineKind {
    type Err = UnknownEngine;

    fn from_str(given: &str) -> Result<Self, UnknownEngine> {
        match given {
            "microvm" => Ok(Self::Microvm),
            "gvisor" => Ok(Self::Gvisor),
            other => Err(UnknownEngine(other.to_owned())),
        }
    }
}

/// Counts the restores of a sandbox. What carries an older generation than the current one is stale.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Default, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Generation(pub u64);

impl Generation {
    #[must_use]
    pub fn next(self) -> Self {
        Self(self.0 + 1)
    }
}

impl fmt::Display for Generation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.0)
    }
}

/// The limits of a sandbox.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Shape {
    pub cpus: u32,
    pub memory_mib: u32,
    pub disk_mib: u32,
    pub processes_max: u32,
}

#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{field} = {given} is outside {min}..={max}")]
pub struct ShapeError {
    pub field: &'static str,
    pub given: u32,
    pub min: u32,
    pub max: u32,
}

impl Shape {
    /// Checks each limit against what any engine could give.
    pub fn validate(self) -> Result<Self, ShapeError> {
        let check = |field, given, min, max| {
            if (min..=max).contains(&given) { Ok(()) } else { Err(ShapeError { field, given, min, max }) }
        };
        check("cpus", self.cpus, 1, 64)?;
        check("memory_mib", self.memory_mib, 64, 65_536)?;
        check("disk_mib", self.disk_mib, 64, 1_048_576)?;
        check("processes_max", self.processes_max, 16, 65_536)?;
        Ok(self)
    }
}

impl Default for Shape {
    fn default() -> Self {
        Self { cpus: 2, memory_mib: 1024, disk_mib: 10_240, processes_max: 2048 }
    }
}
