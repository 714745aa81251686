//! Archives that mean harm, and ordinary ones: nothing outside of the new root is read or written.

#![allow(clippy::unwrap_used, reason = "a test may panic")]

use std::fs;
use std::io;
use std::os::unix::fs::{MetadataExt, PermissionsExt, symlink};
use std::path::Path;

use dormouse_image::{Applied, ExtractError, ImageConfig, Images, ImportError, Limits, Source, apply_layer};
use proptest::prelude::*;
use tar::{Builder, EntryType, Header};

fn header(kind: EntryType, bytes: u64) -> Header {
    let mut header = Header::new_gnu();
    header.set_entry_type(kind);
    header.set_size(bytes);
    header.set_mode(0o644);
    header.set_uid(0);
    header.set_gid(0);
    header.set_mtime(1_000_000_000);
    header
}

/// Writes a name that the `tar` crate itself would refuse.
fn raw_name(header: &mut Header, name: &str) {
    header.as_gnu_mut().unwrap().name[..name.len()].copy_from_slice(name.as_bytes());
    header.set_cksum();
}

struct Archive(Builder<Vec<u8>>);

impl Default for Archive {
    fn default() -> Self {
        Self(Builder::new(Vec::new()))
    }
}

impl Archive {
    fn file(mut self, name: &str, content: &[u8]) -> Self {
        let mut header = header(EntryType::Regular, content.len() as u64);
        raw_name(&mut header, name);
        self.0.append(&header, content).unwrap();
        self
    }

    fn entry(mut self, kind: EntryType, name: &str, target: &str, mode: u32) -> Self {
        let mut header = header(kind, 0);
        header.set_mode(mode);
        header.as_gnu_mut().unwrap().linkname[..target.len()].copy_from_slice(target.as_bytes());
        raw_name(&mut header, name);
        self.0.append(&header, io::empty()).unwrap();
        self
    }

    fn folder(self, name: &str) -> Self {
        self.entry(EntryType::Directory, name, "", 0o755)
    }

    fn symlink(self, name: &str, target: &str) -> Self {
        self.entry(EntryType::Symlink, name, target, 0o777)
    }

    fn hard_link(self, name: &str, target: &str) -> Self {
        self.entry(EntryType::Link, name, target, 0o644)
    }

    fn pax(mut self, fields: &[(&str, &[u8])]) -> Self {
        self.0.append_pax_extensions(fields.iter().copied()).unwrap();
        self
    }

    fn bytes(self) -> Vec<u8> {
        self.0.into_inner().unwrap()
    }
}

struct Lab {
    dir: tempfile::TempDir,
}

impl Lab {
    fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        fs::create_dir(dir.path().join("rootfs")).unwrap();
        fs::create_dir(dir.path().join("outside")).unwrap();
        fs::write(dir.path().join("outside/secret"), "secret").unwrap();
        Self { dir }
    }

    fn root(&self) -> std::path::PathBuf {
        self.dir.path().join("rootfs")
    }

    fn apply_with(&self, archive: Vec<u8>, limits: &Limits) -> Result<Applied, ExtractError> {
        let mut applied = Applied::default();
        apply_layer(&self.root(), &mut archive.as_slice(), "layer", limits, &mut applied)?;
        Ok(applied)
    }

    fn apply(&self, archive: Archive) -> Result<Applied, ExtractError> {
        self.apply_with(archive.bytes(), &Limits::default())
    }

    fn read(&self, path: &str) -> String {
        fs::read_to_string(self.root().join(path)).unwrap()
    }

    /// What is beside the root is as it was.
    fn unharmed(&self) {
        let names: Vec<_> = fs::read_dir(self.dir.path().join("outside")).unwrap().collect();
        assert_eq!(names.len(), 1);
        let secret = self.dir.path().join("outside/secret");
        assert_eq!(fs::read_to_string(&secret).unwrap(), "secret");
        assert_eq!(fs::metadata(&secret).unwrap().nlink(), 1);
        assert_eq!(fs::read_dir(self.dir.path()).unwrap().count(), 2);
    }
}

