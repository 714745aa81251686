//! The agent's end of the carrier: streams of the keeper on standard input and output.

use crate::context::Ctx;
use crate::http::Services;

/// Serves the keeper until standard input ends.
pub async fn run(_ctx: Ctx, _services: Services) -> std::io::Result<()> {
    Ok(())
}
