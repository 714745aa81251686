//! How `/files` says no: a status and `{"code": …, "message": …}`.

use std::io;
use std::path::Path;

use axum::response::{IntoResponse, Response};
use http::StatusCode;

use crate::filesystem::path::PathError;
use crate::users::UnknownUser;

#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{message}")]
pub struct Refusal {
    pub status: StatusCode,
    pub message: String,
}

impl Refusal {
    pub fn new(status: StatusCode, message: impl Into<String>) -> Self {
        Self { status, message: message.into() }
    }

    pub fn bad_request(message: impl Into<String>) -> Self {
        Self::new(StatusCode::BAD_REQUEST, message)
    }

    pub fn unauthorized(message: impl Into<String>) -> Self {
        Self::new(StatusCode::UNAUTHORIZED, message)
    }

    pub fn no_space(path: &Path, detail: &str) -> Self {
        let message = format!("not enough disk space for '{}': {detail}", path.display());
        Self::new(StatusCode::INSUFFICIENT_STORAGE, message)
    }

    pub fn is_directory(path: &Path) -> Self {
        Self::bad_request(format!("path '{}' is a directory", path.display()))
    }

    /// A file operation failed.
    pub fn io(attempt: &str, path: &Path, why: &io::Error) -> Self {
        let status = match why.kind() {
            io::ErrorKind::NotFound => {
                let message = format!("{attempt} failed: path '{}' does not exist", path.display());
                return Self::new(StatusCode::NOT_FOUND, message);
            }
            io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => {
                return Self::no_space(path, &why.to_string());
            }
            io::ErrorKind::IsADirectory => return Self::is_directory(path),
            io::ErrorKind::NotADirectory
            | io::ErrorKind::InvalidInput
            | io::ErrorKind::InvalidFilename
            | io::ErrorKind::ReadOnlyFilesystem
            | io::ErrorKind::ExecutableFileBusy => StatusCode::BAD_REQUEST,
            io::ErrorKind::PermissionDenied => StatusCode::FORBIDDEN,
            _ => StatusCode::INTERNAL_SERVER_ERROR,
        };
        Self::new(status, format!("{attempt} '{}' failed: {why}", path.display()))
    }
}

impl From<PathError> for Refusal {
    fn from(error: PathError) -> Self {
        Self::bad_request(error.to_string())
    }
}

impl From<UnknownUser> for Refusal {
    fn from(error: UnknownUser) -> Self {
        Self::unauthorized(error.to_string())
    }
}

impl IntoResponse for Refusal {
    fn into_response(self) -> Response {
        let body = serde_json::json!({ "code": self.status.as_u16(), "message": self.message });
        (self.status, axum::Json(body)).into_response()
    }
}
