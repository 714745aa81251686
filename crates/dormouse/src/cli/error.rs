//! How a command ends: the exit codes are documented in `dormouse --help`.

use dormouse_api::client::ClientError;

/// What the process ends with.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ExitStatus(pub u8);

impl ExitStatus {
    pub const OK: Self = Self(0);
    pub const FAILED: Self = Self(1);
    pub const USAGE: Self = Self(2);
    pub const NOT_FOUND: Self = Self(3);
    pub const CONFLICT: Self = Self(4);
    pub const UNREACHABLE: Self = Self(5);
    pub const UNAUTHORIZED: Self = Self(6);
    pub const MISSING: Self = Self(7);
    /// Whoever read the output has gone, as the shell says it (128 + SIGPIPE).
    pub const BROKEN_PIPE: Self = Self(141);
    /// The process inside reached its `--timeout`, as timeout(1) says it.
    pub const DEADLINE: Self = Self(124);
    /// `exec` and `shell` themselves failed: what ran inside has the other codes.
    pub const EXEC_FAILED: Self = Self(125);
}

/// The table in `dormouse --help`.
pub const HELP: &str = "\
Exit codes:
    0    done
    1    it failed; the message says what, on what, why, and what to do
    2    the command line is wrong
    3    there is no such sandbox, snapshot, template, key or file
    4    its state does not allow it (already paused, running, killed)
    5    no daemon answers at the address
    6    the API key is missing or not accepted
    7    something is missing on this machine (`setup --no-install`, `doctor`)
    exec and shell: the command's own code; 124 it reached --timeout; 125 dormouse
    failed; 128+N it was ended by signal N
";

#[derive(Debug, thiserror::Error)]
pub enum CliError {
    #[error(transparent)]
    Client(#[from] ClientError),
    #[error("{message}")]
    Said { message: String, status: ExitStatus },
    #[error("cannot {action} {path}")]
    File {
        action: &'static str,
        path: String,
        #[source]
        source: std::io::Error,
    },
}

impl CliError {
    pub fn failed(message: impl Into<String>) -> Self {
        Self::Said { message: message.into(), status: ExitStatus::FAILED }
    }

    pub fn usage(message: impl Into<String>) -> Self {
        Self::Said { message: message.into(), status: ExitStatus::USAGE }
    }

    pub fn missing(message: impl Into<String>) -> Self {
        Self::Said { message: message.into(), status: ExitStatus::MISSING }
    }

    pub fn file(action: &'static str, path: &std::path::Path, source: std::io::Error) -> Self {
        Self::File { action, path: path.display().to_string(), source }
    }

    #[must_use]
    pub fn status(&self) -> ExitStatus {
        match self {
            Self::Said { status, .. } => *status,
            Self::File { .. } => ExitStatus::FAILED,
            Self::Client(ClientError::Unreachable { .. }) => ExitStatus::UNREACHABLE,
            Self::Client(ClientError::Address { .. }) => ExitStatus::USAGE,
            Self::Client(error) => match error.status() {
                Some(401 | 403) => ExitStatus::UNAUTHORIZED,
                Some(404 | 410) => ExitStatus::NOT_FOUND,
                Some(409) => ExitStatus::CONFLICT,
                _ => ExitStatus::FAILED,
            },
        }
    }

    /// The message and its causes, each once.
    #[must_use]
    pub fn chain(&self) -> String {
        let mut text = self.to_string();
        let mut source = std::error::Error::source(self);
        // `transparent` repeats the client's own words: its source is the next cause already.
        while let Some(cause) = source {
            let words = cause.to_string();
            if !text.contains(&words) {
                text.push_str(": ");
                text.push_str(&words);
            }
            source = cause.source();
        }
        // envd's own refusals (an unknown user inside) have nothing to do with keys.
        let of_envd = matches!(
            self,
            Self::Client(ClientError::Refused { error_code: Some(code), .. }) if code == "unauthenticated"
        );
        if matches!(self.status(), ExitStatus::UNAUTHORIZED) && !of_envd {
            text.push_str(
                "; set DORMOUSE_API_KEY, or run it as the user who owns the data folder (see `dormouse key create`)",
            );
        }
        text
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exit_codes_tell_the_kind() {
        let refused = |status| {
            CliError::Client(ClientError::Refused {
                what: "x".into(),
                status,
                error_code: None,
                message: "y".into(),
            })
        };
        assert_eq!(refused(404).status(), ExitStatus::NOT_FOUND);
        assert_eq!(refused(409).status(), ExitStatus::CONFLICT);
        assert_eq!(refused(401).status(), ExitStatus::UNAUTHORIZED);
        assert_eq!(refused(500).status(), ExitStatus::FAILED);
        assert!(refused(401).chain().contains("DORMOUSE_API_KEY"));
    }

    #[test]
    fn causes_are_told_once() {
        let io = std::io::Error::other("no space");
        let error = CliError::file("write", std::path::Path::new("/x"), io);
        assert_eq!(error.chain(), "cannot write /x: no space");
    }
}
