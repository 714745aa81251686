//! The builder's file system as a new root file system: tar inside, import outside, nothing in between.

use std::io::{self, Read};

use bytes::Bytes;
use dormouse_image::template::BuildPlan;
use dormouse_image::{Limits, Source, export_plan};
use dormouse_types::random_hex;
use tokio::sync::mpsc;

use super::exec::{Command, Shell};
use super::{Build, chain};
use crate::error::NodeError;
use crate::model::{Level, SandboxInfo};

/// Portions that wait between the sandbox and the import.
const PORTIONS_MAX: usize = 32;
/// GNU tar: "some files differ" (they changed while they were read).
const TAR_DIFFERS: i32 = 1;

/// The blocking side of a channel of bytes. A channel that was dropped without an end is an error, so
/// that half an archive is never taken for a whole one.
struct Portions {
    portions: mpsc::Receiver<Option<Bytes>>,
    open: Bytes,
    ended: bool,
}

impl Read for Portions {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        while self.open.is_empty() {
            if self.ended {
                return Ok(0);
            }
            match self.portions.blocking_recv() {
                Some(Some(portion)) => self.open = portion,
                Some(None) => self.ended = true,
                None => return Err(io::Error::new(io::ErrorKind::UnexpectedEof, "the archive was cut off")),
            }
        }
        let count = buffer.len().min(self.open.len());
        buffer[..count].copy_from_slice(&self.open.split_to(count));
        Ok(count)
    }
}

fn script() -> String {
    let plan = export_plan();
    let mut excludes = String::new();
    for path in plan.empty {
        excludes.push_str(&format!(" --exclude='.{path}/*'"));
    }
    for path in plan.skip {
        excludes.push_str(&format!(" --exclude='.{path}'"));
    }
    format!(
        "exec tar --create --format={} --numeric-owner --sparse --xattrs --xattrs-include='*' \
         --one-file-system --warning=no-file-ignored --anchored{excludes} --directory=/ .",
        plan.format
    )
}

impl Build {
    pub(super) async fn flatten(
        &self,
        plan: &BuildPlan,
        info: &SandboxInfo,
        key: &str,
    ) -> Result<String, NodeError> {
        self.log.line(Level::Info, "finalize", "writing the root file system");
        let id = self.image_id(key);
        let source = Source::Sandbox {
            base: plan.base.clone(),
            name: plan.aliases.first().cloned().unwrap_or_else(|| self.template.to_string()),
        };
        let (portions, receiver) = mpsc::channel::<Option<Bytes>>(PORTIONS_MAX);
        let (images, config, image) = (self.hub.images.clone(), plan.config.clone(), id.clone());
        let import = move || {
            let mut tar = Portions { portions: receiver, open: Bytes::new(), ended: false };
            images.import_tar(&image, &mut tar, source, config, &Limits::default())
        };
        let imported = self.hub.blocking("the import of a root file system", import);
        let (exported, imported) = tokio::join!(self.export(info, portions), imported);
        let imported = imported?;
        exported?;
        imported.map_err(|error| {
            NodeError::failed(format!("the root file system cannot be taken over: {}", chain(&error)))
        })?;
        Ok(id)
    }

    fn image_id(&self, key: &str) -> String {
        let name = format!("built-{}", &key[..key.len().min(16)]);
        // Built anew on demand: what uses the former one keeps it.
        if self.hub.images.exists(&name) { format!("{name}-{}", random_hex(4)) } else { name }
    }

    async fn export(
        &self,
        info: &SandboxInfo,
        portions: mpsc::Sender<Option<Bytes>>,
    ) -> Result<(), NodeError> {
        let shell = Shell::new(&self.hub, info)?;
        let mut running = shell.start(Command::root(&["/bin/sh", "-c", &script()])).await?;
        let mut said = String::new();
        while let Some(event) = running.next().await? {
            if let Some(data) = event.data {
                if let Some(part) = data.stdout
                    && portions.send(Some(part)).await.is_err()
                {
                    // The import gave up; its error says why.
                    return Ok(());
                }
                if let Some(part) = data.stderr
                    && said.len() < 4096
                {
                    said.push_str(&String::from_utf8_lossy(&part));
                }
            }
            let Some(end) = event.end else { continue };
            if end.exit_code == 0 || end.exit_code == TAR_DIFFERS {
                drop(portions.send(None).await);
                return Ok(());
            }
            let message = format!("tar inside ended with {}: {}", end.exit_code, said.trim());
            return Err(NodeError::failed(message));
        }
        Err(NodeError::failed("tar's stream ended before tar"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn half_an_archive_is_an_error() {
        let (sender, portions) = mpsc::channel(4);
        sender.try_send(Some(Bytes::from_static(b"abc"))).unwrap();
        drop(sender);
        let mut reader = Portions { portions, open: Bytes::new(), ended: false };
        let error = reader.read_to_end(&mut Vec::new()).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::UnexpectedEof);
    }

    #[test]
    fn a_whole_one_is_read_to_its_end() {
        let (sender, portions) = mpsc::channel(4);
        for portion in [Some(Bytes::from_static(b"abc")), Some(Bytes::from_static(b"de")), None] {
            sender.try_send(portion).unwrap();
        }
        let mut reader = Portions { portions, open: Bytes::new(), ended: false };
        let mut all = Vec::new();
        reader.read_to_end(&mut all).unwrap();
        assert_eq!(all, b"abcde");
    }
}
