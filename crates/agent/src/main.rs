//! The agent: a sandbox's init process. Serves envd and the control service, starts and reaps.

mod auth;
mod carrier;
mod clock;
mod context;
mod egress;
mod files;
mod filesystem;
mod http;
mod process;
mod rpc;
mod users;

use context::{Ctx, Settings};
use process::Processes;

#[tokio::main(flavor = "current_thread")]
async fn main() -> std::io::Result<()> {
    let ctx = Ctx::new(Settings::default(), Processes::default());
    let envd = http::envd(&ctx);
    carrier::run(ctx, http::Services { envd, control: axum::Router::new() }).await
}
