//! Building templates.
//!
//! ```text
//! plan ──> base image ──> [cached prefix] ──> builder sandbox: RUN COPY WORKDIR ──> tar ──> root file system
//!                                                                                              │ boot
//!                  template <── snapshot <── ready command answers <── start command <─────────┘
//! ```
//!
//! Invariants: a builder is a sandbox like any other (a crash leaves nothing that the boot does not
//! remove); a template exists only when its snapshot does; an alias moves in the commit that makes it.

mod exec;
mod flatten;
mod steps;

use std::path::Path;
use std::sync::Arc;

use dormouse_image::template::{Base, BuildPlan, Probe, Ready, StepKind, Template};
use dormouse_image::{DebianSpec, Image, Limits, OciSource};
use dormouse_snapshot::Reason;
use dormouse_types::{BuildId, EngineKind, Generation, SandboxId, SnapshotId, TemplateId, random_hex};
use tokio::sync::mpsc;

use crate::create::{self, find_template};
use crate::error::{ErrorCode, NodeError};
use crate::hub::Hub;
use crate::journal::TemplateRow;
use crate::lifecycle::Request;
use crate::model::{
    BuildProgress, BuildRequest, IdlePolicy, Level, OnTimeout, PlanSource, SandboxInfo, SnapshotRequest,
    State, TemplateInfo,
};
use crate::node::Node;
use crate::retention;
use crate::work::Birth;
use exec::{Command, Shell};

/// Builds that may run at once.
pub const BUILDS_AT_ONCE: u32 = 2;
/// Marks a sandbox as a build's: not listed, and killed when the daemon starts.
pub const BUILDER: &str = "dormouse.build";
/// Longest that a build may use a sandbox.
const BUILDER_SECONDS_MAX: i64 = 4 * 3600;

/// Where a build's lines go. A reader that is slow loses lines, never the build.
#[derive(Clone)]
pub struct Log {
    hub: Arc<Hub>,
    lines: mpsc::Sender<BuildProgress>,
}

impl Log {
    pub fn line(&self, level: Level, step: &str, message: impl Into<String>) {
        let line =
            BuildProgress { at: self.hub.now(), level, step: step.to_owned(), message: message.into() };
        drop(self.lines.try_send(line));
    }
}

struct Build {
    hub: Arc<Hub>,
    id: BuildId,
    template: TemplateId,
    engine: EngineKind,
    request: BuildRequest,
    log: Log,
}

impl Node {
    /// Builds and publishes; the aliases lead to it from then on.
    pub async fn build_template(
        &self,
        request: BuildRequest,
        progress: mpsc::Sender<BuildProgress>,
    ) -> Result<TemplateInfo, NodeError> {
        let hub = Arc::clone(&self.hub);
        let Ok(_permit) = hub.builds.acquire().await else {
            return Err(NodeError::unavailable("the node is shutting down"));
        };
        let engine = match request.engine {
            Some(engine) => hub.engine(engine)?.kind(),
            None => hub.config.engines.first().map(|engine| engine.kind()).unwrap_or(EngineKind::Gvisor),
        };
        let log = Log { hub: Arc::clone(&hub), lines: progress };
        let build = Build {
            hub: Arc::clone(&hub),
            id: BuildId::generate(),
            template: TemplateId::generate(),
            engine,
            request,
            log,
        };
        let built = build.run().await;
        match &built {
            Ok(info) => hub.tell(
                None,
                "template_built",
                format!("template {} ({})", info.id, info.aliases.join(", ")),
            ),
            Err(error) => hub.tell(None, "template_failed", error.message.clone()),
        }
        built
    }
}

impl Build {
    async fn run(&self) -> Result<TemplateInfo, NodeError> {
        let template = self.parse()?;
        self.log.line(Level::Info, "base", "looking for the base image");
        let image = self.base(&template).await?;
        let context = self.request.context.clone();
        let planned = self.hub.blocking("the planning of a build", {
            let image = image.clone();
            move || template.plan(&context, &image)
        });
        let plan = planned.await?.map_err(|error| NodeError::invalid("template", error.to_string()))?;
        let rootfs = self.rootfs(&plan, &image).await?;
        self.publish(&plan, rootfs).await
    }

