//! From what was written to what is done: variables put in, paths made absolute, files found, keys chained.

use std::io::{self, Read, Write};
use std::path::{Path, PathBuf};

use dormouse_types::Shape;
use serde::{Deserialize, Serialize};

use super::context::{Context, CopyEntry, CopyKind, Target};
use super::{
    Action, DEFAULT_PATH, Instruction, Ready, RunCommand, Template, TemplateError, Variables, check_user,
    words,
};
use crate::record::{Image, ImageConfig};

const PATH_BYTES_MAX: usize = 4095;

/// Everything that building a template does, in order.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct BuildPlan {
    /// The image that the first step starts from.
    pub base: String,
    /// The folder that copied files are read from.
    pub context: PathBuf,
    pub steps: Vec<Step>,
    /// Of the sandboxes that are made from it.
    pub config: ImageConfig,
    pub start: Option<String>,
    pub ready: Option<Ready>,
    pub shape: Shape,
    pub aliases: Vec<String>,
}

/// One thing to be done in the sandbox that builds.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Step {
    pub line: u32,
    pub text: String,
    /// BLAKE3, hex, of all that the result depends on: base, steps before, this one, copied content.
    pub key: String,
    pub kind: StepKind,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum StepKind {
    /// Fails the build unless it ends with 0.
    Run { argv: Vec<String>, env: Variables, user: String, cwd: String },
    /// `owner` as `USER` or `USER:GROUP`; none: root. Existing folders keep mode and owner.
    Copy { entries: Vec<CopyEntry>, owner: Option<String> },
    /// Makes the folder, and those above it, for this user, where it does not exist.
    Workdir { path: String, user: String },
}

struct State {
    env: Variables,
    /// Empty: none was named so far.
    user: String,
    workdir: String,
}

impl Template {
    /// Resolves all instructions against the base image and the context.
    pub fn plan(&self, context: &Path, base: &Image) -> Result<BuildPlan, TemplateError> {
        let mut env = base.config.env.clone();
        env.entry("PATH".to_owned()).or_insert_with(|| DEFAULT_PATH.to_owned());
        let workdir = base.config.workdir.clone();
        let mut state = State { env, user: base.config.user.clone(), workdir };
        let mut files: Option<Context> = None;
        let mut key = first_key(base);
        let mut steps = Vec::new();
        for instruction in &self.instructions {
            let fail = |why: String| self.error(instruction.line, why);
            let Some(kind) = state.apply(instruction, context, &mut files).map_err(fail)? else { continue };
            key = next_key(&key, &kind);
            let (line, text) = (instruction.line, instruction.text.clone());
            steps.push(Step { line, text, key: hex(&key), kind });
        }
        Ok(BuildPlan {
            base: base.id.clone(),
            context: context.to_owned(),
            steps,
            config: ImageConfig {
                env: state.env,
                user: state.user,
                workdir: state.workdir,
                entrypoint: Vec::new(),
                cmd: Vec::new(),
            },
            start: self.start.clone(),
            ready: self.ready.clone(),
            shape: self.shape,
            aliases: self.aliases.clone(),
        })
    }
}

