//! What the suite needs, made on this machine: the lab has no mirror and no compiler.

use std::path::{Path, PathBuf};

use anyhow::{Context, bail};
use dormouse_image::template::{Base, Template};
use dormouse_image::{DebianSpec, Images};

use super::{Chosen, Part, programs, text};
use crate::lab;
use crate::{run, sdk, tools};

/// The default template, as `dormouse setup` has it.
pub const BASE: &str = include_str!("../../../crates/dormouse/src/setup/base.toml");

/// All paths of the suite; the same in the lab as here.
#[derive(Debug, Clone, clap::Args)]
pub struct Prepared {
    /// The `dormouse` executable
    #[arg(long)]
    pub binary: PathBuf,
    #[arg(long)]
    pub data_dir: PathBuf,
    /// Tests of the engine
    #[arg(long)]
    pub engine: Option<PathBuf>,
    /// Tests of the monitor
    #[arg(long)]
    pub monitor: Option<PathBuf>,
    /// Python with the SDK
    #[arg(long)]
    pub python: Option<PathBuf>,
}

impl Prepared {
    pub fn arguments(&self) -> anyhow::Result<Vec<String>> {
        let mut words = vec!["--binary".to_owned(), text(self.binary.clone())?];
        words.extend(["--data-dir".to_owned(), text(self.data_dir.clone())?]);
        for (name, path) in
            [("--engine", &self.engine), ("--monitor", &self.monitor), ("--python", &self.python)]
        {
            if let Some(path) = path {
                words.extend([name.to_owned(), text(path.clone())?]);
            }
        }
        Ok(words)
    }

    /// What of it the lab does not have by itself.
    pub fn paths(&self) -> Vec<PathBuf> {
        let mut paths = vec![self.data_dir.clone()];
        paths.extend(self.engine.clone());
        paths.extend(self.monitor.clone());
        paths.extend(self.python.as_deref().and_then(sdk::environment_of));
        paths
    }
}

pub fn all(chosen: &Chosen) -> anyhow::Result<Prepared> {
    let binary = run::build_dormouse(false)?;
    let parts = chosen.parts();
    let data_dir = tools::data_dir(None).with_file_name("data-microvm");
    lab::host_needs()?;
    guest(&binary, &data_dir)?;
    base_image(&data_dir)?;
    let mut prepared = Prepared { binary, data_dir, engine: None, monitor: None, python: None };
    if parts.contains(&Part::Engine) {
        prepared.engine = Some(programs::build("dormouse-engine", "microvm")?);
    }
    if parts.contains(&Part::Monitor) {
        prepared.monitor = Some(programs::build("dormouse-vmm", "monitor")?);
    }
    if parts.contains(&Part::Sdk) {
        tools::test_needs(true)?;
        prepared.python = Some(sdk::environment(sdk::every_version()[0])?);
    }
    Ok(prepared)
}

/// Kernel and initramfs; where no microVM can run, no template can be made yet.
fn guest(binary: &Path, data_dir: &Path) -> anyhow::Result<()> {
    let data = data_dir.to_string_lossy();
    let args = ["setup", "--engine", "microvm", "--no-template", "--data-dir", &data];
    run::run(&mut run::command(binary, &args))
}

/// The base template's root file system; the one that the other engine's data folder has is the same.
fn base_image(data_dir: &Path) -> anyhow::Result<()> {
    let template = Template::parse("base.toml", BASE)?;
    let Base::Debian { suite } = &template.base else { bail!("base.toml does not start from Debian") };
    let spec = DebianSpec::new(suite, &template.packages)?;
    let (id, _) = spec.image_id();
    let images = data_dir.join("images");
    let other = tools::data_dir(None).join("images").join(&id);
    if other.is_dir() && !images.join(&id).exists() {
        std::fs::create_dir_all(&images)?;
        // Published files never change.
        lab::link(&other, &images.join(&id))?;
    }
    let (images, _) = Images::open(&images)?;
    let made = images.debian(&spec, &mut |line| eprintln!("  base: {line}"));
    made.map(drop).context("cannot make the file system of the default template")
}