    fn parse(&self) -> Result<Template, NodeError> {
        let parsed = match &self.request.plan {
            PlanSource::Toml(text) => Template::parse("dormouse.toml", text),
            PlanSource::Dockerfile(text) => Template::parse("Dockerfile", text),
            PlanSource::Parsed(template) => Ok((**template).clone()),
        };
        let mut template = parsed.map_err(|error| NodeError::invalid("template", error.to_string()))?;
        if !self.request.aliases.is_empty() {
            template.aliases.clone_from(&self.request.aliases);
        }
        for alias in &template.aliases {
            crate::snapshots::check_name("name", alias)?;
        }
        if let Some(shape) = self.request.shape {
            template.shape =
                shape.validate().map_err(|error| NodeError::invalid(error.field, error.to_string()))?;
        }
        if let Some(start) = self.request.start_command.clone().filter(|start| !start.trim().is_empty()) {
            template.start = Some(start);
        }
        if let Some(ready) = self.request.ready_command.clone().filter(|ready| !ready.trim().is_empty()) {
            template.ready = Some(Ready { probe: Probe::Command(ready), timeout_s: 300 });
        }
        Ok(template)
    }

    async fn base(&self, template: &Template) -> Result<Image, NodeError> {
        let (images, log) = (self.hub.images.clone(), self.log.clone());
        match template.base.clone() {
            Base::Debian { suite } => {
                let spec = DebianSpec { suite, packages: template.packages.clone() };
                let make = move || images.debian(&spec, &mut |line| log.line(Level::Info, "base", line));
                let made = self.hub.blocking("the making of a Debian image", make).await?;
                made.map_err(|error| NodeError::failed(chain(&error)))
            }
            Base::Oci { reference } => {
                let mut source = OciSource::parse(&reference);
                source.path = self.request.context.join(&source.path);
                let make = move || {
                    images.oci(&source, &Limits::default(), &mut |line| log.line(Level::Info, "base", line))
                };
                let made = self.hub.blocking("the import of an image", make).await?;
                made.map_err(|error| NodeError::invalid("from", chain(&error)))
            }
            Base::Template { name } => {
                let found = find_template(&self.hub, &name).await?;
                let TemplateRow { info, .. } = found.ok_or_else(|| {
                    let message = format!(
                        "{} line {}: there is no template {name:?} to build upon",
                        template.file, template.base_line
                    );
                    NodeError::invalid("from", message)
                })?;
                let loaded =
                    self.hub.blocking("the reading of an image", move || images.load(&info.rootfs)).await?;
                loaded.map_err(|error| NodeError::failed(chain(&error)))
            }
        }
    }

    /// The root file system after all steps: cached, or made.
    async fn rootfs(&self, plan: &BuildPlan, base: &Image) -> Result<String, NodeError> {
        let mut from = base.id.clone();
        let mut done = 0;
        if !self.request.no_cache {
            for (index, step) in plan.steps.iter().enumerate().rev() {
                if let Some(cached) = self.hub.journal.cached_build(step.key.clone()).await?
                    && self.hub.images.exists(&cached)
                {
                    self.log.line(Level::Info, &index.to_string(), "cached");
                    (from, done) = (cached, index + 1);
                    break;
                }
            }
        }
        let root = self.hub.rootfs(&from);
        if plan.steps[done..].iter().all(|step| changes_nothing(&root, &step.kind)) {
            return Ok(from);
        }
        let Some(last) = plan.steps.last() else { return Ok(from) };
        let info = self.builder(plan, from, "build");
        let (info, _) = self.start(info).await?;
        let built = self.steps(plan, done, &info).await;
        let flat = match built {
            Ok(()) => self.flatten(plan, &info, &last.key).await,
            Err(error) => Err(error),
        };
        self.end(&info.id).await;
        let rootfs = flat?;
        self.hub.journal.cache_build(last.key.clone(), rootfs.clone(), self.hub.now()).await?;
        Ok(rootfs)
    }

