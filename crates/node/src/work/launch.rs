//! Starting a runtime: boot or restore, verification beside it, then `Wake`. Fail closed: what was not
//! woken under the right generation is stopped again and never served.

use std::time::Duration;

use base64::Engine as _;
use dormouse_engine::{BootSpec, Exit, RestoreSpec};
use dormouse_snapshot::Manifest;
use dormouse_store::{Cancel, VerifyError};
use dormouse_types::SandboxId;
use dormouse_wire::control::{CONTROL_VERSION, Wake, Woken};
use dormouse_wire::keeper::Session;

use super::{Birth, Job, Report, words};
use crate::agent;
use crate::error::{ErrorCode, NodeError};
use crate::lifecycle::Outcome;
use crate::model::Receipt;

const ENTROPY_BYTES: usize = 64;
/// The agent's first answer: it comes with the machine's first instructions.
const WAKE_SECONDS_MAX: u64 = 120;

/// A runtime that serves.
pub struct Launched {
    pub woken: Woken,
    pub agent_digest: Option<String>,
    session: Session,
    from_pool: bool,
    restored: bool,
    new_identity: bool,
    random_from_host: bool,
}

/// It was not started, and nothing of it is left.
pub enum NotLaunched {
    /// Not begun.
    Refused(NodeError),
    /// Some of it had run.
    Ended(NodeError),
}

impl NotLaunched {
    pub fn report(self) -> Report {
        match self {
            Self::Refused(error) => Report::unchanged(error),
            Self::Ended(error) => Report::new(Outcome::Lost { error, snapshot: None }),
        }
    }
}

/// 32 hex digits for `/etc/machine-id`: one per sandbox, stable over its life.
#[must_use]
pub fn machine_id(sandbox: &SandboxId) -> String {
    let mut id = blake3::derive_key("dormouse machine-id 1", sandbox.as_str().as_bytes())
        .iter()
        .map(|byte| format!("{byte:02x}"))
        .collect::<String>();
    id.truncate(32);
    id
}

impl Launched {
    pub fn receipt(&self, operation: &str, receipt: Receipt) -> Receipt {
        let mut receipt = receipt;
        receipt.refreshed = words(&["wall clock", "randomness"]);
        if self.new_identity {
            receipt.refreshed.extend(words(&["hostname", "machine id", "access token"]));
        }
        receipt.shared = words(&["root file system (read-only)"]);
        if self.restored {
            receipt.kept =
                words(&["memory", "processes", "files", "loopback connections", "listening ports"]);
        }
        match (self.session, operation) {
            (Session::Continue, _) => receipt.kept.extend(words(&["client streams", "outbound connections"])),
            (Session::New, "create") => {}
            (Session::New, "fork") => receipt.dropped.extend(words(&[
                "client streams (they stay the source's)",
                "outbound connections (they stay the source's)",
            ])),
            (Session::New, _) => receipt.dropped.extend(words(&["client streams", "outbound connections"])),
        }
        if !self.woken.reseeded && !self.random_from_host {
            receipt.dropped.push("randomness: the kernel inside did not take new entropy".to_owned());
        }
        if self.woken.control_version != CONTROL_VERSION {
            receipt
                .dropped
                .push(format!("the agent inside speaks control version {}", self.woken.control_version));
        }
        if self.from_pool {
            receipt.shared.push("a prepared runtime was used".to_owned());
        }
        let about_random = |note: &&String| self.random_from_host && note.starts_with("the random source");
        receipt.dropped.extend(self.woken.notes.iter().filter(|note| !about_random(note)).cloned());
        receipt
    }
}

