//! The OpenAPI document, made of the endpoint table and the types' schemas.

use utoipa::openapi::path::{HttpMethod, OperationBuilder, ParameterBuilder, ParameterIn, PathItemBuilder};
use utoipa::openapi::request_body::RequestBodyBuilder;
use utoipa::openapi::schema::{ArrayBuilder, ObjectBuilder, SchemaType, Type};
use utoipa::openapi::security::{ApiKey, ApiKeyValue, SecurityRequirement, SecurityScheme};
use utoipa::openapi::{
    ComponentsBuilder, ContentBuilder, InfoBuilder, OpenApi, OpenApiBuilder, PathsBuilder, Ref, RefOr,
    Required, ResponseBuilder, Schema,
};
use utoipa::{PartialSchema, ToSchema};

use crate::endpoints::{Body, DORMOUSE, E2B, Endpoint};
use crate::{dormouse, e2b, error};

/// The whole document.
#[must_use]
pub fn document() -> OpenApi {
    let mut paths: Vec<(&str, PathItemBuilder)> = Vec::new();
    for endpoint in E2B.iter().chain(DORMOUSE) {
        let at = match paths.iter().position(|(path, _)| *path == endpoint.path) {
            Some(at) => at,
            None => {
                paths.push((endpoint.path, PathItemBuilder::new()));
                paths.len() - 1
            }
        };
        let item = std::mem::take(&mut paths[at].1);
        paths[at].1 = item.operation(method(endpoint.method), operation(endpoint).build());
    }
    let paths = paths.into_iter().fold(PathsBuilder::new(), |all, (path, item)| all.path(path, item.build()));
    let info = InfoBuilder::new()
        .title("Dormouse")
        .version(env!("CARGO_PKG_VERSION"))
        .description(Some("Computers for AI agents that can sleep: E2B's control plane and our additions."));
    OpenApiBuilder::new().info(info.build()).paths(paths.build()).components(Some(components())).build()
}

/// The document as it is committed.
#[must_use]
pub fn text() -> String {
    let mut text = document().to_pretty_json().unwrap_or_else(|error| format!("{{\"error\": \"{error}\"}}"));
    text.push('\n');
    text
}

fn method(name: &str) -> HttpMethod {
    match name {
        "POST" => HttpMethod::Post,
        "PUT" => HttpMethod::Put,
        "DELETE" => HttpMethod::Delete,
        _ => HttpMethod::Get,
    }
}

fn text_schema() -> RefOr<Schema> {
    ObjectBuilder::new().schema_type(SchemaType::Type(Type::String)).build().into()
}

fn content(body: Body) -> Option<(&'static str, RefOr<Schema>)> {
    let named = |name| RefOr::Ref(Ref::from_schema_name(name));
    match body {
        Body::None => None,
        Body::One(name) => Some(("application/json", named(name))),
        Body::Many(name) => Some(("application/json", ArrayBuilder::new().items(named(name)).build().into())),
        Body::Stream(media, line) => Some((media, line.map_or_else(text_schema, named))),
    }
}

fn operation(endpoint: &Endpoint) -> OperationBuilder {
    let group = if endpoint.path.starts_with(dormouse::PREFIX) { "dormouse" } else { "e2b" };
    let mut operation = OperationBuilder::new().summary(Some(endpoint.summary)).tag(group);
    let segments = endpoint.path.split('/').filter_map(|s| s.strip_prefix('{')?.strip_suffix('}'));
    let parameters = segments
        .map(|name| (name, ParameterIn::Path, Required::True))
        .chain(endpoint.query.iter().map(|name| (*name, ParameterIn::Query, Required::False)));
    for (name, place, required) in parameters {
        let parameter = ParameterBuilder::new()
            .name(name)
            .parameter_in(place)
            .required(required)
            .schema(Some(text_schema()));
        operation = operation.parameter(parameter.build());
    }
    if let Some((media, schema)) = content(endpoint.request) {
        let content = ContentBuilder::new().schema(Some(schema)).build();
        operation = operation.request_body(Some(RequestBodyBuilder::new().content(media, content).build()));
    }
    for status in endpoint.ok {
        let mut response = ResponseBuilder::new().description("Done");
        if let Some((media, schema)) = content(endpoint.answer) {
            response = response.content(media, ContentBuilder::new().schema(Some(schema)).build());
        }
        operation = operation.response(status.to_string(), response.build());
    }
    if endpoint.path != "/health" {
        let error = ContentBuilder::new().schema(Some(RefOr::Ref(Ref::from_schema_name("Error")))).build();
        let response =
            ResponseBuilder::new().description("Any other status").content("application/json", error);
        operation = operation
            .response("default", response.build())
            .security(SecurityRequirement::new("ApiKey", Vec::<String>::new()));
    }
    operation
}

