//! Every endpoint of the control plane as data: the OpenAPI document is made of it, and the server's
//! tests walk it.

/// What an answer's or request's body is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Body {
    None,
    /// A schema by name.
    One(&'static str),
    /// A JSON array of it.
    Many(&'static str),
    /// Bytes of this media type; the schema of one line or event, where there is one.
    Stream(&'static str, Option<&'static str>),
}

/// One method on one path.
#[derive(Debug, Clone, Copy)]
pub struct Endpoint {
    pub method: &'static str,
    /// `{name}` is a percent-encoded path segment.
    pub path: &'static str,
    pub summary: &'static str,
    /// Names in the query string.
    pub query: &'static [&'static str],
    pub request: Body,
    /// The success statuses, exactly.
    pub ok: &'static [u16],
    pub answer: Body,
}

const fn e(
    method: &'static str,
    path: &'static str,
    summary: &'static str,
    query: &'static [&'static str],
    request: Body,
    ok: &'static [u16],
    answer: Body,
) -> Endpoint {
    Endpoint { method, path, summary, query, request, ok, answer }
}

use Body::{Many, None as Empty, One, Stream};

const PAGE: &[&str] = &["sandboxID", "name", "limit", "nextToken"];
const LIST: &[&str] = &["metadata", "state", "order", "startedAfter", "template", "limit", "nextToken"];

/// E2B's.
#[rustfmt::skip]
pub const E2B: &[Endpoint] = &[
    e("POST", "/sandboxes", "Create a sandbox (default timeout 15 s)", &[], One("NewSandbox"), &[201], One("Sandbox")),
    e("POST", "/v2/sandboxes", "Create a sandbox (default timeout 300 s)", &[], One("NewSandbox"), &[201], One("Sandbox")),
    e("GET", "/sandboxes", "List running sandboxes", &["metadata"], Empty, &[200], Many("ListedSandbox")),
    e("GET", "/v2/sandboxes", "List sandboxes, in pages (X-Next-Token)", LIST, Empty, &[200], Many("ListedSandbox")),
    e("GET", "/sandboxes/metrics", "Latest metrics of several sandboxes", &["sandbox_ids"], Empty, &[200], One("SandboxesWithMetrics")),
    e("GET", "/sandboxes/{sandboxID}", "One sandbox", &[], Empty, &[200], One("SandboxDetail")),
    e("DELETE", "/sandboxes/{sandboxID}", "Kill a sandbox", &[], Empty, &[204], Empty),
    e("POST", "/sandboxes/{sandboxID}/timeout", "Set the deadline, from now", &[], One("TimeoutRequest"), &[204], Empty),
    e("POST", "/sandboxes/{sandboxID}/refreshes", "Extend the deadline", &[], One("RefreshRequest"), &[204], Empty),
    e("POST", "/sandboxes/{sandboxID}/pause", "Pause to disk", &[], One("PauseRequest"), &[204], Empty),
    e("POST", "/sandboxes/{sandboxID}/resume", "Resume a paused sandbox", &[], One("ResumeRequest"), &[201], One("Sandbox")),
    e("POST", "/sandboxes/{sandboxID}/connect", "Extend, or resume (201)", &[], One("ConnectRequest"), &[200, 201], One("Sandbox")),
    e("POST", "/v2/sandboxes/{sandboxID}/connect", "Extend, or resume (201)", &[], One("ConnectRequest"), &[200, 201], One("Sandbox")),
    e("POST", "/sandboxes/{sandboxID}/snapshots", "Take a snapshot and keep running", &[], One("SnapshotRequest"), &[201], One("E2bSnapshotInfo")),
    e("POST", "/sandboxes/{sandboxID}/fork", "Fork into live copies", &[], One("ForkRequest"), &[201], Many("E2bForkResult")),
    e("PUT", "/sandboxes/{sandboxID}/network", "Replace the egress rules", &[], One("SandboxNetworkUpdateConfig"), &[204], Empty),
    e("GET", "/sandboxes/{sandboxID}/metrics", "Metrics over time", &["start", "end"], Empty, &[200], Many("SandboxMetric")),
    e("GET", "/sandboxes/{sandboxID}/logs", "Log, oldest first", &["start", "limit"], Empty, &[200], One("SandboxLogs")),
    e("GET", "/v2/sandboxes/{sandboxID}/logs", "Log, in pages", &["cursor", "limit", "direction", "level", "search"], Empty, &[200], One("SandboxLogsV2")),
    e("GET", "/snapshots", "List snapshots, in pages (X-Next-Token)", PAGE, Empty, &[200], Many("E2bSnapshotInfo")),
    e("GET", "/templates", "List templates", &["teamID"], Empty, &[200], Many("Template")),
    e("GET", "/v2/templates", "List templates", &["teamID"], Empty, &[200], Many("Template")),
    e("GET", "/templates/{templateID}", "One template with its builds", &[], Empty, &[200], One("TemplateWithBuilds")),
    e("DELETE", "/templates/{templateID}", "Delete a template or a snapshot", &[], Empty, &[204], Empty),
    e("GET", "/templates/aliases/{alias}", "Which template has this alias", &[], Empty, &[200], One("TemplateAlias")),
    e("GET", "/teams", "The one team there is", &[], Empty, &[200], Many("Team")),
    e("GET", "/health", "Ready; needs no key", &[], Empty, &[204], Empty),
];

