//! Files up and down, in constant memory, with progress.

use std::path::Path;
use std::pin::Pin;
use std::task::{Context, Poll};

use bytes::Bytes;
use http::header::{CONTENT_LENGTH, CONTENT_TYPE};
use http::{HeaderValue, Method, Response};
use http_body::{Body as _, Frame};
use http_body_util::BodyExt;
use hyper::body::Incoming;
use tokio::fs::File;
use tokio::io::{AsyncRead, AsyncWriteExt as _, ReadBuf};

use super::{Body, ClientError, Envd, encode};

const PORTION_BYTES: usize = 256 << 10;

/// A file on its way out of a sandbox.
pub struct Download {
    what: String,
    /// What the sandbox said it will send.
    pub length: Option<u64>,
    body: Incoming,
}

/// Reads a file as a request's body, telling of each portion.
struct FileBody<F> {
    file: File,
    told: F,
    buffer: Vec<u8>,
}

impl<F: FnMut(u64) + Send + Unpin> http_body::Body for FileBody<F> {
    type Data = Bytes;
    type Error = std::io::Error;

    fn poll_frame(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, std::io::Error>>> {
        let this = self.get_mut();
        let mut buffer = ReadBuf::new(&mut this.buffer);
        match Pin::new(&mut this.file).poll_read(context, &mut buffer) {
            Poll::Pending => Poll::Pending,
            Poll::Ready(Err(error)) => Poll::Ready(Some(Err(error))),
            Poll::Ready(Ok(())) => {
                let filled = buffer.filled();
                if filled.is_empty() {
                    return Poll::Ready(None);
                }
                (this.told)(filled.len() as u64);
                Poll::Ready(Some(Ok(Frame::data(Bytes::copy_from_slice(filled)))))
            }
        }
    }
}

/// A file as a body, and its length where that is known (not of a pipe).
pub(super) async fn file_body(
    what: &str,
    from: &Path,
    told: impl FnMut(u64) + Send + Unpin + 'static,
) -> Result<(Body, Option<u64>), ClientError> {
    let local = |action, source| ClientError::Local {
        what: what.to_owned(),
        action,
        path: from.display().to_string(),
        source,
    };
    let file = File::open(from).await.map_err(|source| local("open", source))?;
    let metadata = file.metadata().await.map_err(|source| local("look at", source))?;
    let body = FileBody { file, told, buffer: vec![0; PORTION_BYTES] };
    Ok((body.boxed_unsync(), metadata.is_file().then_some(metadata.len())))
}

impl Envd {
    /// Sends the file `from` to `path` inside. `told` hears how many bytes each portion had.
    pub async fn upload(
        &self,
        from: &Path,
        path: &str,
        told: impl FnMut(u64) + Send + Unpin + 'static,
    ) -> Result<(), ClientError> {
        let what = format!("copy {} to {path} in sandbox {}", from.display(), self.sandbox());
        let (body, length) = file_body(&what, from, told).await?;
        let mut request = self.request(&what, Method::POST, &self.files_path(path), body)?;
        request.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static("application/octet-stream"));
        if let Some(length) = length {
            request.headers_mut().insert(CONTENT_LENGTH, HeaderValue::from(length));
        }
        let response = self.client.send(&what, request).await?;
        self.client.collect(&what, response).await?;
        Ok(())
    }

    /// Begins to fetch the file `path` from inside.
    pub async fn download(&self, path: &str) -> Result<Download, ClientError> {
        let what = format!("copy {path} out of sandbox {}", self.sandbox());
        let body = super::full(Vec::new());
        let request = self.request(&what, Method::GET, &self.files_path(path), body)?;
        let response: Response<Incoming> = self.client.send(&what, request).await?;
        let length = response.body().size_hint().exact();
        Ok(Download { what, length, body: response.into_body() })
    }

    fn files_path(&self, path: &str) -> String {
        match self.user() {
            Some(user) => format!("/files?path={}&username={}", encode(path), encode(user)),
            None => format!("/files?path={}", encode(path)),
        }
    }
}

impl Download {
    pub async fn next(&mut self) -> Result<Option<Bytes>, ClientError> {
        loop {
            match self.body.frame().await {
                None => return Ok(None),
                Some(Ok(frame)) => {
                    if let Ok(data) = frame.into_data() {
                        return Ok(Some(data));
                    }
                }
                Some(Err(error)) => {
                    return Err(ClientError::Broken { what: self.what.clone(), why: error.to_string() });
                }
            }
        }
    }

    /// Writes it into the file `to`, which is made or replaced.
    pub async fn save(&mut self, to: &Path, mut told: impl FnMut(u64)) -> Result<u64, ClientError> {
        let what = self.what.clone();
        let local = |action, source| ClientError::Local {
            what: what.clone(),
            action,
            path: to.display().to_string(),
            source,
        };
        let mut file = File::create(to).await.map_err(|source| local("make", source))?;
        let mut bytes = 0;
        while let Some(data) = self.next().await? {
            file.write_all(&data).await.map_err(|source| local("write to", source))?;
            bytes += data.len() as u64;
            told(data.len() as u64);
        }
        file.flush().await.map_err(|source| local("write to", source))?;
        Ok(bytes)
    }
}