#[test]
fn modes_owners_links_and_attributes_arrive() {
    let lab = Lab::new();
    let archive = Archive::default()
        .folder("usr/")
        .folder("usr/bin")
        .file("usr/bin/tool", b"tool")
        .hard_link("usr/bin/same", "usr/bin/tool")
        .symlink("bin", "usr/bin")
        .file("bin/later", b"through the link")
        .pax(&[("SCHILY.xattr.user.note", b"kept"), ("SCHILY.xattr.trusted.overlay.opaque", b"y")])
        .file("noted", b"1")
        .entry(EntryType::Char, "dev/null", "", 0o666)
        .entry(EntryType::Fifo, "pipe", "", 0o600)
        .entry(EntryType::Regular, "suid", "", 0o4755);
    let applied = lab.apply(archive).unwrap();
    assert_eq!((applied.entries, applied.devices_skipped, applied.xattrs_skipped), (10, 1, 1));
    assert_eq!(lab.read("usr/bin/later"), "through the link");
    let meta = |path: &str| fs::symlink_metadata(lab.root().join(path)).unwrap();
    assert_eq!(meta("usr/bin/tool").ino(), meta("usr/bin/same").ino());
    assert_eq!(meta("usr/bin/tool").mtime(), 1_000_000_000);
    assert_eq!(meta("usr/bin").mtime(), 1_000_000_000);
    assert_eq!(meta("suid").permissions().mode() & 0o7777, 0o4755);
    assert!(!lab.root().join("dev/null").exists());
    lab.unharmed();
}

/// As GNU tar writes it with `--format=pax --sparse`.
#[test]
fn sparse_files_keep_their_holes() {
    let lab = Lab::new();
    let sparse = |map: &str, data: &[u8], real: &str| {
        let mut content = map.as_bytes().to_vec();
        content.resize(512, 0);
        content.extend_from_slice(data);
        Archive::default()
            .pax(&[
                ("GNU.sparse.major", b"1"),
                ("GNU.sparse.minor", b"0"),
                ("GNU.sparse.name", b"holes"),
                ("GNU.sparse.realsize", real.as_bytes()),
            ])
            .file("GNUSparseFile.1/holes", &content)
    };
    lab.apply(sparse("2\n4096\n3\n8388608\n0\n", b"abc", "8388608")).unwrap();
    let content = fs::read(lab.root().join("holes")).unwrap();
    assert_eq!((content.len(), &content[4096..4099]), (8 << 20, &b"abc"[..]));
    assert!(content.iter().filter(|byte| **byte != 0).count() == 3);
    assert!(fs::metadata(lab.root().join("holes")).unwrap().blocks() * 512 <= 65_536);
    for (map, data, real) in [
        ("1\n10\n3\n", &b"abc"[..], "12"),
        ("2\n5\n2\n6\n1\n", b"abc", "99"),
        ("1\n0\n4\n", b"abc", "99"),
        ("9999999999\n", b"", "9"),
        ("x\n", b"", "9"),
        ("3\n0\n", b"", "9"),
        ("1\n18446744073709551615\n2\n", b"ab", "9"),
    ] {
        let error = lab.apply(sparse(map, data, real)).unwrap_err();
        assert!(matches!(error, ExtractError::Format { .. }), "{map:?}: {error}");
    }
    let huge = lab.apply(sparse("0\n", b"", "99999999999999")).unwrap_err();
    assert!(matches!(huge, ExtractError::Limit { .. }), "{huge}");
    let old = Archive::default().pax(&[("GNU.sparse.map", b"0,1")]).file("x", b"1");
    assert!(lab.apply(old).unwrap_err().to_string().contains("sparse"));
}

#[test]
fn every_way_out_is_refused_or_stays_inside() {
    let escape = |archive: Archive| {
        let lab = Lab::new();
        let error = lab.apply(archive).unwrap_err();
        lab.unharmed();
        match error {
            ExtractError::Refused { archive, why, .. } => {
                assert_eq!(archive, "layer");
                why
            }
            other => panic!("{other}"),
        }
    };
    assert!(escape(Archive::default().file("../outside/x", b"1")).contains(".."));
    assert!(escape(Archive::default().file("a/../../outside/x", b"1")).contains(".."));
    assert!(escape(Archive::default().file("/outside/x", b"1")).contains("absolute"));
    assert!(escape(Archive::default().hard_link("x", "../outside/secret")).contains(".."));
    assert!(escape(Archive::default().hard_link("x", "/outside/secret")).contains("absolute"));
    assert!(escape(Archive::default().hard_link("x", "x")).contains("its own target"));
    assert!(escape(Archive::default().hard_link("x", "absent")).contains("does not exist"));
    assert!(escape(Archive::default().folder("d").hard_link("x", "d")).contains("not a file"));
    assert!(escape(Archive::default().file("f", b"").file("f/x", b"1")).contains("not a folder"));
    assert!(
        escape(Archive::default().symlink("a", "b").symlink("b", "a").file("a/x", b"1")).contains("loop")
    );
    assert!(escape(Archive::default().file(".", b"1")).contains("root folder"));
    assert!(escape(Archive::default().symlink("x", "")).contains("target"));
}