impl Job {
    pub(super) async fn boot(&self, birth: &Birth) -> Result<Launched, NotLaunched> {
        let _gate = self.order.hub.gate.read().await;
        let info = &self.order.info;
        let spec = BootSpec {
            sandbox: info.id.clone(),
            runtime: self.order.pending.runtime.clone(),
            generation: self.order.generation,
            rootfs: self.order.hub.rootfs(&info.rootfs),
            shape: info.shape,
            hostname: info.hostname.clone(),
            egress: info.egress.clone(),
        };
        self.engine.boot(spec).await.map_err(|error| NotLaunched::Refused(error.into()))?;
        let woken = self.wake_or_stop(&self.wake(Some(birth), true)).await?;
        Ok(Launched {
            woken,
            agent_digest: Some(self.order.hub.agent_digest.clone()),
            session: Session::New,
            from_pool: false,
            restored: false,
            new_identity: true,
            random_from_host: self.engine.random_from_host(),
        })
    }

    /// From a published snapshot, whose files are verified while they are read.
    pub(super) async fn launch(
        &self,
        manifest: &Manifest,
        session: Session,
        birth: Option<&Birth>,
    ) -> Result<Launched, NotLaunched> {
        let _pin = self.order.hub.pin(&manifest.id);
        let _gate = self.order.hub.gate.read().await;
        self.engine.can_restore(manifest).map_err(|error| NotLaunched::Refused(error.into()))?;
        let spec = self.restore_spec(manifest, session);
        let cancel = Cancel::default();
        let restore = async {
            let restored = self.engine.restore(spec).await;
            self.reached("restored");
            restored
        };
        let (restored, verified) = tokio::join!(restore, self.verify_until(manifest, &cancel));
        self.reached("restored and verified");
        let restored = match (restored, verified) {
            (Ok(restored), Ok(())) => restored,
            (Ok(_), Err(error)) => {
                self.stop_new().await;
                return Err(NotLaunched::Ended(error));
            }
            // Damage explains the failed restore better than the engine can.
            (Err(_), Err(error)) if error.code == ErrorCode::Failed => {
                return Err(NotLaunched::Refused(error));
            }
            (Err(error), _) => return Err(NotLaunched::Ended(error.into())),
        };
        // Whoever's memory it is, it shall not take itself for another.
        let foreign = manifest.sandbox != self.order.info.id;
        let woken = self.wake_or_stop(&self.wake(birth, foreign)).await?;
        self.reached("woken");
        if foreign {
            self.check_reseeded(&woken).await?;
        }
        Ok(Launched {
            woken,
            agent_digest: Some(manifest.compat.agent_digest.clone()),
            session: restored.session,
            from_pool: restored.from_pool,
            restored: true,
            new_identity: foreign,
            random_from_host: self.engine.random_from_host(),
        })
    }

    /// A live fork's child, whose runtime exists: fail closed as after a restore.
    pub(super) async fn wake_child(&self, birth: &Birth) -> Result<Launched, NotLaunched> {
        let woken = self.wake_or_stop(&self.wake(Some(birth), true)).await?;
        self.reached("woken");
        self.check_reseeded(&woken).await?;
        Ok(Launched {
            woken,
            agent_digest: self.order.info.agent_digest.clone(),
            session: Session::New,
            from_pool: false,
            restored: true,
            new_identity: true,
            random_from_host: self.engine.random_from_host(),
        })
    }

    /// A copy that could draw the same numbers as another is not served.
    async fn check_reseeded(&self, woken: &Woken) -> Result<(), NotLaunched> {
        if woken.reseeded || self.engine.random_from_host() {
            return Ok(());
        }
        self.stop_new().await;
        let message = "the agent inside did not confirm new randomness; the copy was not served".to_owned();
        Err(NotLaunched::Ended(NodeError::failed(message)))
    }

    fn restore_spec(&self, manifest: &Manifest, session: Session) -> RestoreSpec {
        let info = &self.order.info;
        RestoreSpec {
            sandbox: info.id.clone(),
            runtime: self.order.pending.runtime.clone(),
            generation: self.order.generation,
            rootfs: self.order.hub.rootfs(&manifest.rootfs),
            snapshot_dir: self.order.hub.store.dir(&manifest.id),
            manifest: manifest.clone(),
            shape: info.shape,
            hostname: info.hostname.clone(),
            egress: info.egress.clone(),
            session,
        }
    }

