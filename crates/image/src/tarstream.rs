//! A tar stream, read once, with a bound on everything: ustar, GNU long names, pax.
//!
//! POSIX.1-2017 "pax", GNU tar's manual chapter "Basic Tar Format". Extension records are read here
//! and not by the `tar` crate, which would hold a record of any announced length in memory.

use std::io::{self, Read};

use tar::{EntryType, Header};

use crate::error::ExtractError;

const BLOCK: usize = 512;
/// Longest extension record (a long name, a set of pax fields with all attributes).
const EXTENSION_BYTES_MAX: u64 = 1 << 20;
/// Extension records before one entry.
const EXTENSIONS_MAX: u32 = 16;
const SEGMENTS_MAX: usize = 1 << 20;
/// Two numbers of 64 bits and what is left of a block.
const SPARSE_LINE_BYTES_MAX: usize = 2048;

#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Kind {
    File,
    Folder,
    Symlink {
        target: Vec<u8>,
    },
    HardLink {
        target: Vec<u8>,
    },
    Fifo,
    /// Character and block devices.
    Device,
}

#[derive(Debug, Clone)]
pub struct Entry {
    pub name: Vec<u8>,
    pub kind: Kind,
    pub bytes: u64,
    pub mode: u32,
    pub uid: u64,
    pub gid: u64,
    pub mtime_s: i64,
    pub xattrs: Vec<(String, Vec<u8>)>,
    /// A file with holes: its length. Its content is [`TarStream::sparse_map`], then the data.
    pub sparse_bytes: Option<u64>,
}

/// Part of a sparse file that is not a hole.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Segment {
    pub offset: u64,
    pub bytes: u64,
}

impl Entry {
    pub fn display(&self) -> String {
        String::from_utf8_lossy(&self.name).chars().take(200).collect()
    }
}

pub struct TarStream<R> {
    reader: R,
    archive: String,
    offset: u64,
    /// Of the current entry: unread content, then padding.
    unread: u64,
    padding: u64,
}

#[derive(Default)]
struct Extensions {
    name: Option<Vec<u8>>,
    target: Option<Vec<u8>>,
    bytes: Option<u64>,
    uid: Option<u64>,
    gid: Option<u64>,
    mtime_s: Option<i64>,
    xattrs: Vec<(String, Vec<u8>)>,
    sparse_version: (u64, u64),
    sparse_name: Option<Vec<u8>>,
    sparse_bytes: Option<u64>,
}

impl<R: Read> TarStream<R> {
    /// `archive` names it in errors.
    pub fn new(reader: R, archive: &str) -> Self {
        Self { reader, archive: archive.to_owned(), offset: 0, unread: 0, padding: 0 }
    }

    /// The next entry; `None` after the end mark, when the stream was read to its end.
    pub fn next_entry(&mut self) -> Result<Option<Entry>, ExtractError> {
        self.skip(self.unread + self.padding)?;
        (self.unread, self.padding) = (0, 0);
        let mut extensions = Extensions::default();
        for _ in 0..=EXTENSIONS_MAX {
            let Some(header) = self.header()? else {
                self.drain()?;
                return Ok(None);
            };
            let kind = header.entry_type();
            let bytes = header.entry_size().map_err(|error| self.format(&error.to_string()))?;
            match kind {
                EntryType::GNULongName => extensions.name = Some(self.long_name(bytes)?),
                EntryType::GNULongLink => extensions.target = Some(self.long_name(bytes)?),
                EntryType::XHeader => {
                    let record = self.record(bytes)?;
                    self.pax(&record, &mut extensions)?;
                }
                // Comments of archivers; nothing of an entry depends on them.
                EntryType::XGlobalHeader => drop(self.record(bytes)?),
                _ => return self.entry(&header, kind, bytes, extensions).map(Some),
            }
        }
        Err(self.format("too many extension records before one entry"))
    }

    /// Content of the current entry; 0 at its end.
    pub fn read_content(&mut self, buffer: &mut [u8]) -> Result<usize, ExtractError> {
        let want = usize::try_from(self.unread).map_or(buffer.len(), |unread| unread.min(buffer.len()));
        self.fill(&mut buffer[..want])?;
        self.unread -= want as u64;
        Ok(want)
    }

