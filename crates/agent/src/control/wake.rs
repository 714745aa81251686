//! Waking: the sandbox learns who and when it is, before it is served.
//!
//! Order: everything is checked first; then random source, clock, names, certificates; then the
//! settings (from here on the new token counts); then, for a new identity, the hooks.

use std::path::PathBuf;

use axum::Json;
use axum::extract::{Request, State};
use axum::response::{IntoResponse as _, Response};
use base64::Engine as _;
use base64::prelude::BASE64_STANDARD;
use dormouse_sys::net::ask_after_connections;
use dormouse_sys::random::ENTROPY_BYTES;
use dormouse_wire::control::{CONTROL_VERSION, Wake, Woken};
use http::StatusCode;

use super::{Control, System, failed, hooks, identity, trust};
use crate::context::{Ctx, Settings};
use crate::limits;

/// A wake's body: variables and certificates, mostly.
const BODY_BYTES_MAX: usize = 2 << 20;

pub async fn wake(State(control): State<Control>, request: Request) -> Response {
    let body = match axum::body::to_bytes(request.into_body(), BODY_BYTES_MAX).await {
        Ok(body) => body,
        Err(why) => return failed(StatusCode::BAD_REQUEST, &format!("the wake cannot be read: {why}")),
    };
    let wake: Wake = match serde_json::from_slice(&body) {
        Ok(wake) => wake,
        Err(why) => return failed(StatusCode::BAD_REQUEST, &format!("the wake is not understood: {why}")),
    };
    let entropy = match check(&wake) {
        Ok(entropy) => entropy,
        Err(why) => return failed(StatusCode::BAD_REQUEST, &why),
    };
    let _one_at_a_time = control.waking.lock().await;
    let current = control.ctx.settings().generation;
    // Another identity counts its own restores, from the start.
    if !wake.new_identity && wake.generation < current {
        let why = format!("a wake for generation {} is stale: this is generation {current}", wake.generation);
        return failed(StatusCode::CONFLICT, &why);
    }
    match perform(&control, wake, entropy).await {
        Ok(woken) => Json(woken).into_response(),
        Err(why) => failed(StatusCode::INTERNAL_SERVER_ERROR, &why),
    }
}

/// What a wake says must hold before any of it is carried out.
fn check(wake: &Wake) -> Result<[u8; ENTROPY_BYTES], String> {
    let label = |byte: u8| byte.is_ascii_alphanumeric() || b"-.".contains(&byte);
    if wake.hostname.is_empty() || wake.hostname.len() > 64 || !wake.hostname.bytes().all(label) {
        return Err(format!("hostname {:?} is not a host name", wake.hostname));
    }
    if wake.machine_id.len() != 32 || !wake.machine_id.bytes().all(|byte| byte.is_ascii_hexdigit()) {
        return Err("machine_id is not 32 hex digits".to_owned());
    }
    if let Some(pem) = &wake.trusted_ca {
        trust::check(pem)?;
    }
    for (name, value) in wake.env.iter().flatten() {
        if name.is_empty() || name.contains(['=', '\0']) || value.contains('\0') {
            return Err(format!("env: the variable {name:?} cannot be set"));
        }
    }
    let entropy = BASE64_STANDARD.decode(&wake.entropy).map_err(|_| "entropy is not base64".to_owned())?;
    entropy
        .try_into()
        .map_err(|given: Vec<u8>| format!("entropy has {} bytes instead of {ENTROPY_BYTES}", given.len()))
}

async fn perform(control: &Control, wake: Wake, entropy: [u8; ENTROPY_BYTES]) -> Result<Woken, String> {
    let (system, for_system) = (control.system.clone(), wake.clone());
    let refreshed = tokio::task::spawn_blocking(move || refresh_system(&system, &for_system, &entropy));
    let (mut notes, reseeded) = refreshed.await.map_err(|why| format!("the wake broke off: {why}"))?;
    apply(&control.ctx, &wake);
    if wake.new_identity
        && let Some(root) = control.system.root()
    {
        let variables = [
            ("DORMOUSE_SANDBOX_ID", wake.sandbox.to_string()),
            ("DORMOUSE_GENERATION", wake.generation.to_string()),
            ("DORMOUSE_HOSTNAME", wake.hostname.clone()),
            ("DORMOUSE_MACHINE_ID", wake.machine_id.clone()),
        ];
        hooks::run(control.ctx.processes().reaper(), &root, &variables, &mut notes).await;
    }
    Ok(Woken {
        control_version: CONTROL_VERSION,
        agent_version: env!("CARGO_PKG_VERSION").to_owned(),
        generation: wake.generation,
        notes,
        reseeded,
    })
}

