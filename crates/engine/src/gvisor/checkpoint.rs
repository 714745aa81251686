//! Checkpoints: the image is written, and the sandbox goes on, waits or ends.
//!
//! ```text
//! KeepRunning:  running ── image ──> running
//! Hold, Stop:   running ── detach, freeze, seal, thaw ── image ── freeze, unseal ──> held ── stop ──> gone
//!                  ^                                      │ failed                    │
//!                  └────────── attach, thaw ──────────────┴───────────────────────────┘ thaw
//! ```
//! runsc ends a sandbox whose checkpoint fails (a full disk is enough) unless it was told to leave it
//! running; so it always is, and the seal hides what the sandbox does after the image. A daemon that
//! dies anywhere in between is followed by one that finds a sandbox to go on with: [`recover`].

use std::fs::File;
use std::path::{Path, PathBuf};
use std::time::Instant;

use dormouse_snapshot::FileRole;
use dormouse_types::{RuntimeId, SandboxId};
use dormouse_wire::keeper::{Answer, Carrier, Request};

use super::Inner;
use super::bundle::{DESCRIPTION, Described, LAYOUT};
use super::container::Container;
use super::seal::Seal;
use crate::common::{blocking, io_failure};
use crate::error::Failure;
use crate::keepers::Keeper;
use crate::model::{After, Captured, CapturedFile};

/// Beside the sandbox's pages an image holds the kernel's state.
const IMAGE_OVERHEAD_BYTES: u64 = 48 << 20;
const HELD: &str = "held";
const ROOM: &str = "room";

const IMAGE_FILES: [(&str, FileRole); 4] = [
    ("pages.img", FileRole::Memory),
    ("pages_meta.img", FileRole::Devices),
    ("checkpoint.img", FileRole::Devices),
    (DESCRIPTION, FileRole::Config),
];

impl Inner {
    pub(super) async fn checkpoint(
        &self,
        sandbox: &SandboxId,
        runtime: &RuntimeId,
        into: &Path,
        after: After,
    ) -> Result<Captured, Failure> {
        let taken = Taken {
            container: self.running(runtime)?,
            keeper: self.keeper(sandbox),
            after,
            into: into.to_owned(),
        };
        let (taken, before) = blocking(move || taken.begin().map(|before| (taken, before))).await?;
        let files = self.layout.files();
        let written = self.target(&taken.container, &files).checkpoint(into, before.direct).await;
        let (layout, runtime) = (self.layout.clone(), runtime.clone());
        blocking(move || {
            let captured = taken.end(&before, written)?;
            if after == After::Stop {
                taken.container.destroy()?;
                layout.unlink(&runtime)?;
            }
            Ok(captured)
        })
        .await
    }
}

/// One checkpoint under way.
struct Taken {
    container: Container,
    keeper: Keeper,
    after: After,
    into: PathBuf,
}

struct Before {
    direct: bool,
    was_frozen: bool,
    agent_digest: String,
    started: Instant,
}

impl Taken {
    fn begin(&self) -> Result<Before, Failure> {
        let meta = self.container.meta().ok_or_else(gone)?;
        let bytes = self.container.image_bytes() + IMAGE_OVERHEAD_BYTES;
        let room = dormouse_sys::files::has_room(&self.into.join(ROOM), bytes);
        if !room.map_err(io_failure("ask for room in", &self.into))? {
            return Err(Failure::NoSpace { path: self.into.clone() });
        }
        let before = Before {
            direct: takes_direct(&self.into)?,
            was_frozen: self.container.is_frozen(),
            agent_digest: meta.agent_digest,
            started: Instant::now(),
        };
        if let Err(failure) = self.still(before.was_frozen) {
            self.go_on(before.was_frozen)?;
            return Err(failure);
        }
        Ok(before)
    }

    /// Brings the sandbox to where runsc can take the image.
    fn still(&self, was_frozen: bool) -> Result<(), Failure> {
        if self.after != After::KeepRunning {
            if let Err(error) = self.keeper.done(&Request::Detach, &[]) {
                // Without a keeper nothing moves the pipes' bytes, and a restore starts a new session.
                tracing::warn!(sandbox = %self.keeper.sandbox, %error, "a checkpoint is taken without a keeper");
            }
            self.container.freeze()?;
            self.container.seal().ok_or_else(gone)?.seal()?;
        }
        self.container.lift_memory_limit()?;
        if was_frozen || self.after != After::KeepRunning { self.container.thaw() } else { Ok(()) }
    }

    fn end(&self, before: &Before, written: Result<(), Failure>) -> Result<Captured, Failure> {
        let written = written.and_then(|()| describe(&self.into, &before.agent_digest));
        if self.container.sandbox().is_none() {
            let why = self.container.why_ended();
            return Err(Failure::Exited {
                why: match written {
                    Ok(()) => why,
                    Err(failure) => format!("{why} ({failure})"),
                },
            });
        }
        if let Err(failure) = written {
            self.go_on(before.was_frozen)?;
            return Err(match failure {
                Failure::NoSpace { .. } => Failure::NoSpace { path: self.into.clone() },
                other => other,
            });
        }
        if self.after == After::KeepRunning {
            self.go_on(before.was_frozen)?;
        } else {
            self.container.freeze()?;
            mark_held(&self.container, true)?;
            self.container.seal().ok_or_else(gone)?.unseal()?;
        }
        let file = |(name, role): &(&str, FileRole)| CapturedFile { name: (*name).to_owned(), role: *role };
        Ok(Captured {
            files: IMAGE_FILES.iter().map(file).collect(),
            stopped: before.started.elapsed(),
            notes: Vec::new(),
        })
    }

