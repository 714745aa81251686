//! The fixed header: 64 bytes, little-endian, readable without the body.
//!
//! ```text
//! 0  magic "DORMOUSE"   8  format version u16   10 engine u8   11 architecture u8
//! 12 body length u32    16 BLAKE3 of bytes 0..16 and the body (32 bytes)     48 zero (16 bytes)
//! ```

use dormouse_types::EngineKind;

pub const MAGIC: [u8; 8] = *b"DORMOUSE";
pub const FORMAT_VERSION: u16 = 1;
pub const HEADER_BYTES: usize = 64;
pub const ARCH_X86_64: u8 = 1;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Header {
    pub version: u16,
    pub engine: EngineKind,
    pub arch: u8,
    pub body_bytes: u32,
    /// Of what stands before it and of the body: neither changes unnoticed.
    pub digest: [u8; 32],
}

#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum HeaderError {
    #[error("the file is {0} bytes long; a manifest's header alone has 64")]
    Short(usize),
    #[error("the file does not start with a manifest's magic bytes")]
    Magic,
    #[error("format version {0} is not known to this release (it reads version {FORMAT_VERSION})")]
    Version(u16),
    #[error("engine number {0} is not known")]
    Engine(u8),
    #[error("architecture number {0} is not known")]
    Arch(u8),
    #[error("reserved bytes of the header are not zero")]
    Reserved,
}

impl Header {
    #[must_use]
    pub fn encode(&self) -> [u8; HEADER_BYTES] {
        let mut bytes = [0_u8; HEADER_BYTES];
        bytes[..8].copy_from_slice(&MAGIC);
        bytes[8..10].copy_from_slice(&self.version.to_le_bytes());
        bytes[10] = match self.engine {
            EngineKind::Microvm => 1,
            EngineKind::Gvisor => 2,
        };
        bytes[11] = self.arch;
        bytes[12..16].copy_from_slice(&self.body_bytes.to_le_bytes());
        bytes[16..48].copy_from_slice(&self.digest);
        bytes
    }

    /// What `digest` must be for this header and body.
    #[must_use]
    pub fn digest_with(&self, body: &[u8]) -> [u8; 32] {
        let mut hasher = blake3::Hasher::new();
        hasher.update(&self.encode()[..16]).update(body);
        *hasher.finalize().as_bytes()
    }

    pub fn decode(bytes: &[u8]) -> Result<Self, HeaderError> {
        let Some(fixed) = bytes.first_chunk::<HEADER_BYTES>() else {
            return Err(HeaderError::Short(bytes.len()));
        };
        if fixed[..8] != MAGIC {
            return Err(HeaderError::Magic);
        }
        let version = u16::from_le_bytes([fixed[8], fixed[9]]);
        if version != FORMAT_VERSION {
            return Err(HeaderError::Version(version));
        }
        let engine = match fixed[10] {
            1 => EngineKind::Microvm,
            2 => EngineKind::Gvisor,
            other => return Err(HeaderError::Engine(other)),
        };
        if fixed[11] != ARCH_X86_64 {
            return Err(HeaderError::Arch(fixed[11]));
        }
        if fixed[48..].iter().any(|byte| *byte != 0) {
            return Err(HeaderError::Reserved);
        }
        let mut digest = [0_u8; 32];
        digest.copy_from_slice(&fixed[16..48]);
        let body_bytes = u32::from_le_bytes([fixed[12], fixed[13], fixed[14], fixed[15]]);
        Ok(Self { version, engine, arch: fixed[11], body_bytes, digest })
    }
}
