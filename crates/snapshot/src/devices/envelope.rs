//! The envelope: a header that is readable without the body, and sections.
//!
//! ```text
//! header  0  magic "DMDEVICE"   8  format version u16   10 architecture u8   11 zero
//!        12  length of the body u32   16 number of sections u16   18 zero (14 bytes)
//!        32  BLAKE3 of bytes 0..32 and the body (32 bytes)
//! body    per section: kind u16, index u16, length u32, bytes; sorted by kind and index
//! ```

use crate::header::ARCH_X86_64;

pub const DEVICES_MAGIC: [u8; 8] = *b"DMDEVICE";
pub const DEVICES_VERSION: u16 = 1;
/// A file over this is refused unread; real ones have some 10 KiB per vCPU and less per device.
pub const DEVICES_BYTES_MAX: usize = 16 << 20;
pub const SECTIONS_MAX: usize = 256;
const HEADER_BYTES: usize = 64;
const SECTION_HEAD_BYTES: usize = 8;

/// Whose state a section holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum SectionKind {
    /// What there is: [`super::Inventory`].
    Inventory,
    /// vCPUs, interrupt controllers, timers and the small devices: [`super::x86::MachineState`].
    Platform,
    /// One virtio device with its transport, by its place on the bus: [`super::virtio::VirtioState`].
    Virtio,
}

impl SectionKind {
    fn number(self) -> u16 {
        match self {
            Self::Inventory => 1,
            Self::Platform => 2,
            Self::Virtio => 3,
        }
    }

    fn from_number(number: u16) -> Option<Self> {
        [Self::Inventory, Self::Platform, Self::Virtio].into_iter().find(|kind| kind.number() == number)
    }
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Section {
    pub kind: SectionKind,
    pub index: u16,
    pub bytes: Vec<u8>,
}

/// Sections, sorted by kind and index, each pair once.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Envelope {
    sections: Vec<Section>,
}

#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum EnvelopeError {
    #[error("the file has {0} bytes: too few for a header, or more than a file of devices has")]
    Length(usize),
    #[error("the file does not start with the magic bytes of a file of devices")]
    Magic,
    #[error("format version {0} is not known to this release (it reads version {DEVICES_VERSION})")]
    Version(u16),
    #[error("architecture number {0} is not known")]
    Arch(u8),
    #[error("reserved bytes of the header are not zero")]
    Reserved,
    #[error("the content does not match its digest: the file is damaged")]
    Digest,
    #[error("section kind {0} is not known")]
    Kind(u16),
    #[error("the sections are not in order, or not as many as the header says, or cut off")]
    Sections,
    #[error("{0} sections are too many")]
    Count(usize),
    #[error("there is no section {kind:?} {index}")]
    Missing { kind: SectionKind, index: u16 },
}

impl Envelope {
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds a section; one of the same kind and index is replaced.
    pub fn put(&mut self, kind: SectionKind, index: u16, bytes: Vec<u8>) {
        let section = Section { kind, index, bytes };
        match self.position(kind, index) {
            Ok(at) => self.sections[at] = section,
            Err(at) => self.sections.insert(at, section),
        }
    }

    fn position(&self, kind: SectionKind, index: u16) -> Result<usize, usize> {
        self.sections.binary_search_by_key(&(kind, index), |section| (section.kind, section.index))
    }

    pub fn get(&self, kind: SectionKind, index: u16) -> Result<&[u8], EnvelopeError> {
        let at = self.position(kind, index).map_err(|_| EnvelopeError::Missing { kind, index })?;
        Ok(&self.sections[at].bytes)
    }

    /// How many sections there are of a kind, and so the first index that is free if none was left out.
    #[must_use]
    pub fn count(&self, kind: SectionKind) -> usize {
        self.sections.iter().filter(|section| section.kind == kind).count()
    }

    #[must_use]
    pub fn sections(&self) -> &[Section] {
        &self.sections
    }