fn refresh_system(system: &System, wake: &Wake, entropy: &[u8; ENTROPY_BYTES]) -> (Vec<String>, bool) {
    let mut notes = Vec::new();
    let mut reseeded = false;
    if *system == System::Sandbox {
        reseeded = identity::refresh_random(entropy, &mut notes);
        identity::set_clock(wake.wall_clock_ns, &mut notes);
        identity::set_kernel_hostname(&wake.hostname, &mut notes);
        if let Err(why) = ask_after_connections() {
            notes.push(format!("connections that are gone may not end by themselves: {why}"));
        }
        if let Some(Err(why)) = wake.processes_max.map(limits::set_processes_max) {
            notes.push(format!("the number of processes cannot be limited from inside: {why}"));
        }
    }
    if let Some(root) = system.root() {
        identity::write_files(&root, wake, &mut notes);
        if let Err(why) = trust::install(&root, wake.trusted_ca.as_deref()) {
            notes.push(format!("the trusted certificates cannot be written: {why}"));
        }
    }
    (notes, reseeded)
}

fn apply(ctx: &Ctx, wake: &Wake) {
    ctx.update(|settings| {
        settings.sandbox = Some(wake.sandbox.to_string());
        settings.generation = wake.generation;
        settings.access_token = wake.access_token.clone();
        if let Some(env) = &wake.env {
            settings.env = env.clone();
        }
        tell_the_sandbox(settings, wake.sandbox.as_str());
        if let Some(user) = &wake.default_user {
            settings.default_user = Some(user.clone()).filter(|user| !user.is_empty());
        }
        if let Some(folder) = &wake.default_workdir {
            settings.default_workdir =
                Some(PathBuf::from(folder)).filter(|folder| !folder.as_os_str().is_empty());
        }
        settings.trust_env = if wake.trusted_ca.is_some() { trust::variables() } else { Default::default() };
        settings.egress = wake.egress;
    });
}

/// What programs written for E2B look at. The id follows a fork even where the variables stay.
fn tell_the_sandbox(settings: &mut Settings, sandbox: &str) {
    settings.env.entry("E2B_SANDBOX".to_owned()).or_insert_with(|| "true".to_owned());
    settings.env.insert("E2B_SANDBOX_ID".to_owned(), sandbox.to_owned());
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;
    use dormouse_types::Generation;

    pub fn sample(hostname: &str) -> Wake {
        Wake {
            sandbox: "s1".parse().unwrap(),
            generation: Generation(1),
            entropy: BASE64_STANDARD.encode([7; ENTROPY_BYTES]),
            wall_clock_ns: 0,
            hostname: hostname.to_owned(),
            machine_id: "0123456789abcdef0123456789abcdef".to_owned(),
            access_token: Some("token".to_owned()),
            new_identity: true,
            env: None,
            default_user: None,
            default_workdir: None,
            trusted_ca: None,
            egress: false,
            processes_max: None,
        }
    }

    #[test]
    fn a_wake_is_checked_before_anything_changes() {
        assert_eq!(check(&sample("a.b-1")), Ok([7; ENTROPY_BYTES]));
        assert!(check(&sample("a b")).is_err());
        assert!(check(&Wake { entropy: "AAAA".into(), ..sample("a") }).unwrap_err().contains("3 bytes"));
        assert!(check(&Wake { machine_id: "xyz".into(), ..sample("a") }).is_err());
        let env = Some([("A=B".to_owned(), String::new())].into());
        assert!(check(&Wake { env, ..sample("a") }).unwrap_err().contains("A=B"));
    }

    #[test]
    fn what_is_not_given_stays() {
        let ctx = Ctx::new(Settings::default(), crate::process::Processes::default());
        let env = Some([("A".to_owned(), "1".to_owned())].into());
        apply(&ctx, &Wake { env, default_user: Some("root".into()), ..sample("a") });
        apply(&ctx, &Wake { sandbox: "s2".parse().unwrap(), access_token: None, ..sample("b") });
        let settings = ctx.settings();
        assert_eq!(settings.env.get("A").map(String::as_str), Some("1"));
        assert_eq!(settings.env.get("E2B_SANDBOX_ID").map(String::as_str), Some("s2"));
        assert_eq!((settings.default_user.as_deref(), &settings.access_token), (Some("root"), &None));
    }
}
