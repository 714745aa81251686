//! Checkpoints: a snapshot is written, and the sandbox goes on, waits or ends.
//!
//! ```text
//! KeepRunning:  running ── fork: the child writes ──> running
//! Hold, Stop:   running ── held: the keeper is silent, the guest paused ── snapshot ── stop ──> gone
//!                  ^                                                          │
//!                  └───────────── keeper goes on, guest resumed ──────────────┘ failed, thaw
//! ```
//! That it is held is written down first: a daemon that dies anywhere in between is followed by one that
//! finds a frozen sandbox whose thaw undoes all of it.

use std::path::{Path, PathBuf};
use std::time::Duration;

use dormouse_snapshot::FileRole;
use dormouse_types::{RuntimeId, SandboxId};
use dormouse_vmm::control::{Checkpointed, Client, State};
use dormouse_wire::keeper::Request;
use serde::{Deserialize, Serialize};

use super::Inner;
use super::guest::Disk;
use super::runtime::{Runtime, WORK_WAIT};
use super::users;
use crate::common::{blocking, io_failure};
use crate::error::Failure;
use crate::keepers::Keeper;
use crate::model::{After, Captured, CapturedFile, RuntimeState};

/// The driver's own file in a snapshot.
pub(super) const DESCRIPTION: &str = "machine.json";
/// Version of [`Described`].
const LAYOUT: u32 = 1;

/// What a restore must know that the monitor does not.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Described {
    layout: u32,
    pub disk: Disk,
    pub agent_digest: String,
    /// The guest has a network card.
    #[serde(default)]
    pub card: bool,
}

impl Described {
    fn write(&self, into: &Path) -> Result<(), Failure> {
        let path = into.join(DESCRIPTION);
        let bytes = serde_json::to_vec(self).map_err(|error| io_failure("write", &path)(error.into()))?;
        std::fs::write(&path, bytes).map_err(io_failure("write", &path))
    }

    /// Looks at a snapshot before anything is touched.
    pub fn read(snapshot: &Path) -> Result<Self, Failure> {
        let path = snapshot.join(DESCRIPTION);
        let damaged = |why: String| Failure::Damaged { file: DESCRIPTION.to_owned(), why };
        let bytes = std::fs::read(&path).map_err(|error| match error.kind() {
            std::io::ErrorKind::NotFound => damaged("it is missing".to_owned()),
            _ => io_failure("read", &path)(error),
        })?;
        let described: Self = serde_json::from_slice(&bytes).map_err(|error| damaged(error.to_string()))?;
        if described.layout == LAYOUT {
            return Ok(described);
        }
        Err(Failure::Incompatible {
            needs: format!("the machine of layout {}", described.layout),
            has: format!("layout {LAYOUT}"),
        })
    }
}

impl Inner {
    pub(super) async fn checkpoint(
        &self,
        sandbox: &SandboxId,
        runtime: &RuntimeId,
        into: &Path,
        after: After,
    ) -> Result<Captured, Failure> {
        let taken = Taken {
            runtime: self.running(runtime)?,
            keeper: self.keeper(sandbox),
            after,
            into: into.to_owned(),
            data_dir: self.layout.data().to_owned(),
        };
        blocking(move || {
            let captured = taken.take()?;
            if taken.after == After::Stop {
                taken.runtime.destroy()?;
            }
            Ok(captured)
        })
        .await
    }
}

/// One checkpoint under way.
struct Taken {
    runtime: Runtime,
    keeper: Keeper,
    after: After,
    into: PathBuf,
    data_dir: PathBuf,
}