    async fn stop_new(&self) {
        if let Err(error) = self.engine.stop(&self.order.info.id, &self.order.pending.runtime).await {
            tracing::warn!(sandbox = %self.order.info.id, %error, "a runtime that is not to be served could not be ended");
        }
    }

    async fn wake_or_stop(&self, wake: &Wake) -> Result<Woken, NotLaunched> {
        let dir = self.engine.keeper_dir(&self.order.info.id);
        let told = tokio::select! {
            told = agent::wake(&dir, wake, Duration::from_secs(WAKE_SECONDS_MAX)) => {
                told.map_err(|error| NodeError::failed(format!("it was started, but {error}")))
            }
            exit = self.engine.exited(&self.order.info.id, &self.order.pending.runtime) => {
                let (Exit::Runtime { why } | Exit::Keeper { why }) = exit;
                Err(NodeError::failed(format!("it was started and ended at once: {why}")))
            }
        };
        let told = told.and_then(|woken| {
            if woken.generation == wake.generation {
                return Ok(woken);
            }
            Err(NodeError::failed(format!(
                "the agent answered for generation {} and not {}",
                woken.generation, wake.generation
            )))
        });
        match told {
            Ok(woken) => Ok(woken),
            Err(error) => {
                self.stop_new().await;
                Err(NotLaunched::Ended(error))
            }
        }
    }

    fn wake(&self, birth: Option<&Birth>, new_identity: bool) -> Wake {
        let info = &self.order.info;
        let mut entropy = [0_u8; ENTROPY_BYTES];
        // As for ids: without randomness nothing may be started.
        if let Err(error) = getrandom::fill(&mut entropy) {
            panic!("the kernel's random source failed: {error}");
        }
        Wake {
            sandbox: info.id.clone(),
            generation: self.order.generation,
            entropy: base64::engine::general_purpose::STANDARD.encode(entropy),
            wall_clock_ns: i64::try_from(self.order.hub.now().as_nanosecond()).unwrap_or(i64::MAX),
            hostname: info.hostname.clone(),
            machine_id: machine_id(&info.id),
            access_token: Some(info.access_token.clone()),
            new_identity,
            env: new_identity.then(|| info.env.clone()),
            default_user: birth.and_then(|birth| birth.default_user.clone()),
            default_workdir: birth.and_then(|birth| birth.default_workdir.clone()),
            trusted_ca: self.order.hub.config.trusted_ca.clone(),
            egress: true,
            processes_max: Some(info.shape.processes_max),
        }
    }

    /// For the runtime that serves already, under the generation that begins.
    pub(super) fn wake_again(&self) -> Wake {
        self.wake(None, false)
    }

    /// For the runtime that serves already, under its own generation.
    pub(super) fn wake_as_before(&self) -> Wake {
        Wake { generation: self.order.info.generation, ..self.wake(None, false) }
    }

    pub(super) async fn verify(&self, manifest: &Manifest) -> Result<(), NodeError> {
        self.verify_until(manifest, &Cancel::default()).await
    }

    async fn verify_until(&self, manifest: &Manifest, cancel: &Cancel) -> Result<(), NodeError> {
        let (store, manifest, cancel) = (self.order.hub.store.clone(), manifest.clone(), cancel.clone());
        let work = move || store.verify_files(&manifest, &cancel);
        let verified = self.order.hub.blocking("the verification of a snapshot", work).await?;
        verified.map_err(|error| {
            let code = match error {
                VerifyError::Damaged { .. } | VerifyError::Load { .. } => ErrorCode::Failed,
                VerifyError::Read { .. } | VerifyError::Cancelled { .. } => ErrorCode::Unavailable,
            };
            NodeError::new(code, error.to_string())
        })
    }
}