    /// The sandbox runs on as if nothing had been tried.
    fn go_on(&self, was_frozen: bool) -> Result<(), Failure> {
        if let Some(meta) = self.container.meta() {
            self.container.set_limits(meta.shape)?;
        }
        if self.after == After::KeepRunning {
            return if was_frozen { self.container.freeze() } else { Ok(()) };
        }
        self.container.freeze()?;
        release(&self.container, &self.keeper, !was_frozen)
    }
}

/// Ends the stillness of a frozen sandbox: its pipes move again, and it runs if it is to.
fn release(container: &Container, keeper: &Keeper, thaw: bool) -> Result<(), Failure> {
    container.seal().ok_or_else(gone)?.unseal()?;
    if let Err(error) = keeper.done(&Request::Reattach, &[]) {
        tracing::warn!(sandbox = %keeper.sandbox, %error, "a sandbox goes on without its keeper");
    }
    mark_held(container, false)?;
    if thaw { container.thaw() } else { Ok(()) }
}

/// Thaws what was frozen or held. Idempotent.
pub(super) fn thaw(container: &Container, keeper: &Keeper) -> Result<(), Failure> {
    if !container.dir.join(HELD).exists() {
        return container.thaw();
    }
    if let Some(meta) = container.meta() {
        container.set_limits(meta.shape)?;
    }
    release(container, keeper, true)
}

/// After a daemon's death: a checkpoint that was under way comes to its end, and its sandbox goes on.
/// A sandbox that was held stays so.
pub(super) fn recover(container: &Container, keeper: &Keeper) -> Result<(), Failure> {
    container.await_commands()?;
    let held = container.dir.join(HELD).exists();
    if Seal::is_sealed(&container.dir) && container.sandbox().is_some() {
        container.freeze()?;
        if held {
            return container.seal().ok_or_else(gone)?.unseal();
        }
        release(container, keeper, true)?;
    }
    if !held && container.sandbox().is_some() {
        attach_again(keeper);
    }
    match container.meta() {
        Some(meta) if !held => container.set_limits(meta.shape),
        _ => Ok(()),
    }
}

/// The daemon died after it had stopped the carrier and before anything else was done.
fn attach_again(keeper: &Keeper) {
    let stopped = matches!(keeper.ask(&Request::Status, &[]),
        Ok(Answer::Status(status)) if status.carrier == Carrier::Detached);
    if stopped && let Err(error) = keeper.done(&Request::Reattach, &[]) {
        tracing::warn!(sandbox = %keeper.sandbox, %error, "its carrier does not move again");
    }
}

fn mark_held(container: &Container, held: bool) -> Result<(), Failure> {
    let path = container.dir.join(HELD);
    let marked = if held { File::create(&path).map(drop) } else { std::fs::remove_file(&path) };
    match marked {
        Err(error) if !held && error.kind() == std::io::ErrorKind::NotFound => Ok(()),
        other => other.map_err(io_failure("mark the runtime in", &path)),
    }
}

fn gone() -> Failure {
    Failure::Exited { why: "its runtime is gone".to_owned() }
}

fn describe(into: &Path, agent_digest: &str) -> Result<(), Failure> {
    let path = into.join(DESCRIPTION);
    let described = Described { layout: LAYOUT, agent_digest: agent_digest.to_owned() };
    let bytes = serde_json::to_vec(&described).map_err(|error| io_failure("write", &path)(error.into()))?;
    std::fs::write(&path, bytes).map_err(io_failure("write", &path))
}

/// Looks at an image before it is restored. True: it should be read past the page cache. It is verified
/// meanwhile, from the page cache: what is there already leaves the disk to the restore, and what is not
/// is read once for both.
pub(super) fn inspect(image: &Path) -> Result<bool, Failure> {
    for (name, _) in IMAGE_FILES {
        if !image.join(name).is_file() {
            return Err(Failure::Damaged { file: name.to_owned(), why: "it is missing".to_owned() });
        }
    }
    let path = image.join(DESCRIPTION);
    let bytes = std::fs::read(&path).map_err(io_failure("read", &path))?;
    let described: Described = serde_json::from_slice(&bytes)
        .map_err(|error| Failure::Damaged { file: DESCRIPTION.to_owned(), why: error.to_string() })?;
    if described.layout != LAYOUT {
        return Err(Failure::Incompatible {
            needs: format!("the mounts of layout {}", described.layout),
            has: format!("layout {LAYOUT}"),
        });
    }
    let pages = image.join("pages.img");
    let file = File::open(&pages).map_err(io_failure("open", &pages))?;
    let cached = dormouse_sys::files::is_cached(&file).map_err(io_failure("read", &pages))?;
    Ok(cached && dormouse_sys::files::takes_direct(&pages))
}

fn takes_direct(into: &Path) -> Result<bool, Failure> {
    let path = into.join(ROOM);
    std::fs::write(&path, []).map_err(io_failure("write", &path))?;
    let takes = dormouse_sys::files::takes_direct(&path);
    std::fs::remove_file(&path).map_err(io_failure("remove", &path))?;
    Ok(takes)
}