    /// The map in front of a sparse file's data: decimal numbers in lines, filled up to whole blocks
    /// (GNU tar manual, "PAX Format, Version 1.0").
    pub fn sparse_map(&mut self, file_bytes: u64) -> Result<Vec<Segment>, ExtractError> {
        let mut text = Vec::new();
        let mut numbers: Vec<u64> = Vec::new();
        let mut wanted = 1;
        while numbers.len() < wanted {
            let mut block = [0_u8; BLOCK];
            if self.unread < BLOCK as u64 || text.len() > SPARSE_LINE_BYTES_MAX {
                return Err(self.format("the map of a sparse file is cut off"));
            }
            self.read_content(&mut block)?;
            text.extend_from_slice(&block);
            while let Some(end) =
                text.iter().position(|byte| *byte == b'\n').filter(|_| numbers.len() < wanted)
            {
                let line: Vec<u8> = text.drain(..=end).collect();
                let number = std::str::from_utf8(&line[..end]).ok().and_then(|line| line.parse().ok());
                numbers.push(number.ok_or_else(|| self.format("the map of a sparse file is malformed"))?);
                if let [count] = numbers[..] {
                    let count = usize::try_from(count).ok().filter(|count| *count <= SEGMENTS_MAX);
                    wanted = 1 + 2 * count.ok_or_else(|| self.format("a sparse file has too many parts"))?;
                }
            }
        }
        let segments: Vec<Segment> =
            numbers[1..].chunks_exact(2).map(|pair| Segment { offset: pair[0], bytes: pair[1] }).collect();
        let mut end = 0_u64;
        let mut data = 0_u64;
        for Segment { offset, bytes } in &segments {
            let next = offset.checked_add(*bytes).filter(|next| *offset >= end && *next <= file_bytes);
            end = next.ok_or_else(|| self.format("the parts of a sparse file overlap or exceed it"))?;
            data += bytes;
        }
        if data == self.unread {
            Ok(segments)
        } else {
            Err(self.format("a sparse file's data has another length"))
        }
    }

    fn entry(
        &mut self,
        header: &Header,
        kind: EntryType,
        header_bytes: u64,
        extensions: Extensions,
    ) -> Result<Entry, ExtractError> {
        let sparse_bytes = match (extensions.sparse_bytes, extensions.sparse_version) {
            (Some(bytes), (1, 0)) if kind == EntryType::Regular => Some(bytes),
            (None, (0, 0)) => None,
            _ => {
                return Err(
                    self.format("only version 1.0 of sparse files is supported: archive with --format=pax")
                );
            }
        };
        let named = extensions.sparse_name.or(extensions.name);
        let name = named.unwrap_or_else(|| header.path_bytes().into_owned());
        let target = || {
            let plain = || header.link_name_bytes().map(std::borrow::Cow::into_owned);
            extensions.target.clone().or_else(plain).unwrap_or_default()
        };
        let kind = match kind {
            EntryType::Regular | EntryType::Continuous if name.ends_with(b"/") => Kind::Folder,
            EntryType::Regular | EntryType::Continuous => Kind::File,
            EntryType::Directory => Kind::Folder,
            EntryType::Symlink => Kind::Symlink { target: target() },
            EntryType::Link => Kind::HardLink { target: target() },
            EntryType::Fifo => Kind::Fifo,
            EntryType::Char | EntryType::Block => Kind::Device,
            other => {
                let entry = String::from_utf8_lossy(&name).into_owned();
                let why = format!("entries of type {:?} are not supported", char::from(other.as_byte()));
                return Err(ExtractError::Refused { archive: self.archive.clone(), entry, why });
            }
        };
        // Only files have content; some archivers leave a hard link's length in its header.
        let has_content = kind == Kind::File;
        let bytes = if has_content { extensions.bytes.unwrap_or(header_bytes) } else { 0 };
        self.unread = bytes;
        self.padding = bytes.wrapping_neg() % BLOCK as u64;
        let number = |found: io::Result<u64>| found.map_err(|error| self.format(&error.to_string()));
        Ok(Entry {
            name,
            kind,
            bytes,
            mode: header.mode().map_err(|error| self.format(&error.to_string()))?,
            uid: extensions.uid.map_or_else(|| number(header.uid()), Ok)?,
            gid: extensions.gid.map_or_else(|| number(header.gid()), Ok)?,
            mtime_s: match extensions.mtime_s {
                Some(seconds) => seconds,
                None => i64::try_from(number(header.mtime())?).unwrap_or(0),
            },
            xattrs: extensions.xattrs,
            sparse_bytes,
        })
    }

    fn header(&mut self) -> Result<Option<Header>, ExtractError> {
        let mut block = [0_u8; BLOCK];
        self.fill(&mut block)?;
        if block.iter().all(|byte| *byte == 0) {
            return Ok(None);
        }
        let mut header = Header::new_old();
        header.as_mut_bytes().copy_from_slice(&block);
        let sum: u32 = block
            .iter()
            .enumerate()
            .map(|(at, byte)| if (148..156).contains(&at) { 32 } else { u32::from(*byte) })
            .sum();
        if header.cksum().ok() == Some(sum) {
            Ok(Some(header))
        } else {
            Err(self.format("the header's checksum does not match"))
        }
    }

