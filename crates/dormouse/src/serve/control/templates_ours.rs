//! `/dormouse/v1/templates`: list, build from an uploaded context, remove.
//!
//! The context arrives as a tar and is unpacked into a folder of its own, which goes when the build
//! ends. Nothing outside that folder is read or written on its account.

use std::fs::File;
use std::io::{self, Read, Seek};
use std::path::{Component, Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use axum::body::Body;
use axum::extract::State as Extracted;
use bytes::Bytes;
use dormouse_api::dormouse::{BuildLine, TemplateInfo};
use dormouse_api::error::ApiError;
use dormouse_api::query::Query;
use dormouse_node::model::{self, BuildRequest, PlanSource};
use dormouse_types::Shape;
use futures_util::StreamExt;
use tokio::io::AsyncWriteExt;
use tokio::sync::mpsc;

use super::extract::{Asked, Segment};
use crate::serve::app::{App, Caller};
use crate::serve::convert;
use crate::serve::reply::{self, Failure, Outcome};

type Shared = Extracted<Arc<App>>;

/// Of the uploaded tar, and of what is in it.
const CONTEXT_BYTES_MAX: u64 = 4 << 30;
const ENTRIES_MAX: usize = 200_000;
const TEMPLATE_FILE_BYTES_MAX: u64 = 1 << 20;
/// A context that stops arriving.
const PIECE_TIMEOUT: Duration = Duration::from_secs(60);
const GZIP_MAGIC: [u8; 2] = [0x1f, 0x8b];

/// Under the data folder; emptied when the daemon starts.
pub const UPLOADS_DIR: &str = "uploads";

pub async fn list(app: Shared) -> Outcome {
    let templates: Vec<TemplateInfo> =
        app.node.templates().await?.iter().map(convert::template_info).collect();
    Ok(reply::json(200, &templates))
}

pub async fn get(app: Shared, Segment(name): Segment) -> Outcome {
    Ok(reply::json(200, &convert::template_info(&app.node.template_by_name(&name).await?)))
}

pub async fn remove(app: Shared, Segment(name): Segment) -> Outcome {
    Ok(reply::json(200, &convert::removed(app.node.template_rm(&name).await?)))
}

pub async fn build(app: Shared, caller: Caller, Asked(query): Asked, body: Body) -> Outcome {
    let wish = Wish::parse(&query)?;
    let received = receive(&app, body).await;
    // What was not read of the body is read by nobody.
    let (folder, tar) = match received {
        Ok(received) => received,
        Err(error) => return Ok(reply::closing(reply::failure(&error))),
    };
    let context = folder.path().join("context");
    let unpacked = {
        let (context, file) = (context.clone(), wish.file.clone());
        tokio::task::spawn_blocking(move || unpack(tar, &context).and_then(|()| plan(&context, &file))).await
    };
    let plan =
        unpacked.map_err(|error| ApiError::internal(format!("unpacking the context failed: {error}")))??;
    let request = wish.request(plan, context, caller);
    let (lines, receiver) = mpsc::channel(256);
    let app = Arc::clone(&app.0);
    tokio::spawn(async move {
        run(&app, request, lines).await;
        drop(folder);
    });
    Ok(reply::with_body(200, "application/x-ndjson", Body::from_stream(stream(receiver))))
}

fn stream(
    receiver: mpsc::Receiver<Bytes>,
) -> impl futures_util::Stream<Item = Result<Bytes, std::convert::Infallible>> {
    futures_util::stream::unfold(receiver, |mut receiver| async move {
        receiver.recv().await.map(|line| (Ok(line), receiver))
    })
}

/// Builds to the end, also when the client has gone: what is cached serves the next build.
async fn run(app: &App, request: BuildRequest, lines: mpsc::Sender<Bytes>) {
    let (progress, mut told) = mpsc::channel(64);
    let building = app.node.build_template(request, progress);
    let telling = async {
        while let Some(step) = told.recv().await {
            send(&lines, &progress_line(step)).await;
        }
    };
    let (built, ()) = tokio::join!(building, telling);
    let last = match built {
        Ok(template) => BuildLine::Done { template: convert::template_info(&template) },
        Err(error) => BuildLine::Error { error: reply::from_node(&error).body() },
    };
    send(&lines, &last).await;
}

fn progress_line(step: model::BuildProgress) -> BuildLine {
    BuildLine::Progress {
        at: step.at,
        level: convert::level_word(step.level).to_owned(),
        step: step.step,
        message: step.message,
    }
}

async fn send(lines: &mpsc::Sender<Bytes>, line: &BuildLine) {
    let Ok(mut text) = serde_json::to_vec(line) else { return };
    text.push(b'\n');
    // A client that has gone does not stop the build.
    let _ = lines.send(Bytes::from(text)).await;
}

/// What the query asks of a build.
struct Wish {
    names: Vec<String>,
    file: String,
    engine: Option<dormouse_types::EngineKind>,
    shape: Option<Shape>,
    start_command: Option<String>,
    ready_command: Option<String>,
    no_cache: bool,
}

impl Wish {
    fn parse(query: &Query) -> Result<Self, ApiError> {
        let engine = query.get("engine").map(str::parse).transpose();
        let names = query.get("name").unwrap_or("").split(',').map(str::trim).filter(|name| !name.is_empty());
        Ok(Self {
            names: names.map(str::to_owned).collect(),
            file: query.get("file").unwrap_or("").to_owned(),
            engine: engine.map_err(|error| ApiError::invalid("engine", error))?,
            shape: shape(query)?,
            start_command: query.get("startCommand").map(str::to_owned),
            ready_command: query.get("readyCommand").map(str::to_owned),
            no_cache: query.flag("noCache")?.unwrap_or(false),
        })
    }

    fn request(self, plan: PlanSource, context: PathBuf, caller: Caller) -> BuildRequest {
        BuildRequest {
            aliases: self.names,
            plan,
            context,
            engine: self.engine,
            shape: self.shape,
            start_command: self.start_command,
            ready_command: self.ready_command,
            no_cache: self.no_cache,
            owner: Some(caller.key),
        }
    }
}

fn shape(query: &Query) -> Result<Option<Shape>, ApiError> {
    let (cpus, memory, disk) = (query.number("cpus")?, query.number("memoryMB")?, query.number("diskMB")?);
    if cpus.is_none() && memory.is_none() && disk.is_none() {
        return Ok(None);
    }
    let base = Shape::default();
    let shape = Shape {
        cpus: cpus.unwrap_or(base.cpus),
        memory_mib: memory.unwrap_or(base.memory_mib),
        disk_mib: disk.unwrap_or(base.disk_mib),
        processes_max: base.processes_max,
    };
    shape.validate().map(Some).map_err(|error| ApiError::new(400, "invalid_request", error.to_string()))
}

/// Writes the uploaded tar into a file that has no name, beside the folder that it will fill.
async fn receive(app: &App, body: Body) -> Result<(tempfile::TempDir, File), ApiError> {
    let failed = |error: io::Error| ApiError::internal(format!("the context could not be kept: {error}"));
    let uploads = app.data_dir.join(UPLOADS_DIR);
    std::fs::create_dir_all(&uploads).map_err(failed)?;
    let folder = tempfile::tempdir_in(&uploads).map_err(failed)?;
    let mut file = tokio::fs::File::from_std(tempfile::tempfile_in(&uploads).map_err(failed)?);
    let mut pieces = body.into_data_stream();
    let mut received: u64 = 0;
    loop {
        let piece = tokio::time::timeout(PIECE_TIMEOUT, pieces.next()).await.map_err(|_| {
            ApiError::new(
                408,
                "timeout",
                format!("the context stopped arriving for {} s", PIECE_TIMEOUT.as_secs()),
            )
        })?;
        let Some(piece) = piece else { break };
        let piece = piece.map_err(|error| {
            ApiError::new(400, "invalid_request", format!("the context broke off: {error}"))
        })?;
        received += piece.len() as u64;
        if received > CONTEXT_BYTES_MAX {
            let message = format!("the context is larger than {CONTEXT_BYTES_MAX} bytes");
            return Err(ApiError::new(413, "body_too_large", message));
        }
        file.write_all(&piece).await.map_err(|error| match error.kind() {
            io::ErrorKind::StorageFull => {
                ApiError::new(507, "no_space", "there is no space left for the context")
            }
            _ => failed(error),
        })?;
    }
    file.flush().await.map_err(failed)?;
    Ok((folder, file.into_std().await))
}

fn bad_context(why: impl std::fmt::Display) -> ApiError {
    ApiError::new(400, "invalid_context", format!("the build context cannot be unpacked: {why}"))
}

/// Unpacks regular files, folders and links; whatever would land outside is refused.
fn unpack(mut tar: File, into: &Path) -> Result<(), ApiError> {
    std::fs::create_dir(into).map_err(bad_context)?;
    tar.rewind().map_err(bad_context)?;
    let mut magic = [0; 2];
    let read = tar.read(&mut magic).map_err(bad_context)?;
    tar.rewind().map_err(bad_context)?;
    let buffered = io::BufReader::new(tar);
    let plain: Box<dyn Read> = if read == 2 && magic == GZIP_MAGIC {
        Box::new(flate2::read::MultiGzDecoder::new(buffered))
    } else {
        Box::new(buffered)
    };
    let mut archive = tar::Archive::new(plain.take(CONTEXT_BYTES_MAX));
    archive.set_preserve_mtime(true);
    let mut entries = 0;
    for entry in archive.entries().map_err(bad_context)? {
        let mut entry = entry.map_err(bad_context)?;
        let path = entry.path().map_err(bad_context)?.into_owned();
        entries += 1;
        if entries > ENTRIES_MAX {
            return Err(bad_context(format!("it has more than {ENTRIES_MAX} entries")));
        }
        let kind = entry.header().entry_type();
        if !(kind.is_file() || kind.is_dir() || kind.is_symlink() || kind.is_hard_link()) {
            return Err(bad_context(format!("{} is neither a file, a folder nor a link", path.display())));
        }
        let inside =
            entry.unpack_in(into).map_err(|error| bad_context(format!("{}: {error}", path.display())))?;
        if !inside {
            return Err(bad_context(format!("{} lies outside the context", path.display())));
        }
    }
    Ok(())
}

/// Reads the template file of an unpacked context.
fn plan(context: &Path, file: &str) -> Result<PlanSource, ApiError> {
    let candidates = if file.is_empty() { vec!["template.toml", "Dockerfile"] } else { vec![file] };
    let found = candidates.iter().find(|name| context.join(name).symlink_metadata().is_ok());
    let Some(name) = found else {
        let message = format!("the context has no {}", candidates.join(" and no "));
        return Err(ApiError::invalid("file", message));
    };
    if !Path::new(name).components().all(|part| matches!(part, Component::Normal(_) | Component::CurDir)) {
        return Err(ApiError::invalid("file", format!("{name:?} must be a path inside the context")));
    }
    let failed = |error: io::Error| ApiError::invalid("file", format!("{name} cannot be read: {error}"));
    // A link may point anywhere on the host.
    let real = context.join(name).canonicalize().map_err(failed)?;
    if !real.starts_with(context.canonicalize().map_err(failed)?) {
        return Err(ApiError::invalid("file", format!("{name} is a link that leads out of the context")));
    }
    let mut text = String::new();
    let mut reader = File::open(&real).map_err(failed)?.take(TEMPLATE_FILE_BYTES_MAX + 1);
    reader.read_to_string(&mut text).map_err(failed)?;
    if text.len() as u64 > TEMPLATE_FILE_BYTES_MAX {
        return Err(ApiError::invalid(
            "file",
            format!("{name} is larger than {TEMPLATE_FILE_BYTES_MAX} bytes"),
        ));
    }
    Ok(if Path::new(name).extension().is_some_and(|extension| extension == "toml") {
        PlanSource::Toml(text)
    } else {
        PlanSource::Dockerfile(text)
    })
}

/// For what is told before the first line.
impl From<Failure> for ApiError {
    fn from(failure: Failure) -> Self {
        failure.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn archive(add: impl FnOnce(&mut tar::Builder<File>)) -> File {
        let file = tempfile::tempfile().expect("a file");
        let mut builder = tar::Builder::new(file);
        add(&mut builder);
        builder.into_inner().expect("an archive")
    }

    fn header(kind: tar::EntryType, path: &str, size: u64) -> tar::Header {
        let mut header = tar::Header::new_gnu();
        header.set_entry_type(kind);
        header.set_size(size);
        header.set_mode(0o644);
        // Written directly: the builder refuses what hostile archives hold.
        let name = &mut header.as_old_mut().name;
        name[..path.len()].copy_from_slice(path.as_bytes());
        header.set_cksum();
        header
    }

    fn unpacked(tar: File) -> (tempfile::TempDir, Result<(), ApiError>) {
        let folder = tempfile::tempdir().expect("a folder");
        let result = unpack(tar, &folder.path().join("context"));
        (folder, result)
    }

    #[test]
    fn a_context_is_unpacked_and_its_template_file_found() {
        let text = b"FROM base\n";
        let tar = archive(|builder| {
            let header = header(tar::EntryType::Regular, "Dockerfile", text.len() as u64);
            builder.append(&header, &text[..]).expect("an entry");
        });
        let (folder, result) = unpacked(tar);
        result.expect("a good context");
        let context = folder.path().join("context");
        assert_eq!(plan(&context, ""), Ok(PlanSource::Dockerfile("FROM base\n".to_owned())));
        assert!(plan(&context, "template.toml").expect_err("absent").message.contains("template.toml"));
        for file in ["../context/Dockerfile", "/etc/passwd"] {
            assert!(plan(&context, file).is_err(), "{file} was accepted");
        }
    }

    #[test]
    fn hostile_contexts_are_refused() {
        for (kind, path) in [
            (tar::EntryType::Regular, "../outside"),
            (tar::EntryType::Char, "device"),
            (tar::EntryType::Fifo, "pipe"),
        ] {
            let tar =
                archive(|builder| builder.append(&header(kind, path, 0), io::empty()).expect("an entry"));
            let (folder, result) = unpacked(tar);
            assert!(result.is_err(), "{path} was accepted");
            assert!(!folder.path().join("outside").exists());
        }
        let (_, result) = unpacked(archive(|builder| {
            builder.append(&header(tar::EntryType::Regular, "cut", 1 << 20), io::empty()).expect("an entry");
        }));
        assert!(result.is_err(), "a cut archive was accepted");
    }

    #[test]
    fn a_template_file_that_leads_out_is_refused() {
        let folder = tempfile::tempdir().expect("a folder");
        let context = folder.path().join("context");
        std::fs::create_dir(&context).expect("a folder");
        std::fs::write(folder.path().join("secret"), "x").expect("a file");
        std::os::unix::fs::symlink("../secret", context.join("Dockerfile")).expect("a link");
        let error = plan(&context, "").expect_err("a link out of the context");
        assert!(error.message.contains("leads out"), "{}", error.message);
    }
}
