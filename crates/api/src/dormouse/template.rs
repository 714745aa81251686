//! Templates and their builds.
//!
//! A build is one request: `POST /dormouse/v1/templates?…` ([`BuildQuery`]) whose body is a tar (or
//! tar.gz) of the context folder with the template file in it. The answer is a stream of lines, each
//! one [`BuildLine`] as JSON; the last is `done` or `error`.

use std::collections::BTreeMap;

use jiff::Timestamp;
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use super::Shape;
use crate::error::ErrorBody;
use crate::query::percent_encode;

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct TemplateInfo {
    #[serde(rename = "templateID")]
    pub template_id: String,
    pub aliases: Vec<String>,
    pub engine: String,
    pub shape: Shape,
    /// Its base snapshot; null: a create boots.
    #[serde(rename = "snapshotID", default)]
    pub snapshot_id: Option<String>,
    #[serde(default)]
    pub start_command: Option<String>,
    #[serde(default)]
    pub ready_command: Option<String>,
    pub env: BTreeMap<String, String>,
    #[serde(default)]
    pub user: Option<String>,
    #[serde(default)]
    pub workdir: Option<String>,
    #[schema(value_type = String, format = DateTime)]
    pub created_at: Timestamp,
    pub bytes: u64,
}

/// What a build is asked beside its context; encoded as a query string.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct BuildQuery {
    /// `name` or `name:tag`; empty: the file's own name.
    pub names: Vec<String>,
    /// The template file's path inside the context; a name that ends in `.toml` is TOML, any other
    /// is a Dockerfile. Empty: `template.toml`, else `Dockerfile`.
    pub file: String,
    pub engine: Option<String>,
    pub cpus: Option<u32>,
    pub memory_mb: Option<u32>,
    pub disk_mb: Option<u32>,
    pub start_command: Option<String>,
    pub ready_command: Option<String>,
    /// Builds every step anew.
    pub no_cache: bool,
}

impl BuildQuery {
    /// The query string, without `?`.
    #[must_use]
    pub fn encode(&self) -> String {
        let mut pairs: Vec<(&str, String)> = Vec::new();
        if !self.names.is_empty() {
            pairs.push(("name", self.names.join(",")));
        }
        if !self.file.is_empty() {
            pairs.push(("file", self.file.clone()));
        }
        let texts = [
            ("engine", &self.engine),
            ("startCommand", &self.start_command),
            ("readyCommand", &self.ready_command),
        ];
        pairs.extend(texts.into_iter().filter_map(|(name, value)| value.clone().map(|value| (name, value))));
        let numbers = [("cpus", self.cpus), ("memoryMB", self.memory_mb), ("diskMB", self.disk_mb)];
        pairs.extend(
            numbers.into_iter().filter_map(|(name, value)| value.map(|value| (name, value.to_string()))),
        );
        if self.no_cache {
            pairs.push(("noCache", "true".to_owned()));
        }
        let encoded = pairs.into_iter().map(|(name, value)| format!("{name}={}", percent_encode(&value)));
        encoded.collect::<Vec<_>>().join("&")
    }
}

/// One line of a build's answer.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(tag = "kind", rename_all = "camelCase")]
pub enum BuildLine {
    Progress {
        #[schema(value_type = String, format = DateTime)]
        at: Timestamp,
        /// `debug`, `info`, `warn` or `error`.
        level: String,
        /// `base`, the step's index, or `finalize`.
        step: String,
        message: String,
    },
    Done {
        template: TemplateInfo,
    },
    Error {
        error: ErrorBody,
    },
}
