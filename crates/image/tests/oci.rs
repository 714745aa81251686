//! OCI layouts and archives made here: compressed in every way, in several shapes, and damaged.

#![allow(clippy::unwrap_used, reason = "a test may panic")]

use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};

use dormouse_image::{ExtractError, Image, Images, ImportError, Limits, OciError, OciSource};
use serde_json::{Value, json};
use sha2::{Digest, Sha256};

fn sha(bytes: &[u8]) -> String {
    let hex: String = Sha256::digest(bytes).iter().map(|byte| format!("{byte:02x}")).collect();
    format!("sha256:{hex}")
}

fn tar_of(files: &[(&str, &[u8])]) -> Vec<u8> {
    let mut builder = tar::Builder::new(Vec::new());
    for (name, content) in files {
        let mut header = tar::Header::new_gnu();
        header.set_size(content.len() as u64);
        header.set_mode(0o644);
        header.set_uid(0);
        header.set_gid(0);
        builder.append_data(&mut header, name, *content).unwrap();
    }
    builder.into_inner().unwrap()
}

fn gzip(bytes: &[u8]) -> Vec<u8> {
    let mut encoder = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::default());
    encoder.write_all(bytes).unwrap();
    encoder.finish().unwrap()
}

struct Lab {
    dir: tempfile::TempDir,
    images: Images,
}

struct Layout {
    dir: PathBuf,
}

impl Layout {
    fn blob(&self, bytes: &[u8]) -> (String, usize) {
        let digest = sha(bytes);
        fs::write(self.dir.join("blobs/sha256").join(&digest[7..]), bytes).unwrap();
        (digest, bytes.len())
    }

    fn descriptor(&self, media_type: &str, bytes: &[u8]) -> Value {
        let (digest, size) = self.blob(bytes);
        json!({"mediaType": media_type, "digest": digest, "size": size})
    }

    /// An image of layers: media type's suffix, packed bytes, digest of the plain ones.
    fn image(&self, layers: &[(&str, Vec<u8>, String)], config: Value) -> Value {
        let ids: Vec<&String> = layers.iter().map(|(_, _, id)| id).collect();
        let config = json!({"architecture": "amd64", "os": "linux", "config": config, "rootfs": {"type": "layers", "diff_ids": ids}});
        let config =
            self.descriptor("application/vnd.oci.image.config.v1+json", config.to_string().as_bytes());
        let layers: Vec<Value> = layers
            .iter()
            .map(|(kind, packed, _)| {
                self.descriptor(&format!("application/vnd.oci.image.layer.v1.{kind}"), packed)
            })
            .collect();
        let manifest = json!({"schemaVersion": 2, "config": config, "layers": layers});
        self.descriptor("application/vnd.oci.image.manifest.v1+json", manifest.to_string().as_bytes())
    }

    fn index(&self, manifests: &[Value]) {
        let index = json!({"schemaVersion": 2, "manifests": manifests});
        fs::write(self.dir.join("index.json"), index.to_string()).unwrap();
    }
}

impl Lab {
    fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let (images, _) = Images::open(&dir.path().join("images")).unwrap();
        Self { dir, images }
    }

    fn layout(&self) -> Layout {
        let dir = self.dir.path().join("layout");
        fs::create_dir_all(dir.join("blobs/sha256")).unwrap();
        fs::write(dir.join("oci-layout"), r#"{"imageLayoutVersion":"1.0.0"}"#).unwrap();
        Layout { dir }
    }

    fn import(&self, path: &Path, name: Option<&str>) -> Result<Image, OciError> {
        let source = OciSource { path: path.to_owned(), name: name.map(str::to_owned) };
        let result = self.images.oci(&source, &Limits::default(), &mut |_| {});
        if result.is_err() {
            let left: Vec<_> = fs::read_dir(self.dir.path().join("images")).unwrap().collect();
            assert!(left.is_empty(), "a refused image left {left:?}");
        }
        result
    }

    fn text(&self, image: &Image, path: &str) -> String {
        fs::read_to_string(self.images.rootfs(&image.id).join(path)).unwrap()
    }
}