impl State {
    fn apply(
        &mut self,
        instruction: &Instruction,
        context: &Path,
        files: &mut Option<Context>,
    ) -> Result<Option<StepKind>, String> {
        let builder = if self.user.is_empty() { "root" } else { &self.user };
        let cwd = if self.workdir.is_empty() { "/" } else { &self.workdir };
        match &instruction.action {
            Action::Run { command, user } => {
                let argv = match command {
                    RunCommand::Shell(line) => vec!["/bin/sh".to_owned(), "-c".to_owned(), line.clone()],
                    RunCommand::Exec(argv) => argv.clone(),
                };
                let user = user.clone().unwrap_or_else(|| builder.to_owned());
                Ok(Some(StepKind::Run { argv, env: self.env.clone(), user, cwd: cwd.to_owned() }))
            }
            Action::Copy { sources, target, owner, mode } => {
                let files = match files {
                    Some(files) => files,
                    None => files.insert(Context::open(context)?),
                };
                let written = words::expand(target, &self.env)?;
                let path = join(cwd, &written)?;
                let last = written.rsplit('/').next().unwrap_or_default();
                let folder = sources.len() > 1 || matches!(last, "" | "." | "..") || path == cwd;
                if sources.len() > 1 && !written.ends_with('/') && path != cwd && last != "." {
                    return Err(format!("several files go into a folder: write the target as {written}/"));
                }
                let mut entries = Vec::new();
                for source in sources {
                    let source = words::expand(source, &self.env)?;
                    entries.extend(files.copy(&source, &Target { path: &path, folder })?);
                }
                if let Some(bits) = mode {
                    entries.iter_mut().for_each(|entry| entry.set_mode(*bits));
                }
                Ok(Some(StepKind::Copy { entries, owner: owner.clone() }))
            }
            Action::Env(pairs) => {
                // All values of one line see the variables as they were before it.
                let before = self.env.clone();
                for (name, value) in pairs {
                    self.env.insert(name.clone(), words::expand(value, &before)?);
                }
                Ok(None)
            }
            Action::Workdir(path) => {
                let path = join(cwd, &words::expand(path, &self.env)?)?;
                let user = builder.to_owned();
                self.workdir.clone_from(&path);
                Ok(Some(StepKind::Workdir { path, user }))
            }
            Action::User(name) => {
                let name = words::expand(name, &self.env)?;
                check_user(&name)?;
                self.user = name;
                Ok(None)
            }
        }
    }
}

/// An absolute path without `.`, `..` and doubled slashes.
fn join(cwd: &str, path: &str) -> Result<String, String> {
    let whole = if path.starts_with('/') { path.to_owned() } else { format!("{cwd}/{path}") };
    let mut parts: Vec<&str> = Vec::new();
    for part in whole.split('/') {
        match part {
            "" | "." => {}
            ".." => drop(parts.pop()),
            _ => parts.push(part),
        }
    }
    let path = format!("/{}", parts.join("/"));
    if path.contains('\0') || path.len() > PATH_BYTES_MAX || parts.iter().any(|part| part.len() > 255) {
        return Err(format!("{:?}… cannot be a path", path.chars().take(80).collect::<String>()));
    }
    Ok(path)
}

impl CopyEntry {
    fn set_mode(&mut self, bits: u32) {
        match &mut self.kind {
            CopyKind::File { mode, .. } | CopyKind::Folder { mode } => *mode = bits,
            CopyKind::Link { .. } => {}
        }
    }
}

fn first_key(base: &Image) -> [u8; 32] {
    let mut hasher = blake3::Hasher::new_derive_key("dormouse 2026 template step cache");
    hasher.update(base.digest.as_bytes());
    *hasher.finalize().as_bytes()
}

/// Every part goes in with its length, so that no two different steps read the same.
fn next_key(before: &[u8; 32], kind: &StepKind) -> [u8; 32] {
    let mut hasher = blake3::Hasher::new_derive_key("dormouse 2026 template step cache");
    let mut part = |bytes: &[u8]| {
        hasher.update(&(bytes.len() as u64).to_le_bytes()).update(bytes);
    };
    part(before);
    match kind {
        StepKind::Run { argv, env, user, cwd } => {
            part(b"run");
            part(&(argv.len() as u64).to_le_bytes());
            argv.iter().for_each(|word| part(word.as_bytes()));
            for (name, value) in env {
                part(name.as_bytes());
                part(value.as_bytes());
            }
            part(user.as_bytes());
            part(cwd.as_bytes());
        }
        StepKind::Copy { entries, owner } => {
            part(b"copy");
            part(owner.as_deref().unwrap_or_default().as_bytes());
            for CopyEntry { target, kind, .. } in entries {
                part(target.as_bytes());
                match kind {
                    CopyKind::File { mode, digest, .. } => {
                        part(&mode.to_le_bytes());
                        part(digest.as_bytes());
                    }
                    CopyKind::Folder { mode } => part(&mode.to_le_bytes()),
                    CopyKind::Link { to } => part(format!("-> {to}").as_bytes()),
                }
            }
        }
        StepKind::Workdir { path, user } => {
            part(b"workdir");
            part(path.as_bytes());
            part(user.as_bytes());
        }
    }
    *hasher.finalize().as_bytes()
}