impl Taken {
    fn take(&self) -> Result<Captured, Failure> {
        let gone = || Failure::Exited { why: "its runtime is gone".to_owned() };
        let meta = self.runtime.meta().ok_or_else(gone)?;
        let was_frozen = self.runtime.state() == RuntimeState::Frozen;
        let hold = self.after != After::KeepRunning;
        let taken = self.written(hold).and_then(|done| {
            let described = Described {
                layout: LAYOUT,
                disk: meta.disk.clone(),
                agent_digest: meta.agent_digest.clone(),
                card: meta.card,
            };
            described.write(&self.into).map(|()| done)
        });
        match taken {
            Ok(done) => Ok(captured(&done)),
            Err(failure) => {
                if hold && self.runtime.process().is_some() {
                    release(&self.runtime, &self.keeper, !was_frozen)?;
                }
                Err(match failure {
                    Failure::NoSpace { .. } => Failure::NoSpace { path: self.into.clone() },
                    other => other,
                })
            }
        }
    }

    fn written(&self, hold: bool) -> Result<Checkpointed, Failure> {
        if hold {
            self.runtime.change_meta(|meta| meta.held = true)?;
            if let Err(error) = self.keeper.done(&Request::Detach, &[]) {
                // Without a keeper nothing moves the pipes' bytes, and a restore starts a new session.
                tracing::warn!(sandbox = %self.keeper.sandbox, %error, "a checkpoint is taken without a keeper");
            }
        }
        let user = self.runtime.meta().and_then(|meta| meta.user);
        if let Some(user) = user {
            users::let_pass_to(&self.data_dir, &self.into, user.gid)?;
            users::lend(&self.into, user)?;
        }
        let done = self.runtime.ask(WORK_WAIT, |client| client.checkpoint(self.into.clone(), hold));
        user.map_or(Ok(()), |user| users::take_back(&self.into, user))?;
        done
    }
}

fn captured(done: &Checkpointed) -> Captured {
    let role = |name: &str| match name {
        name if name.starts_with("memory") => FileRole::Memory,
        name if name.starts_with("disk") => FileRole::Disk,
        _ => FileRole::Devices,
    };
    let mut files: Vec<CapturedFile> = done
        .files
        .iter()
        .map(|file| CapturedFile { name: file.name.clone(), role: role(&file.name) })
        .collect();
    files.push(CapturedFile { name: DESCRIPTION.to_owned(), role: FileRole::Config });
    Captured { files, stopped: Duration::from_micros(done.stopped_us), notes: Vec::new() }
}

/// Ends what holding it began: the keeper moves bytes again, and the guest runs if it is to.
fn release(runtime: &Runtime, keeper: &Keeper, resume: bool) -> Result<(), Failure> {
    if let Err(error) = keeper.done(&Request::Reattach, &[]) {
        tracing::warn!(sandbox = %keeper.sandbox, %error, "a sandbox goes on without its keeper");
    }
    runtime.change_meta(|meta| meta.held = false)?;
    if resume { go_on(runtime) } else { Ok(()) }
}

/// Thaws what was frozen or held. Idempotent.
pub(super) fn thaw(runtime: &Runtime, keeper: &Keeper) -> Result<(), Failure> {
    if runtime.meta().is_some_and(|meta| meta.held) {
        return release(runtime, keeper, true);
    }
    go_on(runtime)
}

/// Idempotent.
pub(super) fn freeze(runtime: &Runtime) -> Result<(), Failure> {
    unless(runtime, State::Paused, Client::pause)
}

pub(super) fn go_on(runtime: &Runtime) -> Result<(), Failure> {
    unless(runtime, State::Running, Client::resume)
}

fn unless(
    runtime: &Runtime,
    state: State,
    change: impl FnOnce(&mut Client) -> Result<(), dormouse_vmm::control::ClientError>,
) -> Result<(), Failure> {
    runtime.ask(WORK_WAIT, |client| if client.status()?.state == state { Ok(()) } else { change(client) })
}

/// After a daemon's death: a sandbox that runs although it was to be held had not been paused yet.
pub(super) fn recover(runtime: &Runtime, keeper: &Keeper) -> Result<RuntimeState, Failure> {
    let state = runtime.state();
    if state == RuntimeState::Running && runtime.meta().is_some_and(|meta| meta.held) {
        release(runtime, keeper, false)?;
    }
    Ok(state)
}