    async fn steps(&self, plan: &BuildPlan, done: usize, info: &SandboxInfo) -> Result<(), NodeError> {
        let shell = Shell::new(&self.hub, info)?;
        for (index, step) in plan.steps.iter().enumerate().skip(done) {
            self.log.line(Level::Info, &index.to_string(), step.text.clone());
            steps::run(&self.hub, &self.log, &shell, plan, index).await?;
        }
        Ok(())
    }

    /// A sandbox that this build uses: it is not there for clients.
    fn builder(&self, plan: &BuildPlan, rootfs: String, purpose: &str) -> SandboxInfo {
        let (id, now) = (SandboxId::generate(), self.hub.now());
        SandboxInfo {
            hostname: "build".to_owned(),
            id,
            state: State::Creating,
            engine: self.engine,
            template: self.template.clone(),
            template_alias: plan.aliases.first().cloned(),
            parent: None,
            forked_from: None,
            runtime: None,
            generation: Generation(0),
            shape: plan.shape,
            access_token: random_hex(32),
            metadata: [(BUILDER.to_owned(), format!("{purpose} {}", self.id))].into(),
            env: plan.config.env.clone(),
            egress: dormouse_wire::keeper::EgressRules::default(),
            ingress: crate::model::Ingress::default(),
            idle: IdlePolicy::default(),
            on_timeout: OnTimeout::Kill,
            auto_resume: false,
            started_at: now,
            end_at: now,
            owner: self.request.owner.clone(),
            rootfs,
            agent_version: None,
            agent_digest: None,
        }
    }

    async fn start(&self, info: SandboxInfo) -> Result<(SandboxInfo, crate::model::Receipt), NodeError> {
        let birth = Birth::of("create");
        create::make(&self.hub, info, BUILDER_SECONDS_MAX * 1000, birth).await
    }

    async fn end(&self, id: &SandboxId) {
        if let Ok(actor) = self.hub.actor(id)
            && let Err(error) = actor.ask(Request::Kill).await
        {
            tracing::warn!(sandbox = %id, %error, "a build's sandbox was not removed");
        }
    }

    /// Boots the root file system, makes it ready and snapshots it: a create is a restore from then on.
    async fn publish(&self, plan: &BuildPlan, rootfs: String) -> Result<TemplateInfo, NodeError> {
        self.log.line(Level::Info, "finalize", "starting the template");
        let mut info = self.builder(plan, rootfs.clone(), "base");
        "sandbox".clone_into(&mut info.hostname);
        let birth = Birth {
            default_user: some(&plan.config.user),
            default_workdir: some(&plan.config.workdir),
            ..Birth::of("create")
        };
        let (info, _) = create::make(&self.hub, info, BUILDER_SECONDS_MAX * 1000, birth).await?;
        let snapshot = self.snapshot(plan, &info).await;
        self.end(&info.id).await;
        let snapshot = snapshot?;
        let manifest = retention::load(&self.hub, &snapshot).await?;
        let (images, id) = (self.hub.images.clone(), rootfs.clone());
        let image = self.hub.blocking("the reading of an image", move || images.load(&id)).await?;
        let before = self.hub.journal.templates().await?;
        let info = TemplateInfo {
            id: self.template.clone(),
            aliases: plan.aliases.clone(),
            engine: self.engine,
            shape: plan.shape,
            rootfs,
            snapshot: Some(snapshot),
            start_command: plan.start.clone(),
            ready_command: plan.ready.as_ref().map(|ready| ready_text(&ready.probe)),
            env: plan.config.env.clone(),
            user: some(&plan.config.user),
            workdir: some(&plan.config.workdir),
            build: self.id.to_string(),
            created_at: self.hub.now(),
            bytes: retention::occupied(&self.hub, &manifest).await
                + image.map(|image| image.bytes).unwrap_or(0),
        };
        self.hub.journal.put_template(info.clone(), self.request.owner.clone()).await?;
        self.retire_nameless(&before).await;
        create::prewarm(&self.hub, &info).await;
        self.log.line(Level::Info, "finalize", format!("template {} is ready", info.id));
        Ok(info)
    }

