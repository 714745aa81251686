//! The files that a template copies: found in its context, never outside of it.
//!
//! Sources are opened by the kernel beneath the context (openat2(2), RESOLVE_BENEATH): a link that leads
//! out is an error. Links inside a copied folder are copied as links.

use std::ffi::OsStr;
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;

use rustix::fs::{FileType, OFlags};
use serde::{Deserialize, Serialize};

use super::glob;
use crate::root::{self, DEPTH_MAX, RelPath, Root};

const ENTRIES_MAX: usize = 200_000;
const IGNORE_BYTES_MAX: u64 = 1 << 20;
const IGNORE_LINES_MAX: usize = 10_000;

/// One file, folder or link to be made in the sandbox.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct CopyEntry {
    /// Relative to the context.
    pub source: String,
    /// Absolute, in the sandbox.
    pub target: String,
    pub kind: CopyKind,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum CopyKind {
    /// `digest`: BLAKE3, hex.
    File {
        mode: u32,
        bytes: u64,
        mtime_s: u64,
        digest: String,
    },
    Folder {
        mode: u32,
    },
    Link {
        to: String,
    },
}

pub struct Context {
    root: Root,
    ignore: Ignore,
    entries: usize,
}

/// Where a source goes.
pub struct Target<'a> {
    pub path: &'a str,
    /// It is a folder that files are put into.
    pub folder: bool,
}

impl Context {
    pub fn open(path: &Path) -> Result<Self, String> {
        let shown = path.display();
        let root = Root::open(path).map_err(|error| format!("cannot open the context {shown}: {error}"))?;
        let text = root
            .read(".dockerignore", IGNORE_BYTES_MAX)
            .map_err(|error| format!("cannot read .dockerignore in {shown}: {error}"))?;
        let ignore = Ignore::parse(text.as_deref().unwrap_or_default())?;
        Ok(Self { root, ignore, entries: 0 })
    }

    /// Opens a file for its content.
    pub fn file(&self, source: &str) -> io::Result<File> {
        let path = RelPath::inside(source).map_err(|why| io::Error::new(io::ErrorKind::InvalidInput, why))?;
        Ok(File::from(self.root.open_beneath(&path)?))
    }

    /// Everything that one source of a COPY stands for.
    pub fn copy(&mut self, source: &str, target: &Target<'_>) -> Result<Vec<CopyEntry>, String> {
        let path = normal(source)?;
        let sources = if glob::is_pattern(&path) { self.expand(&path)? } else { vec![path] };
        let mut found = Vec::new();
        for path in sources {
            self.source(&path, target, &mut found)?;
        }
        Ok(found)
    }

    fn source(&mut self, path: &str, target: &Target<'_>, found: &mut Vec<CopyEntry>) -> Result<(), String> {
        if !path.is_empty() && self.ignore.excludes(path) && !self.ignore.may_include_below {
            return Err(format!("{path} is excluded by .dockerignore"));
        }
        let file = self.file(path).map_err(|error| failed(path, &error))?;
        let meta = file.metadata().map_err(|error| failed(path, &error))?;
        if meta.is_dir() {
            let folder = target.path.trim_end_matches('/');
            let top = if folder.is_empty() { "/" } else { folder };
            let kind = CopyKind::Folder { mode: 0o755 };
            self.push(found, CopyEntry { source: path.to_owned(), target: top.to_owned(), kind })?;
            return self.walk(file.as_fd(), path, folder, found, 0);
        }
        let name = path.rsplit('/').next().unwrap_or(path);
        let target = match target.folder {
            true => format!("{}/{name}", target.path.trim_end_matches('/')),
            false => target.path.to_owned(),
        };
        let kind = describe(&file).map_err(|error| failed(path, &error))?;
        self.push(found, CopyEntry { source: path.to_owned(), target, kind })
    }

    fn walk(
        &mut self,
        dir: BorrowedFd<'_>,
        path: &str,
        target: &str,
        found: &mut Vec<CopyEntry>,
        depth: usize,
    ) -> Result<(), String> {
        if depth > DEPTH_MAX {
            return Err(format!("{path} lies too deep"));
        }
        let mut names = root::names_of(dir).map_err(|error| failed(path, &error))?;
        names.sort();
        for name in names {
            let name =
                name.to_str().ok_or_else(|| format!("{path} holds a name that is not UTF-8: {name:?}"))?;
            let source = if path.is_empty() { name.to_owned() } else { format!("{path}/{name}") };
            let target = format!("{target}/{name}");
            let excluded = self.ignore.excludes(&source);
            let kind = root::file_type_at(dir, OsStr::new(name)).map_err(|error| failed(&source, &error))?;
            match kind {
                Some(FileType::Directory) if !excluded || self.ignore.may_include_below => {
                    let child = root::open_child_dir(dir, OsStr::new(name))
                        .map_err(|error| failed(&source, &error))?;
                    let at = found.len();
                    if !excluded {
                        let mode = mode_of(child.as_fd()).map_err(|error| failed(&source, &error))?;
                        let kind = CopyKind::Folder { mode };
                        self.push(found, CopyEntry { source: source.clone(), target: target.clone(), kind })?;
                    }
                    self.walk(child.as_fd(), &source, &target, found, depth + 1)?;
                    debug_assert!(found.len() >= at);
                }
                _ if excluded => {}
                Some(FileType::RegularFile) => {
                    let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
                    let file = rustix::fs::openat(dir, name, flags, rustix::fs::Mode::empty())
                        .map_err(|error| failed(&source, &error.into()))?;
                    let kind = describe(&File::from(file)).map_err(|error| failed(&source, &error))?;
                    self.push(found, CopyEntry { source, target, kind })?;
                }
                Some(FileType::Symlink) => {
                    let to = rustix::fs::readlinkat(dir, name, Vec::new())
                        .map_err(|error| failed(&source, &error.into()))?;
                    let to = to.into_string().map_err(|_| format!("the link {source} is not UTF-8"))?;
                    self.push(found, CopyEntry { source, target, kind: CopyKind::Link { to } })?;
                }
                Some(_) => {
                    return Err(format!("{source} is neither a file, a folder nor a link; exclude it"));
                }
                // Gone since it was listed.
                None => {}
            }
        }
        Ok(())
    }

