//! The facade's part on snapshots and templates.

use dormouse_snapshot::Reason;
use dormouse_types::SandboxId;

use crate::create;
use crate::create::find_template;
use crate::error::{ErrorCode, NodeError};
use crate::hub::Hub;
use crate::journal::SnapshotRow;
use crate::lifecycle::Reply;
use crate::model::{ListSnapshots, Removed, SnapshotInfo, SnapshotRequest, TemplateInfo};
use crate::node::Node;
use crate::{query, retention};

const NAME_BYTES_MAX: usize = 128;
const LABELS_MAX: usize = 64;
const LABEL_BYTES_MAX: usize = 1024;

fn check_request(request: &SnapshotRequest) -> Result<(), NodeError> {
    if let Some(name) = &request.name {
        check_name("name", name)?;
    }
    let long = request
        .labels
        .iter()
        .find(|(key, value)| key.is_empty() || key.len() + value.len() > LABEL_BYTES_MAX);
    if request.labels.len() > LABELS_MAX || long.is_some() {
        let message = format!("at most {LABELS_MAX} labels of at most {LABEL_BYTES_MAX} bytes are kept");
        return Err(NodeError::invalid("labels", message));
    }
    Ok(())
}

pub fn check_name(field: &str, name: &str) -> Result<(), NodeError> {
    let fits = !name.is_empty()
        && name.len() <= NAME_BYTES_MAX
        && name.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"._-/:".contains(&byte));
    if fits {
        return Ok(());
    }
    let shown: String = name.chars().take(80).collect();
    let message =
        format!("{shown:?} cannot be a name: use 1 to {NAME_BYTES_MAX} letters, digits and . _ - / :");
    Err(NodeError::invalid(field, message))
}

impl Node {
    /// A snapshot while it runs on; of a paused sandbox, the one it is paused on.
    pub async fn checkpoint(
        &self,
        id: &SandboxId,
        request: SnapshotRequest,
    ) -> Result<SnapshotInfo, NodeError> {
        let actor = self.hub.actor(id)?;
        check_request(&request)?;
        let answer = actor.checkpoint(Reason::Checkpoint, request.clone()).await?;
        let snapshot = match (answer.reply, answer.snapshot) {
            (Reply::Already { snapshot }, _) => snapshot,
            (_, Some(snapshot)) => snapshot.id,
            _ => return Err(NodeError::internal("a checkpoint gave no snapshot")),
        };
        // Somebody asked for it: from now on it stays by itself, under the name.
        self.hub.journal.claim_snapshot(snapshot.clone(), request.name, self.hub.now()).await?;
        self.snapshot_get(snapshot.as_str()).await
    }

    pub async fn snapshots(
        &self,
        query: ListSnapshots,
    ) -> Result<(Vec<SnapshotInfo>, Option<String>), NodeError> {
        let rows: Vec<SnapshotRow> = self
            .hub
            .journal
            .snapshots()
            .await?
            .into_iter()
            .filter(|row| query.all || !row.automatic || !row.names.is_empty())
            .filter(|row| query.sandbox.as_ref().is_none_or(|sandbox| row.sandbox == *sandbox))
            .filter(|row| query.name.as_ref().is_none_or(|name| row.names.contains(name)))
            .collect();
        let mut infos = Vec::new();
        for row in rows {
            match retention::info(&self.hub, row).await {
                Ok(info) if query.all || info.reason != Reason::Template.as_str() => infos.push(info),
                Ok(_) => {}
                Err(error) if error.code == ErrorCode::NotFound => {}
                Err(error) => return Err(error),
            }
        }
        query::page(infos, query.limit, query.cursor.as_deref(), |info| {
            (info.created_at, info.id.to_string())
        })
    }

    /// By id or name.
    pub async fn snapshot_get(&self, id_or_name: &str) -> Result<SnapshotInfo, NodeError> {
        let row = retention::find(&self.hub, id_or_name).await?;
        retention::info(&self.hub, row).await
    }

    /// By id or name.
    pub async fn snapshot_rm(&self, id_or_name: &str) -> Result<Removed, NodeError> {
        retention::remove_asked(&self.hub, id_or_name).await
    }

    pub async fn templates(&self) -> Result<Vec<TemplateInfo>, NodeError> {
        Ok(self.hub.journal.templates().await?.into_iter().map(|row| row.info).collect())
    }

    /// By id, alias or `alias:tag`.
    pub async fn template_by_name(&self, name: &str) -> Result<TemplateInfo, NodeError> {
        let found = find_template(&self.hub, name).await?;
        found.map(|row| row.info).ok_or_else(|| {
            let shown: String = name.chars().take(80).collect();
            NodeError::not_found(format!(
                "there is no template {shown:?}; `dormouse template ls` lists what there is"
            ))
        })
    }

    /// Sandboxes and snapshots made of it live on; its root file system stays while they need it.
    pub async fn template_rm(&self, name: &str) -> Result<Removed, NodeError> {
        let info = self.template_by_name(name).await?;
        remove_template(&self.hub, &info).await
    }

    /// Lets one more name lead to a template.
    pub async fn template_alias(&self, name: &str, alias: &str) -> Result<TemplateInfo, NodeError> {
        check_name("name", alias)?;
        let info = self.template_by_name(name).await?;
        self.hub.journal.put_alias(alias.to_owned(), info.id.clone(), self.hub.now()).await?;
        self.template_by_name(info.id.as_str()).await
    }

    pub async fn template_unalias(&self, alias: &str) -> Result<(), NodeError> {
        if self.hub.journal.drop_alias(alias.to_owned()).await? {
            return Ok(());
        }
        Err(NodeError::not_found(format!("no template has the name {alias:?}")))
    }
}

pub async fn remove_template(hub: &Hub, info: &TemplateInfo) -> Result<Removed, NodeError> {
    hub.journal.drop_template(info.id.clone()).await?;
    create::cool(hub, info).await;
    let mut removed =
        Removed { id: info.id.to_string(), freed_bytes: 0, children: Vec::new(), kept: Vec::new() };
    if let Some(snapshot) = &info.snapshot
        && let Some(row) = hub.journal.snapshot(snapshot.clone()).await?
    {
        if hub.is_pinned(snapshot) {
            removed.kept.push(format!("snapshot {snapshot}: it is being started from right now"));
        } else {
            let gone = retention::remove_known(hub, &row).await?;
            removed.freed_bytes += gone.freed_bytes;
            removed.children = gone.children;
        }
    }
    let used = retention::rootfs_in_use(hub).await?;
    if used.contains(&info.rootfs) {
        removed.kept.push(format!("root file system {}", info.rootfs));
    } else if hub.journal.is_cached_rootfs(info.rootfs.clone()).await? {
        removed.kept.push(format!("root file system {} (in the cache of builds until `gc`)", info.rootfs));
    } else {
        let (images, id) = (hub.images.clone(), info.rootfs.clone());
        match hub.blocking("the removal of an image", move || images.remove(&id, &[])).await? {
            Ok(freed) => removed.freed_bytes += freed.bytes,
            Err(error) => removed.kept.push(format!("root file system {}: {error}", info.rootfs)),
        }
    }
    hub.tell(None, "template_removed", format!("template {}", info.id));
    Ok(removed)
}
