//! Processes that outlive their parent.

use std::io;
use std::os::unix::process::CommandExt;
use std::process::Command;

/// Makes the command start in a session of its own, so that no terminal's signals reach it.
#[allow(unsafe_code, reason = "std offers no safe way to call setsid(2) between fork and exec")]
pub fn in_new_session(command: &mut Command) -> &mut Command {
    let setsid = || -> io::Result<()> { rustix::process::setsid().map(drop).map_err(io::Error::from) };
    // SAFETY: the closure makes one system call and allocates nothing, so it may run between fork and
    // exec of a process with several threads.
    unsafe { command.pre_exec(setsid) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_session_is_its_own() {
        let mut child =
            in_new_session(Command::new("cat").stdin(std::process::Stdio::piped())).spawn().unwrap();
        let stat = std::fs::read_to_string(format!("/proc/{}/stat", child.id())).unwrap();
        let session = stat.rsplit_once(')').unwrap().1.split_whitespace().nth(3).unwrap().to_owned();
        assert_eq!(session, child.id().to_string());
        child.kill().unwrap();
        child.wait().unwrap();
    }
}