fn add<T: PartialSchema + ToSchema>(components: ComponentsBuilder, name: &str) -> ComponentsBuilder {
    let mut referenced = Vec::new();
    T::schemas(&mut referenced);
    components.schemas_from_iter(referenced).schema(name, T::schema())
}

macro_rules! schemas {
    ($builder:ident: $($name:literal => $type:ty),* $(,)?) => {
        $( $builder = add::<$type>($builder, $name); )*
    };
}

fn components() -> utoipa::openapi::Components {
    let mut all = ComponentsBuilder::new()
        .security_scheme("ApiKey", SecurityScheme::ApiKey(ApiKey::Header(ApiKeyValue::new("X-API-KEY"))));
    schemas!(all:
        "BuildLine" => dormouse::BuildLine, "Checkpoint" => dormouse::Checkpoint,
        "ConnectRequest" => e2b::ConnectRequest, "DoctorReport" => dormouse::DoctorReport,
        "E2bForkResult" => e2b::ForkResult, "E2bSnapshotInfo" => e2b::SnapshotInfo,
        "Error" => error::ErrorBody, "Event" => dormouse::Event,
        "ForkRequest" => e2b::ForkRequest, "GcReport" => dormouse::GcReport,
        "KeyInfo" => dormouse::KeyInfo, "Lineage" => dormouse::Lineage, "ListedSandbox" => e2b::ListedSandbox,
        "NewKey" => dormouse::NewKey, "NewSandbox" => e2b::NewSandbox, "NodeInfo" => dormouse::NodeInfo,
        "PauseRequest" => e2b::PauseRequest, "PauseResult" => dormouse::PauseResult,
        "Receipt" => dormouse::Receipt, "RefreshRequest" => e2b::RefreshRequest,
        "Removed" => dormouse::Removed, "ResumeRequest" => e2b::ResumeRequest,
        "Rollback" => dormouse::Rollback, "Sandbox" => e2b::Sandbox, "SandboxDetail" => e2b::SandboxDetail,
        "SandboxLogs" => e2b::SandboxLogs, "SandboxLogsV2" => e2b::SandboxLogsV2,
        "SandboxMetric" => e2b::SandboxMetric, "SandboxNetworkUpdateConfig" => e2b::SandboxNetworkUpdateConfig,
        "SandboxesWithMetrics" => e2b::SandboxesWithMetrics, "SnapshotRequest" => e2b::SnapshotRequest,
        "Team" => e2b::Team, "Template" => e2b::Template, "TemplateAlias" => e2b::TemplateAlias,
        "TemplateWithBuilds" => e2b::TemplateWithBuilds, "TimeoutRequest" => e2b::TimeoutRequest,
    );
    // Last, so that ours win over E2B's of the same Rust name.
    schemas!(all:
        "ForkResult" => dormouse::ForkResult, "IdlePolicy" => dormouse::IdlePolicy,
        "SandboxInfo" => dormouse::SandboxInfo, "SnapshotInfo" => dormouse::SnapshotInfo,
        "TemplateInfo" => dormouse::TemplateInfo,
    );
    all.build()
}

#[cfg(test)]
mod tests {
    use super::*;

    const COMMITTED: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../openapi.json");

    /// `DORMOUSE_BLESS=1 cargo test -p dormouse-api openapi` writes the file anew.
    #[test]
    fn the_committed_document_is_this_one() {
        if std::env::var_os("DORMOUSE_BLESS").is_some() {
            std::fs::write(COMMITTED, text()).expect("openapi.json can be written");
        }
        let committed = std::fs::read_to_string(COMMITTED).expect("openapi.json is committed");
        let differs = committed.lines().zip(text().lines()).position(|(a, b)| a != b);
        assert!(
            committed == text(),
            "openapi.json differs from line {differs:?} on; run DORMOUSE_BLESS=1 cargo test -p dormouse-api openapi"
        );
    }

    #[test]
    fn every_reference_has_its_schema() {
        let value: serde_json::Value = serde_json::from_str(&text()).expect("a JSON document");
        let schemas = value["components"]["schemas"].as_object().expect("schemas");
        let mut missing = Vec::new();
        for part in text().split("#/components/schemas/").skip(1) {
            let name: String = part.chars().take_while(char::is_ascii_alphanumeric).collect();
            if !schemas.contains_key(&name) {
                missing.push(name);
            }
        }
        assert!(missing.is_empty(), "no schema for {missing:?}");
    }
}