/// Our own.
#[rustfmt::skip]
pub const DORMOUSE: &[Endpoint] = &[
    e("GET", "/dormouse/v1/node", "Version, folder, engines, use", &[], Empty, &[200], One("NodeInfo")),
    e("GET", "/dormouse/v1/doctor", "What this host can do", &[], Empty, &[200], One("DoctorReport")),
    e("POST", "/dormouse/v1/gc", "Remove what nothing needs", &[], Empty, &[200], One("GcReport")),
    e("GET", "/dormouse/v1/events", "Events since a sequence number, then as they happen (server-sent events); follow=false: a JSON array", &["since", "sandboxID", "follow"], Empty, &[200], Stream("text/event-stream", Some("Event"))),
    e("GET", "/dormouse/v1/keys", "List API keys", &[], Empty, &[200], Many("KeyInfo")),
    e("POST", "/dormouse/v1/keys", "Create an API key; its secret is told once", &[], One("NewKey"), &[201], One("KeyInfo")),
    e("DELETE", "/dormouse/v1/keys/{keyID}", "Remove an API key", &[], Empty, &[204], Empty),
    e("GET", "/dormouse/v1/sandboxes", "List sandboxes with everything known, in pages (X-Next-Token)", LIST, Empty, &[200], Many("SandboxInfo")),
    e("GET", "/dormouse/v1/sandboxes/{sandboxID}", "One sandbox: tier, why awake (whyAwake=false: not asked, and answered at once), receipts, parent", &["whyAwake"], Empty, &[200], One("SandboxInfo")),
    e("POST", "/dormouse/v1/sandboxes/{sandboxID}/pause", "Pause to disk", &[], One("PauseRequest"), &[200], One("PauseResult")),
    e("POST", "/dormouse/v1/sandboxes/{sandboxID}/resume", "Resume", &[], One("ResumeRequest"), &[200], One("Receipt")),
    e("POST", "/dormouse/v1/sandboxes/{sandboxID}/checkpoint", "Take a snapshot and keep running", &[], One("Checkpoint"), &[201], One("SnapshotInfo")),
    e("POST", "/dormouse/v1/sandboxes/{sandboxID}/fork", "Fork, with receipts", &[], One("ForkRequest"), &[201], Many("ForkResult")),
    e("POST", "/dormouse/v1/sandboxes/{sandboxID}/rollback", "Put it back to one of its snapshots", &[], One("Rollback"), &[200], One("Receipt")),
    e("POST", "/dormouse/v1/sandboxes/{sandboxID}/freeze", "Take all CPU time away; any request thaws it", &[], Empty, &[204], Empty),
    e("POST", "/dormouse/v1/sandboxes/{sandboxID}/thaw", "Give CPU time back", &[], Empty, &[204], Empty),
    e("POST", "/dormouse/v1/sandboxes/{sandboxID}/idle", "Set when it is put to sleep", &[], One("IdlePolicy"), &[204], Empty),
    e("GET", "/dormouse/v1/sandboxes/{sandboxID}/receipts", "Receipts, latest first", &[], Empty, &[200], Many("Receipt")),
    e("GET", "/dormouse/v1/sandboxes/{sandboxID}/lineage", "Where it comes from", &[], Empty, &[200], Many("Lineage")),
    e("GET", "/dormouse/v1/lineage", "Where everything comes from", &[], Empty, &[200], Many("Lineage")),
    e("GET", "/dormouse/v1/snapshots", "List snapshots, in pages (X-Next-Token)", &["sandboxID", "name", "all", "limit", "nextToken"], Empty, &[200], Many("SnapshotInfo")),
    e("GET", "/dormouse/v1/snapshots/{snapshotID}", "One snapshot, by id or name", &[], Empty, &[200], One("SnapshotInfo")),
    e("DELETE", "/dormouse/v1/snapshots/{snapshotID}", "Remove a snapshot: what it frees, who keeps the rest", &[], Empty, &[200], One("Removed")),
    e("GET", "/dormouse/v1/templates", "List templates", &[], Empty, &[200], Many("TemplateInfo")),
    e("POST", "/dormouse/v1/templates", "Build a template from a tar of its context; the answer is one JSON value per line", &["name", "file", "engine", "cpus", "memoryMB", "diskMB", "startCommand", "readyCommand", "noCache"], Stream("application/x-tar", None), &[200], Stream("application/x-ndjson", Some("BuildLine"))),
    e("GET", "/dormouse/v1/templates/{templateID}", "One template, by id or name", &[], Empty, &[200], One("TemplateInfo")),
    e("DELETE", "/dormouse/v1/templates/{templateID}", "Remove a template", &[], Empty, &[200], One("Removed")),
];

/// E2B's that this release answers with 501 and a reason.
#[rustfmt::skip]
pub const NOT_IMPLEMENTED: &[(&str, &str)] = &[
    ("POST", "/v3/templates"), ("POST", "/v2/templates"), ("POST", "/templates"),
    ("GET", "/templates/{templateID}/files/{hash}"),
    ("POST", "/v2/templates/{templateID}/builds/{buildID}"),
    ("GET", "/templates/{templateID}/builds/{buildID}/status"),
    ("GET", "/templates/{templateID}/builds/{buildID}/logs"),
    ("PATCH", "/templates/{templateID}"), ("PATCH", "/v2/templates/{templateID}"),
    ("POST", "/templates/tags"), ("DELETE", "/templates/tags"), ("GET", "/templates/{templateID}/tags"),
    ("GET", "/volumes"), ("POST", "/volumes"), ("GET", "/volumes/{volumeID}"), ("DELETE", "/volumes/{volumeID}"),
    ("GET", "/secrets"), ("POST", "/secrets"), ("GET", "/secrets/{secretID}"), ("POST", "/secrets/{secretID}"), ("DELETE", "/secrets/{secretID}"),
];