    fn record(&mut self, bytes: u64) -> Result<Vec<u8>, ExtractError> {
        if bytes > EXTENSION_BYTES_MAX {
            let archive = self.archive.clone();
            return Err(ExtractError::Limit {
                archive,
                what: "bytes in an extension record",
                limit: EXTENSION_BYTES_MAX,
            });
        }
        let mut record = vec![0; usize::try_from(bytes).unwrap_or_default()];
        self.fill(&mut record)?;
        self.skip(bytes.wrapping_neg() % BLOCK as u64)?;
        Ok(record)
    }

    fn long_name(&mut self, bytes: u64) -> Result<Vec<u8>, ExtractError> {
        let mut name = self.record(bytes)?;
        while name.last() == Some(&0) {
            name.pop();
        }
        Ok(name)
    }

    /// Records of the form `LENGTH KEY=VALUE\n`, the length counting all of it.
    fn pax(&self, record: &[u8], into: &mut Extensions) -> Result<(), ExtractError> {
        let mut rest = record;
        while !rest.is_empty() {
            let parsed = pax_field(rest).ok_or_else(|| self.format("a pax record is malformed"))?;
            let (key, value, after) = parsed;
            rest = after;
            let text = || std::str::from_utf8(value).map_err(|_| self.format("a pax value is not text"));
            let number = || text()?.parse::<u64>().map_err(|_| self.format("a pax number is malformed"));
            match key {
                "path" => into.name = Some(value.to_vec()),
                "linkpath" => into.target = Some(value.to_vec()),
                "size" => into.bytes = Some(number()?),
                "uid" => into.uid = Some(number()?),
                "gid" => into.gid = Some(number()?),
                "mtime" => {
                    let whole = text()?.split('.').next().unwrap_or_default();
                    into.mtime_s = Some(whole.parse().map_err(|_| self.format("a pax time is malformed"))?);
                }
                "GNU.sparse.major" => into.sparse_version.0 = number()?,
                "GNU.sparse.minor" => into.sparse_version.1 = number()?,
                "GNU.sparse.name" => into.sparse_name = Some(value.to_vec()),
                "GNU.sparse.realsize" => into.sparse_bytes = Some(number()?),
                _ if key.starts_with("GNU.sparse.") => {
                    let why = "only version 1.0 of sparse files is supported: archive with --format=pax";
                    return Err(self.format(why));
                }
                _ => {
                    if let Some(name) = key.strip_prefix("SCHILY.xattr.") {
                        into.xattrs.push((name.to_owned(), value.to_vec()));
                    }
                }
            }
        }
        Ok(())
    }

    fn fill(&mut self, buffer: &mut [u8]) -> Result<(), ExtractError> {
        self.reader.read_exact(buffer).map_err(|source| match source.kind() {
            io::ErrorKind::UnexpectedEof => self.format("it ends in the middle"),
            _ => ExtractError::Read { archive: self.archive.clone(), source },
        })?;
        self.offset += buffer.len() as u64;
        Ok(())
    }

    fn skip(&mut self, mut bytes: u64) -> Result<(), ExtractError> {
        let mut buffer = [0_u8; 8192];
        while bytes > 0 {
            let step = usize::try_from(bytes).map_or(buffer.len(), |bytes| bytes.min(buffer.len()));
            self.fill(&mut buffer[..step])?;
            bytes -= step as u64;
        }
        Ok(())
    }

    /// Padding after the end mark: read, so that what is around the stream sees its end.
    fn drain(&mut self) -> Result<(), ExtractError> {
        let mut buffer = [0_u8; 8192];
        loop {
            let read = self
                .reader
                .read(&mut buffer)
                .map_err(|source| ExtractError::Read { archive: self.archive.clone(), source })?;
            if read == 0 {
                return Ok(());
            }
            self.offset += read as u64;
        }
    }

    fn format(&self, why: &str) -> ExtractError {
        ExtractError::Format { archive: self.archive.clone(), offset: self.offset, why: why.to_owned() }
    }
}

fn pax_field(rest: &[u8]) -> Option<(&str, &[u8], &[u8])> {
    let space = rest.iter().take(20).position(|byte| *byte == b' ')?;
    let length: usize = std::str::from_utf8(&rest[..space]).ok()?.parse().ok()?;
    if length > rest.len() || length < space + 3 || rest[length - 1] != b'\n' {
        return None;
    }
    let field = &rest[space + 1..length - 1];
    let equals = field.iter().position(|byte| *byte == b'=')?;
    let key = std::str::from_utf8(&field[..equals]).ok()?;
    Some((key, &field[equals + 1..], &rest[length..]))
}