    fn push(&mut self, found: &mut Vec<CopyEntry>, entry: CopyEntry) -> Result<(), String> {
        self.entries += 1;
        if self.entries > ENTRIES_MAX {
            return Err(format!("more than {ENTRIES_MAX} files would be copied; name them in .dockerignore"));
        }
        found.push(entry);
        Ok(())
    }

    /// Paths that match the pattern, sorted.
    fn expand(&self, pattern: &str) -> Result<Vec<String>, String> {
        let parts: Vec<&str> = pattern.split('/').collect();
        let mut found = vec![String::new()];
        for (depth, part) in parts.iter().enumerate() {
            let mut next = Vec::new();
            for dir in &found {
                let names = self.root.names(dir).map_err(|error| failed(dir, &error))?;
                for name in names.iter().filter_map(|name| name.to_str()) {
                    let path = if dir.is_empty() { name.to_owned() } else { format!("{dir}/{name}") };
                    let last = depth + 1 == parts.len();
                    if glob::matches(part, name) && !(last && self.ignore.excludes(&path)) {
                        next.push(path);
                    }
                }
                if next.len() > ENTRIES_MAX {
                    return Err(format!("{pattern} matches more than {ENTRIES_MAX} paths"));
                }
            }
            found = next;
        }
        found.sort();
        if found.is_empty() { Err(format!("{pattern} matches nothing in the context")) } else { Ok(found) }
    }
}

fn describe(file: &File) -> io::Result<CopyKind> {
    use std::os::unix::fs::MetadataExt;
    let meta = file.metadata()?;
    if !meta.is_file() {
        return Err(io::Error::new(io::ErrorKind::InvalidInput, "it is neither a file nor a folder"));
    }
    let mut hasher = blake3::Hasher::new();
    let bytes = io::copy(&mut io::BufReader::with_capacity(256 << 10, file), &mut hasher)?;
    Ok(CopyKind::File {
        mode: meta.permissions().mode() & 0o7777,
        bytes,
        mtime_s: u64::try_from(meta.mtime()).unwrap_or(0),
        digest: hasher.finalize().to_hex().to_string(),
    })
}

fn mode_of(fd: BorrowedFd<'_>) -> io::Result<u32> {
    Ok(rustix::fs::fstat(fd)?.st_mode & 0o7777)
}

fn failed(path: &str, error: &io::Error) -> String {
    let shown = if path.is_empty() { "the context" } else { path };
    match error.kind() {
        io::ErrorKind::NotFound => format!("{shown} does not exist in the context"),
        io::ErrorKind::CrossesDevices => {
            format!("{shown} is a link that leads out of the context; copy the file into it")
        }
        _ => format!("cannot read {shown}: {error}"),
    }
}

/// A path inside the context, without `.` and `..`. Empty for the context itself.
fn normal(given: &str) -> Result<String, String> {
    let mut parts: Vec<&str> = Vec::new();
    for part in given.split('/') {
        match part {
            "" | "." => {}
            ".." if parts.pop().is_none() => {
                return Err(format!("{given} lies outside of the context"));
            }
            ".." => {}
            _ => parts.push(part),
        }
    }
    let path = parts.join("/");
    if OsStr::new(&path).as_bytes().contains(&0) {
        return Err("a path holds a zero byte".to_owned());
    }
    Ok(path)
}

/// `.dockerignore`: the last line that matches a path, or a folder above it, decides.
#[derive(Default)]
struct Ignore {
    lines: Vec<(String, bool)>,
    /// Some line begins with `!`: what is excluded must be looked into.
    may_include_below: bool,
}