fn three_layers() -> Vec<(&'static str, Vec<u8>, String)> {
    let plain = [
        tar_of(&[("a", b"1"), ("gone", b"1")]),
        tar_of(&[(".wh.gone", b""), ("b", b"2")]),
        tar_of(&[("a", b"3")]),
    ];
    let ids: Vec<String> = plain.iter().map(|bytes| sha(bytes)).collect();
    vec![
        ("tar", plain[0].clone(), ids[0].clone()),
        ("tar+gzip", gzip(&plain[1]), ids[1].clone()),
        ("tar+zstd", zstd::encode_all(plain[2].as_slice(), 3).unwrap(), ids[2].clone()),
    ]
}

#[test]
fn layers_of_every_kind_from_a_folder_and_from_an_archive() {
    let lab = Lab::new();
    let layout = lab.layout();
    let config = json!({"Env": ["A=1", "PATH=/x"], "User": "node", "WorkingDir": "/app", "Cmd": ["run"]});
    layout.index(&[layout.image(&three_layers(), config)]);
    let image = lab.import(&layout.dir, None).unwrap();
    assert_eq!((lab.text(&image, "a"), lab.text(&image, "b")), ("3".to_owned(), "2".to_owned()));
    assert!(!lab.images.rootfs(&image.id).join("gone").exists());
    assert_eq!(image.config.env["A"], "1");
    assert_eq!((image.config.user.as_str(), image.config.workdir.as_str()), ("node", "/app"));
    assert_eq!(image.config.cmd, ["run"]);
    assert!(lab.text(&image, "etc/passwd").contains("user:x:1000"));
    // The second time its layers are not read again.
    for (_, packed, _) in three_layers() {
        fs::remove_file(layout.dir.join("blobs/sha256").join(&sha(&packed)[7..])).unwrap();
    }
    assert_eq!(lab.import(&layout.dir, None).unwrap(), image);

    let lab = Lab::new();
    let layout = lab.layout();
    layout.index(&[layout.image(&three_layers(), json!({}))]);
    let archive = lab.dir.path().join("image.tar");
    let mut builder = tar::Builder::new(fs::File::create(&archive).unwrap());
    builder.append_dir_all(".", &layout.dir).unwrap();
    builder.into_inner().unwrap();
    let image = lab.import(&archive, None).unwrap();
    assert_eq!(lab.text(&image, "a"), "3");
    let beside: Vec<_> = fs::read_dir(lab.images.rootfs(&image.id).parent().unwrap()).unwrap().collect();
    assert_eq!(beside.len(), 2, "the unpacked archive stays: {beside:?}");
}

#[test]
fn the_right_one_of_several_is_chosen_or_the_choice_is_told() {
    let lab = Lab::new();
    let layout = lab.layout();
    let one = |content: &[u8]| {
        let plain = tar_of(&[("which", content)]);
        let id = sha(&plain);
        layout.image(&[("tar", plain, id)], json!({}))
    };
    let named = |mut descriptor: Value, name: &str| {
        descriptor["annotations"] = json!({"org.opencontainers.image.ref.name": name});
        descriptor
    };
    let on = |mut descriptor: Value, os: &str, architecture: &str| {
        descriptor["platform"] = json!({"os": os, "architecture": architecture});
        descriptor
    };
    layout.index(&[named(one(b"first"), "v1"), named(one(b"second"), "v2")]);
    let error = lab.import(&layout.dir, None).unwrap_err().to_string();
    assert!(error.contains("v1, v2"), "{error}");
    let error = lab.import(&layout.dir, Some("v3")).unwrap_err().to_string();
    assert!(error.contains("v3") && error.contains("v1, v2"), "{error}");
    let image = lab.import(&layout.dir, Some("v2")).unwrap();
    assert_eq!(lab.text(&image, "which"), "second");

    let lab = Lab::new();
    layout.index(&[
        on(one(b"arm"), "linux", "arm64"),
        on(one(b"amd"), "linux", "amd64"),
        on(one(b"?"), "unknown", "unknown"),
    ]);
    let image = lab.import(&layout.dir, None).unwrap();
    assert_eq!(lab.text(&image, "which"), "amd");
    let lab = Lab::new();
    layout.index(&[on(one(b"arm"), "linux", "arm64")]);
    let error = lab.import(&layout.dir, None).unwrap_err().to_string();
    assert!(error.contains("linux/arm64"), "{error}");
}