    async fn snapshot(&self, plan: &BuildPlan, info: &SandboxInfo) -> Result<SnapshotId, NodeError> {
        let shell = Shell::new(&self.hub, info)?;
        if let Some(start) = &plan.start {
            self.log.line(Level::Info, "finalize", format!("start command: {start}"));
            let command = Command {
                argv: vec!["/bin/bash".to_owned(), "-l".to_owned(), "-c".to_owned(), start.clone()],
                env: std::collections::BTreeMap::new(),
                user: plan.config.user.clone(),
                cwd: plan.config.workdir.clone(),
                tag: Some("start".to_owned()),
            };
            // Let go of: it runs on inside and is part of the snapshot.
            drop(shell.start(command).await?);
        }
        if let Some(ready) = &plan.ready {
            steps::wait_ready(&self.log, &shell, plan, ready).await?;
        }
        self.log.line(Level::Info, "finalize", "taking the base snapshot");
        let actor = self.hub.actor(&info.id)?;
        let answer = actor
            .checkpoint(Reason::Template, SnapshotRequest { ttl_s: Some(0), ..Default::default() })
            .await?;
        let snapshot =
            answer.snapshot.ok_or_else(|| NodeError::internal("the base snapshot is not known"))?;
        Ok(snapshot.id)
    }

    /// Templates whose last name has just moved here: nobody can ask for them any more but by id.
    async fn retire_nameless(&self, before: &[TemplateRow]) {
        for row in before.iter().filter(|row| !row.info.aliases.is_empty() && row.info.id != self.template) {
            let now = self.hub.journal.template(row.info.id.to_string()).await;
            if !matches!(now, Ok(Some(now)) if now.info.aliases.is_empty()) {
                continue;
            }
            if let Err(error) = crate::snapshots::remove_template(&self.hub, &row.info).await {
                tracing::warn!(template = %row.info.id, %error, "the template that was replaced stays");
            }
        }
    }
}

/// A folder that is there already needs no sandbox to be made in.
fn changes_nothing(root: &Path, step: &StepKind) -> bool {
    let StepKind::Workdir { path, .. } = step else { return false };
    let mut at = root.to_owned();
    // Part by part: a link could lead out of the root file system.
    path.split('/').filter(|part| !part.is_empty()).all(|part| {
        at.push(part);
        part != ".." && std::fs::symlink_metadata(&at).is_ok_and(|meta| meta.is_dir())
    })
}

fn some(text: &str) -> Option<String> {
    (!text.is_empty()).then(|| text.to_owned())
}

fn ready_text(probe: &Probe) -> String {
    match probe {
        Probe::Command(command) => command.clone(),
        Probe::Port(port) => format!("port {port}"),
    }
}

fn chain(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(error) = source {
        let more = error.to_string();
        if !text.contains(&more) {
            text = format!("{text}: {more}");
        }
        source = error.source();
    }
    text
}

/// One step's failure, with the line it came from and the end of what it said.
fn step_failed(plan: &BuildPlan, index: usize, why: &str) -> NodeError {
    let step = &plan.steps[index];
    NodeError::new(ErrorCode::Failed, format!("line {} ({}): {why}", step.line, step.text))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_folder_that_is_there_changes_nothing() {
        let root = tempfile::tempdir().unwrap();
        std::fs::create_dir_all(root.path().join("home/user")).unwrap();
        std::os::unix::fs::symlink("/etc", root.path().join("out")).unwrap();
        let nothing = |path: &str| {
            let step = StepKind::Workdir { path: path.to_owned(), user: "user".to_owned() };
            changes_nothing(root.path(), &step)
        };
        assert!(nothing("/home/user") && nothing("/"));
        assert!(!nothing("/home/other") && !nothing("/out") && !nothing("/home/../home/user"));
    }
}
