//! Keeps the pipes and relays them to whoever connects to `agent.sock`.

use std::collections::VecDeque;
use std::fs::File;
use std::io::{Read, Write};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::{Arc, Condvar, Mutex};
use std::time::Duration;

use dormouse_types::{Generation, SandboxId};
use dormouse_wire::keeper::{
    AGENT_SOCKET, Answer, CONTROL_SOCKET, Carrier, KEEPER_VERSION, Request, Session, Status,
};

struct Pipes {
    input: File,
    output: File,
    guest_input: File,
    guest_output: File,
}

#[derive(Default)]
struct State {
    pipes: Option<Pipes>,
    attached: bool,
    generation: Generation,
    to_guest: VecDeque<u8>,
    from_guest: VecDeque<u8>,
    bytes_out: u64,
}

type Shared = Arc<(Mutex<State>, Condvar)>;

pub fn run(arguments: &[String]) -> ExitCode {
    let value = |name: &str| {
        let at = arguments.iter().position(|argument| argument == name).expect("the argument is given");
        arguments[at + 1].clone()
    };
    let dir = PathBuf::from(value("--dir"));
    let sandbox: SandboxId = value("--sandbox").parse().expect("an id");
    let shared = Shared::default();
    let agent = dormouse_sys::unix::bind(&dir, AGENT_SOCKET).expect("the agent's socket can be bound");
    let control = dormouse_sys::unix::bind(&dir, CONTROL_SOCKET).expect("the control socket can be bound");
    let moving = Arc::clone(&shared);
    std::thread::spawn(move || move_bytes(&moving));
    let serving = Arc::clone(&shared);
    std::thread::spawn(move || {
        for client in agent.incoming() {
            serve(client.expect("a client"), &serving);
        }
    });
    for client in control.incoming() {
        if control_client(client.expect("a client"), &shared, &sandbox) {
            break;
        }
    }
    ExitCode::SUCCESS
}

/// Moves bytes while attached, never while not: the lock is held for each move.
fn move_bytes(shared: &Shared) {
    loop {
        let mut state = shared.0.lock().expect("the lock is sound");
        let mut moved = false;
        if state.attached {
            let state = &mut *state;
            let pipes = state.pipes.as_mut().expect("attached to pipes");
            let mut buffer = [0_u8; 65536];
            if let Ok(bytes) = pipes.output.read(&mut buffer) {
                state.from_guest.extend(&buffer[..bytes]);
                state.bytes_out += bytes as u64;
                moved = bytes > 0;
            }
            let (next, _) = state.to_guest.as_slices();
            if !next.is_empty()
                && let Ok(bytes) = pipes.input.write(next)
            {
                state.to_guest.drain(..bytes);
                moved = true;
            }
        }
        shared.1.notify_all();
        drop(state);
        if !moved {
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}

fn serve(client: UnixStream, shared: &Shared) {
    let mut reader = client.try_clone().expect("a second handle");
    let input = Arc::clone(shared);
    std::thread::spawn(move || {
        let mut buffer = [0_u8; 4096];
        while let Ok(bytes @ 1..) = reader.read(&mut buffer) {
            input.0.lock().expect("the lock is sound").to_guest.extend(&buffer[..bytes]);
        }
    });
    let mut client = client;
    loop {
        let mut state = shared.0.lock().expect("the lock is sound");
        while state.from_guest.is_empty() {
            state = shared.1.wait(state).expect("the lock is sound");
        }
        let bytes: Vec<u8> = state.from_guest.drain(..).collect();
        drop(state);
        if client.write_all(&bytes).is_err() {
            return;
        }
    }
}

/// True: the keeper is to end.
fn control_client(mut client: UnixStream, shared: &Shared, sandbox: &SandboxId) -> bool {
    let mut length = [0_u8; 4];
    let Ok((got, mut fds)) = dormouse_sys::fds::recv_with_fds(&client, &mut length) else { return false };
    if got == 0 || client.read_exact(&mut length[got..]).is_err() {
        return false;
    }
    let mut body = vec![0_u8; u32::from_le_bytes(length) as usize];
    let (got, more) = dormouse_sys::fds::recv_with_fds(&client, &mut body).expect("a body");
    fds.extend(more);
    client.read_exact(&mut body[got..]).expect("the rest of the body");
    let request: Request = serde_json::from_slice(&body).expect("a request");
    let shutdown = request == Request::Shutdown;
    let answer = answer(request, fds, shared, sandbox);
    let body = serde_json::to_vec(&answer).expect("an answer");
    let length = u32::try_from(body.len()).expect("a short answer");
    client
        .write_all(&length.to_le_bytes())
        .and_then(|()| client.write_all(&body))
        .expect("the answer is read");
    shutdown
}

fn answer(request: Request, fds: Vec<OwnedFd>, shared: &Shared, sandbox: &SandboxId) -> Answer {
    let mut state = shared.0.lock().expect("the lock is sound");
    match request {
        Request::Hello => {
            Answer::Hello { version: KEEPER_VERSION, pid: std::process::id(), sandbox: sandbox.clone() }
        }
        Request::Attach { generation, session } => {
            attach(&mut state, fds, session);
            state.generation = generation;
            Answer::Done
        }
        Request::Detach | Request::Reattach => {
            state.attached = request == Request::Reattach && state.pipes.is_some();
            Answer::Done
        }
        Request::Status => Answer::Status(Status {
            carrier: if state.attached { Carrier::Up } else { Carrier::Detached },
            generation: state.generation,
            ingress_open: 0,
            egress_open: 0,
            last_activity_ms: 0,
            bytes_in: 0,
            bytes_out: state.bytes_out,
            egress_denied: 0,
        }),
        Request::Network | Request::Tap => Answer::Failed { message: "there is no network here".to_owned() },
        Request::SetEgress { .. } | Request::Shutdown => Answer::Done,
    }
}

fn attach(state: &mut State, fds: Vec<OwnedFd>, session: Session) {
    let [input, output, guest_input, guest_output]: [File; 4] =
        fds.into_iter().map(File::from).collect::<Vec<_>>().try_into().expect("four descriptors");
    let mut pipes = Pipes { input, output, guest_input, guest_output };
    for end in [&pipes.input, &pipes.output] {
        rustix::io::ioctl_fionbio(end, true).expect("non-blocking");
    }
    if let Some(mut old) = state.pipes.take().filter(|_| session == Session::Continue) {
        rustix::io::ioctl_fionbio(&old.guest_input, true).expect("non-blocking");
        let mut pending = Vec::new();
        let _ = old.guest_input.read_to_end(&mut pending);
        pipes.input.write_all(&pending).expect("the new pipe has room");
        let mut unread = Vec::new();
        let _ = old.output.read_to_end(&mut unread);
        state.from_guest.extend(unread);
        drop(old.guest_output);
    } else {
        state.to_guest.clear();
        state.from_guest.clear();
    }
    state.pipes = Some(pipes);
    state.attached = true;
}
