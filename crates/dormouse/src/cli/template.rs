//! Templates: build, list, remove.

use std::fs::File;
use std::path::Path;

use dormouse_api::client::encode;
use dormouse_api::dormouse::{BuildLine, BuildQuery, Removed, TemplateInfo};

use super::args::{TemplateBuildArgs, TemplateCommand};
use super::context::Context;
use super::error::{CliError, ExitStatus};
use super::output::{bytes, relative, show, table};
use super::snapshot;

pub async fn run(command: TemplateCommand, context: &Context) -> Result<ExitStatus, CliError> {
    match command {
        TemplateCommand::Build(args) => build_command(&args, context).await,
        TemplateCommand::Ls => {
            let list: Vec<TemplateInfo> =
                context.client()?.get("list the templates", "/dormouse/v1/templates").await?;
            show(context, &list, |list| listed(list))
        }
        TemplateCommand::Rm { template } => {
            let what = format!("remove template {template}");
            let path = format!("/dormouse/v1/templates/{}", encode(&template));
            let removed: Removed = context.client()?.delete(&what, &path).await?;
            show(context, &removed, snapshot::told)
        }
    }
}

fn listed(list: &[TemplateInfo]) -> String {
    if list.is_empty() {
        return "there is no template; `dormouse setup` builds `base`".to_owned();
    }
    let mut table = table(["TEMPLATE", "NAMES", "ENGINE", "CPUS", "MEMORY", "SIZE", "BUILT"]);
    for info in list {
        table.add_row([
            info.template_id.clone(),
            info.aliases.join(", "),
            info.engine.clone(),
            info.shape.cpus.to_string(),
            format!("{} MiB", info.shape.memory_mb),
            bytes(info.bytes),
            relative(info.created_at),
        ]);
    }
    table.to_string()
}

async fn build_command(args: &TemplateBuildArgs, context: &Context) -> Result<ExitStatus, CliError> {
    let query = BuildQuery {
        names: args.name.clone(),
        file: args.file.clone().unwrap_or_default(),
        engine: args.engine.map(|engine| engine.to_string()),
        cpus: args.cpus,
        memory_mb: args.memory,
        disk_mb: args.disk,
        start_command: args.start.clone(),
        ready_command: args.ready.clone(),
        no_cache: args.no_cache,
    };
    let folder = Context::absolute(&args.context)?;
    let template = build(context, &query, &folder, |line| eprintln!("{line}")).await?;
    show(context, &template, |template| format!("{}  {}", template.template_id, template.aliases.join(", ")))
}

/// Sends the folder and follows the build; `told` hears each line of progress.
pub async fn build(
    context: &Context,
    query: &BuildQuery,
    folder: &Path,
    mut told: impl FnMut(&str),
) -> Result<TemplateInfo, CliError> {
    let what = format!("build a template from {}", folder.display());
    let archive = pack(folder)?;
    let path = format!("/dormouse/v1/templates?{}", query.encode());
    let client = context.client()?;
    let mut lines = client.post_file_lines(&what, &path, "application/x-tar", archive.path()).await?;
    while let Some(line) = lines.next::<BuildLine>().await? {
        match line {
            BuildLine::Progress { step, message, .. } => told(&format!("[{step}] {message}")),
            BuildLine::Done { template } => return Ok(template),
            BuildLine::Error { error } => {
                return Err(CliError::failed(format!("cannot {what}: {}", error.message)));
            }
        }
    }
    Err(CliError::failed(format!("cannot {what}: the daemon ended the build without a word; see its log")))
}

/// The context folder as a tar in a temporary file.
fn pack(folder: &Path) -> Result<tempfile::NamedTempFile, CliError> {
    let failed = |source| CliError::file("pack", folder, source);
    if !folder.is_dir() {
        return Err(CliError::usage(format!(
            "{} is not a folder: give the one with the template file",
            folder.display()
        )));
    }
    let archive = tempfile::NamedTempFile::new().map_err(failed)?;
    let file: File = archive.reopen().map_err(failed)?;
    let mut builder = tar::Builder::new(std::io::BufWriter::new(file));
    builder.follow_symlinks(false);
    builder.append_dir_all(".", folder).map_err(failed)?;
    let mut writer = builder.into_inner().map_err(failed)?;
    std::io::Write::flush(&mut writer).map_err(failed)?;
    Ok(archive)
}