impl Ignore {
    fn parse(text: &str) -> Result<Self, String> {
        let mut ignore = Self::default();
        for line in text.lines().map(str::trim).filter(|line| !line.is_empty() && !line.starts_with('#')) {
            let (pattern, exclude) = match line.strip_prefix('!') {
                Some(pattern) => (pattern.trim(), false),
                None => (line, true),
            };
            let pattern = normal(pattern).map_err(|why| format!(".dockerignore: {why}"))?;
            ignore.may_include_below |= !exclude;
            ignore.lines.push((pattern, exclude));
            if ignore.lines.len() > IGNORE_LINES_MAX {
                return Err(format!(".dockerignore has more than {IGNORE_LINES_MAX} lines"));
            }
        }
        Ok(ignore)
    }

    fn excludes(&self, path: &str) -> bool {
        let ends = path.match_indices('/').map(|(at, _)| at).chain([path.len()]);
        let prefixes: Vec<&str> = ends.map(|at| &path[..at]).collect();
        let hit = |pattern: &str| {
            pattern.is_empty() || prefixes.iter().any(|prefix| glob::matches(pattern, prefix))
        };
        self.lines.iter().rev().find(|(pattern, _)| hit(pattern)).is_some_and(|(_, exclude)| *exclude)
    }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::symlink;

    use super::*;

    fn context() -> tempfile::TempDir {
        let dir = tempfile::tempdir().unwrap();
        fs::create_dir_all(dir.path().join("app/sub")).unwrap();
        fs::write(dir.path().join("app/main.py"), "print(1)").unwrap();
        fs::write(dir.path().join("app/sub/data.txt"), "x").unwrap();
        fs::write(dir.path().join("README"), "r").unwrap();
        symlink("main.py", dir.path().join("app/link")).unwrap();
        dir
    }

    fn copied(dir: &Path, source: &str, target: &str, folder: bool) -> Result<Vec<String>, String> {
        let found = Context::open(dir)?.copy(source, &Target { path: target, folder })?;
        Ok(found.into_iter().map(|entry| format!("{} -> {}", entry.source, entry.target)).collect())
    }

    #[test]
    fn folders_files_and_patterns() {
        let dir = context();
        assert_eq!(
            copied(dir.path(), "app", "/opt/app", false).unwrap(),
            [
                "app -> /opt/app",
                "app/link -> /opt/app/link",
                "app/main.py -> /opt/app/main.py",
                "app/sub -> /opt/app/sub",
                "app/sub/data.txt -> /opt/app/sub/data.txt"
            ]
        );
        assert_eq!(copied(dir.path(), "./README", "/r", false).unwrap(), ["README -> /r"]);
        assert_eq!(copied(dir.path(), "/README", "/d/", true).unwrap(), ["README -> /d/README"]);
        assert_eq!(copied(dir.path(), "app/*.py", "/d/", true).unwrap(), ["app/main.py -> /d/main.py"]);
        assert_eq!(copied(dir.path(), ".", "/", true).unwrap().len(), 7);
    }

    #[test]
    fn nothing_outside_is_read() {
        let dir = context();
        let secret = tempfile::NamedTempFile::new().unwrap();
        symlink(secret.path(), dir.path().join("out")).unwrap();
        symlink(secret.path().parent().unwrap(), dir.path().join("outdir")).unwrap();
        symlink("../../../etc", dir.path().join("up")).unwrap();
        let name = secret.path().file_name().unwrap().to_str().unwrap();
        for source in ["out", "up/passwd", "../x", "app/../../x", &format!("outdir/{name}")] {
            let error = copied(dir.path(), source, "/x", false).unwrap_err();
            assert!(error.contains("context"), "{source}: {error}");
        }
        // Inside a folder a link is copied as a link, wherever it leads.
        let all = Context::open(dir.path()).unwrap().copy(".", &Target { path: "/c", folder: true }).unwrap();
        let out = all.iter().find(|entry| entry.source == "out").unwrap();
        assert_eq!(out.kind, CopyKind::Link { to: secret.path().to_str().unwrap().to_owned() });
        assert!(
            !all.iter().any(|entry| entry.source.starts_with("up/") || entry.source.starts_with("outdir/"))
        );
    }

    #[test]
    fn dockerignore_excludes_and_includes_again() {
        let dir = context();
        fs::write(dir.path().join(".dockerignore"), "# c\napp\n!app/sub/*.txt\n*EAD*\n").unwrap();
        assert_eq!(
            copied(dir.path(), ".", "/", true).unwrap(),
            [" -> /", ".dockerignore -> /.dockerignore", "app/sub/data.txt -> /app/sub/data.txt"]
        );
        fs::write(dir.path().join(".dockerignore"), "README").unwrap();
        assert!(copied(dir.path(), "README", "/", true).unwrap_err().contains("excluded by .dockerignore"));
        assert!(copied(dir.path(), "REA*", "/", true).unwrap_err().contains("matches nothing"));
    }

    #[test]
    fn a_pipe_is_refused_and_does_not_block() {
        let dir = context();
        rustix::fs::mknodat(
            rustix::fs::CWD,
            dir.path().join("pipe"),
            FileType::Fifo,
            rustix::fs::Mode::from_raw_mode(0o600),
            0,
        )
        .unwrap();
        assert!(copied(dir.path(), "pipe", "/x", false).is_err());
        assert!(copied(dir.path(), ".", "/x", true).unwrap_err().contains("pipe is neither"));
    }
}
