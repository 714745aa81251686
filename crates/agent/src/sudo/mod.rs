//! `sudo` where the kernel honours no setuid bit.
//!
//! gVisor runs everything with "no new privileges", so the real `sudo` must fail there. The agent is
//! root, so it takes its place: the command's name on the path leads to the agent's executable
//! ([`client`]), which hands its descriptors, folder and variables to the agent ([`server`]); that
//! checks the caller's user by the socket's credentials and starts the command.
//!
//! ```text
//! sudo apt-get …  ── Call + stdin, stdout, stderr ──>  agent (root)  ── fork ──>  apt-get
//!                 <─ Reply::Ended / Reply::Refused ──
//!                 ── Signal (forwarded) ──>
//! ```
//!
//! On a kernel of its own (a microVM) the real one works and is what the name leads to in the end; an image
//! that has none is still served by the agent.
//!
//! Known difference: the command has a session of its own, so a shell started by it has no job control.

mod args;
pub mod client;
pub mod server;

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

/// Beside the awake locks' socket.
const SOCKET_DIR: &str = crate::awake::RUN_DIR;
const SOCKET: &str = "sudo.sock";
/// The name that leads here.
pub const NAME: &str = "sudo";
/// The image's own, which needs a kernel that honours setuid bits.
const REAL: &str = "/usr/bin/sudo";

/// True where the real `sudo` can do its work.
fn real_works() -> bool {
    use std::os::unix::fs::MetadataExt as _;
    const SETUID: u32 = 0o4000;
    let honoured = !rustix::thread::no_new_privs().unwrap_or(true);
    honoured
        && std::fs::metadata(REAL)
            .is_ok_and(|file| file.is_file() && file.uid() == 0 && file.mode() & SETUID != 0)
}

/// What the caller wants run; its standard descriptors travel beside it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
struct Call {
    /// Whom to become.
    user: String,
    /// Empty: the user's shell.
    command: Vec<String>,
    /// Start in the user's home with a login shell.
    login: bool,
    cwd: String,
    env: BTreeMap<String, String>,
    /// `-E`: keep the caller's variables.
    keep_env: bool,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
enum Reply {
    Ended { code: i32 },
    Killed { signal: i32 },
    Refused { message: String },
}

/// A signal that the caller got and passes on.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
struct Forward {
    signal: i32,
}