#[test]
fn what_does_not_match_its_digest_is_refused() {
    let lab = Lab::new();
    let layout = lab.layout();
    let image = layout.image(&three_layers(), json!({}));
    layout.index(std::slice::from_ref(&image));
    for entry in fs::read_dir(layout.dir.join("blobs/sha256")).unwrap() {
        let path = entry.unwrap().path();
        let good = fs::read(&path).unwrap();
        for at in [good.len() / 2, good.len() - 1] {
            let mut bad = good.clone();
            bad[at] ^= 1;
            fs::write(&path, &bad).unwrap();
            assert!(lab.import(&layout.dir, None).is_err(), "{}", path.display());
        }
        let mut longer = good.clone();
        longer.push(0);
        fs::write(&path, &longer).unwrap();
        assert!(lab.import(&layout.dir, None).is_err(), "{}", path.display());
        fs::write(&path, &good).unwrap();
    }
    lab.import(&layout.dir, None).unwrap();

    // The packed bytes are right, the plain ones are not those that the configuration names.
    let lab = Lab::new();
    layout.index(&[layout.image(&[("tar", tar_of(&[("a", b"1")]), sha(b"other"))], json!({}))]);
    assert!(matches!(lab.import(&layout.dir, None), Err(OciError::Digest { .. })));
}

#[test]
fn a_bomb_is_stopped_and_a_hostile_entry_names_its_layer() {
    let lab = Lab::new();
    let layout = lab.layout();
    let zeros = vec![0_u8; 80 << 20];
    let plain = tar_of(&[("zeros", &zeros)]);
    let id = sha(&plain);
    let packed = zstd::encode_all(plain.as_slice(), 3).unwrap();
    layout.index(&[layout.image(&[("tar+zstd", packed, id)], json!({}))]);
    match lab.import(&layout.dir, None).unwrap_err() {
        OciError::Import(ImportError::Extract(ExtractError::Limit { what, .. })) => {
            assert!(what.contains("decompression"), "{what}");
        }
        other => panic!("{other}"),
    }
    let mut header = tar::Header::new_gnu();
    header.as_gnu_mut().unwrap().name[..6].copy_from_slice(b"../out");
    header.set_size(0);
    header.set_mode(0o644);
    header.set_cksum();
    let mut plain = header.as_bytes().to_vec();
    plain.extend([0; 1024]);
    let id = sha(&plain);
    layout.index(&[layout.image(&[("tar", plain, id.clone())], json!({}))]);
    let error = lab.import(&layout.dir, None).unwrap_err().to_string();
    assert!(error.contains(&id[..19]) && error.contains("../out"), "{error}");
}

#[test]
fn what_is_no_layout_is_told_apart() {
    let lab = Lab::new();
    let path = lab.dir.path().join("thing");
    assert!(matches!(lab.import(&path, None), Err(OciError::Read { .. })));
    fs::write(&path, "not a tar archive").unwrap();
    assert!(matches!(lab.import(&path, None), Err(OciError::NotOci { .. })));
    fs::write(&path, tar_of(&[("manifest.json", b"[]")])).unwrap();
    let error = lab.import(&path, None).unwrap_err().to_string();
    assert!(error.contains("docker archive"), "{error}");
    let layout = lab.layout();
    fs::write(layout.dir.join("index.json"), "{").unwrap();
    assert!(matches!(lab.import(&layout.dir, None), Err(OciError::Document { .. })));
    for digest in ["sha256:../../x", "sha512:00", "sha256:ABC", ""] {
        layout.index(&[json!({"mediaType": "x", "digest": digest, "size": 1})]);
        let error = lab.import(&layout.dir, None).unwrap_err().to_string();
        assert!(error.contains("is not a sha256 digest"), "{error}");
    }
    let plain = tar_of(&[("a", b"1")]);
    let id = sha(&plain);
    layout.index(&[layout.image(&[("tar+xz", plain, id)], json!({}))]);
    assert!(lab.import(&layout.dir, None).is_err());
}

#[test]
fn a_reference_has_a_path_and_perhaps_a_name() {
    let parse = |given: &str| {
        let source = OciSource::parse(given);
        (source.path.display().to_string(), source.name)
    };
    assert_eq!(parse("./image.tar"), ("./image.tar".to_owned(), None));
    assert_eq!(parse("./image.tar:v1"), ("./image.tar".to_owned(), Some("v1".to_owned())));
    assert_eq!(parse("a:b/c"), ("a:b/c".to_owned(), None));
}
