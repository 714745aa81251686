//! `POST /files`: one file as the body, or files as parts of a form.

use std::collections::BTreeMap;
use std::collections::HashSet;
use std::path::PathBuf;

use axum::body::Body;
use axum::response::{IntoResponse, Response};
use http::header::{CONNECTION, CONTENT_ENCODING, CONTENT_LENGTH, CONTENT_TYPE};
use http::{HeaderMap, HeaderValue};
use serde::Serialize;

use super::error::Refusal;
use super::multipart::{Disposition, Event, Multipart, MultipartError};
use super::sink::Sink;
use super::source::{Source, discard};
use super::tags;
use super::target::Target;
use crate::filesystem::metadata::Tags;
use crate::filesystem::path::base_name;
use crate::filesystem::{Caller, blocking};

/// The form's field that holds files; others are ignored.
const FIELD: &str = "file";

/// What is told of a file that was written.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Written {
    pub name: String,
    pub path: String,
    #[serde(rename = "type")]
    pub kind: &'static str,
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub metadata: Tags,
}

impl Written {
    #[must_use]
    pub fn file(target: &Target) -> Self {
        Self {
            name: base_name(&target.path),
            path: target.path.to_string_lossy().into_owned(),
            kind: "file",
            metadata: target.tags.clone(),
        }
    }
}

impl From<MultipartError> for Refusal {
    fn from(error: MultipartError) -> Self {
        Self::bad_request(format!("the form cannot be read: {error}"))
    }
}

/// Receives files for `caller`; `path` is where the (one) file goes, if the query says so.
pub async fn upload(caller: Caller, path: Option<String>, headers: &HeaderMap, body: Body) -> Response {
    let mut source = match Source::new(headers, body) {
        Ok(source) => source,
        Err((refusal, body)) => return refuse(refusal, body).await,
    };
    match receive(caller, path, headers, &mut source).await {
        Ok(written) => axum::Json(written).into_response(),
        Err(refusal) => refuse(refusal, source.into_body()).await,
    }
}

/// Answers after the body was read to its end: a client that is still sending would not see the answer,
/// and the connection could not be used again.
pub async fn refuse(refusal: Refusal, body: Body) -> Response {
    let reusable = discard(body).await;
    let mut response = refusal.into_response();
    if !reusable {
        response.headers_mut().insert(CONNECTION, HeaderValue::from_static("close"));
    }
    response
}

async fn receive(
    caller: Caller,
    path: Option<String>,
    headers: &HeaderMap,
    source: &mut Source,
) -> Result<Vec<Written>, Refusal> {
    let tags = tags::of_headers(headers)?;
    let content_type = headers.get(CONTENT_TYPE).and_then(|value| value.to_str().ok()).unwrap_or("");
    let essence = content_type.split(';').next().unwrap_or("").trim().to_ascii_lowercase();
    match essence.as_str() {
        "application/octet-stream" => {
            let path = path.filter(|path| !path.is_empty()).ok_or_else(|| {
                Refusal::bad_request("the query parameter path is missing: it says where the file goes")
            })?;
            let target = Target { path: caller.resolve(&path)?, user: caller.user, tags };
            receive_one(target, announced(headers), source).await.map(|written| vec![written])
        }
        "multipart/form-data" => {
            let form = Multipart::of_content_type(content_type)?;
            Form { caller, path, tags, announced: announced(headers), seen: HashSet::new() }
                .receive(form, source)
                .await
        }
        _ => Err(Refusal::bad_request(format!(
            "the content type {content_type:?} is not taken: use multipart/form-data or application/octet-stream"
        ))),
    }
}

/// The size of the content, where the headers tell it.
fn announced(headers: &HeaderMap) -> Option<u64> {
    if headers.contains_key(CONTENT_ENCODING) {
        return None;
    }
    headers.get(CONTENT_LENGTH)?.to_str().ok()?.parse().ok()
}

async fn check(target: &Target, bytes: Option<u64>) -> Result<(), Refusal> {
    let target = target.clone();
    blocking(move || target.check(bytes)).await
}

async fn receive_one(target: Target, bytes: Option<u64>, source: &mut Source) -> Result<Written, Refusal> {
    check(&target, bytes).await?;
    let written = Written::file(&target);
    let mut sink = Sink::new(target);
    while let Some(bytes) = source.next().await? {
        sink.push(bytes).await?;
    }
    sink.finish().await?;
    Ok(written)
}

struct Form {
    caller: Caller,
    path: Option<String>,
    tags: Tags,
    announced: Option<u64>,
    seen: HashSet<PathBuf>,
}

impl Form {
    async fn receive(mut self, mut form: Multipart, source: &mut Source) -> Result<Vec<Written>, Refusal> {
        let mut written = Vec::new();
        let mut open: Option<(Sink, Written)> = None;
        while let Some(bytes) = source.next().await? {
            form.push(bytes);
            while let Some(event) = form.next_event()? {
                match event {
                    Event::Part(disposition) => open = self.begin(&disposition).await?,
                    Event::Data(bytes) => {
                        if let Some((sink, _)) = &mut open {
                            sink.push(bytes).await?;
                        }
                    }
                    Event::PartEnd => {
                        if let Some((sink, file)) = open.take() {
                            sink.finish().await?;
                            written.push(file);
                        }
                    }
                    Event::End => {}
                }
            }
        }
        form.finish()?;
        if written.is_empty() {
            return Err(Refusal::bad_request(format!(
                "the form has no part named {FIELD:?}: nothing was written"
            )));
        }
        Ok(written)
    }

    /// `None`: a part that is not for us.
    async fn begin(&mut self, disposition: &Disposition) -> Result<Option<(Sink, Written)>, Refusal> {
        if disposition.name != FIELD {
            return Ok(None);
        }
        let query = self.path.as_deref().filter(|path| !path.is_empty());
        let path =
            query.or(disposition.file_name.as_deref()).filter(|path| !path.is_empty()).ok_or_else(|| {
                Refusal::bad_request(
                    "a part has no file name and the query has no path: nothing says where the file goes",
                )
            })?;
        let path = self.caller.resolve(path)?;
        if !self.seen.insert(path.clone()) {
            let message = format!("path '{}' is given to more than one file of the upload", path.display());
            return Err(Refusal::bad_request(message));
        }
        let target = Target { path, user: self.caller.user.clone(), tags: self.tags.clone() };
        // The form is a little larger than the files in it: near the limit the writing itself tells.
        check(
            &target,
            self.announced.filter(|_| self.seen.len() == 1).map(|bytes| bytes.saturating_sub(1 << 20)),
        )
        .await?;
        let written = Written::file(&target);
        Ok(Some((Sink::new(target), written)))
    }
}