fn hex(bytes: &[u8; 32]) -> String {
    blake3::Hash::from_bytes(*bytes).to_hex().to_string()
}

impl BuildPlan {
    /// Writes a copy step as a tar archive with names relative to `/`. Owners go in by name and, where
    /// they are numbers, by number. A file that is no longer what was planned is an error.
    pub fn write_tar(&self, step: &StepKind, out: &mut dyn Write) -> io::Result<()> {
        let StepKind::Copy { entries, owner } = step else {
            return Err(io::Error::new(io::ErrorKind::InvalidInput, "the step copies nothing"));
        };
        let context = Context::open(&self.context).map_err(io::Error::other)?;
        let mut archive = tar::Builder::new(out);
        for entry in entries {
            let mut header = tar::Header::new_gnu();
            set_owner(&mut header, owner.as_deref().unwrap_or("0:0"))?;
            let name = entry.target.trim_start_matches('/');
            match &entry.kind {
                // The root folder is there.
                CopyKind::Folder { .. } if name.is_empty() => {}
                CopyKind::Folder { mode } => {
                    header.set_entry_type(tar::EntryType::Directory);
                    header.set_mode(*mode);
                    header.set_size(0);
                    archive.append_data(&mut header, format!("{name}/"), io::empty())?;
                }
                CopyKind::Link { to } => {
                    header.set_entry_type(tar::EntryType::Symlink);
                    header.set_mode(0o777);
                    header.set_size(0);
                    archive.append_link(&mut header, name, to)?;
                }
                CopyKind::File { mode, bytes, mtime_s, digest } => {
                    header.set_entry_type(tar::EntryType::Regular);
                    header.set_mode(*mode);
                    header.set_size(*bytes);
                    header.set_mtime(*mtime_s);
                    let mut content = Checked {
                        file: context.file(&entry.source)?.take(*bytes),
                        hash: blake3::Hasher::new(),
                        read: 0,
                    };
                    archive.append_data(&mut header, name, &mut content)?;
                    if content.read != *bytes || content.hash.finalize().to_hex().as_str() != digest {
                        let why = format!("{} changed while it was copied", entry.source);
                        return Err(io::Error::new(io::ErrorKind::InvalidData, why));
                    }
                }
            }
        }
        archive.finish()
    }
}

fn set_owner(header: &mut tar::Header, owner: &str) -> io::Result<()> {
    let (user, group) = owner.split_once(':').unwrap_or((owner, owner));
    match user.parse() {
        Ok(uid) => header.set_uid(uid),
        Err(_) => {
            header.set_uid(0);
            header.set_username(user)?;
        }
    }
    match group.parse() {
        Ok(gid) => header.set_gid(gid),
        Err(_) => {
            header.set_gid(0);
            header.set_groupname(group)?;
        }
    }
    Ok(())
}

struct Checked<R> {
    file: R,
    hash: blake3::Hasher,
    read: u64,
}

