//! An OCI image from a layout folder, or from an archive of one, on this host's disk.
//!
//! OCI image specification v1.1: "Image Layout", "Image Index", "Image Manifest", "Image Configuration".
//! Documents and layers are believed only after their digests were compared.

use std::fs::File;
use std::io::{self, Read};
use std::path::{Path, PathBuf};

use serde::Deserialize;
use sha2::{Digest as _, Sha256};

use crate::error::{ExtractError, ImportError, OciError};
use crate::extract::{self, Applied, Limits, Tree};
use crate::prepare;
use crate::record::{Image, ImageConfig, Source};
use crate::root::Root;
use crate::{Draft, Images, Progress};

const DOCUMENT_BYTES_MAX: u64 = 4 << 20;
const INDEX_DEPTH_MAX: u32 = 4;
/// A layer this small may have any ratio: a few blocks of zeros pack a thousandfold.
const RATIO_FREE_BYTES: u64 = 64 << 20;
/// Largest window a zstd layer may ask for, as a power of two.
const ZSTD_WINDOW_LOG_MAX: u32 = 27;

/// Which image: a folder or archive, and the name of one image in it where it holds several.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct OciSource {
    pub path: PathBuf,
    pub name: Option<String>,
}

impl OciSource {
    /// `PATH` or `PATH:NAME`; a path that exists as it is given wins.
    #[must_use]
    pub fn parse(given: &str) -> Self {
        let whole = PathBuf::from(given);
        match given.rsplit_once(':') {
            Some((path, name)) if !whole.exists() && !name.contains('/') && !name.is_empty() => {
                Self { path: PathBuf::from(path), name: Some(name.to_owned()) }
            }
            _ => Self { path: whole, name: None },
        }
    }
}

#[derive(Debug, Clone, Deserialize)]
struct Descriptor {
    #[serde(rename = "mediaType", default)]
    media_type: String,
    digest: String,
    size: u64,
    platform: Option<Platform>,
    #[serde(default)]
    annotations: std::collections::BTreeMap<String, String>,
}

#[derive(Debug, Clone, Deserialize)]
struct Platform {
    architecture: String,
    os: String,
}

#[derive(Debug, Deserialize)]
struct Index {
    manifests: Vec<Descriptor>,
}

#[derive(Debug, Deserialize)]
struct Manifest {
    config: Descriptor,
    layers: Vec<Descriptor>,
}

#[derive(Debug, Deserialize)]
struct Config {
    architecture: String,
    os: String,
    #[serde(default)]
    config: Option<RunConfig>,
    rootfs: RootFs,
}

#[derive(Debug, Deserialize)]
struct RootFs {
    diff_ids: Vec<String>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(rename_all = "PascalCase", default)]
struct RunConfig {
    env: Option<Vec<String>>,
    user: Option<String>,
    working_dir: Option<String>,
    entrypoint: Option<Vec<String>>,
    cmd: Option<Vec<String>>,
}

impl Images {
    /// Imports an OCI image; one that was imported before is found by the digest of its manifest.
    pub fn oci(
        &self,
        source: &OciSource,
        limits: &Limits,
        progress: Progress<'_>,
    ) -> Result<Image, OciError> {
        let draft = self.draft().map_err(|source| OciError::Import(ImportError::Draft { source }))?;
        let layout = Layout::open(source, &draft, limits)?;
        let (digest, manifest) = layout.manifest(source)?;
        let id = format!("oci-{}", &digest.trim_start_matches("sha256:")[..16]);
        if let Ok(image) = self.load(&id) {
            return Ok(image);
        }
        let config: Config = layout.document(&manifest.config, "the image's configuration")?;
        layout.check(&config, &manifest, limits)?;
        let root = draft.root().map_err(|source| OciError::Import(ImportError::Draft { source }))?;
        let mut applied = Applied::default();
        let layers = manifest.layers.iter().zip(&config.rootfs.diff_ids).enumerate();
        for (at, (layer, diff_id)) in layers {
            progress(&format!("layer {} of {}: {}", at + 1, manifest.layers.len(), short(&layer.digest)));
            layout.layer(&root, layer, diff_id, limits, &mut applied)?;
        }
        prepare::prepare(&root).map_err(OciError::Import)?;
        layout.remove(&draft);
        let reference = source.path.display().to_string();
        let from = Source::Oci { reference, manifest_digest: digest.clone() };
        let mut image = Image::new(id, from, digest, image_config(config.config.unwrap_or_default()));
        image.notes = notes(&applied);
        self.publish(draft, image).map_err(|source| OciError::Import(ImportError::Publish(source)))
    }
}

