//! Stands in for monitors and keepers: processes that only sleep, and a thread that speaks their protocols
//! on the sockets in their folders.

use std::collections::HashMap;
use std::io::{Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use dormouse_vmm::control::{
    Answer, Checkpointed, ErrorCode, Forked, PROTOCOL_VERSION, Request, SOCKET, SnapshotFile, State, Status,
};
use dormouse_wire::keeper::{self, CONTROL_SOCKET, KEEPER_VERSION};
use serde::Serialize;
use serde::de::DeserializeOwned;

use super::super::layout::Layout;
use crate::keepers::Keeper;

const LOOK: Duration = Duration::from_millis(2);

#[derive(Default)]
pub struct World {
    /// What each monitor's guest does.
    pub guests: HashMap<PathBuf, State>,
    /// Requests by name that are to fail once, with this.
    pub failures: HashMap<&'static str, (ErrorCode, String)>,
    /// What was asked, in order.
    pub asked: Vec<String>,
}

#[derive(Clone)]
pub struct Fake {
    world: Arc<Mutex<World>>,
    end: Arc<AtomicBool>,
}

impl Fake {
    /// Serves every folder that appears below the layout's, until it is dropped.
    pub fn start(layout: Layout) -> Self {
        let fake = Self { world: Arc::default(), end: Arc::default() };
        let serving = fake.clone();
        std::thread::spawn(move || {
            let mut served: HashMap<PathBuf, ()> = HashMap::new();
            while !serving.end.load(Ordering::Relaxed) {
                for (parent, socket) in [
                    (layout.runtimes(), SOCKET),
                    (layout.zygotes(), SOCKET),
                    (layout.keepers(), CONTROL_SOCKET),
                ] {
                    for dir in
                        std::fs::read_dir(parent).into_iter().flatten().flatten().map(|entry| entry.path())
                    {
                        // A dead keeper does not listen anew.
                        if socket == CONTROL_SOCKET && !keeper_lives(&dir) {
                            continue;
                        }
                        // A keeper's folder is there again after its keeper was replaced.
                        if served.insert(dir.join(socket), ()).is_none() || !dir.join(socket).exists() {
                            serving.listen(&dir, socket);
                        }
                    }
                }
                std::thread::sleep(LOOK);
            }
        });
        fake
    }

    pub fn stop(&self) {
        self.end.store(true, Ordering::Relaxed);
    }

    pub fn world(&self) -> MutexGuard<'_, World> {
        self.world.lock().unwrap()
    }

    pub fn fail(&self, request: &'static str, code: ErrorCode, message: &str) {
        self.world().failures.insert(request, (code, message.to_owned()));
    }

    pub fn was_asked(&self, what: &str) -> bool {
        self.world().asked.iter().any(|asked| asked == what)
    }

    fn listen(&self, dir: &Path, socket: &str) {
        let Ok(listener) = UnixListener::bind(dir.join(socket)) else { return };
        let (fake, dir, is_keeper) = (self.clone(), dir.to_owned(), socket == CONTROL_SOCKET);
        std::thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                let (fake, dir) = (fake.clone(), dir.clone());
                std::thread::spawn(move || {
                    if is_keeper { fake.be_keeper(&dir, stream) } else { fake.be_monitor(&dir, stream) }
                });
            }
        });
    }

    fn be_keeper(&self, dir: &Path, mut stream: UnixStream) {
        while let Some(request) = read::<keeper::Request>(&mut stream) {
            let sandbox = dir.file_name().unwrap().to_str().unwrap().parse().unwrap();
            let answer = match request {
                keeper::Request::Hello => keeper::Answer::Hello { version: KEEPER_VERSION, pid: 1, sandbox },
                // The process behind it sleeps on: it is killed.
                keeper::Request::Shutdown => keeper::Answer::Failed { message: "not by asking".to_owned() },
                other => {
                    let name = format!("{other:?}");
                    self.world().asked.push(format!("keeper {}", name.split(' ').next().unwrap()));
                    keeper::Answer::Done
                }
            };
            write(&mut stream, &answer);
        }
    }

    fn be_monitor(&self, dir: &Path, mut stream: UnixStream) {
        while let Some(request) = read::<Request>(&mut stream) {
            let name = name_of(&request);
            let failed = {
                let mut world = self.world();
                world.asked.push(name.to_owned());
                world.failures.remove(name)
            };
            let answer = match failed {
                Some((code, message)) => Answer::Error { code, message },
                None => self.answer(dir, request),
            };
            write(&mut stream, &answer);
        }
    }

    fn set(&self, dir: &Path, state: State) -> Answer {
        self.world().guests.insert(dir.to_owned(), state);
        Answer::Done {}
    }

    fn answer(&self, dir: &Path, request: Request) -> Answer {
        match request {
            Request::Hello {} => Answer::Hello { version: PROTOCOL_VERSION, pid: 1 },
            Request::Boot { .. } | Request::Resume {} => self.set(dir, State::Running),
            Request::Restore { .. } | Request::Pause {} => self.set(dir, State::Paused),
            Request::Carrier {} | Request::Stop {} => Answer::Done {},
            Request::Status {} => {
                let state = self.world().guests.get(dir).copied().unwrap_or(State::Empty);
                Answer::Status(Status { state, vcpus: 1, memory_mib: 128, cpu_us: 0, scribes: 0 })
            }
            Request::Checkpoint { into } => checkpoint(&into),
            Request::CheckpointHold { into } => {
                self.set(dir, State::Paused);
                checkpoint(&into)
            }
            Request::Fork { children } => {
                let mut pids = Vec::new();
                for child in children {
                    self.set(&child.dir, State::Paused);
                    // A child listens before its fork is answered; whoever binds first serves.
                    self.listen(&child.dir, SOCKET);
                    // Told from other processes by what it names.
                    let mut process = Command::new("tail");
                    process
                        .args(["-f", "/dev/null"])
                        .arg(child.dir.join("meta.json"))
                        .stdout(Stdio::null())
                        .stderr(Stdio::null());
                    let mut process = process.spawn().unwrap();
                    pids.push(process.id());
                    std::thread::spawn(move || process.wait());
                }
                Answer::Forked(Forked { stopped_us: 1500, pids })
            }
        }
    }
}

