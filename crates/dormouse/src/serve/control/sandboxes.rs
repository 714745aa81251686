//! Create, look, kill, and what a sandbox may reach.

use std::collections::BTreeMap;
use std::sync::Arc;

use axum::extract::State as Extracted;
use dormouse_api::dormouse::{IdlePolicy as WireIdle, ShapeRequest};
use dormouse_api::e2b::{
    self, NewSandbox, SandboxNetworkConfig, SandboxNetworkUpdateConfig, TIMEOUT_V1_DEFAULT_S,
    TIMEOUT_V2_DEFAULT_S,
};
use dormouse_api::error::ApiError;
use dormouse_node::model::{CreateRequest, IdlePolicy, IngressRequest, OnTimeout, State};
use dormouse_node::{ErrorCode, Node};
use dormouse_types::Shape;
use dormouse_wire::keeper::EgressRules;
use http::StatusCode;

use super::extract::{Id, Idempotency, Json, seconds};
use crate::serve::app::{App, Caller};
use crate::serve::convert;
use crate::serve::proxy;
use crate::serve::reply::{self, Failure, Outcome};

type Shared = Extracted<Arc<App>>;

pub async fn create_v1(
    app: Shared,
    caller: Caller,
    key: Idempotency,
    Json(new): Json<NewSandbox>,
) -> Outcome {
    create(&app, caller, key, new, TIMEOUT_V1_DEFAULT_S).await
}

pub async fn create_v2(
    app: Shared,
    caller: Caller,
    key: Idempotency,
    Json(new): Json<NewSandbox>,
) -> Outcome {
    create(&app, caller, key, new, TIMEOUT_V2_DEFAULT_S).await
}

async fn create(app: &App, caller: Caller, key: Idempotency, new: NewSandbox, timeout_s: u32) -> Outcome {
    let request = create_request(&app.node, caller, key, new, timeout_s).await?;
    let (info, _) = app.node.create(request).await?;
    Ok(reply::json(201, &convert::sandbox(&info, &app.domain)))
}

async fn create_request(
    node: &Node,
    caller: Caller,
    key: Idempotency,
    new: NewSandbox,
    timeout_s: u32,
) -> Result<CreateRequest, Failure> {
    refuse_unsupported(&new)?;
    let own = new.dormouse.clone().unwrap_or_default();
    let engine = own.engine.as_deref().map(str::parse).transpose();
    let engine = engine.map_err(|error| ApiError::invalid("dormouse.engine", error))?;
    let on_timeout = match own.on_timeout {
        Some(e2b::OnTimeout::Pause) => OnTimeout::Pause,
        Some(e2b::OnTimeout::Kill) => OnTimeout::Kill,
        None if new.auto_pause == Some(true) => OnTimeout::Pause,
        None => OnTimeout::Kill,
    };
    let shape = match own.shape {
        Some(asked) => Some(shape(node, &new.template_id, asked).await?),
        None => None,
    };
    let env = new.env_vars.unwrap_or_default();
    check_env(&env)?;
    Ok(CreateRequest {
        source: new.template_id,
        engine,
        timeout_s: seconds("timeout", new.timeout, timeout_s)?,
        on_timeout,
        auto_resume: new.auto_resume.is_some_and(|auto| auto.enabled),
        metadata: new.metadata.unwrap_or_default(),
        env,
        ingress: ingress(new.network.as_ref())?,
        egress: egress(new.allow_internet_access, new.network),
        idle: own.idle.map_or_else(IdlePolicy::default, idle),
        shape,
        owner: Some(caller.key),
        idempotency_key: key.0,
    })
}

/// What would be ignored must be refused where somebody may rely on it.
fn refuse_unsupported(new: &NewSandbox) -> Result<(), ApiError> {
    let refuse =
        |field: &str, what: &str| Err(ApiError::invalid(field, format!("{what} is not supported here")));
    if new.template_id.is_empty() {
        return Err(ApiError::invalid("templateID", "must not be empty"));
    }
    if new.auto_pause == Some(true) && new.auto_pause_memory == Some(false) {
        return refuse("autoPauseMemory", "an automatic pause without memory");
    }
    if new.volume_mounts.as_ref().is_some_and(|mounts| !mounts.is_empty()) {
        return refuse("volumeMounts", "a volume");
    }
    if new.iam.as_ref().and_then(|iam| iam.tokens.as_ref()).is_some_and(|tokens| !tokens.is_empty()) {
        return refuse("iam.tokens", "workload identity");
    }
    let Some(network) = &new.network else { return Ok(()) };
    if network.https_ports.as_ref().is_some_and(|ports| !ports.is_empty()) {
        return refuse("network.httpsPorts", "TLS towards services");
    }
    refuse_rewriting(
        network.egress_proxy.is_some(),
        network.rules.as_ref().is_some_and(|rules| !rules.is_empty()),
    )
}