pub fn notes(applied: &Applied) -> Vec<String> {
    let mut notes = Vec::new();
    if applied.devices_skipped > 0 {
        notes.push(format!("{} device nodes left out: devices are the engine's", applied.devices_skipped));
    }
    if applied.xattrs_skipped > 0 {
        notes.push(format!("{} extended attributes left out", applied.xattrs_skipped));
    }
    notes
}

fn image_config(given: RunConfig) -> ImageConfig {
    let pair = |line: String| line.split_once('=').map(|(key, value)| (key.to_owned(), value.to_owned()));
    ImageConfig {
        env: given.env.unwrap_or_default().into_iter().filter_map(pair).collect(),
        user: given.user.unwrap_or_default(),
        workdir: given.working_dir.unwrap_or_default(),
        entrypoint: given.entrypoint.unwrap_or_default(),
        cmd: given.cmd.unwrap_or_default(),
    }
}

fn short(digest: &str) -> &str {
    digest.get(..19).unwrap_or(digest)
}

struct Layout {
    /// As the user named it, for errors.
    given: PathBuf,
    root: Root,
}

impl Layout {
    fn open(source: &OciSource, draft: &Draft, limits: &Limits) -> Result<Self, OciError> {
        let read = |error| OciError::Read { path: source.path.clone(), source: error };
        let meta = std::fs::metadata(&source.path).map_err(read)?;
        let dir = if meta.is_dir() {
            source.path.clone()
        } else if meta.is_file() {
            unpack_archive(&source.path, draft, limits)?
        } else {
            let why = "it is neither a folder nor a file".to_owned();
            return Err(OciError::NotOci { path: source.path.clone(), why });
        };
        let layout = Self { given: source.path.clone(), root: Root::open(&dir).map_err(read)? };
        if layout.root.exists("oci-layout") && layout.root.exists("index.json") {
            return Ok(layout);
        }
        let why = if layout.root.exists("manifest.json") {
            "it is a docker archive of the old kind; convert it, for example with `skopeo copy \
             docker-archive:FILE oci-archive:NEW`"
        } else {
            "it has no files oci-layout and index.json"
        };
        Err(OciError::NotOci { path: source.path.clone(), why: why.to_owned() })
    }

    /// The unpacked archive is of no use any more; what stays goes with the draft's folder.
    fn remove(self, draft: &Draft) {
        drop(self.root);
        let dir = draft.dir.join(LAYOUT);
        if let Err(error) = std::fs::remove_dir_all(&dir)
            && error.kind() != io::ErrorKind::NotFound
        {
            tracing::warn!(%error, path = %dir.display(), "an unpacked archive stays in the image's folder");
        }
    }

    fn manifest(&self, source: &OciSource) -> Result<(String, Manifest), OciError> {
        let text = self
            .root
            .read("index.json", DOCUMENT_BYTES_MAX)
            .map_err(|source| OciError::Read { path: self.given.join("index.json"), source })?
            .unwrap_or_default();
        let mut index: Index = parse("index.json", text.as_bytes())?;
        if let Some(name) = &source.name {
            index.manifests = self.named(index.manifests, name)?;
        }
        for _ in 0..INDEX_DEPTH_MAX {
            let chosen = self.choose(index.manifests)?;
            if !chosen.media_type.contains("index") && !chosen.media_type.contains("manifest.list") {
                let manifest = self.document(&chosen, "the image's manifest")?;
                return Ok((chosen.digest, manifest));
            }
            index = self.document(&chosen, "the image index")?;
        }
        let why = "its indexes are nested too deep".to_owned();
        Err(OciError::Document { document: "index.json".to_owned(), why })
    }

    fn named(&self, found: Vec<Descriptor>, name: &str) -> Result<Vec<Descriptor>, OciError> {
        let names = names(&found);
        let is = |descriptor: &Descriptor| {
            ref_name(descriptor).is_some_and(|found| found == name || found.ends_with(&format!(":{name}")))
        };
        let chosen: Vec<_> = found.into_iter().filter(is).collect();
        if chosen.is_empty() {
            return Err(OciError::NoSuchName { path: self.given.clone(), name: name.to_owned(), names });
        }
        Ok(chosen)
    }