fn keeper_lives(dir: &Path) -> bool {
    let sandbox = dir.file_name().and_then(|name| name.to_str()?.parse().ok());
    sandbox.is_some_and(|sandbox| Keeper { dir: dir.to_owned(), sandbox }.process().is_some())
}

fn checkpoint(into: &Path) -> Answer {
    let files = ["devices", "memory.0", "disk.0.0"].map(|name| {
        std::fs::write(into.join(name), name).unwrap();
        SnapshotFile { name: name.to_owned(), bytes: 8, shared: false }
    });
    Answer::Checkpointed(Checkpointed { stopped_us: 700, memory_bytes: 8, files: files.into() })
}

fn name_of(request: &Request) -> &'static str {
    match request {
        Request::Hello {} => "hello",
        Request::Boot { .. } => "boot",
        Request::Restore { .. } => "restore",
        Request::Pause {} => "pause",
        Request::Resume {} => "resume",
        Request::Checkpoint { .. } => "checkpoint",
        Request::CheckpointHold { .. } => "checkpoint_hold",
        Request::Fork { .. } => "fork",
        Request::Carrier {} => "carrier",
        Request::Status {} => "status",
        Request::Stop {} => "stop",
    }
}

/// Both protocols have the same frames.
fn read<T: DeserializeOwned>(stream: &mut UnixStream) -> Option<T> {
    let mut length = [0; 4];
    stream.read_exact(&mut length).ok()?;
    let mut body = vec![0; u32::from_le_bytes(length) as usize];
    stream.read_exact(&mut body).ok()?;
    Some(serde_json::from_slice(&body).unwrap())
}

fn write(stream: &mut UnixStream, answer: &impl Serialize) {
    let body = serde_json::to_vec(answer).unwrap();
    let length = u32::try_from(body.len()).unwrap().to_le_bytes();
    drop(stream.write_all(&[&length[..], &body].concat()));
}