#[test]
fn a_link_out_leads_back_into_the_root() {
    let lab = Lab::new();
    let outside = lab.dir.path().join("outside");
    let archive = Archive::default()
        .symlink("up", "../outside")
        .symlink("abs", "/outside")
        .folder("outside")
        .file("up/one", b"1")
        .file("abs/two", b"2")
        .symlink("last", outside.join("secret").to_str().unwrap())
        .file("last", b"replaces the link");
    lab.apply(archive).unwrap();
    assert_eq!((lab.read("outside/one"), lab.read("outside/two")), ("1".to_owned(), "2".to_owned()));
    assert_eq!(lab.read("last"), "replaces the link");
    lab.unharmed();
    // A hard link to a link links the link, not what it leads to.
    lab.apply(Archive::default().symlink("s", "/outside/secret").hard_link("h", "s")).unwrap();
    assert!(fs::symlink_metadata(lab.root().join("h")).unwrap().is_symlink());
    lab.unharmed();
}

#[test]
fn a_whiteout_through_a_link_removes_nothing_outside() {
    let lab = Lab::new();
    symlink("../outside", lab.root().join("up")).unwrap();
    lab.apply(Archive::default().file("up/.wh.secret", b"").file("up/.wh..wh..opq", b"")).unwrap();
    lab.unharmed();
    for name in [".wh.", ".wh..", ".wh...", ".wh..wh.x"] {
        assert!(
            matches!(lab.apply(Archive::default().file(name, b"")), Err(ExtractError::Refused { .. })),
            "{name}"
        );
    }
    lab.unharmed();
}

#[test]
fn whiteouts_hide_lower_layers_only() {
    let lab = Lab::new();
    lab.apply(
        Archive::default()
            .file("a/low", b"1")
            .file("a/sub/low", b"1")
            .file("b/low", b"1")
            .file("b/keep", b"1"),
    )
    .unwrap();
    // The opaque mark comes after what it must not hide.
    lab.apply(
        Archive::default()
            .file("a/new", b"2")
            .file("a/sub/new", b"2")
            .file("a/.wh..wh..opq", b"")
            .file("b/.wh.low", b"")
            .file("c/.wh.absent", b""),
    )
    .unwrap();
    let exists = |path: &str| lab.root().join(path).exists();
    for (path, expected) in [
        ("a/low", false),
        ("a/new", true),
        ("a/sub/low", false),
        ("a/sub/new", true),
        ("b/low", false),
        ("b/keep", true),
        ("a/.wh..wh..opq", false),
        ("c", false),
    ] {
        assert_eq!(exists(path), expected, "{path}");
    }
    // A file takes a folder's place, and the other way round.
    lab.apply(Archive::default().file("a", b"file").folder("b/keep")).unwrap();
    assert!(lab.root().join("a").is_file() && lab.root().join("b/keep").is_dir());
}

#[test]
fn limits_hold_and_damage_is_told() {
    let lab = Lab::new();
    let small = Limits { bytes_max: 100, entries_max: 3, ..Limits::default() };
    let limit = |archive: Vec<u8>| match lab.apply_with(archive, &small).unwrap_err() {
        ExtractError::Limit { what, .. } => what,
        other => panic!("{other}"),
    };
    assert_eq!(limit(Archive::default().file("a", &[0; 101]).bytes()), "unpacked bytes");
    let many = Archive::default().folder("a").folder("b").folder("c").folder("d");
    assert_eq!(limit(many.bytes()), "entries");
    // A header that announces far more than there is: refused before anything is made of it.
    let mut huge = header(EntryType::Regular, u64::MAX / 2);
    raw_name(&mut huge, "huge");
    assert_eq!(limit(huge.as_bytes().to_vec()), "unpacked bytes");
    let mut long = header(EntryType::XHeader, 1 << 40);
    raw_name(&mut long, "pax");
    assert_eq!(limit(long.as_bytes().to_vec()), "bytes in an extension record");
    let whole = Archive::default().file("f", &[1; 50]).bytes();
    for length in [0, 100, 512, 530, 1023, 1024] {
        let error = lab.apply_with(whole[..length].to_vec(), &Limits::default()).unwrap_err();
        assert!(matches!(error, ExtractError::Format { .. }), "{length}: {error}");
    }
    let mut bad = whole;
    bad[0] ^= 1;
    let error = lab.apply_with(bad, &Limits::default()).unwrap_err().to_string();
    assert!(error.contains("checksum"), "{error}");
    let owner = Archive::default().pax(&[("uid", b"99999999999")]).file("f", b"");
    assert!(lab.apply(owner).unwrap_err().to_string().contains("owner"));
}

#[test]
fn links_that_lengthen_a_path_cannot_make_it_bottomless() {
    let lab = Lab::new();
    let deep = "d/".repeat(40);
    let mut archive = Archive::default().folder(&deep);
    let mut place = deep;
    let mut refused = None;
    for round in 0..6 {
        // Each link jumps to the bottom; below it the tree goes on.
        archive = archive.symlink(&format!("l{round}"), place.trim_end_matches('/'));
        refused = lab.apply(archive).err();
        if refused.is_some() {
            break;
        }
        place = format!("l{round}/{}", "e/".repeat(35));
        archive = Archive::default().folder(&place);
    }
    assert!(
        refused
            .is_some_and(|error| error.to_string().contains("deep") || error.to_string().contains("folder"))
    );
}

