//! Which daemon is talked to, with which key: flags, environment and the data folder, resolved once.

use std::path::{Path, PathBuf};

use dormouse_api::client::{Client, DEFAULT_URL, Envd, Target, encode};
use dormouse_api::dormouse::SandboxInfo;

use super::args::Cli;
use super::error::CliError;

/// Where `serve` writes the address that it is bound to.
pub const LISTEN_FILE: &str = "listen";
/// Where `serve` keeps a key for whoever may read the data folder.
pub const ADMIN_KEY_FILE: &str = "admin.key";

pub struct Context {
    pub data_dir: PathBuf,
    pub json: bool,
    pub url: String,
    pub key: Option<String>,
}

impl Context {
    #[must_use]
    pub fn resolve(cli: &Cli) -> Self {
        let file = |name: &str| read(&cli.data_dir, name);
        // Empty variables count as absent ones.
        let given = |value: &Option<String>| value.clone().filter(|value| !value.is_empty());
        let url = given(&cli.url)
            .or_else(|| file(LISTEN_FILE).map(|listen| format!("http://{}", reachable(&listen))))
            .unwrap_or_else(|| DEFAULT_URL.to_owned());
        let key = given(&cli.key)
            .or_else(|| std::env::var("E2B_API_KEY").ok().filter(|key| !key.is_empty()))
            .or_else(|| file(ADMIN_KEY_FILE));
        Self { data_dir: cli.data_dir.clone(), json: cli.json, url, key }
    }

    pub fn client(&self) -> Result<Client, CliError> {
        Ok(Client::new(&self.url, self.key.as_deref())?)
    }

    /// The same, looking into the data folder once more: a daemon may have been there since.
    #[must_use]
    pub fn again(&self) -> Self {
        Self { key: self.key.clone().or_else(|| self.file(ADMIN_KEY_FILE)), ..self.at(self.url.clone()) }
    }

    /// The same, about the daemon at `url`.
    #[must_use]
    pub fn at(&self, url: String) -> Self {
        let key = self.file(ADMIN_KEY_FILE).or_else(|| self.key.clone());
        Self { data_dir: self.data_dir.clone(), json: self.json, url, key }
    }

    fn file(&self, name: &str) -> Option<String> {
        read(&self.data_dir, name)
    }

    /// What is known of one sandbox at once.
    pub async fn sandbox(&self, id: &str) -> Result<SandboxInfo, CliError> {
        self.look_up(id, "?whyAwake=false").await
    }

    /// Everything about one sandbox; to tell what keeps it awake takes half a second.
    pub async fn sandbox_watched(&self, id: &str) -> Result<SandboxInfo, CliError> {
        self.look_up(id, "").await
    }

    async fn look_up(&self, id: &str, query: &str) -> Result<SandboxInfo, CliError> {
        let what = format!("look up sandbox {id}");
        Ok(self.client()?.get(&what, &format!("/dormouse/v1/sandboxes/{}{query}", encode(id))).await?)
    }

    /// The API inside one sandbox, as this user.
    pub async fn envd(&self, id: &str, user: Option<&str>) -> Result<Envd, CliError> {
        let info = self.sandbox(id).await?;
        let access_token = Some(info.envd_access_token).filter(|token| !token.is_empty());
        let target = Target { sandbox: info.sandbox_id, access_token, user: user.map(str::to_owned) };
        Ok(self.client()?.envd(target))
    }

    /// `path` as a daemon in another folder would find it.
    pub fn absolute(path: &Path) -> Result<PathBuf, CliError> {
        std::path::absolute(path).map_err(|source| CliError::file("resolve", path, source))
    }
}

fn read(data_dir: &Path, name: &str) -> Option<String> {
    let text = std::fs::read_to_string(data_dir.join(name)).ok()?;
    Some(text.trim().to_owned()).filter(|text| !text.is_empty())
}

/// A daemon that listens everywhere is reached on loopback.
fn reachable(listen: &str) -> String {
    let wildcard = listen.strip_prefix("0.0.0.0:").or_else(|| listen.strip_prefix("[::]:"));
    wildcard.map_or_else(|| listen.to_owned(), |port| format!("127.0.0.1:{port}"))
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[test]
    fn the_data_folder_says_where_its_daemon_is() {
        let folder = tempfile::tempdir().expect("a temporary folder");
        std::fs::write(folder.path().join(LISTEN_FILE), "0.0.0.0:4000\n").expect("it is written");
        let path = folder.path().to_string_lossy().into_owned();
        let resolve = |args: &[&str]| Context::resolve(&Cli::try_parse_from(args).expect("it parses"));
        assert_eq!(resolve(&["dormouse", "ls", "--data-dir", &path]).url, "http://127.0.0.1:4000");
        assert_eq!(
            resolve(&["dormouse", "ls", "--data-dir", &path, "--url", "http://a:1"]).url,
            "http://a:1"
        );
        assert_eq!(resolve(&["dormouse", "ls", "--data-dir", "/nonexistent"]).url, DEFAULT_URL);
    }
}