    pub fn encode(&self) -> Result<Vec<u8>, EnvelopeError> {
        let count = u16::try_from(self.sections.len()).ok();
        let count = count.filter(|count| usize::from(*count) <= SECTIONS_MAX);
        let count = count.ok_or(EnvelopeError::Count(self.sections.len()))?;
        let mut body = Vec::new();
        for section in &self.sections {
            let len =
                u32::try_from(section.bytes.len()).map_err(|_| EnvelopeError::Length(section.bytes.len()))?;
            body.extend_from_slice(&section.kind.number().to_le_bytes());
            body.extend_from_slice(&section.index.to_le_bytes());
            body.extend_from_slice(&len.to_le_bytes());
            body.extend_from_slice(&section.bytes);
        }
        let whole = HEADER_BYTES + body.len();
        let body_bytes = u32::try_from(body.len())
            .ok()
            .filter(|_| whole <= DEVICES_BYTES_MAX)
            .ok_or(EnvelopeError::Length(whole))?;
        let mut bytes = vec![0; HEADER_BYTES];
        bytes[..8].copy_from_slice(&DEVICES_MAGIC);
        bytes[8..10].copy_from_slice(&DEVICES_VERSION.to_le_bytes());
        bytes[10] = ARCH_X86_64;
        bytes[12..16].copy_from_slice(&body_bytes.to_le_bytes());
        bytes[16..18].copy_from_slice(&count.to_le_bytes());
        let digest = digest(&bytes[..32], &body);
        bytes[32..].copy_from_slice(&digest);
        bytes.extend_from_slice(&body);
        Ok(bytes)
    }

    /// Reads and checks; any damage is an error. What the sections hold is for their own types to check.
    pub fn decode(bytes: &[u8]) -> Result<Self, EnvelopeError> {
        let length = || EnvelopeError::Length(bytes.len());
        if bytes.len() > DEVICES_BYTES_MAX {
            return Err(length());
        }
        let (head, body) = bytes.split_first_chunk::<HEADER_BYTES>().ok_or_else(length)?;
        if head[..8] != DEVICES_MAGIC {
            return Err(EnvelopeError::Magic);
        }
        let version = u16::from_le_bytes([head[8], head[9]]);
        if version != DEVICES_VERSION {
            return Err(EnvelopeError::Version(version));
        }
        if head[10] != ARCH_X86_64 {
            return Err(EnvelopeError::Arch(head[10]));
        }
        if head[11] != 0 || head[18..32].iter().any(|byte| *byte != 0) {
            return Err(EnvelopeError::Reserved);
        }
        if u32::from_le_bytes([head[12], head[13], head[14], head[15]]) as usize != body.len() {
            return Err(length());
        }
        if digest(&head[..32], body) != head[32..] {
            return Err(EnvelopeError::Digest);
        }
        Self::sections_of(body, u16::from_le_bytes([head[16], head[17]]).into())
    }

    fn sections_of(mut body: &[u8], count: usize) -> Result<Self, EnvelopeError> {
        if count > SECTIONS_MAX {
            return Err(EnvelopeError::Count(count));
        }
        let mut sections: Vec<Section> = Vec::with_capacity(count);
        while let Some((head, rest)) = body.split_first_chunk::<SECTION_HEAD_BYTES>() {
            let kind = u16::from_le_bytes([head[0], head[1]]);
            let kind = SectionKind::from_number(kind).ok_or(EnvelopeError::Kind(kind))?;
            let index = u16::from_le_bytes([head[2], head[3]]);
            let len = u32::from_le_bytes([head[4], head[5], head[6], head[7]]) as usize;
            let (bytes, rest) = rest.split_at_checked(len).ok_or(EnvelopeError::Sections)?;
            let last = sections.last().map(|last| (last.kind, last.index));
            if sections.len() == count || last.is_some_and(|last| last >= (kind, index)) {
                return Err(EnvelopeError::Sections);
            }
            sections.push(Section { kind, index, bytes: bytes.to_vec() });
            body = rest;
        }
        if !body.is_empty() || sections.len() != count {
            return Err(EnvelopeError::Sections);
        }
        Ok(Self { sections })
    }
}

fn digest(head: &[u8], body: &[u8]) -> [u8; 32] {
    let mut hasher = blake3::Hasher::new();
    hasher.update(head).update(body);
    *hasher.finalize().as_bytes()
}
