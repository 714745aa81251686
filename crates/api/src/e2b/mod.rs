//! E2B's control plane: the objects that released clients send and read.
//!
//! Field names are E2B's to the letter (`allow_internet_access` in requests, `allowInternetAccess`
//! in details). What clients may leave out or send as null is an `Option`.

mod network;
mod observe;
mod sandbox;
mod template;

pub use network::{
    EgressProxy, SandboxIam, SandboxNetworkConfig, SandboxNetworkUpdateConfig, SandboxVolumeMount,
};
pub use observe::{
    LogLevel, SandboxLog, SandboxLogEntry, SandboxLogs, SandboxLogsV2, SandboxMetric, SandboxesWithMetrics,
    Team,
};
pub use sandbox::{
    AutoResume, ConnectRequest, ForkRequest, ForkResult, Lifecycle, ListedSandbox, NewSandbox, OnTimeout,
    PauseMode, PauseRequest, RefreshRequest, ResumeRequest, Sandbox, SandboxDetail, SandboxState,
    SnapshotInfo, SnapshotRequest, TimeoutRequest,
};
pub use template::{BuildStatus, Template, TemplateAlias, TemplateBuild, TemplateWithBuilds};

/// Seconds that a sandbox lives when a v1 request says nothing.
pub const TIMEOUT_V1_DEFAULT_S: u32 = 15;
/// Seconds that a sandbox lives when a v2 request says nothing.
pub const TIMEOUT_V2_DEFAULT_S: u32 = 300;
/// A year: longer timeouts are refused.
pub const TIMEOUT_MAX_S: u32 = 31_536_000;
pub const FORK_COUNT_MAX: u32 = 20;
pub const LIST_LIMIT_MAX: usize = 100;