fn refuse_rewriting(proxy: bool, rules: bool) -> Result<(), ApiError> {
    if proxy {
        return Err(ApiError::invalid("network.egressProxy", "an egress proxy is not supported here"));
    }
    if rules {
        return Err(ApiError::invalid("network.rules", "rewriting of requests is not supported here"));
    }
    Ok(())
}

fn check_env(env: &BTreeMap<String, String>) -> Result<(), ApiError> {
    for (name, value) in env {
        if name.is_empty() || name.contains(['=', '\0']) {
            return Err(ApiError::invalid("envVars", format!("{name:?} is not a variable's name")));
        }
        if value.contains('\0') {
            return Err(ApiError::invalid("envVars", format!("the value of {name} holds a NUL")));
        }
    }
    Ok(())
}

fn egress(internet: Option<bool>, network: Option<SandboxNetworkConfig>) -> EgressRules {
    let network = network.unwrap_or_default();
    EgressRules {
        internet: internet.unwrap_or(true),
        allow: network.allow_out.unwrap_or_default(),
        deny: network.deny_out.unwrap_or_default(),
    }
}

fn ingress(network: Option<&SandboxNetworkConfig>) -> Result<IngressRequest, ApiError> {
    let Some(network) = network else { return Ok(IngressRequest::default()) };
    let host = network.mask_request_host.clone().filter(|host| !host.is_empty());
    if host.as_ref().is_some_and(|mask| proxy::masked_host(mask, u16::MAX).is_none()) {
        let message = "must be a host, where ${PORT} may stand for the port, of at most 253 characters";
        return Err(ApiError::invalid("network.maskRequestHost", message));
    }
    Ok(IngressRequest { with_token: network.allow_public_traffic == Some(false), host })
}

pub fn idle(wire: WireIdle) -> IdlePolicy {
    IdlePolicy { freeze_after_s: wire.freeze_after, disk_after_s: wire.disk_after }
}

/// The source's shape with what was asked put over it.
async fn shape(node: &Node, source: &str, asked: ShapeRequest) -> Result<Shape, Failure> {
    let template = match node.template_by_name(source).await {
        Ok(template) => Some(template.shape),
        Err(error) if error.code == ErrorCode::NotFound => match node.snapshot_get(source).await {
            Ok(snapshot) => {
                node.template_by_name(snapshot.template.as_str()).await.ok().map(|found| found.shape)
            }
            Err(_) => None,
        },
        Err(error) => return Err(error.into()),
    };
    let base = template.unwrap_or_default();
    let shape = Shape {
        cpus: asked.cpus.unwrap_or(base.cpus),
        memory_mib: asked.memory_mb.unwrap_or(base.memory_mib),
        disk_mib: asked.disk_mb.unwrap_or(base.disk_mib),
        processes_max: asked.processes_max.unwrap_or(base.processes_max),
    };
    Ok(shape.validate().map_err(|error| ApiError::invalid("dormouse.shape", error))?)
}

pub async fn get(app: Shared, Id(id): Id) -> Outcome {
    let info = app.node.get(&id).await?;
    // E2B's clients know running and paused; for what is neither, both would be a lie.
    match &info.state {
        State::Failed { why } => {
            let message = format!("sandbox {id} failed: {why}; GET /dormouse/v1/sandboxes/{id} tells more");
            Err(Failure(ApiError::new(404, "sandbox_failed", message)))
        }
        State::Killed => Err(Failure(ApiError::not_found(format!("sandbox {id} was killed")))),
        _ => Ok(reply::json(200, &convert::detail(&info, &app.domain))),
    }
}

pub async fn kill(app: Shared, Id(id): Id) -> Outcome {
    app.node.kill(&id).await?;
    Ok(reply::empty(StatusCode::NO_CONTENT))
}

pub async fn network(app: Shared, Id(id): Id, Json(update): Json<SandboxNetworkUpdateConfig>) -> Outcome {
    refuse_rewriting(update.egress_proxy.is_some(), update.rules.is_some_and(|rules| !rules.is_empty()))?;
    let rules = EgressRules {
        internet: update.allow_internet_access.unwrap_or(true),
        allow: update.allow_out.unwrap_or_default(),
        deny: update.deny_out.unwrap_or_default(),
    };
    app.node.set_egress(&id, rules).await?;
    Ok(reply::empty(StatusCode::NO_CONTENT))
}