    fn choose(&self, found: Vec<Descriptor>) -> Result<Descriptor, OciError> {
        let fits = |descriptor: &Descriptor| {
            descriptor.platform.as_ref().is_none_or(|it| it.os == "linux" && it.architecture == "amd64")
        };
        let all = |descriptor: &Descriptor| {
            let platform = descriptor.platform.as_ref();
            platform.map_or("an unnamed platform".to_owned(), |it| format!("{}/{}", it.os, it.architecture))
        };
        let has = found.iter().map(all).collect::<Vec<_>>().join(", ");
        let mut fitting: Vec<_> = found.into_iter().filter(fits).collect();
        if fitting.len() > 1 {
            return Err(OciError::Ambiguous { path: self.given.clone(), names: names(&fitting) });
        }
        let none = || OciError::Platform { path: self.given.clone(), has };
        fitting.pop().ok_or_else(none)
    }

    fn document<T: serde::de::DeserializeOwned>(&self, of: &Descriptor, what: &str) -> Result<T, OciError> {
        if of.size > DOCUMENT_BYTES_MAX {
            let why = format!("{} bytes are too many", of.size);
            return Err(OciError::Document { document: what.to_owned(), why });
        }
        let mut bytes = Vec::new();
        let source = |source| OciError::Read { path: self.given.join(&of.digest), source };
        self.blob(&of.digest)?.take(DOCUMENT_BYTES_MAX + 1).read_to_end(&mut bytes).map_err(source)?;
        let found = hex_digest(Sha256::digest(&bytes).as_slice());
        if found != of.digest {
            return Err(OciError::Digest { digest: of.digest.clone(), found });
        }
        parse(what, &bytes)
    }

    fn check(&self, config: &Config, manifest: &Manifest, limits: &Limits) -> Result<(), OciError> {
        let bad = |why: String| Err(OciError::Document { document: "the image's configuration".into(), why });
        if config.os != "linux" || config.architecture != "amd64" {
            let has = format!("{}/{}", config.os, config.architecture);
            return Err(OciError::Platform { path: self.given.clone(), has });
        }
        if manifest.layers.len() != config.rootfs.diff_ids.len() {
            return bad(format!(
                "it names {} layers, the manifest has {}",
                config.rootfs.diff_ids.len(),
                manifest.layers.len()
            ));
        }
        if manifest.layers.len() > limits.layers_max {
            return bad(format!(
                "{} layers are too many, {} are allowed",
                manifest.layers.len(),
                limits.layers_max
            ));
        }
        Ok(())
    }

    fn blob(&self, digest: &str) -> Result<File, OciError> {
        let hex = digest.strip_prefix("sha256:").unwrap_or_default();
        if hex.len() != 64 || !hex.bytes().all(|byte| byte.is_ascii_digit() || (b'a'..=b'f').contains(&byte))
        {
            let why = format!("{:?} is not a sha256 digest", digest.chars().take(80).collect::<String>());
            return Err(OciError::Document { document: "a descriptor".to_owned(), why });
        }
        let path = format!("blobs/sha256/{hex}");
        let read = |source| OciError::Read { path: self.given.join(&path), source };
        let relative = crate::root::RelPath::inside(&path)
            .map_err(|why| read(io::Error::new(io::ErrorKind::InvalidInput, why)))?;
        let flags = rustix::fs::OFlags::RDONLY | rustix::fs::OFlags::NONBLOCK;
        let file = File::from(self.root.open_at(&relative, flags).map_err(read)?);
        if file.metadata().map_err(read)?.is_file() {
            Ok(file)
        } else {
            Err(read(io::Error::new(io::ErrorKind::InvalidData, "it is no regular file")))
        }
    }

    fn layer(
        &self,
        root: &Root,
        layer: &Descriptor,
        diff_id: &str,
        limits: &Limits,
        applied: &mut Applied,
    ) -> Result<(), OciError> {
        let name = format!("layer {}", short(&layer.digest));
        let read = |source| OciError::Read { path: self.given.join(&layer.digest), source };
        let file = self.blob(&layer.digest)?;
        let packed_bytes = file.metadata().map_err(read)?.len();
        let mut packed = Hashing { inner: file, hash: Sha256::new() };
        let unpacked_max = packed_bytes.saturating_mul(limits.ratio_max).max(RATIO_FREE_BYTES);
        let plain_digest = {
            let plain = decompress(&layer.media_type, &mut packed).map_err(read)?;
            let bounded = Bounded { inner: plain, left: unpacked_max };
            let mut unpacked = Hashing { inner: bounded, hash: Sha256::new() };
            extract::unpack(root, &mut unpacked, &name, Tree::Layer, limits, applied)
                .map_err(|error| OciError::Import(ImportError::Extract(bomb(error, unpacked_max))))?;
            hex_digest(unpacked.hash.finalize().as_slice())
        };
        // Bytes after the compressed stream count as well.
        io::copy(&mut packed, &mut io::sink()).map_err(read)?;
        let found = hex_digest(packed.hash.finalize().as_slice());
        if found != layer.digest {
            return Err(OciError::Digest { digest: layer.digest.clone(), found });
        }
        if plain_digest != diff_id {
            return Err(OciError::Digest { digest: diff_id.to_owned(), found: plain_digest });
        }
        Ok(())
    }
}

