//! `filesystem.Filesystem`: its messages as protobuf JSON.
//!
//! Names are written in lowerCamelCase and read in snake_case too; values that equal the default are
//! left out; `int64` is written as a string and read as a string or a number; unknown fields are ignored.

use std::collections::BTreeMap;

use dormouse_types::Timestamp;
use serde::{Deserialize, Deserializer, Serialize};

use super::json::{int64, is_default};

/// `Stat`: what is at this path?
pub const STAT: &str = "/filesystem.Filesystem/Stat";
pub const LIST_DIR: &str = "/filesystem.Filesystem/ListDir";
pub const MAKE_DIR: &str = "/filesystem.Filesystem/MakeDir";
pub const MOVE: &str = "/filesystem.Filesystem/Move";
pub const REMOVE: &str = "/filesystem.Filesystem/Remove";
pub const WATCH_DIR: &str = "/filesystem.Filesystem/WatchDir";
pub const CREATE_WATCHER: &str = "/filesystem.Filesystem/CreateWatcher";
pub const GET_WATCHER_EVENTS: &str = "/filesystem.Filesystem/GetWatcherEvents";
pub const REMOVE_WATCHER: &str = "/filesystem.Filesystem/RemoveWatcher";

#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize)]
pub enum FileType {
    #[default]
    #[serde(rename = "FILE_TYPE_UNSPECIFIED")]
    Unspecified,
    #[serde(rename = "FILE_TYPE_FILE")]
    File,
    #[serde(rename = "FILE_TYPE_DIRECTORY")]
    Directory,
    #[serde(rename = "FILE_TYPE_SYMLINK")]
    Symlink,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize)]
pub enum EventType {
    #[default]
    #[serde(rename = "EVENT_TYPE_UNSPECIFIED")]
    Unspecified,
    #[serde(rename = "EVENT_TYPE_CREATE")]
    Create,
    #[serde(rename = "EVENT_TYPE_WRITE")]
    Write,
    #[serde(rename = "EVENT_TYPE_REMOVE")]
    Remove,
    #[serde(rename = "EVENT_TYPE_RENAME")]
    Rename,
    #[serde(rename = "EVENT_TYPE_CHMOD")]
    Chmod,
}

/// An enum in protobuf JSON is its name or its number.
#[derive(Deserialize)]
#[serde(untagged)]
enum NameOrNumber {
    Name(String),
    Number(i32),
}

impl<'de> Deserialize<'de> for FileType {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let given = NameOrNumber::deserialize(deserializer)?;
        Ok(match given {
            NameOrNumber::Name(name) => match name.as_str() {
                "FILE_TYPE_FILE" => Self::File,
                "FILE_TYPE_DIRECTORY" => Self::Directory,
                "FILE_TYPE_SYMLINK" => Self::Symlink,
                _ => Self::Unspecified,
            },
            NameOrNumber::Number(1) => Self::File,
            NameOrNumber::Number(2) => Self::Directory,
            NameOrNumber::Number(3) => Self::Symlink,
            NameOrNumber::Number(_) => Self::Unspecified,
        })
    }
}

impl<'de> Deserialize<'de> for EventType {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let given = NameOrNumber::deserialize(deserializer)?;
        Ok(match given {
            NameOrNumber::Name(name) => match name.as_str() {
                "EVENT_TYPE_CREATE" => Self::Create,
                "EVENT_TYPE_WRITE" => Self::Write,
                "EVENT_TYPE_REMOVE" => Self::Remove,
                "EVENT_TYPE_RENAME" => Self::Rename,
                "EVENT_TYPE_CHMOD" => Self::Chmod,
                _ => Self::Unspecified,
            },
            NameOrNumber::Number(1) => Self::Create,
            NameOrNumber::Number(2) => Self::Write,
            NameOrNumber::Number(3) => Self::Remove,
            NameOrNumber::Number(4) => Self::Rename,
            NameOrNumber::Number(5) => Self::Chmod,
            NameOrNumber::Number(_) => Self::Unspecified,
        })
    }
}

/// What is known of one file-system object.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct EntryInfo {
    #[serde(skip_serializing_if = "String::is_empty")]
    pub name: String,
    /// Of a symbolic link: the type of what it leads to.
    #[serde(rename = "type", skip_serializing_if = "is_default")]
    pub file_type: FileType,
    #[serde(skip_serializing_if = "String::is_empty")]
    pub path: String,
    /// Bytes.
    #[serde(with = "int64", skip_serializing_if = "is_default")]
    pub size: i64,
    /// Permission bits; of a symbolic link those of what it leads to.
    #[serde(skip_serializing_if = "is_default")]
    pub mode: u32,
    /// `-rw-r--r--`, `drwxr-xr-x`, `Lrwxrwxrwx`.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub permissions: String,
    #[serde(skip_serializing_if = "String::is_empty")]
    pub owner: String,
    #[serde(skip_serializing_if = "String::is_empty")]
    pub group: String,
    #[serde(alias = "modified_time", skip_serializing_if = "Option::is_none")]
    pub modified_time: Option<Timestamp>,
    /// Absolute path of what the link leads to, where it leads anywhere.
    #[serde(alias = "symlink_target", skip_serializing_if = "Option::is_none")]
    pub symlink_target: Option<String>,
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub metadata: BTreeMap<String, String>,
    /// Newer than the version we announce, whose servers never send it: read, not written by the agent.
    #[serde(alias = "is_symlink", skip_serializing_if = "is_default")]
    pub is_symlink: bool,
}