impl<R: Read> Read for Checked<R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let read = self.file.read(buffer)?;
        self.hash.update(&buffer[..read]);
        self.read += read as u64;
        Ok(read)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::record::Source;

    fn base() -> Image {
        let source = Source::Debian { suite: "bookworm".to_owned(), packages: Vec::new() };
        Image::new("base-image".to_owned(), source, "d1".to_owned(), ImageConfig::default())
    }

    fn plan_of(dir: &Path, text: &str) -> BuildPlan {
        Template::parse("Dockerfile", &format!("FROM base\n{text}")).unwrap().plan(dir, &base()).unwrap()
    }

    fn keys(dir: &Path, text: &str) -> Vec<String> {
        plan_of(dir, text).steps.into_iter().map(|step| step.key).collect()
    }

    #[test]
    fn state_goes_from_line_to_line() {
        let dir = tempfile::tempdir().unwrap();
        let plan = plan_of(
            dir.path(),
            "ENV A=1 B=$A\nENV PATH=/opt/bin:$PATH\nWORKDIR /srv\nWORKDIR app$A\nUSER user\nRUN x\n",
        );
        let env: Variables = [("A", "1"), ("B", ""), ("PATH", &format!("/opt/bin:{DEFAULT_PATH}"))]
            .map(|(name, value)| (name.to_owned(), value.to_owned()))
            .into();
        let last = plan.steps.last().unwrap();
        assert_eq!(
            last.kind,
            StepKind::Run {
                argv: ["/bin/sh", "-c", "x"].map(str::to_owned).into(),
                env: env.clone(),
                user: "user".to_owned(),
                cwd: "/srv/app1".to_owned(),
            }
        );
        assert_eq!(
            (plan.config.env, plan.config.user, plan.config.workdir),
            (env, "user".into(), "/srv/app1".into())
        );
    }

    #[test]
    fn keys_depend_on_all_that_came_before_and_on_nothing_else() {
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join("f"), "one").unwrap();
        let text = "RUN a\nCOPY f /f\nRUN b\n";
        let first = keys(dir.path(), text);
        assert_eq!(first, keys(dir.path(), &format!("# comment\n{text}")));
        let other = keys(dir.path(), "RUN a\nCOPY f /g\nRUN b\n");
        assert_eq!(first[0], other[0]);
        assert!(first[1] != other[1] && first[2] != other[2]);
        std::fs::write(dir.path().join("f"), "two").unwrap();
        let changed = keys(dir.path(), text);
        assert_eq!(first[0], changed[0]);
        assert!(first[1] != changed[1] && first[2] != changed[2]);
        assert_ne!(keys(dir.path(), "ENV A=1\nRUN a"), keys(dir.path(), "RUN a"));
    }

    #[test]
    fn copy_targets() {
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join("f"), "1").unwrap();
        std::fs::write(dir.path().join("g"), "2").unwrap();
        for (text, expected) in [
            ("COPY f /d", "/d"),
            ("COPY f /d/", "/d/f"),
            ("COPY f .", "/f"),
            ("WORKDIR /w\nCOPY f .", "/w/f"),
            ("WORKDIR /w\nCOPY f ./", "/w/f"),
            ("WORKDIR /w\nCOPY f x", "/w/x"),
            ("WORKDIR /w\nCOPY f /w", "/w/f"),
            ("ENV D=/e\nCOPY f $D/", "/e/f"),
        ] {
            let plan = plan_of(dir.path(), text);
            let StepKind::Copy { entries, .. } = &plan.steps.last().unwrap().kind else { panic!("{text}") };
            assert_eq!(entries[0].target, expected, "{text}");
        }
        let several = Template::parse("Dockerfile", "FROM base\nCOPY f g /d").unwrap();
        let error = several.plan(dir.path(), &base()).unwrap_err().to_string();
        assert!(error.starts_with("Dockerfile line 2: several files"), "{error}");
    }

    #[test]
    fn a_copy_step_becomes_a_tar_archive() {
        let dir = tempfile::tempdir().unwrap();
        std::fs::create_dir(dir.path().join("d")).unwrap();
        std::fs::write(dir.path().join("d/f"), "content").unwrap();
        std::os::unix::fs::symlink("f", dir.path().join("d/l")).unwrap();
        let plan = plan_of(dir.path(), "COPY --chown=user --chmod=700 d /opt/d");
        let mut bytes = Vec::new();
        plan.write_tar(&plan.steps[0].kind, &mut bytes).unwrap();
        let mut archive = tar::Archive::new(bytes.as_slice());
        let found: Vec<String> = archive
            .entries()
            .unwrap()
            .map(|entry| {
                let entry = entry.unwrap();
                let header = entry.header();
                let owner = header.username().unwrap().unwrap().to_owned();
                format!("{} {:o} {owner}", entry.path().unwrap().display(), header.mode().unwrap())
            })
            .collect();
        assert_eq!(found, ["opt/d/ 700 user", "opt/d/f 700 user", "opt/d/l 777 user"]);
        std::fs::write(dir.path().join("d/f"), "changed").unwrap();
        let error = plan.write_tar(&plan.steps[0].kind, &mut Vec::new()).unwrap_err();
        assert!(error.to_string().contains("changed while it was copied"), "{error}");
    }
}