#[test]
fn a_sandbox_becomes_an_image_that_never_exists_by_half() {
    let dir = tempfile::tempdir().unwrap();
    let (images, swept) = Images::open(dir.path()).unwrap();
    assert_eq!(swept, [""; 0]);
    let source = || Source::Sandbox { base: "base".to_owned(), name: "web".to_owned() };
    let import = |id: &str, bytes: &[u8]| {
        images.import_tar(id, &mut { bytes }, source(), ImageConfig::default(), &Limits::default())
    };
    let bytes = Archive::default()
        .folder("etc")
        .file("etc/passwd", b"root:x:0:0::/root:/bin/sh\nnode:x:1000:1000::/home/node:/bin/sh\n")
        .symlink("tmp", "/etc")
        .symlink("run", "/outside")
        .file("etc/.wh.kept", b"in a flat tree every name is a name")
        .bytes();
    let image = import("web-1", &bytes).unwrap();
    assert!(image.files > 10 && image.bytes > 0);
    let root = images.rootfs("web-1");
    let passwd = fs::read_to_string(root.join("etc/passwd")).unwrap();
    assert!(passwd.ends_with("user:x:1001:1001::/home/user:/bin/sh\n"), "{passwd}");
    assert_eq!(fs::metadata(root.join("home/user")).unwrap().uid(), 1001);
    assert!(root.join("etc/.wh.kept").exists());
    assert!(fs::read_to_string(root.join("usr/local/bin/dormouse-awake")).unwrap().contains("agent awake"));
    assert!(matches!(import("web-1", &bytes), Err(ImportError::Exists { .. })));
    assert!(matches!(import("../x", &bytes), Err(ImportError::Name(_))));
    assert!(matches!(import("cut", &bytes[..bytes.len() - 1600]), Err(ImportError::Extract(_))));
    assert_eq!(images.list().unwrap(), std::slice::from_ref(&image));
    assert_eq!(images.load("web-1").unwrap(), image);
    let needed = images.remove("web-1", &["template web".to_owned()]).unwrap_err().to_string();
    assert!(needed.contains("template web"), "{needed}");
    fs::create_dir(dir.path().join("tmp.1.2")).unwrap();
    let (images, swept) = Images::open(dir.path()).unwrap();
    assert_eq!(swept, ["tmp.1.2"]);
    assert_eq!(images.remove("web-1", &[]).unwrap().bytes, image.bytes);
    assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 0);
}

fn any_entry() -> impl Strategy<Value = (u8, String, String)> {
    let part = prop_oneof![
        "[a-c]",
        Just("..".to_owned()),
        Just(".wh.a".to_owned()),
        Just(".wh..wh..opq".to_owned())
    ];
    let path = proptest::collection::vec(part, 1..5).prop_map(|parts| parts.join("/"));
    let target = prop_oneof![
        path.clone(),
        Just("/outside".to_owned()),
        Just("../outside".to_owned()),
        Just("../outside/secret".to_owned())
    ];
    (0..6_u8, path, target)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]

    /// Whatever links, names and whiteouts stand in whatever order: nothing outside changes.
    #[test]
    fn no_archive_reaches_outside(entries in proptest::collection::vec(any_entry(), 1..15)) {
        let lab = Lab::new();
        for (kind, name, target) in entries {
            let archive = match kind {
                0 => Archive::default().file(&name, b"content"),
                1 => Archive::default().folder(&name),
                2 | 3 => Archive::default().symlink(&name, &target),
                4 => Archive::default().hard_link(&name, &target),
                _ => Archive::default().entry(EntryType::Fifo, &name, "", 0o600),
            };
            let _ = lab.apply(archive);
        }
        lab.unharmed();
    }

    #[test]
    fn any_bytes_are_an_archive_or_refused(bytes in proptest::collection::vec(any::<u8>(), 0..2000), cut in 0..2000_usize) {
        let lab = Lab::new();
        let _ = lab.apply_with(bytes.clone(), &Limits::default());
        let mut mixed = Archive::default().folder("a").symlink("b", "a").file("b/c", b"x").bytes();
        let at = cut % mixed.len();
        for (place, byte) in mixed[at..].iter_mut().zip(bytes) {
            *place = byte;
        }
        let _ = lab.apply_with(mixed, &Limits::default());
        lab.unharmed();
    }
}

#[test]
fn the_folder_of_a_test_is_what_it_seems() {
    let lab = Lab::new();
    lab.unharmed();
    fs::write(Path::new(&lab.dir.path().join("outside/new")), "x").unwrap();
    assert!(std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| lab.unharmed())).is_err());
}