/// `Stat`, `MakeDir` and `Remove` take a path and nothing else.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct PathRequest {
    #[serde(skip_serializing_if = "String::is_empty")]
    pub path: String,
}

/// Answer of `Stat`, `MakeDir` and `Move`.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct EntryResponse {
    #[serde(skip_serializing_if = "Option::is_none")]
    pub entry: Option<EntryInfo>,
}

/// Answer of `Remove` and `RemoveWatcher`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct Empty {}

#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct MoveRequest {
    #[serde(skip_serializing_if = "String::is_empty")]
    pub source: String,
    #[serde(skip_serializing_if = "String::is_empty")]
    pub destination: String,
}

#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct ListDirRequest {
    #[serde(skip_serializing_if = "String::is_empty")]
    pub path: String,
    /// Levels below `path`; 0 means 1.
    #[serde(skip_serializing_if = "is_default")]
    pub depth: u32,
}

#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct ListDirResponse {
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub entries: Vec<EntryInfo>,
}

/// Request of `WatchDir` and `CreateWatcher`.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct WatchRequest {
    #[serde(skip_serializing_if = "String::is_empty")]
    pub path: String,
    #[serde(skip_serializing_if = "is_default")]
    pub recursive: bool,
    #[serde(alias = "include_entry", skip_serializing_if = "is_default")]
    pub include_entry: bool,
    #[serde(alias = "allow_network_mounts", skip_serializing_if = "is_default")]
    pub allow_network_mounts: bool,
}

#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct FilesystemEvent {
    /// Relative to the watched directory; `.` is that directory itself.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub name: String,
    #[serde(rename = "type", skip_serializing_if = "is_default")]
    pub event_type: EventType,
    /// Only of `CREATE`, `WRITE` and `CHMOD`, and only when asked for.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub entry: Option<EntryInfo>,
}

/// One message of the `WatchDir` stream.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum WatchDirResponse {
    Start(Empty),
    Filesystem(Box<FilesystemEvent>),
    #[serde(alias = "keepAlive")]
    Keepalive(Empty),
}

#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct CreateWatcherResponse {
    #[serde(alias = "watcher_id", skip_serializing_if = "String::is_empty")]
    pub watcher_id: String,
}

/// Request of `GetWatcherEvents` and `RemoveWatcher`.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct WatcherRequest {
    #[serde(alias = "watcher_id", skip_serializing_if = "String::is_empty")]
    pub watcher_id: String,
}

#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct GetWatcherEventsResponse {
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub events: Vec<FilesystemEvent>,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_entry_is_written_as_protobuf_json() {
        let entry = EntryInfo {
            name: "a".into(),
            file_type: FileType::File,
            path: "/a".into(),
            size: 5_000_000_000,
            mode: 0o644,
            permissions: "-rw-r--r--".into(),
            modified_time: Timestamp::new(1_700_000_000, 5_000_000).ok(),
            ..EntryInfo::default()
        };
        let text = serde_json::to_string(&entry).unwrap();
        assert_eq!(
            text,
            "{\"name\":\"a\",\"type\":\"FILE_TYPE_FILE\",\"path\":\"/a\",\"size\":\"5000000000\",\"mode\":420,\
             \"permissions\":\"-rw-r--r--\",\"modifiedTime\":\"2023-11-14T22:13:20.005Z\"}"
        );
        assert_eq!(serde_json::from_str::<EntryInfo>(&text).unwrap(), entry);
    }

    #[test]
    fn defaults_are_left_out_and_both_spellings_read() {
        assert_eq!(serde_json::to_string(&EntryResponse::default()).unwrap(), "{}");
        assert_eq!(serde_json::to_string(&ListDirResponse::default()).unwrap(), "{}");
        let snake: WatchRequest =
            serde_json::from_str(r#"{"path":"x","include_entry":true,"allow_network_mounts":true,"new":1}"#)
                .unwrap();
        let camel: WatchRequest =
            serde_json::from_str(r#"{"path":"x","includeEntry":true,"allowNetworkMounts":true}"#).unwrap();
        assert_eq!(snake, camel);
        assert!(snake.include_entry && snake.allow_network_mounts && !snake.recursive);
        let entry: EntryInfo = serde_json::from_str(r#"{"size":7,"type":2,"is_symlink":true}"#).unwrap();
        assert_eq!((entry.size, entry.file_type, entry.is_symlink), (7, FileType::Directory, true));
    }

    #[test]
    fn stream_messages_are_a_oneof() {
        assert_eq!(serde_json::to_string(&WatchDirResponse::Start(Empty {})).unwrap(), r#"{"start":{}}"#);
        let event = WatchDirResponse::Filesystem(Box::new(FilesystemEvent {
            name: "d/f".into(),
            event_type: EventType::Chmod,
            entry: None,
        }));
        let text = serde_json::to_string(&event).unwrap();
        assert_eq!(text, r#"{"filesystem":{"name":"d/f","type":"EVENT_TYPE_CHMOD"}}"#);
        assert_eq!(serde_json::from_str::<WatchDirResponse>(&text).unwrap(), event);
    }
}