const LAYOUT: &str = "layout";

fn unpack_archive(archive: &Path, draft: &Draft, limits: &Limits) -> Result<PathBuf, OciError> {
    let dir = draft.dir.join(LAYOUT);
    let draft_error = |source| OciError::Import(ImportError::Draft { source });
    std::fs::create_dir(&dir).map_err(draft_error)?;
    let root = Root::open(&dir).map_err(draft_error)?;
    let read = |source| OciError::Read { path: archive.to_owned(), source };
    let mut file = io::BufReader::with_capacity(1 << 20, File::open(archive).map_err(read)?);
    let name = archive.display().to_string();
    extract::unpack(&root, &mut file, &name, Tree::Flat, limits, &mut Applied::default()).map_err(
        |error| match error {
            ExtractError::Format { why, .. } => OciError::NotOci { path: archive.to_owned(), why },
            error => OciError::Import(ImportError::Extract(error)),
        },
    )?;
    Ok(dir)
}

fn parse<T: serde::de::DeserializeOwned>(document: &str, bytes: &[u8]) -> Result<T, OciError> {
    serde_json::from_slice(bytes)
        .map_err(|error| OciError::Document { document: document.to_owned(), why: error.to_string() })
}

fn ref_name(descriptor: &Descriptor) -> Option<&str> {
    descriptor.annotations.get("org.opencontainers.image.ref.name").map(String::as_str)
}

fn names(found: &[Descriptor]) -> String {
    let name = |descriptor: &Descriptor| ref_name(descriptor).unwrap_or("(unnamed)").to_owned();
    found.iter().map(name).collect::<Vec<_>>().join(", ")
}

fn hex_digest(bytes: &[u8]) -> String {
    let hex: String = bytes.iter().map(|byte| format!("{byte:02x}")).collect();
    format!("sha256:{hex}")
}

/// By the media type of OCI and of docker; the suffix after `+` or the last dot.
fn decompress<'a>(media_type: &str, reader: &'a mut dyn Read) -> io::Result<Box<dyn Read + 'a>> {
    let buffered = io::BufReader::with_capacity(256 << 10, reader);
    match media_type.rsplit(['+', '.']).next().unwrap_or_default() {
        "gzip" => Ok(Box::new(flate2::bufread::MultiGzDecoder::new(buffered))),
        "zstd" => {
            let mut decoder = zstd::stream::read::Decoder::with_buffer(buffered)?;
            decoder.window_log_max(ZSTD_WINDOW_LOG_MAX)?;
            Ok(Box::new(decoder))
        }
        "tar" => Ok(Box::new(buffered)),
        other => {
            let why = format!("layers of kind {other:?} are not supported: tar, tar+gzip and tar+zstd are");
            Err(io::Error::new(io::ErrorKind::Unsupported, why))
        }
    }
}

struct Hashing<R> {
    inner: R,
    hash: Sha256,
}

impl<R: Read> Read for Hashing<R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let read = self.inner.read(buffer)?;
        self.hash.update(&buffer[..read]);
        Ok(read)
    }
}

/// Fails when more comes out than the layer's size allows.
struct Bounded<R> {
    inner: R,
    left: u64,
}

#[derive(Debug, thiserror::Error)]
#[error("decompresses to far more than its size")]
struct Bomb;

impl<R: Read> Read for Bounded<R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let read = self.inner.read(buffer)?;
        self.left = self.left.checked_sub(read as u64).ok_or_else(|| io::Error::other(Bomb))?;
        Ok(read)
    }
}

fn bomb(error: ExtractError, limit: u64) -> ExtractError {
    match error {
        ExtractError::Read { archive, source }
            if source.get_ref().is_some_and(|inner| inner.downcast_ref::<Bomb>().is_some()) =>
        {
            ExtractError::Limit { archive, what: "bytes after decompression of a layer this small", limit }
        }
        other => other,
    }
}
